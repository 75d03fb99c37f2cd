//! Standard I/O of a program: pipes or a terminal.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::{
    fs::{Mode, OFlags, open},
    pipe::{PipeFlags, pipe_with},
    pty::{OpenptFlags, ioctl_tiocgptpeer, unlockpt},
    termios::{Winsize, tcsetwinsize},
};

#[derive(Clone, Copy, Debug)]
pub enum Stdio {
    /// Three pipes. With `stdin: false`, standard input is /dev/null.
    Pipes {
        stdin: bool,
    },
    Pty {
        cols: u16,
        rows: u16,
    },
}

/// Both ends of a program's standard I/O.
pub struct StdioEnds {
    child: ChildStdio,
    pub stdin: Option<OwnedFd>,
    pub stdout: Option<OwnedFd>,
    pub stderr: Option<OwnedFd>,
    pub pty: Option<OwnedFd>,
}

enum ChildStdio {
    /// Standard input is /dev/null if there is no pipe for it.
    Pipes(Option<OwnedFd>, OwnedFd, OwnedFd),
    Terminal(OwnedFd),
}

impl StdioEnds {
    /// The program's end. boxd must close it after passing it on, so that end-of-file on boxd's end means that the
    /// program has closed it.
    pub fn child_fds<'a>(&'a self, null: BorrowedFd<'a>) -> [BorrowedFd<'a>; 3] {
        match &self.child {
            ChildStdio::Pipes(input, out, err) => [input.as_ref().map_or(null, AsFd::as_fd), out.as_fd(), err.as_fd()],
            ChildStdio::Terminal(peer) => [peer.as_fd(); 3],
        }
    }

    pub fn open(stdio: Stdio) -> io::Result<Self> {
        match stdio {
            Stdio::Pipes { stdin } => {
                let (out_read, out_write) = pipe_with(PipeFlags::CLOEXEC)?;
                let (err_read, err_write) = pipe_with(PipeFlags::CLOEXEC)?;
                let (in_read, in_write) =
                    if stdin { pipe_with(PipeFlags::CLOEXEC).map(|(r, w)| (Some(r), Some(w)))? } else { (None, None) };
                for boxd_end in [Some(&out_read), Some(&err_read), in_write.as_ref()].into_iter().flatten() {
                    rustix::io::ioctl_fionbio(boxd_end, true)?;
                }
                Ok(Self {
                    child: ChildStdio::Pipes(in_read, out_write, err_write),
                    stdin: in_write,
                    stdout: Some(out_read),
                    stderr: Some(err_read),
                    pty: None,
                })
            }
            Stdio::Pty { cols, rows } => {
                let master = open("/dev/pts/ptmx", OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC, Mode::empty())?;
                unlockpt(&master)?;
                let peer = ioctl_tiocgptpeer(&master, OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
                tcsetwinsize(&peer, Winsize { ws_col: cols, ws_row: rows, ws_xpixel: 0, ws_ypixel: 0 })?;
                rustix::io::ioctl_fionbio(&master, true)?;
                Ok(Self { child: ChildStdio::Terminal(peer), stdin: None, stdout: None, stderr: None, pty: Some(master) })
            }
        }
    }
}
