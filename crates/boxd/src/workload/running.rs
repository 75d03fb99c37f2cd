//! Tracks running programs and the pending orders about them. An ended program is reaped, which frees its pid, only
//! when no pending order of init refers to that pid.

use std::{collections::HashMap, os::fd::OwnedFd, sync::Arc};

use cobox_kernel::{EndedChild, ended_child};
use rustix::net::{RecvFlags, recv};
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::{oneshot, watch},
};

use super::{Exit, Shared};

/// Exit code of a standby process that could not execute its program.
const NOT_STARTED: i32 = 126;

#[derive(Clone, Copy, Debug)]
pub enum End {
    Exited(Exit),
    NotStarted { step: u8, errno: i32 },
}

/// A standby process that has received its order.
pub struct Running {
    /// Sequence number of the program.
    pub seq: u64,
    /// Closes when the program is executed. If that fails, it contains the reason.
    pub socket: Arc<OwnedFd>,
    pub tell: watch::Sender<Option<End>>,
    /// Number of pending orders that refer to this program.
    pub orders: usize,
}

/// Running programs by boxd's pid for them, and pending orders by sequence number.
#[derive(Default)]
pub struct Table {
    running: HashMap<i32, Running>,
    ordered: HashMap<u64, Ordered>,
}

struct Ordered {
    /// The program that the order refers to by pid.
    pid: Option<i32>,
    tell: oneshot::Sender<()>,
}

impl Table {
    pub fn add(&mut self, pid: i32, running: Running) {
        self.running.insert(pid, running);
    }

    /// Registers an order that is about to be sent. Returns whether the order may refer to the program by its pid,
    /// which then stays reserved until the order has been carried out.
    pub fn expect(&mut self, order: u64, (pid, seq): (i32, u64)) -> (bool, oneshot::Receiver<()>) {
        let running = self.running.get_mut(&pid).filter(|running| running.seq == seq);
        let pid = running.map(|running| {
            running.orders += 1;
            pid
        });
        (pid.is_some(), self.order(order, pid))
    }

    /// Registers an order that may refer to no program.
    pub fn order(&mut self, order: u64, pid: Option<i32>) -> oneshot::Receiver<()> {
        let (tell, obeyed) = oneshot::channel();
        self.ordered.insert(order, Ordered { pid, tell });
        obeyed
    }

    /// An order was carried out, or never will be. Returns whether this has reaped the program that it referred to.
    pub fn obeyed(&mut self, order: u64) -> bool {
        let Some(Ordered { pid, tell }) = self.ordered.remove(&order) else { return false };
        let mut is_reaped = false;
        if let Some(pid) = pid
            && let Some(running) = self.running.get_mut(&pid)
        {
            running.orders -= 1;
            if let Some(child) = ended_child(Some(pid)) {
                self.tell(child);
                is_reaped = self.let_go(child);
            }
        }
        // Last, so that a caller that waited for a program to be ended finds it ended. Signals have no waiting caller.
        let _ = tell.send(());
        is_reaped
    }

    /// Handles the end of a child: a program, a standby process, or an orphan of a program that became boxd's child.
    fn tell(&self, child: EndedChild) {
        let Some(running) = self.running.get(&child.pid) else { return };
        running.tell.send_if_modified(|end| {
            let is_news = end.is_none();
            if is_news {
                *end = Some(running.end(child));
            }
            is_news
        });
    }

    /// Reaps a child whose end has been reported, unless its pid is still needed. Returns whether it was reaped.
    fn let_go(&mut self, child: EndedChild) -> bool {
        if self.running.get(&child.pid).is_some_and(|running| running.orders > 0) {
            return false;
        }
        self.running.remove(&child.pid);
        cobox_kernel::reap(child);
        true
    }

    /// Reports all programs that have ended. Needed when an unreaped child hides the others from the kernel's "next
    /// ended child".
    fn tell_of_all(&self) {
        for child in self.running.keys().filter_map(|pid| ended_child(Some(*pid))) {
            self.tell(child);
        }
    }
}

impl Running {
    /// Only peeks at the failed step: `Process::begun` may read it too.
    fn end(&self, EndedChild { code, signal, .. }: EndedChild) -> End {
        let mut said = [0; 5];
        if code == NOT_STARTED
            && signal.is_none()
            && let Ok((_, 5)) = recv(&*self.socket, &mut said, RecvFlags::PEEK | RecvFlags::DONTWAIT)
        {
            let [step, a, b, c, d] = said;
            return End::NotStarted { step, errno: i32::from_le_bytes([a, b, c, d]) };
        }
        End::Exited(Exit { code, signal })
    }
}

