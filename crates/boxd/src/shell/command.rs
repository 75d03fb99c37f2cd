//! Runs a command in a shared shell: types it at the prompt and returns its output and exit status to the caller.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use cobox_protocol::{
    ApiError, ErrorCode,
    exec::text_and_b64,
    shell::{ShellRun, ShellRunResult},
};
use cobox_stream::{Read, Reader, SequenceKinds};
use tokio::{sync::watch, time::timeout};

use super::{
    prompt::{NO_HISTORY_EXPANSION_KEY, Prompt, PromptState, ShellKind},
    shared_shell::Shell,
};

/// Timeout of a command whose request sets none.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(120);
/// Maximum timeout: one day.
const MAX_TIMEOUT: Duration = Duration::from_secs(24 * 3600);
/// Time for an interrupted command to return to the prompt.
const INTERRUPT_GRACE: Duration = Duration::from_secs(2);
/// Maximum wait for the first prompt of a starting shell.
const FIRST_PROMPT_WITHIN: Duration = Duration::from_secs(5);
/// A command is typed; longer content belongs in a file.
const MAX_COMMAND_BYTES: usize = 64 * 1024;
const DEFAULT_OUTPUT_BYTES: u64 = 1024 * 1024;
const READ_BYTES: usize = 32 * 1024;
/// What bash's line editor prints when it has accepted a line: bracketed paste is off until the next prompt.
const LINE_ACCEPTED: &[u8] = b"\x1b[?2004l\r";

pub async fn run(shell: &Arc<Shell>, request: ShellRun, max_output: u64) -> Result<ShellRunResult, ApiError> {
    let started = Instant::now();
    let limit = usize::try_from(request.max_output_bytes.unwrap_or(DEFAULT_OUTPUT_BYTES).min(max_output)).unwrap_or(usize::MAX);
    let time_limit = time_limit(request.timeout_seconds)?;
    let _reservation = shell.reserve()?;
    wait_for_first_prompt(shell, time_limit).await;
    let shell_kind = check_ready(shell)?;
    let keys = command_keys(shell, shell_kind, &request.command)?;

    let initial_prompt = shell.prompt.borrow().clone();
    let mut reader = shell.log.reader(shell.log.head());
    reader.set_hidden(SequenceKinds::ALL);
    let mut run = CommandRun {
        prompt: shell.prompt.subscribe(),
        initial_prompt,
        shell_kind,
        output: CommandOutput { limit, ..CommandOutput::default() },
    };
    shell.send_keys(&keys);

    let is_done = timeout(time_limit, run.follow(&mut reader)).await.is_ok();
    if !is_done {
        shell.terminal.signal(libc::SIGINT);
        // A command may ignore the interrupt. It then continues, and the shell stays busy.
        let _ = timeout(INTERRUPT_GRACE, run.follow(&mut reader)).await;
    }
    let ended_prompt = run.ended_prompt();
    run.output.skip_echo();
    let CommandOutput { bytes, from, read_to, .. } = run.output;
    let from = from.unwrap_or(read_to);
    let to = ended_prompt.as_ref().map_or(read_to, |ended_prompt| ended_prompt.ended_at).max(from);
    let shown = bytes.len().min((to - from) as usize);
    let truncated = (shown as u64) < to - from;
    let (output, output_b64) = text_and_b64(plain_text(&bytes[..shown]));
    // If the command has ended the shell, the shell's exit code.
    let exit_code = ended_prompt.and_then(|ended_prompt| ended_prompt.status).or_else(|| shell.exit.borrow().map(|exit| exit.code));
    let duration_ms = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
    Ok(ShellRunResult { output, output_b64, exit_code, timed_out: !is_done, truncated, from, to, duration_ms })
}

fn time_limit(seconds: Option<f64>) -> Result<Duration, ApiError> {
    match seconds {
        None => Ok(DEFAULT_TIMEOUT),
        Some(0.0) => Ok(MAX_TIMEOUT),
        Some(seconds) => Duration::try_from_secs_f64(seconds)
            .map(|requested| requested.min(MAX_TIMEOUT))
            .map_err(|_| ApiError::invalid("timeout_seconds must be a non-negative number of seconds")),
    }
}

