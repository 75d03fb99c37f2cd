//! A shell that is independent of connections: its output, screen, participants and input.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::{Buf, BytesMut};
use cobox_protocol::{ApiError, ErrorCode, ShellId, Timestamp, frame::Controller, shell::ShellInfo};
use cobox_stream::{Keyframe, Limits, Log, Scanner, Screen, SequenceKinds};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use super::{
    participants::{JoinRequest, Participants},
    prompt::{Prompt, PromptState, TextDetector},
    terminal::Terminal,
};
use crate::{processes::ListedJob, workload::Exit};

/// Maximum input that the program has not read yet. Beyond it, clients that send input wait.
const MAX_PENDING_INPUT_BYTES: usize = 1024 * 1024;
/// Minimum period of updates for a participant without control: about as often as the eye notices.
const BACKGROUND_PERIOD: Duration = Duration::from_millis(32);
/// For all participants without control of a shell together, so that most of a processor is left to the controller.
/// With two hundred, each gets five frames per second.
const MAX_BACKGROUND_FRAMES_PER_SECOND: u32 = 1000;
/// Number of time slots per period. The controller waits for the participants of one slot at most.
const BACKGROUND_PHASES: u64 = 64;
/// No controller to hold back output for.
const NO_CONTROLLER: u64 = u64::MAX;

pub struct Shell {
    pub id: ShellId,
    pub name: String,
    pub command: Option<String>,
    pub created_at: Timestamp,
    pub log: Log,
    pub terminal: Terminal,
    pub listed: ListedJob,
    pub exit: watch::Sender<Option<Exit>>,
    pub controller: watch::Sender<Option<Controller>>,
    pub prompt: watch::Sender<Prompt>,
    /// Ends the shell.
    pub hang_up: CancellationToken,
    /// Set while an API request runs a command in it. Only one may.
    is_reserved: AtomicBool,
    screen_state: Mutex<ScreenState>,
    participants: Mutex<Participants>,
    input: Mutex<BytesMut>,
    pub input_arrived: Notify,
    input_drained: Notify,
    /// The offset that the controller has received. The program may be held back a little for it.
    consumed: AtomicU64,
    pub controller_progress: Notify,
    started: Instant,
    /// Time of the last input, output or connection, in milliseconds after the start.
    active_at: AtomicU64,
}

/// State derived from the output.
struct ScreenState {
    scanner: Scanner,
    screen: Screen,
    text: TextDetector,
    /// The last keyframe and its hidden sequences, valid until new output. Many clients may connect to the same screen.
    keyframe: Option<(SequenceKinds, Keyframe)>,
}

impl Shell {
    pub fn new(
        name: String,
        id: ShellId,
        command: Option<String>,
        terminal: Terminal,
        listed: ListedJob,
        (cols, rows): (u16, u16),
        ring_bytes: u64,
    ) -> Self {
        let ring_bytes = usize::try_from(ring_bytes).unwrap_or(usize::MAX);
        let log = Log::new(Limits { ring_bytes, writer_waits: false });
        log.resize(cols, rows);
        let screen_state =
            ScreenState { scanner: Scanner::default(), screen: Screen::new(cols, rows), text: TextDetector::default(), keyframe: None };
        Self {
            id,
            name,
            command,
            created_at: Timestamp::now(),
            log,
            terminal,
            listed,
            exit: watch::Sender::new(None),
            controller: watch::Sender::new(None),
            prompt: watch::Sender::new(Prompt::default()),
            hang_up: CancellationToken::new(),
            is_reserved: AtomicBool::new(false),
            screen_state: Mutex::new(screen_state),
            participants: Mutex::default(),
            input: Mutex::default(),
            input_arrived: Notify::new(),
            input_drained: Notify::new(),
            consumed: AtomicU64::new(NO_CONTROLLER),
            controller_progress: Notify::new(),
            started: Instant::now(),
            active_at: AtomicU64::new(0),
        }
    }

