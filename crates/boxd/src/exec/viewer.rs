//! One connection's view of a command: its streams from the offsets asked for, each byte once, and the exit after the last.

use std::{sync::Arc, time::Duration};

use bytes::BytesMut;
use cobox_protocol::frame::{BINARY_HEAD_BYTES, BinaryFrame, BinaryKind, OutputStream};
use cobox_stream::{Log, Read, Reader};
use tokio::{task::JoinHandle, time::Instant};

use super::command::{Attached, Command};
use crate::processes::Ended;

/// Output in one frame: large enough that a frame's own cost doesn't show, and small enough that it is still in the core's own
/// cache each time it is copied on its way out.
const FRAME_BYTES: usize = 64 * 1024;
/// The first of a connection, from which they grow to that: over a network on which none lasts, each still brings something.
const FIRST_FRAME_BYTES: usize = 16 * 1024;
/// The same as text, which is at most 800 KiB even if all of it must be escaped.
const TEXT_FRAME_BYTES: usize = 128 * 1024;
/// A viewer that takes and acknowledges nothing for so long no longer holds up the program: it finds the rest in the spool, or a gap.
/// Of several only the one furthest along does; the others find theirs there at once.
const STALL: Duration = Duration::from_secs(30);

/// How long the program is held up for acknowledgements of what was sent already. A client that sends them as it goes keeps its output
/// in memory; one that waits for more before it does gets more.
const ACKNOWLEDGED_WITHIN: Duration = Duration::from_millis(50);

/// Resolves at that time, if there is one.
pub async fn at(time: Option<Instant>) {
    match time {
        Some(time) => tokio::time::sleep_until(time).await,
        None => std::future::pending().await,
    }
}

/// What there is to tell.
pub enum Event {
    Output(Output),
    Gap { stream: OutputStream, from: u64, to: u64 },
    Exit(Ended),
}

pub struct Output {
    pub stream: OutputStream,
    pub offset: u64,
    /// As a binary frame: the head, then the bytes.
    pub frame: BytesMut,
}

impl Output {
    pub fn bytes(&self) -> &[u8] {
        self.frame.get(BINARY_HEAD_BYTES..).unwrap_or_default()
    }
}

pub struct Viewer {
    stdout: Source,
    stderr: Option<Source>,
    /// Whose turn it is when both have something.
    is_stderrs_turn: bool,
    is_holding: bool,
    last_progress: Instant,
    attached: Attached,
}

impl Viewer {
    pub fn new(attached: Attached, stdout_from: u64, stderr_from: u64, form: Form) -> Self {
        let command = &attached.0;
        Self {
            stdout: Source::new(OutputStream::Stdout, &command.stdout, stdout_from, form),
            stderr: command.stderr.as_ref().map(|log| Source::new(OutputStream::Stderr, log, stderr_from, form)),
            is_stderrs_turn: false,
            is_holding: true,
            last_progress: Instant::now(),
            attached,
        }
    }

    /// No more than so much of each stream is wanted: the rest is passed over, and told as a gap at its end.
    pub fn cut_at(&mut self, offset: u64) {
        for source in std::iter::once(&mut self.stdout).chain(&mut self.stderr) {
            source.cut_at = offset;
        }
    }

    pub fn command(&self) -> &Arc<Command> {
        &self.attached.0
    }

    /// Where each stream goes on.
    pub fn positions(&self) -> (u64, u64) {
        (self.stdout.position, self.stderr.as_ref().map_or(0, |s| s.position))
    }

