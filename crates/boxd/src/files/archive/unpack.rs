//! Unpacks an untrusted tar archive: every entry lands beneath the directory or the request is refused, and no link is
//! followed.

use std::{
    cell::Cell,
    io::{self, Read},
    os::fd::OwnedFd,
    rc::Rc,
    sync::Arc,
};

use cobox_protocol::ApiError;
use rustix::{
    fs::{FileType, Mode, OFlags, Timespec, Timestamps},
    io::Errno,
};
use tar::{Archive, Entry, EntryType};

use super::{
    Format,
    links::{LinkPolicy, create_hard_link, create_symlink},
};
use crate::{
    body::too_large,
    files::{
        change_log::ChangeRecorder,
        entry_location::create_directories,
        errors::{disk_full, file_error},
        etag::WriteLog,
        path::{SandboxPath, display_name, split_parent},
        root::{Root, kind, open_beneath, refuse_kernel_files},
        write::{MAX_FILE_BYTES, TempFile, stat_entry, write_all},
    },
};

/// Maximum entries of one archive: a few times a large monorepo with its dependencies.
const MAX_ENTRIES: u64 = 1_000_000;
/// Maximum unpacked bytes of one archive; the same as for one file.
const MAX_BYTES: u64 = MAX_FILE_BYTES;
/// Maximum size of extension records, such as long names, before an entry. They are held in memory, and a name has at
/// most 4 KiB.
const MAX_EXTENSION_BYTES: u64 = 256 * 1024;
/// Maximum padding after the end of an archive: tar pads to blocks of 10 KiB, some tools to more.
const MAX_TRAILING_BYTES: u64 = 1024 * 1024;
/// Limits a decoder's memory to a window of 2^24 bytes, more than compression level 19 uses.
const ZSTD_WINDOW_LOG: u32 = 24;
/// Maximum memory for the names of directories whose permissions are reduced at the end: a hundred thousand ordinary
/// names.
const MAX_DEFERRED_BYTES: usize = 16 * 1024 * 1024;
const COPY_BYTES: usize = 256 * 1024;
/// Prefix of the PAX records that mark a file whose holes are omitted. Such an entry has another name and other bytes
/// than the file.
const PAX_SPARSE: &[u8] = b"GNU.sparse.";

pub struct Unpacked {
    pub entries: u64,
    pub bytes: u64,
}

/// Options of the request, and the logs that its changes are recorded in.
#[derive(Clone, Copy)]
pub struct UnpackOptions<'a> {
    pub links: LinkPolicy,
    pub writes: &'a WriteLog,
    pub recorder: &'a ChangeRecorder,
    /// Checked during unpacking: a few compressed bytes can expand to more than the disk quota.
    pub is_full: &'a dyn Fn() -> bool,
}

pub fn unpack(
    root: &Root,
    path: &SandboxPath,
    format: Format,
    source: impl Read,
    options: UnpackOptions<'_>,
) -> Result<Unpacked, ApiError> {
    let base = create_directories(root, path.bytes(), true, options.recorder).map_err(|e| file_error(e, path))?;
    match format {
        Format::Tar => unpack_from(source, Unpacker::new(base, options)),
        Format::TarZstd => {
            let mut decoder = zstd::Decoder::new(source).map_err(|e| unreadable_archive(&e))?;
            decoder.window_log_max(ZSTD_WINDOW_LOG).map_err(|e| unreadable_archive(&e))?;
            unpack_from(decoder, Unpacker::new(base, options))
        }
    }
}

fn unpack_from(source: impl Read, mut unpacker: Unpacker<'_>) -> Result<Unpacked, ApiError> {
    let budget = Rc::new(Cell::new(MAX_EXTENSION_BYTES));
    let has_reached_end = Rc::new(Cell::new(false));
    let mut archive = Archive::new(BudgetedReader { source, budget: budget.clone(), has_reached_end: has_reached_end.clone() });
    {
        let mut entries = archive.entries().map_err(|e| unreadable_archive(&e))?;
        loop {
            // Up to the content of the next entry only headers are read.
            budget.set(MAX_EXTENSION_BYTES);
            let Some(entry) = entries.next() else { break };
            let mut entry = entry.map_err(|e| unreadable_archive(&e))?;
            budget.set(u64::MAX);
            unpacker.unpack_entry(&mut entry)?;
        }
    }
    // A block of zeros follows the last entry. It is missing if the body was truncated between two entries.
    if has_reached_end.get() {
        let message = match unpacker.totals.entries {
            0 => "the body has no archive in it: a tar, even an empty one, ends in blocks of zeros".to_owned(),
            n => format!("the archive breaks off after {n} entries: the blocks of zeros at its end are missing; send it again"),
        };
        return Err(ApiError::invalid(message));
    }
    budget.set(MAX_TRAILING_BYTES);
    io::copy(&mut archive.into_inner(), &mut io::sink()).map_err(|e| unreadable_archive(&e))?;
    unpacker.finish()
}

