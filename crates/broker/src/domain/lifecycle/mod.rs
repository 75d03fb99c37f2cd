//! The life of a sandbox: starting, suspending and ending it, and keeping processes and records consistent.

pub mod change_listener;
pub mod control_push;
pub mod host_disk;
pub mod locks;
pub mod quarantine;
pub mod reaper;
pub mod reconcile;
pub mod remote_node;
pub mod transitions;