    /// Handles new output: stores it, wakes the readers with priority, then updates the screen. Returns `true` if more
    /// readers wait; the caller wakes them over time.
    #[must_use = "the remaining readers must be woken"]
    pub fn append_output(&self, bytes: &[u8]) -> bool {
        self.touch();
        let mut screen_state = self.screen_state();
        let from = self.log.head();
        let scanned = screen_state.scanner.scan(bytes);
        let has_more_readers = self.log.append_scanned(bytes, &scanned);
        if let Some(integration) = &self.terminal.integration {
            let mut text_from = from;
            let is_at_prompt = self.prompt.borrow().state == PromptState::AtPrompt;
            if is_at_prompt || !scanned.marks.is_empty() {
                self.prompt.send_modify(|prompt| {
                    for mark in &scanned.marks {
                        if screen_state.text.has_text(slice(bytes, from, text_from, mark.from)) {
                            prompt.note_output();
                        }
                        prompt.mark(mark, integration);
                        text_from = mark.to;
                    }
                    if screen_state.text.has_text(slice(bytes, from, text_from, from + bytes.len() as u64)) {
                        prompt.note_output();
                    }
                });
            }
        }
        screen_state.screen.feed(bytes, &scanned);
        screen_state.keyframe = None;
        has_more_readers
    }

    pub fn keyframe(&self, hidden: SequenceKinds) -> Keyframe {
        let mut screen_state = self.screen_state();
        if let Some((_, keyframe)) = screen_state.keyframe.as_ref().filter(|(kinds, _)| *kinds == hidden) {
            return keyframe.clone();
        }
        let keyframe = screen_state.screen.keyframe(hidden);
        screen_state.keyframe = Some((hidden, keyframe.clone()));
        keyframe
    }

    pub fn size(&self) -> (u16, u16) {
        self.screen_state().screen.size()
    }

    pub fn wants_bracketed_paste(&self) -> bool {
        self.screen_state().screen.wants_bracketed_paste()
    }

    pub fn is_alternate(&self) -> bool {
        self.screen_state().screen.is_alternate()
    }

    fn resize(&self, size: (u16, u16)) -> Result<(), ApiError> {
        let mut screen_state = self.screen_state();
        if screen_state.screen.size() == size {
            return Ok(());
        }
        self.terminal.resize(size)?;
        screen_state.screen.resize(size.0, size.1);
        screen_state.keyframe = None;
        self.log.resize(size.0, size.1);
        Ok(())
    }

    /// Adds a participant, which leaves when the returned value is dropped.
    pub fn join(self: &Arc<Self>, request: JoinRequest) -> Result<Membership, ApiError> {
        self.touch();
        let (id, taken_over) = self.with_participants(|participants, now| participants.join(request, now))?;
        Ok(Membership { shell: self.clone(), id, taken_over })
    }

    /// Changes the participants and publishes the resulting controller.
    pub fn with_participants<T>(&self, change: impl FnOnce(&mut Participants, Instant) -> T) -> T {
        let mut participants = self.participants();
        let before = participants.controlling_participant();
        let result = change(&mut participants, Instant::now());
        let after = participants.controlling_participant();
        if after != before {
            self.consumed.store(NO_CONTROLLER, Ordering::Relaxed);
            self.controller_progress.notify_one();
            if let Some(size) = after.and_then(|id| participants.size_of(id)) {
                // A terminal that can't be resized has ended, which the end of output reports.
                let _ = self.resize(size);
            }
            // Wakes the participants that gained or lost control.
            self.controller.send_modify(|_| {});
        }
        self.controller.send_if_modified(|published| {
            let controller = participants.controller();
            let is_new = *published != controller;
            *published = controller;
            is_new
        });
        result
    }

    pub fn is_controlled_by(&self, id: u64) -> bool {
        self.participants().controlling_participant() == Some(id)
    }