fn unreadable_archive(error: &io::Error) -> ApiError {
    ApiError::invalid(format!("the archive can't be read: {error}"))
}

/// A reader that fails after its budget of bytes, until the budget is set again.
struct BudgetedReader<R> {
    source: R,
    budget: Rc<Cell<u64>>,
    /// Whether the end of the input was reached.
    has_reached_end: Rc<Cell<bool>>,
}

impl<R: Read> Read for BudgetedReader<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let n = self.source.read(buf)?;
        if n == 0 && !buf.is_empty() {
            self.has_reached_end.set(true);
        }
        let left =
            self.budget.get().checked_sub(n as u64).ok_or_else(|| io::Error::other("headers or padding are larger than any real ones"))?;
        self.budget.set(left);
        Ok(n)
    }
}

struct Unpacker<'a> {
    base: Arc<OwnedFd>,
    /// The directory of the last entry, cached because the next one is mostly in the same.
    last_parent: Option<(Vec<u8>, Arc<OwnedFd>)>,
    /// Directories whose final permissions don't allow filling them.
    deferred_modes: Vec<(Vec<u8>, Mode)>,
    /// Memory for the names in `deferred_modes`.
    deferred_bytes: usize,
    options: UnpackOptions<'a>,
    buffer: Vec<u8>,
    totals: Unpacked,
}

impl<'a> Unpacker<'a> {
    fn new(base: OwnedFd, options: UnpackOptions<'a>) -> Self {
        Self {
            base: Arc::new(base),
            last_parent: None,
            deferred_modes: Vec::new(),
            deferred_bytes: 0,
            options,
            buffer: vec![0; COPY_BYTES],
            totals: Unpacked { entries: 0, bytes: 0 },
        }
    }

    fn unpack_entry(&mut self, entry: &mut Entry<'_, impl Read>) -> Result<(), ApiError> {
        let kind = entry.header().entry_type();
        if kind.is_pax_global_extensions() {
            return Ok(());
        }
        self.totals.entries += 1;
        if self.totals.entries > MAX_ENTRIES {
            return Err(ApiError::invalid(format!("the archive has more than {MAX_ENTRIES} entries")));
        }
        if (self.options.is_full)() {
            return Err(disk_full());
        }
        let raw = entry.path_bytes().into_owned();
        let name = clean_name(&raw)?;
        let to_api_error = |e: Errno| file_error(e, display_name(&raw));
        if name.is_empty() {
            // The directory itself: the first entry of `tar -C dir .`.
            let is_directory = kind == EntryType::Directory;
            return if is_directory { Ok(()) } else { Err(ApiError::invalid("an entry has no name")) };
        }
        let (directory, last) = split_parent(&name).ok_or(Errno::INVAL).map_err(to_api_error)?;
        let target = entry.link_name_bytes().unwrap_or_default().into_owned();
        match kind {
            EntryType::Symlink => self.options.links.check(&raw, directory, &target)?,
            EntryType::Regular | EntryType::Continuous if is_pax_sparse(entry)? => {
                return Err(ApiError::invalid(format!(
                    "the archive's entry {} is a file without its holes in PAX form; make the archive with --format=gnu, or without --sparse",
                    display_name(&raw)
                )));
            }
            _ => {}
        }
        let parent = self.parent(directory).map_err(to_api_error)?;
        match kind {
            // For a sparse file in GNU form, the reader returns the holes as zeros.
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => self.unpack_file(entry, &parent, last, &raw),
            EntryType::Directory => {
                let mode = entry.header().mode().unwrap_or(0o755) & 0o777;
                self.unpack_directory(&parent, last, &name, mode).map_err(to_api_error)
            }
            EntryType::Symlink => {
                create_symlink(&parent, last, &target).map_err(to_api_error)?;
                self.record_entry(&parent, last);
                Ok(())
            }
            EntryType::Link => self.unpack_hard_link(&target, &parent, last, &raw),
            EntryType::Fifo => Err(unsupported_entry("a fifo", &raw)),
            EntryType::Char | EntryType::Block => Err(unsupported_entry("a device", &raw)),
            other => Err(unsupported_entry(&format!("of kind {:?}", char::from(other.as_byte())), &raw)),
        }
    }