/// Resolves when a new shell has reached its prompt, has ended, or has exceeded the time.
async fn wait_for_first_prompt(shell: &Shell, time_limit: Duration) {
    if shell.terminal.integration.is_none() || shell.prompt.borrow().state != PromptState::Unknown {
        return;
    }
    let (mut prompt, mut exit) = (shell.prompt.subscribe(), shell.exit.subscribe());
    let prompt_or_exit = async {
        // Errors occur only if the shell is gone, which the caller detects next.
        tokio::select! {
            _ = prompt.wait_for(|prompt| prompt.state == PromptState::AtPrompt) => {}
            _ = exit.wait_for(Option::is_some) => {}
        }
    };
    // The caller checks the state next.
    let _ = timeout(time_limit.min(FIRST_PROMPT_WITHIN), prompt_or_exit).await;
}

/// Whether a command can be typed now; otherwise the reason.
fn check_ready(shell: &Shell) -> Result<ShellKind, ApiError> {
    let busy = |reason: &str| Err(ApiError::new(ErrorCode::ShellBusy, reason));
    let Some(integration) = &shell.terminal.integration else {
        return busy("this shell was started with its own command, so its prompt can't be detected; use another shell, or exec");
    };
    // A clone, so that the borrow is not held: `Shell::printed` updates the prompt while it holds the screen's lock,
    // which `is_alternate` takes below.
    let prompt = shell.prompt.borrow().clone();
    match prompt.state {
        PromptState::Unknown => busy("the shell has not shown its first prompt yet; try again"),
        PromptState::Running if shell.is_alternate() => {
            busy("a full-screen program is running in this shell; try again when it has exited")
        }
        PromptState::Running => busy("a program is running in this shell; try again when it has exited"),
        PromptState::AtPrompt if prompt.has_partial_line() => {
            busy("a participant has typed an unfinished line in this shell; try again when it is finished")
        }
        PromptState::AtPrompt => Ok(integration.shell_kind),
    }
}

/// The keys that make a shell run a command.
fn command_keys(shell: &Shell, shell_kind: ShellKind, command: &str) -> Result<Vec<u8>, ApiError> {
    let command = command.trim_end_matches(['\r', '\n']);
    if command.trim().is_empty() {
        return Err(ApiError::invalid("command is empty"));
    }
    if command.len() > MAX_COMMAND_BYTES {
        return Err(ApiError::invalid(format!("command is longer than {MAX_COMMAND_BYTES} bytes; write it to a file and run the file")));
    }
    if command.chars().any(|c| c.is_control() && !matches!(c, '\n' | '\t')) {
        return Err(ApiError::invalid("command contains control characters, which a terminal would interpret as keys"));
    }
    let prefix = if shell_kind == ShellKind::Bash { NO_HISTORY_EXPANSION_KEY.as_bytes() } else { b"" };
    if shell.wants_bracketed_paste() {
        return Ok([prefix, b"\x1b[200~", command.as_bytes(), b"\x1b[201~\r"].concat());
    }
    if command.contains(['\n', '\t']) {
        return Err(ApiError::invalid(
            "this shell accepts only single-line commands without tabs; write the command to a file and run the file",
        ));
    }
    Ok([prefix, command.as_bytes(), b"\r"].concat())
}

struct CommandRun {
    prompt: watch::Receiver<Prompt>,
    initial_prompt: Prompt,
    shell_kind: ShellKind,
    output: CommandOutput,
}

