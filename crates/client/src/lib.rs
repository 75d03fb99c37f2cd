//! The typed Rust client of a Cobox broker and of the sandboxes behind it.
//!
//! [`Client`] speaks to the control plane with an API key. [`Client::open`] gives a [`Session`], whose token is kept fresh
//! in the background and whose [`Dataplane`] runs commands, moves files and opens shells.

#![forbid(unsafe_code)]

mod call;
mod control;
mod dataplane;
mod error;
mod path;
mod session;
mod shell;

pub use call::Upload;
pub use control::{Client, SessionFilter, check_url};
pub use dataplane::{ArchiveFormat, Dataplane, PathKind, RemoteFile};
pub use error::{ApiFailure, ClientError};
pub use session::Session;
pub use shell::{Shell, ShellEvent, ShellInput, ShellOutput};
