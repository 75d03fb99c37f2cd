//! Writes a file atomically: into a temporary file beside it, which is synced and renamed over it, so that readers see
//! either the old or the new content.

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
    change_log::ChangeRecorder,
    entry_location::{EntryLocation, locate_for_write},
    errors::{disk_full, file_error, link_error, not_a_regular_file},
    etag::{Conditions, WriteLog},
    path::SandboxPath,
    root::{Root, SymbolicLinks, kind},
    workers::{FileWorkers, operation_aborted},
};
use crate::{auth::Authority, body::too_large};

/// Largest file: beyond any sandbox's disk, and small enough that sums of sizes never overflow.
pub const MAX_FILE_BYTES: u64 = 64 * 1024 * 1024 * 1024;
/// Bytes per write step: large enough that the overhead of using a worker is negligible.
const BATCH_BYTES: u64 = 512 * 1024;
/// A durable file is flushed to disk every so many bytes while more arrive, so that little is left to sync at the end.
const FLUSH_BYTES: u64 = 64 * 1024 * 1024;
/// Maximum size of a write that is quick enough for the thread that serves all requests.
const QUICK_BYTES: u64 = 128 * 1024;
/// Mode of a new file for which the request sets none.
const DEFAULT_MODE: u32 = 0o644;
const TEMP_PREFIX: &str = ".cobox-";
const TEMP_SUFFIX: &str = ".tmp";

pub struct WriteOptions {
    pub conditions: Conditions,
    pub mode: Option<u32>,
    /// Whether the response waits until the data is on disk. Otherwise a write survives a crash of boxd, but perhaps
    /// not one of the machine.
    pub is_durable: bool,
    pub recorder: ChangeRecorder,
    pub links: SymbolicLinks,
}

pub struct WrittenFile {
    pub size: u64,
    pub etag: String,
    pub is_new: bool,
}

/// Writes a whole file from a stream. The existing file stays unchanged until the stream has ended without error.
pub async fn write_stream(
    store: &FileStore,
    authority: &Authority,
    path: &SandboxPath,
    options: WriteOptions,
    mut chunks: impl Stream<Item = Result<Bytes, ApiError>> + Unpin,
) -> Result<WrittenFile, ApiError> {
    let writes = store.writes.clone();
    let mut batch = next_batch(&mut chunks).await?;
    let mut size = batch.bytes;
    if batch.is_last {
        let path = path.clone();
        let is_quick = !options.is_durable && size <= QUICK_BYTES;
        let put = move |root: &Root| write_bytes(root, &path, options, &batch.chunks, &writes);
        return if is_quick { store.workers.run_quick(put).await? } else { store.workers.run(put).await? };
    }
    let begin = {
        let (path, writes, workers, chunks) = (path.clone(), writes.clone(), store.workers.clone(), batch.chunks);
        move |root: &Root| {
            let pending = PendingWrite::begin(root, &path, options, &writes, ContentSource::Stream(workers))?;
            pending.append(&chunks).map_err(|e| file_error(e, &path))?;
            Ok(pending)
        }
    };
    let pending = Arc::new(store.workers.run(begin).await??);
    // One batch is written while the next is received.
    let (mut writing, mut flushing): (Option<Step>, Option<Step>) = (None, None);
    let mut flushed = 0;
    while !batch.is_last {
        batch = next_batch(&mut chunks).await?;
        size += batch.bytes;
        if size > MAX_FILE_BYTES {
            return Err(too_large("the file", MAX_FILE_BYTES));
        }
        if authority.pushed_state().disk_full {
            return Err(disk_full());
        }
        finish_step(writing.take(), path).await?;
        let (pending, chunks) = (pending.clone(), std::mem::take(&mut batch.chunks));
        if pending.options.is_durable && size - flushed >= FLUSH_BYTES {
            finish_step(flushing.take(), path).await?;
            let pending = pending.clone();
            flushing = Some(store.workers.submit(move |_| rustix::fs::fdatasync(&pending.temp.file)).await?);
            flushed = size;
        }
        writing = Some(store.workers.submit(move |_| pending.append(&chunks)).await?);
    }
    finish_step(writing, path).await?;
    // The kernel reports a write-back error only once, to this flush, so its result must be checked.
    finish_step(flushing, path).await?;
    let path = path.clone();
    store.workers.run(move |_| pending.commit(&path, &writes, size)?.ok_or_else(operation_aborted)).await?
}