    /// Sets a participant's window size. The controller's size applies at once, others' when they get control.
    pub fn participant_resized(&self, id: u64, size: (u16, u16)) -> Result<(), ApiError> {
        let is_controller = self.with_participants(|participants, now| {
            participants.set_size(id, size);
            match participants.controlling_participant() {
                Some(holder) if holder == id => Ok(true),
                // Without a controller no participant's size applies.
                None if participants.controller().is_none() => Ok(false),
                _ => participants.require_control(id, now).map(|()| true),
            }
        })?;
        if is_controller { self.resize(size) } else { Ok(()) }
    }

    pub fn participant_signal(&self, id: u64, number: i32) -> Result<(), ApiError> {
        self.with_participants(|participants, now| participants.require_control(id, now))?;
        self.touch();
        self.terminal.signal(number);
        Ok(())
    }

    /// Handles a participant's input. `Ok(false)` if the buffer is full.
    pub fn participant_input(&self, id: u64, seq: Option<u64>, bytes: &[u8]) -> Result<bool, ApiError> {
        let mut input = self.input();
        if input.len() >= MAX_PENDING_INPUT_BYTES {
            return Ok(false);
        }
        let is_new = self.with_participants(|participants, now| {
            participants.require_control(id, now)?;
            participants.note_input(id, now);
            Ok::<_, ApiError>(participants.is_new_input(id, seq))
        })?;
        if is_new {
            self.write_input(&mut input, bytes);
        }
        Ok(true)
    }

    /// Resolves when the input buffer may have space again.
    pub async fn wait_for_input_room(&self) {
        let drained = self.input_drained.notified();
        if self.input().len() >= MAX_PENDING_INPUT_BYTES {
            drained.await;
        }
    }

    /// Types input that comes from no participant.
    pub fn send_keys(&self, bytes: &[u8]) {
        self.write_input(&mut self.input(), bytes);
    }

    fn write_input(&self, pending: &mut BytesMut, bytes: &[u8]) {
        self.touch();
        if self.terminal.integration.is_some() {
            self.prompt.send_modify(|prompt| prompt.note_keys(bytes));
        }
        // Most keys find an idle terminal and are written directly.
        let written = if pending.is_empty() { self.terminal.pty.try_write(bytes).unwrap_or(0) } else { 0 };
        if written < bytes.len() {
            pending.extend_from_slice(&bytes[written..]);
            self.input_arrived.notify_one();
        }
    }

    /// Copies the first pending input.
    pub fn next_input(&self, into: &mut [u8]) -> usize {
        let input = self.input();
        let count = input.len().min(into.len());
        into[..count].copy_from_slice(&input[..count]);
        count
    }

    /// Removes input that was written. `None` if the terminal no longer accepts any.
    pub fn input_written(&self, count: Option<usize>) {
        let mut input = self.input();
        match count {
            Some(count) => {
                let count = count.min(input.len());
                input.advance(count);
            }
            None => input.clear(),
        }
        if input.is_empty() {
            // Frees the buffer of a large paste.
            *input = BytesMut::new();
        }
        drop(input);
        self.input_drained.notify_waiters();
    }

    /// Records the offset that the controller has received.
    pub fn consumed(&self, id: u64, offset: u64) {
        if self.is_controlled_by(id) {
            self.consumed.store(offset, Ordering::Relaxed);
            self.controller_progress.notify_one();
        }
    }

    /// How many bytes the controller lags.
    pub fn lag(&self) -> u64 {
        match self.consumed.load(Ordering::Relaxed) {
            NO_CONTROLLER => 0,
            offset => self.log.head().saturating_sub(offset),
        }
    }

    /// Reserves the shell for an API request's command; see [`RunGuard`].
    pub fn reserve(self: &Arc<Self>) -> Result<RunGuard, ApiError> {
        match self.is_reserved.swap(true, Ordering::AcqRel) {
            true => {
                Err(ApiError::new(ErrorCode::ShellBusy, "another command is already running in this shell; try again when it has exited"))
            }
            false => Ok(RunGuard(self.clone())),
        }
    }

