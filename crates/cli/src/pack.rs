//! Packs a local folder as tar+zstd: symbolic links stay links, nothing outside the folder is read, and ignored files
//! are left out.

use std::{
    fs::{File, Metadata},
    io::{self, Read, Write},
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::{Path, PathBuf},
};

use ignore::{Walk, WalkBuilder};
use rustix::fs::{Mode, OFlags, ResolveFlags};
use tar::{Builder, EntryType, Header};

/// Fast enough to keep up with a disk, and it still reduces source code to a quarter.
const ZSTD_LEVEL: i32 = 3;
/// Read besides `.gitignore`, for files that belong in git but not in a sandbox.
const IGNORE_FILE: &str = ".coboxignore";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IgnoreMode {
    Nothing,
    /// Leaves out the files that `.gitignore` and `.coboxignore` match.
    IgnoreFiles,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PackReport {
    pub files: u64,
    pub links: u64,
    pub directories: u64,
    /// Total size of the files' contents.
    pub bytes: u64,
    /// The first entries that were left out, with the reason.
    pub notices: Vec<String>,
    pub notices_left_out: u64,
}

/// Maximum number of notices: a folder with ten thousand sockets must not print ten thousand lines.
pub const MAX_NOTICES: usize = 20;

impl PackReport {
    fn skip(&mut self, path: &Path, why: &str) {
        self.notice(format!("skipped {}: {why}", path.display()));
    }

    fn notice(&mut self, text: String) {
        if self.notices.len() < MAX_NOTICES {
            self.notices.push(text);
        } else {
            self.notices_left_out += 1;
        }
    }
}

/// Bytes of file contents that [`pack`] will read, for a progress bar.
pub fn total_bytes(root: &Path, ignore_mode: IgnoreMode) -> u64 {
    walk(root, ignore_mode).flatten().filter_map(|e| e.metadata().ok()).filter(Metadata::is_file).map(|m| m.len()).sum()
}

/// Blocking. Calls `progress` with the number of content bytes read.
pub fn pack(root: &Path, ignore_mode: IgnoreMode, out: &mut dyn Write, progress: &dyn Fn(u64)) -> io::Result<PackReport> {
    // The root itself may be given as a symbolic link; below it, none is followed.
    let root = root.canonicalize().map_err(|e| with_path(root, e))?;
    let anchor = File::open(&root).map_err(|e| with_path(&root, e))?;
    let mut report = PackReport::default();
    let mut tar = Builder::new(zstd::Encoder::new(out, ZSTD_LEVEL)?);
    for entry in walk(&root, ignore_mode) {
        let entry = match entry {
            Ok(entry) => entry,
            Err(e) => {
                skip_unlisted(&root, &e, &mut report);
                continue;
            }
        };
        let Ok(relative) = entry.path().strip_prefix(&root) else { continue };
        if relative.as_os_str().is_empty() {
            continue;
        }
        let meta = match entry.path().symlink_metadata() {
            Ok(meta) => meta,
            // Deleted since the folder was listed; a slightly later listing would not contain it either.
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            Err(e) => {
                report.skip(relative, &unreadable_reason(&e));
                continue;
            }
        };
        append(&mut tar, &anchor, relative, &meta, &mut report, progress).map_err(|e| with_path(relative, e))?;
    }
    tar.into_inner()?.finish()?.flush()?;
    Ok(report)
}

/// Leaves out the contents of a folder that can't be listed; the rest is packed.
fn skip_unlisted(root: &Path, e: &ignore::Error, report: &mut PackReport) {
    match (error_path(e), e.io_error()) {
        // Deleted since its parent folder was listed.
        (_, Some(cause)) if cause.kind() == io::ErrorKind::NotFound => {}
        (Some(path), Some(cause)) => {
            let relative = path.strip_prefix(root).unwrap_or(path);
            report.skip(relative, &unreadable_reason(cause));
        }
        _ => report.notice(format!("skipped an entry: {e}")),
    }
}

fn error_path(e: &ignore::Error) -> Option<&Path> {
    match e {
        ignore::Error::WithPath { path, .. } => Some(path),
        ignore::Error::WithDepth { err, .. } | ignore::Error::WithLineNumber { err, .. } => error_path(err),
        _ => None,
    }
}

fn unreadable_reason(e: &io::Error) -> String {
    match e.kind() {
        io::ErrorKind::PermissionDenied => "permission denied".to_owned(),
        _ => format!("reading it failed: {e}"),
    }
}

fn walk(root: &Path, ignore_mode: IgnoreMode) -> Walk {
    let mut builder = WalkBuilder::new(root);
    builder.standard_filters(false).follow_links(false).sort_by_file_name(Ord::cmp);
    if ignore_mode == IgnoreMode::IgnoreFiles {
        // Git's ignore rules also apply in a folder that is not a repository yet. Those of parent folders apply only
        // inside a repository: a stray .gitignore in a home directory is unrelated to this folder.
        let is_in_repository = root.canonicalize().is_ok_and(|r| r.ancestors().skip(1).any(|a| a.join(".git").exists()));
        builder.git_ignore(true).git_exclude(true).require_git(false).parents(is_in_repository).add_custom_ignore_filename(IGNORE_FILE);
    }
    builder.build()
}

fn append<W: Write>(
    tar: &mut Builder<W>,
    anchor: &File,
    path: &Path,
    meta: &Metadata,
    report: &mut PackReport,
    progress: &dyn Fn(u64),
) -> io::Result<()> {
    let kind = meta.file_type();
    if kind.is_dir() {
        report.directories += 1;
        let mut directory = header(EntryType::Directory, meta);
        tar.append_data(&mut directory, path, io::empty())
    } else if kind.is_symlink() {
        let target = match read_link(anchor, path) {
            Ok(target) => target,
            // Deleted or replaced since it was listed.
            Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::InvalidInput) => return Ok(()),
            Err(e) => {
                report.skip(path, &unreadable_reason(&e));
                return Ok(());
            }
        };
        report.links += 1;
        tar.append_link(&mut header(EntryType::Symlink, meta), path, target)
    } else if kind.is_file() {
        append_file(tar, anchor, path, report, progress)
    } else {
        let what = match kind {
            k if k.is_socket() => "it is a socket",
            k if k.is_fifo() => "it is a named pipe",
            _ => "it is a device",
        };
        report.skip(path, what);
        Ok(())
    }
}