/// Writes a whole file from memory, on the calling worker.
pub fn write_bytes(
    root: &Root,
    path: &SandboxPath,
    options: WriteOptions,
    content: &[Bytes],
    writes: &WriteLog,
) -> Result<WrittenFile, ApiError> {
    let size = content.iter().map(|c| c.len() as u64).sum();
    let mut pending = PendingWrite::begin(root, path, options, writes, ContentSource::Memory)?;
    pending.append(content).map_err(|e| file_error(e, path))?;
    loop {
        match pending.commit(path, writes, size)? {
            Some(written) => return Ok(written),
            // The unnamed file could not be linked, or the name was created concurrently. A file with a temporary name
            // can replace the existing one.
            None => {
                pending.temp = TempFile::create(pending.temp.directory.clone(), pending.mode, None).map_err(|e| file_error(e, path))?;
                pending.append(content).map_err(|e| file_error(e, path))?;
            }
        }
    }
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

type Step = oneshot::Receiver<Result<(), Errno>>;

async fn finish_step(step: Option<Step>, path: &SandboxPath) -> Result<(), ApiError> {
    match step {
        Some(step) => step.await.map_err(|_| operation_aborted())?.map_err(|e| file_error(e, path)),
        None => Ok(()),
    }
}

/// A file that is being written.
struct PendingWrite {
    temp: TempFile,
    name: Vec<u8>,
    mode: Mode,
    options: WriteOptions,
}

/// The source of the content.
enum ContentSource {
    /// The complete content is in memory, and one thread does all the work.
    Memory,
    /// The content arrives in pieces, each written by any free worker.
    Stream(FileWorkers),
}

impl PendingWrite {
    fn begin(root: &Root, path: &SandboxPath, options: WriteOptions, writes: &WriteLog, source: ContentSource) -> Result<Self, ApiError> {
        let to_api_error = |e| link_error(e, options.links, path);
        let strict_root = match options.links {
            SymbolicLinks::Follow => None,
            SymbolicLinks::Refuse => Some(root.refusing_links().map_err(to_api_error)?),
        };
        let root = strict_root.as_ref().unwrap_or(root);
        let EntryLocation { parent, name, existing } =
            locate_for_write(root, path.bytes(), options.is_durable, &options.recorder).map_err(to_api_error)?;
        // Checked before the body is read, to save the client from sending it. The check at the end is decisive.
        options.conditions.check_change(existing.as_ref().map(|s| writes.etag(s)).as_deref(), path)?;
        if let Some(existing) = &existing {
            if kind(existing) != FileType::RegularFile {
                return Err(not_a_regular_file(kind(existing), path));
            }
            // Renaming would also replace a file that was deliberately made read-only.
            rustix::fs::accessat(&parent, name.as_slice(), Access::WRITE_OK, AtFlags::EACCESS).map_err(to_api_error)?;
        }
        let mode = options.mode.or(existing.as_ref().map(|s| s.st_mode & 0o777)).unwrap_or(DEFAULT_MODE);
        let mode = Mode::from_raw_mode(mode);
        let temp = match source {
            ContentSource::Memory if existing.is_none() => TempFile::create_unnamed(parent, mode),
            ContentSource::Memory => TempFile::create(parent, mode, None),
            ContentSource::Stream(workers) => TempFile::create(parent, mode, Some(workers)),
        };
        Ok(Self { temp: temp.map_err(to_api_error)?, name, mode, options })
    }

    fn append(&self, batch: &[Bytes]) -> Result<(), Errno> {
        batch.iter().try_for_each(|chunk| write_all(&self.temp.file, chunk))
    }

    /// `None` if an unnamed file could not be linked to its name.
    fn commit(&self, path: &SandboxPath, writes: &WriteLog, size: u64) -> Result<Option<WrittenFile>, ApiError> {
        let to_api_error = |e| file_error(e, path);
        if self.options.is_durable {
            rustix::fs::fsync(&self.temp.file).map_err(to_api_error)?;
        }
        let (etag, is_new) = {
            let mut writes = writes.lock();
            let existing = stat_entry(&self.temp.directory, &self.name).map_err(to_api_error)?;
            let conditions = &self.options.conditions;
            conditions.check_change(existing.as_ref().map(|s| writes.etag(s)).as_deref(), path)?;
            match self.temp.rename_to(&self.name, conditions.only_if_absent()) {
                Err(Errno::EXIST) if conditions.only_if_absent() => {
                    return Err(ApiError::new(ErrorCode::FileChanged, format!("{path} already exists")));
                }
                Err(_) if self.temp.name.is_none() => return Ok(None),
                other => other.map_err(to_api_error)?,
            }
            let stat = rustix::fs::fstat(&self.temp.file).map_err(to_api_error)?;
            writes.record(&stat);
            self.options.recorder.record_placed(&self.temp.directory, &self.name, &stat, existing.is_none());
            (writes.etag(&stat), existing.is_none())
        };
        if self.options.is_durable {
            sync_directory(&self.temp.directory).map_err(to_api_error)?;
        }
        Ok(Some(WrittenFile { size, etag, is_new }))
    }
}

/// A temporary file beside the final one, or an unnamed file that is linked to the final name. Dropping it removes it.
pub struct TempFile {
    pub file: OwnedFd,
    pub directory: Arc<OwnedFd>,
    name: Option<String>,
    is_renamed: AtomicBool,
    /// `None` if the file is created and dropped on a worker.
    workers: Option<FileWorkers>,
}

impl TempFile {
    pub fn create(directory: impl Into<Arc<OwnedFd>>, mode: Mode, workers: Option<FileWorkers>) -> Result<Self, Errno> {
        let (directory, name) = (directory.into(), temp_file_name()?);
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&directory, name.as_str(), flags, mode)?;
        Ok(Self { file: Self::with_mode(file, mode)?, directory, name: Some(name), is_renamed: AtomicBool::new(false), workers })
    }

    /// Creates an unnamed file. On an overlay its system calls take 50 µs, compared with 69 µs for a temporary name,
    /// and a crash leaves nothing behind. The thread that created it must link it, because the kernel allows only that
    /// without a capability.
    fn create_unnamed(directory: impl Into<Arc<OwnedFd>>, mode: Mode) -> Result<Self, Errno> {
        let directory = directory.into();
        if !CAN_LINK_UNNAMED.load(Ordering::Relaxed) {
            return Self::create(directory, mode, None);
        }
        match rustix::fs::openat(&directory, ".", OFlags::WRONLY | OFlags::TMPFILE | OFlags::CLOEXEC, mode) {
            // For file systems without unnamed files.
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::NOENT | Errno::INVAL) => Self::create(directory, mode, None),
            file => {
                Ok(Self { file: Self::with_mode(file?, mode)?, directory, name: None, is_renamed: AtomicBool::new(false), workers: None })
            }
        }
    }

    /// Corrects the mode if a umask or the directory's default ACL has changed it.
    fn with_mode(file: OwnedFd, mode: Mode) -> Result<OwnedFd, Errno> {
        if rustix::fs::fstat(&file)?.st_mode & 0o7777 != mode.as_raw_mode() {
            rustix::fs::fchmod(&file, mode)?;
        }
        Ok(file)
    }

    /// An unnamed file never replaces an existing one.
    pub fn rename_to(&self, name: &[u8], only_if_absent: bool) -> Result<(), Errno> {
        let flags = if only_if_absent { RenameFlags::NOREPLACE } else { RenameFlags::empty() };
        match &self.name {
            Some(own) => rustix::fs::renameat_with(&self.directory, own.as_str(), &self.directory, name, flags)?,
            None => self.link_to(name)?,
        }
        self.is_renamed.store(true, Ordering::Relaxed);
        Ok(())
    }

    fn link_to(&self, name: &[u8]) -> Result<(), Errno> {
        match rustix::fs::linkat(&self.file, "", &self.directory, name, AtFlags::EMPTY_PATH) {
            Err(Errno::NOENT | Errno::PERM) => {
                // A kernel before 6.10 requires a capability for this.
                CAN_LINK_UNNAMED.store(false, Ordering::Relaxed);
                return Err(Errno::NOENT);
            }
            other => other?,
        }
        // Programs that watch the directory wait for a new file to be closed, but the events so far had no name that
        // they know. Opening and closing it by name sends that event. If it can't be opened for writing, no program
        // expects the event. Opened without blocking: it may have become a fifo.
        let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        drop(rustix::fs::openat(&self.directory, name, flags, Mode::empty()));
        Ok(())
    }
}

