//! Standby processes: processes that are created in advance and become programs on request. A standby process is cloned
//! from a small process without copying its memory (`CLONE_VM`), runs in that memory until it executes its program, and
//! gets its order directly from the process that needs the program. Most of the work of starting a program is thus done
//! before it is needed.

use std::{
    cell::UnsafeCell,
    io,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
    ptr,
    sync::atomic::{AtomicI32, AtomicUsize, Ordering},
};

use crate::{LimitSecret, check, exec_order::EncodedOrder, raw_syscall::syscall};

/// Enough for a few calls with small frames, also in unoptimized builds.
const STACK_BYTES: usize = 64 * 1024;
/// The kernel's limit on a path, including its NUL.
const MAX_PATH_BYTES: usize = 4096;
/// Maximum size of an order that is sent in the packet itself. A longer one is sent in a memory file. Most orders are
/// below 2 KiB.
pub const MAX_INLINE_BYTES: usize = 16 * 1024;
/// Number of descriptors for standard input, output and error.
const STDIO: usize = 3;
/// Lowest descriptor number that a standby process may use for its socket. The numbers below are reserved for the
/// descriptors that arrive with the order.
pub const FIRST_SOCKET: RawFd = STDIO as RawFd + 1;

/// The step at which starting a program failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum StartStep {
    Setup = 1,
    WorkingDirectory = 2,
    Program = 3,
}

impl StartStep {
    pub fn from_number(number: u8) -> Option<Self> {
        [StartStep::Setup, StartStep::WorkingDirectory, StartStep::Program].into_iter().find(|step| *step as u8 == number)
    }
}

/// The ids and limits of every program, which is started without any capability.
#[derive(Clone, Copy)]
pub struct Credentials {
    pub uid: u32,
    pub gid: u32,
    /// False in a user namespace with a single id, where groups can't be set.
    pub has_groups: bool,
    /// Whether programs are marked, so that their descendants can be found; see [`crate::mark_of`].
    pub has_marks: bool,
    pub limit_secret: LimitSecret,
}

/// The memory that a standby process works in. It must not change until that process has executed its program or has
/// ended.
pub struct ChildMemory {
    stack: Stack,
    credentials: Credentials,
    socket: RawFd,
    /// Not 0 while the process uses this memory. The kernel clears it.
    is_in_use: AtomicI32,
    /// Address and length of the mapping of a long order; 0 if there is none.
    mapped: [AtomicUsize; 2],
    /// The order. Only the process writes to it.
    inline_order: UnsafeCell<[u64; MAX_INLINE_BYTES / size_of::<u64>()]>,
}

impl ChildMemory {
    pub fn new(credentials: Credentials) -> io::Result<Box<Self>> {
        Ok(Box::new(Self {
            stack: Stack::new()?,
            credentials,
            socket: -1,
            is_in_use: AtomicI32::new(0),
            mapped: [AtomicUsize::new(0), AtomicUsize::new(0)],
            inline_order: UnsafeCell::new([0; _]),
        }))
    }

    pub fn is_free(&self) -> bool {
        self.is_in_use.load(Ordering::Acquire) == 0
    }

    /// Creates a standby process as a child of this process's parent, and returns its pid and a pidfd. The process
    /// waits at its end of a packet socket: it sends the pid that it has in its own namespace, then receives its order
    /// (an encoded [`crate::Program`], with the descriptors of standard I/O and, if the order is in a memory file, the
    /// descriptor of that file). It then either executes the program, which closes the socket, or sends the failed step
    /// with the error number and ends. It also ends when all copies of the other end are closed.
    ///
    /// # Safety
    /// The process must have only one thread, its descriptors from 3 on must be close-on-exec, and its signal actions
    /// must be those that programs should have.
    /// This memory must not be dropped or used again before [`ChildMemory::is_free`] returns true.
    pub unsafe fn spawn(&mut self, socket: BorrowedFd<'_>) -> io::Result<(i32, OwnedFd)> {
        self.release_order();
        self.socket = socket.as_raw_fd();
        if self.socket < FIRST_SOCKET {
            return Err(io::Error::from_raw_os_error(libc::EBADF));
        }
        self.is_in_use.store(1, Ordering::Release);
        let flags = libc::CLONE_VM | libc::CLONE_PARENT | libc::CLONE_PIDFD | libc::CLONE_CHILD_CLEARTID | libc::SIGCHLD;
        let (mut handle, cleared) = (-1, self.is_in_use.as_ptr());
        // SAFETY: the child runs `child_main` on its own stack with this memory, which the caller keeps for it. The
        // child only makes system calls, and none of them through the C library. So everything that it shares with the
        // parent is in this memory, which doesn't change until then.
        let pid = unsafe {
            let memory = ptr::from_mut(self).cast();
            libc::clone(child_main, self.stack.top(), flags, memory, &raw mut handle, ptr::null_mut::<libc::c_void>(), cleared)
        };
        match check(pid.into()) {
            // SAFETY: the kernel has just created this descriptor for us.
            Ok(pid) => Ok((pid as i32, unsafe { OwnedFd::from_raw_fd(handle) })),
            Err(error) => {
                self.is_in_use.store(0, Ordering::Release);
                Err(error)
            }
        }
    }

