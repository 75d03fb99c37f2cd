//! Limits of programs that boxd sets and they can't: a filter keeps them from it, and a word goes past the filter.

use std::io;

use cobox_kernel::{LimitSecret, set_soft_limit};

use super::{link, seccomp, tree};

/// What goes past this process's own filter.
#[derive(Clone, Copy)]
pub struct Limits {
    pub word: LimitSecret,
    /// Whether programs can be marked: not where whoever started us may have only so many file locks, as then have all.
    pub has_marks: bool,
}

impl Limits {
    /// Forbids setting such limits to this process and all it will ever start, but for who has the word.
    pub fn confine() -> io::Result<Self> {
        let mut word = [0; 16];
        getrandom::fill(&mut word).map_err(io::Error::other)?;
        let [a, b] = [0, 8].map(|at| u64::from_ne_bytes(std::array::from_fn(|i| word[at + i])));
        let word = LimitSecret([a, b]);
        seccomp::confine_limits(word).map_err(io::Error::other)?;
        // Changes nothing where there is no limit yet, and is refused where there is one.
        let has_marks = set_soft_limit(word, 0, libc::RLIMIT_LOCKS, None).is_ok();
        Ok(Self { word, has_marks })
    }

    /// With no allowance left a write to a file fails with EFBIG, while deleting still works. 0 stands for this process itself.
    pub fn stop_writer(&self, pid: i32, stop: bool) -> io::Result<()> {
        set_soft_limit(self.word, pid, libc::RLIMIT_FSIZE, stop.then_some(0))
    }

    pub fn root(&self, program: &link::Root) -> tree::Root {
        tree::Root { mark: self.has_marks.then_some(program.mark), pid: program.pid }
    }
}
