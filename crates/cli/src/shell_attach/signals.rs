//! The signals of an attached terminal: resize, stop, continue and termination.

use rustix::process;
use tokio::signal::unix::{Signal, SignalKind, signal};

pub struct Signals {
    pub resized: Signal,
    pub stop: Signal,
    pub continued: Signal,
    pub termination: TerminationSignals,
}

pub struct TerminationSignals([Signal; 4]);

impl Signals {
    pub fn new() -> std::io::Result<Self> {
        let termination = [SignalKind::terminate(), SignalKind::hangup(), SignalKind::interrupt(), SignalKind::quit()];
        let [terminated, hung_up, interrupted, quit] = termination.map(signal);
        let from_number = |number: process::Signal| signal(SignalKind::from_raw(number.as_raw()));
        Ok(Self {
            resized: signal(SignalKind::window_change())?,
            stop: from_number(process::Signal::TSTP)?,
            continued: from_number(process::Signal::CONT)?,
            termination: TerminationSignals([terminated?, hung_up?, interrupted?, quit?]),
        })
    }
}

impl TerminationSignals {
    /// Resolves when the process is asked to terminate.
    pub async fn recv(&mut self) {
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
pub fn stop_process() {
    // A process can always stop itself.
    let _ = process::kill_process(process::getpid(), process::Signal::STOP);
}
