//! Data types of the Cobox protocol: ids, capabilities, errors, requests, responses and frames. Performs no I/O.

#![forbid(unsafe_code)]

pub mod audit;
pub mod capability;
pub mod control;
pub mod error;
pub mod event;
pub mod exec;
pub mod files;
pub mod frame;
pub mod fs;
pub mod host;
pub mod id;
pub mod json;
pub mod key;
pub mod langsmith;
pub mod process;
pub mod report;
pub mod resources;
pub mod route;
pub mod sandbox;
#[cfg(feature = "schema")]
pub mod schema;
pub mod secret;
pub mod session;
pub mod shell;
pub mod tags;
pub mod text;
pub mod thread;
pub mod timestamp;
pub mod token;
pub mod watch;

pub use capability::{Capability, CapabilitySet};
pub use error::{ApiError, Envelope, ErrorCode};
pub use id::{CommandId, EventId, KeyId, PoolId, RequestId, SandboxId, SessionId, ShareId, ShellId, SnapshotId, TokenId, VolumeId};
pub use secret::Secret;
pub use timestamp::Timestamp;
