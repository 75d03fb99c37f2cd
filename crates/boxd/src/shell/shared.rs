//! A shell that is independent of connections: its output, screen, participants and input.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::{Buf, BytesMut};
use cobox_protocol::{ApiError, ErrorCode, ShellId, Timestamp, frame::Controller, shell::ShellInfo};
use cobox_stream::{Keyframe, Limits, Log, Scanner, Screen, SequenceKinds};
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use super::{
    desk::{Desk, Newcomer},
    prompt::{Prompt, State, TextFinder},
    terminal::Terminal,
};
use crate::{processes::ListedJob, workload::Exit};

/// Maximum input that the program has not read yet. Beyond it, clients that send input wait.
const MAX_PENDING_INPUT_BYTES: usize = 1024 * 1024;
/// Minimum period of updates for a participant without control: about as often as the eye notices.
const WATCHER_PERIOD: Duration = Duration::from_millis(32);
/// For all participants without control of a shell together, so that most of a processor is left to the controller.
/// With two hundred, each gets five frames per second.
const MAX_WATCHER_FRAMES_PER_SECOND: u32 = 1000;
/// Number of time slots per period. The controller waits for the participants of one slot at most.
const WATCHER_PHASES: u64 = 64;
/// No controller to hold back output for.
const NOBODY: u64 = u64::MAX;

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
    is_run_in: AtomicBool,
    picture: Mutex<Picture>,
    desk: Mutex<Desk>,
    input: Mutex<BytesMut>,
    pub input_came: Notify,
    input_went: Notify,
    /// The offset that the controller has received. The program may be held back a little for it.
    consumed: AtomicU64,
    pub drained: Notify,
    started: Instant,
    /// Time of the last input, output or connection, in milliseconds after the start.
    active_at: AtomicU64,
}

