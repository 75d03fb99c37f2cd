//! Resource limits that boxd sets and programs can't change: a seccomp filter rejects every caller that doesn't present
//! a secret.

use std::io;

use cobox_kernel::{LimitSecret, set_soft_limit};

use super::{messages::ProgramRef, process_tree::ProcessTree, seccomp};

/// The right to set limits despite this process's filter.
#[derive(Clone, Copy)]
pub struct ProtectedLimits {
    pub secret: LimitSecret,
    /// Whether process trees can be marked. False if boxd was itself started with a hard limit on file locks, because
    /// every program then inherits that limit.
    pub has_marks: bool,
}

impl ProtectedLimits {
    /// Forbids this process and all its descendants to set these limits, except with the secret.
    pub fn confine() -> io::Result<Self> {
        let mut secret = [0; 16];
        getrandom::fill(&mut secret).map_err(io::Error::other)?;
        let [a, b] = [0, 8].map(|at| u64::from_ne_bytes(std::array::from_fn(|i| secret[at + i])));
        let secret = LimitSecret([a, b]);
        seccomp::confine_limits(secret).map_err(io::Error::other)?;
        // Without an existing limit this changes nothing; with one, the kernel rejects it.
        let has_marks = set_soft_limit(secret, 0, libc::RLIMIT_LOCKS, None).is_ok();
        Ok(Self { secret, has_marks })
    }

    /// With a file size limit of 0, writing to a file fails with EFBIG, while deleting still works. A pid of 0 means
    /// this process.
    pub fn stop_writer(&self, pid: i32, stop: bool) -> io::Result<()> {
        set_soft_limit(self.secret, pid, libc::RLIMIT_FSIZE, stop.then_some(0))
    }

    pub fn process_tree(&self, program: &ProgramRef) -> ProcessTree {
        ProcessTree { mark: self.has_marks.then_some(program.mark), pid: program.pid }
    }
}
