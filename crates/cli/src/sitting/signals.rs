//! What the system tells somebody who sits at a terminal: another size, stop, go on, end.

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
    /// Somebody wants this program to end.
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

/// Stops this program as its terminal's Ctrl-Z would, until somebody lets it go on.
pub fn stop_here() {
    // A program can always stop itself.
    let _ = process::kill_process(process::getpid(), process::Signal::STOP);
}
