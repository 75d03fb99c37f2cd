//! Stores API keys between runs: in the system's keyring if one is available, else in a file that only its owner can
//! read.

use std::{
    fs::{DirBuilder, File, Permissions},
    io::Read,
    os::unix::fs::{DirBuilderExt, PermissionsExt},
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use cobox_protocol::Secret;

use crate::{contexts::KeyLocation, data_dir::write_key, failure::Failure, keyring::Account};

/// Longest key file read, in bytes: a key has 74 characters, and the bound keeps a wrong file from being read whole.
const MAX_KEY_FILE_BYTES: u64 = 4096;
/// Permission bits for users other than the file's owner.
const GROUP_AND_OTHERS: u32 = 0o077;
const OWNER_ONLY: u32 = 0o600;

/// Where a new key should go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum KeyStore {
    /// The system's keyring (Secret Service)
    Keyring,
    /// A file next to the config file that only you can read
    File,
}

/// Who named the key file; this decides how a file that other users can read is handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyFileOrigin {
    /// The config, which cobox protects: the file is made private, or not used.
    Config,
    /// A flag or the environment. Some files, such as a container's secrets, can't be private, so this is only a
    /// warning.
    Caller,
}

/// A key, and a warning about it for the user.
#[derive(Debug)]
pub struct StoredKey {
    pub key: Secret,
    pub warning: Option<String>,
}

/// Stores a context's key. Returns where, and why not in the keyring unless a file was requested.
pub fn store_key(
    account: &Account,
    config: &Path,
    key: &Secret,
    requested: Option<KeyStore>,
) -> Result<(KeyLocation, Option<String>), Failure> {
    let keyring_refusal = match requested {
        Some(KeyStore::File) => None,
        Some(KeyStore::Keyring) | None => match account.store(key) {
            Ok(()) => return Ok((KeyLocation::Keyring, None)),
            Err(reason) if requested.is_some() => {
                return Err(Failure::new(format!("storing the key in the keyring: {reason}"))
                    .with_advice("omit `--store keyring` to store it in a file that only you can read"));
            }
            Err(reason) => Some(reason),
        },
    };
    let path = key_file_path(config, &account.context);
    let folder = path.parent().unwrap_or(Path::new("."));
    DirBuilder::new().recursive(true).mode(0o700).create(folder).with_context(|| format!("creating {}", folder.display()))?;
    write_key(&path, key)?;
    Ok((KeyLocation::File(path), keyring_refusal))
}

/// Reads a context's key from its storage.
pub fn read_key(account: &Account, location: &KeyLocation) -> Result<StoredKey, Failure> {
    match location {
        KeyLocation::File(path) => read_file(path, KeyFileOrigin::Config),
        KeyLocation::Keyring => match account.read() {
            Ok(Some(key)) => Ok(StoredKey { key, warning: None }),
            Ok(None) => Err(Failure::new(format!("the keyring has no key for context `{}` ({})", account.context, account.url))
                .with_advice(format!("add it again with `cobox config add {} --url {}`", account.context, account.url))),
            Err(reason) => Err(Failure::new(format!("reading the API key of context `{}`: {reason}", account.context))
                .with_advice("unlock the keyring, or set COBOX_API_KEY")),
        },
    }
}

/// Removes a key that [`store_key`] stored; a file that the user named is kept.
pub fn delete_key(account: &Account, config: &Path, location: &KeyLocation) -> Result<(), Failure> {
    match location {
        KeyLocation::Keyring => account
            .delete()
            .map_err(|reason| Failure::new(format!("removing the key of context `{}` from the keyring: {reason}", account.context))),
        KeyLocation::File(path) if *path == key_file_path(config, &account.context) => match std::fs::remove_file(path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Failure::new(format!("removing {}: {e}", path.display()))),
            _ => Ok(()),
        },
        KeyLocation::File(_) => Ok(()),
    }
}

fn key_file_path(config: &Path, context: &str) -> PathBuf {
    config.with_file_name("keys").join(context)
}

