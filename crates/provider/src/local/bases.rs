//! Which lower layer a sandbox has: what its root stood for when it was decided, wherever that is by now; and where volumes can be in it.

use std::{
    fs,
    path::{Component, Path, PathBuf},
    sync::PoisonError,
};

use rustix::{
    fs::{CWD, FileType, Mode, OFlags, ResolveFlags, fstat, openat, openat2},
    io::Errno,
};

use super::{
    LocalProvider,
    base::{self, Base, HOST_NAME},
    config::{HOST, RootSource},
};
use crate::{Making, Root};

/// Longest part of an image's name that a message repeats, in characters.
const MAX_SHOWN: usize = 128;

/// Where a lower layer is to be had.
enum Meant {
    There(Base),
    /// To be made from this, under this name.
    From(RootSource, String),
}

impl LocalProvider {
    /// With what its root stands for now, unless it says so already.
    pub(super) fn pin(&self, making: Making) -> Result<Making, String> {
        let base = match (&making.root, &making.base) {
            (Some(root), None) => Some(self.named(root)?.1),
            _ => making.base.clone(),
        };
        Ok(Making { base, ..making })
    }

    /// Whether its root can be had.
    pub(super) fn check_root(&self, making: &Making) -> Result<(), String> {
        self.meant(making).map(drop)
    }

    /// The lower layer of a root, made the first time it is asked for: an archive is unpacked then.
    pub(super) async fn base(&self, making: &Making) -> anyhow::Result<Base> {
        let (source, name) = match self.meant(making).map_err(anyhow::Error::msg)? {
            Meant::There(base) => return Ok(base),
            Meant::From(source, name) => (source, name),
        };
        let made = self.other_bases.lock().unwrap_or_else(PoisonError::into_inner).entry(name).or_default().clone();
        let make = async || {
            let (dir, options, is_root) = (self.bases_dir.clone(), self.config.options.clone(), self.is_root);
            tokio::task::spawn_blocking(move || base::prepare(&dir, &source, &options, is_root)).await?
        };
        made.get_or_try_init(make).await.cloned().map_err(|error| match &making.root {
            Some(root) => anyhow::Error::msg(unusable(root, &error)),
            None => error,
        })
    }

    fn meant(&self, making: &Making) -> Result<Meant, String> {
        let Some(root) = &making.root else { return Ok(Meant::There(self.base.clone())) };
        let options = &self.config.options;
        match making.base.as_deref() {
            None => self.named(root).map(|(source, name)| Meant::From(source, name)),
            Some(HOST_NAME) => Ok(Meant::From(RootSource::Host, HOST_NAME.to_owned())),
            Some(name) if base::is_unpacked_name(name) => {
                let lower = self.bases_dir.join(name);
                if lower.is_dir() {
                    let view = base::view(&RootSource::Rootfs(lower.clone()), options);
                    return Ok(Meant::There(Base { lower, view }));
                }
                // Not unpacked yet, if it is still the same.
                match self.named(root) {
                    Ok((source, now)) if now == name => Ok(Meant::From(source, now)),
                    _ => Err(format!("{} is not what it was when this was made, and what it was is gone here", shown(root))),
                }
            }
            Some(path) => {
                let source = RootSource::Rootfs(PathBuf::from(path));
                match fs::metadata(path) {
                    Ok(m) if m.is_dir() && path.starts_with('/') => Ok(Meant::From(source, path.to_owned())),
                    Ok(_) => Err(unusable(root, &format!("{path} is no directory"))),
                    Err(e) => Err(unusable(root, &format!("{path}: {e}"))),
                }
            }
        }
    }

    /// What a root means today.
    fn named(&self, root: &Root) -> Result<(RootSource, String), String> {
        let source = match root {
            Root::Rootfs(path) => RootSource::Rootfs(path.clone()),
            Root::Image(name) => match self.config.options.images.get(name) {
                Some(path) if path.as_os_str() == HOST => RootSource::Host,
                Some(path) => RootSource::Rootfs(path.clone()),
                None => {
                    return Err(format!(
                        "image: the local provider has no container engine and no root filesystem for {}; an operator can name one under [local.images]",
                        shown(root)
                    ));
                }
            },
        };
        let name = base::name_of(&source).map_err(|e| match &source {
            RootSource::Rootfs(path) => unusable(root, &format!("{}: {e:#}", path.display())),
            RootSource::Host => unusable(root, &e),
        })?;
        Ok((source, name))
    }

