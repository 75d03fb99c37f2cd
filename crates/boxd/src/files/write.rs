//! Putting a file: into a temporary one beside it, made durable, and renamed over it, so that a reader sees the old or the new and never half.

use std::{
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use bytes::Bytes;
use cobox_protocol::{ApiError, ErrorCode};
use futures_util::{Stream, StreamExt};
use rustix::{
    fs::{Access, AtFlags, FileType, Mode, OFlags, RenameFlags, Stat},
    io::Errno,
};
use tokio::sync::oneshot;

use super::{
    FileStore,
    author::Author,
    etag::{Conditions, WriteLog},
    path::SandboxPath,
    place::{Place, locate},
    refusal::{disk_full, not_a_file, refusal},
    root::{Root, kind},
    workers::{FileWorkers, gone},
};
use crate::{auth::Authority, body::too_large};

/// Largest file: beyond any sandbox's disk, and small enough that sums of sizes never overflow.
pub const MAX_FILE_BYTES: u64 = 64 * 1024 * 1024 * 1024;
/// Written at once: large enough that the hand-over to a worker doesn't show.
const BATCH_BYTES: u64 = 1024 * 1024;
/// As much as the kernel takes without anybody noticing.
const QUICK_BYTES: u64 = 128 * 1024;
/// Of a new file that nobody gave a mode.
const DEFAULT_MODE: u32 = 0o644;
const TEMP_PREFIX: &str = ".cobox-";
const TEMP_SUFFIX: &str = ".tmp";

pub struct WriteOptions {
    pub conditions: Conditions,
    pub mode: Option<u32>,
    /// Whether the answer waits for the disk. Without it a write outlives boxd, but perhaps not the machine.
    pub is_durable: bool,
    pub author: Author,
}

pub struct Written {
    pub size: u64,
    pub etag: String,
    pub is_new: bool,
}

/// Writes a whole file from a stream. Until the stream has ended well, what was there stays as it is.
pub async fn receive(
    store: &FileStore,
    authority: &Authority,
    path: &SandboxPath,
    options: WriteOptions,
    mut chunks: impl Stream<Item = Result<Bytes, ApiError>> + Unpin,
) -> Result<Written, ApiError> {
    let writes = store.writes.clone();
    let mut batch = next_batch(&mut chunks).await?;
    let mut size = batch.bytes;
    if batch.is_last {
        let path = path.clone();
        let is_quick = !options.is_durable && size <= QUICK_BYTES;
        let put = move |root: &Root| put(root, &path, options, &batch.chunks, &writes);
        return if is_quick { store.workers.run_quick(put).await? } else { store.workers.run(put).await? };
    }
    let begin = {
        let (path, writes, workers, chunks) = (path.clone(), writes.clone(), store.workers.clone(), batch.chunks);
        move |root: &Root| {
            let incoming = Incoming::begin(root, &path, options, &writes, Some(workers))?;
            incoming.append(&chunks).map_err(|e| refusal(e, &path))?;
            Ok(incoming)
        }
    };
    let incoming = Arc::new(store.workers.run(begin).await??);
    // One batch is written while the next comes in.
    let mut under_way: Option<oneshot::Receiver<Result<(), Errno>>> = None;
    while !batch.is_last {
        batch = next_batch(&mut chunks).await?;
        size += batch.bytes;
        if size > MAX_FILE_BYTES {
            return Err(too_large("the file", MAX_FILE_BYTES));
        }
        if authority.view().disk_full {
            return Err(disk_full());
        }
        finish(under_way.take(), path).await?;
        let (incoming, chunks) = (incoming.clone(), std::mem::take(&mut batch.chunks));
        under_way = Some(store.workers.submit(move |_| incoming.append(&chunks)).await?);
    }
    finish(under_way, path).await?;
    let path = path.clone();
    store.workers.run(move |_| incoming.commit(&path, &writes, size)).await?
}

/// Writes a whole file that is in memory, on the worker this is called on.
pub fn put(root: &Root, path: &SandboxPath, options: WriteOptions, content: &[Bytes], writes: &WriteLog) -> Result<Written, ApiError> {
    let incoming = Incoming::begin(root, path, options, writes, None)?;
    incoming.append(content).map_err(|e| refusal(e, path))?;
    incoming.commit(path, writes, content.iter().map(|c| c.len() as u64).sum())
}

#[derive(Default)]
struct Batch {
    chunks: Vec<Bytes>,
    bytes: u64,
    is_last: bool,
}

async fn next_batch(chunks: &mut (impl Stream<Item = Result<Bytes, ApiError>> + Unpin)) -> Result<Batch, ApiError> {
    let mut batch = Batch::default();
    while batch.bytes < BATCH_BYTES && !batch.is_last {
        match chunks.next().await {
            Some(chunk) => {
                let chunk = chunk?;
                batch.bytes += chunk.len() as u64;
                batch.chunks.push(chunk);
            }
            None => batch.is_last = true,
        }
    }
    Ok(batch)
}

async fn finish(step: Option<oneshot::Receiver<Result<(), Errno>>>, path: &SandboxPath) -> Result<(), ApiError> {
    match step {
        Some(step) => step.await.map_err(|_| gone())?.map_err(|e| refusal(e, path)),
        None => Ok(()),
    }
}

/// A file on its way in.
struct Incoming {
    temp: Temp,
    name: Vec<u8>,
    options: WriteOptions,
}

impl Incoming {
    fn begin(
        root: &Root,
        path: &SandboxPath,
        options: WriteOptions,
        writes: &WriteLog,
        workers: Option<FileWorkers>,
    ) -> Result<Self, ApiError> {
        let refused = |e| refusal(e, path);
        let Place { parent, name, existing } = locate(root, path.bytes(), options.is_durable, &options.author).map_err(refused)?;
        // Before the body is read, to spare the client sending it; what counts is the check at the end.
        options.conditions.check_change(existing.as_ref().map(|s| writes.etag(s)).as_deref(), path)?;
        if let Some(existing) = &existing {
            if kind(existing) != FileType::RegularFile {
                return Err(not_a_file(kind(existing), path));
            }
            // A rename would replace a file that was made read-only on purpose.
            rustix::fs::accessat(&parent, name.as_slice(), Access::WRITE_OK, AtFlags::EACCESS).map_err(refused)?;
        }
        let mode = options.mode.or(existing.map(|s| s.st_mode & 0o777)).unwrap_or(DEFAULT_MODE);
        let temp = Temp::create(parent, Mode::from_raw_mode(mode), workers).map_err(refused)?;
        Ok(Self { temp, name, options })
    }

    fn append(&self, batch: &[Bytes]) -> Result<(), Errno> {
        batch.iter().try_for_each(|chunk| write_all(&self.temp.file, chunk))
    }

    fn commit(&self, path: &SandboxPath, writes: &WriteLog, size: u64) -> Result<Written, ApiError> {
        let refused = |e| refusal(e, path);
        if self.options.is_durable {
            rustix::fs::fsync(&self.temp.file).map_err(refused)?;
        }
        let (etag, is_new) = {
            let mut writes = writes.lock();
            let current = current(&self.temp.directory, &self.name).map_err(refused)?;
            let conditions = &self.options.conditions;
            conditions.check_change(current.as_ref().map(|s| writes.etag(s)).as_deref(), path)?;
            match self.temp.rename_to(&self.name, conditions.only_if_absent()) {
                Err(Errno::EXIST) => return Err(ApiError::new(ErrorCode::FileChanged, format!("{path} is there already"))),
                other => other.map_err(refused)?,
            }
            let stat = rustix::fs::fstat(&self.temp.file).map_err(refused)?;
            writes.record(&stat);
            self.options.author.placed(&self.temp.directory, &self.name, &stat, current.is_none());
            (writes.etag(&stat), current.is_none())
        };
        if self.options.is_durable {
            sync_directory(&self.temp.directory).map_err(refused)?;
        }
        Ok(Written { size, etag, is_new })
    }
}

/// A temporary file beside the place it is for. Dropped, it goes away.
pub struct Temp {
    pub file: OwnedFd,
    pub directory: Arc<OwnedFd>,
    name: String,
    is_placed: AtomicBool,
    /// Absent where it is made and dropped on a worker.
    workers: Option<FileWorkers>,
}

impl Temp {
    pub fn create(directory: impl Into<Arc<OwnedFd>>, mode: Mode, workers: Option<FileWorkers>) -> Result<Self, Errno> {
        let (directory, name) = (directory.into(), temp_name()?);
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&directory, name.as_str(), flags, mode)?;
        // Where a mask is in the way, or the directory hands down rules of its own.
        if rustix::fs::fstat(&file)?.st_mode & 0o7777 != mode.as_raw_mode() {
            rustix::fs::fchmod(&file, mode)?;
        }
        Ok(Self { file, directory, name, is_placed: AtomicBool::new(false), workers })
    }

    pub fn rename_to(&self, name: &[u8], only_if_absent: bool) -> Result<(), Errno> {
        let flags = if only_if_absent { RenameFlags::NOREPLACE } else { RenameFlags::empty() };
        rustix::fs::renameat_with(&self.directory, self.name.as_str(), &self.directory, name, flags)?;
        self.is_placed.store(true, Ordering::Relaxed);
        Ok(())
    }
}

