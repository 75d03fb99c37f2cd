//! Sends a shell's output to one participant: immediately to the controller, in turns to the others.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use axum::extract::ws::Message;
use base64::{Engine, engine::general_purpose::STANDARD};
use bytes::BytesMut;
use cobox_protocol::frame::{BinaryFrame, BinaryKind, Controller, OutputStream, ServerFrame};
use cobox_stream::{Chunk, Keyframe, Read, Reader, Resize, SequenceKinds, WakePriority};
use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};

use super::shared_shell::Shell;
use crate::{
    server::Server,
    socket::{CloseReason, FrameSender, encode},
};

/// Maximum output in one frame for the controller: a few screens, and at most 200 KiB if all of it must be escaped.
const FRAME_BYTES: usize = 32 * 1024;
/// For participants without control, who get fewer frames.
const BACKGROUND_FRAME_BYTES: usize = 64 * 1024;
/// Minimum time between two keyframes: a client that can't keep up sees the screen a few times per second.
const KEYFRAME_PERIOD: Duration = Duration::from_millis(250);
/// Nothing was acknowledged yet.
const NEVER: u64 = u64::MAX;

/// The offset that a client has acknowledged. For a client that never acknowledges, the offset written to its socket
/// counts.
pub struct Progress(AtomicU64);

impl Default for Progress {
    fn default() -> Self {
        Self(AtomicU64::new(NEVER))
    }
}

impl Progress {
    pub fn acknowledge(&self, offset: u64) {
        self.0.store(offset.min(NEVER - 1), Ordering::Relaxed);
    }
    fn or(&self, position: u64) -> u64 {
        match self.0.load(Ordering::Relaxed) {
            NEVER => position,
            // A client can't have received more than was sent.
            acknowledged => acknowledged.min(position),
        }
    }
}

pub struct OutputSender {
    pub shell: Arc<Shell>,
    pub id: u64,
    pub reader: Reader,
    pub controllers: watch::Receiver<Option<Controller>>,
    /// The controller, and whether it is this participant, as last sent.
    last_sent_controller: (Option<Controller>, bool),
    pub out: FrameSender,
    pub is_binary: bool,
    /// Sequences that the client's terminal accepts while it has control.
    pub allowed: SequenceKinds,
    pub progress: Arc<Progress>,
    pub keyframe: Option<Keyframe>,
    characters: CharacterBuffer,
}

/// The start of an incomplete character, and its offset.
#[derive(Default)]
struct CharacterBuffer {
    offset: u64,
    tail: Vec<u8>,
}

impl OutputSender {
    #[allow(clippy::too_many_arguments, reason = "each is one thing a view is made of")]
    pub fn new(
        shell: Arc<Shell>,
        id: u64,
        reader: Reader,
        keyframe: Option<Keyframe>,
        controllers: watch::Receiver<Option<Controller>>,
        out: FrameSender,
        is_binary: bool,
        allowed: SequenceKinds,
        last_sent_controller: (Option<Controller>, bool),
    ) -> Self {
        let progress = Arc::default();
        Self {
            shell,
            id,
            reader,
            controllers,
            last_sent_controller,
            out,
            is_binary,
            allowed,
            progress,
            keyframe,
            characters: CharacterBuffer::default(),
        }
    }

    /// The sequences to remove for a participant.
    pub fn hidden(is_controller: bool, allowed: SequenceKinds) -> SequenceKinds {
        if is_controller { SequenceKinds::ALL.without(SequenceKinds::QUERY).without(allowed) } else { SequenceKinds::ALL }
    }

