//! One connection's view of a command: its streams from the requested offsets, each byte once, and the exit after the
//! last byte.

use std::{sync::Arc, time::Duration};

use bytes::BytesMut;
use cobox_protocol::frame::{BINARY_HEAD_BYTES, BinaryFrame, BinaryKind, OutputStream};
use cobox_stream::{Log, Read, Reader};
use tokio::{task::JoinHandle, time::Instant};

use super::command::{Attachment, Command};
use crate::processes::JobExit;

/// Output per frame: large enough to make the overhead of a frame negligible, and small enough to stay in the core's
/// cache each time it is copied on its way out.
const FRAME_BYTES: usize = 64 * 1024;
/// Size of a connection's first frame; later frames grow to [`FRAME_BYTES`]. On a network where no connection lasts,
/// each connection still makes progress.
const FIRST_FRAME_BYTES: usize = 16 * 1024;
/// Output per text frame: at most 800 KiB even if every byte must be escaped.
const TEXT_FRAME_BYTES: usize = 128 * 1024;
/// A viewer that neither takes nor acknowledges output for this long no longer blocks the program; it gets the rest
/// from the spool, or a gap. Of several viewers only the one furthest ahead can block the program; the others read from
/// the spool immediately.
const STALL_TIMEOUT: Duration = Duration::from_secs(30);

/// How long the program waits for acknowledgements of output that was already sent. A client that acknowledges
/// continuously keeps its output in memory; one that waits for more output before it acknowledges gets more.
const ACKNOWLEDGED_WITHIN: Duration = Duration::from_millis(50);

/// Resolves at that time; never, if there is none.
pub async fn sleep_until_some(time: Option<Instant>) {
    match time {
        Some(time) => tokio::time::sleep_until(time).await,
        None => std::future::pending().await,
    }
}

/// What a viewer receives next.
pub enum OutputEvent {
    Output(OutputChunk),
    Gap { stream: OutputStream, from: u64, to: u64 },
    Exit(JobExit),
}

pub struct OutputChunk {
    pub stream: OutputStream,
    pub offset: u64,
    /// As a binary frame: the header, then the bytes.
    pub frame: BytesMut,
}

impl OutputChunk {
    pub fn bytes(&self) -> &[u8] {
        self.frame.get(BINARY_HEAD_BYTES..).unwrap_or_default()
    }
}

pub struct Viewer {
    stdout: Source,
    stderr: Option<Source>,
    /// Whether stderr is next when both streams have output.
    is_stderr_next: bool,
    has_backpressure: bool,
    last_progress: Instant,
    attachment: Attachment,
}

impl Viewer {
    pub fn new(attachment: Attachment, stdout_from: u64, stderr_from: u64, encoding: OutputEncoding) -> Self {
        let command = &attachment.0;
        Self {
            stdout: Source::new(OutputStream::Stdout, &command.stdout, stdout_from, encoding),
            stderr: command.stderr.as_ref().map(|log| Source::new(OutputStream::Stderr, log, stderr_from, encoding)),
            is_stderr_next: false,
            has_backpressure: true,
            last_progress: Instant::now(),
            attachment,
        }
    }

    /// Limits each stream to this offset: output beyond it is skipped, and reported as a gap at the end of the stream.
    pub fn limit_to(&mut self, offset: u64) {
        for source in std::iter::once(&mut self.stdout).chain(&mut self.stderr) {
            source.limit = offset;
        }
    }

    pub fn command(&self) -> &Arc<Command> {
        &self.attachment.0
    }

    /// The offset at which each stream continues.
    pub fn positions(&self) -> (u64, u64) {
        (self.stdout.position, self.stderr.as_ref().map_or(0, |s| s.position))
    }

    /// The next event; there is none after the exit. Cancel safe.
    pub async fn next(&mut self) -> OutputEvent {
        loop {
            if let Some(event) = self.read_now() {
                self.note_progress();
                return event;
            }
            if self.stdout.has_ended && self.stderr.as_ref().is_none_or(|s| s.has_ended) {
                return OutputEvent::Exit(self.attachment.0.job().wait().await);
            }
            let (stdout, stderr) = (&mut self.stdout, &mut self.stderr);
            tokio::select! {
                () = stdout.ready() => {}
                () = async {
                    match stderr {
                        Some(stderr) => stderr.ready().await,
                        None => std::future::pending().await,
                    }
                } => {}
            }
        }
    }

