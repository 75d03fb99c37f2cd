//! Writes a tar archive of a directory in bounded memory. It walks by descriptors, so that a concurrent rename can't
//! lead it elsewhere.

use std::{
    ffi::OsStr,
    fs::File,
    io::{self, Read, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

use cobox_protocol::files::ARCHIVE_SKIPPED;
use percent_encoding::percent_encode;
use rustix::{
    fs::{AtFlags, Dir, FileType, Mode, OFlags, Stat},
    io::Errno,
};
use tar::{Builder, EntryType, Header};

use super::Format;
use crate::files::{
    multipart::HEADER_ENCODE_SET,
    path::{SandboxPath, split_parent},
    root::{Root, kind, refuse_kernel_files},
    write::is_temp_file_name,
};

/// Maximum depth of directories. Each level holds one descriptor and the buffer of its listing.
const MAX_DEPTH: usize = 256;
/// Files up to this size are read before their header is written, so that a file that is being written to doesn't end
/// the archive with a size mismatch.
const SMALL_FILE_BYTES: u64 = 256 * 1024;
/// Fast enough not to limit a local transfer.
const ZSTD_LEVEL: i32 = 3;

/// The content to archive, open for reading.
pub enum ArchiveSource {
    Directory(OwnedFd),
    File { name: Vec<u8>, file: OwnedFd, stat: Stat },
}

/// Opens what a path leads to. Returns the file type if it can't be archived.
pub fn open(root: &Root, path: &SandboxPath) -> Result<Result<ArchiveSource, FileType>, Errno> {
    if kind(&root.stat(path.bytes())?) == FileType::Directory {
        let directory = root.open(path.bytes(), OFlags::RDONLY | OFlags::DIRECTORY)?;
        refuse_kernel_files(&directory)?;
        return Ok(Ok(ArchiveSource::Directory(directory)));
    }
    let (_, name) = split_parent(path.bytes()).ok_or(Errno::ISDIR)?;
    Ok(root.open_regular(path.bytes())?.map(|(file, stat)| ArchiveSource::File { name: name.to_vec(), file, stat }))
}

pub fn pack(source: ArchiveSource, format: Format, out: impl Write) -> io::Result<()> {
    match format {
        Format::Tar => pack_into(source, out)?.flush(),
        Format::TarZstd => pack_into(source, zstd::Encoder::new(out, ZSTD_LEVEL)?)?.finish()?.flush(),
    }
}

fn pack_into<W: Write>(source: ArchiveSource, out: W) -> io::Result<W> {
    let mut tar = Builder::new(out);
    match source {
        ArchiveSource::Directory(directory) => pack_directory(&mut tar, directory)?,
        ArchiveSource::File { name, file, stat } => pack_file(&mut tar, &name, file, &stat)?,
    }
    tar.into_inner()
}

/// A directory being listed, and the length of the current name's part that leads to it.
struct Level {
    entries: Dir,
    prefix_bytes: usize,
}

fn pack_directory<W: Write>(tar: &mut Builder<W>, source: OwnedFd) -> io::Result<()> {
    let mut name: Vec<u8> = Vec::new();
    let mut levels = vec![Level { entries: Dir::new(source)?, prefix_bytes: 0 }];
    while let Some(level) = levels.last_mut() {
        name.truncate(level.prefix_bytes);
        let Some(entry) = level.entries.read() else {
            levels.pop();
            continue;
        };
        let entry = entry?;
        let last = entry.file_name().to_bytes();
        if matches!(last, b"." | b"..") || is_temp_file_name(last) {
            continue;
        }
        name.extend_from_slice(last);
        match pack_entry(tar, level.entries.fd()?, last, &name) {
            Ok(Some(directory)) => {
                if levels.len() == MAX_DEPTH {
                    return Err(io::Error::other(format!("directories are nested more than {MAX_DEPTH} deep")));
                }
                name.push(b'/');
                levels.push(Level { entries: Dir::new(directory)?, prefix_bytes: name.len() });
            }
            Ok(None) => {}
            // Deleted since it was listed.
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            // Not readable for the sandbox's user. Nothing of this entry was written yet, so the archive continues with
            // the rest.
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => record_skipped(tar, &name)?,
            Err(e) => return Err(io::Error::new(e.kind(), format!("{}: {e}", crate::files::path::display_name(&name)))),
        }
    }
    Ok(())
}

/// Writes one entry. A directory is returned, to be walked.
fn pack_entry<W: Write>(tar: &mut Builder<W>, parent: impl AsFd, last: &[u8], name: &[u8]) -> io::Result<Option<OwnedFd>> {
    let stat = rustix::fs::statat(&parent, last, AtFlags::SYMLINK_NOFOLLOW)?;
    let open = |flags| rustix::fs::openat(&parent, last, flags | OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty());
    match kind(&stat) {
        FileType::Directory => {
            let directory = open(OFlags::DIRECTORY)?;
            // Skips /proc and /sys if the whole root is archived.
            if refuse_kernel_files(&directory).is_err() {
                return Ok(None);
            }
            let mut header = header(EntryType::Directory, &stat);
            tar.append_data(&mut header, as_path(&[name, b"/"].concat()), io::empty())?;
            Ok(Some(directory))
        }
        FileType::Symlink => {
            let target = rustix::fs::readlinkat(&parent, last, Vec::new())?.into_bytes();
            tar.append_link(&mut header(EntryType::Symlink, &stat), as_path(name), as_path(&target))?;
            Ok(None)
        }
        FileType::RegularFile => {
            let file = open(OFlags::NONBLOCK | OFlags::NOCTTY)?;
            let stat = rustix::fs::fstat(&file)?;
            // It may have been replaced by something else.
            if kind(&stat) == FileType::RegularFile && refuse_kernel_files(&file).is_ok() {
                pack_file(tar, name, file, &stat)?;
            }
            Ok(None)
        }
        _ => Ok(None),
    }
}

fn pack_file<W: Write>(tar: &mut Builder<W>, name: &[u8], file: OwnedFd, stat: &Stat) -> io::Result<()> {
    let size = u64::try_from(stat.st_size).unwrap_or(0);
    let mut file = File::from(file);
    let mut header = header(EntryType::Regular, stat);
    if size <= SMALL_FILE_BYTES {
        let mut bytes = Vec::new();
        file.take(SMALL_FILE_BYTES).read_to_end(&mut bytes)?;
        header.set_size(bytes.len() as u64);
        tar.append_data(&mut header, as_path(name), bytes.as_slice())
    } else {
        header.set_size(size);
        tar.append_data(&mut header, as_path(name), ExactReader { file: &mut file, left: size })
    }
}

fn record_skipped<W: Write>(tar: &mut Builder<W>, name: &[u8]) -> io::Result<()> {
    let record = pax_record(ARCHIVE_SKIPPED, &percent_encode(name, &HEADER_ENCODE_SET).to_string());
    let mut header = Header::new_ustar();
    header.set_entry_type(EntryType::XGlobalHeader);
    header.set_mode(0o644);
    header.set_size(record.len() as u64);
    tar.append_data(&mut header, "pax_global_header", record.as_bytes())
}

/// `<length> <key>=<value>\n`. The length includes its own digits.
fn pax_record(key: &str, value: &str) -> String {
    let rest = format!(" {key}={value}\n");
    let mut length = rest.len();
    while length != rest.len() + length.to_string().len() {
        length = rest.len() + length.to_string().len();
    }
    format!("{length}{rest}")
}

fn header(kind: EntryType, stat: &Stat) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(stat.st_mode & 0o777);
    header.set_uid(u64::from(stat.st_uid));
    header.set_gid(u64::from(stat.st_gid));
    #[allow(clippy::unnecessary_cast, reason = "the field is narrower on some machines")]
    header.set_mtime(u64::try_from(stat.st_mtime as i64).unwrap_or(0));
    header.set_size(0);
    header
}

fn as_path(bytes: &[u8]) -> &Path {
    Path::new(OsStr::from_bytes(bytes))
}

/// Reads exactly as many bytes as the header announced: further bytes are ignored, missing ones are an error.
struct ExactReader<'a> {
    file: &'a mut File,
    left: u64,
}

impl Read for ExactReader<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let count = buf.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        let n = self.file.read(&mut buf[..count])?;
        if n == 0 && count > 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the file became shorter while it was read"));
        }
        self.left -= n as u64;
        Ok(n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pax_record_includes_its_own_length() {
        for n in 0..1200 {
            let record = pax_record("k", &"v".repeat(n));
            let (length, _) = record.split_once(' ').unwrap();
            assert_eq!(length.parse(), Ok(record.len()));
        }
    }
}
