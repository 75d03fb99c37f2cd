//! Output as a log addressed by byte offset. A viewer asks for what it missed, and a gap that is no longer kept is
//! reported, never skipped silently.
//!
//! [`Log`] stores the bytes and wakes the tasks that wait for them; a [`Reader`] is a position in it. For terminals,
//! [`Scanner`] finds sequences that some viewers must not get, and [`Screen`] makes a [`Keyframe`] for viewers that
//! join too late for the bytes. This crate does no I/O and knows no runtime.
#![forbid(unsafe_code)]

mod annotations;
mod keyframe;
mod log;
mod loom_sync;
mod overlay;
mod reader;
mod scanner;
mod screen;
mod spool;
mod wakers;

pub use annotations::{Resize, SequenceKinds, Span};
pub use log::{Limits, Log, Writable};
pub use reader::{Chunk, Read, Reader, Wait};
pub use scanner::{ScanResult, Scanner, ShellMark};
pub use screen::{Keyframe, MAX_SIDE, Screen};
pub use spool::Spool;
pub use wakers::WakePriority;
