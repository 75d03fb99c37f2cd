//! The local terminal while a remote program uses it: raw mode, its size, and a guaranteed restore of its previous
//! state.

mod escape_key;
mod modes;
mod sequence_filter;

use std::{
    cell::Cell,
    io::{self, IsTerminal},
    os::fd::{AsFd, OwnedFd},
    sync::{
        Once,
        atomic::{AtomicBool, Ordering},
    },
};

use parking_lot::{Mutex, MutexGuard};
use rustix::termios::{OptionalActions, QueueSelector, Termios, tcflush, tcgetattr, tcgetwinsize, tcsetattr};

pub use self::{
    escape_key::{EscapeKey, EscapeScanner, KeyAction},
    modes::Modes,
    sequence_filter::SequenceFilter,
};

/// Raw mode for the lifetime of this value: ended on return, on error, on unwinding, and before a handled signal ends
/// the process. A panic hook restores the terminal first, so that the panic message is readable.
pub struct RawMode {
    terminal: OwnedFd,
}

/// The terminal in raw mode and its previous settings: global, because a panic hook has no other access.
static SAVED_STATE: Mutex<Option<(OwnedFd, Termios)>> = Mutex::new(None);
static PANIC_HOOK: Once = Once::new();
/// Whether a program has switched to the alternate screen. Leaving it otherwise would move the cursor to an old saved
/// position.
static IS_ALTERNATE: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// A panic of the current code is caught, so it must not restore the terminal.
    static IS_CATCHING_PANICS: Cell<bool> = const { Cell::new(false) };
}

impl RawMode {
    /// `None` if stdin is not a terminal, so that there is nothing to change.
    pub fn enter() -> io::Result<Option<Self>> {
        let stdin = io::stdin();
        if !stdin.is_terminal() {
            return Ok(None);
        }
        Self::for_terminal(&stdin).map(Some)
    }

    fn for_terminal(terminal: &impl AsFd) -> io::Result<Self> {
        let terminal = terminal.as_fd().try_clone_to_owned()?;
        *saved_state() = Some((terminal.try_clone()?, tcgetattr(&terminal)?));
        PANIC_HOOK.call_once(install_panic_hook);
        let raw = Self { terminal };
        raw.resume()?;
        Ok(raw)
    }

    /// Restores raw mode after [`RawMode::pause`] or after another program changed it.
    pub fn resume(&self) -> io::Result<()> {
        let mut raw = tcgetattr(&self.terminal)?;
        raw.make_raw();
        // Pending input is kept: it may be for this program.
        Ok(tcsetattr(&self.terminal, OptionalActions::Now, &raw)?)
    }

    /// Restores the previous settings until [`RawMode::resume`].
    pub fn pause(&self) {
        restore(saved_state().as_ref());
    }

    /// Discards unread input, including the terminal's own reports: it was for the program that was left.
    pub fn discard_input(&self) {
        // Fails only if the terminal is gone.
        let _ = tcflush(&self.terminal, QueueSelector::IFlush);
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        restore(saved_state().take().as_ref());
    }
}

fn saved_state() -> MutexGuard<'static, Option<(OwnedFd, Termios)>> {
    // A panic while the lock is held leaves the value intact.
    SAVED_STATE.lock()
}

fn restore(saved_state: Option<&(OwnedFd, Termios)>) {
    if let Some((terminal, before)) = saved_state {
        // Not `Drain`: on a blocked terminal it would never return. If the terminal is gone, there is nothing to
        // restore.
        let _ = tcsetattr(terminal, OptionalActions::Now, before);
    }
}

fn install_panic_hook() {
    let next = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if IS_CATCHING_PANICS.get() {
            return;
        }
        if let Some(saved_state) = SAVED_STATE.try_lock()
            && saved_state.is_some()
        {
            restore(saved_state.as_ref());
            let leave = if IS_ALTERNATE.swap(false, Ordering::Relaxed) { Modes::leave_alternate() } else { b"" };
            let _ = io::Write::write_all(&mut io::stderr(), &[Modes::reset_all_sequences(), leave].concat());
        }
        next(panic);
    }));
}

