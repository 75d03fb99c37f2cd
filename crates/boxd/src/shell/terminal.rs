//! The terminal of a shell: the program in it, its size and its signals.

use std::{sync::Arc, time::Duration};

use cobox_protocol::{
    ApiError, ErrorCode,
    frame::{DEFAULT_COLS, DEFAULT_ROWS, MAX_TERMINAL_SIDE},
    shell::ShellCreate,
};
use rustix::termios::{Winsize, tcsetwinsize};
use tokio::io::Interest;
use tokio_util::task::TaskTracker;

use super::prompt::{Integration, ShellKind};
use crate::{
    descriptor::Descriptor,
    exec::{environment, reject_nul, working_directory},
    programs::{self, Program},
    server::Server,
    workload::{ProgramSpec, Stdio, is_bad_cwd},
};

/// Time for programs to end between the hang-up and the kill.
const HANG_UP_GRACE: Duration = Duration::from_millis(250);
const HANG_UP: i32 = 1;
/// Signals that go to the foreground process group, as the corresponding keys would send them.
const FOREGROUND: [i32; 3] = [libc::SIGINT, libc::SIGQUIT, libc::SIGTSTP];

pub struct Terminal {
    pub pty: Descriptor,
    pub program: Arc<dyn Program>,
    /// The command line, for lists.
    pub argv: Vec<String>,
    /// How the shell marks its state; `None` if another program was started.
    pub integration: Option<Integration>,
}

impl Terminal {
    pub async fn start(server: &Server, create: ShellCreate, (cols, rows): (u16, u16)) -> Result<Self, ApiError> {
        let has_bash = server.files.is_file("/bin/bash").await?;
        let shell = if has_bash { "/bin/bash" } else { "/bin/sh" };
        let mut env = vec![(b"TERM".to_vec(), b"xterm-256color".to_vec()), (b"SHELL".to_vec(), shell.as_bytes().to_vec())];
        let argv_shown =
            create.command.clone().map_or_else(|| vec![shell.to_owned()], |command| vec!["/bin/sh".to_owned(), "-c".to_owned(), command]);
        let (argv, integration) = match create.command {
            Some(command) => (vec![b"/bin/sh".to_vec(), b"-c".to_vec(), reject_nul("command", command)?], None),
            None => {
                let integration = Integration::new(if has_bash { ShellKind::Bash } else { ShellKind::Sh });
                let (argv, variables) = integration.command(shell);
                env.extend(variables);
                (argv, Some(integration))
            }
        };
        let requested = environment(create.env)?;
        env.retain(|(name, _)| requested.iter().all(|(other, _)| other != name));
        env.extend(requested);
        let command = ProgramSpec { argv, env, cwd: working_directory(create.cwd)?, stdio: Stdio::Pty { cols, rows } };
        let started = programs::start(&server.programs, &server.tasks, command).await.map_err(|error| match is_bad_cwd(&error) {
            true => ApiError::invalid(format!("cwd: {error}")),
            false => ApiError::new(ErrorCode::Internal, format!("starting the shell: {error}")),
        })?;
        let program = started.program;
        let internal = |message: String| ApiError::new(ErrorCode::Internal, message);
        let pty = started.pty.ok_or_else(|| internal("the shell was started without a terminal".to_owned()));
        let pty = pty.and_then(|fd| {
            Descriptor::new(fd, Interest::READABLE | Interest::WRITABLE).map_err(|e| internal(format!("the shell's terminal: {e}")))
        });
        match pty {
            Ok(pty) => Ok(Self { pty, program, argv: argv_shown, integration }),
            Err(error) => {
                hang_up(&server.tasks, program);
                Err(error)
            }
        }
    }

    pub fn resize(&self, (cols, rows): (u16, u16)) -> Result<(), ApiError> {
        let size = Winsize { ws_row: rows, ws_col: cols, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&self.pty, size).map_err(|e| ApiError::new(ErrorCode::Internal, format!("setting the terminal's size: {e}")))
    }

    /// Signals the foreground process group if the kernel supports it for this signal, otherwise the shell itself.
    pub fn signal(&self, number: i32) {
        if FOREGROUND.contains(&number) && cobox_kernel::interrupt_foreground(&self.pty, number).is_ok() {
            return;
        }
        self.program.signal(number);
    }
}

/// Ends a program as a closed terminal does, then kills what remains.
pub fn hang_up(tasks: &TaskTracker, program: Arc<dyn Program>) {
    tasks.spawn(async move {
        program.signal(HANG_UP);
        // Descendants are killed in both cases, whether the program has ended or not.
        let _ = tokio::time::timeout(HANG_UP_GRACE, program.wait()).await;
        program.kill_tree().await;
    });
}

pub fn size(cols: Option<u16>, rows: Option<u16>) -> Result<(u16, u16), ApiError> {
    let (cols, rows) = (cols.unwrap_or(DEFAULT_COLS), rows.unwrap_or(DEFAULT_ROWS));
    let allowed = 1..=MAX_TERMINAL_SIDE;
    match allowed.contains(&cols) && allowed.contains(&rows) {
        true => Ok((cols, rows)),
        false => Err(ApiError::invalid(format!("cols, rows: must be 1 to {MAX_TERMINAL_SIDE}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_out_of_bounds_are_refused() {
        assert!(size(Some(1), Some(1000)).is_ok());
        assert!(size(Some(0), Some(10)).is_err() && size(Some(10), Some(1001)).is_err());
    }
}