    /// Sends everything from the reader's position to the end of the shell.
    pub async fn run(mut self, server: &Server) -> Result<(), CloseReason> {
        if let Some(keyframe) = self.keyframe.take() {
            self.send_keyframe(&keyframe).await?;
        }
        let mut next_keyframe = Instant::now();
        let mut was_controller = None;
        loop {
            let is_controller = self.shell.is_controlled_by(self.id);
            if was_controller.replace(is_controller) != Some(is_controller) {
                self.reader.set_hidden(Self::hidden(is_controller, self.allowed));
                self.reader.set_wake_priority(if is_controller { WakePriority::Interactive } else { WakePriority::Background });
                self.shell.consumed(self.id, self.progress.or(self.reader.position()));
            }
            if self.controllers.has_changed().unwrap_or(false) {
                self.send_controller().await?;
            }
            if is_controller {
                let (read, frames) = self.read(FRAME_BYTES);
                for frame in frames {
                    self.out.message(frame).await?;
                }
                if !self.handle_read(read, &mut next_keyframe).await? {
                    return Ok(());
                }
                self.shell.consumed(self.id, self.progress.or(self.reader.position()));
            } else {
                // Acquires space for a frame first: waiting for a client that doesn't read must not keep the others
                // from their turn.
                let mut permit = Some(self.out.permit().await?);
                let background_turn = server.shells.background_turn.acquire().await.map_err(|_| CloseReason::normal())?;
                let (read, frames) = self.read(BACKGROUND_FRAME_BYTES);
                let mut frames = frames.into_iter();
                if let Some(frame) = frames.next() {
                    self.out.send_with(&mut permit, frame);
                    // Lets the socket task write it while the next participant waits.
                    tokio::task::yield_now().await;
                }
                drop((background_turn, permit));
                for frame in frames {
                    self.out.message(frame).await?;
                }
                if !self.handle_read(read, &mut next_keyframe).await? {
                    return Ok(());
                }
                // Regardless of the amount of output, the next turn decides when this participant gets more.
                let next_turn = self.shell.next_turn(self.id);
                tokio::select! {
                    () = sleep_until(next_turn) => {}
                    _ = self.controllers.changed() => self.send_controller().await?,
                }
            }
        }
    }

