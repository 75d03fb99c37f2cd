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
pub struct Capture {
    pub bytes: Vec<u8>,
    pub truncated: bool,
    limit: usize,
    is_at_end: bool,
}

impl Capture {
    pub fn new(limit: usize) -> Self {
        Self { limit, ..Self::default() }
    }

    pub fn of(bytes: Vec<u8>) -> Self {
        Self { limit: bytes.len(), bytes, truncated: false, is_at_end: true }
    }

    /// Whether another process still holds the write end of the pipe.
    pub fn is_open(&self) -> bool {
        !self.is_at_end
    }

    pub async fn read_to_end(&mut self, from: Option<&Descriptor>) {
        let Some(from) = from else { return };
        // Most commands print little or nothing: the large buffer is only for those that fill the small one.
        let mut chunk = vec![0; FIRST_BYTES];
        while !self.is_at_end {
            match from.read(&mut chunk).await {
                Ok(n) => self.take(&chunk[..n]),
                Err(_) => self.is_at_end = true,
            }
            if self.bytes.len() >= FIRST_BYTES && chunk.len() < CHUNK_BYTES {
                chunk = vec![0; CHUNK_BYTES];
            }
        }
    }

    /// Reads what the pipe contains now, without waiting for more.
    pub fn drain(&mut self, from: Option<&impl AsFd>) {
        let Some(from) = from else { return };
        let mut chunk = [0; FIRST_BYTES];
        let mut drained = 0;
        while !self.is_at_end && drained < DRAIN_BYTES {
            match read_now(from, &mut chunk) {
                Ok(n) => {
                    drained += n;
                    self.take(&chunk[..n]);
                }
                Err(_) => return,
            }
        }
    }

    /// The captured bytes. A character that the limit cut in two is removed, so that text stays valid UTF-8.
    pub fn into_bytes(mut self) -> Vec<u8> {
        if self.truncated
            && let Err(cut) = std::str::from_utf8(&self.bytes)
            && cut.error_len().is_none()
        {
            self.bytes.truncate(cut.valid_up_to());
        }
        self.bytes.shrink_to_fit();
        self.bytes
    }

    pub fn take(&mut self, chunk: &[u8]) {
        self.is_at_end = chunk.is_empty();
        let room = self.limit - self.bytes.len();
        self.truncated |= chunk.len() > room;
        self.bytes.extend_from_slice(&chunk[..chunk.len().min(room)]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_beyond_the_limit_is_dropped_and_told() {
        let mut capture = Capture::new(5);
        capture.take(b"abc");
        assert!(!capture.truncated);
        capture.take(b"de");
        assert!(!capture.truncated);
        capture.take(b"f");
        assert_eq!((capture.bytes.as_slice(), capture.truncated), (b"abcde".as_slice(), true));
        assert_eq!(capture.into_bytes(), b"abcde");
    }

    #[test]
    fn a_character_cut_by_the_limit_goes() {
        let mut capture = Capture::new(2);
        capture.take("a€".as_bytes());
        assert_eq!(capture.into_bytes(), b"a");
    }
}