    /// Records that the client has received everything before this offset.
    pub fn acknowledge(&mut self, stream: OutputStream, offset: u64) {
        match (stream, &mut self.stderr) {
            (OutputStream::Stdout, _) => self.stdout.acknowledge(offset),
            (OutputStream::Stderr, Some(stderr)) => stderr.acknowledge(offset),
            (OutputStream::Stderr, None) => {}
        }
        self.note_progress();
    }

    /// When this viewer stops blocking the program unless it makes progress: first the limit for its acknowledgements,
    /// then the overall limit.
    pub fn stalls_at(&self) -> Option<Instant> {
        let awaits_acknowledgements = std::iter::once(&self.stdout).chain(&self.stderr).any(Source::awaits_acknowledgements);
        match awaits_acknowledgements {
            true => Some(self.last_progress + ACKNOWLEDGED_WITHIN),
            false => self.has_backpressure.then(|| self.last_progress + STALL_TIMEOUT),
        }
    }

    pub fn release_backpressure(&mut self) {
        let mut has_released = false;
        for source in std::iter::once(&mut self.stdout).chain(&mut self.stderr).filter(|source| source.awaits_acknowledgements()) {
            source.has_acknowledged = false;
            has_released = true;
            if let Some(reader) = &mut source.reader {
                reader.stop_expecting_acknowledgements();
            }
        }
        if !has_released {
            self.set_backpressure(false);
        }
    }

    fn note_progress(&mut self) {
        self.last_progress = Instant::now();
        if !self.has_backpressure {
            self.set_backpressure(true);
        }
    }

    fn set_backpressure(&mut self, has_backpressure: bool) {
        self.has_backpressure = has_backpressure;
        for source in std::iter::once(&mut self.stdout).chain(&mut self.stderr) {
            source.has_backpressure = has_backpressure;
            if let Some(reader) = &mut source.reader {
                reader.set_backpressure(has_backpressure);
            }
        }
    }

    fn read_now(&mut self) -> Option<OutputEvent> {
        let Some(stderr) = &mut self.stderr else { return self.stdout.read_now() };
        let (first, second) = if self.is_stderr_next { (stderr, &mut self.stdout) } else { (&mut self.stdout, stderr) };
        let event = first.read_now().or_else(|| second.read_now())?;
        self.is_stderr_next = !self.is_stderr_next;
        Some(event)
    }
}

/// Encoding of the output, which determines where it may be split.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum OutputEncoding {
    Bytes,
    /// Text is not split within a character where that can be avoided.
    Text,
}

/// One stream of a command.
struct Source {
    stream: OutputStream,
    encoding: OutputEncoding,
    position: u64,
    /// Output from this offset on is skipped.
    limit: u64,
    /// Start of the skipped range.
    skipped_from: Option<u64>,
    /// Bytes sent on this connection.
    sent_bytes: usize,
    has_backpressure: bool,
    acknowledged: u64,
    /// Whether the client acknowledges promptly: see [`ACKNOWLEDGED_WITHIN`].
    has_acknowledged: bool,
    has_ended: bool,
    /// `None` while a blocking thread reads from the disk with it, see `reading`.
    reader: Option<Reader>,
    reading: Option<JoinHandle<(Reader, Read, BytesMut)>>,
    read: Option<(Read, BytesMut)>,
}

impl Source {
    fn new(stream: OutputStream, log: &Log, from: u64, encoding: OutputEncoding) -> Self {
        let reader = log.reader(from);
        let position = reader.position();
        let reader = Some(reader);
        Self {
            stream,
            encoding,
            position,
            limit: u64::MAX,
            skipped_from: None,
            sent_bytes: 0,
            has_backpressure: true,
            acknowledged: 0,
            has_acknowledged: false,
            has_ended: false,
            reader,
            reading: None,
            read: None,
        }
    }

