//! A sandbox that speaks the protocol and lies: nothing is written here outside the folder, nor anything that is not what it was said to be,
//! and a sync that is to end does.

use std::{
    fs,
    io::Write,
    os::unix::{fs::symlink, net::UnixStream},
    path::{Path, PathBuf},
    thread,
};

use cobox_sync::{Connection, Digest, Engine, Entry, Message, NoConnection, Outcome, Problem, RelPath, Settings, Status, SyncError};

/// What it answers to each message; nothing to those it only takes in.
type Script = Box<dyn FnMut(&Message) -> Vec<Message> + Send>;

struct Laptop {
    dir: tempfile::TempDir,
}

impl Laptop {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("here")).unwrap();
        fs::create_dir(dir.path().join("outside")).unwrap();
        Self { dir }
    }

    fn here(&self, path: &str) -> PathBuf {
        self.dir.path().join("here").join(path)
    }

    fn outside(&self) -> PathBuf {
        self.dir.path().join("outside")
    }

    fn sync_with(&self, script: Script) -> Result<Status, SyncError> {
        let mut script = Some(script);
        self.run(move |stream| {
            let mut script = script.take()?;
            thread::spawn(move || act(stream, &mut script));
            Some(())
        })
    }

    /// One connection; there is no second.
    fn run(&self, mut serve: impl FnMut(UnixStream) -> Option<()>) -> Result<Status, SyncError> {
        let settings = Settings { once: true, ..Settings::default() };
        let engine = Engine::open(&self.here(""), &self.dir.path().join("base"), settings, Box::new(|_| ())).unwrap();
        let mut dial = || {
            let (ours, theirs) = UnixStream::pair().unwrap();
            serve(theirs).ok_or_else(|| NoConnection::Final("it is gone".to_owned()))?;
            Ok(Connection { reader: Box::new(ours.try_clone().unwrap()), writer: Box::new(ours) })
        };
        engine.run(&mut dial)
    }
}

