//! Untrusted tar archives: no archive can create or change anything outside of its target directory.

use std::{fs, os::unix::fs::symlink, path::Path};

use boxd::fuzzing;

use crate::{choose, claims, open, temporary};

/// Maximum number of chunks and entries, which keeps an archive to some megabytes.
const MAX_STEPS: u32 = 64;
const SENTINEL: &[u8] = b"untouched";

/// The first byte decides whether the archive is compressed and what the directory already contains.
pub fn run(data: &[u8]) {
    let ([choice], archive) = choose::<1>(data);
    let outside = temporary();
    let root = outside.path().join("root");
    let target = root.join("target");
    fs::create_dir_all(&target).expect("creating a directory succeeds");
    fs::write(outside.path().join("sentinel"), SENTINEL).expect("writing a file succeeds");
    fs::write(root.join("beside"), SENTINEL).expect("writing a file succeeds");
    if choice & 2 != 0 {
        // Links that a program in the sandbox may have placed there.
        for (name, to) in [("up", ".."), ("out", "../.."), ("a", "/"), ("b", "../beside")] {
            symlink(to, target.join(name)).expect("creating a link succeeds");
        }
    }
    let _ = fuzzing::unpack(open(&root), "/target", archive, choice & 1 != 0, &claims(), MAX_STEPS);
    assert_eq!(names(outside.path()), ["root", "sentinel"]);
    assert_eq!(names(&root), ["beside", "target"]);
    assert_eq!(fs::read(outside.path().join("sentinel")).expect("the file exists"), SENTINEL);
    assert_eq!(fs::read(root.join("beside")).expect("the file exists"), SENTINEL);
    let leftovers: Vec<String> = names(&target).into_iter().filter(|name| name.starts_with(".cobox-") && name.ends_with(".tmp")).collect();
    assert!(leftovers.is_empty(), "{leftovers:?}");
    // A directory that was made unreadable must still be removable.
    make_removable(&target);
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).expect("reading a directory succeeds");
    let mut names: Vec<String> = entries.filter_map(|entry| entry.ok().map(|e| e.file_name().to_string_lossy().into_owned())).collect();
    names.sort();
    names
}

fn make_removable(directory: &Path) {
    use std::os::unix::fs::PermissionsExt;
    let Ok(entries) = fs::read_dir(directory) else { return };
    for entry in entries.flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            // Ignored: a directory that can't be changed stays in a temporary directory.
            let _ = fs::set_permissions(entry.path(), fs::Permissions::from_mode(0o700));
            make_removable(&entry.path());
        }
    }
}