    /// Unmaps the long order of a process that has executed its program.
    pub fn release_order(&mut self) {
        let [at, bytes] = [&self.mapped[0], &self.mapped[1]].map(|part| part.load(Ordering::Acquire));
        if self.is_free() && at != 0 {
            // SAFETY: mapped by the process that used this memory and has left it; nothing else uses the mapping.
            unsafe { libc::munmap(at as *mut libc::c_void, bytes) };
            self.mapped[0].store(0, Ordering::Release);
        }
    }
}

impl Drop for ChildMemory {
    fn drop(&mut self) {
        self.release_order();
    }
}

/// The first and last function of the new process. It must not allocate, call the C library or panic.
extern "C" fn child_main(memory: *mut libc::c_void) -> libc::c_int {
    // SAFETY: `spawn` was given this memory, and it stays unchanged until this process has left it.
    let memory = unsafe { &*memory.cast::<ChildMemory>() };
    let (step, errno) = match become_program(memory) {
        Err(failure) => failure,
        // The other end of the socket is closed, so no order will come.
        Ok(()) => (StartStep::Setup, 0),
    };
    let e = errno.to_le_bytes();
    let report = [step as u8, e[0], e[1], e[2], e[3]];
    if errno != 0 {
        // Ignored: a failure means that no process is left to receive the report.
        let _ = send(memory.socket, &report);
    }
    loop {
        let _ = call(libc::SYS_exit_group, [NOT_STARTED_EXIT_CODE, 0, 0]);
    }
}
/// Exit code of a process that could not become its program, as in a shell.
const NOT_STARTED_EXIT_CODE: usize = 126;

/// Waits for the order and becomes the program. Returns the failed step with its error number, or `Ok` if no order will
/// come.
fn become_program(memory: &ChildMemory) -> Result<(), (StartStep, i32)> {
    let at = |step: StartStep| move |errno: i32| (step, errno);
    set_groups(&memory.credentials).map_err(at(StartStep::Setup))?;
    detach_from_parent(memory.socket).map_err(at(StartStep::Setup))?;
    let Some(order) = receive_order(memory).map_err(at(StartStep::Setup))? else { return Ok(()) };
    drop_privileges(&memory.credentials, &order).map_err(at(StartStep::Setup))?;
    call(libc::SYS_chdir, [order.cwd().as_ptr() as usize, 0, 0]).map_err(at(StartStep::WorkingDirectory))?;
    // Signals were blocked until here so that none could hit a process that runs in its parent's memory. Signals that
    // arrived before were not meant for the program and are discarded.
    let (everything, no_time) = (u64::MAX, [0i64; 2]);
    let next = [ptr::from_ref(&everything) as usize, 0, ptr::from_ref(&no_time) as usize, size_of::<u64>(), 0, 0];
    // SAFETY: the set is one word, as its size says, and the time two words.
    while unsafe { syscall(libc::SYS_rt_sigtimedwait, next) } > 0 {}
    let nothing = 0u64;
    let unblock = [libc::SIG_SETMASK as usize, ptr::from_ref(&nothing) as usize, 0, size_of::<u64>(), 0, 0];
    // SAFETY: the set is one word, as its size says.
    unsafe { syscall(libc::SYS_rt_sigprocmask, unblock) };
    let errno = match order.path() {
        None => exec(order.name(), &order),
        Some(search_path) => exec_in_path(search_path, &order),
    };
    Err((StartStep::Program, errno))
}

