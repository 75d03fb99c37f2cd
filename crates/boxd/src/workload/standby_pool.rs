//! The pool of standby processes. Some are kept ready, so that most programs start without creating a process first.

use std::{collections::VecDeque, io, os::fd::OwnedFd};

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::oneshot;

use super::{
    WorkloadState, init_exited,
    messages::{self, Order},
    stdio::{Stdio, StdioEnds},
};

/// Standby processes to keep ready: one for the next program, and one for a program that starts before the first is
/// replaced. Each takes about 40 KiB of kernel memory.
const TARGET_READY: usize = 2;
/// More than `TARGET_READY` can become ready if their requesters have gone. Beyond this number the oldest are ended.
const MAX_READY: usize = 4;

/// A standby process, reached through its socket. Dropping this ends it.
pub struct StandbyProcess {
    /// The pid for boxd, and the pid in the sandbox.
    pub pid: i32,
    pub sandbox_pid: i32,
    pub socket: OwnedFd,
    /// Standard I/O as most programs need it, opened in advance.
    pub ends: Option<StdioEnds>,
}

#[derive(Default)]
pub struct StandbyPool(Mutex<PoolState>);

#[derive(Default)]
struct PoolState {
    /// Newest first.
    ready: VecDeque<StandbyProcess>,
    waiting: VecDeque<oneshot::Sender<io::Result<StandbyProcess>>>,
    /// Number requested from the spawner without an answer yet.
    requested: usize,
}

impl PoolState {
    /// How many to request so that `target` remain after all waiting requests are served.
    fn shortfall(&self, target: usize) -> usize {
        (self.waiting.len() + target).saturating_sub(self.ready.len() + self.requested)
    }
}

impl StandbyPool {
    fn state(&self) -> MutexGuard<'_, PoolState> {
        self.0.lock()
    }

    /// Adds a new standby process: for the longest-waiting request, or else for the next.
    fn add(&self, mut standby: StandbyProcess) {
        let mut state = self.state();
        state.requested = state.requested.saturating_sub(1);
        state.waiting.retain(|requester| !requester.is_closed());
        if let Some(first) = state.waiting.pop_front() {
            // If the receiver has just gone, the dropped process ends.
            return drop(first.send(Ok(standby)));
        }
        // On failure the requester opens these itself and sees the error.
        standby.ends = StdioEnds::open(Stdio::Pipes { stdin: false }).ok();
        state.ready.push_front(standby);
        state.ready.truncate(MAX_READY);
    }

    /// Reports to all waiting requests why a standby process could not be created.
    pub fn fail_requests(&self, errno: i32) {
        let mut state = self.state();
        state.requested = state.requested.saturating_sub(1);
        for requester in state.waiting.drain(..) {
            // An error means that the requester has gone.
            let _ = requester.send(Err(io::Error::from_raw_os_error(errno)));
        }
    }

    /// Removes an ended child if it was a ready one: where programs run as the same user as standby processes, they can
    /// end them.
    pub fn remove(&self, pid: i32) {
        self.state().ready.retain(|standby| standby.pid != pid);
    }

    /// Fails all waiting requests, because the spawner has exited.
    pub fn clear(&self) {
        *self.state() = PoolState::default();
    }
}

impl WorkloadState {
    /// A ready standby process, or the next one that is created.
    pub async fn take_standby(&self) -> io::Result<StandbyProcess> {
        let created = {
            let mut state = self.standby_pool.state();
            if let Some(standby) = state.ready.pop_front() {
                return Ok(standby);
            }
            let (sender, created) = oneshot::channel();
            state.waiting.push_back(sender);
            created
        };
        self.replenish_standby();
        created.await.unwrap_or_else(|_| Err(init_exited()))
    }

    pub fn standby_created(&self, standby: StandbyProcess) {
        self.standby_pool.add(standby);
        // Requests more for those waiting whose request could not be sent before. Replenishing the pool is left to
        // `replenish_standby`.
        self.request_standby(0);
    }

