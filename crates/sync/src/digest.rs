//! Computes file digests, with several threads when there are many files.

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

use crate::{beneath, entry::Digest, file_stamp::Stamp, hooks::Hooks, path::RelPath, problem::Problem};

/// Bytes per read.
pub const READ_BUFFER_BYTES: usize = 128 * 1024;
/// Reader threads: a few keep a disk busy, and a sandbox seldom has more cores.
const READER_THREADS: usize = 4;
/// Fewer files than this, none of them large, are read on the calling thread.
const MIN_PARALLEL_FILES: usize = 16;
const LARGE_FILE_BYTES: u64 = 1024 * 1024;

/// Digest and stamp of a file at the time it was read, or the problem that prevented it.
pub type DigestResult = Result<(Digest, Stamp), Problem>;

/// Digests of these files, in the same order.
pub fn digest_files(root: &Arc<OwnedFd>, files: Vec<(RelPath, u64)>, hooks: &Arc<dyn Hooks>) -> Vec<(RelPath, DigestResult)> {
    let is_small_job = files.len() < MIN_PARALLEL_FILES && files.iter().all(|(_, size)| *size < LARGE_FILE_BYTES);
    if is_small_job || files.len() < 2 {
        return files.into_iter().map(|(path, _)| (path.clone(), digest_file(root, &path))).collect();
    }
    let (files, next) = (Arc::new(files), Arc::new(AtomicUsize::new(0)));
    let (sender, results) = mpsc::sync_channel(READER_THREADS * 4);
    let read_files = {
        let (files, root) = (files.clone(), root.clone());
        move |sender: &mpsc::SyncSender<(usize, DigestResult)>| {
            loop {
                let at = next.fetch_add(1, Ordering::Relaxed);
                let Some((path, _)) = files.get(at) else { return };
                if sender.send((at, digest_file(&root, path))).is_err() {
                    return;
                }
            }
        }
    };
    let mut readers = 0;
    for _ in 0..READER_THREADS.min(files.len()) {
        let (read_files, sender) = (read_files.clone(), sender.clone());
        readers += usize::from(hooks.spawn("digest", Box::new(move || read_files(&sender))).is_ok());
    }
    let mut read: Vec<Option<DigestResult>> = vec![None; files.len()];
    if readers == 0 {
        // No thread could be started, so the files are read one after another on this one.
        return files.iter().map(|(path, _)| (path.clone(), digest_file(root, path))).collect();
    }
    drop(sender);
    // Ends with the last reader. A file that a reader skipped because of a panic counts as unreadable for now.
    for (at, result) in results {
        read[at] = Some(result);
    }
    files.iter().zip(read).map(|((path, _), result)| (path.clone(), result.unwrap_or(Err(Problem::Changing)))).collect()
}

fn digest_file(root: &Arc<OwnedFd>, path: &RelPath) -> DigestResult {
    let seen = SystemTime::now();
    let file = match beneath::open_file(root, path.bytes()) {
        Ok(file) => file,
        Err(Errno::ACCESS | Errno::PERM) => return Err(Problem::Unreadable),
        // Deleted, or replaced by something else.
        Err(_) => return Err(Problem::Changing),
    };
    let stamp_of = |file: &File| rustix::fs::fstat(file).map(|stat| Stamp::of(&stat, seen)).map_err(|_| Problem::Changing);
    let mut file = File::from(file);
    let before = stamp_of(&file)?;
    if before.kind() != FileType::RegularFile {
        return Err(Problem::Changing);
    }
    let (mut hasher, mut buffer, mut size) = (blake3::Hasher::new(), vec![0; READ_BUFFER_BYTES], 0);
    loop {
        match file.read(&mut buffer) {
            Ok(0) => break,
            Ok(n) => {
                size += n as u64;
                hasher.update(&buffer[..n]);
            }
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(_) => return Err(Problem::Unreadable),
        }
        if size > before.size() {
            return Err(Problem::Changing);
        }
    }
    if size != before.size() || !before.matches(&stamp_of(&file)?) {
        return Err(Problem::Changing);
    }
    Ok((Digest(hasher.finalize().into()), before))
}
