//! Programs of the host itself in place of the sandbox's: no isolation, but real processes, pipes and terminals.

use std::{
    ffi::OsStr,
    io,
    os::{fd::OwnedFd, unix::ffi::OsStrExt},
    path::PathBuf,
    process,
    sync::Arc,
};

use boxd::{
    programs::{Program, Spawn, Started},
    workload::{Command, Exit, Stdio},
};
use futures_util::future::BoxFuture;
use rustix::{
    process::{Pid, Signal, kill_process_group},
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
    termios::{Winsize, tcsetwinsize},
};
use tokio::sync::watch;

pub struct HostPrograms {
    pub work_dir: PathBuf,
}

struct HostProgram {
    pid: i32,
    exit: watch::Receiver<Option<Exit>>,
}

impl Spawn for HostPrograms {
    fn spawn(&self, command: Command) -> BoxFuture<'_, io::Result<Started>> {
        Box::pin(async move { self.start(command) })
    }
    fn stop_writers(&self, _stop: bool) -> BoxFuture<'_, io::Result<()>> {
        Box::pin(async { Ok(()) })
    }
    fn work_dir(&self) -> &str {
        "/workspace"
    }
}

impl HostPrograms {
    fn start(&self, command: Command) -> io::Result<Started> {
        let words: Vec<&OsStr> = command.argv.iter().map(|w| OsStr::from_bytes(w)).collect();
        let mut pty = None;
        let mut host = match command.stdio {
            Stdio::Pipes { stdin } => {
                use std::os::unix::process::CommandExt;
                let mut host = process::Command::new(words[0]);
                host.args(&words[1..]).process_group(0);
                host.stdin(if stdin { process::Stdio::piped() } else { process::Stdio::null() });
                host.stdout(process::Stdio::piped()).stderr(process::Stdio::piped());
                host
            }
            Stdio::Pty { cols, rows } => {
                let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
                grantpt(&master)?;
                unlockpt(&master)?;
                let name = ptsname(&master, Vec::new())?;
                let open = || std::fs::OpenOptions::new().read(true).write(true).open(OsStr::from_bytes(name.to_bytes()));
                let slave = open()?;
                tcsetwinsize(&slave, Winsize { ws_col: cols, ws_row: rows, ws_xpixel: 0, ws_ypixel: 0 })?;
                // Makes the terminal the program's own, which takes a call only a new process can make for itself.
                let mut host = process::Command::new("setsid");
                host.arg("--ctty").args(&words).stdin(slave.try_clone()?).stdout(slave.try_clone()?).stderr(slave);
                pty = Some(master);
                host
            }
        };
        host.current_dir(command.cwd.as_deref().map_or(self.work_dir.as_path(), |d| OsStr::from_bytes(d).as_ref()));
        host.envs(command.env.iter().map(|(k, v)| (OsStr::from_bytes(k), OsStr::from_bytes(v))));
        let mut child = host.spawn()?;
        let pid = child.id() as i32;
        let (stdin, stdout, stderr) =
            (child.stdin.take().map(OwnedFd::from), child.stdout.take().map(OwnedFd::from), child.stderr.take().map(OwnedFd::from));
        for fd in [&stdin, &stdout, &stderr, &pty].into_iter().flatten() {
            rustix::io::ioctl_fionbio(fd, true)?;
        }
        let (tell, exit) = watch::channel(None);
        std::thread::spawn(move || {
            use std::os::unix::process::ExitStatusExt;
            let status = child.wait().unwrap();
            let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap());
            tell.send_replace(Some(Exit { code, signal: status.signal() }));
        });
        Ok(Started { program: Arc::new(HostProgram { pid, exit }), stdin, stdout, stderr, pty })
    }
}

impl Program for HostProgram {
    fn wait(&self) -> BoxFuture<'_, Exit> {
        let mut exit = self.exit.clone();
        Box::pin(async move { exit.wait_for(Option::is_some).await.unwrap().unwrap() })
    }
    fn signal(&self, signal: i32) {
        let _ = kill_process_group(Pid::from_raw(self.pid).unwrap(), Signal::from_named_raw(signal).unwrap());
    }
    fn kill_tree(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {
            let _ = kill_process_group(Pid::from_raw(self.pid).unwrap(), Signal::KILL);
        })
    }
}
