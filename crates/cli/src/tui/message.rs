//! What the state machine hears, and what it wants done: all that goes between it and the world.

use bytes::Bytes;
use cobox_client::FileWatchEvent;
use cobox_langgraph::{Assistant, RunEvent, RunInput, Thread, ThreadState};
use cobox_protocol::{event::SandboxEvent, frame::Controller, fs::FileEntry};
use crossterm::event::{KeyEvent, MouseEvent};

use super::{files::Contents, sync::SyncState};
use crate::chat::Wish;

/// Why something could not be had, for people.
pub type Told<T> = Result<T, String>;

#[derive(Debug)]
pub enum Message {
    Key(KeyEvent),
    Mouse(MouseEvent),
    Pasted(String),
    Resized(u16, u16),
    Assistants(Told<Vec<Assistant>>),
    Threads(Told<Vec<Thread>>),
    Sandboxes(Told<Vec<SandboxLine>>),
    /// Something that was asked for didn't come to be.
    Failed(String),
    /// Of one stay in one thread: what is still on its way when it was left is not for the next.
    Here {
        visit: u64,
        news: News,
    },
}

#[derive(Debug)]
pub enum News {
    Entered(Told<(String, ThreadState)>),
    Run(RunEvent),
    RunOver(Told<()>),
    Room(Told<Option<RoomInfo>>),
    Shell(ShellNews),
    Happened(Box<SandboxEvent>),
    FeedOver(String),
    Sync(SyncState),
    Listed(Told<Vec<FileEntry>>),
    /// A file's contents as they were first seen.
    Seen {
        path: String,
        contents: Contents,
    },
    File(FileWatchEvent),
    /// A file's contents, to be compared.
    Read {
        path: String,
        contents: Contents,
    },
}

/// The sandbox that a thread has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoomInfo {
    /// Its id, and its name where it has one.
    pub sandbox: String,
    pub name: Option<String>,
    pub session: String,
    /// Whom the sandbox knows us as.
    pub me: Option<String>,
    pub may_type: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SandboxLine {
    pub name: String,
    pub id: String,
    pub state: String,
}

#[derive(Debug)]
pub enum ShellNews {
    Ready { cols: u16, rows: u16, controller: Option<Controller>, yours: Option<bool> },
    Output(Bytes),
    Keyframe { cols: u16, rows: u16, bytes: Bytes },
    Resized { cols: u16, rows: u16 },
    Control { controller: Option<Controller>, yours: Option<bool> },
    Said(String),
    Exited(i32),
    Failed(String),
}

#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    ListAssistants,
    ListThreads,
    ListSandboxes,
    /// A thread of the deployment, or a new one.
    Enter {
        visit: u64,
        thread: Option<String>,
    },
    OpenRoom {
        visit: u64,
        thread: String,
        wish: Wish,
    },
    /// Feed, files and all else that follows a sandbox.
    Follow {
        visit: u64,
    },
    JoinShell {
        visit: u64,
        name: Option<String>,
        cols: u16,
        rows: u16,
        observe: bool,
    },
    LeaveShell,
    Type(Vec<u8>),
    ResizeShell(u16, u16),
    TakeControl,
    ReleaseControl,
    Run {
        visit: u64,
        thread: String,
        assistant: String,
        input: RunInput,
    },
    Cancel {
        thread: String,
        run: String,
    },
    NameThread {
        thread: String,
        title: String,
    },
    ListFiles {
        visit: u64,
    },
    ReadFile {
        visit: u64,
        path: String,
    },
    Quit,
}