fn act(stream: UnixStream, script: &mut Script) {
    let mut reader = stream.try_clone().unwrap();
    let mut writer = stream;
    while let Ok(message) = Message::read(&mut reader) {
        for answer in script(&message) {
            // The laptop may have had enough.
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

/// Has these, tells them with the first scan, and leaves the rest to what `other` says.
fn having(entries: Vec<(&'static str, Entry)>, mut other: impl FnMut(&Message) -> Vec<Message> + Send + 'static) -> Script {
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

/// The first of what is needed, with this content.
fn content(bytes: &[u8]) -> Vec<Message> {
    let (whole, done) = (1, 3);
    let stream = [&0u32.to_be_bytes()[..], &[whole], &(bytes.len() as u32).to_be_bytes(), bytes, &[done]].concat();
    vec![Message::Content { raw: stream.len() as u32, is_packed: false, bytes: stream }, Message::ContentEnd]
}

fn is_empty(folder: &Path) -> bool {
    fs::read_dir(folder).unwrap().next().is_none()
}

#[test]
fn a_path_that_leads_out_of_the_folder_is_no_path() {
    let laptop = Laptop::new();
    let mut honest = Some(having(vec![("up", Entry::Dir), ("up/evil", file(b"x"))], |_| Vec::new()));
    let ended = laptop.run(|stream| {
        let mut honest = honest.take()?;
        thread::spawn(move || {
            let (mut reader, mut writer) = (stream.try_clone().unwrap(), stream);
            while let Ok(message) = Message::read(&mut reader) {
                let mut said: Vec<u8> = honest(&message).iter().flat_map(Message::encode).collect();
                if let Some(at) = said.windows(7).position(|w| w == b"up/evil") {
                    said[at..at + 2].copy_from_slice(b"..");
                }
                // The laptop may have had enough.
                let _ = writer.write_all(&said);
            }
        });
        Some(())
    });
    assert!(matches!(ended, Err(SyncError::Protocol(_))), "{ended:?}");
    assert!(is_empty(&laptop.outside()) && !laptop.dir.path().join("evil").exists());
}

#[test]
fn nothing_can_be_put_where_content_waits_or_where_git_keeps_its_locks() {
    for name in [".cobox-sync", "a/.cobox-sync", ".cobox-trash", ".Cobox-Trash", ".git/index.lock"] {
        let laptop = Laptop::new();
        let folders = path(name).ancestors().map(|folder| (folder, Some(Entry::Dir))).collect::<Vec<_>>();
        let script: Script = Box::new(move |message| match message {
            Message::Hello { .. } => vec![Message::Welcome { version: 1 }],
            Message::Scan { .. } => {
                let updates = folders.iter().cloned().chain([(path(name), Some(Entry::Dir))]).collect();
                vec![Message::Updates(updates), Message::Scanned { has_rules: false, has_problems: false, is_partial: false }]
            }
            _ => Vec::new(),
        });
        let ended = laptop.sync_with(script);
        assert!(matches!(ended, Err(SyncError::Protocol(_))), "{name}: {ended:?}");
        assert!(!laptop.here(name).exists(), "{name}");
    }
}

#[test]
fn content_that_is_not_what_it_was_said_to_be_is_never_placed_and_is_told() {
    let laptop = Laptop::new();
    let script = having(vec![("f", file(b"good"))], |message| match message {
        Message::WantsEnd => content(b"evil"),
        _ => Vec::new(),
    });
    let status = laptop.sync_with(script).unwrap();
    assert!(!laptop.here("f").exists());
    assert_eq!(status.here_problems.get(&path("f")), Some(&Problem::Changing));
    assert!(status.here_problems[&path("f")].is_failure());
}

#[test]
fn sizes_beyond_all_measure_are_only_numbers() {
    let laptop = Laptop::new();
    let huge = |of: &[u8]| Entry::File { digest: Digest::of(of), size: u64::MAX, exec: false };
    let script = having(vec![("a", huge(b"a")), ("b", huge(b"b")), ("c", huge(b"c"))], |message| match message {
        Message::WantsEnd => vec![Message::ContentEnd],
        _ => Vec::new(),
    });
    let status = laptop.sync_with(script).unwrap();
    assert_eq!(status.here_problems.len(), 3);
    assert!(is_empty(&laptop.here("")));
}

#[test]
fn a_file_longer_than_it_was_said_to_be_ends_the_sync() {
    let laptop = Laptop::new();
    let script = having(vec![("f", file(b"four"))], |message| match message {
        Message::WantsEnd => content(b"more than four"),
        _ => Vec::new(),
    });
    assert!(matches!(laptop.sync_with(script), Err(SyncError::Protocol(_))));
    assert!(!laptop.here("f").exists());
}

#[test]
fn links_that_lead_out_are_not_made() {
    let laptop = Laptop::new();
    let link = |target: &str| Entry::Link { target: target.as_bytes().into() };
    let status =
        laptop.sync_with(having(vec![("a", link("/etc")), ("b", link("../outside")), ("c", link("fine"))], |_| Vec::new())).unwrap();
    assert_eq!(status.here_problems.keys().map(ToString::to_string).collect::<Vec<_>>(), ["a", "b"]);
    assert!(laptop.here("c").is_symlink() && !laptop.here("a").is_symlink() && !laptop.here("b").is_symlink());
}

#[test]
fn a_folder_that_became_a_link_meanwhile_is_not_gone_through() {
    let laptop = Laptop::new();
    fs::create_dir(laptop.here("d")).unwrap();
    let (folder, outside) = (laptop.here("d"), laptop.outside());
    let script = having(vec![("d", Entry::Dir), ("d/f", file(b"good"))], move |message| match message {
        Message::WantsEnd => {
            // The last moment before it is placed.
            if folder.is_dir() && !folder.is_symlink() {
                fs::remove_dir(&folder).unwrap();
                symlink(&outside, &folder).unwrap();
            }
            content(b"good")
        }
        Message::ChangesEnd => vec![Message::Outcomes(vec![Outcome::Changed]), Message::OutcomesEnd],
        _ => Vec::new(),
    });
    // However it ends: where the link leads nothing came.
    let _ = laptop.sync_with(script);
    assert!(is_empty(&laptop.outside()));
}

#[test]
fn outcomes_of_what_nobody_asked_for_end_the_sync() {
    let laptop = Laptop::new();
    fs::write(laptop.here("mine"), "mine").unwrap();
    let script = having(Vec::new(), |message| match message {
        Message::NeedsEnd => vec![Message::WantsEnd],
        Message::ContentEnd => vec![Message::StagedEnd],
        Message::ChangesEnd => vec![Message::Outcomes(vec![Outcome::Done; 1000]), Message::OutcomesEnd],
        _ => Vec::new(),
    });
    assert!(matches!(laptop.sync_with(script), Err(SyncError::Protocol(_))));
    assert_eq!(fs::read_to_string(laptop.here("mine")).unwrap(), "mine");
}

#[test]
fn one_that_says_all_is_gone_deletes_nothing_here() {
    let laptop = Laptop::new();
    for number in 0..20 {
        fs::write(laptop.here(&format!("f{number}")), "mine").unwrap();
    }
    let agreeing = |message: &Message| match message {
        Message::NeedsEnd => vec![Message::WantsEnd],
        Message::ContentEnd => vec![Message::StagedEnd],
        Message::ChangesEnd => vec![Message::Outcomes(vec![Outcome::Done; 20]), Message::OutcomesEnd],
        _ => Vec::new(),
    };
    laptop.sync_with(having(Vec::new(), agreeing)).unwrap();
    let ended = laptop.sync_with(having(Vec::new(), agreeing));
    assert!(matches!(ended, Err(SyncError::Halted(_))), "{ended:?}");
    assert_eq!(fs::read_dir(laptop.here("")).unwrap().count(), 20);
}
