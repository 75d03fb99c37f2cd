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
    config::{HOST_IMAGE, RootSource},
    lower_layer::{self, HOST_ROOT, LowerLayer},
};
use crate::{SandboxRoot, SandboxSpec};

/// Longest part of an image's name that a message repeats, in characters.
const MAX_DISPLAYED_NAME: usize = 128;

/// Where a lower layer is to be had.
enum ResolvedRoot {
    Ready(LowerLayer),
    /// To be made from this, under this name.
    ToPrepare(RootSource, String),
}

impl LocalProvider {
    /// With what its root stands for now, unless it says so already.
    pub(super) fn pin_root(&self, spec: SandboxSpec) -> Result<SandboxSpec, String> {
        let base = match (&spec.root, &spec.base) {
            (Some(root), None) => Some(self.current_source(root)?.1),
            _ => spec.base.clone(),
        };
        Ok(SandboxSpec { base, ..spec })
    }

    /// Whether its root can be had.
    pub(super) fn check_root(&self, spec: &SandboxSpec) -> Result<(), String> {
        self.resolve(spec).map(drop)
    }

    /// The lower layer of a root, made the first time it is asked for: an archive is unpacked then.
    pub(super) async fn lower_layer(&self, spec: &SandboxSpec) -> anyhow::Result<LowerLayer> {
        let (source, name) = match self.resolve(spec).map_err(anyhow::Error::msg)? {
            ResolvedRoot::Ready(base) => return Ok(base),
            ResolvedRoot::ToPrepare(source, name) => (source, name),
        };
        let made = self.other_layers.lock().unwrap_or_else(PoisonError::into_inner).entry(name).or_default().clone();
        let make = async || {
            let (dir, options, is_root) = (self.layers_dir.clone(), self.config.options.clone(), self.is_root);
            tokio::task::spawn_blocking(move || lower_layer::prepare(&dir, &source, &options, is_root)).await?
        };
        made.get_or_try_init(make).await.cloned().map_err(|error| match &spec.root {
            Some(root) => anyhow::Error::msg(unusable(root, &error)),
            None => error,
        })
    }

    fn resolve(&self, spec: &SandboxSpec) -> Result<ResolvedRoot, String> {
        let Some(root) = &spec.root else { return Ok(ResolvedRoot::Ready(self.default_root.clone())) };
        let options = &self.config.options;
        match spec.base.as_deref() {
            None => self.current_source(root).map(|(source, name)| ResolvedRoot::ToPrepare(source, name)),
            Some(HOST_ROOT) => Ok(ResolvedRoot::ToPrepare(RootSource::Host, HOST_ROOT.to_owned())),
            Some(name) if lower_layer::is_unpacked_name(name) => {
                let lower = self.layers_dir.join(name);
                if lower.is_dir() {
                    let view = lower_layer::host_paths(&RootSource::Rootfs(lower.clone()), options);
                    return Ok(ResolvedRoot::Ready(LowerLayer { lower, view }));
                }
                // Not unpacked yet, if it is still the same.
                match self.current_source(root) {
                    Ok((source, now)) if now == name => Ok(ResolvedRoot::ToPrepare(source, now)),
                    _ => Err(format!("{} is not what it was when this was made, and what it was is gone here", display_name(root))),
                }
            }
            Some(path) => {
                let source = RootSource::Rootfs(PathBuf::from(path));
                match fs::metadata(path) {
                    Ok(m) if m.is_dir() && path.starts_with('/') => Ok(ResolvedRoot::ToPrepare(source, path.to_owned())),
                    Ok(_) => Err(unusable(root, &format!("{path} is no directory"))),
                    Err(e) => Err(unusable(root, &format!("{path}: {e}"))),
                }
            }
        }
    }

