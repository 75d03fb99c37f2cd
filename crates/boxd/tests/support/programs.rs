//! Runs the host's own programs instead of a sandbox's: without isolation, but with real processes, pipes and
//! terminals.

use std::{
    collections::BTreeSet,
    ffi::OsStr,
    io,
    os::{fd::OwnedFd, unix::ffi::OsStrExt},
    path::PathBuf,
    process,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use boxd::{
    programs::{Program, Spawn, StartedProgram},
    workload::{Exit, ProgramSpec, Stdio},
};
use futures_util::future::BoxFuture;
use rustix::{
    process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, kill_process_group, setrlimit},
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
    termios::{Winsize, tcsetwinsize},
};
use tokio::sync::watch;

pub struct HostPrograms {
    pub work_dir: PathBuf,
}

struct HostProgram {
    pid: i32,
    mark: u64,
    exit: watch::Receiver<Option<Exit>>,
}

impl Spawn for HostPrograms {
    fn spawn(&self, spec: ProgramSpec) -> BoxFuture<'_, io::Result<StartedProgram>> {
        Box::pin(async move { self.start(spec) })
    }
    fn launch(&self, spec: ProgramSpec) -> BoxFuture<'_, io::Result<StartedProgram>> {
        self.spawn(spec)
    }
    fn stop_writers(&self, _stop: bool) -> BoxFuture<'_, io::Result<()>> {
        Box::pin(async { Ok(()) })
    }
    fn work_dir(&self) -> &str {
        "/workspace"
    }
    fn user(&self) -> &str {
        "user"
    }
}

impl HostPrograms {
    fn start(&self, spec: ProgramSpec) -> io::Result<StartedProgram> {
        let argv: Vec<&OsStr> = spec.argv.iter().map(|w| OsStr::from_bytes(w)).collect();
        let mut pty = None;
        let mut host = match spec.stdio {
            Stdio::Pipes { stdin } => {
                use std::os::unix::process::CommandExt;
                let mut host = process::Command::new(argv[0]);
                host.args(&argv[1..]).process_group(0);
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
                // `setsid` makes the terminal the program's controlling terminal, which only the new process itself can
                // do.
                let mut host = process::Command::new("setsid");
                host.arg("--ctty").args(&argv).stdin(slave.try_clone()?).stdout(slave.try_clone()?).stderr(slave);
                pty = Some(master);
                host
            }
        };
        host.current_dir(spec.cwd.as_deref().map_or(self.work_dir.as_path(), |d| OsStr::from_bytes(d).as_ref()));
        host.envs(spec.env.iter().map(|(k, v)| (OsStr::from_bytes(k), OsStr::from_bytes(v))));
        let (mut child, mark) = spawn_marked(&mut host)?;
        let pid = child.id() as i32;
        let (stdin, stdout, stderr) =
            (child.stdin.take().map(OwnedFd::from), child.stdout.take().map(OwnedFd::from), child.stderr.take().map(OwnedFd::from));
        for fd in [&stdin, &stdout, &stderr, &pty].into_iter().flatten() {
            rustix::io::ioctl_fionbio(fd, true)?;
        }
        let (exit_sender, exit) = watch::channel(None);
        std::thread::spawn(move || {
            use std::os::unix::process::ExitStatusExt;
            let status = child.wait().unwrap();
            let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap());
            exit_sender.send_replace(Some(Exit { code, signal: status.signal() }));
        });
        Ok(StartedProgram { program: Arc::new(HostProgram { pid, mark, exit }), stdin, stdout, stderr, pty })
    }
}

impl Program for HostProgram {
    fn wait(&self) -> BoxFuture<'_, Exit> {
        let mut exit = self.exit.clone();
        Box::pin(async move { exit.wait_for(Option::is_some).await.unwrap().unwrap() })
    }
    fn resume_if_stopped(&self) {}
    fn pid(&self) -> Option<i32> {
        Some(self.pid)
    }
    fn start_failure(&self) -> Option<io::Error> {
        None
    }
    fn signal(&self, signal: i32) {
        let _ = kill_process_group(Pid::from_raw(self.pid).unwrap(), Signal::from_named_raw(signal).unwrap());
    }
    fn signal_tree(&self, signal: i32) {
        for pid in marked(self.mark) {
            let _ = kill_process(Pid::from_raw(pid).unwrap(), Signal::from_named_raw(signal).unwrap());
        }
    }
    fn kill_tree(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {
            let mut stopped = BTreeSet::new();
            loop {
                let living = marked(self.mark);
                if living.is_empty() {
                    return;
                }
                let signal = if living.is_subset(&stopped) { Signal::KILL } else { Signal::STOP };
                for pid in &living {
                    let _ = kill_process(Pid::from_raw(*pid).unwrap(), signal);
                }
                stopped = living;
                tokio::task::yield_now().await;
            }
        })
    }
}

/// Starts a process with a mark that all its descendants inherit, as in a sandbox. The mark is a limit that nothing
/// else uses.
fn spawn_marked(host: &mut process::Command) -> io::Result<(process::Child, u64)> {
    static COUNT: AtomicU64 = AtomicU64::new(1);
    static LIMIT_LOCK: Mutex<()> = Mutex::new(());
    let mark = u64::from(process::id()) << 24 | COUNT.fetch_add(1, Ordering::Relaxed);
    // The limit applies to this whole process while the child is created.
    let _locked = LIMIT_LOCK.lock().unwrap_or_else(PoisonError::into_inner);
    let before = getrlimit(Resource::Locks);
    setrlimit(Resource::Locks, Rlimit { current: Some(mark), ..before })?;
    let child = host.spawn();
    setrlimit(Resource::Locks, before)?;
    Ok((child?, mark))
}

/// Live processes with the mark.
fn marked(mark: u64) -> BTreeSet<i32> {
    let has_mark = |pid: &i32| {
        let limits = std::fs::read_to_string(format!("/proc/{pid}/limits")).unwrap_or_default();
        let locks = limits.lines().find_map(|l| l.strip_prefix("Max file locks")?.split_ascii_whitespace().next()?.parse::<u64>().ok());
        locks == Some(mark) && std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|s| !s.contains(") Z "))
    };
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    entries.filter_map(|e| e.file_name().to_str()?.parse().ok()).filter(has_mark).collect()
}
