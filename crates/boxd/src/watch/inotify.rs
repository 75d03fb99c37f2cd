//! The inotify instance: one for all of boxd, with a limited number of watched directories, each added through its
//! descriptor.

use std::{
    collections::HashMap,
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::{
    fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags},
    io::Errno,
};

/// Size of one read: about two thousand events.
const BUFFER_BYTES: usize = 64 * 1024;
/// The events requested for each directory.
const EVENTS: WatchFlags = WatchFlags::CREATE
    .union(WatchFlags::DELETE)
    .union(WatchFlags::MODIFY)
    .union(WatchFlags::ATTRIB)
    .union(WatchFlags::MOVED_FROM)
    .union(WatchFlags::MOVED_TO)
    .union(WatchFlags::DELETE_SELF)
    .union(WatchFlags::MOVE_SELF)
    .union(WatchFlags::ONLYDIR)
    .union(WatchFlags::DONT_FOLLOW)
    .union(WatchFlags::EXCL_UNLINK);

pub struct Inotify {
    fd: OwnedFd,
    /// Number of trees that use each watch.
    users: HashMap<i32, u32>,
    limit: usize,
    /// The kernel has reported that its limit is reached.
    is_exhausted: bool,
}

pub enum AddError {
    Limit(String),
    Refused(Errno),
}

impl Inotify {
    pub fn new(limit: u32) -> Result<Self, Errno> {
        let fd = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        Ok(Self { fd, users: HashMap::new(), limit: limit as usize, is_exhausted: false })
    }

    /// How many more directories can be watched.
    pub fn remaining(&self) -> usize {
        if self.is_exhausted { 0 } else { self.limit.saturating_sub(self.users.len()) }
    }

    pub fn limit_message(&self) -> String {
        let why =
            if self.is_exhausted { "the kernel's watch limit for this sandbox is reached" } else { "the limit for one watch is reached" };
        format!("{} directories are watched, and {why}; changes in other directories are not reported", self.users.len())
    }

    /// Watches a directory. Without /proc a descriptor has no path, so this thread changes to the directory and watches
    /// `.`.
    pub fn add(&mut self, directory: &OwnedFd) -> Result<i32, AddError> {
        if self.remaining() == 0 {
            return Err(AddError::Limit(self.limit_message()));
        }
        rustix::process::fchdir(directory).map_err(AddError::Refused)?;
        match inotify::add_watch(&self.fd, ".", EVENTS) {
            Ok(wd) => {
                *self.users.entry(wd).or_default() += 1;
                Ok(wd)
            }
            Err(Errno::NOSPC | Errno::NOMEM) => {
                self.is_exhausted = true;
                Err(AddError::Limit(self.limit_message()))
            }
            Err(e) => Err(AddError::Refused(e)),
        }
    }

    pub fn release(&mut self, wd: i32) {
        let Some(users) = self.users.get_mut(&wd) else { return };
        *users -= 1;
        if *users == 0 {
            self.users.remove(&wd);
            self.is_exhausted = false;
            // Fails if the kernel has already removed the watch because the directory is gone.
            let _ = inotify::remove_watch(&self.fd, wd);
        }
    }

    /// Reads events until none are left or the buffer is used up.
    pub fn read(&self) -> Vec<InotifyEvent> {
        let mut buffer = vec![MaybeUninit::uninit(); BUFFER_BYTES];
        let mut reader = Reader::new(&self.fd, &mut buffer);
        let mut events = Vec::new();
        // Fails when there are no more events; the caller then polls.
        while let Ok(event) = reader.next() {
            let name = event.file_name().map(|n| n.to_bytes().to_vec());
            events.push(InotifyEvent { wd: event.wd(), flags: event.events(), cookie: event.cookie(), name });
            if reader.is_buffer_empty() {
                break;
            }
        }
        events
    }
}

impl AsFd for Inotify {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

pub struct InotifyEvent {
    pub wd: i32,
    pub flags: ReadFlags,
    pub cookie: u32,
    pub name: Option<Vec<u8>>,
}