/// Records for the panic hook which screen the terminal shows: the alternate one or the normal one.
pub fn record_alternate_screen(is_alternate: bool) {
    IS_ALTERNATE.store(is_alternate, Ordering::Relaxed);
}

/// Panics when a program prints the value of `COBOX_PANIC_AT`, so that tests can cause a panic. Debug builds only.
#[cfg(debug_assertions)]
pub fn panic_on_marker(output: &[u8]) {
    static MARKER: std::sync::LazyLock<Option<String>> =
        std::sync::LazyLock::new(|| std::env::var("COBOX_PANIC_AT").ok().filter(|marker| !marker.is_empty()));
    if let Some(marker) = &*MARKER {
        assert!(!output.windows(marker.len()).any(|part| part == marker.as_bytes()), "instructed to panic at {marker}");
    }
}

#[cfg(not(debug_assertions))]
pub const fn panic_on_marker(_: &[u8]) {}

/// Runs code that catches its own panics over untrusted input; during this, the panic hook leaves the terminal alone.
pub fn without_panic_hook<T>(work: impl FnOnce() -> T) -> T {
    let before = IS_CATCHING_PANICS.replace(true);
    let result = work();
    IS_CATCHING_PANICS.set(before);
    result
}

/// Columns and rows, if stdout or stdin is a terminal with a known size.
pub fn size() -> Option<(u16, u16)> {
    let known = |fd: Result<rustix::termios::Winsize, rustix::io::Errno>| fd.ok().filter(|w| w.ws_col > 0 && w.ws_row > 0);
    let size = known(tcgetwinsize(io::stdout())).or_else(|| known(tcgetwinsize(io::stdin())))?;
    Some((size.ws_col, size.ws_row))
}

/// Terminal names that every system has a terminfo entry for.
const KNOWN_TERMS: [&str; 8] = ["xterm", "screen", "tmux", "rxvt", "linux", "vt100", "vt220", "dumb"];
/// Suffixes that may follow: `screen-256color`.
const KNOWN_TERM_SUFFIXES: [&str; 3] = ["-256color", "-color", "-unicode-256color"];
/// Most other terminals are compatible with this one.
const DEFAULT_TERM: &str = "xterm-256color";

/// The TERM value to use in the sandbox: programs refuse to start without a terminfo entry for it.
pub fn portable_term(term: &str) -> &str {
    let is_known = |name: &&str| term.strip_prefix(*name).is_some_and(|rest| rest.is_empty() || KNOWN_TERM_SUFFIXES.contains(&rest));
    if KNOWN_TERMS.iter().any(is_known) { term } else { DEFAULT_TERM }
}

#[cfg(test)]
mod tests {
    use rustix::{
        pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
        termios::LocalModes,
    };

    use super::*;

    #[test]
    fn a_panic_restores_the_terminal() {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&master).and_then(|()| unlockpt(&master)).unwrap();
        let path = ptsname(&master, Vec::new()).unwrap().into_string().unwrap();
        let terminal = std::fs::File::options().read(true).write(true).open(path).unwrap();
        let is_raw = || !tcgetattr(&terminal).unwrap().local_modes.contains(LocalModes::ECHO);
        let raw = RawMode::for_terminal(&terminal).unwrap();
        assert!(is_raw());
        assert!(without_panic_hook(|| std::panic::catch_unwind(|| panic!("on untrusted input"))).is_err());
        assert!(is_raw(), "a caught panic prints nothing");
        raw.pause();
        assert!(!is_raw());
        raw.resume().unwrap();
        assert!(is_raw());
        // Before anything is dropped, so that the panic message is readable.
        let hooked = std::thread::spawn(|| panic!("a test of panics")).join();
        assert!(hooked.is_err() && !is_raw());
        raw.resume().unwrap();
        drop(raw);
        assert!(!is_raw());
    }

    #[test]
    fn an_unknown_terminal_is_treated_as_xterm() {
        for (term, name) in [
            ("xterm", "xterm"),
            ("screen-256color", "screen-256color"),
            ("xterm-kitty", DEFAULT_TERM),
            ("foot", DEFAULT_TERM),
            ("", DEFAULT_TERM),
        ] {
            assert_eq!(portable_term(term), name);
        }
    }
}
