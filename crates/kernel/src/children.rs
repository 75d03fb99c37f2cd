//! Reports children that have ended, and reaps them separately: a child is reaped only when nothing refers to its pid
//! any more, so that no code ever acts on a pid that the kernel has reused.

use std::{io, mem::MaybeUninit};

use crate::check;

/// A child that has ended. Its pid isn't reused until the child is reaped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndedChild {
    pub pid: i32,
    /// The exit code; 128 + the signal's number if a signal ended the child.
    pub code: i32,
    pub signal: Option<i32>,
}

/// Any child that has ended, or the given one if it has ended. `None` if there is none. The child is not reaped.
pub fn ended_child(pid: Option<i32>) -> Option<EndedChild> {
    let child = wait_id(pid, libc::WEXITED | libc::WNOHANG | libc::WNOWAIT)?;
    // SAFETY: the kernel filled it in for a child.
    let (pid, status) = unsafe { (child.si_pid(), child.si_status()) };
    let signal = (child.si_code != libc::CLD_EXITED).then_some(status);
    Some(EndedChild { pid, code: signal.map_or(status, |signal| 128 + signal), signal })
}

/// Reaps a child that has ended, which releases its pid.
pub fn reap(child: EndedChild) {
    wait_id(Some(child.pid), libc::WEXITED | libc::WNOHANG);
}

/// Whether a child was stopped by a signal. It goes on only after SIGCONT.
pub fn is_stopped(pid: i32) -> bool {
    wait_id(Some(pid), libc::WSTOPPED | libc::WNOHANG | libc::WNOWAIT).is_some()
}

fn wait_id(pid: Option<i32>, options: libc::c_int) -> Option<libc::siginfo_t> {
    let (kind, number) = pid.map_or((libc::P_ALL, 0), |pid| (libc::P_PID, pid as libc::id_t));
    let mut child = MaybeUninit::<libc::siginfo_t>::zeroed();
    loop {
        // SAFETY: the buffer has the size of the structure that the call fills in.
        match check(unsafe { libc::waitid(kind, number, child.as_mut_ptr(), options) }.into()) {
            // SAFETY: all zeroes is a valid value, and the kernel leaves it unchanged if no child matches.
            Ok(_) => return Some(unsafe { child.assume_init() }).filter(|child| unsafe { child.si_pid() } != 0),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            // There are no children, or the given one is no longer a child.
            Err(_) => return None,
        }
    }
}