/// State derived from the output.
struct Picture {
    scanner: Scanner,
    screen: Screen,
    text: TextFinder,
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
        let picture = Picture { scanner: Scanner::default(), screen: Screen::new(cols, rows), text: TextFinder::default(), keyframe: None };
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
            is_run_in: AtomicBool::new(false),
            picture: Mutex::new(picture),
            desk: Mutex::default(),
            input: Mutex::default(),
            input_came: Notify::new(),
            input_went: Notify::new(),
            consumed: AtomicU64::new(NOBODY),
            drained: Notify::new(),
            started: Instant::now(),
            active_at: AtomicU64::new(0),
        }
    }

    /// Handles new output: stores it, wakes the readers with priority, then updates the screen. Returns `true` if more
    /// readers wait; the caller wakes them over time.
    #[must_use = "who isn't told waits on"]
    pub fn printed(&self, bytes: &[u8]) -> bool {
        self.touch();
        let mut picture = self.picture();
        let from = self.log.head();
        let found = picture.scanner.scan(bytes);
        let has_more_readers = self.log.append_scanned(bytes, &found);
        if let Some(integration) = &self.terminal.integration {
            let mut text_from = from;
            let is_at_prompt = self.prompt.borrow().state == State::AtPrompt;
            if is_at_prompt || !found.marks.is_empty() {
                self.prompt.send_modify(|prompt| {
                    for mark in &found.marks {
                        if picture.text.has_text(slice(bytes, from, text_from, mark.from)) {
                            prompt.printed();
                        }
                        prompt.mark(mark, integration);
                        text_from = mark.to;
                    }
                    if picture.text.has_text(slice(bytes, from, text_from, from + bytes.len() as u64)) {
                        prompt.printed();
                    }
                });
            }
        }
        picture.screen.feed(bytes, &found);
        picture.keyframe = None;
        has_more_readers
    }

    pub fn keyframe(&self, hides: SequenceKinds) -> Keyframe {
        let mut picture = self.picture();
        if let Some((_, keyframe)) = picture.keyframe.as_ref().filter(|(kinds, _)| *kinds == hides) {
            return keyframe.clone();
        }
        let keyframe = picture.screen.keyframe(hides);
        picture.keyframe = Some((hides, keyframe.clone()));
        keyframe
    }

    pub fn size(&self) -> (u16, u16) {
        self.picture().screen.size()
    }

    pub fn wants_marked_pastes(&self) -> bool {
        self.picture().screen.wants_bracketed_paste()
    }

    pub fn is_alternate(&self) -> bool {
        self.picture().screen.is_alternate()
    }

    fn resize(&self, size: (u16, u16)) -> Result<(), ApiError> {
        let mut picture = self.picture();
        if picture.screen.size() == size {
            return Ok(());
        }
        self.terminal.resize(size)?;
        picture.screen.resize(size.0, size.1);
        picture.keyframe = None;
        self.log.resize(size.0, size.1);
        Ok(())
    }

    /// Adds a participant, which leaves when the returned value is dropped.
    pub fn join(self: &Arc<Self>, newcomer: Newcomer) -> Result<Seat, ApiError> {
        self.touch();
        let (id, taken_over) = self.at_desk(|desk, now| desk.join(newcomer, now))?;
        Ok(Seat { shell: self.clone(), id, taken_over })
    }

    /// Changes the participants and publishes the resulting controller.
    pub fn at_desk<T>(&self, change: impl FnOnce(&mut Desk, Instant) -> T) -> T {
        let mut desk = self.desk();
        let before = desk.controlling_viewer();
        let result = change(&mut desk, Instant::now());
        let after = desk.controlling_viewer();
        if after != before {
            self.consumed.store(NOBODY, Ordering::Relaxed);
            self.drained.notify_one();
            if let Some(size) = after.and_then(|id| desk.size_of(id)) {
                // A terminal that can't be resized has ended, which the end of output reports.
                let _ = self.resize(size);
            }
            // Wakes the participants that gained or lost control.
            self.controller.send_modify(|_| {});
        }
        self.controller.send_if_modified(|known| {
            let controller = desk.controller();
            let is_new = *known != controller;
            *known = controller;
            is_new
        });
        result
    }

    pub fn is_controlled_by(&self, id: u64) -> bool {
        self.desk().controlling_viewer() == Some(id)
    }

    /// Sets a participant's window size. The controller's size applies at once, others' when they get control.
    pub fn viewer_resized(&self, id: u64, size: (u16, u16)) -> Result<(), ApiError> {
        let is_controller = self.at_desk(|desk, now| {
            desk.set_size(id, size);
            match desk.controlling_viewer() {
                Some(holder) if holder == id => Ok(true),
                // Without a controller no participant's size applies.
                None if desk.controller().is_none() => Ok(false),
                _ => desk.acts(id, now).map(|()| true),
            }
        })?;
        if is_controller { self.resize(size) } else { Ok(()) }
    }

    pub fn viewer_signals(&self, id: u64, number: i32) -> Result<(), ApiError> {
        self.at_desk(|desk, now| desk.acts(id, now))?;
        self.touch();
        self.terminal.signal(number);
        Ok(())
    }

    /// Handles a participant's input. `Ok(false)` if the buffer is full.
    pub fn viewer_typed(&self, id: u64, seq: Option<u64>, bytes: &[u8]) -> Result<bool, ApiError> {
        let mut input = self.input();
        if input.len() >= MAX_PENDING_INPUT_BYTES {
            return Ok(false);
        }
        let is_new = self.at_desk(|desk, now| {
            desk.acts(id, now)?;
            desk.has_typed(id, now);
            Ok::<_, ApiError>(desk.is_new_input(id, seq))
        })?;
        if is_new {
            self.take_input(&mut input, bytes);
        }
        Ok(true)
    }

    /// Resolves when the input buffer may have space again.
    pub async fn input_room(&self) {
        let went = self.input_went.notified();
        if self.input().len() >= MAX_PENDING_INPUT_BYTES {
            went.await;
        }
    }

    /// Types input that comes from no participant.
    pub fn type_in(&self, bytes: &[u8]) {
        self.take_input(&mut self.input(), bytes);
    }

    fn take_input(&self, pending: &mut BytesMut, bytes: &[u8]) {
        self.touch();
        if self.terminal.integration.is_some() {
            self.prompt.send_modify(|prompt| prompt.typed(bytes));
        }
        // Most keys find an idle terminal and are written directly.
        let written = if pending.is_empty() { self.terminal.pty.try_write(bytes).unwrap_or(0) } else { 0 };
        if written < bytes.len() {
            pending.extend_from_slice(&bytes[written..]);
            self.input_came.notify_one();
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
        self.input_went.notify_waiters();
    }

    /// Records the offset that the controller has received.
    pub fn consumed(&self, id: u64, offset: u64) {
        if self.is_controlled_by(id) {
            self.consumed.store(offset, Ordering::Relaxed);
            self.drained.notify_one();
        }
    }

    /// How many bytes the controller lags.
    pub fn lag(&self) -> u64 {
        match self.consumed.load(Ordering::Relaxed) {
            NOBODY => 0,
            offset => self.log.head().saturating_sub(offset),
        }
    }

    /// Reserves the shell for an API request's command; see [`RunGuard`].
    pub fn reserve(self: &Arc<Self>) -> Result<RunGuard, ApiError> {
        match self.is_run_in.swap(true, Ordering::AcqRel) {
            true => Err(ApiError::new(ErrorCode::ShellBusy, "another command is being run in this shell; try again when it has ended")),
            false => Ok(RunGuard(self.clone())),
        }
    }

    pub fn info(&self) -> ShellInfo {
        let (cols, rows) = self.size();
        let desk = self.desk();
        let is_marked = self.terminal.integration.is_some();
        ShellInfo {
            id: self.id.clone(),
            name: self.name.clone(),
            command: self.command.clone(),
            cols,
            rows,
            offset: self.log.head(),
            controller: desk.controller(),
            viewers: u32::try_from(desk.viewers()).unwrap_or(u32::MAX),
            at_prompt: is_marked.then(|| self.prompt.borrow().state == State::AtPrompt),
            created_at: self.created_at,
        }
    }

    pub fn viewers(&self) -> usize {
        self.desk().viewers()
    }

    /// When a participant without control is served next. Each has its own time in the period, so that they are spread.
    /// The period grows with their number.
    pub fn next_turn(&self, id: u64) -> tokio::time::Instant {
        let viewers = u32::try_from(self.viewers()).unwrap_or(u32::MAX);
        let period = WATCHER_PERIOD.max(Duration::from_secs(1).saturating_mul(viewers) / MAX_WATCHER_FRAMES_PER_SECOND);
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
    fn picture(&self) -> MutexGuard<'_, Picture> {
        self.picture.lock().unwrap_or_else(PoisonError::into_inner)
    }
    fn desk(&self) -> MutexGuard<'_, Desk> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }
    fn input(&self) -> MutexGuard<'_, BytesMut> {
        self.input.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The first time after `now` that belongs to this participant. Both are relative to the shell's start.
fn turn_after(now: Duration, period: Duration, id: u64) -> Duration {
    let phase = period * (id % WATCHER_PHASES) as u32 / WATCHER_PHASES as u32;
    let turns = now.saturating_sub(phase).as_nanos() / period.as_nanos().max(1);
    phase + period.saturating_mul(u32::try_from(turns).unwrap_or(u32::MAX).saturating_add(1))
}

/// The part of a chunk between two offsets. Marks may begin before the chunk.
fn slice(bytes: &[u8], start: u64, from: u64, to: u64) -> &[u8] {
    let (from, to) = (from.max(start) - start, to.max(start) - start);
    bytes.get(from as usize..to as usize).unwrap_or_default()
}

/// A participant's membership in a shell.
pub struct Seat {
    pub shell: Arc<Shell>,
    pub id: u64,
    pub taken_over: CancellationToken,
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.shell.touch();
        self.shell.at_desk(|desk, now| desk.leave(self.id, now));
    }
}

/// Held while an API request runs a command in the shell.
pub struct RunGuard(Arc<Shell>);

impl Drop for RunGuard {
    fn drop(&mut self) {
        self.0.is_run_in.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watcher_waits_no_longer_than_a_period_however_old_the_shell_is() {
        // A number of participants for which the period is no whole number of milliseconds.
        let period = Duration::from_micros(100_500);
        for hours in [1, 10, 1000] {
            let now = Duration::from_secs(hours * 3600) + Duration::from_micros(1234);
            let turns: Vec<_> = (0..WATCHER_PHASES).map(|id| turn_after(now, period, id)).collect();
            assert!(turns.iter().all(|turn| now < *turn && *turn <= now + period), "{hours} h: {turns:?}");
        }
    }
}
