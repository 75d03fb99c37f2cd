//! Rotation of the master key while no broker runs. Afterwards every sandbox's next token key is derived from the new
//! one.
//!
//! The new key is written durably beside the old one before the database names it, and replaces the old one after that.
//! If the rotation is interrupted, the next start finishes it.

use std::path::PathBuf;

use cobox_protocol::Timestamp;
use cobox_token::MasterKey;

use crate::{
    StartError,
    audit_hash::seal,
    config::Config,
    data_dir::{DataDir, DataDirError},
    domain::{model::AuditRecord, token_signer::LONGEST_TOKEN_LIFE},
    open_store,
    store::{AuditSeal, ChainHead, MasterRotated, MasterRotation, Store},
};

/// Store entry with the fingerprint of the key that all brokers on a database share.
pub const FINGERPRINT_ENTRY: &str = "master_key";
/// Store entry with the status of the previous key.
const PREVIOUS: &str = "previous_master_key";
/// Tokens of the previous key stay valid until they expire.
const STATUS_VALID: &str = "kept";
/// The previous key must no longer be used.
const STATUS_REVOKED: &str = "condemned";

#[derive(Clone, Copy, Debug, Default)]
pub struct MasterKeyRotation {
    /// End all tokens now, instead of when they expire.
    pub is_immediate: bool,
    /// The old key is permanently lost.
    pub is_lost: bool,
}

#[derive(Clone, Debug)]
pub struct RotatedMasterKey {
    pub master_key: PathBuf,
    /// Kept for tokens that are still valid.
    pub previous_key: Option<PathBuf>,
    pub sandboxes: u64,
    pub old_tokens_until: Option<Timestamp>,
}

/// Fails while a broker uses the data directory, or while another broker uses the database.
pub async fn rotate_master_key(config: &Config, params: MasterKeyRotation) -> Result<RotatedMasterKey, StartError> {
    config.validate()?;
    let data_dir = DataDir::open(&config.data_dir)?;
    let store = open_store(config, &data_dir).await?;
    let now = Timestamp::now();
    let node = data_dir.node_id()?;
    store.write_as(&node);
    let is_recent = |seen_at: Timestamp| now.saturating_since(seen_at) < config.node_timeout();
    let alive = store.nodes().await?.into_iter().find(|other| other.id != node && is_recent(other.seen_at));
    if let Some(other) = alive {
        return Err(DataDirError::BrokerAlive { url: other.url, seconds: now.saturating_since(other.seen_at).as_secs() }.into());
    }
    let old = if params.is_lost { None } else { Some(read(&data_dir, &store).await?) };
    let fresh = MasterKey::generate();
    data_dir.write_next_key(&fresh)?;
    let old_until = if params.is_immediate { None } else { Some(now.plus(LONGEST_TOKEN_LIFE)) };
    // Without the lost key, existing seals can't be verified, so they are accepted as they are.
    old.iter().for_each(|old| store.seal_with(old.audit_seal()));
    let seals = seals(store.audit_heads().await?, &fresh.audit_seal());
    let rotation = MasterRotation { seals, ..rotation(&fresh, now, old_until, &config.workspace) };
    let sandboxes = match store.rotate_master(&rotation).await? {
        MasterRotated::Rotated(sandboxes) => sandboxes,
        MasterRotated::TooSoon(until) => {
            data_dir.remove_next_key()?;
            return Err(StartError::TooSoon(until));
        }
    };
    let previous = old.as_ref().filter(|_| !params.is_immediate);
    data_dir.take_next_key(previous)?;
    Ok(RotatedMasterKey {
        master_key: data_dir.master_key_path(),
        previous_key: previous.map(|_| data_dir.previous_key_path()),
        sandboxes,
        old_tokens_until: old_until,
    })
}

fn rotation(fresh: &MasterKey, now: Timestamp, old_until: Option<Timestamp>, workspace: &str) -> MasterRotation {
    let (previous, word) = if old_until.is_some() { (STATUS_VALID, "graceful") } else { (STATUS_REVOKED, "immediate") };
    let audit = AuditRecord::new(now, workspace, "master_key.rotated").detail(format!("{word}, at the broker itself"));
    MasterRotation {
        now,
        old_until,
        agreed: [(FINGERPRINT_ENTRY, fresh.fingerprint()), (PREVIOUS, previous.to_owned())],
        seals: Vec::new(),
        audit,
    }
}

/// Seals again with the new key every chain whose seal was valid under the old one.
fn seals(heads: Vec<ChainHead>, key: &[u8; 32]) -> Vec<AuditSeal> {
    let good = heads.into_iter().filter(|h| h.kept_after > 0 && h.is_beginning_sealed);
    good.map(|h| AuditSeal { seal: seal(key, &h.writer, h.kept_after, &h.kept_after_hash), number: h.kept_after, writer: h.writer })
        .collect()
}

