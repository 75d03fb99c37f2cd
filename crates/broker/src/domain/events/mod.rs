//! Events of sessions and sandboxes, and the claims of sandboxes: collecting and storing them, and streaming events to clients.

pub mod activity_feed;
pub mod event_streams;
pub mod ingest_limit;
pub mod presence;
pub mod report_collector;
pub mod sandbox_claims;
pub mod stream_limiter;
