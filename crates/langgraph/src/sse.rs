//! Parses server-sent events from the chunks of a response; no I/O.

/// Maximum size of an event: an update contains complete messages and the files in them.
const MAX_EVENT_BYTES: usize = 4 * 1024 * 1024;

/// One event: its name, its data, and the id from which to resume.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SseEvent {
    pub name: String,
    pub data: String,
    pub id: Option<String>,
}

/// Buffers bytes until an event is complete.
#[derive(Debug, Default)]
pub struct SseParser {
    line: Vec<u8>,
    current: SseEvent,
    has_data: bool,
    ended_with_cr: bool,
}

/// The event exceeds the maximum size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventTooLong;

impl SseParser {
    /// Returns the events that these bytes complete, in order.
    pub fn push(&mut self, bytes: &[u8]) -> Result<Vec<SseEvent>, EventTooLong> {
        let mut events = Vec::new();
        for &byte in bytes {
            match byte {
                // The second half of CR LF.
                b'\n' if std::mem::take(&mut self.ended_with_cr) => {}
                b'\n' | b'\r' => {
                    self.ended_with_cr = byte == b'\r';
                    events.extend(self.end_line());
                }
                byte => {
                    self.ended_with_cr = false;
                    if self.line.len() + self.current.data.len() >= MAX_EVENT_BYTES {
                        return Err(EventTooLong);
                    }
                    self.line.push(byte);
                }
            }
        }
        Ok(events)
    }

    fn end_line(&mut self) -> Option<SseEvent> {
        let line = std::mem::take(&mut self.line);
        if line.is_empty() {
            let event = std::mem::take(&mut self.current);
            return std::mem::take(&mut self.has_data).then_some(event);
        }
        let line = String::from_utf8_lossy(&line);
        let (field, value) = line.split_once(':').unwrap_or((&line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "event" => value.clone_into(&mut self.current.name),
            "id" => self.current.id = Some(value.to_owned()),
            "data" => {
                if std::mem::replace(&mut self.has_data, true) {
                    self.current.data.push('\n');
                }
                self.current.data.push_str(value);
            }
            // A comment or an unused field.
            _ => {}
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const STREAM: &str = ": heartbeat\r\n\r\nevent: metadata\r\ndata: {\"run_id\":\"r\"}\r\nid: 1\r\n\r\nevent: custom\ndata: a\ndata: b\n\nretry: 5\n\nid: 9\n\n";

    fn expected() -> Vec<SseEvent> {
        vec![
            SseEvent { name: "metadata".into(), data: "{\"run_id\":\"r\"}".into(), id: Some("1".into()) },
            SseEvent { name: "custom".into(), data: "a\nb".into(), id: None },
        ]
    }

    proptest! {
        #[test]
        fn a_stream_parses_the_same_for_any_chunks(cuts in proptest::collection::vec(0usize..STREAM.len(), 0..8)) {
            let mut cuts = cuts;
            cuts.extend([0, STREAM.len()]);
            cuts.sort_unstable();
            let mut parser = SseParser::default();
            let mut events = Vec::new();
            for pair in cuts.windows(2) {
                events.extend(parser.push(&STREAM.as_bytes()[pair[0]..pair[1]]).unwrap());
            }
            prop_assert_eq!(events, expected());
        }

        #[test]
        fn any_bytes_can_be_parsed(bytes in proptest::collection::vec(any::<u8>(), 0..256)) {
            let _ = SseParser::default().push(&bytes);
        }
    }

    #[test]
    fn an_event_without_an_end_is_an_error() {
        let mut parser = SseParser::default();
        let chunk = vec![b'x'; 1024 * 1024];
        let mut fed = 0;
        while parser.push(&chunk).is_ok() {
            fed += chunk.len();
            assert!(fed <= MAX_EVENT_BYTES);
        }
        let mut parser = SseParser::default();
        let line = [b"data: ".as_slice(), &chunk[..1024], b"\n"].concat();
        assert!((0..10_000).any(|_| parser.push(&line) == Err(EventTooLong)), "many lines of one event count together");
    }
}