/// The key that this database uses: the one in the file, or the new one of an interrupted rotation.
pub async fn read(data_dir: &DataDir, store: &Store) -> Result<MasterKey, StartError> {
    let key = match data_dir.master_key(store.has_sandboxes(None).await?) {
        Err(missing @ DataDirError::KeyMissing(_)) => return take_agreed(data_dir, store).await?.ok_or_else(|| missing.into()),
        key => key?,
    };
    let fingerprint = key.fingerprint();
    let agreed = store.agree(FINGERPRINT_ENTRY, &fingerprint).await?;
    if agreed == fingerprint {
        return Ok(key);
    }
    match data_dir.next_key()?.filter(|next| next.fingerprint() == agreed) {
        Some(next) => {
            let is_condemned = store.agree(PREVIOUS, STATUS_VALID).await? == STATUS_REVOKED;
            data_dir.take_next_key(Some(&key).filter(|_| !is_condemned))?;
            Ok(next)
        }
        // With any other key, this node's tokens would be invalid on other nodes, and theirs here.
        None => Err(DataDirError::KeyDiffers(data_dir.master_key_path()).into()),
    }
}

/// The new key that was to replace a lost one, if the database already names it.
async fn take_agreed(data_dir: &DataDir, store: &Store) -> Result<Option<MasterKey>, StartError> {
    let Some(next) = data_dir.next_key()? else { return Ok(None) };
    if store.agree(FINGERPRINT_ENTRY, &next.fingerprint()).await? != next.fingerprint() {
        return Ok(None);
    }
    data_dir.take_next_key(None)?;
    Ok(Some(next))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_interrupted_replacement_is_finished_and_an_unknown_key_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let config = Config { data_dir: dir.path().to_owned(), ..Config::default() };
        let data_dir = DataDir::open(dir.path()).unwrap();
        let store = open_store(&config, &data_dir).await.unwrap();
        let old = read(&data_dir, &store).await.unwrap();
        // If only the file exists, the rotation has not taken effect.
        let fresh = MasterKey::generate();
        data_dir.write_next_key(&fresh).unwrap();
        assert_eq!(read(&data_dir, &store).await.unwrap().expose(), old.expose());
        let now = Timestamp::now();
        store.rotate_master(&rotation(&fresh, now, Some(now.plus(LONGEST_TOKEN_LIFE)), "default")).await.unwrap();
        assert_eq!(read(&data_dir, &store).await.unwrap().expose(), fresh.expose());
        assert_eq!(data_dir.master_key(true).unwrap().expose(), fresh.expose());
        assert_eq!(data_dir.previous_key(LONGEST_TOKEN_LIFE).unwrap().unwrap().expose(), old.expose());
        assert!(data_dir.next_key().unwrap().is_none());
        std::fs::write(data_dir.master_key_path(), [1; 32]).unwrap();
        assert!(matches!(read(&data_dir, &store).await, Err(StartError::DataDir(DataDirError::KeyDiffers(_)))));
    }

    #[tokio::test]
    async fn an_interrupted_immediate_replacement_keeps_no_revoked_key() {
        let dir = tempfile::tempdir().unwrap();
        let config = Config { data_dir: dir.path().to_owned(), ..Config::default() };
        let data_dir = DataDir::open(dir.path()).unwrap();
        let store = open_store(&config, &data_dir).await.unwrap();
        read(&data_dir, &store).await.unwrap();
        let fresh = MasterKey::generate();
        data_dir.write_next_key(&fresh).unwrap();
        store.rotate_master(&rotation(&fresh, Timestamp::now(), None, "default")).await.unwrap();
        assert_eq!(read(&data_dir, &store).await.unwrap().expose(), fresh.expose());
        assert!(data_dir.previous_key(LONGEST_TOKEN_LIFE).unwrap().is_none());
    }

    #[test]
    fn the_previous_key_is_removed_when_none_of_its_tokens_can_be_valid() {
        let dir = tempfile::tempdir().unwrap();
        let data_dir = DataDir::open(dir.path()).unwrap();
        data_dir.write_next_key(&MasterKey::generate()).unwrap();
        data_dir.take_next_key(Some(&MasterKey::generate())).unwrap();
        assert!(data_dir.previous_key(LONGEST_TOKEN_LIFE).unwrap().is_some());
        let long_ago = std::time::SystemTime::now() - 2 * LONGEST_TOKEN_LIFE;
        std::fs::File::options().write(true).open(data_dir.previous_key_path()).unwrap().set_modified(long_ago).unwrap();
        assert!(data_dir.previous_key(LONGEST_TOKEN_LIFE).unwrap().is_none());
        assert!(!data_dir.previous_key_path().exists());
    }
}
