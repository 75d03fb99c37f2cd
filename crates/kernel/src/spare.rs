//! Processes that wait to become programs. One is made from a small process without copying it, works in that one's memory until it
//! has its program, and is told directly what to become: whoever needs a program finds most of the work done.

use std::{
    cell::UnsafeCell,
    io,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
    ptr,
    sync::atomic::{AtomicI32, AtomicUsize, Ordering},
};

use crate::{Word, block::Laid, check, raw::syscall};

/// For a few calls with small frames, unoptimised ones too.
const STACK_BYTES: usize = 64 * 1024;
/// The kernel's own limit of a path, its NUL included.
const MAX_PATH_BYTES: usize = 4096;
/// An order up to this goes in the packet; a longer one in a memory file beside it. Most are below 2 KiB.
pub const MAX_INLINE_BYTES: usize = 16 * 1024;
/// Standard input, output and error.
const STDIO: usize = 3;
/// Where a waiting process may have its socket: all below are for what comes with the order.
pub const FIRST_SOCKET: RawFd = STDIO as RawFd + 1;

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

/// What every program is given and what is taken from it.
#[derive(Clone, Copy)]
pub struct Dress {
    pub uid: u32,
    pub gid: u32,
    /// Whether groups can be set: not where there is one id.
    pub has_groups: bool,
    /// Whether programs can be marked.
    pub has_marks: bool,
    pub word: Word,
}

/// Memory that a waiting process works in. It stays as it is until that process has its program or is gone.
pub struct Pad {
    stack: Stack,
    dress: Dress,
    socket: RawFd,
    /// Not 0 while the process is in this memory: the kernel clears it.
    is_in_use: AtomicI32,
    /// Where a long order was mapped, and its length; 0 where none was.
    mapped: [AtomicUsize; 2],
    /// The order. Written by the process alone.
    room: UnsafeCell<[u64; MAX_INLINE_BYTES / size_of::<u64>()]>,
}

impl Pad {
    pub fn new(dress: Dress) -> io::Result<Box<Self>> {
        Ok(Box::new(Self {
            stack: Stack::new()?,
            dress,
            socket: -1,
            is_in_use: AtomicI32::new(0),
            mapped: [AtomicUsize::new(0), AtomicUsize::new(0)],
            room: UnsafeCell::new([0; _]),
        }))
    }

    pub fn is_free(&self) -> bool {
        self.is_in_use.load(Ordering::Acquire) == 0
    }

    /// Makes a process that waits at its end of a socket of packets, as a child of this process's parent. Gives its number, and a handle. It says
    /// what number it has where it is, gets its order (a block of [`crate::Program`], with standard I/O and a memory file where the block
    /// is in that), and either becomes the program, which closes the socket, or says where and why not, and ends. It ends as well when
    /// nobody has the other end any more.
    ///
    /// # Safety
    /// The process must have one thread, its descriptors from 3 on must be closed by exec, and its signals must be as programs are to have them.
    /// The pad must neither be dropped nor used again before [`Pad::is_free`] says so.
    pub unsafe fn wait(&mut self, socket: BorrowedFd<'_>) -> io::Result<(i32, OwnedFd)> {
        self.tidy();
        self.socket = socket.as_raw_fd();
        if self.socket < FIRST_SOCKET {
            return Err(io::Error::from_raw_os_error(libc::EBADF));
        }
        self.is_in_use.store(1, Ordering::Release);
        let flags = libc::CLONE_VM | libc::CLONE_PARENT | libc::CLONE_PIDFD | libc::CLONE_CHILD_CLEARTID | libc::SIGCHLD;
        let (mut handle, cleared) = (-1, self.is_in_use.as_ptr());
        // SAFETY: the child runs `begin` on a stack of its own with this pad, which the caller keeps for it. It makes system calls
        // only, none of them through the C library, so all it shares with the parent is in the pad and not changed meanwhile.
        let pid = unsafe {
            let pad = ptr::from_mut(self).cast();
            libc::clone(begin, self.stack.top(), flags, pad, &raw mut handle, ptr::null_mut::<libc::c_void>(), cleared)
        };
        match check(pid.into()) {
            // SAFETY: the kernel has just made it for us.
            Ok(pid) => Ok((pid as i32, unsafe { OwnedFd::from_raw_fd(handle) })),
            Err(error) => {
                self.is_in_use.store(0, Ordering::Release);
                Err(error)
            }
        }
    }

    /// Lets go of the long order of a process that has its program now.
    pub fn tidy(&mut self) {
        let [at, bytes] = [&self.mapped[0], &self.mapped[1]].map(|part| part.load(Ordering::Acquire));
        if self.is_free() && at != 0 {
            // SAFETY: mapped by the process that was in this pad, and used by nobody else.
            unsafe { libc::munmap(at as *mut libc::c_void, bytes) };
            self.mapped[0].store(0, Ordering::Release);
        }
    }
}

