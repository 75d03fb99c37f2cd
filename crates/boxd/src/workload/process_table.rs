//! Tracks running programs and the pending orders about them. An ended program is reaped, which frees its pid, only
//! when no pending order of init refers to that pid.

use std::{collections::HashMap, os::fd::OwnedFd, sync::Arc};

use cobox_kernel::{EndedChild, ended_child};
use rustix::net::{RecvFlags, recv};
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::{oneshot, watch},
};

use super::{Exit, WorkloadState};

/// Exit code of a standby process that could not execute its program.
const NOT_STARTED: i32 = 126;

#[derive(Clone, Copy, Debug)]
pub enum ProcessOutcome {
    Exited(Exit),
    NotStarted { step: u8, errno: i32 },
}

/// A standby process that has received its order.
pub struct RunningProgram {
    /// Sequence number of the program.
    pub seq: u64,
    /// Closes when the program is executed. If that fails, it contains the reason.
    pub socket: Arc<OwnedFd>,
    pub outcome_sender: watch::Sender<Option<ProcessOutcome>>,
    /// Number of pending orders that refer to this program.
    pub pending_orders: usize,
}

/// Running programs by boxd's pid for them, and pending orders by sequence number.
#[derive(Default)]
pub struct ProcessTable {
    running: HashMap<i32, RunningProgram>,
    orders: HashMap<u64, PendingOrder>,
}

struct PendingOrder {
    /// The program that the order refers to by pid.
    pid: Option<i32>,
    completion_sender: oneshot::Sender<()>,
}

impl ProcessTable {
    pub fn add(&mut self, pid: i32, running: RunningProgram) {
        self.running.insert(pid, running);
    }

    /// Registers an order that is about to be sent. Returns whether the order may refer to the program by its pid,
    /// which then stays reserved until the order has been carried out.
    pub fn register_order_for(&mut self, order: u64, (pid, seq): (i32, u64)) -> (bool, oneshot::Receiver<()>) {
        let running = self.running.get_mut(&pid).filter(|running| running.seq == seq);
        let pid = running.map(|running| {
            running.pending_orders += 1;
            pid
        });
        (pid.is_some(), self.register_order(order, pid))
    }

    /// Registers an order that may refer to no program.
    pub fn register_order(&mut self, order: u64, pid: Option<i32>) -> oneshot::Receiver<()> {
        let (completion_sender, completed) = oneshot::channel();
        self.orders.insert(order, PendingOrder { pid, completion_sender });
        completed
    }

    /// An order was carried out, or never will be. Returns whether this has reaped the program that it referred to.
    pub fn complete_order(&mut self, order: u64) -> bool {
        let Some(PendingOrder { pid, completion_sender }) = self.orders.remove(&order) else { return false };
        let mut is_reaped = false;
        if let Some(pid) = pid
            && let Some(running) = self.running.get_mut(&pid)
        {
            running.pending_orders -= 1;
            if let Some(child) = ended_child(Some(pid)) {
                self.report_exit(child);
                is_reaped = self.reap_child(child);
            }
        }
        // Last, so that a caller that waited for a program to be ended finds it ended. Signals have no waiting caller.
        let _ = completion_sender.send(());
        is_reaped
    }

    /// Handles the end of a child: a program, a standby process, or an orphan of a program that became boxd's child.
    fn report_exit(&self, child: EndedChild) {
        let Some(running) = self.running.get(&child.pid) else { return };
        running.outcome_sender.send_if_modified(|outcome| {
            let is_first = outcome.is_none();
            if is_first {
                *outcome = Some(running.outcome(child));
            }
            is_first
        });
    }

    /// Reaps a child whose end has been reported, unless its pid is still needed. Returns whether it was reaped.
    fn reap_child(&mut self, child: EndedChild) -> bool {
        if self.running.get(&child.pid).is_some_and(|running| running.pending_orders > 0) {
            return false;
        }
        self.running.remove(&child.pid);
        cobox_kernel::reap(child);
        true
    }

    /// Reports all programs that have ended. Needed when an unreaped child hides the others from the kernel's "next
    /// ended child".
    fn report_all_exits(&self) {
        for child in self.running.keys().filter_map(|pid| ended_child(Some(*pid))) {
            self.report_exit(child);
        }
    }
}

impl RunningProgram {
    /// Only peeks at the failed step: `Process::begun` may read it too.
    fn outcome(&self, EndedChild { code, signal, .. }: EndedChild) -> ProcessOutcome {
        let mut bytes = [0; 5];
        if code == NOT_STARTED
            && signal.is_none()
            && let Ok((_, 5)) = recv(&*self.socket, &mut bytes, RecvFlags::PEEK | RecvFlags::DONTWAIT)
        {
            let [step, a, b, c, d] = bytes;
            return ProcessOutcome::NotStarted { step, errno: i32::from_le_bytes([a, b, c, d]) };
        }
        ProcessOutcome::Exited(Exit { code, signal })
    }
}

