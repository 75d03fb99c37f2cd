//! Sessions: negotiating, renewing, sharing and ending them.

mod differences;
pub mod negotiation;
pub mod renewal;
pub mod session;
pub mod shares;
pub mod threads;