impl Drop for Pad {
    fn drop(&mut self) {
        self.tidy();
    }
}

/// The first and last function of the new process. No allocation, no C library, nothing that could panic.
extern "C" fn begin(pad: *mut libc::c_void) -> libc::c_int {
    // SAFETY: `wait` was given this pad and keeps it unchanged until this process is out of its memory.
    let pad = unsafe { &*pad.cast::<Pad>() };
    let (step, errno) = match become_program(pad) {
        Err(failure) => failure,
        // Nobody wants it.
        Ok(()) => (Step::Setup, 0),
    };
    let e = errno.to_le_bytes();
    let told = [step as u8, e[0], e[1], e[2], e[3]];
    if errno != 0 {
        // Nobody is left to tell when this fails.
        let _ = send(pad.socket, &told);
    }
    loop {
        let _ = call(libc::SYS_exit_group, [NOT_STARTED, 0, 0]);
    }
}
/// What a process that didn't become its program ends with, as in a shell.
const NOT_STARTED: usize = 126;

/// Waits for its order and becomes the program. Returns where and why it couldn't, or that there is no order to come.
fn become_program(pad: &Pad) -> Result<(), (Step, i32)> {
    let at = |step: Step| move |errno: i32| (step, errno);
    take_groups(&pad.dress).map_err(at(Step::Setup))?;
    leave(pad.socket).map_err(at(Step::Setup))?;
    let Some(order) = receive(pad).map_err(at(Step::Setup))? else { return Ok(()) };
    take_off(&pad.dress, &order).map_err(at(Step::Setup))?;
    call(libc::SYS_chdir, [order.cwd().as_ptr() as usize, 0, 0]).map_err(at(Step::WorkingDirectory))?;
    // Blocked until here, so that nobody's signal meets a process in its parent's memory. What came while it waited was not for the program.
    let (everything, no_time) = (u64::MAX, [0i64; 2]);
    let next = [ptr::from_ref(&everything) as usize, 0, ptr::from_ref(&no_time) as usize, size_of::<u64>(), 0, 0];
    // SAFETY: the set is one word, as its size says, and the time two.
    while unsafe { syscall(libc::SYS_rt_sigtimedwait, next) } > 0 {}
    let nothing = 0u64;
    let unblock = [libc::SIG_SETMASK as usize, ptr::from_ref(&nothing) as usize, 0, size_of::<u64>(), 0, 0];
    // SAFETY: the set is one word, as its size says.
    unsafe { syscall(libc::SYS_rt_sigprocmask, unblock) };
    let errno = match order.path() {
        None => exec(order.name(), &order),
        Some(path) => exec_along(path, &order),
    };
    Err((Step::Program, errno))
}

/// Takes leave of all descriptors of the parent, its own copy of the socket's other end among them, and of its session; then says its
/// own number.
fn leave(socket: RawFd) -> Result<(), i32> {
    let socket = socket as usize;
    call(libc::SYS_close_range, [0, socket - 1, 0])?;
    call(libc::SYS_close_range, [socket + 1, u32::MAX as usize, 0])?;
    call(libc::SYS_setsid, [0; 3])?;
    call(libc::SYS_umask, [0o022, 0, 0])?;
    let pid = call(libc::SYS_getpid, [0; 3])? as i32;
    send(socket as RawFd, &pid.to_le_bytes()).map(drop)
}

/// The order, and with it standard I/O, which gets the numbers 0, 1 and 2 because they are free. `None` when nobody is left to give one.
fn receive(pad: &Pad) -> Result<Option<Laid<'_>>, i32> {
    // SAFETY: this process alone uses the room of its pad.
    let room = unsafe { &mut *pad.room.get() };
    let mut control = Control { header: Control::HEADER, fds: [-1; STDIO + 1] };
    let mut parts = libc::iovec { iov_base: room.as_mut_ptr().cast(), iov_len: size_of_val(room) };
    // SAFETY: all zeroes is an empty message.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut parts;
    message.msg_iovlen = 1;
    message.msg_control = (&raw mut control).cast();
    message.msg_controllen = size_of::<Control>();
    let bytes = call(libc::SYS_recvmsg, [pad.socket as usize, &raw mut message as usize, 0])? as usize;
    if bytes == 0 {
        return Ok(None);
    }
    let is_whole = message.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) == 0;
    if !is_whole || control.fds[..STDIO] != [0, 1, 2] {
        return Err(libc::EBADF);
    }
    let laid = match control.fds[STDIO] {
        -1 => Laid::new(room, bytes),
        file => {
            // The packet says how long the order in the file is.
            let bytes = room[0] as usize;
            let at = map(pad, file as usize, bytes)?;
            // SAFETY: mapped just now, page-aligned, and known to nobody else until this process is gone; a page ends behind what is in
            // the file.
            Laid::new(unsafe { std::slice::from_raw_parts_mut(at, bytes.div_ceil(size_of::<u64>())) }, bytes)
        }
    };
    laid.ok_or(libc::EINVAL).map(Some)
}