pub fn read_file(path: &Path, origin: KeyFileOrigin) -> Result<StoredKey, Failure> {
    let context = || format!("reading the API key from {}", path.display());
    let file = File::open(path).with_context(context)?;
    let warning = check_permissions(path, &file, origin)?;
    let mut text = String::new();
    file.take(MAX_KEY_FILE_BYTES).read_to_string(&mut text).with_context(context)?;
    Ok(StoredKey {
        key: parse_key(&text).map_err(|reason| Failure::new(format!("{} contains no API key: {reason}", path.display())))?,
        warning,
    })
}

/// Parses a key that a user wrote, pasted or piped.
pub fn parse_key(text: &str) -> Result<Secret, &'static str> {
    match text.trim() {
        "" => Err("the key is empty"),
        text if !text.bytes().all(|b| b.is_ascii_graphic()) => Err("a key is a single word that starts with cbx_"),
        key => Ok(Secret::new(key)),
    }
}

fn check_permissions(path: &Path, file: &File, origin: KeyFileOrigin) -> Result<Option<String>, Failure> {
    let metadata = file.metadata().with_context(|| format!("checking {}", path.display()))?;
    let mode = metadata.permissions().mode() & 0o777;
    // A pipe, for example from `<(…)`, is not accessible to other users.
    if mode & GROUP_AND_OTHERS == 0 || !metadata.is_file() {
        return Ok(None);
    }
    let shown = path.display();
    match origin {
        KeyFileOrigin::Caller => {
            Ok(Some(format!("note: other users of this machine can read the API key in {shown} (mode {mode:o}); run `chmod 600` on it")))
        }
        KeyFileOrigin::Config => match file.set_permissions(Permissions::from_mode(OWNER_ONLY)) {
            Ok(()) => Ok(Some(format!(
                "note: other users of this machine could read the API key in {shown} (mode {mode:o}); its mode is now 600, but consider replacing the key"
            ))),
            Err(e) => {
                Err(Failure::new(format!("the API key in {shown} is not used, because other users of this machine can read it (mode {mode:o}) and its mode can't be changed: {e}"))
                    .with_advice(format!("its owner can run `chmod 600 {shown}`; consider replacing the key")))
            }
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        path.metadata().unwrap().permissions().mode() & 0o777
    }

    fn account(context: &str) -> Account {
        Account { context: context.to_owned(), url: "http://x".to_owned() }
    }

    #[test]
    fn a_key_file_is_private_and_is_removed_with_its_context() {
        let dir = tempfile::tempdir().unwrap();
        let config = dir.path().join("config.toml");
        let (location, reason) = store_key(&account("prod"), &config, &Secret::new("cbx_x"), Some(KeyStore::File)).unwrap();
        let KeyLocation::File(path) = &location else { panic!("{location:?}") };
        assert_eq!((reason, mode(path), mode(path.parent().unwrap())), (None, 0o600, 0o700));
        assert_eq!(read_key(&account("prod"), &location).unwrap().key.expose(), "cbx_x");
        delete_key(&account("prod"), &config, &location).unwrap();
        assert!(!path.exists());
        delete_key(&account("prod"), &config, &location).unwrap();
    }

    #[test]
    fn a_key_file_given_by_the_user_is_not_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("mine");
        std::fs::write(&path, "cbx_x").unwrap();
        delete_key(&account("prod"), &dir.path().join("config.toml"), &KeyLocation::File(path.clone())).unwrap();
        assert!(path.exists());
    }

    #[test]
    fn a_readable_key_file_is_made_private_if_configured_and_reported_otherwise() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        std::fs::write(&path, "cbx_x").unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        let found = read_file(&path, KeyFileOrigin::Caller).unwrap();
        assert!(found.warning.unwrap().contains("chmod 600"));
        assert_eq!(mode(&path), 0o644);
        let found = read_file(&path, KeyFileOrigin::Config).unwrap();
        assert!(found.warning.unwrap().contains("could read"));
        assert_eq!(mode(&path), 0o600);
        assert!(read_file(&path, KeyFileOrigin::Config).unwrap().warning.is_none());
    }
}
