//! Content hashes on request: `?hash=sha256,blake3` or `Want-Repr-Digest`, returned in `Repr-Digest` (RFC 9530).

use std::{io, os::fd::OwnedFd};

use base64::{Engine, engine::general_purpose::STANDARD};
use cobox_protocol::ApiError;
use http::{HeaderMap, HeaderName, Uri};
use sha2::{Digest, Sha256};

use super::{path::query_values, read::read_piece};

pub const REPR_DIGEST: HeaderName = HeaderName::from_static("repr-digest");
const WANT_REPR_DIGEST: HeaderName = HeaderName::from_static("want-repr-digest");
/// Bytes hashed at once: large enough that the overhead of a read is negligible.
const PIECE_BYTES: usize = 1024 * 1024;

/// The hashes that a request asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    sha256: bool,
    blake3: bool,
}

impl Wanted {
    pub fn of(uri: &Uri, headers: &HeaderMap) -> Result<Self, ApiError> {
        let mut wanted = Self::default();
        for value in query_values(uri, "hash") {
            for word in value.split(|b| *b == b',') {
                match word {
                    b"sha256" | b"sha-256" => wanted.sha256 = true,
                    b"blake3" => wanted.blake3 = true,
                    _ => return Err(ApiError::invalid("hash: must be sha256 or blake3, or both with a comma")),
                }
            }
        }
        // A preference, not a requirement: unknown algorithms are ignored, as RFC 9530 prescribes.
        for value in headers.get_all(WANT_REPR_DIGEST).iter().filter_map(|v| v.to_str().ok()) {
            for item in value.split(',') {
                let (name, weight) = item.split_once('=').unwrap_or((item, "1"));
                match name.trim() {
                    "sha-256" if weight.trim() != "0" => wanted.sha256 = true,
                    "blake3" if weight.trim() != "0" => wanted.blake3 = true,
                    _ => {}
                }
            }
        }
        Ok(wanted)
    }

    pub fn is_any(self) -> bool {
        self.sha256 || self.blake3
    }
}

/// The header's value for bytes in memory.
pub fn of_bytes(bytes: &[u8], wanted: Wanted) -> String {
    let mut hashes = Hashes::new(wanted);
    hashes.update(bytes);
    hashes.finish()
}

/// The header's value for a file, in constant memory. `go_on` is checked between pieces; `None` if it returned false.
pub fn of_file(file: &OwnedFd, wanted: Wanted, go_on: impl Fn() -> bool) -> io::Result<Option<String>> {
    let mut hashes = Hashes::new(wanted);
    let (mut at, mut piece) = (0, Vec::with_capacity(PIECE_BYTES));
    loop {
        piece = read_piece(file, at, piece)?;
        if piece.is_empty() {
            return Ok(Some(hashes.finish()));
        }
        if !go_on() {
            return Ok(None);
        }
        at += piece.len() as u64;
        hashes.update(&piece);
    }
}

struct Hashes {
    sha256: Option<Sha256>,
    blake3: Option<Box<blake3::Hasher>>,
}

impl Hashes {
    fn new(wanted: Wanted) -> Self {
        Self { sha256: wanted.sha256.then(Sha256::new), blake3: wanted.blake3.then(|| Box::new(blake3::Hasher::new())) }
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
