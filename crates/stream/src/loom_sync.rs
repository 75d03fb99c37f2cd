//! `Arc` and `Mutex` from std or, in loom tests, from loom, which tries every order in which threads can use them.

#[cfg(loom)]
pub use loom::sync::{Arc, Mutex, MutexGuard};
#[cfg(not(loom))]
pub use std::sync::{Arc, Mutex, MutexGuard};