    /// Volumes are mounted where neither the host's files are shown nor something else stands in the way.
    pub(super) fn check_mount_paths(&self, making: &Making, paths: &[&str]) -> Result<(), String> {
        if paths.is_empty() {
            return Ok(());
        }
        let (view, lower) = match self.meant(making)? {
            Meant::There(base) => (base.view, Some(base.lower)),
            Meant::From(source, name) => {
                let lower = match name.as_str() {
                    HOST_NAME => (self.config.options.root == RootSource::Host).then(|| self.base.lower.clone()),
                    path if path.starts_with('/') => Some(PathBuf::from(path)),
                    unpacked => Some(self.bases_dir.join(unpacked)),
                };
                // What isn't unpacked yet can't be looked at.
                (base::view(&source, &self.config.options), lower.filter(|l| l.is_dir()))
            }
        };
        let layers: Vec<PathBuf> = making.layers.iter().map(|id| self.snapshots.layer(id)).chain(lower).collect();
        for (index, path) in paths.iter().map(Path::new).enumerate() {
            if let Some(shown) = view.iter().find(|shown| path.starts_with(shown)) {
                let shown = shown.display();
                return Err(format!("mounts[{index}].path: is {shown} or below it, which sandboxes have from this machine; use another"));
            }
            if let Some(blocked) = not_a_directory(&layers, path) {
                let blocked = blocked.display().to_string().escape_default().to_string();
                return Err(format!("mounts[{index}].path: /{blocked} is a link or a file of its root filesystem; use another"));
            }
        }
        Ok(())
    }
}

/// The first part of a path that is something else than a directory in layers on top of each other, the topmost first. No link is
/// followed: what is in a layer was made by a stranger.
fn not_a_directory(layers: &[PathBuf], path: &Path) -> Option<PathBuf> {
    let mut part_so_far = PathBuf::new();
    for part in path.components().filter(|c| matches!(c, Component::Normal(_))) {
        part_so_far.push(part);
        match layers.iter().find_map(|layer| kind_in(layer, &part_so_far).ok()) {
            None | Some(FileType::Directory) => {}
            // The overlay's note that the name is gone: nothing below it is seen either.
            Some(FileType::CharacterDevice) => return None,
            Some(_) => return Some(part_so_far),
        }
    }
    None
}

fn kind_in(layer: &Path, name: &Path) -> Result<FileType, Errno> {
    let top = openat(CWD, layer, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let found = openat2(
        &top,
        name,
        OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC,
        Mode::empty(),
        ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS,
    )?;
    Ok(FileType::from_raw_mode(fstat(&found)?.st_mode))
}

/// What whoever asked is told; where it lies on the host is the log's business.
fn unusable(root: &Root, why: &dyn std::fmt::Display) -> String {
    tracing::warn!(root = %shown(root), "a root filesystem can't be used: {why:#}");
    format!("image: the root filesystem of {} can't be used here; the broker's log says why", shown(root))
}

fn shown(root: &Root) -> String {
    match root {
        Root::Image(name) => format!("`{}`", name.chars().filter(|c| !c.is_control()).take(MAX_SHOWN).collect::<String>()),
        Root::Rootfs(_) => "the template".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_place_is_free_unless_a_link_or_a_file_is_in_the_way() {
        let dir = tempfile::tempdir().unwrap();
        let (top, below) = (dir.path().join("top"), dir.path().join("below"));
        fs::create_dir_all(top.join("made/anew")).unwrap();
        fs::create_dir_all(below.join("etc")).unwrap();
        fs::write(below.join("etc/passwd"), "").unwrap();
        symlink("/etc", below.join("made")).unwrap();
        symlink("/etc", below.join("link")).unwrap();
        let layers = [top, below];
        let blocked = |path: &str| not_a_directory(&layers, Path::new(path));
        for free in ["/data", "/etc/ssl", "/made/anew/x", "/made/passwd", "/etc"] {
            assert_eq!(blocked(free), None, "{free}");
        }
        assert_eq!(blocked("/link/x"), Some("link".into()));
        assert_eq!(blocked("/link"), Some("link".into()));
        assert_eq!(blocked("/etc/passwd/x"), Some("etc/passwd".into()));
    }
}
