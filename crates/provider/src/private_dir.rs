//! Creates directories that other local users can't access, and closes existing ones to them.

use std::{
    fs::{self, DirBuilder, File},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
};

/// Access for the owner only.
const PRIVATE_MODE: u32 = 0o700;
const OTHERS_MASK: u32 = 0o077;
/// Set on directories that many users share, such as /tmp.
const STICKY_BIT: u32 = 0o1000;
/// A directory that contains any of these is a data directory.
const DATA_DIR_FILES: [&str; 7] = ["config.toml", "policy.toml", "master.key", "node.id", "broker.lock", "node.lock", "sandboxes"];
/// Present in the top directory of a new ext filesystem.
const LOST_AND_FOUND: &str = "lost+found";

#[derive(Debug, thiserror::Error)]
pub enum PrivateDirError {
    #[error("{path}: {cause}")]
    Io { path: PathBuf, cause: io::Error },
    #[error("{path} belongs to user {owner}, and the broker runs as user {user}; run `chown {user} {path}`, or choose another directory")]
    OtherOwner { path: PathBuf, owner: u32, user: u32 },
    #[error("{path} is a directory that many users share (mode {mode:o}); choose a directory that only the broker uses")]
    Shared { path: PathBuf, mode: u32 },
    #[error(
        "{path} is accessible to other users (mode {mode:o}) and contains files that are not the broker's; choose an empty directory, or run `chmod 700 {path}` if only the broker uses it"
    )]
    ContainsOtherFiles { path: PathBuf, mode: u32 },
}

/// Creates a data directory, or closes an existing one to other users. A directory with only other files is refused: closing it
/// could break another program.
pub fn private_data_dir(path: &Path) -> Result<(), PrivateDirError> {
    let mode = create(path)?;
    if mode & OTHERS_MASK == 0 {
        return Ok(());
    }
    if mode & STICKY_BIT != 0 {
        return Err(PrivateDirError::Shared { path: path.to_owned(), mode });
    }
    let is_data_dir = DATA_DIR_FILES.iter().any(|name| path.join(name).exists());
    let is_empty = || {
        let mut entries = fs::read_dir(path)?;
        Ok(entries.all(|entry| entry.is_ok_and(|e| e.file_name() == LOST_AND_FOUND)))
    };
    if !is_data_dir && !is_empty().map_err(io_error(path))? {
        return Err(PrivateDirError::ContainsOtherFiles { path: path.to_owned(), mode });
    }
    restrict(path, mode)
}

/// Creates a directory within the data directory, or closes an existing one. Returns whether other users could enter it before.
pub fn private_dir(path: &Path) -> Result<bool, PrivateDirError> {
    let mode = create(path)?;
    let was_open = mode & OTHERS_MASK != 0;
    if was_open {
        restrict(path, mode)?;
    }
    Ok(was_open)
}

/// Creates a directory if it is missing. Returns its mode, or an error if it belongs to another user.
fn create(path: &Path) -> Result<u32, PrivateDirError> {
    DirBuilder::new().recursive(true).mode(PRIVATE_MODE).create(path).map_err(io_error(path))?;
    let meta = fs::metadata(path).map_err(io_error(path))?;
    let (owner, user) = (meta.uid(), rustix::process::geteuid().as_raw());
    if owner != user {
        return Err(PrivateDirError::OtherOwner { path: path.to_owned(), owner, user });
    }
    Ok(meta.mode() & 0o7777)
}

fn restrict(path: &Path, mode: u32) -> Result<(), PrivateDirError> {
    let closed = File::open(path).and_then(|dir| dir.set_permissions(fs::Permissions::from_mode(PRIVATE_MODE)));
    closed.map_err(io_error(path))?;
    tracing::info!(path = %path.display(), before = format!("{mode:o}"), "closed a directory to other local users");
    Ok(())
}

fn io_error(path: &Path) -> impl FnOnce(io::Error) -> PrivateDirError {
    let path = path.to_owned();
    move |cause| PrivateDirError::Io { path, cause }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_mode(mode: u32) -> (tempfile::TempDir, PathBuf) {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("data");
        fs::create_dir(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        (parent, path)
    }

    fn mode_of(path: &Path) -> u32 {
        fs::metadata(path).unwrap().mode() & 0o7777
    }

    #[test]
    fn a_data_directory_with_any_mode_is_closed_to_other_users() {
        for mode in [0o755, 0o777, 0o711, 0o770, 0o2750, 0o700] {
            let (_parent, path) = with_mode(mode);
            fs::create_dir(path.join(LOST_AND_FOUND)).unwrap();
            private_data_dir(&path).unwrap();
            assert_eq!(mode_of(&path) & OTHERS_MASK, 0, "{mode:o}");
        }
        let (_parent, path) = with_mode(0o755);
        fs::write(path.join("config.toml"), "").unwrap();
        fs::create_dir(path.join("mine")).unwrap();
        private_data_dir(&path).unwrap();
        assert_eq!(mode_of(&path), PRIVATE_MODE);
        let made = path.join("a/b");
        private_data_dir(&made).unwrap();
        assert_eq!(mode_of(&made), PRIVATE_MODE);
    }

    #[test]
    fn a_directory_of_other_programs_or_users_is_refused_and_left_unchanged() {
        let (_parent, path) = with_mode(0o755);
        fs::write(path.join("index.html"), "").unwrap();
        assert!(matches!(private_data_dir(&path), Err(PrivateDirError::ContainsOtherFiles { .. })));
        assert_eq!(mode_of(&path), 0o755);
        let (_parent, path) = with_mode(0o1777);
        assert!(matches!(private_data_dir(&path), Err(PrivateDirError::Shared { .. })));
        assert_eq!(mode_of(&path), 0o1777);
        if rustix::process::geteuid().is_root() {
            let (_parent, path) = with_mode(0o700);
            std::os::unix::fs::chown(&path, Some(61_241), None).unwrap();
            let error = private_data_dir(&path).unwrap_err().to_string();
            assert!(error.contains("belongs to user 61241") && error.contains("chown 0 "), "{error}");
        }
    }

    #[test]
    fn a_directory_within_the_data_directory_is_closed_once() {
        let (_parent, path) = with_mode(0o755);
        assert!(private_dir(&path).unwrap());
        assert!(!private_dir(&path).unwrap());
        assert_eq!(mode_of(&path), PRIVATE_MODE);
    }
}