    fn unpack_file(&mut self, entry: &mut Entry<'_, impl Read>, parent: &Arc<OwnedFd>, last: &[u8], raw: &[u8]) -> Result<(), ApiError> {
        let to_api_error = |e: Errno| file_error(e, display_name(raw));
        let mode = entry.header().mode().unwrap_or(0o644) & 0o777;
        let temp = TempFile::create(parent.clone(), Mode::from_raw_mode(mode), None).map_err(to_api_error)?;
        let mut left = entry.size();
        if left > MAX_BYTES - self.totals.bytes {
            return Err(too_large("the unpacked archive", MAX_BYTES));
        }
        self.totals.bytes += left;
        while left > 0 {
            let n = entry.read(&mut self.buffer).map_err(|e| unreadable_archive(&e))?;
            if n == 0 {
                return Err(ApiError::invalid(format!("the archive ends in the middle of {}", display_name(raw))));
            }
            if (self.options.is_full)() {
                return Err(disk_full());
            }
            write_all(&temp.file, &self.buffer[..n]).map_err(to_api_error)?;
            left -= n as u64;
        }
        if let Ok(mtime) = entry.header().mtime() {
            let at = Timespec { tv_sec: i64::try_from(mtime).unwrap_or(0), tv_nsec: 0 };
            rustix::fs::futimens(&temp.file, &Timestamps { last_access: at, last_modification: at }).map_err(to_api_error)?;
        }
        let is_new = stat_entry(parent, last).map_err(to_api_error)?.is_none();
        let mut writes = self.options.writes.lock();
        temp.rename_to(last, false).map_err(to_api_error)?;
        let stat = rustix::fs::fstat(&temp.file).map_err(to_api_error)?;
        writes.record(&stat);
        self.options.recorder.record_placed(parent, last, &stat, is_new);
        Ok(())
    }

