//! The audit: writing its records, reading and verifying it, and noticing that a restored database lacks some.

pub mod audit_chain;
pub mod audit_writer;
pub mod restore_detection;