    pub fn info(&self) -> ShellInfo {
        let (cols, rows) = self.size();
        let participants = self.participants();
        let has_integration = self.terminal.integration.is_some();
        ShellInfo {
            id: self.id.clone(),
            name: self.name.clone(),
            command: self.command.clone(),
            cols,
            rows,
            offset: self.log.head(),
            controller: participants.controller(),
            viewers: u32::try_from(participants.count()).unwrap_or(u32::MAX),
            at_prompt: has_integration.then(|| self.prompt.borrow().state == PromptState::AtPrompt),
            created_at: self.created_at,
        }
    }

    pub fn participant_count(&self) -> usize {
        self.participants().count()
    }

    /// When a participant without control is served next. Each has its own time in the period, so that they are spread.
    /// The period grows with their number.
    pub fn next_turn(&self, id: u64) -> tokio::time::Instant {
        let participant_count = u32::try_from(self.participant_count()).unwrap_or(u32::MAX);
        let period = BACKGROUND_PERIOD.max(Duration::from_secs(1).saturating_mul(participant_count) / MAX_BACKGROUND_FRAMES_PER_SECOND);
        tokio::time::Instant::from_std(self.started + turn_after(self.started.elapsed(), period, id))
    }

    fn touch(&self) {
        let now = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.active_at.store(now, Ordering::Relaxed);
    }

    /// Time of the last use.
    pub fn last_active(&self) -> Instant {
        self.started + Duration::from_millis(self.active_at.load(Ordering::Relaxed))
    }

    // A panic while one of these locks is held leaves the guarded state consistent, or at worst outdated.
    fn screen_state(&self) -> MutexGuard<'_, ScreenState> {
        self.screen_state.lock()
    }
    fn participants(&self) -> MutexGuard<'_, Participants> {
        self.participants.lock()
    }
    fn input(&self) -> MutexGuard<'_, BytesMut> {
        self.input.lock()
    }
}

/// The first time after `now` that belongs to this participant. Both are relative to the shell's start.
fn turn_after(now: Duration, period: Duration, id: u64) -> Duration {
    let phase = period * (id % BACKGROUND_PHASES) as u32 / BACKGROUND_PHASES as u32;
    let turns = now.saturating_sub(phase).as_nanos() / period.as_nanos().max(1);
    phase + period.saturating_mul(u32::try_from(turns).unwrap_or(u32::MAX).saturating_add(1))
}

/// The part of a chunk between two offsets. Marks may begin before the chunk.
fn slice(bytes: &[u8], start: u64, from: u64, to: u64) -> &[u8] {
    let (from, to) = (from.max(start) - start, to.max(start) - start);
    bytes.get(from as usize..to as usize).unwrap_or_default()
}

/// A participant's membership in a shell.
pub struct Membership {
    pub shell: Arc<Shell>,
    pub id: u64,
    pub taken_over: CancellationToken,
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.shell.touch();
        self.shell.with_participants(|participants, now| participants.leave(self.id, now));
    }
}

/// Held while an API request runs a command in the shell.
pub struct RunGuard(Arc<Shell>);

impl Drop for RunGuard {
    fn drop(&mut self) {
        self.0.is_reserved.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_participant_without_control_waits_at_most_one_period() {
        // A number of participants for which the period is no whole number of milliseconds.
        let period = Duration::from_micros(100_500);
        for hours in [1, 10, 1000] {
            let now = Duration::from_secs(hours * 3600) + Duration::from_micros(1234);
            let turns: Vec<_> = (0..BACKGROUND_PHASES).map(|id| turn_after(now, period, id)).collect();
            assert!(turns.iter().all(|turn| now < *turn && *turn <= now + period), "{hours} h: {turns:?}");
        }
    }
}