impl CommandRun {
    /// Resolves when the prompt is back and all output before it was read, or the shell has ended. Cancel safe.
    async fn follow(&mut self, reader: &mut Reader) {
        loop {
            let current = self.prompt.borrow_and_update().clone();
            if current.commands_started > self.initial_prompt.commands_started {
                self.output.start_at(current.output_start);
            }
            loop {
                // The reader stops at each change of the window size until it is fetched. Sizes don't matter here.
                while reader.next_size().is_some() {}
                match reader.read(READ_BYTES) {
                    Read::Chunk(chunk) => self.output.append(chunk.offset, &chunk.bytes, self.shell_kind),
                    Read::Gap { to, .. } => self.output.skip_gap(to),
                    Read::End => return,
                    Read::Pending => break,
                }
            }
            // Also waits for the prompt itself, so that the shell is free when the response is sent.
            if current.commands_ended > self.initial_prompt.commands_ended && current.state == PromptState::AtPrompt {
                return;
            }
            tokio::select! {
                () = reader.wait() => {}
                _ = self.prompt.changed() => {}
            }
        }
    }

    fn ended_prompt(&self) -> Option<Prompt> {
        Some(self.prompt.borrow().clone()).filter(|current| current.commands_ended > self.initial_prompt.commands_ended)
    }
}

/// The beginning of a command's output, up to the requested limit.
#[derive(Default)]
struct CommandOutput {
    /// Offset of the first byte of the command's own output.
    from: Option<u64>,
    bytes: Vec<u8>,
    /// Everything before this offset was read.
    read_to: u64,
    limit: usize,
    is_incomplete: bool,
}

impl CommandOutput {
    fn start_at(&mut self, offset: u64) {
        if self.from.is_none() {
            self.from = Some(offset);
            // Removes the echo before it.
            let echo_bytes = self.bytes.len().saturating_sub(self.read_to.saturating_sub(offset) as usize);
            self.bytes.drain(..echo_bytes);
        }
    }

    /// If no mark announced the start, as for a line that the shell can't parse, the output is everything after the
    /// echo of the line.
    fn skip_echo(&mut self) {
        if self.from.is_some() || self.is_incomplete {
            return;
        }
        let accepted = self.bytes.windows(LINE_ACCEPTED.len()).position(|part| part == LINE_ACCEPTED).map(|at| at + LINE_ACCEPTED.len());
        if let Some(echo) = accepted.or_else(|| self.bytes.iter().position(|b| *b == b'\n').map(|at| at + 1)) {
            self.start_at(self.read_to - (self.bytes.len() - echo) as u64);
        }
    }

    fn append(&mut self, offset: u64, bytes: &[u8], shell_kind: ShellKind) {
        self.read_to = offset + bytes.len() as u64;
        if self.from.is_none() && shell_kind == ShellKind::Sh {
            // This shell doesn't mark the start of a command. The output begins after the echoed line.
            let Some(newline) = bytes.iter().position(|b| *b == b'\n') else { return };
            self.from = Some(offset + newline as u64 + 1);
        }
        let skipped = self.from.map_or(0, |from| from.saturating_sub(offset).min(bytes.len() as u64)) as usize;
        if self.is_incomplete {
            return;
        }
        // Before the command has begun there is only the echo, the end of which may turn out to be output.
        let limit = if self.from.is_some() { self.limit } else { self.limit.max(2 * MAX_COMMAND_BYTES) };
        let room = limit.saturating_sub(self.bytes.len());
        let output = &bytes[skipped..];
        self.is_incomplete |= output.len() > room;
        self.bytes.extend_from_slice(&output[..output.len().min(room)]);
    }

    /// The output was overwritten before it was read.
    fn skip_gap(&mut self, to: u64) {
        self.read_to = to;
        self.is_incomplete = true;
    }
}

/// The output as a program would have written it to a file, without what the terminal and the shell add.
fn plain_text(bytes: &[u8]) -> Vec<u8> {
    let mut text: Vec<u8> = Vec::with_capacity(bytes.len());
    for byte in bytes {
        match byte {
            0 => {}
            b'\n' => {
                if text.last() == Some(&b'\r') {
                    text.pop();
                }
                text.push(b'\n');
            }
            other => text.push(*other),
        }
    }
    // The shell's line editor prints this before it draws the prompt.
    for ending in [b"\x1b[?2004h".as_slice(), LINE_ACCEPTED] {
        if text.ends_with(ending) {
            text.truncate(text.len() - ending.len());
        }
    }
    text
}