fn append_file<W: Write>(
    tar: &mut Builder<W>,
    anchor: &File,
    path: &Path,
    report: &mut PackReport,
    progress: &dyn Fn(u64),
) -> io::Result<()> {
    // Resolved again from the root without following links: an entry swapped since the listing can't lead outside.
    // Non-blocking, because the file may have become a pipe without a writer.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    let file = match rustix::fs::openat2(anchor, path, flags, Mode::empty(), resolve) {
        Ok(fd) => File::from(fd),
        Err(rustix::io::Errno::NOENT) => return Ok(()),
        Err(rustix::io::Errno::LOOP | rustix::io::Errno::XDEV) => {
            report.skip(path, "it was replaced by a symbolic link during the copy");
            return Ok(());
        }
        Err(e) => {
            report.skip(path, &unreadable_reason(&e.into()));
            return Ok(());
        }
    };
    let meta = file.metadata()?;
    if !meta.is_file() {
        report.skip(path, "it was replaced by something else than a regular file during the copy");
        return Ok(());
    }
    report.files += 1;
    report.bytes += meta.len();
    let mut header = header(EntryType::Regular, &meta);
    header.set_size(meta.len());
    let mut contents = ExactLength { file, left: meta.len(), missing: 0, progress };
    tar.append_data(&mut header, path, &mut contents)?;
    if contents.missing > 0 {
        let (path, missing) = (path.display(), contents.missing);
        report.notice(format!("{path} was truncated during the copy: the last {missing} bytes of the copy are zeros; copy it again"));
    }
    Ok(())
}

fn header(kind: EntryType, meta: &Metadata) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(meta.mode() & 0o7777);
    header.set_mtime(u64::try_from(meta.mtime()).unwrap_or(0));
    // Local owners don't exist in the sandbox: extracted files belong to the sandbox's user.
    header.set_uid(0);
    header.set_gid(0);
    header.set_size(0);
    header
}