/// Handles every child that ends.
pub async fn reap(shared: &Shared, children: AsyncFd<OwnedFd>) {
    let mut drained = [0u8; 128];
    loop {
        tokio::select! {
            // A read fails only if there is nothing to read, and then it isn't attempted.
            read = children.async_io(Interest::READABLE, |fd| Ok(rustix::io::read(fd, &mut drained)?)) => if read.is_err() { return },
            () = shared.reaped_late.notified() => {}
        }
        while let Some(child) = ended_child(None) {
            shared.table().tell(child);
            shared.spares.ended(child.pid);
            // Tasks that wait for this program run first. A program can make any number of its own children orphans and
            // thus children of boxd.
            tokio::task::yield_now().await;
            let mut table = shared.table();
            if !table.let_go(child) {
                table.tell_of_all();
                break;
            }
        }
        shared.keep_spares();
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
    use std::sync::Mutex;
    use tokio::sync::Notify;

    use super::{super::spares::Spares, *};

    /// A child, registered as a running program, that ends when its input is closed.
    fn start(table: &mut Table, seq: u64) -> (Child, OwnedFd, watch::Receiver<Option<End>>) {
        let child = Command::new("sh").args(["-c", "read line; exit 126"]).stdin(Stdio::piped()).spawn().unwrap();
        let (socket, other) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        let (tell, end) = watch::channel(None);
        table.add(child.id() as i32, Running { seq, socket: Arc::new(socket), tell, orders: 0 });
        (child, other, end)
    }

    fn end(child: &mut Child) -> EndedChild {
        drop(child.stdin.take());
        let pid = child.id() as i32;
        loop {
            match ended_child(Some(pid)) {
                Some(ended) => return ended,
                None => std::thread::yield_now(),
            }
        }
    }

    fn has_number(child: &Child) -> bool {
        test_kill_process(Pid::from_raw(child.id() as i32).unwrap()).is_ok()
    }

    /// A sandbox whose init and spawner never answer.
    fn shared() -> Arc<Shared> {
        let silent = || {
            let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
            std::mem::forget(theirs);
            cobox_kernel::register_fd(ours, Interest::READABLE).unwrap()
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
        Arc::new(Shared {
            init: silent(),
            starter: silent(),
            null: std::fs::File::open("/dev/null").unwrap().into(),
            workload,
            is_watched: true,
            seq: 0.into(),
            table: Mutex::default(),
            spares: Spares::default(),
            reaped_late: Notify::new(),
            waiting: Mutex::default(),
        })
    }

    #[tokio::test]
    async fn a_program_that_is_reaped_late_hides_no_other_ended_program() {
        let shared = shared();
        let (mut first, _a, _) = start(&mut shared.table(), 1);
        let (mut second, _b, mut told) = start(&mut shared.table(), 2);
        shared.table().expect(10, (first.id() as i32, 1));
        end(&mut first);
        end(&mut second);
        let (signals, signal) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::NONBLOCK).unwrap();
        rustix::io::write(&signal, b"a child has ended").unwrap();
        let children = cobox_kernel::register_fd(signals, Interest::READABLE).unwrap();
        let reaping = tokio::spawn({
            let shared = shared.clone();
            async move { reap(&shared, children).await }
        });
        told.wait_for(Option::is_some).await.unwrap();
        assert!(has_number(&first) && has_number(&second), "the first can't be reaped, and it hides the second");
        shared.obeyed(10);
        assert!(!has_number(&first));
        while has_number(&second) {
            tokio::task::yield_now().await;
        }
        reaping.abort();
    }

    #[test]
    fn a_number_stays_its_programs_while_an_order_names_it() {
        let mut table = Table::default();
        let (mut child, _socket, told) = start(&mut table, 5);
        let pid = child.id() as i32;
        assert!(!table.expect(10, (pid, 4)).0, "that was another program");
        let ((first, _), (second, _)) = (table.expect(11, (pid, 5)), table.expect(12, (pid, 5)));
        assert!(first && second);
        let ended = end(&mut child);
        table.tell(ended);
        assert!(matches!(*told.borrow(), Some(End::Exited(Exit { code: 126, signal: None }))));
        assert!(!table.let_go(ended) && has_number(&child));
        assert!([11, 11, 10].iter().all(|order| !table.obeyed(*order)));
        assert!(has_number(&child));
        assert!(table.obeyed(12));
        assert!(!has_number(&child), "nothing names it any more");
        assert!(!table.expect(13, (pid, 5)).0);
    }

    #[test]
    fn one_that_could_not_become_its_program_says_why() {
        let mut table = Table::default();
        let (mut child, socket, told) = start(&mut table, 1);
        send(&socket, &[3, 2, 0, 0, 0], SendFlags::empty()).unwrap();
        let ended = end(&mut child);
        table.tell(ended);
        assert!(matches!(*told.borrow(), Some(End::NotStarted { step: 3, errno: libc::ENOENT })));
        assert!(table.let_go(ended));
    }

    #[test]
    fn one_in_the_way_keeps_nobody_from_being_heard() {
        let mut table = Table::default();
        let (mut first, _a, _) = start(&mut table, 1);
        let (mut second, _b, told) = start(&mut table, 2);
        table.expect(10, (first.id() as i32, 1));
        let ended = end(&mut first);
        end(&mut second);
        table.tell(ended);
        assert!(!table.let_go(ended));
        table.tell_of_all();
        assert!(told.borrow().is_some());
    }
}
