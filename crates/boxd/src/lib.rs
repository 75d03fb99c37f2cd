//! boxd, the daemon inside a sandbox: it verifies tokens offline, runs commands and shells, and serves files to
//! authorized clients.

mod activity_log;
pub mod auth;
mod body;
pub mod clock;
pub mod control;
mod descriptor;
pub mod exec;
pub mod files;
pub mod fs;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod http_listener;
mod input_dedup;
mod langsmith;
pub mod log;
mod pending_records;
mod pipe;
mod principal_slots;
pub mod processes;
pub mod programs;
mod reports;
pub mod request_layer;
pub mod routes;
pub mod server;
pub mod shell;
pub mod socket;
mod streamed_json;
mod sync;
pub mod watch;
pub mod workload;

pub use files::workers::FileWorkers;
pub use server::serve;