    /// What comes next; after the exit there is nothing more. May be dropped while it waits.
    pub async fn next(&mut self) -> Event {
        loop {
            if let Some(event) = self.read_now() {
                self.progress();
                return event;
            }
            if self.stdout.is_over && self.stderr.as_ref().is_none_or(|s| s.is_over) {
                return Event::Exit(self.attached.0.job().wait().await);
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

    /// Its client has everything before this offset.
    pub fn acknowledge(&mut self, stream: OutputStream, offset: u64) {
        match (stream, &mut self.stderr) {
            (OutputStream::Stdout, _) => self.stdout.acknowledge(offset),
            (OutputStream::Stderr, Some(stderr)) => stderr.acknowledge(offset),
            (OutputStream::Stderr, None) => {}
        }
        self.progress();
    }

    /// When the program is no longer to be held up by this viewer, unless it makes progress before: first for its acknowledgements,
    /// then at all.
    pub fn stalls_at(&self) -> Option<Instant> {
        let awaits_acknowledgements = std::iter::once(&self.stdout).chain(&self.stderr).any(Source::awaits_acknowledgements);
        match awaits_acknowledgements {
            true => Some(self.last_progress + ACKNOWLEDGED_WITHIN),
            false => self.is_holding.then(|| self.last_progress + STALL),
        }
    }

    pub fn let_go(&mut self) {
        let mut has_awaited = false;
        for source in std::iter::once(&mut self.stdout).chain(&mut self.stderr).filter(|source| source.awaits_acknowledgements()) {
            source.has_acknowledged = false;
            has_awaited = true;
            if let Some(reader) = &mut source.reader {
                reader.stop_expecting_acknowledgements();
            }
        }
        if !has_awaited {
            self.hold(false);
        }
    }

    fn progress(&mut self) {
        self.last_progress = Instant::now();
        if !self.is_holding {
            self.hold(true);
        }
    }

    fn hold(&mut self, is_holding: bool) {
        self.is_holding = is_holding;
        for source in std::iter::once(&mut self.stdout).chain(&mut self.stderr) {
            source.is_holding = is_holding;
            if let Some(reader) = &mut source.reader {
                reader.set_backpressure(is_holding);
            }
        }
    }

    fn read_now(&mut self) -> Option<Event> {
        let Some(stderr) = &mut self.stderr else { return self.stdout.read_now() };
        let (first, second) = if self.is_stderrs_turn { (stderr, &mut self.stdout) } else { (&mut self.stdout, stderr) };
        let event = first.read_now().or_else(|| second.read_now())?;
        self.is_stderrs_turn = !self.is_stderrs_turn;
        Some(event)
    }
}

/// How output is sent, which decides where it may be cut.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Form {
    Bytes,
    /// Not in the middle of a character, where there is a choice.
    Text,
}

/// One stream of a command.
struct Source {
    stream: OutputStream,
    form: Form,
    position: u64,
    /// Nothing from here on is wanted.
    cut_at: u64,
    /// Where what was passed over begins.
    passed_over: Option<u64>,
    /// On this connection.
    sent_bytes: usize,
    is_holding: bool,
    acknowledged: u64,
    /// Lately: see [`ACKNOWLEDGED_WITHIN`].
    has_acknowledged: bool,
    is_over: bool,
    /// With a thread that reads from the disk while `reading`.
    reader: Option<Reader>,
    reading: Option<JoinHandle<(Reader, Read, BytesMut)>>,
    read: Option<(Read, BytesMut)>,
}

impl Source {
    fn new(stream: OutputStream, log: &Log, from: u64, form: Form) -> Self {
        let reader = log.reader(from);
        let position = reader.position();
        let reader = Some(reader);
        Self {
            stream,
            form,
            position,
            cut_at: u64::MAX,
            passed_over: None,
            sent_bytes: 0,
            is_holding: true,
            acknowledged: 0,
            has_acknowledged: false,
            is_over: false,
            reader,
            reading: None,
            read: None,
        }
    }

    /// What can be had without waiting for anything.
    fn read_now(&mut self) -> Option<Event> {
        if self.is_over {
            return None;
        }
        let (read, mut frame) = match self.read.take() {
            Some(read) => read,
            None => {
                let reader = self.reader.as_mut().filter(|reader| !reader.reads_from_spool())?;
                read_frame(reader, self.stream, self.form, self.sent_bytes)
            }
        };
        match read {
            Read::Chunk(chunk) => {
                if self.form == Form::Text {
                    self.cut_at_a_character(&mut frame);
                }
                let bytes = frame.len() - BINARY_HEAD_BYTES;
                self.position = chunk.offset + bytes as u64;
                self.sent_bytes = self.sent_bytes.saturating_add(bytes);
                if self.position > self.cut_at {
                    let wanted = usize::try_from(self.cut_at.saturating_sub(chunk.offset)).unwrap_or(usize::MAX);
                    self.passed_over.get_or_insert(self.cut_at.max(chunk.offset));
                    if wanted == 0 {
                        return None;
                    }
                    frame.truncate(BINARY_HEAD_BYTES + wanted);
                }
                Some(Event::Output(Output { stream: self.stream, offset: chunk.offset, frame }))
            }
            Read::Gap { to, .. } if self.passed_over.is_some() => {
                self.position = to;
                None
            }
            Read::Gap { from, to } => {
                self.position = to;
                Some(Event::Gap { stream: self.stream, from, to })
            }
            // The end itself comes with the next look.
            Read::End if self.passed_over.is_some() => {
                self.passed_over.take().map(|from| Event::Gap { stream: self.stream, from, to: self.position })
            }
            Read::End => {
                self.is_over = true;
                None
            }
            Read::Pending => None,
        }
    }

    /// A full frame has more behind it, so what is cut from it comes with that.
    fn cut_at_a_character(&mut self, frame: &mut BytesMut) {
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

    /// Resolves when there may be something to read. May be dropped while it waits.
    async fn ready(&mut self) {
        if self.is_over {
            return std::future::pending().await;
        }
        if let Some(reader) = self.reader.take_if(|reader| reader.reads_from_spool()) {
            let (mut reader, stream, form, sent_bytes) = (reader, self.stream, self.form, self.sent_bytes);
            self.reading = Some(tokio::task::spawn_blocking(move || {
                let (read, frame) = read_frame(&mut reader, stream, form, sent_bytes);
                (reader, read, frame)
            }));
        }
        if let Some(reading) = &mut self.reading {
            let done = reading.await;
            self.reading = None;
            match done {
                Ok((mut reader, read, frame)) => {
                    reader.set_backpressure(self.is_holding);
                    if self.has_acknowledged {
                        reader.acknowledge(self.acknowledged);
                    }
                    self.reader = Some(reader);
                    self.read = Some((read, frame));
                }
                // The thread panicked, or the runtime ends: nothing more will come from here.
                Err(_) => self.is_over = true,
            }
        } else if let Some(reader) = &mut self.reader {
            reader.wait().await;
        }
    }

    fn awaits_acknowledgements(&self) -> bool {
        self.has_acknowledged && self.acknowledged < self.position && !self.is_over
    }

    fn acknowledge(&mut self, offset: u64) {
        self.acknowledged = self.acknowledged.max(offset);
        self.has_acknowledged = true;
        if let Some(reader) = &mut self.reader {
            reader.acknowledge(offset);
        }
    }
}

fn read_frame(reader: &mut Reader, stream: OutputStream, form: Form, sent_bytes: usize) -> (Read, BytesMut) {
    let mut frame = BytesMut::new();
    let kind = match stream {
        OutputStream::Stdout => BinaryKind::Stdout,
        OutputStream::Stderr => BinaryKind::Stderr,
    };
    frame.extend_from_slice(&BinaryFrame::head(kind, reader.position()));
    let most = if form == Form::Text { TEXT_FRAME_BYTES } else { sent_bytes.clamp(FIRST_FRAME_BYTES, FRAME_BYTES) };
    let read = reader.read_into(&mut frame, most);
    (read, frame)
}
