//! Setting limits of processes past a filter that forbids it to everybody who doesn't know a word.

use std::io;

use crate::raw::syscall;

/// What a filter lets pass: two numbers in registers that `prlimit64` itself ignores. Nobody can read a filter back, so who
/// doesn't hold this can only guess 128 bits.
#[derive(Clone, Copy)]
pub struct Word(pub [u64; 2]);

/// Sets the limit a process runs into and leaves it the right to any.
pub fn set_soft_limit(word: Word, pid: i32, resource: u32, value: Option<u64>) -> io::Result<()> {
    let limit = libc::rlimit { rlim_cur: value.unwrap_or(libc::RLIM_INFINITY), rlim_max: libc::RLIM_INFINITY };
    let args = [pid as usize, resource as usize, std::ptr::from_ref(&limit) as usize, 0, word.0[0] as usize, word.0[1] as usize];
    // SAFETY: the structure outlives the call, which only reads it.
    match unsafe { syscall(libc::SYS_prlimit64, args) } {
        0.. => Ok(()),
        error => Err(io::Error::from_raw_os_error(-error as i32)),
    }
}
