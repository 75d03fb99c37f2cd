//! The terminal itself: what is started in it, its output cut into frames, its size and signals.

use std::{sync::Arc, time::Duration};

use cobox_protocol::{
    ApiError, ErrorCode,
    frame::{DEFAULT_COLS, DEFAULT_ROWS, MAX_TERMINAL_SIDE, OutputStream, ServerFrame, ShellStart},
};
use rustix::termios::{Winsize, tcsetwinsize};
use tokio::{
    io::Interest,
    time::{Instant, timeout_at},
};
use tokio_util::task::TaskTracker;

use crate::{
    descriptor::Descriptor,
    exec::{directory, environment, text},
    programs::{self, Program},
    server::Server,
    socket::{End, Out},
    workload::{Command, Exit, Stdio, is_bad_cwd},
};

/// Output in one frame: a few screens, and at most 200 KiB even if all of it must be escaped.
const READ_BYTES: usize = 32 * 1024;
/// How long output is still read after the shell has ended while something it started holds the terminal.
const LINGER: Duration = Duration::from_millis(100);
/// Most that a last look takes: what a terminal can hold at its end.
const DRAIN_READS: usize = 8;
/// What programs get between the hang-up and the kill.
const HANG_UP_GRACE: Duration = Duration::from_millis(250);
const HANG_UP: i32 = 1;

pub struct Terminal {
    pub cols: u16,
    pub rows: u16,
    pub pty: Descriptor,
    program: Option<Arc<dyn Program>>,
    tasks: TaskTracker,
}

impl Terminal {
    pub async fn start(server: &Server, start: ShellStart) -> Result<Self, ApiError> {
        let (cols, rows) = size(start.cols.unwrap_or(DEFAULT_COLS), start.rows.unwrap_or(DEFAULT_ROWS))?;
        let shell = if server.files.is_file("/bin/bash").await? { "/bin/bash" } else { "/bin/sh" };
        let argv = match start.command {
            Some(command) => vec![b"/bin/sh".to_vec(), b"-c".to_vec(), text("command", command)?],
            None => vec![shell.as_bytes().to_vec()],
        };
        let mut env = vec![(b"TERM".to_vec(), b"xterm-256color".to_vec()), (b"SHELL".to_vec(), shell.as_bytes().to_vec())];
        let asked = environment(start.env)?;
        env.retain(|(name, _)| asked.iter().all(|(other, _)| other != name));
        env.extend(asked);
        let command = Command { argv, env, cwd: directory(start.cwd)?, stdio: Stdio::Pty { cols, rows } };
        let started = programs::start(&server.programs, &server.tasks, command).await.map_err(|error| match is_bad_cwd(&error) {
            true => ApiError::invalid(format!("cwd: {error}")),
            false => ApiError::new(ErrorCode::Internal, format!("the shell can't be started: {error}")),
        })?;
        let program = Some(started.program);
        let internal = |why: String| ApiError::new(ErrorCode::Internal, why);
        let pty = started.pty.ok_or_else(|| internal("the shell was started without a terminal".to_owned()));
        let pty = pty.and_then(|fd| {
            Descriptor::new(fd, Interest::READABLE | Interest::WRITABLE).map_err(|e| internal(format!("the shell's terminal: {e}")))
        });
        match pty {
            Ok(pty) => Ok(Self { cols, rows, pty, program, tasks: server.tasks.clone() }),
            Err(error) => {
                hang_up(&server.tasks, program);
                Err(error)
            }
        }
    }

    pub fn resize(&self, cols: u16, rows: u16) -> Result<(), ApiError> {
        let (ws_col, ws_row) = size(cols, rows)?;
        let size = Winsize { ws_row, ws_col, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&self.pty, size).map_err(|e| ApiError::new(ErrorCode::Internal, format!("setting the terminal's size: {e}")))
    }

    pub fn signal(&self, name: &str) -> Result<(), ApiError> {
        let number = signal_number(name)?;
        if let Some(program) = &self.program {
            program.signal(number);
        }
        Ok(())
    }

    /// Sends the output, frame by frame, until the program has ended; then gives its exit.
    pub async fn output(&self, out: &Out) -> Result<Exit, End> {
        let Some(program) = &self.program else { return Ok(Exit { code: 0, signal: None }) };
        let mut output = Output::default();
        let mut buf = vec![0; READ_BYTES];
        let mut is_open = true;
        let exit = loop {
            tokio::select! {
                read = self.pty.read(&mut buf), if is_open => match read {
                    Ok(n) if n > 0 => send(out, output.frame(&buf[..n])).await?,
                    _ => is_open = false,
                },
                exit = program.wait() => break exit,
            }
        };
        let deadline = Instant::now() + LINGER;
        while is_open {
            match timeout_at(deadline, self.pty.read(&mut buf)).await {
                Ok(Ok(n)) if n > 0 => send(out, output.frame(&buf[..n])).await?,
                Ok(_) => is_open = false,
                Err(_) => break,
            }
        }
        for _ in 0..DRAIN_READS {
            match self.pty.try_read(&mut buf) {
                Ok(n) if n > 0 => send(out, output.frame(&buf[..n])).await?,
                _ => break,
            }
        }
        send(out, output.rest()).await?;
        Ok(exit)
    }