    /// The next event that is available without waiting.
    fn read_now(&mut self) -> Option<OutputEvent> {
        if self.has_ended {
            return None;
        }
        let (read, mut frame) = match self.read.take() {
            Some(read) => read,
            None => {
                let reader = self.reader.as_mut().filter(|reader| !reader.reads_from_spool())?;
                read_frame(reader, self.stream, self.encoding, self.sent_bytes)
            }
        };
        match read {
            Read::Chunk(chunk) => {
                if self.encoding == OutputEncoding::Text {
                    self.trim_partial_character(&mut frame);
                }
                let bytes = frame.len() - BINARY_HEAD_BYTES;
                self.position = chunk.offset + bytes as u64;
                self.sent_bytes = self.sent_bytes.saturating_add(bytes);
                if self.position > self.limit {
                    let kept = usize::try_from(self.limit.saturating_sub(chunk.offset)).unwrap_or(usize::MAX);
                    self.skipped_from.get_or_insert(self.limit.max(chunk.offset));
                    if kept == 0 {
                        return None;
                    }
                    frame.truncate(BINARY_HEAD_BYTES + kept);
                }
                Some(OutputEvent::Output(OutputChunk { stream: self.stream, offset: chunk.offset, frame }))
            }
            Read::Gap { to, .. } if self.skipped_from.is_some() => {
                self.position = to;
                None
            }
            Read::Gap { from, to } => {
                self.position = to;
                Some(OutputEvent::Gap { stream: self.stream, from, to })
            }
            // The next call returns the end itself.
            Read::End if self.skipped_from.is_some() => {
                self.skipped_from.take().map(|from| OutputEvent::Gap { stream: self.stream, from, to: self.position })
            }
            Read::End => {
                self.has_ended = true;
                None
            }
            Read::Pending => None,
        }
    }

    /// Removes an incomplete character at the end of a full frame: more output follows, so the next frame sends it.
    fn trim_partial_character(&mut self, frame: &mut BytesMut) {
        let bytes = &frame[BINARY_HEAD_BYTES..];
        let Some(reader) = self.reader.as_mut().filter(|_| bytes.len() == TEXT_FRAME_BYTES) else { return };
        // A character has at most four bytes.
        let tail = &bytes[bytes.len() - 4..];
        let cut = (1..4).find(|n| matches!(std::str::from_utf8(&tail[4 - n..]), Err(e) if e.valid_up_to() == 0 && e.error_len().is_none()));
        if let Some(cut) = cut {
            reader.seek(reader.position() - cut as u64);
            frame.truncate(frame.len() - cut);
        }
    }

    /// Resolves when there may be something to read. Cancel safe.
    async fn ready(&mut self) {
        if self.has_ended {
            return std::future::pending().await;
        }
        if let Some(reader) = self.reader.take_if(|reader| reader.reads_from_spool()) {
            let (mut reader, stream, encoding, sent_bytes) = (reader, self.stream, self.encoding, self.sent_bytes);
            self.reading = Some(tokio::task::spawn_blocking(move || {
                let (read, frame) = read_frame(&mut reader, stream, encoding, sent_bytes);
                (reader, read, frame)
            }));
        }
        if let Some(reading) = &mut self.reading {
            let done = reading.await;
            self.reading = None;
            match done {
                Ok((mut reader, read, frame)) => {
                    reader.set_backpressure(self.has_backpressure);
                    if self.has_acknowledged {
                        reader.acknowledge(self.acknowledged);
                    }
                    self.reader = Some(reader);
                    self.read = Some((read, frame));
                }
                // The thread panicked or the runtime is shutting down: no more output will come from here.
                Err(_) => self.has_ended = true,
            }
        } else if let Some(reader) = &mut self.reader {
            reader.wait().await;
        }
    }

    fn awaits_acknowledgements(&self) -> bool {
        self.has_acknowledged && self.acknowledged < self.position && !self.has_ended
    }

    fn acknowledge(&mut self, offset: u64) {
        self.acknowledged = self.acknowledged.max(offset);
        self.has_acknowledged = true;
        if let Some(reader) = &mut self.reader {
            reader.acknowledge(offset);
        }
    }
}

fn read_frame(reader: &mut Reader, stream: OutputStream, encoding: OutputEncoding, sent_bytes: usize) -> (Read, BytesMut) {
    let mut frame = BytesMut::new();
    let kind = match stream {
        OutputStream::Stdout => BinaryKind::Stdout,
        OutputStream::Stderr => BinaryKind::Stderr,
    };
    frame.extend_from_slice(&BinaryFrame::head(kind, reader.position()));
    let limit = if encoding == OutputEncoding::Text { TEXT_FRAME_BYTES } else { sent_bytes.clamp(FIRST_FRAME_BYTES, FRAME_BYTES) };
    let read = reader.read_into(&mut frame, limit);
    (read, frame)
}
