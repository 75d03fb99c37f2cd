//! Two folders, and both ends of a sync between them over a socket.

#![allow(dead_code, reason = "each test program uses its part")]

use std::{
    collections::BTreeMap,
    fs,
    io::{self, Read},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use cobox_sync::{
    Choice, Command, Connection, Engine, Handle, Hooks, Limits, Mode, NoConnection, Own, RelPath, Settings, Status, Trash, TrashLimits,
    open_root, serve,
};

/// Longest anything may take; only a hang reaches it.
const PATIENCE: Duration = Duration::from_secs(60);

pub struct Ends {
    dir: tempfile::TempDir,
}

impl Ends {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        for name in ["here", "there"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        Self { dir }
    }

    pub fn here(&self, path: &str) -> PathBuf {
        self.dir.path().join("here").join(path)
    }

    pub fn there(&self, path: &str) -> PathBuf {
        self.dir.path().join("there").join(path)
    }

    pub fn write_here(&self, path: &str, text: &str) {
        write(&self.here(path), text);
    }

    pub fn write_there(&self, path: &str, text: &str) {
        write(&self.there(path), text);
    }

    pub fn read_here(&self, path: &str) -> String {
        fs::read_to_string(self.here(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
    }

    pub fn read_there(&self, path: &str) -> String {
        fs::read_to_string(self.there(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
    }

    pub fn assert_same(&self) {
        assert_eq!(contents(&self.here("")), contents(&self.there("")));
    }

    /// Waits for something that comes by itself.
    pub fn wait_until(&self, mut is_so: impl FnMut() -> bool) {
        let began = Instant::now();
        while !is_so() {
            assert!(began.elapsed() < PATIENCE, "it never came");
            thread::sleep(Duration::from_millis(2));
        }
    }

    pub fn start(&self, mode: Mode) -> Live {
        self.start_at(mode, Arc::new(Own::new(self.there(""))))
    }

    /// With a sandbox that has these ways.
    pub fn start_at(&self, mode: Mode, sandbox: Arc<dyn Hooks>) -> Live {
        self.start_with(Settings { mode, ..Settings::default() }, sandbox)
    }

    /// One run that ends when both sides agree.
    pub fn sync_once(&self, mode: Mode) -> Status {
        let settings = Settings { mode, once: true, ..Settings::default() };
        let engine = Engine::open(&self.here(""), &self.base(), settings, Box::new(|_| ())).unwrap();
        let mut dial = || {
            let (ours, theirs) = UnixStream::pair().map_err(|e| NoConnection::Final(e.to_string()))?;
            let (root, hooks) = (open_root(&self.there("")).unwrap(), Arc::new(Own::new(self.there(""))));
            thread::spawn(move || drop(serve(theirs.try_clone().unwrap(), theirs, root, Limits::default(), hooks)));
            Ok(Connection { reader: Box::new(ours.try_clone().unwrap()), writer: Box::new(ours) })
        };
        engine.run(&mut dial).unwrap()
    }

    fn base(&self) -> PathBuf {
        self.dir.path().join("base")
    }

    /// The trash of the local folder.
    pub fn trash(&self) -> Trash {
        Trash::of(&self.here(""), TrashLimits::default()).unwrap()
    }

    pub fn start_with(&self, settings: Settings, sandbox: Arc<dyn Hooks>) -> Live {
        let (here, there, base) = (self.here(""), self.there(""), self.base());
        let (handles, handle) = mpsc::channel();
        let received = Arc::new(AtomicU64::new(0));
        let lines: Arc<Mutex<Vec<UnixStream>>> = Arc::default();
        let dials = Arc::new(AtomicU64::new(0));
        let (counter, cuttable, dialled) = (received.clone(), lines.clone(), dials.clone());
        let engine = thread::spawn(move || {
            let engine = Engine::open(&here, &base, settings, Box::new(|_| ())).unwrap();
            handles.send(engine.handle()).unwrap();
            let mut dial = || {
                let (ours, theirs) = UnixStream::pair().map_err(|e| NoConnection::Final(e.to_string()))?;
                let root = open_root(&there).map_err(|e| NoConnection::Final(e.to_string()))?;
                let (reader, writer) = (theirs.try_clone().unwrap(), theirs);
                let hooks = sandbox.clone();
                thread::spawn(move || drop(serve(reader, writer, root, Limits::default(), hooks)));
                cuttable.lock().unwrap().push(ours.try_clone().unwrap());
                dialled.fetch_add(1, Ordering::Relaxed);
                let reader = Counted { inner: ours.try_clone().unwrap(), count: counter.clone() };
                Ok(Connection { reader: Box::new(reader), writer: Box::new(ours) })
            };
            engine.run(&mut dial).unwrap()
        });
        Live { handle: handle.recv().unwrap(), received, dials, lines, engine: Some(engine) }
    }
}

struct Counted {
    inner: UnixStream,
    count: Arc<AtomicU64>,
}

impl Read for Counted {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buffer)?;
        self.count.fetch_add(n as u64, Ordering::Relaxed);
        Ok(n)
    }
}

/// A sync under way; dropped, it is told to stop and waited for.
pub struct Live {
    handle: Handle,
    received: Arc<AtomicU64>,
    dials: Arc<AtomicU64>,
    lines: Arc<Mutex<Vec<UnixStream>>>,
    engine: Option<thread::JoinHandle<Status>>,
}

impl Live {
    fn ask<T: Send + 'static>(&self, command: impl FnOnce(cobox_sync::Answer<T>) -> Command) -> Result<T, String> {
        let (answer, answered) = mpsc::channel();
        assert!(self.handle.ask(command(Box::new(move |a| drop(answer.send(a))))));
        answered.recv_timeout(PATIENCE).expect("an answer")
    }

    pub fn try_flush(&self) -> Result<Status, String> {
        self.ask(Command::Flush)
    }

    pub fn flush(&self) -> Status {
        self.try_flush().unwrap()
    }

    pub fn pause(&self) {
        self.ask(Command::Pause).unwrap();
    }

    pub fn resume(&self, confirmed: bool) -> Result<(), String> {
        self.ask(|answer| Command::Resume { confirmed, answer })
    }

    pub fn resolve(&self, paths: &[&str], choice: Choice) -> Result<usize, String> {
        let paths = paths.iter().map(|p| RelPath::new(p.as_bytes()).unwrap()).collect();
        self.ask(|answer| Command::Resolve { paths, choice, answer })
    }

    pub fn status(&self) -> Status {
        self.handle.status()
    }

    pub fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    /// Connections made so far.
    pub fn dials(&self) -> u64 {
        self.dials.load(Ordering::Relaxed)
    }

    pub fn cut(&self) {
        for line in self.lines.lock().unwrap().drain(..) {
            let _ = line.shutdown(std::net::Shutdown::Both);
        }
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        self.handle.ask(Command::Stop);
        let ended = self.engine.take().unwrap().join();
        if !thread::panicking() {
            ended.unwrap();
            self.cut();
        }
    }
}

fn write(path: &Path, text: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

fn contents(root: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    fn walk(root: &Path, at: &Path, into: &mut BTreeMap<PathBuf, Vec<u8>>) {
        for entry in fs::read_dir(at).unwrap() {
            let path = entry.unwrap().path();
            if path.ends_with(cobox_sync::STAGING) || path.ends_with(cobox_sync::TRASH) {
                continue;
            }
            let meta = fs::symlink_metadata(&path).unwrap();
            let key = path.strip_prefix(root).unwrap().to_owned();
            if meta.is_dir() {
                into.insert(key, b"folder".to_vec());
                walk(root, &path, into);
            } else if meta.is_symlink() {
                into.insert(key, fs::read_link(&path).unwrap().into_os_string().into_encoded_bytes());
            } else {
                into.insert(key, fs::read(&path).unwrap());
            }
        }
    }
    let mut found = BTreeMap::new();
    walk(root, root, &mut found);
    found
}