    /// The program has ended by itself, so there is nothing to hang up. What it left in the background stays, as under any terminal.
    pub fn has_ended(&mut self) {
        self.program = None;
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        hang_up(&self.tasks, self.program.take());
    }
}

async fn send(out: &Out, frame: Option<Frame>) -> Result<(), End> {
    match frame {
        Some(frame) => out.send(&frame).await,
        None => Ok(()),
    }
}

fn hang_up(tasks: &TaskTracker, program: Option<Arc<dyn Program>>) {
    let Some(program) = program else { return };
    tasks.spawn(async move {
        program.signal(HANG_UP);
        // Whether it went by itself or not: what it started goes with it.
        let _ = tokio::time::timeout(HANG_UP_GRACE, program.wait()).await;
        program.kill_tree().await;
    });
}

fn size(cols: u16, rows: u16) -> Result<(u16, u16), ApiError> {
    let allowed = 1..=MAX_TERMINAL_SIDE;
    match allowed.contains(&cols) && allowed.contains(&rows) {
        true => Ok((cols, rows)),
        false => Err(ApiError::invalid(format!("cols and rows must be 1 to {MAX_TERMINAL_SIDE}"))),
    }
}

fn signal_number(name: &str) -> Result<i32, ApiError> {
    const SIGNALS: [(&str, i32); 9] =
        [("HUP", 1), ("INT", 2), ("QUIT", 3), ("KILL", 9), ("USR1", 10), ("USR2", 12), ("TERM", 15), ("CONT", 18), ("TSTP", 20)];
    let bare = name.strip_prefix("SIG").unwrap_or(name);
    let known = SIGNALS.iter().find(|(known, _)| *known == bare);
    known.map(|(_, number)| *number).ok_or_else(|| ApiError::invalid("signal must be HUP, INT, QUIT, KILL, USR1, USR2, TERM, CONT or TSTP"))
}

type Frame = ServerFrame<()>;

/// Output on its way into frames: at which byte it is, and the beginning of a character whose rest has not come yet.
#[derive(Default)]
struct Output {
    offset: u64,
    tail: Vec<u8>,
}

impl Output {
    fn frame(&mut self, bytes: &[u8]) -> Option<Frame> {
        self.tail.extend_from_slice(bytes);
        let ready = match std::str::from_utf8(&self.tail) {
            Err(e) if e.error_len().is_none() => e.valid_up_to(),
            _ => self.tail.len(),
        };
        self.cut(ready)
    }

    fn rest(&mut self) -> Option<Frame> {
        self.cut(self.tail.len())
    }

    fn cut(&mut self, at: usize) -> Option<Frame> {
        if at == 0 {
            return None;
        }
        let rest = self.tail.split_off(at);
        let frame = Frame::output(OutputStream::Stdout, self.offset, &self.tail);
        self.offset += at as u64;
        self.tail = rest;
        Some(frame)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(frame: Option<Frame>) -> Option<(u64, Option<String>)> {
        match frame? {
            ServerFrame::Stdout { offset, data, .. } => Some((offset, data)),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_character_cut_in_two_by_a_read_is_whole_in_its_frame() {
        let mut output = Output::default();
        let euro = "€".as_bytes();
        assert_eq!(parts(output.frame(&[b'a', euro[0]])), Some((0, Some("a".into()))));
        assert_eq!(parts(output.frame(&euro[1..2])), None);
        assert_eq!(parts(output.frame(&[euro[2], b'b'])), Some((1, Some("€b".into()))));
        assert_eq!(parts(output.rest()), None);
        assert_eq!(output.offset, 5);
    }

    #[test]
    fn bytes_that_are_no_text_come_in_base64_at_once() {
        let mut output = Output::default();
        assert_eq!(parts(output.frame(b"\xff\xfe")), Some((0, None)));
        assert_eq!(parts(output.frame(b"\xe2")), None);
        assert_eq!(parts(output.rest()), Some((2, None)));
    }

    #[test]
    fn sizes_and_signals_out_of_bounds_are_refused() {
        assert!(size(1, 1000).is_ok());
        assert!(size(0, 10).is_err() && size(10, 1001).is_err());
        assert_eq!(signal_number("SIGINT").unwrap(), 2);
        assert!(signal_number("STOP").is_err());
    }
}