    /// Requests as many as should be ready. None are kept ready where init checks the programs' memory, because they
    /// would keep it checking permanently.
    pub fn replenish_standby(&self) {
        self.request_standby(if self.init_checks_memory { 0 } else { TARGET_READY });
    }

    fn request_standby(&self, target: usize) {
        let mut state = self.standby_pool.state();
        for _ in 0..state.shortfall(target) {
            // If the socket buffer is full, the next new process triggers another request for those that wait. If the
            // spawner has exited, everything ends.
            if messages::send(self.spawner.get_ref(), &Order::CreateStandby, &[]).is_err() {
                return;
            }
            state.requested += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, recv, socketpair};

    use super::*;

    /// Adds a standby process and returns its end of the socket.
    fn add_standby(pool: &StandbyPool) -> OwnedFd {
        let (boxd_end, child_end) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        pool.add(StandbyProcess { pid: 1, sandbox_pid: 1, socket: boxd_end, ends: None });
        child_end
    }

    fn has_ended(child_end: &OwnedFd) -> bool {
        matches!(recv(child_end, &mut [0u8; 1], RecvFlags::DONTWAIT), Ok((_, 0)))
    }

    #[tokio::test]
    async fn surplus_standby_processes_are_ended() {
        let pool = StandbyPool::default();
        let all: Vec<_> = (0..MAX_READY + 2).map(|_| add_standby(&pool)).collect();
        let ended: Vec<bool> = all.iter().map(has_ended).collect();
        assert_eq!(ended, [[true; 2].as_slice(), &[false; MAX_READY]].concat(), "the oldest processes are ended");
        pool.clear();
        assert!(all.iter().all(has_ended));
    }

    #[tokio::test]
    async fn a_standby_process_that_was_killed_leaves_the_pool() {
        let pool = StandbyPool::default();
        let child_end = add_standby(&pool);
        pool.remove(2);
        assert_eq!(pool.state().shortfall(TARGET_READY), TARGET_READY - 1);
        pool.remove(1);
        assert!(has_ended(&child_end));
        assert_eq!(pool.state().shortfall(TARGET_READY), TARGET_READY);
    }

    #[tokio::test]
    async fn a_new_standby_process_serves_the_longest_waiting_request_and_ends_if_the_requester_is_gone() {
        let pool = StandbyPool::default();
        let request = || {
            let (sender, created) = oneshot::channel();
            pool.state().waiting.push_back(sender);
            created
        };
        let (dropped, served, late) = (request(), request(), request());
        drop(dropped);
        let child_end = add_standby(&pool);
        let standby = served.await.unwrap().unwrap();
        assert!(!has_ended(&child_end));
        drop(standby);
        assert!(has_ended(&child_end));
        let child_end = add_standby(&pool);
        drop(late);
        assert!(has_ended(&child_end));
        let failed = request();
        pool.fail_requests(libc::EAGAIN);
        assert_eq!(failed.await.unwrap().err().unwrap().raw_os_error(), Some(libc::EAGAIN));
    }

    #[test]
    fn the_pool_requests_what_waiting_callers_and_its_target_need_beyond_ready_and_requested_ones() {
        let pool = StandbyPool::default();
        let shortfall = |target| pool.state().shortfall(target);
        assert_eq!(shortfall(TARGET_READY), TARGET_READY);
        let requests: Vec<_> = (0..3).map(|_| oneshot::channel()).collect();
        let _pending: Vec<_> = requests.into_iter().map(|(sender, created)| (pool.state().waiting.push_back(sender), created)).collect();
        pool.state().requested = 3;
        assert_eq!([shortfall(0), shortfall(TARGET_READY)], [0, TARGET_READY]);
        let _ends = [add_standby(&pool), add_standby(&pool)];
        assert_eq!([shortfall(0), shortfall(TARGET_READY)], [0, TARGET_READY], "one is waiting, and one is starting");
        pool.fail_requests(libc::EAGAIN);
        assert_eq!([shortfall(0), shortfall(TARGET_READY)], [0, TARGET_READY], "no request waits any more");
        let _end = add_standby(&pool);
        assert_eq!(shortfall(TARGET_READY), TARGET_READY - 1);
    }
}