    /// What a root means today.
    fn current_source(&self, root: &SandboxRoot) -> Result<(RootSource, String), String> {
        let source = match root {
            SandboxRoot::Rootfs(path) => RootSource::Rootfs(path.clone()),
            SandboxRoot::Image(name) => match self.config.options.images.get(name) {
                Some(path) if path.as_os_str() == HOST_IMAGE => RootSource::Host,
                Some(path) => RootSource::Rootfs(path.clone()),
                None => {
                    return Err(format!(
                        "image: the local provider has no container engine and no root filesystem for {}; an operator can name one under [local.images]",
                        display_name(root)
                    ));
                }
            },
        };
        let name = lower_layer::pinned_name(&source).map_err(|e| match &source {
            RootSource::Rootfs(path) => unusable(root, &format!("{}: {e:#}", path.display())),
            RootSource::Host => unusable(root, &e),
        })?;
        Ok((source, name))
    }

    /// Volumes are mounted where neither the host's files are shown nor something else stands in the way.
    pub(super) fn validate_mount_paths(&self, spec: &SandboxSpec, paths: &[&str]) -> Result<(), String> {
        if paths.is_empty() {
            return Ok(());
        }
        let (view, lower) = match self.resolve(spec)? {
            ResolvedRoot::Ready(base) => (base.view, Some(base.lower)),
            ResolvedRoot::ToPrepare(source, name) => {
                let lower = match name.as_str() {
                    HOST_ROOT => (self.config.options.root == RootSource::Host).then(|| self.default_root.lower.clone()),
                    path if path.starts_with('/') => Some(PathBuf::from(path)),
                    unpacked => Some(self.layers_dir.join(unpacked)),
                };
                // What isn't unpacked yet can't be looked at.
                (lower_layer::host_paths(&source, &self.config.options), lower.filter(|l| l.is_dir()))
            }
        };
        let layers: Vec<PathBuf> = spec.layers.iter().map(|id| self.snapshots.layer(id)).chain(lower).collect();
        for (index, path) in paths.iter().map(Path::new).enumerate() {
            if let Some(shown) = view.iter().find(|shown| path.starts_with(shown)) {
                let shown = shown.display();
                return Err(format!("mounts[{index}].path: is {shown} or below it, which sandboxes have from this machine; use another"));
            }
            if let Some(blocked) = first_non_directory(&layers, path) {
                let blocked = blocked.display().to_string().escape_default().to_string();
                return Err(format!("mounts[{index}].path: /{blocked} is a link or a file of its root filesystem; use another"));
            }
        }
        Ok(())
    }
}

/// The first part of a path that is something else than a directory in layers on top of each other, the topmost first. No link is
/// followed: what is in a layer was made by a stranger.
fn first_non_directory(layers: &[PathBuf], path: &Path) -> Option<PathBuf> {
    let mut part_so_far = PathBuf::new();
    for part in path.components().filter(|c| matches!(c, Component::Normal(_))) {
        part_so_far.push(part);
        match layers.iter().find_map(|layer| file_type_in(layer, &part_so_far).ok()) {
            None | Some(FileType::Directory) => {}
            // The overlay's note that the name is gone: nothing below it is seen either.
            Some(FileType::CharacterDevice) => return None,
            Some(_) => return Some(part_so_far),
        }
    }
    None
}

fn file_type_in(layer: &Path, name: &Path) -> Result<FileType, Errno> {
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
fn unusable(root: &SandboxRoot, why: &dyn std::fmt::Display) -> String {
    tracing::warn!(root = %display_name(root), "a root filesystem can't be used: {why:#}");
    format!("image: the root filesystem of {} can't be used here; the broker's log says why", display_name(root))
}

fn display_name(root: &SandboxRoot) -> String {
    match root {
        SandboxRoot::Image(name) => format!("`{}`", name.chars().filter(|c| !c.is_control()).take(MAX_DISPLAYED_NAME).collect::<String>()),
        SandboxRoot::Rootfs(_) => "the template".to_owned(),
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
        let blocked = |path: &str| first_non_directory(&layers, Path::new(path));
        for free in ["/data", "/etc/ssl", "/made/anew/x", "/made/passwd", "/etc"] {
            assert_eq!(blocked(free), None, "{free}");
        }
        assert_eq!(blocked("/link/x"), Some("link".into()));
        assert_eq!(blocked("/link"), Some("link".into()));
        assert_eq!(blocked("/etc/passwd/x"), Some("etc/passwd".into()));
    }
}
