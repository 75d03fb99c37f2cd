//! Content hashes on request: `?hash=sha256,blake3` or `Want-Repr-Digest`, returned in `Repr-Digest` (RFC 9530).

use std::{io, os::fd::OwnedFd};

use base64::{Engine, engine::general_purpose::STANDARD};
use cobox_protocol::ApiError;
use http::{HeaderMap, HeaderName, Uri};
use sha2::{Digest, Sha256};

use super::{path::query_values, read::read_chunk};

pub const REPR_DIGEST: HeaderName = HeaderName::from_static("repr-digest");
const WANT_REPR_DIGEST: HeaderName = HeaderName::from_static("want-repr-digest");
/// Bytes hashed at once: large enough that the overhead of a read is negligible.
const CHUNK_BYTES: usize = 1024 * 1024;

/// The hashes that a request asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestedDigests {
    sha256: bool,
    blake3: bool,
}

impl RequestedDigests {
    pub fn from_request(uri: &Uri, headers: &HeaderMap) -> Result<Self, ApiError> {
        let mut requested = Self::default();
        for value in query_values(uri, "hash") {
            for name in value.split(|b| *b == b',') {
                match name {
                    b"sha256" | b"sha-256" => requested.sha256 = true,
                    b"blake3" => requested.blake3 = true,
                    _ => return Err(ApiError::invalid("hash: must be sha256 or blake3, or both with a comma")),
                }
            }
        }
        // A preference, not a requirement: unknown algorithms are ignored, as RFC 9530 prescribes.
        for value in headers.get_all(WANT_REPR_DIGEST).iter().filter_map(|v| v.to_str().ok()) {
            for item in value.split(',') {
                let (name, weight) = item.split_once('=').unwrap_or((item, "1"));
                match name.trim() {
                    "sha-256" if weight.trim() != "0" => requested.sha256 = true,
                    "blake3" if weight.trim() != "0" => requested.blake3 = true,
                    _ => {}
                }
            }
        }
        Ok(requested)
    }

    pub fn is_any(self) -> bool {
        self.sha256 || self.blake3
    }
}

/// The header's value for bytes in memory.
pub fn digest_bytes(bytes: &[u8], requested: RequestedDigests) -> String {
    let mut hashers = Hashers::new(requested);
    hashers.update(bytes);
    hashers.finish()
}

/// The header's value for a file, in constant memory. `should_continue` is checked between pieces; `None` if it returned false.
pub fn digest_file(file: &OwnedFd, requested: RequestedDigests, should_continue: impl Fn() -> bool) -> io::Result<Option<String>> {
    let mut hashers = Hashers::new(requested);
    let (mut offset, mut chunk) = (0, Vec::with_capacity(CHUNK_BYTES));
    loop {
        chunk = read_chunk(file, offset, chunk)?;
        if chunk.is_empty() {
            return Ok(Some(hashers.finish()));
        }
        if !should_continue() {
            return Ok(None);
        }
        offset += chunk.len() as u64;
        hashers.update(&chunk);
    }
}

struct Hashers {
    sha256: Option<Sha256>,
    blake3: Option<Box<blake3::Hasher>>,
}

impl Hashers {
    fn new(requested: RequestedDigests) -> Self {
        Self { sha256: requested.sha256.then(Sha256::new), blake3: requested.blake3.then(|| Box::new(blake3::Hasher::new())) }
    }

    fn update(&mut self, bytes: &[u8]) {
        if let Some(hash) = &mut self.sha256 {
            hash.update(bytes);
        }
        if let Some(hash) = &mut self.blake3 {
            hash.update(bytes);
        }
    }

    fn finish(self) -> String {
        let sha256 = self.sha256.map(|h| format!("sha-256=:{}:", STANDARD.encode(h.finalize())));
        let blake3 = self.blake3.map(|h| format!("blake3=:{}:", STANDARD.encode(h.finalize().as_bytes())));
        sha256.into_iter().chain(blake3).collect::<Vec<_>>().join(", ")
    }
}
