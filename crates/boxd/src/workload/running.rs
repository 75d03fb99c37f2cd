//! Which programs run, and what is still to be done about them. A program that has ended is let go of, and its number with it, only when
//! init has nothing more to do that names it.

use std::{collections::HashMap, os::fd::OwnedFd, sync::Arc};

use cobox_kernel::{EndedChild, ended_child};
use rustix::net::{RecvFlags, recv};
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::{oneshot, watch},
};

use super::{Exit, Shared};

/// What a waiting process that couldn't become its program ends with.
const NOT_STARTED: i32 = 126;

#[derive(Clone, Copy, Debug)]
pub enum End {
    Exited(Exit),
    NotStarted { step: u8, errno: i32 },
}

/// One process that was told to become a program.
pub struct Running {
    /// Of the program.
    pub seq: u64,
    /// It closes when the program begins; what is in it is why it couldn't.
    pub socket: Arc<OwnedFd>,
    pub tell: watch::Sender<Option<End>>,
    /// Orders about it that were not obeyed yet.
    pub orders: usize,
}

/// Programs by their numbers here, and orders by theirs.
#[derive(Default)]
pub struct Table {
    running: HashMap<i32, Running>,
    ordered: HashMap<u64, Ordered>,
}

struct Ordered {
    /// The program that it names by a number.
    pid: Option<i32>,
    tell: oneshot::Sender<()>,
}

impl Table {
    pub fn add(&mut self, pid: i32, running: Running) {
        self.running.insert(pid, running);
    }

    /// An order is about to be given. Says whether the program may be named by its number, which then stays its own until the order is obeyed.
    pub fn expect(&mut self, order: u64, (pid, seq): (i32, u64)) -> (bool, oneshot::Receiver<()>) {
        let running = self.running.get_mut(&pid).filter(|running| running.seq == seq);
        let pid = running.map(|running| {
            running.orders += 1;
            pid
        });
        (pid.is_some(), self.order(order, pid))
    }

    /// The same for one that names nobody.
    pub fn order(&mut self, order: u64, pid: Option<i32>) -> oneshot::Receiver<()> {
        let (tell, obeyed) = oneshot::channel();
        self.ordered.insert(order, Ordered { pid, tell });
        obeyed
    }

    /// An order was obeyed, or will never be.
    pub fn obeyed(&mut self, order: u64) {
        let Some(Ordered { pid, tell }) = self.ordered.remove(&order) else { return };
        if let Some(pid) = pid
            && let Some(running) = self.running.get_mut(&pid)
        {
            running.orders -= 1;
            if let Some(child) = ended_child(Some(pid)) {
                self.tell(child);
                self.let_go(child);
            }
        }
        // After that: who has had a program ended finds it ended. Nobody waits for a signal.
        let _ = tell.send(());
    }

    /// A child has ended: a program, one that waited to become one, or one that a program gave us.
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

    /// Lets go of a child, whose end was told, unless its number is still needed. Says whether it could.
    fn let_go(&mut self, child: EndedChild) -> bool {
        if self.running.get(&child.pid).is_some_and(|running| running.orders > 0) {
            return false;
        }
        self.running.remove(&child.pid);
        cobox_kernel::reap(child);
        true
    }

    /// Programs that have ended, whoever else may be in the way of hearing so.
    fn tell_of_all(&self) {
        for child in self.running.keys().filter_map(|pid| ended_child(Some(*pid))) {
            self.tell(child);
        }
    }
}

impl Running {
    /// What it has said is left there: whoever has started it may look for it too.
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

/// Hears of every child that ends.
pub async fn reap(shared: &Shared, children: AsyncFd<OwnedFd>) {
    let mut drained = [0u8; 128];
    // Fails only where there is nothing to be read, which isn't asked for then.
    while children.async_io(Interest::READABLE, |fd| Ok(rustix::io::read(fd, &mut drained)?)).await.is_ok() {
        while let Some(child) = ended_child(None) {
            shared.table().tell(child);
            shared.spares.ended(child.pid);
            // Whoever waits for it comes first. A program can make its own children boxd's, as many as it likes.
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

    use super::*;

    /// A child that ends when its input does, as a running program.
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
        table.obeyed(11);
        table.obeyed(11);
        table.obeyed(10);
        assert!(has_number(&child));
        table.obeyed(12);
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
