//! A sandbox that speaks the protocol and lies: nothing is written outside the local folder, no file gets other content
//! than announced, and a sync with `once` ends.

use std::{
    fs,
    io::Write,
    os::unix::{fs::symlink, net::UnixStream},
    path::{Path, PathBuf},
    thread,
};

use cobox_sync::{ConnectError, Connection, Digest, Engine, Entry, Message, Outcome, Problem, RelPath, Settings, Status, SyncError};

/// The answers to each message; empty if it needs none.
type Script = Box<dyn FnMut(&Message) -> Vec<Message> + Send>;

struct LocalEnd {
    dir: tempfile::TempDir,
}

impl LocalEnd {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("local")).unwrap();
        fs::create_dir(dir.path().join("outside")).unwrap();
        Self { dir }
    }

    fn local(&self, path: &str) -> PathBuf {
        self.dir.path().join("local").join(path)
    }

    fn outside(&self) -> PathBuf {
        self.dir.path().join("outside")
    }

    fn sync_with(&self, script: Script) -> Result<Status, SyncError> {
        let mut script = Some(script);
        self.run(move |stream| {
            let mut script = script.take()?;
            thread::spawn(move || play_script(stream, &mut script));
            Some(())
        })
    }

    /// Runs a sync with a single connection.
    fn run(&self, mut serve: impl FnMut(UnixStream) -> Option<()>) -> Result<Status, SyncError> {
        let settings = Settings { once: true, ..Settings::default() };
        let engine = Engine::open(&self.local(""), &self.dir.path().join("base"), settings, Box::new(|_| ())).unwrap();
        let mut connector = || {
            let (ours, theirs) = UnixStream::pair().unwrap();
            serve(theirs).ok_or_else(|| ConnectError::Permanent("the sandbox is gone".to_owned()))?;
            Ok(Connection { reader: Box::new(ours.try_clone().unwrap()), writer: Box::new(ours) })
        };
        engine.run(&mut connector)
    }
}

fn play_script(stream: UnixStream, script: &mut Script) {
    let mut reader = stream.try_clone().unwrap();
    let mut writer = stream;
    while let Ok(message) = Message::read(&mut reader) {
        for answer in script(&message) {
            // The local end may have disconnected.
            let _ = writer.write_all(&answer.encode());
        }
    }
}

fn path(text: &str) -> RelPath {
    RelPath::new(text.as_bytes()).unwrap()
}

fn file(content: &[u8]) -> Entry {
    Entry::File { digest: Digest::of(content), size: content.len() as u64, exec: false }
}

