//! Captured output of a program: the first bytes up to a limit. The rest is read and discarded, so that the program
//! never blocks on a full pipe.

use std::os::fd::AsFd;

use crate::descriptor::{Descriptor, read_now};

/// The default capacity of a pipe.
const CHUNK_BYTES: usize = 64 * 1024;
const FIRST_BYTES: usize = 4 * 1024;
/// Maximum read by the final drain: the largest pipe an unprivileged user can create, so everything that the program
/// wrote before it exited.
const DRAIN_BYTES: usize = 1024 * 1024;

#[derive(Default)]
pub struct OutputCapture {
    pub bytes: Vec<u8>,
    pub truncated: bool,
    limit: usize,
    is_at_end: bool,
}

impl OutputCapture {
    pub fn new(limit: usize) -> Self {
        Self { limit, ..Self::default() }
    }

    pub fn complete(bytes: Vec<u8>) -> Self {
        Self { limit: bytes.len(), bytes, truncated: false, is_at_end: true }
    }

    /// Whether another process still holds the write end of the pipe.
    pub fn is_open(&self) -> bool {
        !self.is_at_end
    }

    pub async fn read_to_end(&mut self, source: Option<&Descriptor>) {
        let Some(source) = source else { return };
        // Most commands print little or nothing: the large buffer is only for those that fill the small one.
        let mut chunk = vec![0; FIRST_BYTES];
        while !self.is_at_end {
            match source.read(&mut chunk).await {
                Ok(n) => self.append(&chunk[..n]),
                Err(_) => self.is_at_end = true,
            }
            if self.bytes.len() >= FIRST_BYTES && chunk.len() < CHUNK_BYTES {
                chunk = vec![0; CHUNK_BYTES];
            }
        }
    }

    /// Reads what the pipe contains now, without waiting for more.
    pub fn drain(&mut self, source: Option<&impl AsFd>) {
        let Some(source) = source else { return };
        let mut chunk = [0; FIRST_BYTES];
        let mut drained = 0;
        while !self.is_at_end && drained < DRAIN_BYTES {
            match read_now(source, &mut chunk) {
                Ok(n) => {
                    drained += n;
                    self.append(&chunk[..n]);
                }
                Err(_) => return,
            }
        }
    }

    /// The captured bytes. A character that the limit cut in two is removed, so that text stays valid UTF-8.
    pub fn into_bytes(mut self) -> Vec<u8> {
        if self.truncated
            && let Err(error) = std::str::from_utf8(&self.bytes)
            && error.error_len().is_none()
        {
            self.bytes.truncate(error.valid_up_to());
        }
        self.bytes.shrink_to_fit();
        self.bytes
    }

    pub fn append(&mut self, chunk: &[u8]) {
        self.is_at_end = chunk.is_empty();
        let available = self.limit - self.bytes.len();
        self.truncated |= chunk.len() > available;
        self.bytes.extend_from_slice(&chunk[..chunk.len().min(available)]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_beyond_the_limit_is_dropped_and_reported() {
        let mut capture = OutputCapture::new(5);
        capture.append(b"abc");
        assert!(!capture.truncated);
        capture.append(b"de");
        assert!(!capture.truncated);
        capture.append(b"f");
        assert_eq!((capture.bytes.as_slice(), capture.truncated), (b"abcde".as_slice(), true));
        assert_eq!(capture.into_bytes(), b"abcde");
    }

    #[test]
    fn a_character_cut_by_the_limit_is_removed() {
        let mut capture = OutputCapture::new(2);
        capture.append("a€".as_bytes());
        assert_eq!(capture.into_bytes(), b"a");
    }
}
