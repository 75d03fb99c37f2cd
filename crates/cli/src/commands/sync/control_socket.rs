//! Control socket of a running sync, for other commands: one JSON line in each direction. Its directory is accessible
//! to this user only.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    os::{
        fd::AsRawFd,
        unix::net::{UnixListener, UnixStream},
    },
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use cobox_sync::{Command, Handle, RelPath, Resolution, Side};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{
    report,
    state_dir::{SyncConfig, SyncStateDir},
};
use crate::failure::Failure;

const SOCKET: &str = "control.sock";
/// Maximum concurrent clients; further ones wait in the socket's backlog.
const MAX_CLIENTS: usize = 8;
/// Maximum size of a request, in bytes: some thousand paths.
const MAX_REQUEST_BYTES: u64 = 4 * 1024 * 1024;
/// Maximum size of an answer, in bytes.
const MAX_ANSWER_BYTES: u64 = 64 * 1024 * 1024;

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "verb", rename_all = "snake_case")]
pub enum Request {
    Status,
    Pause,
    Resume {
        confirm: bool,
    },
    /// With `wait` answered when the flush is done, otherwise immediately.
    Flush {
        wait: bool,
    },
    Resolve {
        paths: Vec<String>,
        keep: ConflictWinner,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum ConflictWinner {
    /// Keep the local version
    Here,
    /// Keep the sandbox's version
    Sandbox,
    /// Keep both: the local file is renamed
    Both,
}

#[derive(Debug, Serialize, Deserialize)]
struct Reply {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    answer: Option<Value>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// Listens on its own thread until the process exits.
pub fn listen(state: &SyncStateDir, config: SyncConfig, handle: Handle) -> Result<(), Failure> {
    let failed = |e: io::Error| Failure::new(format!("listening in {}: {e}", state.dir.display()));
    let (path, _dir) = socket_path(state).map_err(failed)?;
    // Left by a run that was killed; no other run can be using it, because this one holds the lock.
    let _ = std::fs::remove_file(&path);
    let listener = UnixListener::bind(&path).map_err(failed)?;
    let active = Arc::new(AtomicUsize::new(0));
    let server = move || {
        for stream in listener.incoming().flatten() {
            while active.load(Ordering::Acquire) >= MAX_CLIENTS {
                thread::sleep(Duration::from_millis(20));
            }
            active.fetch_add(1, Ordering::AcqRel);
            let (config, handle, active_count) = (config.clone(), handle.clone(), active.clone());
            let respond = move || {
                // The client may have disconnected and then needs no answer.
                let _ = answer(stream, &config, &handle);
                active_count.fetch_sub(1, Ordering::AcqRel);
            };
            if thread::Builder::new().name("sync-answer".to_owned()).spawn(respond).is_err() {
                active.fetch_sub(1, Ordering::AcqRel);
            }
        }
    };
    thread::Builder::new().name("sync-control".to_owned()).spawn(server).map(drop).map_err(failed)
}

fn answer(mut stream: UnixStream, config: &SyncConfig, handle: &Handle) -> io::Result<()> {
    let mut line = String::new();
    BufReader::new(Read::take(&stream, MAX_REQUEST_BYTES)).read_line(&mut line)?;
    let result = match serde_json::from_str::<Request>(&line) {
        Ok(request) => handle_request(request, config, handle),
        Err(e) => Err(format!("invalid request: {e}")),
    };
    let reply = match result {
        Ok(answer) => Reply { answer: Some(answer), error: None },
        Err(error) => Reply { answer: None, error: Some(error) },
    };
    let mut text = serde_json::to_vec(&reply)?;
    text.push(b'\n');
    stream.write_all(&text)
}

fn handle_request(request: Request, config: &SyncConfig, handle: &Handle) -> Result<Value, String> {
    let status = || report::as_json(config, &handle.status());
    match request {
        Request::Status => Ok(status()),
        Request::Pause => send_command(handle, Command::Pause).map(|()| status()),
        Request::Resume { confirm } => {
            send_command(handle, |answer| Command::Resume { confirmed: confirm, respond: answer }).map(|()| status())
        }
        Request::Flush { wait: false } => {
            handle.send(Command::Flush(Box::new(|_| ())));
            Ok(status())
        }
        Request::Flush { wait: true } => send_command(handle, Command::Flush).map(|status| report::as_json(config, &status)),
        Request::Resolve { paths, keep } => {
            let conflicts = handle.status().conflicts;
            // A path that is not valid UTF-8 is requested in its displayed form.
            let shown = |p: &str| conflicts.iter().map(|c| &c.path).find(|path| path.to_string() == p).cloned();
            let named = |p: &String| {
                let is_conflict = |path: &RelPath| conflicts.iter().any(|c| c.path == *path);
                let path = RelPath::new(p.as_bytes());
                path.clone().filter(is_conflict).or_else(|| shown(p)).or(path).ok_or_else(|| format!("{p:?} is not a path in the folder"))
            };
            let paths = paths.iter().map(named).collect::<Result<Vec<_>, _>>()?;
            let resolution = match keep {
                ConflictWinner::Here => Resolution::Keep(Side::Local),
                ConflictWinner::Sandbox => Resolution::Keep(Side::Sandbox),
                ConflictWinner::Both => Resolution::Both,
            };
            let count = send_command(handle, |answer| Command::Resolve { paths, resolution, respond: answer })?;
            Ok(json!({ "resolved": count }))
        }
    }
}

fn send_command<T: Send + 'static>(handle: &Handle, command: impl FnOnce(cobox_sync::Responder<T>) -> Command) -> Result<T, String> {
    let (answer, receiver) = mpsc::channel();
    let is_accepted = handle.send(command(Box::new(move |result| drop(answer.send(result)))));
    if !is_accepted {
        return Err("the sync has ended".to_owned());
    }
    receiver.recv().map_err(|_| "the sync has ended".to_owned())?
}

/// Sends a request to a running sync. Returns `None` if none is running.
pub fn query(state: &SyncStateDir, request: &Request, timeout: Option<Duration>) -> Result<Option<Value>, Failure> {
    if !state.is_running() {
        return Ok(None);
    }
    let failed = |e: io::Error| match e.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Failure::new("the sync process did not respond in time"),
        _ => Failure::new(format!("connecting to the sync process: {e}")),
    };
    let (path, _dir) = socket_path(state).map_err(failed)?;
    let mut stream = match UnixStream::connect(&path) {
        Ok(stream) => stream,
        // The sync has just started, or is about to end.
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => return Ok(None),
        Err(e) => return Err(failed(e)),
    };
    stream.set_read_timeout(timeout).map_err(failed)?;
    let mut line = serde_json::to_vec(request).map_err(|e| Failure::new(e.to_string()))?;
    line.push(b'\n');
    stream.write_all(&line).map_err(failed)?;
    let mut text = String::new();
    BufReader::new(Read::take(&stream, MAX_ANSWER_BYTES)).read_line(&mut text).map_err(failed)?;
    match serde_json::from_str(&text) {
        Ok(Reply { error: Some(error), .. }) => Err(Failure::new(error)),
        Ok(Reply { answer, .. }) => Ok(answer),
        Err(_) => Err(Failure::new("the sync process exited before it responded")),
    }
}

/// Addresses the directory by its descriptor: a socket's path is limited to 108 bytes, which a home directory's path
/// may exceed.
fn socket_path(state: &SyncStateDir) -> io::Result<(PathBuf, std::fs::File)> {
    let dir = std::fs::File::open(&state.dir)?;
    Ok((PathBuf::from(format!("/proc/self/fd/{}/{SOCKET}", dir.as_raw_fd())), dir))
}
