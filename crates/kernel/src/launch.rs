//! Starting a program from a small process without copying it: the new process works in its parent's memory until it has its program,
//! as `posix_spawn` does it, but without making the parent wait.

use std::{
    ffi::CString,
    io,
    os::fd::{AsRawFd, BorrowedFd, RawFd},
    ptr,
    sync::atomic::{AtomicI32, AtomicU32, Ordering},
};

use crate::{Image, Word, check, raw::syscall};

/// For a few calls with small frames, unoptimised ones too.
const STACK_BYTES: usize = 64 * 1024;
const NONE: RawFd = -1;
/// The kernel's own limit of a path, its NUL included.
const MAX_PATH_BYTES: usize = 4096;

/// Where starting a program failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Step {
    Setup = 1,
    WorkingDirectory = 2,
    Program = 3,
}

impl Step {
    pub fn from_number(number: u8) -> Option<Self> {
        [Step::Setup, Step::WorkingDirectory, Step::Program].into_iter().find(|step| *step as u8 == number)
    }
}

/// Everything the new process needs to know, laid out before it exists.
pub struct Launch {
    /// Standard input becomes the program's own terminal.
    pub is_terminal: bool,
    pub uid: u32,
    pub gid: u32,
    /// Whether groups can be set: not where there is one id.
    pub has_groups: bool,
    /// What tells the descendants of one program from those of another; see [`crate::mark_of`].
    pub mark: Option<u64>,
    pub word: Word,
    pub cwd: CString,
    pub program: Program,
    pub image: Image,
}

/// Where the program is.
pub enum Program {
    At(CString),
    /// In one of the directories of a `PATH`. Each place is put together when it is tried: all of them at once would be as large as
    /// the name times the directories.
    Along {
        name: Vec<u8>,
        path: Vec<u8>,
    },
}

/// Memory that a new process works in. It stays as it is until that process has its program or is gone.
pub struct Pad {
    stack: Stack,
    launch: Option<Launch>,
    stdio: [RawFd; 3],
    outcome: RawFd,
    /// Not 0 while the new process is in this memory: the kernel clears it.
    is_in_use: AtomicI32,
    step: AtomicU32,
    errno: AtomicI32,
}

impl Pad {
    pub fn new() -> io::Result<Box<Self>> {
        Ok(Box::new(Self {
            stack: Stack::new()?,
            launch: None,
            stdio: [NONE; 3],
            outcome: NONE,
            is_in_use: AtomicI32::new(0),
            step: AtomicU32::new(0),
            errno: AtomicI32::new(0),
        }))
    }

    pub fn is_free(&self) -> bool {
        self.is_in_use.load(Ordering::Acquire) == 0
    }

