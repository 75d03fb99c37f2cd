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
    Command, ConnectError, Connection, Engine, Handle, Hooks, Limits, LocalHooks, Mode, RelPath, Resolution, Settings, Status, Trash,
    TrashLimits, open_root, serve,
};

/// Timeout of every wait; only a hang reaches it.
const TIMEOUT: Duration = Duration::from_secs(60);

pub struct SyncPair {
    dir: tempfile::TempDir,
}

impl SyncPair {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        for name in ["local", "sandbox"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        Self { dir }
    }

    pub fn local(&self, path: &str) -> PathBuf {
        self.dir.path().join("local").join(path)
    }

    pub fn sandbox(&self, path: &str) -> PathBuf {
        self.dir.path().join("sandbox").join(path)
    }

    pub fn write_local(&self, path: &str, text: &str) {
        write(&self.local(path), text);
    }

    pub fn write_sandbox(&self, path: &str, text: &str) {
        write(&self.sandbox(path), text);
    }

    pub fn read_local(&self, path: &str) -> String {
        fs::read_to_string(self.local(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
    }

    pub fn read_sandbox(&self, path: &str) -> String {
        fs::read_to_string(self.sandbox(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
    }

    pub fn assert_same(&self) {
        assert_eq!(contents(&self.local("")), contents(&self.sandbox("")));
    }

    /// Waits for a condition that becomes true without further action.
    pub fn wait_until(&self, mut is_so: impl FnMut() -> bool) {
        let began = Instant::now();
        while !is_so() {
            assert!(began.elapsed() < TIMEOUT, "the condition never became true");
            thread::sleep(Duration::from_millis(2));
        }
    }

    pub fn start(&self, mode: Mode) -> RunningSync {
        self.start_at(mode, Arc::new(LocalHooks::new(self.sandbox(""))))
    }

    /// Starts a sync whose sandbox end has these hooks.
    pub fn start_at(&self, mode: Mode, sandbox_hooks: Arc<dyn Hooks>) -> RunningSync {
        self.start_with(Settings { mode, ..Settings::default() }, sandbox_hooks)
    }

    /// One run that ends when both sides agree.
    pub fn sync_once(&self, mode: Mode) -> Status {
        let settings = Settings { mode, once: true, ..Settings::default() };
        let engine = Engine::open(&self.local(""), &self.base(), settings, Box::new(|_| ())).unwrap();
        let mut connector = || {
            let (ours, theirs) = UnixStream::pair().map_err(|e| ConnectError::Permanent(e.to_string()))?;
            let (root, hooks) = (open_root(&self.sandbox("")).unwrap(), Arc::new(LocalHooks::new(self.sandbox(""))));
            thread::spawn(move || drop(serve(theirs.try_clone().unwrap(), theirs, root, Limits::default(), hooks)));
            Ok(Connection { reader: Box::new(ours.try_clone().unwrap()), writer: Box::new(ours) })
        };
        engine.run(&mut connector).unwrap()
    }

    fn base(&self) -> PathBuf {
        self.dir.path().join("base")
    }

    /// The trash of the local folder.
    pub fn trash(&self) -> Trash {
        Trash::open(&self.local(""), TrashLimits::default()).unwrap()
    }

    pub fn start_with(&self, settings: Settings, sandbox_hooks: Arc<dyn Hooks>) -> RunningSync {
        let (local, sandbox, base) = (self.local(""), self.sandbox(""), self.base());
        let (handles, handle) = mpsc::channel();
        let received = Arc::new(AtomicU64::new(0));
        let connections: Arc<Mutex<Vec<UnixStream>>> = Arc::default();
        let connection_count = Arc::new(AtomicU64::new(0));
        let (byte_counter, open_connections, connection_counter) = (received.clone(), connections.clone(), connection_count.clone());
        let engine = thread::spawn(move || {
            let engine = Engine::open(&local, &base, settings, Box::new(|_| ())).unwrap();
            handles.send(engine.handle()).unwrap();
            let mut connector = || {
                let (ours, theirs) = UnixStream::pair().map_err(|e| ConnectError::Permanent(e.to_string()))?;
                let root = open_root(&sandbox).map_err(|e| ConnectError::Permanent(e.to_string()))?;
                let (reader, writer) = (theirs.try_clone().unwrap(), theirs);
                let hooks = sandbox_hooks.clone();
                thread::spawn(move || drop(serve(reader, writer, root, Limits::default(), hooks)));
                open_connections.lock().unwrap().push(ours.try_clone().unwrap());
                connection_counter.fetch_add(1, Ordering::Relaxed);
                let reader = CountingReader { inner: ours.try_clone().unwrap(), count: byte_counter.clone() };
                Ok(Connection { reader: Box::new(reader), writer: Box::new(ours) })
            };
            engine.run(&mut connector).unwrap()
        });
        RunningSync { handle: handle.recv().unwrap(), received, connection_count, connections, engine: Some(engine) }
    }
}

struct CountingReader {
    inner: UnixStream,
    count: Arc<AtomicU64>,
}

impl Read for CountingReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buffer)?;
        self.count.fetch_add(n as u64, Ordering::Relaxed);
        Ok(n)
    }
}

/// A running sync; stopped and joined when dropped.
pub struct RunningSync {
    handle: Handle,
    received: Arc<AtomicU64>,
    connection_count: Arc<AtomicU64>,
    connections: Arc<Mutex<Vec<UnixStream>>>,
    engine: Option<thread::JoinHandle<Status>>,
}

impl RunningSync {
    fn request<T: Send + 'static>(&self, command: impl FnOnce(cobox_sync::Responder<T>) -> Command) -> Result<T, String> {
        let (sender, answered) = mpsc::channel();
        assert!(self.handle.send(command(Box::new(move |a| drop(sender.send(a))))));
        answered.recv_timeout(TIMEOUT).expect("an answer")
    }

    pub fn try_flush(&self) -> Result<Status, String> {
        self.request(Command::Flush)
    }

    pub fn flush(&self) -> Status {
        self.try_flush().unwrap()
    }

    pub fn pause(&self) {
        self.request(Command::Pause).unwrap();
    }

    pub fn resume(&self, confirmed: bool) -> Result<(), String> {
        self.request(|respond| Command::Resume { confirmed, respond })
    }

    pub fn resolve(&self, paths: &[&str], resolution: Resolution) -> Result<usize, String> {
        let paths = paths.iter().map(|p| RelPath::new(p.as_bytes()).unwrap()).collect();
        self.request(|respond| Command::Resolve { paths, resolution, respond })
    }

    pub fn status(&self) -> Status {
        self.handle.status()
    }

    pub fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    /// Number of connections so far.
    pub fn connection_count(&self) -> u64 {
        self.connection_count.load(Ordering::Relaxed)
    }

    pub fn disconnect(&self) {
        for line in self.connections.lock().unwrap().drain(..) {
            let _ = line.shutdown(std::net::Shutdown::Both);
        }
    }
}

impl Drop for RunningSync {
    fn drop(&mut self) {
        self.handle.send(Command::Stop);
        let ended = self.engine.take().unwrap().join();
        if !thread::panicking() {
            ended.unwrap();
            self.disconnect();
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
            if path.ends_with(cobox_sync::STAGING_DIRECTORY) || path.ends_with(cobox_sync::TRASH_DIRECTORY) {
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
