//! WebSocket frames as bytes (RFC 6455, section 5): enough of the format to find one frame among others and to write one.

use std::io;

use tokio::io::{AsyncBufReadExt, AsyncReadExt};

const FINAL: u8 = 0x80;
const RESERVED: u8 = 0x70;
const OPCODE: u8 = 0x0f;
const CONTROL: u8 = 0x08;
const CONTINUATION: u8 = 0x0;
const TEXT: u8 = 0x1;
const CLOSE: u8 = 0x8;
const MASKED: u8 = 0x80;
/// Two bytes, eight bytes of length and four of mask.
const MAX_HEADER_BYTES: usize = 14;
/// Maximum payload of a control frame.
const MAX_CONTROL_BYTES: u64 = 125;

/// A frame's header, byte for byte as received.
#[derive(Clone, Copy)]
pub(crate) struct FrameHeader {
    bytes: [u8; MAX_HEADER_BYTES],
    len: usize,
    payload: u64,
}

/// Reads the next frame's header; `None` if the connection ends first. Not cancellation safe.
pub(crate) async fn read_header(from: &mut (impl AsyncBufReadExt + Unpin)) -> io::Result<Option<FrameHeader>> {
    if from.fill_buf().await?.is_empty() {
        return Ok(None);
    }
    let mut bytes = [0; MAX_HEADER_BYTES];
    from.read_exact(&mut bytes[..2]).await?;
    let extra = match bytes[1] & !MASKED {
        126 => 2,
        127 => 8,
        _ => 0,
    };
    let len = 2 + extra + if bytes[1] & MASKED != 0 { 4 } else { 0 };
    from.read_exact(&mut bytes[2..len]).await?;
    let payload = match extra {
        0 => u64::from(bytes[1] & !MASKED),
        _ => bytes[2..2 + extra].iter().fold(0, |n, b| n << 8 | u64::from(*b)),
    };
    let header = FrameHeader { bytes, len, payload };
    if header.is_control() && payload > MAX_CONTROL_BYTES {
        return Err(io::ErrorKind::InvalidData.into());
    }
    Ok(Some(header))
}

impl FrameHeader {
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
    pub fn payload_bytes(&self) -> u64 {
        self.payload
    }
    pub fn is_control(&self) -> bool {
        self.bytes[0] & CONTROL != 0
    }
    pub fn is_close(&self) -> bool {
        self.bytes[0] & OPCODE == CLOSE
    }
    /// Whether it starts a text message, without the reserved bits of an extension.
    pub fn is_text(&self) -> bool {
        self.bytes[0] & (RESERVED | OPCODE) == TEXT
    }
    /// Whether it continues a message.
    pub fn is_continuation(&self) -> bool {
        self.bytes[0] & (RESERVED | OPCODE) == CONTINUATION
    }
    pub fn is_final(&self) -> bool {
        self.bytes[0] & FINAL != 0
    }
    /// Whether it is an unfragmented text message.
    pub fn is_whole_text(&self) -> bool {
        self.is_text() && self.is_final()
    }

    /// Reads the whole payload; the caller has checked its length.
    pub async fn read_payload(&self, from: &mut (impl AsyncReadExt + Unpin)) -> io::Result<Vec<u8>> {
        let mut payload = vec![0; usize::try_from(self.payload).map_err(|_| io::ErrorKind::InvalidData)?];
        from.read_exact(&mut payload).await?;
        Ok(payload)
    }

    /// The frame as received.
    pub fn with_payload(&self, payload: &[u8]) -> Vec<u8> {
        [self.bytes(), payload].concat()
    }

    pub fn unmasked(&self, payload: &[u8]) -> Vec<u8> {
        if self.bytes[1] & MASKED == 0 {
            return payload.to_vec();
        }
        let mask = &self.bytes[self.len - 4..self.len];
        payload.iter().zip(mask.iter().cycle()).map(|(byte, key)| byte ^ key).collect()
    }
}

