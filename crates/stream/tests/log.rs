//! The log against a model of it: whatever happens in whatever order, a reader gets contiguous bytes or is told what is missing.
#![cfg(not(loom))]

use std::{
    io,
    sync::{Arc, Mutex},
    task::{Context, Poll, Waker},
};

use cobox_stream::{Kinds, Limits, Log, Read, Reader, Spool, Urgency};
use proptest::prelude::*;

/// A spool as boxd has it, in memory: a file written at `offset % limit`.
struct RoundFile {
    bytes: Vec<u8>,
    fails: Arc<Mutex<bool>>,
}

impl Spool for RoundFile {
    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        if *self.fails.lock().unwrap() {
            return Err(io::ErrorKind::StorageFull.into());
        }
        assert!(bytes.len() <= self.bytes.len());
        for (i, byte) in bytes.iter().enumerate() {
            let at = (offset as usize + i) % self.bytes.len();
            self.bytes[at] = *byte;
        }
        Ok(())
    }
    fn read_at(&mut self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        for (i, byte) in into.iter_mut().enumerate() {
            *byte = self.bytes[(offset as usize + i) % self.bytes.len()];
        }
        Ok(())
    }
    fn discard(&mut self, _before: u64) {}
}

/// The byte at an offset, so that a wrong one is seen.
fn byte_at(offset: u64) -> u8 {
    (offset.wrapping_mul(2_654_435_761) >> 7) as u8
}

fn bytes_from(offset: u64, count: usize) -> Vec<u8> {
    (offset..offset + count as u64).map(byte_at).collect()
}

fn is_ready(future: impl Future<Output = ()>) -> bool {
    std::pin::pin!(future).poll(&mut Context::from_waker(Waker::noop())) == Poll::Ready(())
}

#[derive(Clone, Debug)]
enum Act {
    Append(usize),
    Attach(u64),
    Detach(usize),
    Reconnect(usize),
    Read(usize, usize),
    Acknowledge(usize, u64),
    Hold(usize, bool),
    Fail,
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let act = prop_oneof![
        5 => (0usize..150).prop_map(Act::Append),
        1 => (0u64..600).prop_map(Act::Attach),
        1 => (0usize..4).prop_map(Act::Detach),
        1 => (0usize..4).prop_map(Act::Reconnect),
        6 => (0usize..4, 0usize..90).prop_map(|(r, n)| Act::Read(r, n)),
        2 => (0usize..4, 0u64..60).prop_map(|(r, n)| Act::Acknowledge(r, n)),
        1 => (0usize..4, any::<bool>()).prop_map(|(r, h)| Act::Hold(r, h)),
    ];
    prop::collection::vec(prop_oneof![60 => act, 1 => Just(Act::Fail)], 1..120)
}

struct Viewer {
    reader: Reader,
    /// Where the next byte must be.
    next: u64,
    is_holding: bool,
    has_acknowledged: bool,
    /// It holds, came to the head and has had nobody beside it since.
    is_alone: bool,
}

impl Viewer {
    fn attach(log: &Log, from: u64, is_waited_for: bool) -> Self {
        let reader = log.reader(from);
        let next = reader.position();
        Self { reader, next, is_holding: true, has_acknowledged: false, is_alone: is_waited_for && next == log.head() }
    }
}

