//! Resolves a sandbox's root filesystem to a lower layer, which stays the same even if the image name refers to other content later, and
//! checks the mount points of volumes in it.

use std::{
    fs,
    path::{Component, Path, PathBuf},
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

/// Maximum number of characters of an image name in a message.
const MAX_DISPLAYED_NAME: usize = 128;

/// A root filesystem, resolved to its lower layer.
enum ResolvedRoot {
    Ready(LowerLayer),
    /// A layer that must be prepared from this source and stored under this name.
    ToPrepare(RootSource, String),
}

impl LocalProvider {
    /// Stores the current content of the root in the spec, unless the spec has it already.
    pub(super) fn pin_root(&self, spec: SandboxSpec) -> Result<SandboxSpec, String> {
        let base = match (&spec.root, &spec.base) {
            (Some(root), None) => Some(self.current_source(root)?.1),
            _ => spec.base.clone(),
        };
        Ok(SandboxSpec { base, ..spec })
    }

    /// Checks whether the root is available.
    pub(super) fn check_root(&self, spec: &SandboxSpec) -> Result<(), String> {
        self.resolve(spec).map(drop)
    }

    /// The lower layer of a root. Prepared at its first use, when an archive is unpacked.
    pub(super) async fn lower_layer(&self, spec: &SandboxSpec) -> anyhow::Result<LowerLayer> {
        let (source, name) = match self.resolve(spec).map_err(anyhow::Error::msg)? {
            ResolvedRoot::Ready(base) => return Ok(base),
            ResolvedRoot::ToPrepare(source, name) => (source, name),
        };
        let made = self.other_layers.lock().entry(name).or_default().clone();
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
                // Not unpacked yet: possible if the source is still the same.
                match self.current_source(root) {
                    Ok((source, now)) if now == name => Ok(ResolvedRoot::ToPrepare(source, now)),
                    _ => Err(format!(
                        "{} has changed since this was created, and its earlier content is no longer on this node",
                        display_name(root)
                    )),
                }
            }
            Some(path) => {
                let source = RootSource::Rootfs(PathBuf::from(path));
                match fs::metadata(path) {
                    Ok(m) if m.is_dir() && path.starts_with('/') => Ok(ResolvedRoot::ToPrepare(source, path.to_owned())),
                    Ok(_) => Err(unusable(root, &format!("{path} is not a directory"))),
                    Err(e) => Err(unusable(root, &format!("{path}: {e}"))),
                }
            }
        }
    }

    /// The current source of a root and its name.
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

    /// Checks that no mount point is inside a host path that the sandbox sees, or blocked by a link or a file of its root filesystem.
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
                // A layer that isn't unpacked yet can't be checked.
                (lower_layer::host_paths(&source, &self.config.options), lower.filter(|l| l.is_dir()))
            }
        };
        let layers: Vec<PathBuf> = spec.layers.iter().map(|id| self.snapshots.layer(id)).chain(lower).collect();
        for (index, path) in paths.iter().map(Path::new).enumerate() {
            if let Some(shown) = view.iter().find(|shown| path.starts_with(shown)) {
                let shown = shown.display();
                return Err(format!("mounts[{index}].path: is at or below {shown}, which sandboxes see from the host; use another path"));
            }
            if let Some(blocked) = first_non_directory(&layers, path) {
                let blocked = blocked.display().to_string().escape_default().to_string();
                return Err(format!("mounts[{index}].path: /{blocked} is a link or a file of its root filesystem; use another path"));
            }
        }
        Ok(())
    }
}

/// The first component of a path that is not a directory in a stack of layers, topmost first. No link is followed, because layers contain
/// files of untrusted programs.
fn first_non_directory(layers: &[PathBuf], path: &Path) -> Option<PathBuf> {
    let mut part_so_far = PathBuf::new();
    for part in path.components().filter(|c| matches!(c, Component::Normal(_))) {
        part_so_far.push(part);
        match layers.iter().find_map(|layer| file_type_in(layer, &part_so_far).ok()) {
            None | Some(FileType::Directory) => {}
            // An overlay whiteout: the name is deleted, and nothing below it is visible either.
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

/// The error message for the caller. The log has the cause, which may contain host paths.
fn unusable(root: &SandboxRoot, why: &dyn std::fmt::Display) -> String {
    tracing::warn!(root = %display_name(root), "a root filesystem is unusable: {why:#}");
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
    fn a_mount_path_is_blocked_only_by_a_link_or_a_file() {
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