    /// The target is an earlier entry or an existing file, in both cases beneath the directory.
    fn unpack_hard_link(&mut self, target: &[u8], parent: &OwnedFd, last: &[u8], raw: &[u8]) -> Result<(), ApiError> {
        let name = clean_name(target)?;
        let is_new = stat_entry(parent, last).map_err(|e| file_error(e, display_name(raw)))?.is_none();
        let mut writes = self.options.writes.lock();
        match create_hard_link(&self.base, &name, parent, last) {
            Ok(stat) => {
                writes.record(&stat);
                self.options.recorder.record_placed(parent, last, &stat, is_new);
                Ok(())
            }
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::INVAL) => Err(ApiError::invalid(format!(
                "the archive's entry {} is another name for {}, which is no file in the directory it is unpacked into",
                display_name(raw),
                display_name(target)
            ))),
            Err(e) => Err(file_error(e, display_name(raw))),
        }
    }

    fn unpack_directory(&mut self, parent: &OwnedFd, last: &[u8], name: &[u8], mode: u32) -> Result<(), Errno> {
        let mode = Mode::from_raw_mode(mode);
        match rustix::fs::mkdirat(parent, last, mode | Mode::RWXU) {
            Ok(()) => {}
            Err(Errno::EXIST) => {
                let is_directory = stat_entry(parent, last)?.is_some_and(|s| kind(&s) == FileType::Directory);
                return if is_directory { Ok(()) } else { Err(Errno::EXIST) };
            }
            Err(e) => return Err(e),
        }
        self.record_entry(parent, last);
        // The umask of boxd may have reduced the mode.
        let directory = open_beneath(parent, last, OFlags::RDONLY | OFlags::DIRECTORY)?;
        rustix::fs::fchmod(&directory, mode | Mode::RWXU)?;
        if !mode.contains(Mode::RWXU) {
            self.deferred_bytes += name.len() + size_of::<(Vec<u8>, Mode)>();
            if self.deferred_bytes > MAX_DEFERRED_BYTES {
                return Err(Errno::TOOBIG);
            }
            self.deferred_modes.push((name.to_vec(), mode));
        }
        Ok(())
    }

    /// Records the author of a directory or a link, unless it is already gone.
    fn record_entry(&self, parent: &OwnedFd, name: &[u8]) {
        if let Ok(Some(stat)) = stat_entry(parent, name) {
            self.options.recorder.record_placed(parent, name, &stat, true);
        }
    }

    /// Opens the directory of an entry, and creates it if missing.
    fn parent(&mut self, directory: &[u8]) -> Result<Arc<OwnedFd>, Errno> {
        if let Some((cached_name, fd)) = &self.last_parent
            && cached_name == directory
        {
            return Ok(fd.clone());
        }
        let mut parent = self.base.clone();
        for part in directory.split(|b| *b == b'/').filter(|part| !part.is_empty()) {
            let flags = OFlags::PATH | OFlags::DIRECTORY;
            let next = match open_beneath(&parent, part, flags) {
                Err(Errno::NOENT) => {
                    match rustix::fs::mkdirat(&parent, part, Mode::from_raw_mode(0o755)) {
                        // Created concurrently. Opening it shows whether it is a directory.
                        Err(Errno::EXIST) => {}
                        other => {
                            other?;
                            self.record_entry(&parent, part);
                        }
                    }
                    open_beneath(&parent, part, flags)?
                }
                other => other?,
            };
            refuse_kernel_files(&next)?;
            parent = Arc::new(next);
        }
        self.last_parent = Some((directory.to_vec(), parent.clone()));
        Ok(parent)
    }

    /// Sets the reduced permissions and makes everything durable.
    fn finish(self) -> Result<Unpacked, ApiError> {
        for (name, mode) in self.deferred_modes.iter().rev() {
            let set = open_beneath(&self.base, name, OFlags::RDONLY | OFlags::DIRECTORY).and_then(|fd| rustix::fs::fchmod(fd, *mode));
            set.map_err(|e| file_error(e, display_name(name)))?;
        }
        // One call for all files: syncing each takes a thousand times as long for a thousand small ones.
        match open_beneath(&self.base, b".", OFlags::RDONLY | OFlags::DIRECTORY).and_then(rustix::fs::syncfs) {
            // A directory that is writable but not readable can't be opened for this. The file system's next commit
            // makes it durable.
            Ok(()) | Err(Errno::ACCESS) => Ok(self.totals),
            Err(e) => Err(file_error(e, "the unpacked files")),
        }
    }
}

fn is_pax_sparse(entry: &mut Entry<'_, impl Read>) -> Result<bool, ApiError> {
    let Some(extensions) = entry.pax_extensions().map_err(|e| unreadable_archive(&e))? else { return Ok(false) };
    Ok(extensions.flatten().any(|extension| extension.key_bytes().starts_with(PAX_SPARSE)))
}

fn unsupported_entry(what: &str, name: &[u8]) -> ApiError {
    ApiError::invalid(format!("the archive's entry {} is {what}; only files, directories and links are unpacked", display_name(name)))
}

/// Removes `.` and double slashes from an entry's name. The kernel would keep `..` inside the directory too; the error
/// points out a likely mistake.
fn clean_name(raw: &[u8]) -> Result<Vec<u8>, ApiError> {
    if raw.first() == Some(&b'/') {
        return Err(ApiError::invalid(format!("the archive's entry {} has an absolute name", display_name(raw))));
    }
    if raw.contains(&0) {
        return Err(ApiError::invalid(format!("the archive's entry {} has a NUL byte in its name", display_name(raw))));
    }
    let parts: Vec<&[u8]> = raw.split(|b| *b == b'/').filter(|part| !part.is_empty() && *part != b".").collect();
    if parts.contains(&b"..".as_slice()) {
        return Err(ApiError::invalid(format!("the archive's entry {} has `..` in its name", display_name(raw))));
    }
    Ok(parts.join(&b'/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_name_is_cleaned_or_refused() {
        assert_eq!(clean_name(b"./a//b/./c/").unwrap(), b"a/b/c");
        assert_eq!(clean_name(b"./").unwrap(), b"");
        assert_eq!(clean_name(b"..a/b..").unwrap(), b"..a/b..");
        for name in [b"/etc/passwd".as_slice(), b"a/../../b", b"..", b"a\0b"] {
            assert!(clean_name(name).is_err());
        }
    }
}
