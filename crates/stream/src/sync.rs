//! The lock and the counted pointer, ours or loom's: loom tries every order in which threads can meet in them.

#[cfg(loom)]
pub use loom::sync::{Arc, Mutex, MutexGuard};
#[cfg(not(loom))]
pub use std::sync::{Arc, Mutex, MutexGuard};