/// A sandbox that reports these entries in the first scan and leaves other messages to `other`.
fn sandbox_with(entries: Vec<(&'static str, Entry)>, mut other: impl FnMut(&Message) -> Vec<Message> + Send + 'static) -> Script {
    let mut updates: Vec<_> = entries.into_iter().map(|(name, entry)| (path(name), Some(entry))).collect();
    Box::new(move |message| match message {
        Message::Hello { .. } => vec![Message::Welcome { version: 1 }],
        Message::Scan { .. } => vec![
            Message::Updates(std::mem::take(&mut updates)),
            Message::Scanned { has_rules: false, has_problems: false, is_partial: false },
        ],
        message => other(message),
    })
}

/// Content for the first need.
fn content(bytes: &[u8]) -> Vec<Message> {
    let (whole, done) = (1, 3);
    let stream = [&0u32.to_be_bytes()[..], &[whole], &(bytes.len() as u32).to_be_bytes(), bytes, &[done]].concat();
    vec![Message::Content { raw: stream.len() as u32, is_packed: false, bytes: stream }, Message::ContentEnd]
}

fn is_empty(folder: &Path) -> bool {
    fs::read_dir(folder).unwrap().next().is_none()
}

#[test]
fn a_path_that_leaves_the_folder_is_rejected() {
    let local_end = LocalEnd::new();
    let mut honest = Some(sandbox_with(vec![("up", Entry::Dir), ("up/evil", file(b"x"))], |_| Vec::new()));
    let ended = local_end.run(|stream| {
        let mut honest = honest.take()?;
        thread::spawn(move || {
            let (mut reader, mut writer) = (stream.try_clone().unwrap(), stream);
            while let Ok(message) = Message::read(&mut reader) {
                let mut bytes: Vec<u8> = honest(&message).iter().flat_map(Message::encode).collect();
                if let Some(at) = bytes.windows(7).position(|w| w == b"up/evil") {
                    bytes[at..at + 2].copy_from_slice(b"..");
                }
                // The local end may have disconnected.
                let _ = writer.write_all(&bytes);
            }
        });
        Some(())
    });
    assert!(matches!(ended, Err(SyncError::Protocol(_))), "{ended:?}");
    assert!(is_empty(&local_end.outside()) && !local_end.dir.path().join("evil").exists());
}

#[test]
fn reserved_paths_are_rejected() {
    for name in [".cobox-sync", "a/.cobox-sync", ".cobox-trash", ".Cobox-Trash", ".git/index.lock"] {
        let local_end = LocalEnd::new();
        let folders = path(name).ancestors().map(|folder| (folder, Some(Entry::Dir))).collect::<Vec<_>>();
        let script: Script = Box::new(move |message| match message {
            Message::Hello { .. } => vec![Message::Welcome { version: 1 }],
            Message::Scan { .. } => {
                let updates = folders.iter().cloned().chain([(path(name), Some(Entry::Dir))]).collect();
                vec![Message::Updates(updates), Message::Scanned { has_rules: false, has_problems: false, is_partial: false }]
            }
            _ => Vec::new(),
        });
        let ended = local_end.sync_with(script);
        assert!(matches!(ended, Err(SyncError::Protocol(_))), "{name}: {ended:?}");
        assert!(!local_end.local(name).exists(), "{name}");
    }
}

#[test]
fn content_with_a_wrong_digest_is_never_placed_and_is_reported() {
    let local_end = LocalEnd::new();
    let script = sandbox_with(vec![("f", file(b"good"))], |message| match message {
        Message::WantsEnd => content(b"evil"),
        _ => Vec::new(),
    });
    let status = local_end.sync_with(script).unwrap();
    assert!(!local_end.local("f").exists());
    assert_eq!(status.local_problems.get(&path("f")), Some(&Problem::Changing));
    assert!(status.local_problems[&path("f")].is_failure());
}

#[test]
fn huge_claimed_sizes_allocate_nothing() {
    let local_end = LocalEnd::new();
    let huge = |of: &[u8]| Entry::File { digest: Digest::of(of), size: u64::MAX, exec: false };
    let script = sandbox_with(vec![("a", huge(b"a")), ("b", huge(b"b")), ("c", huge(b"c"))], |message| match message {
        Message::WantsEnd => vec![Message::ContentEnd],
        _ => Vec::new(),
    });
    let status = local_end.sync_with(script).unwrap();
    assert_eq!(status.local_problems.len(), 3);
    assert!(is_empty(&local_end.local("")));
}

#[test]
fn a_file_longer_than_announced_ends_the_sync() {
    let local_end = LocalEnd::new();
    let script = sandbox_with(vec![("f", file(b"four"))], |message| match message {
        Message::WantsEnd => content(b"more than four"),
        _ => Vec::new(),
    });
    assert!(matches!(local_end.sync_with(script), Err(SyncError::Protocol(_))));
    assert!(!local_end.local("f").exists());
}

#[test]
fn links_that_leave_the_folder_are_not_created() {
    let local_end = LocalEnd::new();
    let link = |target: &str| Entry::Link { target: target.as_bytes().into() };
    let status = local_end
        .sync_with(sandbox_with(vec![("a", link("/etc")), ("b", link("../outside")), ("c", link("fine"))], |_| Vec::new()))
        .unwrap();
    assert_eq!(status.local_problems.keys().map(ToString::to_string).collect::<Vec<_>>(), ["a", "b"]);
    assert!(local_end.local("c").is_symlink() && !local_end.local("a").is_symlink() && !local_end.local("b").is_symlink());
}

#[test]
fn a_directory_swapped_for_a_link_is_not_followed() {
    let local_end = LocalEnd::new();
    fs::create_dir(local_end.local("d")).unwrap();
    let (folder, outside) = (local_end.local("d"), local_end.outside());
    let script = sandbox_with(vec![("d", Entry::Dir), ("d/f", file(b"good"))], move |message| match message {
        Message::WantsEnd => {
            // The last moment before the file is placed.
            if folder.is_dir() && !folder.is_symlink() {
                fs::remove_dir(&folder).unwrap();
                symlink(&outside, &folder).unwrap();
            }
            content(b"good")
        }
        Message::ChangesEnd => vec![Message::Outcomes(vec![Outcome::Changed]), Message::OutcomesEnd],
        _ => Vec::new(),
    });
    // The sync may end in any way, but nothing may be written through the link.
    let _ = local_end.sync_with(script);
    assert!(is_empty(&local_end.outside()));
}

#[test]
fn unrequested_outcomes_end_the_sync() {
    let local_end = LocalEnd::new();
    fs::write(local_end.local("mine"), "mine").unwrap();
    let script = sandbox_with(Vec::new(), |message| match message {
        Message::NeedsEnd => vec![Message::WantsEnd],
        Message::ContentEnd => vec![Message::StagedEnd],
        Message::ChangesEnd => vec![Message::Outcomes(vec![Outcome::Done; 1000]), Message::OutcomesEnd],
        _ => Vec::new(),
    });
    assert!(matches!(local_end.sync_with(script), Err(SyncError::Protocol(_))));
    assert_eq!(fs::read_to_string(local_end.local("mine")).unwrap(), "mine");
}

#[test]
fn a_sandbox_that_reports_everything_deleted_halts_the_sync() {
    let local_end = LocalEnd::new();
    for number in 0..20 {
        fs::write(local_end.local(&format!("f{number}")), "mine").unwrap();
    }
    let agreeing = |message: &Message| match message {
        Message::NeedsEnd => vec![Message::WantsEnd],
        Message::ContentEnd => vec![Message::StagedEnd],
        Message::ChangesEnd => vec![Message::Outcomes(vec![Outcome::Done; 20]), Message::OutcomesEnd],
        _ => Vec::new(),
    };
    local_end.sync_with(sandbox_with(Vec::new(), agreeing)).unwrap();
    let ended = local_end.sync_with(sandbox_with(Vec::new(), agreeing));
    assert!(matches!(ended, Err(SyncError::Halted(_))), "{ended:?}");
    assert_eq!(fs::read_dir(local_end.local("")).unwrap().count(), 20);
}

/// A raw frame of updates, in answer to a scan.
fn updates_frame(items: &[u8]) -> Vec<u8> {
    const UPDATES: u8 = 5;
    [&(items.len() as u32 + 1).to_be_bytes()[..], &[UPDATES], items].concat()
}

/// An encoded directory at a path that [`RelPath`] rejects.
fn folder_at(path: &[u8]) -> Vec<u8> {
    const FOLDER: u8 = 1;
    [&(path.len() as u32).to_be_bytes()[..], path, &[FOLDER]].concat()
}

impl LocalEnd {
    /// Runs a sync in which the sandbox answers the first scan with these bytes.
    fn sync_with_bytes(&self, answer: &[u8]) -> Result<Status, SyncError> {
        let mut answer = Some(answer.to_vec());
        self.run(move |stream| {
            let answer = answer.take()?;
            thread::spawn(move || {
                let (mut reader, mut writer) = (stream.try_clone().unwrap(), stream);
                while let Ok(message) = Message::read(&mut reader) {
                    let bytes = match message {
                        Message::Hello { .. } => Message::Welcome { version: 1 }.encode(),
                        Message::Scan { .. } => answer.clone(),
                        _ => Vec::new(),
                    };
                    // The local end may have disconnected.
                    let _ = writer.write_all(&bytes);
                }
            });
            Some(())
        })
    }

    /// The contents of all files in the folder, including the trash.
    fn contents(&self) -> Vec<String> {
        fn collect(folder: &Path, found: &mut Vec<String>) {
            for entry in fs::read_dir(folder).unwrap().flatten() {
                let kind = entry.file_type().unwrap();
                if kind.is_dir() {
                    collect(&entry.path(), found);
                } else if kind.is_file() {
                    found.push(String::from_utf8_lossy(&fs::read(entry.path()).unwrap()).into_owned());
                }
            }
        }
        let mut found = Vec::new();
        collect(&self.local(""), &mut found);
        found
    }
}

#[test]
fn invalid_path_bytes_end_the_sync_and_write_nothing() {
    let (long_name, deep, long) = ([b'x'; 256], b"d/".repeat(250), b"dddddddd/".repeat(500));
    let paths: [&[u8]; 12] = [
        b"",
        b"/",
        b"/tmp/cobox-evil",
        b"..",
        b"../outside/evil",
        b"a/../../outside/evil",
        b"./a",
        b"a//b",
        b"a/",
        b"a\0b",
        &long_name,
        &deep,
    ];
    for path in paths.into_iter().chain([&long[..long.len() - 1]]) {
        let local_end = LocalEnd::new();
        let ended = local_end.sync_with_bytes(&updates_frame(&folder_at(path)));
        assert!(matches!(ended, Err(SyncError::Protocol(_))), "{}: {ended:?}", path.escape_ascii());
        assert!(is_empty(&local_end.local("")) && is_empty(&local_end.outside()), "{}", path.escape_ascii());
        assert!(!Path::new("/tmp/cobox-evil").exists());
    }
}

#[test]
fn lengths_beyond_the_frame_end_the_sync_before_memory_is_allocated() {
    let peak = || {
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
    };
    const MAX_GROWTH_BYTES: u64 = 64 * 1024 * 1024;
    let before = peak();
    let link = [&folder_at(b"a")[..5], &[4], &u32::MAX.to_be_bytes()[..]].concat();
    let file_without_size = [&folder_at(b"a")[..5], &[2], &[0; 8][..]].concat();
    for answer in [
        u32::MAX.to_be_bytes().to_vec(),
        [&(320 * 1024 + 1u32).to_be_bytes()[..], &[5]].concat(),
        0u32.to_be_bytes().to_vec(),
        updates_frame(&u32::MAX.to_be_bytes()),
        updates_frame(&link),
        updates_frame(&file_without_size),
        updates_frame(&[&folder_at(b"a")[..5], &[9]].concat()),
        [&1u32.to_be_bytes()[..], &[200]].concat(),
    ] {
        let local_end = LocalEnd::new();
        let ended = local_end.sync_with_bytes(&answer);
        assert!(matches!(ended, Err(SyncError::Protocol(_))), "{answer:?}: {ended:?}");
        assert!(is_empty(&local_end.local("")));
    }
    assert!(peak() - before < MAX_GROWTH_BYTES, "{} bytes more", peak() - before);
}

#[test]
fn a_file_below_a_link_is_rejected_and_local_links_are_not_followed() {
    let local_end = LocalEnd::new();
    let outside = Entry::Link { target: b"../outside"[..].into() };
    let ended = local_end.sync_with(sandbox_with(vec![("d", outside), ("d/f", file(b"evil"))], |_| Vec::new()));
    assert!(matches!(ended, Err(SyncError::Protocol(_))), "{ended:?}");

    // The user's own link leaves the folder, and the sandbox claims that it is a directory.
    symlink(local_end.outside(), local_end.local("d")).unwrap();
    let script = sandbox_with(vec![("d", Entry::Dir), ("d/f", file(b"evil"))], |message| match message {
        Message::WantsEnd => content(b"evil"),
        Message::NeedsEnd => vec![Message::WantsEnd],
        Message::ContentEnd => vec![Message::StagedEnd],
        Message::ChangesEnd => vec![Message::Outcomes(vec![Outcome::Done]), Message::OutcomesEnd],
        _ => Vec::new(),
    });
    let _ = local_end.sync_with(script);
    assert!(local_end.local("d").is_symlink() && is_empty(&local_end.outside()));
}

#[test]
fn a_file_replacing_a_directory_moves_its_contents_to_the_trash() {
    let local_end = LocalEnd::new();
    fs::create_dir(local_end.local("d")).unwrap();
    for name in ["keep", "d/a", "d/b"] {
        fs::write(local_end.local(name), format!("mine: {name}")).unwrap();
    }
    let mine = |name: &'static str| (name, file(format!("mine: {name}").as_bytes()));
    local_end.sync_with(sandbox_with(vec![("d", Entry::Dir), mine("keep"), mine("d/a"), mine("d/b")], |_| Vec::new())).unwrap();
    let script = sandbox_with(vec![("d", file(b"evil")), mine("keep")], |message| match message {
        Message::WantsEnd => content(b"evil"),
        _ => Vec::new(),
    });
    local_end.sync_with(script).unwrap();
    assert_eq!(fs::read(local_end.local("d")).unwrap(), b"evil");
    let contents = local_end.contents();
    for name in ["keep", "d/a", "d/b"] {
        assert!(contents.contains(&format!("mine: {name}")), "{name}: {contents:?}");
    }
}

#[test]
fn entries_after_the_end_of_a_scan_end_the_sync() {
    let local_end = LocalEnd::new();
    let late = Message::Updates(vec![(path("late"), Some(file(b"late")))]);
    let script = sandbox_with(vec![("f", file(b"good"))], move |message| match message {
        Message::WantsEnd => [vec![late.clone()], content(b"good")].concat(),
        _ => Vec::new(),
    });
    let ended = local_end.sync_with(script);
    assert!(matches!(ended, Err(SyncError::Protocol(_))), "{ended:?}");
    assert!(!local_end.local("f").exists() && !local_end.local("late").exists());
}

#[test]
fn names_differing_only_in_case_stay_two_files_and_hooks_are_held_back() {
    let local_end = LocalEnd::new();
    let entries = vec![
        (".GIT", Entry::Dir),
        (".GIT/hooks", Entry::Dir),
        (".GIT/hooks/post-checkout", file(b"evil")),
        (".git", Entry::Dir),
        (".git/Hooks", Entry::Dir),
        (".git/Hooks/pre-commit", file(b"evil")),
        (".git/hooks", Entry::Dir),
        (".git/hooks/pre-commit", file(b"evil")),
        ("README", file(b"one")),
        ("readme", file(b"two")),
    ];
    let script = sandbox_with(entries, |message| match message {
        Message::WantsEnd => {
            let part = |index: u32, bytes: &[u8]| [&index.to_be_bytes()[..], &[1, 0, 0, 0, 3], bytes, &[3]].concat();
            let stream = [part(0, b"one"), part(1, b"two")].concat();
            vec![Message::Content { raw: stream.len() as u32, is_packed: false, bytes: stream }, Message::ContentEnd]
        }
        _ => Vec::new(),
    });
    let status = local_end.sync_with(script).unwrap();
    assert_eq!(
        (fs::read(local_end.local("README")).unwrap(), fs::read(local_end.local("readme")).unwrap()),
        (b"one".to_vec(), b"two".to_vec())
    );
    let held_back: Vec<String> = status.held_back.iter().map(ToString::to_string).collect();
    for hook in [".GIT/hooks/post-checkout", ".git/Hooks/pre-commit", ".git/hooks/pre-commit"] {
        assert!(!local_end.local(hook).exists() && held_back.contains(&hook.to_owned()), "{hook}: {held_back:?}");
    }
}

#[test]
fn sending_a_file_repeatedly_ends_the_sync() {
    let local_end = LocalEnd::new();
    let script = sandbox_with(vec![("f", file(b"good"))], |message| match message {
        Message::WantsEnd => {
            const ABANDONED: u8 = 4;
            let stream = [0, 0, 0, 0, ABANDONED].repeat(1000);
            vec![Message::Content { raw: stream.len() as u32, is_packed: false, bytes: stream }, Message::ContentEnd]
        }
        _ => Vec::new(),
    });
    let ended = local_end.sync_with(script);
    assert!(matches!(ended, Err(SyncError::Protocol("it sent a file twice"))), "{ended:?}");
    assert!(!local_end.local("f").exists());
}

#[test]
fn a_copy_beyond_any_file_is_a_protocol_error() {
    const COPY: u8 = 2;
    for (offset, length) in [(u64::MAX, 4u64), (i64::MAX as u64 + 1, 4), (0, 0), (0, u64::MAX), (u64::MAX, u64::MAX)] {
        let local_end = LocalEnd::new();
        fs::write(local_end.local("f"), "mine").unwrap();
        local_end.sync_with(sandbox_with(vec![("f", file(b"mine"))], |_| Vec::new())).unwrap();
        let script = sandbox_with(vec![("f", file(b"evil"))], move |message| match message {
            Message::WantsEnd => {
                let stream = [&[0, 0, 0, 0, COPY][..], &offset.to_be_bytes(), &length.to_be_bytes(), &[3]].concat();
                vec![Message::Content { raw: stream.len() as u32, is_packed: false, bytes: stream }, Message::ContentEnd]
            }
            _ => Vec::new(),
        });
        let ended = local_end.sync_with(script);
        assert!(matches!(ended, Err(SyncError::Protocol(_))), "{offset} {length}: {ended:?}");
        assert_eq!(fs::read(local_end.local("f")).unwrap(), b"mine");
    }
}
