//! Messages and effects: the complete interface between the state machine and the tasks that do I/O.

use bytes::Bytes;
use cobox_client::FileWatchEvent;
use cobox_langgraph::{Assistant, RunEvent, RunInput, Thread, ThreadState};
use cobox_protocol::{event::SandboxEvent, frame::Controller, fs::FileEntry};
use crossterm::event::{KeyEvent, MouseEvent};

use super::{file_tree::Contents, sync_status::SyncState};
use crate::chat::SandboxChoice;

/// A result whose error is text for the user.
pub type UserResult<T> = Result<T, String>;

#[derive(Debug)]
pub enum Message {
    Key(KeyEvent),
    Mouse(MouseEvent),
    Pasted(String),
    Resized(u16, u16),
    Assistants(UserResult<Vec<Assistant>>),
    Threads(UserResult<Vec<Thread>>),
    Sandboxes(UserResult<Vec<SandboxLine>>),
    /// A requested action failed.
    Failed(String),
    /// Belongs to one visit of one thread: messages still in flight when the thread is left don't apply to the next
    /// one.
    Thread {
        visit: u64,
        update: ThreadUpdate,
    },
}

#[derive(Debug)]
pub enum ThreadUpdate {
    Entered(UserResult<(String, ThreadState)>),
    Run(RunEvent),
    RunEnded(UserResult<()>),
    Sandbox(UserResult<Option<OpenSandbox>>),
    Shell(ShellUpdate),
    SandboxEvent(Box<SandboxEvent>),
    FeedEnded(String),
    Sync(SyncState),
    FilesListed(UserResult<Vec<FileEntry>>),
    /// A file's contents at first sight.
    FirstContents {
        path: String,
        contents: Contents,
    },
    FileChanged(FileWatchEvent),
    /// A file's contents for a comparison.
    FileRead {
        path: String,
        contents: Contents,
    },
}

/// The sandbox of the thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenSandbox {
    /// The sandbox's id; `name` is its name, if it has one.
    pub sandbox: String,
    pub name: Option<String>,
    pub session: String,
    /// Principal under which the sandbox knows this client.
    pub principal: Option<String>,
    pub may_type: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SandboxLine {
    pub name: String,
    pub id: String,
    pub state: String,
}

#[derive(Debug)]
pub enum ShellUpdate {
    Ready { cols: u16, rows: u16, controller: Option<Controller>, yours: Option<bool> },
    Output(Bytes),
    Keyframe { cols: u16, rows: u16, bytes: Bytes },
    Resized { cols: u16, rows: u16 },
    Control { controller: Option<Controller>, yours: Option<bool> },
    Message(String),
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
    OpenSandbox {
        visit: u64,
        thread: String,
        sandbox_choice: SandboxChoice,
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
