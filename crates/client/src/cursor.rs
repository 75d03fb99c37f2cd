//! Read position in an output addressed by byte offset: repeated bytes are dropped, missing bytes are an error.

use bytes::{Buf, Bytes};
use cobox_protocol::frame::OutputStream;

use crate::ClientError;

/// Offset of the next byte wanted; `None` until the start of the output is known.
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

    /// Returns the new part of these bytes. Missing bytes without a reported gap are an error, because the caller would join unrelated
    /// output.
    pub fn take(&mut self, offset: u64, mut bytes: Bytes) -> Result<Option<Bytes>, ClientError> {
        let next = self.next.unwrap_or(offset);
        if offset > next {
            return Err(ClientError::MissingOutput { stream: self.stream, from: next, to: offset });
        }
        let known = next - offset;
        if known >= bytes.len() as u64 {
            return Ok(None);
        }
        // Lossless: less than the length of a slice.
        bytes.advance(known as usize);
        self.next = Some(next.saturating_add(bytes.len() as u64));
        Ok(Some(bytes))
    }

    /// Skips a reported gap; returns the part of it that was not received before.
    pub fn skip(&mut self, from: u64, to: u64) -> Option<(u64, u64)> {
        let start = self.next.unwrap_or(from).max(from);
        if to <= start {
            return None;
        }
        self.next = Some(to);
        Some((start, to))
    }

    /// Continues at this offset, independent of the previous one.
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
    fn each_byte_is_delivered_once_and_missing_bytes_without_a_gap_are_an_error() {
        let mut cursor = Cursor::new(OutputStream::Stdout, Some(0));
        assert_eq!(take(&mut cursor, 0, b"abc").unwrap().unwrap(), "abc");
        assert_eq!(take(&mut cursor, 0, b"abc").unwrap(), None);
        assert_eq!(take(&mut cursor, 1, b"bcde").unwrap().unwrap(), "de");
        assert!(matches!(take(&mut cursor, 6, b"g"), Err(ClientError::MissingOutput { from: 5, to: 6, .. })));
        assert_eq!(cursor.skip(5, 9), Some((5, 9)));
        assert_eq!(cursor.skip(3, 7), None);
        assert_eq!(take(&mut cursor, 9, b"j").unwrap().unwrap(), "j");
        assert_eq!(cursor.next(), Some(10));
    }

    #[test]
    fn offsets_near_the_maximum_do_not_overflow() {
        let mut cursor = Cursor::new(OutputStream::Stdout, None);
        assert_eq!(take(&mut cursor, u64::MAX, b"ab").unwrap().unwrap(), "ab");
        assert_eq!(cursor.next(), Some(u64::MAX));
        assert_eq!(cursor.skip(0, u64::MAX), None);
    }
}
