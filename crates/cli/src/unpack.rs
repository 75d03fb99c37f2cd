//! Unpacks a sandbox's archive into a local folder. The archive is untrusted: none of its entries may be written
//! outside the folder.

use std::{
    io::{self, Read},
    path::Path,
};

use cobox_protocol::files::ARCHIVE_SKIPPED;
use tar::{Archive, Entry, EntryType};

use crate::pack::MAX_NOTICES;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnpackReport {
    pub files: u64,
    /// Symbolic links; a hard link counts as a file.
    pub links: u64,
    pub bytes: u64,
    /// Entries that were refused or have an unsupported type.
    pub left_out: u64,
    /// The first names of files that the sandbox's user may not read.
    pub unreadable: Vec<String>,
    pub unreadable_count: u64,
}

impl UnpackReport {
    fn note_unreadable(&mut self, entry: &mut Entry<'_, impl Read>) -> io::Result<()> {
        if entry.size() > MAX_RECORD_BYTES {
            return Ok(());
        }
        let Some(records) = entry.pax_extensions()? else { return Ok(()) };
        for record in records.flatten().filter(|r| r.key_bytes() == ARCHIVE_SKIPPED.as_bytes()) {
            self.unreadable_count += 1;
            if self.unreadable.len() < MAX_NOTICES {
                self.unreadable.push(percent_encoding::percent_decode(record.value_bytes()).decode_utf8_lossy().into_owned());
            }
        }
        Ok(())
    }
}

/// Maximum number of directories: they are kept in memory to the end, and a sandbox could send any number.
const MAX_DIRECTORIES: usize = 1_000_000;
/// Maximum size of a record about a skipped file: the longest path, percent-encoded, with some reserve.
const MAX_RECORD_BYTES: u64 = 16 * 1024;

/// Blocking. Keeps modes and times, but not owners, set-id bits and devices.
pub fn unpack(archive: impl Read, into: &Path) -> io::Result<UnpackReport> {
    std::fs::create_dir_all(into)?;
    let into = into.canonicalize()?;
    let mut archive = Archive::new(zstd::Decoder::new(archive)?);
    let mut report = UnpackReport::default();
    // Directories get their modes last: extraction into a read-only directory would fail.
    let mut directories = Vec::new();
    for entry in archive.entries()? {
        let mut entry = entry?;
        entry.set_preserve_permissions(false);
        entry.set_preserve_mtime(true);
        match entry.header().entry_type() {
            EntryType::Directory if directories.len() == MAX_DIRECTORIES => {
                return Err(io::Error::other(format!("the archive has more than {MAX_DIRECTORIES} directories")));
            }
            EntryType::Directory => directories.push(entry),
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse | EntryType::Symlink | EntryType::Link => {
                let (size, is_link) = (entry.header().entry_size().unwrap_or(0), entry.header().entry_type().is_symlink());
                // Refuses `..`, and any entry whose parent is a link that leads outside.
                if entry.unpack_in(&into)? {
                    *(if is_link { &mut report.links } else { &mut report.files }) += 1;
                    report.bytes += size;
                } else {
                    report.left_out += 1;
                }
            }
            EntryType::XGlobalHeader => report.note_unreadable(&mut entry)?,
            _ => report.left_out += 1,
        }
    }
    // Deepest first, so that a parent's mode is set after all its contents.
    directories.sort_by(|a, b| b.path_bytes().cmp(&a.path_bytes()));
    for mut directory in directories {
        if !directory.unpack_in(&into)? {
            report.left_out += 1;
        }
    }
    Ok(report)
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt};

    use tar::{Builder, Header};

    use super::*;

    fn entry(kind: EntryType, mode: u32, size: usize) -> Header {
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_size(size as u64);
        header.set_mtime(1_000_000);
        header
    }

    fn compressed(tar: Builder<Vec<u8>>) -> Vec<u8> {
        zstd::encode_all(&tar.into_inner().unwrap()[..], 1).unwrap()
    }

    #[test]
    fn links_in_an_archive_do_not_lead_outside_the_folder() {
        let outside = tempfile::tempdir().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let mut tar = Builder::new(Vec::new());
        tar.append_link(&mut entry(EntryType::Symlink, 0o777, 0), "way-out", outside.path()).unwrap();
        tar.append_data(&mut entry(EntryType::Regular, 0o644, 4), "way-out/evil", &b"evil"[..]).unwrap();
        // The refusal may be an error or a skipped entry; only the result outside matters.
        let _ = unpack(&compressed(tar)[..], dir.path());
        assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 0);
    }

    #[test]
    fn paths_with_parent_components_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let into = dir.path().join("into");
        let mut header = entry(EntryType::Regular, 0o644, 4);
        header.as_gnu_mut().unwrap().name[..7].copy_from_slice(b"../evil");
        header.set_cksum();
        let mut tar = Builder::new(Vec::new());
        tar.append(&header, &b"evil"[..]).unwrap();
        assert_eq!(unpack(&compressed(tar)[..], &into).unwrap().left_out, 1);
        assert!(!dir.path().join("evil").exists());
    }

    #[test]
    fn modes_are_kept_but_not_set_id_bits_and_a_read_only_directory_is_filled_first() {
        let dir = tempfile::tempdir().unwrap();
        let mut tar = Builder::new(Vec::new());
        tar.append_data(&mut entry(EntryType::Directory, 0o555, 0), "ro", io::empty()).unwrap();
        tar.append_data(&mut entry(EntryType::Regular, 0o4755, 1), "ro/tool", &b"x"[..]).unwrap();
        tar.append_data(&mut entry(EntryType::Fifo, 0o644, 0), "pipe", io::empty()).unwrap();
        let report = unpack(&compressed(tar)[..], dir.path()).unwrap();
        assert_eq!(report, UnpackReport { files: 1, bytes: 1, left_out: 1, ..UnpackReport::default() });
        let mode = |name: &str| fs::metadata(dir.path().join(name)).unwrap().permissions().mode() & 0o7777;
        assert_eq!((mode("ro/tool"), mode("ro")), (0o755, 0o555));
        fs::set_permissions(dir.path().join("ro"), fs::Permissions::from_mode(0o755)).unwrap();
    }

    #[test]
    fn unreadable_files_are_reported_and_the_rest_is_unpacked() {
        let dir = tempfile::tempdir().unwrap();
        let mut tar = Builder::new(Vec::new());
        let record = b"33 COBOX.skipped=a%20closed/file\n";
        tar.append_data(&mut entry(EntryType::XGlobalHeader, 0o644, record.len()), "pax_global_header", &record[..]).unwrap();
        tar.append_data(&mut entry(EntryType::Regular, 0o644, 1), "open", &b"x"[..]).unwrap();
        let report = unpack(&compressed(tar)[..], dir.path()).unwrap();
        let expected = UnpackReport {
            files: 1,
            bytes: 1,
            unreadable: vec!["a closed/file".to_owned()],
            unreadable_count: 1,
            ..UnpackReport::default()
        };
        assert_eq!(report, expected);
    }
}
