//! Access tokens: what they claim, the per-sandbox keys that sign them, and the check boxd makes alone. No I/O happens here.
//!
//! The compact JWS form is written and read here rather than by a JWT crate: one token type, two algorithms fixed by
//! key id, and no header field but `alg`, `typ` and `kid` is ever obeyed.

#![forbid(unsafe_code)]

mod claims;
mod keys;
mod revocation;
mod verify;

pub use claims::{Actor, Claims, LinkedFile};
pub use keys::{MasterKey, SigningKey, key_id};
pub use revocation::RevocationView;
pub use verify::{Keyset, LEEWAY_SECONDS, TokenError};