    /// Starts the program and gives the new process's number; the descriptors may be closed then, the new process has its own. Whether
    /// it became the program is told by [`Pad::failure`] when it has ended; `outcome` closes without a word when it did.
    ///
    /// # Safety
    /// The process must have one thread, its descriptors from 3 on must be closed by exec, and its signals must be as programs are to have them.
    /// The pad must neither be dropped nor used again before [`Pad::is_free`] says so or the new process was waited for.
    pub unsafe fn launch(&mut self, launch: Launch, stdio: [BorrowedFd<'_>; 3], outcome: Option<BorrowedFd<'_>>) -> io::Result<i32> {
        self.launch = Some(launch);
        self.stdio = stdio.map(|fd| fd.as_raw_fd());
        self.outcome = outcome.map_or(NONE, |fd| fd.as_raw_fd());
        self.step.store(0, Ordering::Relaxed);
        self.errno.store(0, Ordering::Relaxed);
        self.is_in_use.store(1, Ordering::Release);
        let flags = libc::CLONE_VM | libc::CLONE_CHILD_CLEARTID | libc::SIGCHLD;
        let cleared = self.is_in_use.as_ptr();
        // SAFETY: the child runs `begin` on a stack of its own with this pad, which the caller keeps for it. It makes system calls
        // only, none of them through the C library, so all it shares with the parent is in the pad and not changed meanwhile.
        let pid = unsafe {
            let pad = ptr::from_mut(self).cast();
            libc::clone(begin, self.stack.top(), flags, pad, ptr::null_mut::<libc::pid_t>(), ptr::null_mut::<libc::c_void>(), cleared)
        };
        match check(pid.into()) {
            Ok(pid) => Ok(pid as i32),
            Err(error) => {
                self.is_in_use.store(0, Ordering::Release);
                Err(error)
            }
        }
    }

    /// Why the process, which has ended, never became its program.
    pub fn failure(&self) -> Option<(Step, i32)> {
        let step = Step::from_number(self.step.load(Ordering::Acquire) as u8)?;
        Some((step, self.errno.load(Ordering::Acquire)))
    }

    /// The pad's process was waited for: whatever ended it, it is not in this memory any more.
    pub fn free(&mut self) {
        self.is_in_use.store(0, Ordering::Release);
        self.launch = None;
    }

    /// Lets go of what was laid out for a process that has its program now.
    pub fn tidy(&mut self) {
        if self.is_free() {
            self.launch = None;
        }
    }
}

/// The first and last function of the new process. No allocation, no C library, nothing that could panic.
extern "C" fn begin(pad: *mut libc::c_void) -> libc::c_int {
    // SAFETY: `launch` was given this pad and keeps it unchanged until this process is out of its memory.
    let pad = unsafe { &*pad.cast::<Pad>() };
    if let Some(launch) = &pad.launch {
        let (step, errno) = become_program(launch, pad.stdio);
        pad.errno.store(errno, Ordering::Release);
        pad.step.store(step as u32, Ordering::Release);
        if pad.outcome != NONE {
            let e = errno.to_le_bytes();
            let told = [step as u8, e[0], e[1], e[2], e[3]];
            // Nobody is left to tell when this fails.
            let _ = call(libc::SYS_write, [pad.outcome as usize, told.as_ptr() as usize, told.len()]);
        }
    }
    loop {
        let _ = call(libc::SYS_exit_group, [126, 0, 0]);
    }
}

/// Takes off everything of the parent and becomes the program. Returns where and why it couldn't.
fn become_program(launch: &Launch, stdio: [RawFd; 3]) -> (Step, i32) {
    if let Err(errno) = take_off(launch, stdio) {
        return (Step::Setup, errno);
    }
    if let Err(errno) = call(libc::SYS_chdir, [launch.cwd.as_ptr() as usize, 0, 0]) {
        return (Step::WorkingDirectory, errno);
    }
    // Blocked until here, so that nobody's signal meets a process in its parent's memory.
    let nothing = 0u64;
    let unblock = [libc::SIG_SETMASK as usize, ptr::from_ref(&nothing) as usize, 0, size_of::<u64>(), 0, 0];
    // SAFETY: the set is one word, as its size says.
    unsafe { syscall(libc::SYS_rt_sigprocmask, unblock) };
    let errno = match &launch.program {
        Program::At(place) => exec(place.to_bytes_with_nul(), &launch.image),
        Program::Along { name, path } => exec_along(name, path, &launch.image),
    };
    (Step::Program, errno)
}

/// Returns only when none of them could be run, and why.
fn exec_along(name: &[u8], path: &[u8], image: &Image) -> i32 {
    let mut worst = libc::ENOENT;
    let mut place = [0; MAX_PATH_BYTES];
    for directory in path.split(|byte| *byte == b':').filter(|directory| !directory.is_empty()) {
        if directory.len().saturating_add(name.len()) > MAX_PATH_BYTES - 2 {
            continue;
        }
        for (to, from) in place.iter_mut().zip(directory.iter().chain(b"/").chain(name).chain(&[0])) {
            *to = *from;
        }
        let errno = exec(&place, image);
        // "Found but not allowed" says more than "not found in the last directory".
        if errno != libc::ENOENT && errno != libc::ENOTDIR {
            worst = errno;
        }
    }
    worst
}

/// The place ends with its first NUL. Returns only when that failed, and why.
fn exec(place: &[u8], image: &Image) -> i32 {
    let (argv, env) = image.pointers();
    call(libc::SYS_execve, [place.as_ptr() as usize, argv as usize, env as usize]).err().unwrap_or(0)
}

fn take_off(launch: &Launch, stdio: [RawFd; 3]) -> Result<(), i32> {
    if let Some(mark) = launch.mark {
        let mark = libc::rlimit { rlim_cur: mark, rlim_max: mark };
        let args = [0, libc::RLIMIT_LOCKS as usize, ptr::from_ref(&mark) as usize, 0, launch.word.0[0] as usize, launch.word.0[1] as usize];
        // SAFETY: the structure outlives the call, which only reads it.
        let answer = unsafe { syscall(libc::SYS_prlimit64, args) };
        if answer < 0 {
            return Err(-answer as i32);
        }
    }
    let [a, b, c] = stdio;
    for (fd, number) in [(a, 0), (b, 1), (c, 2)] {
        call(libc::SYS_dup3, [fd as usize, number, 0])?;
    }
    call(libc::SYS_setsid, [0; 3])?;
    if launch.is_terminal {
        call(libc::SYS_ioctl, [0, libc::TIOCSCTTY as usize, 0])?;
    }
    let (uid, gid) = (launch.uid as usize, launch.gid as usize);
    if launch.has_groups {
        call(libc::SYS_setgroups, [1, ptr::from_ref(&launch.gid) as usize, 0])?;
    }
    call(libc::SYS_setresgid, [gid; 3])?;
    call(libc::SYS_setresuid, [uid; 3])?;
    // Changing ids may have made this memory, which is the parent's, somebody else's to look at.
    call(libc::SYS_prctl, [libc::PR_SET_DUMPABLE as usize, 0, 0])?;
    let header = CapabilityHeader { version: CAPABILITY_VERSION, pid: 0 };
    let none = [[0u32; 3]; 2];
    call(libc::SYS_capset, [ptr::from_ref(&header) as usize, ptr::from_ref(&none) as usize, 0])?;
    call(libc::SYS_umask, [0o022, 0, 0])?;
    Ok(())
}

#[repr(C)]
struct CapabilityHeader {
    version: u32,
    pid: libc::c_int,
}
const CAPABILITY_VERSION: u32 = 0x2008_0522;

fn call(number: libc::c_long, [a, b, c]: [usize; 3]) -> Result<isize, i32> {
    // SAFETY: each call above names memory of the pad or of its own frame, which outlive it.
    match unsafe { syscall(number, [a, b, c, 0, 0, 0]) } {
        answer @ 0.. => Ok(answer),
        error => Err(-error as i32),
    }
}

/// A stack in pages of its own, the lowest of them forbidden.
struct Stack(*mut libc::c_void);

impl Stack {
    fn new() -> io::Result<Self> {
        let (read_write, private) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_STACK);
        // SAFETY: a new mapping takes nothing from anybody.
        let base = unsafe { libc::mmap(ptr::null_mut(), STACK_BYTES, read_write, private, -1, 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let stack = Self(base);
        // SAFETY: the first page of the mapping above.
        check(unsafe { libc::mprotect(base, rustix::param::page_size(), libc::PROT_NONE) }.into())?;
        Ok(stack)
    }

    /// Stacks grow down.
    fn top(&self) -> *mut libc::c_void {
        // SAFETY: one past the end of the mapping.
        unsafe { self.0.byte_add(STACK_BYTES) }
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and the pad's users promised that nobody is on it.
        unsafe { libc::munmap(self.0, STACK_BYTES) };
    }
}
