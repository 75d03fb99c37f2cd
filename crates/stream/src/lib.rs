//! Output as a log addressed by byte offset: what a viewer missed is what it asks for, and what is no longer kept is said, never skipped.
//!
//! [`Log`] keeps the bytes and wakes who waits for them; a [`Reader`] is a position in it. For terminals, [`Scanner`] finds what some
//! viewers must not get, and [`Screen`] makes a [`Keyframe`] for those who come too late for the bytes. Nothing here does I/O or knows a runtime.
#![forbid(unsafe_code)]

mod cover;
mod keyframe;
mod log;
mod notes;
mod reader;
mod scan;
mod screen;
mod spool;
mod sync;
mod waiting;

pub use log::{Limits, Log, Room};
pub use notes::{Kinds, Resize, Span};
pub use reader::{Chunk, Read, Reader, Wait};
pub use scan::{Found, Mark, Scanner};
pub use screen::{Keyframe, MAX_SIDE, Screen};
pub use spool::Spool;
pub use waiting::Urgency;
