//! What the broker decides: who may use which sandbox, for how long. No HTTP and no SQL here.

pub mod access;
pub mod activity;
pub mod audit;
pub mod claims;
pub mod deployment;
pub mod elsewhere;
pub mod events;
pub mod happenings;
pub mod hearing;
pub mod keys;
pub mod lifecycle;
pub mod locks;
pub mod model;
pub mod negotiation;
pub mod nodes;
pub mod presence;
pub mod proof;
pub mod reaper;
pub mod reconcile;
pub mod renewal;
pub mod sandboxes;
pub mod sessions;
pub mod threads;
pub mod tokens;
pub mod webhook;