/// Closes all descriptors inherited from the parent, including this process's copy of the socket's other end, starts a
/// new session, and sends its own pid.
fn detach_from_parent(socket: RawFd) -> Result<(), i32> {
    let socket = socket as usize;
    call(libc::SYS_close_range, [0, socket - 1, 0])?;
    call(libc::SYS_close_range, [socket + 1, u32::MAX as usize, 0])?;
    call(libc::SYS_setsid, [0; 3])?;
    call(libc::SYS_umask, [0o022, 0, 0])?;
    let pid = call(libc::SYS_getpid, [0; 3])? as i32;
    send(socket as RawFd, &pid.to_le_bytes()).map(drop)
}

/// Receives the order and standard I/O, whose descriptors get the numbers 0, 1 and 2 because these are free. `None` if
/// the other end is closed.
fn receive_order(memory: &ChildMemory) -> Result<Option<EncodedOrder<'_>>, i32> {
    // SAFETY: only this process uses this buffer of its memory.
    let inline_order = unsafe { &mut *memory.inline_order.get() };
    let mut control = Control { header: Control::HEADER, fds: [-1; STDIO + 1] };
    let mut parts = libc::iovec { iov_base: inline_order.as_mut_ptr().cast(), iov_len: size_of_val(inline_order) };
    // SAFETY: all zeroes is a valid, empty message.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut parts;
    message.msg_iovlen = 1;
    message.msg_control = (&raw mut control).cast();
    message.msg_controllen = size_of::<Control>();
    let bytes = call(libc::SYS_recvmsg, [memory.socket as usize, &raw mut message as usize, 0])? as usize;
    if bytes == 0 {
        return Ok(None);
    }
    let is_whole = message.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) == 0;
    if !is_whole || control.fds[..STDIO] != [0, 1, 2] {
        return Err(libc::EBADF);
    }
    let order = match control.fds[STDIO] {
        -1 => EncodedOrder::new(inline_order, bytes),
        file => {
            // The packet contains the length of the order in the file.
            let bytes = inline_order[0] as usize;
            let at = map_order(memory, file as usize, bytes)?;
            // SAFETY: mapped just now, page-aligned, and unknown to other code until this process is gone. The mapping
            // extends to the end of the last page that the file reaches.
            EncodedOrder::new(unsafe { std::slice::from_raw_parts_mut(at, bytes.div_ceil(size_of::<u64>())) }, bytes)
        }
    };
    order.ok_or(libc::EINVAL).map(Some)
}

/// Maps a long order. The parent unmaps it.
fn map_order(memory: &ChildMemory, file: usize, bytes: usize) -> Result<*mut u64, i32> {
    let (read_write, private) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE);
    // SAFETY: a new mapping doesn't affect existing memory.
    let at = unsafe { syscall(libc::SYS_mmap, [0, bytes, read_write as usize, private as usize, file, 0]) };
    if at < 0 {
        return Err(-at as i32);
    }
    memory.mapped[1].store(bytes, Ordering::Release);
    memory.mapped[0].store(at as usize, Ordering::Release);
    call(libc::SYS_close, [file, 0, 0])?;
    Ok(at as *mut u64)
}

/// Buffer for one control message with standard I/O and a memory file.
#[repr(C)]
struct Control {
    header: libc::cmsghdr,
    fds: [RawFd; STDIO + 1],
}

impl Control {
    const HEADER: libc::cmsghdr = libc::cmsghdr { cmsg_len: 0, cmsg_level: 0, cmsg_type: 0 };
}

/// Returns the number of bytes sent.
fn send(socket: RawFd, bytes: &[u8]) -> Result<isize, i32> {
    let args = [socket as usize, bytes.as_ptr() as usize, bytes.len(), libc::MSG_NOSIGNAL as usize, 0, 0];
    // SAFETY: the bytes outlive the call.
    to_result(unsafe { syscall(libc::SYS_sendto, args) })
}

