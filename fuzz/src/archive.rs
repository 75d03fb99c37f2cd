//! A tar from a stranger: whatever is in it, nothing appears or changes outside the directory it goes into.

use std::{fs, os::unix::fs::symlink, path::Path};

use boxd::fuzzing;

use crate::{choose, claims, open, temporary};

/// Pieces and entries: some megabytes at most.
const STEPS: u32 = 64;
const SENTINEL: &[u8] = b"untouched";

/// The first byte says whether it is compressed and what is in the directory already.
pub fn run(data: &[u8]) {
    let ([choice], archive) = choose::<1>(data);
    let outside = temporary();
    let root = outside.path().join("root");
    let target = root.join("target");
    fs::create_dir_all(&target).expect("a directory can be made");
    fs::write(outside.path().join("sentinel"), SENTINEL).expect("a file can be written");
    fs::write(root.join("beside"), SENTINEL).expect("a file can be written");
    if choice & 2 != 0 {
        // Links that a program of the sandbox may have put in the way.
        for (name, to) in [("up", ".."), ("out", "../.."), ("a", "/"), ("b", "../beside")] {
            symlink(to, target.join(name)).expect("a link can be made");
        }
    }
    let _ = fuzzing::unpack(open(&root), "/target", archive, choice & 1 != 0, &claims(), STEPS);
    assert_eq!(names(outside.path()), ["root", "sentinel"]);
    assert_eq!(names(&root), ["beside", "target"]);
    assert_eq!(fs::read(outside.path().join("sentinel")).expect("it is there"), SENTINEL);
    assert_eq!(fs::read(root.join("beside")).expect("it is there"), SENTINEL);
    let leftovers: Vec<String> = names(&target).into_iter().filter(|name| name.starts_with(".cobox-") && name.ends_with(".tmp")).collect();
    assert!(leftovers.is_empty(), "{leftovers:?}");
    // One that was made unreadable still has to go away.
    make_removable(&target);
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).expect("a directory can be read");
    let mut names: Vec<String> = entries.filter_map(|entry| entry.ok().map(|e| e.file_name().to_string_lossy().into_owned())).collect();
    names.sort();
    names
}

fn make_removable(directory: &Path) {
    use std::os::unix::fs::PermissionsExt;
    let Ok(entries) = fs::read_dir(directory) else { return };
    for entry in entries.flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            // What stays behind is in a temporary place.
            let _ = fs::set_permissions(entry.path(), fs::Permissions::from_mode(0o700));
            make_removable(&entry.path());
        }
    }
}
