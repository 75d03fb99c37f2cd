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

use crate::{contexts::KeyPlace, data_dir::write_key, failure::Failure, keyring::Account};

/// Longest key file read, in bytes: a key has 74 characters, and the bound keeps a wrong file from being read whole.
const MAX_KEY_FILE: u64 = 4096;
/// Permission bits for users other than the file's owner.
const FOR_OTHERS: u32 = 0o077;
const OWNER_ALONE: u32 = 0o600;

/// Where a new key should go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Store {
    /// The system's keyring (Secret Service)
    Keyring,
    /// A file beside the config, readable by you alone
    File,
}

/// Who named the key file; this decides how a file that other users can read is handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NamedBy {
    /// The config, which cobox protects: the file is made private, or not used.
    Config,
    /// A flag or the environment. Some files, such as a container's secrets, can't be private, so this is only a
    /// warning.
    Caller,
}

/// A key, and a warning about it for the user.
#[derive(Debug)]
pub struct Found {
    pub key: Secret,
    pub note: Option<String>,
}

/// Stores a context's key. Returns where, and why not in the keyring unless a file was requested.
pub fn keep(account: &Account, config: &Path, key: &Secret, wish: Option<Store>) -> Result<(KeyPlace, Option<String>), Failure> {
    let refusal = match wish {
        Some(Store::File) => None,
        Some(Store::Keyring) | None => match account.store(key) {
            Ok(()) => return Ok((KeyPlace::Keyring, None)),
            Err(why) if wish.is_some() => {
                return Err(Failure::new(format!("the key could not be kept in the keyring: {why}"))
                    .with_advice("leave out `--store keyring` to keep it in a file that only you can read"));
            }
            Err(why) => Some(why),
        },
    };
    let path = file_of(config, &account.context);
    let folder = path.parent().unwrap_or(Path::new("."));
    DirBuilder::new().recursive(true).mode(0o700).create(folder).with_context(|| format!("making {}", folder.display()))?;
    write_key(&path, key)?;
    Ok((KeyPlace::File(path), refusal))
}

/// Reads a context's key from its storage.
pub fn read(account: &Account, place: &KeyPlace) -> Result<Found, Failure> {
    match place {
        KeyPlace::File(path) => read_file(path, NamedBy::Config),
        KeyPlace::Keyring => match account.read() {
            Ok(Some(key)) => Ok(Found { key, note: None }),
            Ok(None) => Err(Failure::new(format!("the keyring has no key of context `{}` for {}", account.context, account.url))
                .with_advice(format!("`cobox config add {} --url {}` takes it again", account.context, account.url))),
            Err(why) => Err(Failure::new(format!("the API key of context `{}` can't be had: {why}", account.context))
                .with_advice("unlock the keyring, or set COBOX_API_KEY for this once")),
        },
    }
}

/// Removes a key that [`keep`] stored; a file that the user named is kept.
pub fn forget(account: &Account, config: &Path, place: &KeyPlace) -> Result<(), Failure> {
    match place {
        KeyPlace::Keyring => account
            .delete()
            .map_err(|why| Failure::new(format!("the key of context `{}` could not be removed from the keyring: {why}", account.context))),
        KeyPlace::File(path) if *path == file_of(config, &account.context) => match std::fs::remove_file(path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Failure::new(format!("removing {}: {e}", path.display()))),
            _ => Ok(()),
        },
        KeyPlace::File(_) => Ok(()),
    }
}

fn file_of(config: &Path, context: &str) -> PathBuf {
    config.with_file_name("keys").join(context)
}

pub fn read_file(path: &Path, named_by: NamedBy) -> Result<Found, Failure> {
    let reading = || format!("reading the API key from {}", path.display());
    let file = File::open(path).with_context(reading)?;
    let note = keep_private(path, &file, named_by)?;
    let mut text = String::new();
    file.take(MAX_KEY_FILE).read_to_string(&mut text).with_context(reading)?;
    Ok(Found { key: parse(&text).map_err(|why| Failure::new(format!("{} holds no API key: {why}", path.display())))?, note })
}

/// Parses a key that a user wrote, pasted or piped.
pub fn parse(text: &str) -> Result<Secret, &'static str> {
    match text.trim() {
        "" => Err("it is empty"),
        text if !text.bytes().all(|b| b.is_ascii_graphic()) => Err("a key is one word that starts with cbx_"),
        key => Ok(Secret::new(key)),
    }
}

fn keep_private(path: &Path, file: &File, named_by: NamedBy) -> Result<Option<String>, Failure> {
    let meta = file.metadata().with_context(|| format!("looking at {}", path.display()))?;
    let mode = meta.permissions().mode() & 0o777;
    // A pipe, for example from `<(…)`, is not accessible to other users.
    if mode & FOR_OTHERS == 0 || !meta.is_file() {
        return Ok(None);
    }
    let shown = path.display();
    match named_by {
        NamedBy::Caller => {
            Ok(Some(format!("note: others on this machine may read the API key in {shown} (mode {mode:o}); `chmod 600` keeps them out")))
        }
        NamedBy::Config => match file.set_permissions(Permissions::from_mode(OWNER_ALONE)) {
            Ok(()) => Ok(Some(format!(
                "note: others on this machine could read the API key in {shown} (mode {mode:o}); now only you can, and a new key would be safer"
            ))),
            Err(e) => {
                Err(Failure::new(format!("others on this machine can read the API key in {shown} (mode {mode:o}), so it is not used: {e}"))
                    .with_advice(format!("its owner can keep them out with `chmod 600 {shown}`; a new key would be safer still")))
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
    fn a_key_kept_in_a_file_is_its_owner_s_alone_and_is_removed_with_its_context() {
        let dir = tempfile::tempdir().unwrap();
        let config = dir.path().join("config.toml");
        let (place, why) = keep(&account("prod"), &config, &Secret::new("cbx_x"), Some(Store::File)).unwrap();
        let KeyPlace::File(path) = &place else { panic!("{place:?}") };
        assert_eq!((why, mode(path), mode(path.parent().unwrap())), (None, 0o600, 0o700));
        assert_eq!(read(&account("prod"), &place).unwrap().key.expose(), "cbx_x");
        forget(&account("prod"), &config, &place).unwrap();
        assert!(!path.exists());
        forget(&account("prod"), &config, &place).unwrap();
    }

    #[test]
    fn a_file_of_somebody_else_s_is_not_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("mine");
        std::fs::write(&path, "cbx_x").unwrap();
        forget(&account("prod"), &dir.path().join("config.toml"), &KeyPlace::File(path.clone())).unwrap();
        assert!(path.exists());
    }

    #[test]
    fn a_key_file_that_others_can_read_is_mended_where_it_is_the_config_s_and_told_of_where_it_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        std::fs::write(&path, "cbx_x").unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        let found = read_file(&path, NamedBy::Caller).unwrap();
        assert!(found.note.unwrap().contains("chmod 600"));
        assert_eq!(mode(&path), 0o644);
        let found = read_file(&path, NamedBy::Config).unwrap();
        assert!(found.note.unwrap().contains("could read"));
        assert_eq!(mode(&path), 0o600);
        assert!(read_file(&path, NamedBy::Config).unwrap().note.is_none());
    }
}
