//! Which principal may use what: authentication of callers, access rules, access to sessions and sandboxes, and rate
//! limits.

pub mod keys;
pub mod last_used;
pub mod principals;
pub mod rate_limiter;
pub mod recent_operators;
pub mod request_context;
mod rules;
pub mod sandbox_lookup;
pub mod session_access;
mod sign_in;
pub mod token_verification;
pub mod webhook;

pub use rules::{ActorParams, Owned, RequestedCapabilities, act, grant, is_visible, may_end, may_use, must_be_operator, renew};
