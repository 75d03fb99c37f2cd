//! Two-way live sync between a local folder and a sandbox.
//!
//! `reconcile` decides, from the last state both sides agreed on and what each is now. [`Folder`] does the file work of one side: looking,
//! staging, applying. [`serve`] is the sandbox's end, [`Engine`] the local one, which remembers and decides. Both block, and run on threads
//! of their own: all they do is wait for a disk or for each other.

#![forbid(unsafe_code)]

mod ancestor;
mod apply;
mod codec;
mod content;
mod delta;
mod digest;
mod dirs;
mod engine;
mod entry;
mod error;
mod git_paths;
mod guard;
mod halt;
mod hooks;
mod losses;
mod memory;
mod message;
mod mode;
mod path;
mod peer;
mod problem;
mod reconcile;
mod resolve;
mod risky;
mod round;
mod rules;
mod scan;
mod serve;
mod settings;
mod side;
mod staging;
mod stamp;
mod status;
mod trash;
mod tree;
mod watch;

pub use ancestor::Ancestor;
pub use engine::{Answer, Choice, Command, Dial, Engine, Handle, Listener, NoConnection};
pub use entry::{Digest, Entry};
pub use error::SyncError;
pub use guard::DIRECTORY_FILES;
pub use halt::{Halt, Side};
pub use hooks::{Deed, Hooks, Own};
pub use memory::Memory;
pub use message::{Fault, MAX_FRAME_BYTES, Message, Need, Outcome};
pub use mode::{Keep, Mode};
pub use path::RelPath;
pub use peer::Connection;
pub use problem::Problem;
pub use reconcile::{Change, Conflict, Plan, reconcile};
pub use rules::{STAGING, TRASH};
pub use serve::serve;
pub use settings::Settings;
pub use side::{Folder, Limits, open_root};
pub use status::{Event, Phase, Status};
pub use trash::{Emptied, NotRestored, Restored, Restoring, Scope, Trash, TrashFull, TrashItem, TrashLimits};
pub use tree::{NoTree, Tree, Update};
