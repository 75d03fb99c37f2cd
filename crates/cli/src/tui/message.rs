//! Messages and effects: the complete interface between the state machine and the tasks that do I/O.

use bytes::Bytes;
use cobox_client::FileWatchEvent;
use cobox_langgraph::{Assistant, RunEvent, RunInput, Thread, ThreadState};
use cobox_protocol::{event::SandboxEvent, frame::Controller, fs::FileEntry};
use crossterm::event::{KeyEvent, MouseEvent};

use super::{files::Contents, sync::SyncState};
use crate::chat::Wish;

/// A result whose error is text for the user.
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
    /// A requested action failed.
    Failed(String),
    /// Belongs to one visit of one thread: messages still in flight when the thread is left don't apply to the next
    /// one.
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
    /// A file's contents at first sight.
    Seen {
        path: String,
        contents: Contents,
    },
    File(FileWatchEvent),
    /// A file's contents for a comparison.
    Read {
        path: String,
        contents: Contents,
    },
}

/// The sandbox of the thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoomInfo {
    /// The sandbox's id; `name` is its name, if it has one.
    pub sandbox: String,
    pub name: Option<String>,
    pub session: String,
    /// Principal under which the sandbox knows this client.
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
    /// Enters a thread of the deployment, or a new one.
    Enter {
        visit: u64,
        thread: Option<String>,
    },
    OpenRoom {
        visit: u64,
        thread: String,
        wish: Wish,
    },
    /// Starts to follow the sandbox: its events, files and sync state.
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
