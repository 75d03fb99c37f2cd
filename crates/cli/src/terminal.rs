//! The local terminal while a program elsewhere has it: raw, its size told, and always given back as it was.

mod escape;
mod modes;

use std::{
    cell::Cell,
    io::{self, IsTerminal},
    os::fd::{AsFd, OwnedFd},
    sync::{
        Mutex, MutexGuard, Once, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use rustix::termios::{OptionalActions, QueueSelector, Termios, tcflush, tcgetattr, tcgetwinsize, tcsetattr};

pub use self::{
    escape::{EscapeKey, EscapeScan, Typed},
    modes::Modes,
};

/// Raw mode for as long as it lives: dropped on return, on error, on unwinding, and before a handled signal ends the program. A panic
/// gives the terminal back first, so that its words can be read.
pub struct RawMode {
    terminal: OwnedFd,
}

/// The terminal that is raw now, and how it was: for a panic, which can't ask anybody.
static HELD: Mutex<Option<(OwnedFd, Termios)>> = Mutex::new(None);
static HOOK: Once = Once::new();
/// Whether a program has taken a screen of its own there. Leaving one that nobody took would move the cursor to wherever it was once saved.
static IS_ALTERNATE: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// A panic of what runs now is caught, and costs nobody their terminal.
    static IS_GUARDED: Cell<bool> = const { Cell::new(false) };
}

impl RawMode {
    /// `None` where stdin is not a terminal: then there is nothing to change.
    pub fn enter() -> io::Result<Option<Self>> {
        let stdin = io::stdin();
        if !stdin.is_terminal() {
            return Ok(None);
        }
        Self::of(&stdin).map(Some)
    }

    fn of(terminal: &impl AsFd) -> io::Result<Self> {
        let terminal = terminal.as_fd().try_clone_to_owned()?;
        *held() = Some((terminal.try_clone()?, tcgetattr(&terminal)?));
        HOOK.call_once(give_back_on_panic);
        let raw = Self { terminal };
        raw.again()?;
        Ok(raw)
    }

    /// Makes it raw anew, after [`RawMode::pause`] or whatever others did to it.
    pub fn again(&self) -> io::Result<()> {
        let mut raw = tcgetattr(&self.terminal)?;
        raw.make_raw();
        // What was typed before is kept: it may be meant for us.
        Ok(tcsetattr(&self.terminal, OptionalActions::Now, &raw)?)
    }

    /// As it was before, until it is raw again.
    pub fn pause(&self) {
        give_back(held().as_ref());
    }

    /// Forgets what was typed, or told by the terminal itself, and not read yet: it was for a program that we left.
    pub fn forget_input(&self) {
        // A terminal that is gone has nothing to forget.
        let _ = tcflush(&self.terminal, QueueSelector::IFlush);
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        give_back(held().take().as_ref());
    }
}

fn held() -> MutexGuard<'static, Option<(OwnedFd, Termios)>> {
    // A panic while it is held leaves it whole.
    HELD.lock().unwrap_or_else(PoisonError::into_inner)
}

fn give_back(held: Option<&(OwnedFd, Termios)>) {
    if let Some((terminal, before)) = held {
        // Not after its output has been shown, which on a terminal that is stuck would be never. One that is gone can't be restored, and
        // nobody looks at it.
        let _ = tcsetattr(terminal, OptionalActions::Now, before);
    }
}

fn give_back_on_panic() {
    let next = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if IS_GUARDED.get() {
            return;
        }
        if let Ok(held) = HELD.try_lock()
            && held.is_some()
        {
            give_back(held.as_ref());
            let leave = if IS_ALTERNATE.swap(false, Ordering::Relaxed) { Modes::leave_alternate() } else { b"" };
            let _ = io::Write::write_all(&mut io::stderr(), &[Modes::all_off(), leave].concat());
        }
        next(panic);
    }));
}