/// A text frame in the client's direction. RFC 6455 requires a mask; zeros are enough because no proxy is between gateway and boxd.
pub(crate) fn text_for_server(text: &[u8]) -> Vec<u8> {
    encode(FINAL | TEXT, MASKED, &[0; 4], text)
}

/// The first fragment of a text message, without the final bit.
pub(crate) fn text_start_for_server(text: &[u8]) -> Vec<u8> {
    encode(TEXT, MASKED, &[0; 4], text)
}

pub(crate) fn text_for_client(text: &str) -> Vec<u8> {
    encode(FINAL | TEXT, 0, &[], text.as_bytes())
}

pub(crate) fn close_for_client(code: u16, reason: &'static str) -> Vec<u8> {
    encode(FINAL | CLOSE, 0, &[], &[&code.to_be_bytes()[..], reason.as_bytes()].concat())
}

pub(crate) fn close_for_server(code: u16, reason: &'static str) -> Vec<u8> {
    encode(FINAL | CLOSE, MASKED, &[0; 4], &[&code.to_be_bytes()[..], reason.as_bytes()].concat())
}

fn encode(first: u8, masked: u8, mask: &[u8], payload: &[u8]) -> Vec<u8> {
    let mut frame = vec![first];
    match payload.len() {
        n @ 0..=125 => frame.push(masked | n as u8),
        n @ 126..=0xffff => {
            frame.push(masked | 126);
            frame.extend_from_slice(&(n as u16).to_be_bytes());
        }
        n => {
            frame.push(masked | 127);
            frame.extend_from_slice(&(n as u64).to_be_bytes());
        }
    }
    frame.extend_from_slice(mask);
    frame.extend_from_slice(payload);
    frame
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn written_frames_are_read_back_at_every_length_encoding() {
        for length in [0, 1, 125, 126, 0xffff, 0x10000] {
            let text = "x".repeat(length);
            let written = [text_for_server(text.as_bytes()), text_for_client(&text)].concat();
            let mut from = &written[..];
            for is_masked in [true, false] {
                let header = read_header(&mut from).await.unwrap().unwrap();
                assert!(header.is_whole_text() && !header.is_control());
                assert_eq!(header.bytes()[1] & MASKED != 0, is_masked);
                let payload = header.read_payload(&mut from).await.unwrap();
                assert_eq!(header.unmasked(&payload), text.as_bytes());
            }
            assert!(read_header(&mut from).await.unwrap().is_none());
        }
    }

    #[tokio::test]
    async fn masks_are_removed_and_malformed_headers_are_errors() {
        // RFC 6455, section 5.7: a masked "Hello".
        let bytes = [0x81, 0x85, 0x37, 0xfa, 0x21, 0x3d, 0x7f, 0x9f, 0x4d, 0x51, 0x58];
        let mut from = &bytes[..];
        let header = read_header(&mut from).await.unwrap().unwrap();
        let payload = header.read_payload(&mut from).await.unwrap();
        assert_eq!((header.unmasked(&payload), header.with_payload(&payload)), (b"Hello".to_vec(), bytes.to_vec()));
        assert!(read_header(&mut &bytes[..3]).await.is_err());
        assert!(read_header(&mut &[0x89, 126, 1, 0][..]).await.is_err(), "a control frame has at most 125 bytes");
        let part = read_header(&mut &[0x01, 0][..]).await.unwrap().unwrap();
        assert!(part.is_text() && !part.is_whole_text() && !part.is_continuation());
        let begun = text_start_for_server(b"a");
        let part = read_header(&mut &begun[..]).await.unwrap().unwrap();
        assert!(part.is_text() && !part.is_final());
        let rest = read_header(&mut &[0x80, 0][..]).await.unwrap().unwrap();
        assert!(rest.is_continuation() && rest.is_final() && !rest.is_text());
        assert!(
            !read_header(&mut &[0xc0, 0][..]).await.unwrap().unwrap().is_continuation(),
            "reserved bit of an extension that wasn't negotiated"
        );
    }
}
