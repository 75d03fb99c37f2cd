//! Measures the time from a key to its echo on various terminals. The program is `cat`, so the kernel's terminal layer
//! echoes, and no shell is included in the measurement.

use std::{
    fs::File,
    io::{Read, Write},
    os::fd::{AsFd, OwnedFd},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, bail, ensure};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    pty::{OpenptFlags, ioctl_tiocgptpeer, openpt, unlockpt},
    termios::{Winsize, tcsetwinsize},
};
use serde_json::{Value, json};

use crate::{
    contender::{Contender, Endpoint},
    http::find,
    observers::Observers,
    ws::{Message, Socket},
};

/// Number of keys before a line is ended; they fit on one row.
const LINE_KEYS: usize = 60;
/// Typed once to check that the program runs: the terminal and the program each return it.
const HELLO: &[u8] = b"hello\n";
const HELLO_ECHOED: &[u8] = b"hello\r\nhello\r\n";
/// Timeout for an echo, after which something must have hung.
const ECHO_TIMEOUT: Timespec = Timespec { tv_sec: 20, tv_nsec: 0 };
/// Read at once from a pipe or a terminal.
const PIECE_BYTES: usize = 64 * 1024;
const STDOUT: u8 = 1;
const FRAME_HEADER_BYTES: usize = 9;
const KEYFRAME: u8 = 3;
/// What a flooding program prints at the end.
const FLOODED: &[u8] = b"flooded";

/// A terminal that accepts keys and returns output.
pub trait Terminal {
    fn write(&mut self, keys: &[u8]) -> anyhow::Result<()>;
    /// Waits for output and appends it.
    fn read(&mut self, output: &mut Vec<u8>) -> anyhow::Result<()>;
}

pub struct Echo<T> {
    terminal: T,
    output: Vec<u8>,
    keys_on_line: usize,
}

impl<T: Terminal> Echo<T> {
    pub fn new(mut terminal: T) -> anyhow::Result<Self> {
        let mut output = Vec::new();
        terminal.write(HELLO)?;
        while find(&output, HELLO_ECHOED).is_none() {
            terminal.read(&mut output)?;
        }
        Ok(Self { terminal, output: Vec::new(), keys_on_line: 0 })
    }

    fn type_and_await(&mut self, keys: &[u8], bytes: usize) -> anyhow::Result<Duration> {
        self.output.clear();
        let began = Instant::now();
        self.terminal.write(keys)?;
        while self.output.len() < bytes {
            self.terminal.read(&mut self.output)?;
        }
        let taken = began.elapsed();
        ensure!(self.output.len() == bytes, "more bytes were echoed than typed: {:?}", String::from_utf8_lossy(&self.output));
        Ok(taken)
    }
}

impl<T: Terminal> Contender for Echo<T> {
    fn once(&mut self) -> anyhow::Result<Duration> {
        if self.keys_on_line == LINE_KEYS {
            // The newline is echoed as two characters, and then the program repeats the line.
            self.type_and_await(b"\n", 2 + LINE_KEYS + 2)?;
            self.keys_on_line = 0;
        }
        self.keys_on_line += 1;
        self.type_and_await(b"a", 1)
    }
}

/// A local terminal without any software in between: the lower bound.
pub struct RawTerminal {
    master: File,
    program: Child,
}

