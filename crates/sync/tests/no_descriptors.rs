//! A process without free file descriptors, in a test program of its own: a path that can't be scanned does not count
//! as deleted.

use std::{fs, sync::Arc};

use cobox_sync::{Folder, Limits, LocalHooks, Problem, RelPath, open_root};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

#[test]
fn a_file_in_an_unreadable_directory_is_not_treated_as_deleted() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("d")).unwrap();
    fs::write(dir.path().join("d/f"), "1").unwrap();
    let hooks = Arc::new(LocalHooks::new(dir.path().to_owned()));
    let mut folder = Folder::open(open_root(dir.path()).unwrap(), Limits::default(), hooks, || ()).unwrap();
    folder.scan(true).unwrap();
    let path = RelPath::new(b"d/f").unwrap();
    assert!(folder.tree().get(&path).is_some());
    fs::write(dir.path().join("d/f"), "2").unwrap();
    let before = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(0), ..before }).unwrap();
    let updates = folder.scan(false);
    setrlimit(Resource::Nofile, before).unwrap();
    assert_eq!(updates.unwrap(), []);
    assert_eq!(folder.problems().get(&path), Some(&Problem::Changing));
    folder.scan(false).unwrap();
    assert!(folder.problems().is_empty());
}
