//! Reading files for their digests, several at once where there are many.

use std::{
    fs::File,
    io::Read,
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    time::SystemTime,
};

use rustix::{fs::FileType, io::Errno};

use crate::{dirs, entry::Digest, hooks::Hooks, path::RelPath, problem::Problem, stamp::Stamp};

/// Read at once.
pub const PIECE_BYTES: usize = 128 * 1024;
/// Threads that read: a disk is kept busy by a few, and a sandbox seldom has more cores.
const READERS: usize = 4;
/// Fewer files than this, none of them large, are read where they are asked for.
const FEW: usize = 16;
const LARGE_BYTES: u64 = 1024 * 1024;

/// A file as it was when it was read, or why it could not be.
pub type Read1 = Result<(Digest, Stamp), Problem>;

/// Digests of all these, in their order.
pub fn read_all(root: &Arc<OwnedFd>, files: Vec<(RelPath, u64)>, hooks: &Arc<dyn Hooks>) -> Vec<(RelPath, Read1)> {
    let is_little = files.len() < FEW && files.iter().all(|(_, size)| *size < LARGE_BYTES);
    if is_little || files.len() < 2 {
        return files.into_iter().map(|(path, _)| (path.clone(), read(root, &path))).collect();
    }
    let (files, next) = (Arc::new(files), Arc::new(AtomicUsize::new(0)));
    let (results, collected) = mpsc::sync_channel(READERS * 4);
    let work = {
        let (files, root) = (files.clone(), root.clone());
        move |results: &mpsc::SyncSender<(usize, Read1)>| {
            loop {
                let at = next.fetch_add(1, Ordering::Relaxed);
                let Some((path, _)) = files.get(at) else { return };
                if results.send((at, read(&root, path))).is_err() {
                    return;
                }
            }
        }
    };
    let mut readers = 0;
    for _ in 0..READERS.min(files.len()) {
        let (work, results) = (work.clone(), results.clone());
        readers += usize::from(hooks.spawn("digest", Box::new(move || work(&results))).is_ok());
    }
    let mut read: Vec<Option<Read1>> = vec![None; files.len()];
    if readers == 0 {
        // No thread could be had: then one after the other, here.
        return files.iter().map(|(path, _)| (path.clone(), self::read(root, path))).collect();
    }
    drop(results);
    // Ends when the last reader has. What one of them left undone, by a panic, is as a file that can't be read now.
    for (at, result) in collected {
        read[at] = Some(result);
    }
    files.iter().zip(read).map(|((path, _), result)| (path.clone(), result.unwrap_or(Err(Problem::Changing)))).collect()
}

fn read(root: &Arc<OwnedFd>, path: &RelPath) -> Read1 {
    let seen = SystemTime::now();
    let file = match dirs::readable(root, path.bytes()) {
        Ok(file) => file,
        Err(Errno::ACCESS | Errno::PERM) => return Err(Problem::Unreadable),
        // Gone, or something else by now.
        Err(_) => return Err(Problem::Changing),
    };
    let look = |file: &File| rustix::fs::fstat(file).map(|stat| Stamp::of(&stat, seen)).map_err(|_| Problem::Changing);
    let mut file = File::from(file);
    let before = look(&file)?;
    if before.kind() != FileType::RegularFile {
        return Err(Problem::Changing);
    }
    let (mut hasher, mut piece, mut size) = (blake3::Hasher::new(), vec![0; PIECE_BYTES], 0);
    loop {
        match file.read(&mut piece) {
            Ok(0) => break,
            Ok(n) => {
                size += n as u64;
                hasher.update(&piece[..n]);
            }
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(_) => return Err(Problem::Unreadable),
        }
        if size > before.size() {
            return Err(Problem::Changing);
        }
    }
    if size != before.size() || !before.is_same(&look(&file)?) {
        return Err(Problem::Changing);
    }
    Ok((Digest(hasher.finalize().into()), before))
}
