//! Sandboxes on this machine.
