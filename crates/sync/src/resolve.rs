//! Resolves conflicts as the user chose.

use std::os::fd::AsFd;

use crate::{
    beneath,
    engine::{Engine, Resolution},
    path::RelPath,
    staging::rename_noreplace,
};

impl Engine {
    pub(crate) fn resolve(&mut self, paths: &[RelPath], resolution: Resolution) -> Result<usize, String> {
        if let Some(reason) = self.settings.mode.refusal(resolution) {
            return Err(reason.to_owned());
        }
        let open_conflicts = self.status.conflicts.clone();
        if let Some(unknown) = paths.iter().find(|p| !open_conflicts.iter().any(|c| c.path == **p)) {
            return Err(format!("{unknown} has no conflict; `cobox sync status` lists all conflicts"));
        }
        let selected: Vec<_> = open_conflicts.into_iter().filter(|c| paths.is_empty() || paths.contains(&c.path)).collect();
        for conflict in &selected {
            match resolution {
                Resolution::Keep(keep) => drop(self.resolutions.insert(conflict.path.clone(), keep)),
                Resolution::Both => self.rename_local_version(&conflict.path).map_err(|e| format!("{}: {e}", conflict.path))?,
            }
        }
        Ok(selected.len())
    }

    /// Renames the local version to another name next to it; the sandbox's version then takes its path.
    fn rename_local_version(&self, path: &RelPath) -> std::io::Result<()> {
        let folder = beneath::open_directory(self.folder.root(), path.parent_bytes())?;
        for attempt in 1..1000 {
            let new_name = alternative_name(path.name(), "here", attempt);
            match rename_noreplace(folder.as_fd(), path.name(), folder.as_fd(), &new_name) {
                Err(rustix::io::Errno::EXIST) => {}
                other => return Ok(other?),
            }
        }
        Err(std::io::ErrorKind::AlreadyExists.into())
    }
}

/// A name for another version of a file: `notes.md` becomes `notes.here.md`, then `notes.here-2.md`.
pub fn alternative_name(name: &[u8], label: &str, attempt: u32) -> Vec<u8> {
    let (stem, extension) = match name.iter().rposition(|b| *b == b'.') {
        Some(at) if at > 0 => name.split_at(at),
        _ => (name, &b""[..]),
    };
    let attempt = if attempt == 1 { String::new() } else { format!("-{attempt}") };
    [stem, format!(".{label}{attempt}").as_bytes(), extension].concat()
}