/// Tries each directory of a search path. Returns only if no program could be executed, with the error number.
fn exec_in_path(search_path: &[u8], order: &EncodedOrder<'_>) -> i32 {
    let mut worst = libc::ENOENT;
    let mut path = [0; MAX_PATH_BYTES];
    let name = order.name();
    for directory in search_path.split(|byte| matches!(*byte, b':' | 0)).filter(|directory| !directory.is_empty()) {
        if directory.len().saturating_add(name.len()) > MAX_PATH_BYTES - 1 {
            continue;
        }
        // The name includes its NUL.
        for (to, from) in path.iter_mut().zip(directory.iter().chain(b"/").chain(name)) {
            *to = *from;
        }
        let errno = exec(&path, order);
        // "Found but not permitted" is more useful than "not found in the last directory".
        if errno != libc::ENOENT && errno != libc::ENOTDIR {
            worst = errno;
        }
    }
    worst
}

/// Executes the file at a path that ends with the first NUL. Returns only on failure, with the error number.
fn exec(path: &[u8], order: &EncodedOrder<'_>) -> i32 {
    let (argv, env) = order.pointers();
    call(libc::SYS_execve, [path.as_ptr() as usize, argv as usize, env as usize]).err().unwrap_or(0)
}

/// Sets the program's groups in advance, while there is time. The user is set last, because it alone decides whether
/// other processes may signal or trace this one.
fn set_groups(credentials: &Credentials) -> Result<(), i32> {
    if credentials.has_groups {
        call(libc::SYS_setgroups, [1, ptr::from_ref(&credentials.gid) as usize, 0])?;
    }
    call(libc::SYS_setresgid, [credentials.gid as usize; 3])?;
    hide_memory()
}

/// Drops everything else that was inherited from the parent: limits, user and capabilities.
fn drop_privileges(credentials: &Credentials, order: &EncodedOrder<'_>) -> Result<(), i32> {
    if credentials.has_marks {
        let mark = libc::rlimit { rlim_cur: order.mark, rlim_max: order.mark };
        let [a, b] = credentials.limit_secret.0;
        let args = [0, libc::RLIMIT_LOCKS as usize, ptr::from_ref(&mark) as usize, 0, a as usize, b as usize];
        // SAFETY: the structure outlives the call, which only reads it.
        to_result(unsafe { syscall(libc::SYS_prlimit64, args) })?;
    }
    if order.is_terminal {
        call(libc::SYS_ioctl, [0, libc::TIOCSCTTY as usize, 0])?;
    }
    call(libc::SYS_setresuid, [credentials.uid as usize; 3])?;
    hide_memory()?;
    let header = CapabilityHeader { version: CAPABILITY_VERSION, pid: 0 };
    let none = [[0u32; 3]; 2];
    call(libc::SYS_capset, [ptr::from_ref(&header) as usize, ptr::from_ref(&none) as usize, 0])?;
    Ok(())
}

/// Makes this memory undumpable again. Changing ids may have made it, and so the parent's memory, readable for other
/// users.
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
    // SAFETY: each call above refers to this process's memory block or its own stack frame, which both outlive the
    // call.
    to_result(unsafe { syscall(number, [a, b, c, 0, 0, 0]) })
}

fn to_result(answer: isize) -> Result<isize, i32> {
    match answer {
        0.. => Ok(answer),
        error => Err(-error as i32),
    }
}

/// A stack in its own mapping. Its lowest page is a guard page.
struct Stack(*mut libc::c_void);

impl Stack {
    fn new() -> io::Result<Self> {
        let (read_write, private) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_STACK);
        // SAFETY: a new mapping doesn't affect existing memory.
        let base = unsafe { libc::mmap(ptr::null_mut(), STACK_BYTES, read_write, private, -1, 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let stack = Self(base);
        // SAFETY: the first page of the mapping above.
        check(unsafe { libc::mprotect(base, rustix::param::page_size(), libc::PROT_NONE) }.into())?;
        Ok(stack)
    }

    /// The address at which the stack begins: stacks grow down.
    fn top(&self) -> *mut libc::c_void {
        // SAFETY: one past the end of the mapping.
        unsafe { self.0.byte_add(STACK_BYTES) }
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and the callers of `spawn` promised that no process still uses it.
        unsafe { libc::munmap(self.0, STACK_BYTES) };
    }
}