/// Whether an unnamed file can be linked to a name.
static CAN_LINK_UNNAMED: AtomicBool = AtomicBool::new(true);

impl Drop for TempFile {
    fn drop(&mut self) {
        let Some(name) = self.name.take().filter(|_| !self.is_renamed.load(Ordering::Relaxed)) else { return };
        let directory = self.directory.clone();
        // An error means that a program of the sandbox has already moved or deleted the file.
        let remove = move || {
            let _ = rustix::fs::unlinkat(&directory, name.as_str(), AtFlags::empty());
        };
        match &self.workers {
            Some(workers) => workers.run_detached(move |_| remove()),
            None => remove(),
        }
    }
}

/// A unique name. The leading dot excludes it from listings and most globs.
pub fn temp_file_name() -> Result<String, Errno> {
    let mut random = [0; 8];
    getrandom::fill(&mut random).map_err(|_| Errno::IO)?;
    Ok(format!("{TEMP_PREFIX}{:016x}{TEMP_SUFFIX}", u64::from_ne_bytes(random)))
}

/// Whether this is the name of a file that is still being written.
pub fn is_temp_file_name(name: &[u8]) -> bool {
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

/// Metadata of what a name currently refers to, without following links.
pub fn stat_entry(directory: &OwnedFd, name: &[u8]) -> Result<Option<Stat>, Errno> {
    match rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => Ok(Some(stat)),
        Err(Errno::NOENT) => Ok(None),
        Err(e) => Err(e),
    }
}

/// Makes the names in a directory durable.
pub fn sync_directory(directory: &OwnedFd) -> Result<(), Errno> {
    match rustix::fs::openat(directory, ".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()) {
        Ok(fd) => rustix::fs::fsync(fd),
        // A directory that is writable but not readable can't be opened for this. Its names become durable with the
        // file system's next commit.
        Err(Errno::ACCESS) => Ok(()),
        Err(e) => Err(e),
    }
}