fn check_read(log: &Log, viewer: &mut Viewer, max: usize) -> Read {
    let ready = is_ready(viewer.reader.wait());
    let base = log.range().start;
    let read = viewer.reader.read(max);
    match &read {
        Read::Chunk(chunk) => {
            assert_eq!(chunk.offset, viewer.next);
            assert!(!chunk.bytes.is_empty() && chunk.bytes.len() <= max);
            assert_eq!(chunk.bytes, bytes_from(chunk.offset, chunk.bytes.len()));
            viewer.next += chunk.bytes.len() as u64;
        }
        Read::Gap { from, to } => {
            assert_eq!((*from, *to), (viewer.next, base), "a gap is exactly what is missing");
            assert!(from < to && !viewer.is_alone, "the only one is waited for");
            viewer.next = *to;
        }
        Read::End => assert_eq!(viewer.next, log.head()),
        Read::Pending => assert!(max == 0 || viewer.next == log.head()),
    }
    assert_eq!(ready, max == 0 && viewer.next != log.head() || !matches!(read, Read::Pending), "wait and read agree");
    read
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn every_viewer_gets_a_contiguous_suffix_or_is_told_of_the_gap(
        acts in acts(), ring in 1usize..100, spool in prop::option::of(1u64..300), waits in any::<bool>()
    ) {
        let fails = Arc::new(Mutex::new(false));
        let limits = Limits { ring_bytes: ring, writer_waits: waits };
        let log = match spool {
            Some(limit) => {
                Log::with_spool(limits, Box::new(RoundFile { bytes: vec![0; limit as usize], fails: fails.clone() }), limit)
            }
            None => Log::new(limits),
        };
        let mut viewers: Vec<Viewer> = Vec::new();
        let mut head = 0u64;
        for act in acts {
            match act {
                Act::Append(count) => {
                    let taken = log.append(&bytes_from(head, count));
                    head += taken as u64;
                    if taken < count {
                        prop_assert!(waits && viewers.iter().any(|v| v.is_holding), "the writer waits only for a reader that holds it");
                        let is_behind = |v: &Viewer| !v.is_holding || v.has_acknowledged || v.next + ring as u64 <= head;
                        prop_assert!(viewers.iter().all(is_behind), "a slow reader holds up nobody while another keeps up");
                        prop_assert!(!is_ready(log.room()) || ring < 4);
                    }
                }
                Act::Attach(from) if viewers.len() < 4 => {
                    let viewer = Viewer::attach(&log, from, waits && viewers.is_empty());
                    prop_assert_eq!(viewer.next, from.min(head));
                    viewers.iter_mut().for_each(|v| v.is_alone = false);
                    viewers.push(viewer);
                }
                Act::Detach(who) if who < viewers.len() => drop(viewers.remove(who)),
                Act::Reconnect(who) if who < viewers.len() => {
                    // The old connection is there until the new one is.
                    viewers[who] = Viewer::attach(&log, viewers[who].next, waits && viewers.len() == 1);
                }
                Act::Read(who, max) if who < viewers.len() => { check_read(&log, &mut viewers[who], max); }
                Act::Acknowledge(who, behind) if who < viewers.len() => {
                    let offset = viewers[who].next.saturating_sub(behind);
                    viewers[who].reader.acknowledge(offset);
                    viewers[who].has_acknowledged = true;
                }
                Act::Hold(who, holds) if who < viewers.len() => {
                    viewers[who].reader.set_holding(holds);
                    viewers[who].is_holding = holds;
                    viewers[who].is_alone &= holds;
                }
                Act::Fail => *fails.lock().unwrap() = true,
                _ => {}
            }
            let kept = log.range();
            prop_assert_eq!(kept.end, head);
            prop_assert!(kept.end - kept.start <= ring as u64 + spool.unwrap_or(0), "nothing is unbounded");
        }
        log.finish();
        for mut viewer in viewers {
            while check_read(&log, &mut viewer, 50) != Read::End {}
            prop_assert_eq!(viewer.next, head);
        }
    }
}

#[test]
fn with_a_reader_that_holds_nothing_is_lost_and_without_one_the_oldest_go() {
    let log = Log::new(Limits { ring_bytes: 100, writer_waits: true });
    let mut reader = log.reader(0);
    assert_eq!(log.append(&bytes_from(0, 150)), 100);
    assert!(!is_ready(log.room()));
    assert!(matches!(reader.read(60), Read::Chunk(c) if c.bytes.len() == 60));
    assert!(is_ready(log.room()));
    assert_eq!(log.append(&bytes_from(100, 50)), 50);
    reader.set_holding(false);
    assert_eq!(log.append(&bytes_from(150, 100)), 100);
    assert_eq!(reader.read(1000), Read::Gap { from: 60, to: 150 });
    drop(reader);
    assert_eq!(log.append(&bytes_from(250, 500)), 500);
    assert_eq!(log.range(), 650..750);
}

#[test]
fn a_slow_reader_beside_a_quick_one_holds_up_neither_it_nor_the_writer() {
    let fails = Arc::default();
    let log = Log::with_spool(Limits { ring_bytes: 100, writer_waits: true }, Box::new(RoundFile { bytes: vec![0; 1000], fails }), 1000);
    let (mut quick, mut slow) = (log.reader(0), log.reader(0));
    for at in (0..1000).step_by(100) {
        assert_eq!(log.append(&bytes_from(at, 100)), 100);
        assert!(matches!(quick.read(100), Read::Chunk(c) if c.offset == at));
    }
    assert_eq!(log.range(), 0..1000);
    let mut all = Vec::new();
    while let Read::Chunk(chunk) = slow.read(64) {
        all.extend_from_slice(&chunk.bytes);
    }
    assert_eq!(all, bytes_from(0, 1000), "what it missed is in the spool");
    drop(quick);
    assert_eq!(log.append(&bytes_from(1000, 150)), 100, "alone it is waited for");
}

#[test]
fn what_is_acknowledged_is_let_go_and_the_rest_is_kept_for_a_second_try() {
    let fails = Arc::default();
    let spool = Box::new(RoundFile { bytes: vec![0; 1000], fails });
    let log = Log::with_spool(Limits { ring_bytes: 100, writer_waits: true }, spool, 1000);
    let mut reader = log.reader(0);
    log.append(&bytes_from(0, 100));
    reader.read(1000);
    reader.acknowledge(40);
    drop(reader);
    assert_eq!(log.append(&bytes_from(100, 400)), 400);
    assert_eq!(log.range(), 40..500);
    let mut again = log.reader(40);
    let mut all = Vec::new();
    while let Read::Chunk(chunk) = again.read(64) {
        all.extend_from_slice(&chunk.bytes);
    }
    assert_eq!(all, bytes_from(40, 460));
}