/// A long order's memory, which its parent lets go of.
fn map(pad: &Pad, file: usize, bytes: usize) -> Result<*mut u64, i32> {
    let (read_write, private) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE);
    // SAFETY: a new mapping takes nothing from anybody.
    let at = unsafe { syscall(libc::SYS_mmap, [0, bytes, read_write as usize, private as usize, file, 0]) };
    if at < 0 {
        return Err(-at as i32);
    }
    pad.mapped[1].store(bytes, Ordering::Release);
    pad.mapped[0].store(at as usize, Ordering::Release);
    call(libc::SYS_close, [file, 0, 0])?;
    Ok(at as *mut u64)
}

/// Room for one control message: standard I/O, and a memory file.
#[repr(C)]
struct Control {
    header: libc::cmsghdr,
    fds: [RawFd; STDIO + 1],
}

impl Control {
    const HEADER: libc::cmsghdr = libc::cmsghdr { cmsg_len: 0, cmsg_level: 0, cmsg_type: 0 };
}

/// The number of bytes sent.
fn send(socket: RawFd, bytes: &[u8]) -> Result<isize, i32> {
    let args = [socket as usize, bytes.as_ptr() as usize, bytes.len(), libc::MSG_NOSIGNAL as usize, 0, 0];
    // SAFETY: the bytes outlive the call.
    answered(unsafe { syscall(libc::SYS_sendto, args) })
}

/// Returns only when none of them could be run, and why.
fn exec_along(path: &[u8], order: &Laid<'_>) -> i32 {
    let mut worst = libc::ENOENT;
    let mut place = [0; MAX_PATH_BYTES];
    let name = order.name();
    for directory in path.split(|byte| matches!(*byte, b':' | 0)).filter(|directory| !directory.is_empty()) {
        if directory.len().saturating_add(name.len()) > MAX_PATH_BYTES - 1 {
            continue;
        }
        // The name brings its NUL.
        for (to, from) in place.iter_mut().zip(directory.iter().chain(b"/").chain(name)) {
            *to = *from;
        }
        let errno = exec(&place, order);
        // "Found but not allowed" says more than "not found in the last directory".
        if errno != libc::ENOENT && errno != libc::ENOTDIR {
            worst = errno;
        }
    }
    worst
}

/// The place ends with its first NUL. Returns only when that failed, and why.
fn exec(place: &[u8], order: &Laid<'_>) -> i32 {
    let (argv, env) = order.pointers();
    call(libc::SYS_execve, [place.as_ptr() as usize, argv as usize, env as usize]).err().unwrap_or(0)
}

/// The groups of the program, while there is time: it is by the user alone that others may touch a process.
fn take_groups(dress: &Dress) -> Result<(), i32> {
    if dress.has_groups {
        call(libc::SYS_setgroups, [1, ptr::from_ref(&dress.gid) as usize, 0])?;
    }
    call(libc::SYS_setresgid, [dress.gid as usize; 3])?;
    hide_memory()
}

/// Takes off everything else of the parent.
fn take_off(dress: &Dress, order: &Laid<'_>) -> Result<(), i32> {
    if dress.has_marks {
        let mark = libc::rlimit { rlim_cur: order.mark, rlim_max: order.mark };
        let [a, b] = dress.word.0;
        let args = [0, libc::RLIMIT_LOCKS as usize, ptr::from_ref(&mark) as usize, 0, a as usize, b as usize];
        // SAFETY: the structure outlives the call, which only reads it.
        answered(unsafe { syscall(libc::SYS_prlimit64, args) })?;
    }
    if order.is_terminal {
        call(libc::SYS_ioctl, [0, libc::TIOCSCTTY as usize, 0])?;
    }
    call(libc::SYS_setresuid, [dress.uid as usize; 3])?;
    hide_memory()?;
    let header = CapabilityHeader { version: CAPABILITY_VERSION, pid: 0 };
    let none = [[0u32; 3]; 2];
    call(libc::SYS_capset, [ptr::from_ref(&header) as usize, ptr::from_ref(&none) as usize, 0])?;
    Ok(())
}

/// Changing ids may have made this memory, which is the parent's, somebody else's to look at.
fn hide_memory() -> Result<(), i32> {
    call(libc::SYS_prctl, [libc::PR_SET_DUMPABLE as usize, 0, 0]).map(drop)
}

#[repr(C)]
struct CapabilityHeader {
    version: u32,
    pid: libc::c_int,
}
const CAPABILITY_VERSION: u32 = 0x2008_0522;

fn call(number: libc::c_long, [a, b, c]: [usize; 3]) -> Result<isize, i32> {
    // SAFETY: each call above names memory of the pad or of its own frame, which outlive it.
    answered(unsafe { syscall(number, [a, b, c, 0, 0, 0]) })
}

fn answered(answer: isize) -> Result<isize, i32> {
    match answer {
        0.. => Ok(answer),
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
