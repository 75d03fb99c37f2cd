//! The caller's `traceparent` (W3C Trace Context), so that a request can be followed across systems.

use std::fmt;

use http::HeaderMap;

const HEADER: &str = "traceparent";
/// Headers of the standard; the second is only valid with the first.
pub const HEADERS: [&str; 2] = [HEADER, "tracestate"];
/// Length of version 00, in characters: `00-` trace id `-` parent id `-` flags.
const VALUE_CHARS: usize = 55;
const SAMPLED: u8 = 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceContext {
    pub trace_id: [u8; 16],
    /// The caller's span.
    pub parent_id: [u8; 8],
    pub is_sampled: bool,
}

impl TraceContext {
    /// Ignores a value that doesn't follow the standard exactly.
    pub fn from_headers(headers: &HeaderMap) -> Option<Self> {
        let mut values = headers.get_all(HEADER).iter();
        let value = values.next().filter(|_| values.next().is_none())?.to_str().ok()?;
        Self::read(value)
    }

    fn read(value: &str) -> Option<Self> {
        let mut parts = value.split('-');
        let (version, trace, parent, flags) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
        if version != "00" || value.len() != VALUE_CHARS || parts.next().is_some() {
            return None;
        }
        let [flags] = bytes::<1>(flags)?;
        let context = Self { trace_id: bytes(trace)?, parent_id: bytes(parent)?, is_sampled: flags & SAMPLED != 0 };
        (context.trace_id != [0; 16] && context.parent_id != [0; 8]).then_some(context)
    }
}

/// Writes the trace id as it appears in logs.
impl fmt::Display for TraceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.trace_id.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Parses lower-case hexadecimal, as the standard demands.
fn bytes<const N: usize>(hex: &str) -> Option<[u8; N]> {
    if hex.len() != 2 * N || !hex.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b)) {
        return None;
    }
    let mut bytes = [0; N];
    for (n, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&hex[2 * n..2 * n + 2], 16).ok()?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_valid_trace_contexts_are_accepted() {
        let good = TraceContext::read("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01").unwrap();
        assert_eq!((good.to_string().as_str(), good.is_sampled), ("4bf92f3577b34da6a3ce929d0e0e4736", true));
        for bad in [
            "",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7",
            "01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-x",
            "00-4bf92f3577b34da6a3ce929d0e0e47-3600f067aa0ba902b7-0100",
        ] {
            assert_eq!(TraceContext::read(bad), None, "{bad}");
        }
    }
}
