//! The task of a shell: transfers output and input of its terminal, and ends the shell.

use std::{pin::pin, sync::Arc, time::Duration};

use tokio::time::{Instant, sleep_until, timeout_at};

use super::{shared_shell::Shell, terminal::hang_up};
use crate::{processes::JobExit, server::Server};

/// Size of one read from the terminal: four times what it can hold.
const READ_BYTES: usize = 16 * 1024;
/// Size of one write to the terminal: what it accepts at once.
const WRITE_BYTES: usize = 4096;
/// How long output is still read after the shell has ended while a descendant keeps the terminal open.
const LINGER: Duration = Duration::from_millis(100);
/// Number of reads in the final drain: what a terminal can hold at its end.
const DRAIN_READS: usize = 8;
/// How long a program's output is held back for a controller that lags. After that it continues.
const MAX_HOLD: Duration = Duration::from_secs(2);
/// Interval between waking one group of observers for new output and waking the next.
const WAKE_INTERVAL: Duration = Duration::from_millis(1);
/// How long the last output of an ended shell is kept for clients that were disconnected.
const ENDED_RETENTION: Duration = Duration::from_secs(60);
/// Interval of checks whether the shell is still used.
const IDLE_CHECK_INTERVAL: Duration = Duration::from_secs(5);

pub async fn run(server: Arc<Server>, shell: Arc<Shell>) {
    let mut task = ShellTask {
        idle: Duration::from_secs(server.limits.shell_idle_seconds),
        max_lag: server.limits.shell_ring_bytes / 2,
        held_since: None,
        has_given_up: false,
    };
    let has_exited = task.run_until_exit(&server, &shell).await;
    if !has_exited {
        // boxd shuts down: clients get the code for reconnecting, not the program's end.
        hang_up(&server.tasks, shell.terminal.program.clone());
        return;
    }
    shell.log.finish();
    server.shells.mark_ended(&shell);
    tracing::info!(shell_id = %shell.id, name = shell.name, "shell ended");
    // Holds only a weak reference while waiting: when many shells end, the oldest are freed earlier, with screen and
    // terminal.
    let weak_shell = Arc::downgrade(&shell);
    drop(shell);
    tokio::select! {
        () = tokio::time::sleep(ENDED_RETENTION) => {}
        () = server.shutdown.cancelled() => {}
    }
    if let Some(shell) = weak_shell.upgrade() {
        server.shells.remove(&shell);
    }
}

fn next_wake(has_more: bool) -> Option<Instant> {
    has_more.then(|| Instant::now() + WAKE_INTERVAL)
}

struct ShellTask {
    idle: Duration,
    /// How many bytes the controller may lag.
    max_lag: u64,
    held_since: Option<Instant>,
    /// Waited long enough for the controller. It is not waited for again before it has caught up.
    has_given_up: bool,
}

impl ShellTask {
    /// Runs until the program has ended and all its output is read. `false` if boxd shuts down first.
    async fn run_until_exit(&mut self, server: &Server, shell: &Arc<Shell>) -> bool {
        let terminal = &shell.terminal;
        let mut exited = pin!(terminal.program.wait());
        let mut buf = vec![0; READ_BYTES];
        let mut out = [0; WRITE_BYTES];
        let (mut is_open, mut is_hung_up) = (true, false);
        let mut idle_check = pin!(sleep_until(Instant::now() + IDLE_CHECK_INTERVAL.min(self.idle)));
        // When the next group of observers is woken.
        let mut wake_at = None;
        let exit = loop {
            let is_held = self.is_held(shell);
            let held_until = self.held_since.map_or_else(Instant::now, |since| since + MAX_HOLD);
            let input_length = shell.next_input(&mut out);
            tokio::select! {
                read = terminal.pty.read(&mut buf), if is_open && !is_held => match read {
                    Ok(n) if n > 0 => {
                        let has_more = shell.append_output(&buf[..n]);
                        wake_at = wake_at.filter(|_| has_more).or_else(|| next_wake(has_more));
                    }
                    _ => is_open = false,
                },
                () = sleep_until(wake_at.unwrap_or_else(Instant::now)), if wake_at.is_some() => wake_at = next_wake(shell.log.wake_more()),
                written = terminal.pty.write(&out[..input_length]), if input_length > 0 => shell.input_written(written.ok()),
                () = shell.input_arrived.notified() => {}
                () = shell.controller_progress.notified(), if is_held => {}
                () = sleep_until(held_until), if is_held => self.has_given_up = true,
                exit = &mut exited => break exit,
                () = &mut idle_check => {
                    shell.with_participants(|participants, now| participants.expire(now));
                    if shell.participant_count() == 0 && shell.last_active().elapsed() >= self.idle {
                        tracing::info!(shell_id = %shell.id, name = shell.name, "shell unused, hanging up");
                        shell.hang_up.cancel();
                    }
                    idle_check.as_mut().reset(Instant::now() + IDLE_CHECK_INTERVAL.min(self.idle));
                }
                () = shell.hang_up.cancelled(), if !is_hung_up => {
                    is_hung_up = true;
                    hang_up(&server.tasks, terminal.program.clone());
                }
                () = server.shutdown.cancelled() => return false,
            }
        };
        let deadline = Instant::now() + LINGER;
        while is_open {
            match timeout_at(deadline, terminal.pty.read(&mut buf)).await {
                // The remaining readers need no delayed wake-up: the end of the output, which follows, wakes all.
                Ok(Ok(n)) if n > 0 => _ = shell.append_output(&buf[..n]),
                Ok(_) => is_open = false,
                Err(_) => break,
            }
        }
        for _ in 0..DRAIN_READS {
            match terminal.pty.try_read(&mut buf) {
                Ok(n) if n > 0 => _ = shell.append_output(&buf[..n]),
                _ => break,
            }
        }
        shell.listed.job.end(JobExit { exit, timed_out: false });
        shell.exit.send_replace(Some(exit));
        true
    }

    /// Whether output is held back for the controller.
    fn is_held(&mut self, shell: &Shell) -> bool {
        let lag = shell.lag();
        if lag <= self.max_lag {
            self.has_given_up &= lag > self.max_lag / 2;
            self.held_since = None;
            return false;
        }
        if self.has_given_up {
            return false;
        }
        self.held_since.get_or_insert_with(Instant::now);
        true
    }
}
