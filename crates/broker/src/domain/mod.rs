//! The broker's rules: which principal may use which sandbox, and for how long. Contains no HTTP and no SQL.
//!
//! A folder for each concept. They depend on each other without a cycle, as `tests/repository/layers.rs` checks:
//! `sessions` → `resources`, `tokens` → `lifecycle` → `audit`, `events` → `access` → `context` → `cluster`.

pub mod access;
pub mod audit;
pub mod cluster;
pub mod context;
pub mod events;
pub mod lifecycle;
pub mod model;
pub mod resources;
pub mod sessions;
pub mod token_signer;
pub mod tokens;
