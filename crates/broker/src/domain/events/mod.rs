//! What happens in sessions and sandboxes: collecting it from the sandboxes, and streaming it to clients.

pub mod activity_feed;
pub mod event_streams;
pub mod ingest_limit;
pub mod presence;
pub mod sandbox_claims;
pub mod stream_limiter;
