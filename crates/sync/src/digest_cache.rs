//! Digests of a folder's files from earlier scans. A file whose stamp has not changed is not read again, even by
//! another run or over another connection. Losing the cache only costs time.

use std::{
    collections::HashMap,
    fs::{File, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::OpenOptionsExt,
    path::Path,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use crate::{
    codec::{Decoder, Encoder, Malformed},
    entry::{Digest, Entry},
    file_stamp::Stamp,
    path::RelPath,
    tree::Tree,
};

const MAGIC: &[u8] = b"cobox sync files 1\n";
const CHECKSUM_BYTES: usize = 32;
/// Maximum size of a cache file, in bytes: a million names of usual length.
const MAX_FILE_BYTES: u64 = 512 * 1024 * 1024;
/// After a reboot, only files that were unchanged for this long before the save are trusted: after a crash the disk may
/// have a file's new times without its content.
const WRITEBACK_MARGIN: Duration = Duration::from_secs(120);

/// Files by path, with the stamp that they had when their content was read.
#[derive(Clone, Debug, Default)]
pub struct DigestCache(HashMap<RelPath, (Entry, Stamp)>);

impl DigestCache {
    /// The entries whose stamps can be trusted later.
    pub fn of(tree: &Tree, stamps: &HashMap<RelPath, Stamp>) -> Self {
        let settled = |(path, entry): (&RelPath, &Entry)| {
            let stamp = stamps.get(path).filter(|stamp| entry.is_file() && stamp.is_settled())?;
            Some((path.clone(), (entry.clone(), *stamp)))
        };
        Self(tree.iter().filter_map(settled).collect())
    }

    pub fn get(&self, path: &RelPath) -> Option<(&Entry, &Stamp)> {
        self.0.get(path).map(|(entry, stamp)| (entry, stamp))
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Loads a cache; empty if there is none or if it is damaged.
    pub fn load(path: &Path) -> Self {
        read(path).unwrap_or_default()
    }

    pub fn save(&self, path: &Path) -> io::Result<()> {
        let mut out = Encoder(MAGIC.to_vec());
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        out.bytes(&boot_id()).u64(now.as_secs());
        for (path, (entry, stamp)) in &self.0 {
            if let Entry::File { digest, .. } = entry {
                out.path(path).raw(&digest.0);
                stamp.write(&mut out);
            }
        }
        let check = blake3::hash(&out.0);
        out.raw(check.as_bytes());
        let temporary = path.with_extension("files-new");
        OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&temporary)?.write_all(&out.0)?;
        std::fs::rename(temporary, path)
    }
}

fn read(path: &Path) -> Option<DigestCache> {
    let mut bytes = Vec::new();
    File::open(path).ok()?.take(MAX_FILE_BYTES).read_to_end(&mut bytes).ok()?;
    let (body, check) = bytes.split_at_checked(bytes.len().checked_sub(CHECKSUM_BYTES)?)?;
    if blake3::hash(body).as_bytes() != check {
        return None;
    }
    let mut input = Decoder(body.strip_prefix(MAGIC)?);
    let (saved_boot, saved) = (input.bytes().ok()?, input.u64().ok()?);
    let is_same_boot = saved_boot == boot_id() && !saved_boot.is_empty();
    let written_back_before = saved.saturating_sub(WRITEBACK_MARGIN.as_secs());
    let files = input.all(decode_file).ok()?;
    let trusted = files.into_iter().filter(|(_, (_, stamp))| is_same_boot || stamp.is_older_than(written_back_before));
    Some(DigestCache(trusted.collect()))
}

fn decode_file(input: &mut Decoder) -> Result<(RelPath, (Entry, Stamp)), Malformed> {
    let (path, digest) = (input.path()?, Digest(input.array()?));
    let stamp = Stamp::read(input)?;
    Ok((path, (Entry::File { digest, size: stamp.size(), exec: stamp.is_executable() }, stamp)))
}

/// Changes with every boot; empty if it is not available.
fn boot_id() -> Vec<u8> {
    std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_saved_cache_is_loaded_and_a_damaged_one_is_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let (file, saved) = (folder.path().join("f"), folder.path().join("memory"));
        std::fs::write(&file, b"content").unwrap();
        let stat = rustix::fs::stat(&file).unwrap();
        let path = RelPath::new(b"f").unwrap();
        let entry = Entry::File { digest: Digest::of(b"content"), size: 7, exec: false };
        let tree: Tree = [(path.clone(), entry.clone())].into_iter().collect();
        let at = |seen| [(path.clone(), Stamp::of(&stat, seen))].into_iter().collect();
        assert!(DigestCache::of(&tree, &at(SystemTime::now() - Duration::from_secs(1))).is_empty(), "too recent to be trusted");
        let digest_cache = DigestCache::of(&tree, &at(SystemTime::now() + Duration::from_secs(1)));
        digest_cache.save(&saved).unwrap();
        let loaded = DigestCache::load(&saved);
        let (known, stamp) = loaded.get(&path).unwrap();
        assert!(*known == entry && stamp.is_unchanged(&Stamp::of(&stat, SystemTime::now())));
        let mut bytes = std::fs::read(&saved).unwrap();
        bytes[40] ^= 1;
        std::fs::write(&saved, bytes).unwrap();
        assert!(DigestCache::load(&saved).is_empty() && DigestCache::load(&folder.path().join("none")).is_empty());
    }
}
