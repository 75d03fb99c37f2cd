//! Settling conflicts as somebody chose.

use std::os::fd::AsFd;

use crate::{
    dirs,
    engine::{Choice, Engine},
    path::RelPath,
    staging::rename_new,
};

impl Engine {
    pub(crate) fn resolve(&mut self, paths: &[RelPath], choice: Choice) -> Result<usize, String> {
        if let Some(why) = self.settings.mode.refuses(choice) {
            return Err(why.to_owned());
        }
        let conflicts = self.status.conflicts.clone();
        if let Some(unknown) = paths.iter().find(|p| !conflicts.iter().any(|c| c.path == **p)) {
            return Err(format!("{unknown} is in no conflict; `cobox sync status` lists those that are"));
        }
        let chosen: Vec<_> = conflicts.into_iter().filter(|c| paths.is_empty() || paths.contains(&c.path)).collect();
        for conflict in &chosen {
            match choice {
                Choice::Keep(keep) => drop(self.decided.insert(conflict.path.clone(), keep)),
                Choice::Both => self.set_aside(&conflict.path).map_err(|e| format!("{}: {e}", conflict.path))?,
            }
        }
        Ok(chosen.len())
    }

    /// Gives the local version another name, beside its own; the sandbox's then comes in its place.
    fn set_aside(&self, path: &RelPath) -> std::io::Result<()> {
        let folder = dirs::directory(self.folder.root(), path.parent_bytes())?;
        for number in 1..1000 {
            let beside = name_beside(path.name(), "here", number);
            match rename_new(folder.as_fd(), path.name(), folder.as_fd(), &beside) {
                Err(rustix::io::Errno::EXIST) => {}
                other => return Ok(other?),
            }
        }
        Err(std::io::ErrorKind::AlreadyExists.into())
    }
}

/// A name for another version of a file: `notes.md` becomes `notes.here.md`, then `notes.here-2.md`.
pub fn name_beside(name: &[u8], word: &str, number: u32) -> Vec<u8> {
    let (stem, extension) = match name.iter().rposition(|b| *b == b'.') {
        Some(at) if at > 0 => name.split_at(at),
        _ => (name, &b""[..]),
    };
    let number = if number == 1 { String::new() } else { format!("-{number}") };
    [stem, format!(".{word}{number}").as_bytes(), extension].concat()
}