/// Handles every child that ends.
pub async fn reap_ended_children(state: &WorkloadState, children: AsyncFd<OwnedFd>) {
    let mut drained = [0u8; 128];
    loop {
        tokio::select! {
            // A read fails only if there is nothing to read, and then it isn't attempted.
            read = children.async_io(Interest::READABLE, |fd| Ok(rustix::io::read(fd, &mut drained)?)) => if read.is_err() { return },
            () = state.late_reap.notified() => {}
        }
        while let Some(child) = ended_child(None) {
            state.table().report_exit(child);
            state.standby_pool.remove(child.pid);
            // Tasks that wait for this program run first. A program can make any number of its own children orphans and
            // thus children of boxd.
            tokio::task::yield_now().await;
            let mut table = state.table();
            if !table.reap_child(child) {
                table.report_all_exits();
                break;
            }
        }
        state.replenish_standby();
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};

    use rustix::{
        net::{AddressFamily, SendFlags, SocketFlags, SocketType, send, socketpair},
        process::{Pid, test_kill_process},
    };

    use cobox_protocol::control::Workload;
    use parking_lot::Mutex;
    use tokio::sync::Notify;

    use super::{super::standby_pool::StandbyPool, *};

    /// A child, registered as a running program, that ends when its input is closed.
    fn start_child(table: &mut ProcessTable, seq: u64) -> (Child, OwnedFd, watch::Receiver<Option<ProcessOutcome>>) {
        let child = Command::new("sh").args(["-c", "read line; exit 126"]).stdin(Stdio::piped()).spawn().unwrap();
        let (socket, child_end) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        let (outcome_sender, outcome) = watch::channel(None);
        table.add(child.id() as i32, RunningProgram { seq, socket: Arc::new(socket), outcome_sender, pending_orders: 0 });
        (child, child_end, outcome)
    }

    fn close_input_and_wait(child: &mut Child) -> EndedChild {
        drop(child.stdin.take());
        let pid = child.id() as i32;
        loop {
            match ended_child(Some(pid)) {
                Some(ended) => return ended,
                None => std::thread::yield_now(),
            }
        }
    }

    fn is_unreaped(child: &Child) -> bool {
        test_kill_process(Pid::from_raw(child.id() as i32).unwrap()).is_ok()
    }

    /// A sandbox whose init and spawner never answer.
    fn state() -> Arc<WorkloadState> {
        let silent_socket = || {
            let (boxd_end, child_end) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
            std::mem::forget(child_end);
            cobox_kernel::register_fd(boxd_end, Interest::READABLE).unwrap()
        };
        let workload = Workload {
            uid: 0,
            gid: 0,
            user: String::new(),
            home: String::new(),
            work_dir: String::new(),
            uid_count: 1,
            env: cobox_protocol::resources::Env::default(),
        };
        Arc::new(WorkloadState {
            init: silent_socket(),
            spawner: silent_socket(),
            null: std::fs::File::open("/dev/null").unwrap().into(),
            workload,
            init_checks_memory: true,
            seq: 0.into(),
            table: Mutex::default(),
            standby_pool: StandbyPool::default(),
            late_reap: Notify::new(),
            queued_orders: Mutex::default(),
        })
    }

    #[tokio::test]
    async fn a_program_that_is_reaped_late_hides_no_other_ended_program() {
        let state = state();
        let (mut first, _first_socket, _) = start_child(&mut state.table(), 1);
        let (mut second, _second_socket, mut outcome) = start_child(&mut state.table(), 2);
        state.table().register_order_for(10, (first.id() as i32, 1));
        close_input_and_wait(&mut first);
        close_input_and_wait(&mut second);
        let (signals, signal) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::NONBLOCK).unwrap();
        rustix::io::write(&signal, b"a child has ended").unwrap();
        let children = cobox_kernel::register_fd(signals, Interest::READABLE).unwrap();
        let reaping = tokio::spawn({
            let state = state.clone();
            async move { reap_ended_children(&state, children).await }
        });
        outcome.wait_for(Option::is_some).await.unwrap();
        assert!(is_unreaped(&first) && is_unreaped(&second), "the first can't be reaped and hides the second");
        state.complete_order(10);
        assert!(!is_unreaped(&first));
        while is_unreaped(&second) {
            tokio::task::yield_now().await;
        }
        reaping.abort();
    }

    #[test]
    fn a_pid_stays_reserved_while_an_order_refers_to_it() {
        let mut table = ProcessTable::default();
        let (mut child, _socket, outcome) = start_child(&mut table, 5);
        let pid = child.id() as i32;
        assert!(!table.register_order_for(10, (pid, 4)).0, "the id belonged to another process");
        let ((first, _), (second, _)) = (table.register_order_for(11, (pid, 5)), table.register_order_for(12, (pid, 5)));
        assert!(first && second);
        let ended = close_input_and_wait(&mut child);
        table.report_exit(ended);
        assert!(matches!(*outcome.borrow(), Some(ProcessOutcome::Exited(Exit { code: 126, signal: None }))));
        assert!(!table.reap_child(ended) && is_unreaped(&child));
        assert!([11, 11, 10].iter().all(|order| !table.complete_order(*order)));
        assert!(is_unreaped(&child));
        assert!(table.complete_order(12));
        assert!(!is_unreaped(&child), "no order refers to it any more");
        assert!(!table.register_order_for(13, (pid, 5)).0);
    }

    #[test]
    fn a_standby_process_that_could_not_execute_its_program_reports_the_failed_step() {
        let mut table = ProcessTable::default();
        let (mut child, socket, outcome) = start_child(&mut table, 1);
        send(&socket, &[3, 2, 0, 0, 0], SendFlags::empty()).unwrap();
        let ended = close_input_and_wait(&mut child);
        table.report_exit(ended);
        assert!(matches!(*outcome.borrow(), Some(ProcessOutcome::NotStarted { step: 3, errno: libc::ENOENT })));
        assert!(table.reap_child(ended));
    }

    #[test]
    fn an_unreaped_child_does_not_hide_the_exits_of_others() {
        let mut table = ProcessTable::default();
        let (mut first, _first_socket, _) = start_child(&mut table, 1);
        let (mut second, _second_socket, outcome) = start_child(&mut table, 2);
        table.register_order_for(10, (first.id() as i32, 1));
        let ended = close_input_and_wait(&mut first);
        close_input_and_wait(&mut second);
        table.report_exit(ended);
        assert!(!table.reap_child(ended));
        table.report_all_exits();
        assert!(outcome.borrow().is_some());
    }
}