#[test]
fn a_client_that_acknowledges_often_is_waited_for_instead_of_filling_the_spool() {
    let fails = Arc::default();
    let log = Log::with_spool(Limits { ring_bytes: 100, writer_waits: true }, Box::new(RoundFile { bytes: vec![0; 1000], fails }), 1000);
    let mut reader = log.reader(0);
    log.append(&bytes_from(0, 20));
    reader.read(1000);
    reader.acknowledge(20);
    assert_eq!(log.append(&bytes_from(20, 200)), 100);
    reader.read(1000);
    assert_eq!(log.append(&bytes_from(120, 100)), 0, "it has read it and will say so");
    reader.acknowledge(60);
    assert_eq!(log.append(&bytes_from(120, 100)), 40);
}

#[test]
fn the_one_who_types_is_woken_before_those_who_watch() {
    struct Note(&'static str, Arc<Mutex<Vec<&'static str>>>);
    impl std::task::Wake for Note {
        fn wake(self: Arc<Self>) {
            self.1.lock().unwrap().push(self.0);
        }
    }
    let log = Log::new(Limits { ring_bytes: 100, writer_waits: false });
    let woken = Arc::new(Mutex::new(Vec::new()));
    let [mut a, mut b, mut c] = [log.reader(0), log.reader(0), log.reader(0)];
    c.set_urgency(Urgency::First);
    let mut waits = Vec::new();
    for (reader, name) in [(&mut a, "watches"), (&mut b, "gave up"), (&mut c, "types")] {
        let waker = Waker::from(Arc::new(Note(name, woken.clone())));
        let mut wait = Box::pin(reader.wait());
        assert!(wait.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        waits.push(wait);
    }
    drop(waits.remove(1));
    log.append(b"x");
    assert_eq!(*woken.lock().unwrap(), ["types", "watches"]);
}

#[test]
fn of_many_who_watch_a_terminal_some_are_woken_at_a_time_and_all_in_the_end() {
    struct Count(Mutex<u32>);
    impl std::task::Wake for Count {
        fn wake(self: Arc<Self>) {
            *self.0.lock().unwrap() += 1;
        }
    }
    let (typing, watching) = (Arc::new(Count(Mutex::new(0))), Arc::new(Count(Mutex::new(0))));
    let log = Log::new(Limits { ring_bytes: 100, writer_waits: false });
    let mut readers: Vec<_> = (0..31).map(|_| log.reader(0)).collect();
    readers[30].set_urgency(Urgency::First);
    let mut waits = Vec::new();
    for (number, reader) in readers.iter_mut().enumerate() {
        let waker = Waker::from(if number == 30 { typing.clone() } else { watching.clone() });
        let mut wait = Box::pin(reader.wait());
        assert!(wait.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        waits.push(wait);
    }
    let woken = || (*typing.0.lock().unwrap(), *watching.0.lock().unwrap());
    // One that has gone is nobody to wait for.
    drop(waits.remove(0));
    let mut has_more = log.append_found(b"x", &Default::default());
    let (first, some) = woken();
    assert!(first == 1 && 0 < some && some < 29 && has_more, "{some} of 29");
    while has_more {
        has_more = log.wake_some();
    }
    assert_eq!(woken(), (1, 29));
}

#[test]
fn an_idle_log_takes_little_memory_and_a_view_starts_with_nothing_hidden() {
    let log = Log::new(Limits { ring_bytes: 256 * 1024, writer_waits: false });
    log.append(b"$ ");
    let mut reader = log.reader(0);
    reader.set_hidden(Kinds::ALL);
    assert!(matches!(reader.read(10), Read::Chunk(c) if &c.bytes[..] == b"$ "));
}

#[test]
fn a_new_size_comes_between_the_bytes_before_it_and_those_after() {
    let log = Log::new(Limits { ring_bytes: 100, writer_waits: false });
    log.resize(80, 24);
    log.append(b"wide");
    log.resize(40, 12);
    log.append(b"narrow");
    let mut reader = log.reader(0);
    assert_eq!(reader.next_size(), None, "the first is told with the attachment");
    assert!(matches!(reader.read(100), Read::Chunk(c) if &c.bytes[..] == b"wide"));
    assert!(is_ready(reader.wait()));
    assert_eq!(reader.next_size().map(|s| (s.offset, s.cols, s.rows)), Some((4, 40, 12)));
    assert!(matches!(reader.read(100), Read::Chunk(c) if &c.bytes[..] == b"narrow"));
    assert_eq!((log.size_at(3).unwrap().cols, log.size_at(4).unwrap().cols), (80, 40));
    assert!(!is_ready(reader.wait()));
    log.resize(41, 12);
    assert!(is_ready(reader.wait()) && reader.next_size().is_some() && reader.next_size().is_none());
}
