//! The typed Rust client of a Cobox broker and of the sandboxes behind it.
//!
//! [`Client`] calls the control plane with an API key. [`Client::open`] returns a [`Session`], whose token is refreshed in the background
//! and whose [`Dataplane`] runs commands, transfers files and opens shells. Command and shell streams reconnect automatically, without
//! losing or repeating a byte.

#![forbid(unsafe_code)]

mod call;
mod connection;
mod control;
mod cursor;
mod dataplane;
mod error;
mod events;
mod exec_stream;
mod file_view;
mod path;
mod pending_input;
mod processes;
mod reconnect;
mod reconnect_loop;
mod resources;
mod session;
mod shell;
mod sleep_detector;
mod socket;
mod stream;
mod sync;

pub use call::Upload;
pub use control::{AuditFilter, Client, SessionFilter, check_url};
pub use dataplane::{ArchiveFormat, ArchiveLinks, Dataplane, PathKind, RemoteFile};
pub use error::{ApiFailure, ClientError};
pub use events::{EventStream, EventsFrom};
pub use exec_stream::{ExecEvent, ExecInput, ExecOutput, ExecStream};
pub use file_view::{FileWatch, FileWatchEvent};
pub use reconnect::Reconnect;
pub use session::Session;
pub use shell::{Shell, ShellEvent, ShellInput, ShellOutput};
pub use sync::{SyncReader, SyncUnavailable, SyncWriter};