impl Drop for Temp {
    fn drop(&mut self) {
        if self.is_placed.load(Ordering::Relaxed) {
            return;
        }
        let (directory, name) = (self.directory.clone(), std::mem::take(&mut self.name));
        // What fails to go away here was already moved or deleted by a program of the sandbox.
        let remove = move || {
            let _ = rustix::fs::unlinkat(&directory, name.as_str(), AtFlags::empty());
        };
        match &self.workers {
            Some(workers) => workers.run_detached(move |_| remove()),
            None => remove(),
        }
    }
}

/// A name nobody else has; the dot keeps it out of listings and most globs.
pub fn temp_name() -> Result<String, Errno> {
    let mut random = [0; 8];
    getrandom::fill(&mut random).map_err(|_| Errno::IO)?;
    Ok(format!("{TEMP_PREFIX}{:016x}{TEMP_SUFFIX}", u64::from_ne_bytes(random)))
}

/// Whether a name is that of a file still on its way in.
pub fn is_temp_name(name: &[u8]) -> bool {
    name.len() == TEMP_PREFIX.len() + 16 + TEMP_SUFFIX.len()
        && name.starts_with(TEMP_PREFIX.as_bytes())
        && name.ends_with(TEMP_SUFFIX.as_bytes())
}

pub fn write_all(file: &OwnedFd, mut bytes: &[u8]) -> Result<(), Errno> {
    while !bytes.is_empty() {
        let n = rustix::io::retry_on_intr(|| rustix::io::write(file, bytes))?;
        bytes = &bytes[n..];
    }
    Ok(())
}

/// What a name stands for now, not following it.
pub fn current(directory: &OwnedFd, name: &[u8]) -> Result<Option<Stat>, Errno> {
    match rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => Ok(Some(stat)),
        Err(Errno::NOENT) => Ok(None),
        Err(e) => Err(e),
    }
}

/// Makes a directory's names durable.
pub fn sync_directory(directory: &OwnedFd) -> Result<(), Errno> {
    match rustix::fs::openat(directory, ".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()) {
        Ok(fd) => rustix::fs::fsync(fd),
        // One that may be written and not read can't be opened for this; its names become durable with the file system's next commit.
        Err(Errno::ACCESS) => Ok(()),
        Err(e) => Err(e),
    }
}