impl RawTerminal {
    pub fn open(argv: &[String]) -> anyhow::Result<Self> {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
        unlockpt(&master)?;
        let peer = ioctl_tiocgptpeer(&master, OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
        tcsetwinsize(&peer, Winsize { ws_col: 80, ws_row: 24, ws_xpixel: 0, ws_ypixel: 0 })?;
        let end = |fd: &OwnedFd| fd.try_clone().map(Stdio::from);
        let program = Command::new(&argv[0]).args(&argv[1..]).stdin(end(&peer)?).stdout(end(&peer)?).stderr(end(&peer)?).spawn()?;
        Ok(Self { master: File::from(master), program })
    }
}

impl Terminal for RawTerminal {
    fn write(&mut self, keys: &[u8]) -> anyhow::Result<()> {
        Ok(self.master.write_all(keys)?)
    }
    fn read(&mut self, output: &mut Vec<u8>) -> anyhow::Result<()> {
        read_some(&mut self.master, output)
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        end(&mut self.program);
    }
}

/// A program such as `ssh -tt` that connects its pipes to a remote terminal.
pub struct CommandTerminal {
    program: Child,
    stdin: ChildStdin,
    stdout: ChildStdout,
}

impl CommandTerminal {
    pub fn start(argv: &[String]) -> anyhow::Result<Self> {
        let mut program = Command::new(&argv[0]).args(&argv[1..]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let (stdin, stdout) = (
            program.stdin.take().context("the program's stdin is a pipe")?,
            program.stdout.take().context("the program's stdout is a pipe")?,
        );
        Ok(Self { program, stdin, stdout })
    }
}

impl Terminal for CommandTerminal {
    fn write(&mut self, keys: &[u8]) -> anyhow::Result<()> {
        Ok(self.stdin.write_all(keys)?)
    }
    fn read(&mut self, output: &mut Vec<u8>) -> anyhow::Result<()> {
        read_some(&mut self.stdout, output)
    }
}

impl Drop for CommandTerminal {
    fn drop(&mut self) {
        end(&mut self.program);
    }
}

fn end(program: &mut Child) {
    // Ignored: the program may already have exited.
    let _ = program.kill();
    let _ = program.wait();
}

fn read_some(from: &mut (impl Read + AsFd), output: &mut Vec<u8>) -> anyhow::Result<()> {
    let answered = poll(&mut [PollFd::new(from, PollFlags::IN)], Some(&ECHO_TIMEOUT))?;
    ensure!(answered > 0, "no output arrived within {} s", ECHO_TIMEOUT.tv_sec);
    let mut piece = [0; PIECE_BYTES];
    let n = from.read(&mut piece)?;
    ensure!(n > 0, "the terminal ended");
    output.extend_from_slice(&piece[..n]);
    Ok(())
}

/// The controller of a shell in a sandbox, with or without observers.
pub struct ShellTerminal {
    socket: Socket,
    seq: u64,
    _observers: Observers,
}

impl ShellTerminal {
    pub fn open(endpoint: &Endpoint, start: Value, observers: usize, stalled: usize, flood: bool) -> anyhow::Result<Self> {
        let mut socket = Socket::open(endpoint)?;
        socket.send_json(&start)?;
        let mut terminal = Self { socket, seq: 0, _observers: Observers::default() };
        terminal.await_ready()?;
        terminal._observers = Observers::attach(endpoint, &start, observers, stalled)?;
        if flood {
            terminal.write(b"go\n")?;
            terminal.await_end_of_flood()?;
        }
        Ok(terminal)
    }

    fn await_ready(&mut self) -> anyhow::Result<()> {
        loop {
            match self.socket.next()? {
                Some(Message::Text(text)) => {
                    let frame: Value = serde_json::from_slice(text)?;
                    match frame["type"].as_str() {
                        Some("ready") => return Ok(()),
                        Some("error") => bail!("{frame}"),
                        _ => {}
                    }
                }
                Some(Message::Binary(_)) => {}
                None => bail!("the connection was closed before the shell was ready"),
            }
        }
    }
}

impl ShellTerminal {
    /// A viewer that can't keep up gets the screen instead of the output, so keyframes are searched too.
    fn await_end_of_flood(&mut self) -> anyhow::Result<()> {
        let mut output = Vec::new();
        while find(&output, FLOODED).is_none() {
            output.drain(..output.len().saturating_sub(FLOODED.len()));
            match self.socket.next()? {
                Some(Message::Binary(frame)) if frame.len() >= FRAME_HEADER_BYTES && matches!(frame[0], STDOUT | KEYFRAME) => {
                    output.extend_from_slice(&frame[FRAME_HEADER_BYTES..]);
                }
                Some(_) => {}
                None => bail!("the shell's connection was closed while it flooded"),
            }
        }
        Ok(())
    }
}

impl Terminal for ShellTerminal {
    fn write(&mut self, keys: &[u8]) -> anyhow::Result<()> {
        self.seq += 1;
        self.socket.send_json(&json!({ "type": "stdin", "data": String::from_utf8_lossy(keys), "seq": self.seq }))
    }

    fn read(&mut self, output: &mut Vec<u8>) -> anyhow::Result<()> {
        match self.socket.next()? {
            Some(Message::Binary(frame)) if frame.len() >= FRAME_HEADER_BYTES && frame[0] == STDOUT => {
                output.extend_from_slice(&frame[FRAME_HEADER_BYTES..])
            }
            Some(Message::Binary(_)) => {}
            Some(Message::Text(text)) => {
                let frame: Value = serde_json::from_slice(text)?;
                match frame["type"].as_str() {
                    // From a server that doesn't send binary frames.
                    Some("stdout") => output.extend_from_slice(frame["data"].as_str().unwrap_or_default().as_bytes()),
                    Some("error" | "exit") => bail!("{frame}"),
                    _ => {}
                }
            }
            None => bail!("the shell's connection was closed"),
        }
        Ok(())
    }
}
