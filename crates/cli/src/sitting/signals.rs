//! The signals of an attached terminal: resize, stop, continue and termination.

use rustix::process;
use tokio::signal::unix::{Signal, SignalKind, signal};

pub struct Signals {
    pub resized: Signal,
    pub stop: Signal,
    pub continued: Signal,
    pub ending: Ending,
}

pub struct Ending([Signal; 4]);

impl Signals {
    pub fn new() -> std::io::Result<Self> {
        let ending = [SignalKind::terminate(), SignalKind::hangup(), SignalKind::interrupt(), SignalKind::quit()];
        let [terminated, hung_up, interrupted, quit] = ending.map(signal);
        let other = |number: process::Signal| signal(SignalKind::from_raw(number.as_raw()));
        Ok(Self {
            resized: signal(SignalKind::window_change())?,
            stop: other(process::Signal::TSTP)?,
            continued: other(process::Signal::CONT)?,
            ending: Ending([terminated?, hung_up?, interrupted?, quit?]),
        })
    }
}

impl Ending {
    /// Resolves when the process is asked to terminate.
    pub async fn asked_for(&mut self) {
        let [terminated, hung_up, interrupted, quit] = &mut self.0;
        tokio::select! {
            _ = terminated.recv() => {}
            _ = hung_up.recv() => {}
            _ = interrupted.recv() => {}
            _ = quit.recv() => {}
        }
    }
}

/// Stops this process, as Ctrl-Z does in its terminal, until SIGCONT.
pub fn stop_here() {
    // A process can always stop itself.
    let _ = process::kill_process(process::getpid(), process::Signal::STOP);
}
