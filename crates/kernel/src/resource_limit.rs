//! Sets resource limits of processes although a seccomp filter forbids it to every caller that doesn't present a
//! secret.

use std::io;

use crate::raw_syscall::syscall;

/// The secret that the filter checks: two numbers in registers that `prlimit64` itself ignores. No process can read a
/// filter back, so a process that doesn't have the secret would have to guess 128 bits.
#[derive(Clone, Copy)]
pub struct LimitSecret(pub [u64; 2]);

/// Sets a process's soft limit. The hard limit becomes unlimited, so that the process may change the soft one.
pub fn set_soft_limit(secret: LimitSecret, pid: i32, resource: u32, value: Option<u64>) -> io::Result<()> {
    let limit = libc::rlimit { rlim_cur: value.unwrap_or(libc::RLIM_INFINITY), rlim_max: libc::RLIM_INFINITY };
    let args = [pid as usize, resource as usize, std::ptr::from_ref(&limit) as usize, 0, secret.0[0] as usize, secret.0[1] as usize];
    // SAFETY: the structure outlives the call, which only reads it.
    match unsafe { syscall(libc::SYS_prlimit64, args) } {
        0.. => Ok(()),
        error => Err(io::Error::from_raw_os_error(-error as i32)),
    }
}
