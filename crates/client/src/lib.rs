//! The typed Rust client of a Cobox broker and of the sandboxes behind it.
//!
//! [`Client`] speaks to the control plane with an API key. [`Client::open`] gives a [`Session`], whose token is kept fresh
//! in the background and whose [`Dataplane`] runs commands, moves files and opens shells. Streams of both kinds come back by
//! themselves after a lost connection, without a byte lost or doubled.

#![forbid(unsafe_code)]

mod call;
mod control;
mod cursor;
mod dataplane;
mod drive;
mod error;
mod events;
mod exec_stream;
mod hold;
mod kinds;
mod line;
mod looking;
mod nap;
mod path;
mod reconnect;
mod running;
mod session;
mod shell;
mod socket;
mod sync;
mod typing;

pub use call::Upload;
pub use control::{AuditFilter, Client, SessionFilter, check_url};
pub use dataplane::{ArchiveFormat, ArchiveLinks, Dataplane, PathKind, RemoteFile};
pub use error::{ApiFailure, ClientError};
pub use events::{EventStream, EventsFrom};
pub use exec_stream::{ExecEvent, ExecInput, ExecOutput, ExecStream};
pub use looking::{FileNews, FileWatch};
pub use reconnect::Reconnect;
pub use session::Session;
pub use shell::{Shell, ShellEvent, ShellInput, ShellOutput};
pub use sync::{NoLine, SyncReader, SyncWriter};
