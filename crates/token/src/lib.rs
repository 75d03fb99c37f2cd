//! Access tokens: their claims, the per-sandbox keys that sign them, and their verification, which boxd performs on its
//! own. This crate does no I/O.
//!
//! The compact JWS format is implemented here instead of using a JWT crate: there is one type of token with two
//! algorithms, the key id fixes the algorithm, and no header field except `alg`, `typ` and `kid` is ever used.

#![forbid(unsafe_code)]

mod claims;
mod keys;
mod revocation;
mod verify;

pub use claims::{Actor, Claims, LinkedFile};
pub use keys::{MasterKey, SigningKey, key_id};
pub use revocation::RevocationView;
pub use verify::{Keyset, LEEWAY_SECONDS, TokenError};