    /// Handles the result of a read apart from output. `false` at the end.
    async fn handle_read(&mut self, read: Read, next_keyframe: &mut Instant) -> Result<bool, CloseReason> {
        match read {
            Read::Chunk(_) => {}
            Read::Gap { .. } => {
                self.flush().await?;
                sleep_until(*next_keyframe).await;
                *next_keyframe = Instant::now() + KEYFRAME_PERIOD;
                let hidden = Self::hidden(self.shell.is_controlled_by(self.id), self.allowed);
                let keyframe = self.shell.keyframe(hidden);
                self.reader.seek(keyframe.offset);
                self.send_keyframe(&keyframe).await?;
            }
            Read::Pending => {
                tokio::select! {
                    () = self.reader.wait() => {}
                    changed = self.controllers.changed() => {
                        if changed.is_ok() {
                            self.send_controller().await?;
                        }
                    }
                }
            }
            Read::End => {
                self.flush().await?;
                let exit = self.shell.exit.borrow().unwrap_or(crate::workload::Exit { code: 0, signal: None });
                self.out.send(&ServerFrame::<()>::Exit { exit_code: exit.code, signal: exit.signal, timed_out: false }).await?;
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Reads once and returns the resulting frames.
    fn read(&mut self, max: usize) -> (Read, Vec<Message>) {
        let mut frames = Vec::new();
        while let Some(Resize { offset, cols, rows }) = self.reader.next_size() {
            frames.extend(self.characters.flush().map(|rest| encode(&rest)));
            frames.push(encode(&ServerFrame::<()>::Resized { offset, cols, rows }));
        }
        if self.is_binary {
            let mut frame = BytesMut::from(&BinaryFrame::head(BinaryKind::Stdout, 0)[..]);
            let read = self.reader.read_into(&mut frame, max);
            if let Read::Chunk(Chunk { offset, .. }) = &read {
                let head = BinaryFrame::head(BinaryKind::Stdout, *offset);
                frame[..head.len()].copy_from_slice(&head);
                frames.push(Message::Binary(frame.freeze()));
            }
            return (read, frames);
        }
        let read = self.reader.read(max);
        if let Read::Chunk(Chunk { offset, bytes }) = &read {
            frames.extend(self.characters.frame(*offset, bytes).map(|frame| encode(&frame)));
        }
        (read, frames)
    }

    async fn flush(&mut self) -> Result<(), CloseReason> {
        match self.characters.flush() {
            Some(frame) => self.out.message(encode(&frame)).await,
            None => Ok(()),
        }
    }

    async fn send_controller(&mut self) -> Result<(), CloseReason> {
        let controller = self.controllers.borrow_and_update().clone();
        let current = (controller, self.shell.is_controlled_by(self.id));
        if current == self.last_sent_controller {
            return Ok(());
        }
        self.last_sent_controller = current.clone();
        let (controller, yours) = current;
        self.out.send(&ServerFrame::<()>::Control { controller, yours: Some(yours) }).await
    }

    async fn send_keyframe(&mut self, keyframe: &Keyframe) -> Result<(), CloseReason> {
        let Keyframe { offset, cols, rows, ref ansi } = *keyframe;
        if self.is_binary {
            self.out.send(&ServerFrame::<()>::Resized { offset, cols, rows }).await?;
            let frame = [&BinaryFrame::head(BinaryKind::Keyframe, offset)[..], ansi].concat();
            return self.out.message(Message::Binary(frame.into())).await;
        }
        self.out.send(&ServerFrame::<()>::Keyframe { offset, cols, rows, data_b64: STANDARD.encode(ansi) }).await
    }
}

impl CharacterBuffer {
    fn frame(&mut self, offset: u64, bytes: &[u8]) -> Option<ServerFrame<()>> {
        if self.tail.is_empty() {
            self.offset = offset;
            let complete = complete_characters(bytes);
            self.tail.extend_from_slice(&bytes[complete..]);
            self.offset += complete as u64;
            return (complete > 0).then(|| ServerFrame::output(OutputStream::Stdout, offset, &bytes[..complete]));
        }
        self.tail.extend_from_slice(bytes);
        let complete = complete_characters(&self.tail);
        self.take_prefix(complete)
    }

    fn flush(&mut self) -> Option<ServerFrame<()>> {
        self.take_prefix(self.tail.len())
    }

    fn take_prefix(&mut self, at: usize) -> Option<ServerFrame<()>> {
        if at == 0 {
            return None;
        }
        let rest = self.tail.split_off(at);
        let frame = ServerFrame::output(OutputStream::Stdout, self.offset, &self.tail);
        self.offset += at as u64;
        self.tail = rest;
        Some(frame)
    }
}

fn complete_characters(bytes: &[u8]) -> usize {
    match std::str::from_utf8(bytes) {
        Err(e) if e.error_len().is_none() => e.valid_up_to(),
        _ => bytes.len(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offset_and_text(frame: Option<ServerFrame<()>>) -> Option<(u64, Option<String>)> {
        match frame? {
            ServerFrame::Stdout { offset, data, .. } => Some((offset, data)),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_character_split_by_a_read_is_sent_whole() {
        let mut characters = CharacterBuffer::default();
        let euro = "€".as_bytes();
        assert_eq!(offset_and_text(characters.frame(0, &[b'a', euro[0]])), Some((0, Some("a".into()))));
        assert_eq!(offset_and_text(characters.frame(2, &euro[1..2])), None);
        assert_eq!(offset_and_text(characters.frame(3, &[euro[2], b'b'])), Some((1, Some("€b".into()))));
        assert_eq!(offset_and_text(characters.flush()), None);
        assert_eq!(offset_and_text(characters.frame(5, b"c")), Some((5, Some("c".into()))));
    }

    #[test]
    fn bytes_that_are_not_text_are_sent_in_base64_without_delay() {
        let mut characters = CharacterBuffer::default();
        assert_eq!(offset_and_text(characters.frame(0, b"\xff\xfe")), Some((0, None)));
        assert_eq!(offset_and_text(characters.frame(2, b"\xe2")), None);
        assert_eq!(offset_and_text(characters.flush()), Some((2, None)));
    }
}
