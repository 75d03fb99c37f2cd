//! The whole broker over real sockets and a real database; only the sandboxes are stand-ins.

mod access;
mod asking;
mod bench;
mod chain;
mod chaos;
mod claims;
mod cluster;
mod cors;
mod door;
mod errors;
mod events;
mod fake_provider;
mod harness;
mod lease;
mod life;
mod negotiating;
mod renewing;
mod restart;
mod sandboxes;
mod seeds;
mod sessions;
mod store_races;
mod store_suite;
mod threads;
