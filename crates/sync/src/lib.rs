//! Two-way live sync between a local folder and a sandbox.
//!
//! `reconcile` compares the last state that both sides agreed on with the current state of each. [`Folder`] does the
//! file operations of one side: scanning, staging and applying. [`serve`] runs in the sandbox; [`Engine`] runs locally,
//! stores the state and decides. Both block and run on threads of their own, because they only wait for disks and for
//! each other.

#![forbid(unsafe_code)]

mod apply;
mod base_version;
mod beneath;
mod codec;
mod content;
mod deletion_guard;
mod deletion_totals;
mod delta;
mod digest;
mod digest_cache;
mod engine;
mod entry;
mod error;
mod file_stamp;
mod folder;
mod git_paths;
mod halt;
mod hooks;
mod ignore_rules;
mod message;
mod mode;
mod path;
mod peer;
mod problem;
mod reconcile;
mod resolve;
mod risky_paths;
mod round;
mod sandbox_view;
mod scan;
mod serve;
mod settings;
mod side;
mod staging;
mod state;
mod status;
mod trash;
mod tree;
mod watch;

pub use base_version::BaseVersion;
pub use deletion_guard::DEFAULT_DIRECTORY_DELETION_LIMIT;
pub use digest_cache::DigestCache;
pub use engine::{Command, ConnectError, Connector, Engine, Handle, Listener, Resolution, Responder};
pub use entry::{Digest, Entry};
pub use error::SyncError;
pub use folder::{Folder, Limits, open_root};
pub use halt::Halt;
pub use hooks::{ChangeKind, Hooks, LocalHooks};
pub use ignore_rules::{STAGING_DIRECTORY, TRASH_DIRECTORY};
pub use message::{Fault, MAX_FRAME_BYTES, Message, MissingContent, Outcome};
pub use mode::Mode;
pub use path::RelPath;
pub use peer::Connection;
pub use problem::Problem;
pub use reconcile::{Change, Conflict, Plan, reconcile};
pub use serve::serve;
pub use settings::Settings;
pub use side::Side;
pub use status::{Event, Phase, Status};
pub use trash::{EmptiedTrash, RestoreFailure, RestoreReport, RestoreScope, RestoredPath, Trash, TrashFull, TrashItem, TrashLimits};
pub use tree::{InvalidTree, Tree, Update};
