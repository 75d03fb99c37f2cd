//! Hearing of children that have ended, and letting them go only when nothing refers to their numbers any more.

use std::{io, mem::MaybeUninit};

use crate::check;

/// A child that has ended. Its number stays its own until it is let go of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndedChild {
    pub pid: i32,
    /// 128 + the signal's number when a signal ended it.
    pub code: i32,
    pub signal: Option<i32>,
}

/// One of the children that have ended, or the given one if it has. `None` while there is none.
pub fn ended_child(pid: Option<i32>) -> Option<EndedChild> {
    let child = look(pid, libc::WEXITED | libc::WNOHANG | libc::WNOWAIT)?;
    // SAFETY: the kernel filled it in for a child.
    let (pid, status) = unsafe { (child.si_pid(), child.si_status()) };
    let signal = (child.si_code != libc::CLD_EXITED).then_some(status);
    Some(EndedChild { pid, code: signal.map_or(status, |signal| 128 + signal), signal })
}

/// Gives up the number of a child that has ended.
pub fn let_go(child: EndedChild) {
    look(Some(child.pid), libc::WEXITED | libc::WNOHANG);
}

/// Whether somebody has stopped a child, which goes on only when told to.
pub fn is_stopped(pid: i32) -> bool {
    look(Some(pid), libc::WSTOPPED | libc::WNOHANG | libc::WNOWAIT).is_some()
}

fn look(pid: Option<i32>, options: libc::c_int) -> Option<libc::siginfo_t> {
    let (kind, number) = pid.map_or((libc::P_ALL, 0), |pid| (libc::P_PID, pid as libc::id_t));
    let mut child = MaybeUninit::<libc::siginfo_t>::zeroed();
    loop {
        // SAFETY: there is room for what the call fills in.
        match check(unsafe { libc::waitid(kind, number, child.as_mut_ptr(), options) }.into()) {
            // SAFETY: all zeroes is valid, and stays where there is nobody.
            Ok(_) => return Some(unsafe { child.assume_init() }).filter(|child| unsafe { child.si_pid() } != 0),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            // No children, or not that one any more.
            Err(_) => return None,
        }
    }
}