fn read_link(anchor: &File, path: &Path) -> io::Result<PathBuf> {
    use std::os::unix::ffi::OsStringExt;
    let target = rustix::fs::readlinkat(anchor, path, Vec::new())?;
    Ok(std::ffi::OsString::from_vec(target.into_bytes()).into())
}

/// A file reader that returns exactly the length in the tar header, even if the file grows or shrinks while it is
/// read: otherwise the rest of the archive would be unreadable.
struct ExactLength<'a> {
    file: File,
    left: u64,
    /// Promised bytes that the file no longer had; zeros replace them.
    missing: u64,
    progress: &'a dyn Fn(u64),
}

impl Read for ExactLength<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let wanted = usize::try_from(self.left).unwrap_or(usize::MAX).min(buffer.len());
        if wanted == 0 {
            return Ok(0);
        }
        let n = match self.file.read(&mut buffer[..wanted])? {
            0 => {
                buffer[..wanted].fill(0);
                self.missing += wanted as u64;
                wanted
            }
            n => n,
        };
        self.left -= n as u64;
        (self.progress)(n as u64);
        Ok(n)
    }
}

fn with_path(path: &Path, e: io::Error) -> io::Error {
    io::Error::new(e.kind(), format!("{}: {e}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, fs, os::unix::fs::symlink};

    use super::*;

    fn contents(root: &Path, ignore_mode: IgnoreMode) -> (PackReport, BTreeMap<String, (EntryType, Vec<u8>)>) {
        let mut out = Vec::new();
        let report = pack(root, ignore_mode, &mut out, &|_| ()).unwrap();
        let mut archive = tar::Archive::new(zstd::Decoder::new(&out[..]).unwrap());
        let mut found = BTreeMap::new();
        for entry in archive.entries().unwrap() {
            let mut entry = entry.unwrap();
            let name = entry.path().unwrap().display().to_string().trim_end_matches('/').to_owned();
            let mut bytes = Vec::new();
            entry.read_to_end(&mut bytes).unwrap();
            if let Some(link) = entry.link_name().unwrap() {
                bytes = link.display().to_string().into_bytes();
            }
            found.insert(name, (entry.header().entry_type(), bytes));
        }
        (report, found)
    }

    fn names(found: &BTreeMap<String, (EntryType, Vec<u8>)>) -> Vec<&str> {
        found.keys().map(String::as_str).collect()
    }

    #[test]
    fn ignored_files_are_left_out_and_hidden_files_are_packed() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        fs::create_dir_all(root.join("target/deep")).unwrap();
        fs::create_dir_all(root.join("src")).unwrap();
        for (name, text) in [
            (".gitignore", "target/\n*.log\n"),
            (".coboxignore", "secret.env\n!keep.log\n"),
            (".hidden", "h"),
            ("a.txt", "abc"),
            ("b.log", "l"),
        ] {
            fs::write(root.join(name), text).unwrap();
        }
        for name in ["keep.log", "secret.env", "target/deep/x", "src/main.rs", "src/y.log"] {
            fs::write(root.join(name), "x").unwrap();
        }
        let (report, found) = contents(root, IgnoreMode::IgnoreFiles);
        assert_eq!(names(&found), [".coboxignore", ".gitignore", ".hidden", "a.txt", "keep.log", "src", "src/main.rs"]);
        assert_eq!((report.files, report.directories), (6, 1));
        assert_eq!(total_bytes(root, IgnoreMode::IgnoreFiles), report.bytes);

        let (_, everything) = contents(root, IgnoreMode::Nothing);
        assert!(everything.contains_key("target/deep/x") && everything.contains_key("secret.env"));
    }

    #[test]
    fn parent_ignore_files_apply_only_within_a_repository() {
        let dir = tempfile::tempdir().unwrap();
        let sub = dir.path().join("sub");
        fs::create_dir(&sub).unwrap();
        fs::write(dir.path().join(".gitignore"), "*.log\n").unwrap();
        fs::write(sub.join("a.log"), "x").unwrap();
        assert_eq!(names(&contents(&sub, IgnoreMode::IgnoreFiles).1), ["a.log"]);
        fs::create_dir(dir.path().join(".git")).unwrap();
        assert_eq!(contents(&sub, IgnoreMode::IgnoreFiles).1.len(), 0);
    }

    #[test]
    fn links_are_packed_as_links() {
        let outside = tempfile::tempdir().unwrap();
        fs::write(outside.path().join("private"), "private").unwrap();
        let dir = tempfile::tempdir().unwrap();
        symlink(outside.path(), dir.path().join("out")).unwrap();
        symlink(outside.path().join("private"), dir.path().join("file")).unwrap();
        let (report, found) = contents(dir.path(), IgnoreMode::IgnoreFiles);
        assert_eq!(names(&found), ["file", "out"]);
        assert_eq!((report.files, report.links), (0, 2));
        assert!(found.values().all(|(kind, _)| *kind == EntryType::Symlink));
        assert_eq!(found["out"].1, outside.path().display().to_string().as_bytes());
    }

    #[test]
    fn sockets_and_pipes_are_left_out_with_a_notice() {
        let dir = tempfile::tempdir().unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(dir.path().join("s")).unwrap();
        fs::write(dir.path().join("f"), "f").unwrap();
        let (report, found) = contents(dir.path(), IgnoreMode::Nothing);
        assert_eq!(names(&found), ["f"]);
        assert_eq!(report.notices, ["skipped s: it is a socket"]);
    }

    #[test]
    fn a_file_that_shrinks_while_it_is_read_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a");
        fs::write(&file, vec![b'x'; 1 << 20]).unwrap();
        let shrink = |_| File::options().write(true).open(&file).unwrap().set_len(0).unwrap();
        let mut out = Vec::new();
        let report = pack(dir.path(), IgnoreMode::Nothing, &mut out, &shrink).unwrap();
        assert_eq!(report.files, 1);
        assert!(report.notices[0].starts_with("a was truncated during the copy: the last "), "{:?}", report.notices);
    }

    #[test]
    fn an_unlistable_folder_loses_only_its_own_contents() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        for folder in ["gone", "other"] {
            fs::create_dir(root.join(folder)).unwrap();
            fs::write(root.join(folder).join("x"), "x").unwrap();
        }
        fs::write(root.join("a"), "a").unwrap();
        fs::write(root.join("z"), "z").unwrap();
        // Both entries were listed by then, but not yet read.
        let change = |_| {
            fs::remove_dir_all(root.join("gone")).ok();
            if fs::remove_dir_all(root.join("other")).is_ok() {
                fs::write(root.join("other"), "a file now").unwrap();
            }
        };
        let mut out = Vec::new();
        let report = pack(root, IgnoreMode::Nothing, &mut out, &change).unwrap();
        assert_eq!(report.files, 3, "a, other and z");
        assert_eq!(report.notices.len(), 1, "{:?}", report.notices);
        assert!(report.notices[0].starts_with("skipped other: reading it failed: "), "{:?}", report.notices);
    }

    #[test]
    fn long_and_unusual_names_and_modes_are_preserved() {
        use std::os::unix::{ffi::OsStrExt, fs::PermissionsExt};
        let dir = tempfile::tempdir().unwrap();
        let strange = Path::new(std::ffi::OsStr::from_bytes(b"caf\xe9")).join("x".repeat(150)).join("y".repeat(150));
        fs::create_dir_all(dir.path().join(strange.parent().unwrap())).unwrap();
        fs::write(dir.path().join(&strange), "deep").unwrap();
        fs::set_permissions(dir.path().join(&strange), fs::Permissions::from_mode(0o751)).unwrap();
        let mut out = Vec::new();
        pack(dir.path(), IgnoreMode::Nothing, &mut out, &|_| ()).unwrap();
        let mut archive = tar::Archive::new(zstd::Decoder::new(&out[..]).unwrap());
        let last = archive.entries().unwrap().last().unwrap().unwrap();
        assert_eq!(last.path().unwrap(), strange);
        assert_eq!(last.header().mode().unwrap(), 0o751);
    }
}
