//! Where a reader stands in an output addressed by byte offset: what comes twice is dropped, what is missing is an error.

use bytes::{Buf, Bytes};
use cobox_protocol::frame::OutputStream;

use crate::ClientError;

/// The next byte wanted; `None` until something has said where the output begins.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cursor {
    stream: OutputStream,
    next: Option<u64>,
}

impl Cursor {
    pub fn new(stream: OutputStream, next: Option<u64>) -> Self {
        Self { stream, next }
    }

    pub fn next(&self) -> Option<u64> {
        self.next
    }

    /// What is new in these bytes. A hole that nothing explained is an error: the caller would take one end for the other.
    pub fn take(&mut self, offset: u64, mut bytes: Bytes) -> Result<Option<Bytes>, ClientError> {
        let next = self.next.unwrap_or(offset);
        if offset > next {
            return Err(ClientError::Hole { stream: self.stream, from: next, to: offset });
        }
        let known = next - offset;
        if known >= bytes.len() as u64 {
            return Ok(None);
        }
        // Less than the length of a slice.
        bytes.advance(known as usize);
        self.next = Some(next.saturating_add(bytes.len() as u64));
        Ok(Some(bytes))
    }

    /// Bytes that are said to be gone; gives those that were still wanted.
    pub fn skip(&mut self, from: u64, to: u64) -> Option<(u64, u64)> {
        let start = self.next.unwrap_or(from).max(from);
        if to <= start {
            return None;
        }
        self.next = Some(to);
        Some((start, to))
    }

    /// What follows begins here, whatever was before.
    pub fn jump(&mut self, offset: u64) {
        self.next = Some(offset);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(cursor: &mut Cursor, offset: u64, bytes: &'static [u8]) -> Result<Option<Bytes>, ClientError> {
        cursor.take(offset, Bytes::from_static(bytes))
    }

    #[test]
    fn each_byte_is_taken_once_and_a_hole_is_an_error_unless_a_gap_explained_it() {
        let mut cursor = Cursor::new(OutputStream::Stdout, Some(0));
        assert_eq!(take(&mut cursor, 0, b"abc").unwrap().unwrap(), "abc");
        assert_eq!(take(&mut cursor, 0, b"abc").unwrap(), None);
        assert_eq!(take(&mut cursor, 1, b"bcde").unwrap().unwrap(), "de");
        assert!(matches!(take(&mut cursor, 6, b"g"), Err(ClientError::Hole { from: 5, to: 6, .. })));
        assert_eq!(cursor.skip(5, 9), Some((5, 9)));
        assert_eq!(cursor.skip(3, 7), None);
        assert_eq!(take(&mut cursor, 9, b"j").unwrap().unwrap(), "j");
        assert_eq!(cursor.next(), Some(10));
    }

    #[test]
    fn offsets_at_the_end_of_numbers_do_no_harm() {
        let mut cursor = Cursor::new(OutputStream::Stdout, None);
        assert_eq!(take(&mut cursor, u64::MAX, b"ab").unwrap().unwrap(), "ab");
        assert_eq!(cursor.next(), Some(u64::MAX));
        assert_eq!(cursor.skip(0, u64::MAX), None);
    }
}