/// What the terminal shows from now on, for a panic to know: a program's own screen, or the one that was there before.
pub fn shows_alternate(is_alternate: bool) {
    IS_ALTERNATE.store(is_alternate, Ordering::Relaxed);
}

/// Panics where a program prints what `COBOX_PANIC_AT` says: how a test breaks us. Not in what is released.
#[cfg(debug_assertions)]
pub fn break_where_told(output: &[u8]) {
    static WORD: std::sync::LazyLock<Option<String>> =
        std::sync::LazyLock::new(|| std::env::var("COBOX_PANIC_AT").ok().filter(|word| !word.is_empty()));
    if let Some(word) = &*WORD {
        assert!(!output.windows(word.len()).any(|part| part == word.as_bytes()), "told to break at {word}");
    }
}

#[cfg(not(debug_assertions))]
pub const fn break_where_told(_: &[u8]) {}

/// Runs what may panic over what a stranger sends, and catches it.
pub fn guarded<T>(work: impl FnOnce() -> T) -> T {
    let before = IS_GUARDED.replace(true);
    let result = work();
    IS_GUARDED.set(before);
    result
}

/// Columns and rows, where stdout or stdin is a terminal that knows them.
pub fn size() -> Option<(u16, u16)> {
    let known = |fd: Result<rustix::termios::Winsize, rustix::io::Errno>| fd.ok().filter(|w| w.ws_col > 0 && w.ws_row > 0);
    let size = known(tcgetwinsize(io::stdout())).or_else(|| known(tcgetwinsize(io::stdin())))?;
    Some((size.ws_col, size.ws_row))
}

/// Terminals that every system knows by name.
const KNOWN: [&str; 8] = ["xterm", "screen", "tmux", "rxvt", "linux", "vt100", "vt220", "dumb"];
/// Of which these may follow: `screen-256color`.
const KNOWN_VARIANTS: [&str; 3] = ["-256color", "-color", "-unicode-256color"];
/// What the others claim to be, and mostly are.
const COMMON: &str = "xterm-256color";

/// The name to know this terminal by elsewhere: a program that finds no description of it refuses to start.
pub fn known_name(term: &str) -> &str {
    let is_known = |name: &&str| term.strip_prefix(*name).is_some_and(|rest| rest.is_empty() || KNOWN_VARIANTS.contains(&rest));
    if KNOWN.iter().any(is_known) { term } else { COMMON }
}

#[cfg(test)]
mod tests {
    use rustix::{
        pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
        termios::LocalModes,
    };

    use super::*;

    #[test]
    fn a_panic_gives_the_terminal_back() {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&master).and_then(|()| unlockpt(&master)).unwrap();
        let path = ptsname(&master, Vec::new()).unwrap().into_string().unwrap();
        let terminal = std::fs::File::options().read(true).write(true).open(path).unwrap();
        let is_raw = || !tcgetattr(&terminal).unwrap().local_modes.contains(LocalModes::ECHO);
        let raw = RawMode::of(&terminal).unwrap();
        assert!(is_raw());
        assert!(guarded(|| std::panic::catch_unwind(|| panic!("over what a stranger sent"))).is_err());
        assert!(is_raw(), "it is caught, and nobody need know");
        raw.pause();
        assert!(!is_raw());
        raw.again().unwrap();
        assert!(is_raw());
        // Before anything is dropped, so that the words of it can be read.
        let hooked = std::thread::spawn(|| panic!("a test of panics")).join();
        assert!(hooked.is_err() && !is_raw());
        raw.again().unwrap();
        drop(raw);
        assert!(!is_raw());
    }

    #[test]
    fn a_terminal_nobody_knows_is_a_common_one() {
        for (term, name) in
            [("xterm", "xterm"), ("screen-256color", "screen-256color"), ("xterm-kitty", COMMON), ("foot", COMMON), ("", COMMON)]
        {
            assert_eq!(known_name(term), name);
        }
    }
}
