//! The log compared with a model: in any order of events, a reader gets contiguous bytes or is informed about the gap.
#![cfg(not(loom))]

use std::{
    io,
    sync::{Arc, Mutex},
    task::{Context, Poll, Waker},
};

use cobox_stream::{Limits, Log, Read, Reader, SequenceKinds, Spool, WakePriority};
use proptest::prelude::*;

/// A spool like boxd's, in memory: a file written at `offset % limit`.
struct CircularFile {
    bytes: Vec<u8>,
    fails: Arc<Mutex<bool>>,
}

impl Spool for CircularFile {
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

/// The byte at an offset, so that wrong bytes are detected.
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
enum Action {
    Append(usize),
    Attach(u64),
    Detach(usize),
    Reconnect(usize),
    Read(usize, usize),
    Acknowledge(usize, u64),
    Backpressure(usize, bool),
    Fail,
}

fn actions() -> impl Strategy<Value = Vec<Action>> {
    let action = prop_oneof![
        5 => (0usize..150).prop_map(Action::Append),
        1 => (0u64..600).prop_map(Action::Attach),
        1 => (0usize..4).prop_map(Action::Detach),
        1 => (0usize..4).prop_map(Action::Reconnect),
        6 => (0usize..4, 0usize..90).prop_map(|(r, n)| Action::Read(r, n)),
        2 => (0usize..4, 0u64..60).prop_map(|(r, n)| Action::Acknowledge(r, n)),
        1 => (0usize..4, any::<bool>()).prop_map(|(r, h)| Action::Backpressure(r, h)),
    ];
    prop::collection::vec(prop_oneof![60 => action, 1 => Just(Action::Fail)], 1..120)
}

struct Viewer {
    reader: Reader,
    /// Offset of the next byte.
    next: u64,
    has_backpressure: bool,
    has_acknowledged: bool,
    /// It has backpressure, reached the head, and has been the only viewer since.
    is_alone: bool,
}

impl Viewer {
    fn attach(log: &Log, from: u64, is_blocking_writer: bool) -> Self {
        let reader = log.reader(from);
        let next = reader.position();
        Self { reader, next, has_backpressure: true, has_acknowledged: false, is_alone: is_blocking_writer && next == log.head() }
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
            assert!(from < to && !viewer.is_alone, "the writer waits for the only reader");
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
    fn every_viewer_gets_contiguous_bytes_or_a_gap(
        actions in actions(), ring in 1usize..100, spool in prop::option::of(1u64..300), waits in any::<bool>()
    ) {
        let fails = Arc::new(Mutex::new(false));
        let limits = Limits { ring_bytes: ring, writer_waits: waits };
        let log = match spool {
            Some(limit) => {
                Log::with_spool(limits, Box::new(CircularFile { bytes: vec![0; limit as usize], fails: fails.clone() }), limit)
            }
            None => Log::new(limits),
        };
        let mut viewers: Vec<Viewer> = Vec::new();
        let mut head = 0u64;
        for action in actions {
            match action {
                Action::Append(count) => {
                    let taken = log.append(&bytes_from(head, count));
                    head += taken as u64;
                    if taken < count {
                        prop_assert!(waits && viewers.iter().any(|v| v.has_backpressure), "the writer waits only for a reader with backpressure");
                        let is_behind = |v: &Viewer| !v.has_backpressure || v.has_acknowledged || v.next + ring as u64 <= head;
                        prop_assert!(viewers.iter().all(is_behind), "a slow reader delays no one while another keeps up");
                        prop_assert!(!is_ready(log.writable()) || ring < 4);
                    }
                }
                Action::Attach(from) if viewers.len() < 4 => {
                    let viewer = Viewer::attach(&log, from, waits && viewers.is_empty());
                    prop_assert_eq!(viewer.next, from.min(head));
                    viewers.iter_mut().for_each(|v| v.is_alone = false);
                    viewers.push(viewer);
                }
                Action::Detach(who) if who < viewers.len() => drop(viewers.remove(who)),
                Action::Reconnect(who) if who < viewers.len() => {
                    // The old connection stays until the new one exists.
                    viewers[who] = Viewer::attach(&log, viewers[who].next, waits && viewers.len() == 1);
                }
                Action::Read(who, max) if who < viewers.len() => { check_read(&log, &mut viewers[who], max); }
                Action::Acknowledge(who, behind) if who < viewers.len() => {
                    let offset = viewers[who].next.saturating_sub(behind);
                    viewers[who].reader.acknowledge(offset);
                    viewers[who].has_acknowledged = true;
                }
                Action::Backpressure(who, holds) if who < viewers.len() => {
                    viewers[who].reader.set_backpressure(holds);
                    viewers[who].has_backpressure = holds;
                    viewers[who].is_alone &= holds;
                }
                Action::Fail => *fails.lock().unwrap() = true,
                _ => {}
            }
            let kept = log.range();
            prop_assert_eq!(kept.end, head);
            prop_assert!(kept.end - kept.start <= ring as u64 + spool.unwrap_or(0), "the log keeps no more than its limits");
        }
        log.finish();
        for mut viewer in viewers {
            while check_read(&log, &mut viewer, 50) != Read::End {}
            prop_assert_eq!(viewer.next, head);
        }
    }
}

#[test]
fn backpressure_loses_nothing_and_without_it_the_oldest_bytes_are_dropped() {
    let log = Log::new(Limits { ring_bytes: 100, writer_waits: true });
    let mut reader = log.reader(0);
    assert_eq!(log.append(&bytes_from(0, 150)), 100);
    assert!(!is_ready(log.writable()));
    assert!(matches!(reader.read(60), Read::Chunk(c) if c.bytes.len() == 60));
    assert!(is_ready(log.writable()));
    assert_eq!(log.append(&bytes_from(100, 50)), 50);
    reader.set_backpressure(false);
    assert_eq!(log.append(&bytes_from(150, 100)), 100);
    assert_eq!(reader.read(1000), Read::Gap { from: 60, to: 150 });
    drop(reader);
    assert_eq!(log.append(&bytes_from(250, 500)), 500);
    assert_eq!(log.range(), 650..750);
}

#[test]
fn a_slow_reader_delays_neither_a_fast_one_nor_the_writer() {
    let fails = Arc::default();
    let log = Log::with_spool(Limits { ring_bytes: 100, writer_waits: true }, Box::new(CircularFile { bytes: vec![0; 1000], fails }), 1000);
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
    assert_eq!(all, bytes_from(0, 1000), "the bytes that it missed are in the spool");
    drop(quick);
    assert_eq!(log.append(&bytes_from(1000, 150)), 100, "the writer waits for it once it is the only reader");
}

#[test]
fn acknowledged_bytes_are_released_and_the_rest_can_be_read_again() {
    let fails = Arc::default();
    let spool = Box::new(CircularFile { bytes: vec![0; 1000], fails });
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
fn the_writer_waits_for_frequent_acknowledgements_instead_of_filling_the_spool() {
    let fails = Arc::default();
    let log = Log::with_spool(Limits { ring_bytes: 100, writer_waits: true }, Box::new(CircularFile { bytes: vec![0; 1000], fails }), 1000);
    let mut reader = log.reader(0);
    log.append(&bytes_from(0, 20));
    reader.read(1000);
    reader.acknowledge(20);
    assert_eq!(log.append(&bytes_from(20, 200)), 100);
    reader.read(1000);
    assert_eq!(log.append(&bytes_from(120, 100)), 0, "it has read the bytes and will acknowledge them");
    reader.acknowledge(60);
    assert_eq!(log.append(&bytes_from(120, 100)), 40);
}

#[test]
fn interactive_readers_are_woken_before_background_readers() {
    struct WakeRecorder(&'static str, Arc<Mutex<Vec<&'static str>>>);
    impl std::task::Wake for WakeRecorder {
        fn wake(self: Arc<Self>) {
            self.1.lock().unwrap().push(self.0);
        }
    }
    let log = Log::new(Limits { ring_bytes: 100, writer_waits: false });
    let woken = Arc::new(Mutex::new(Vec::new()));
    let [mut a, mut b, mut c] = [log.reader(0), log.reader(0), log.reader(0)];
    c.set_wake_priority(WakePriority::Interactive);
    let mut waits = Vec::new();
    for (reader, name) in [(&mut a, "watches"), (&mut b, "gave up"), (&mut c, "types")] {
        let waker = Waker::from(Arc::new(WakeRecorder(name, woken.clone())));
        let mut wait = Box::pin(reader.wait());
        assert!(wait.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        waits.push(wait);
    }
    drop(waits.remove(1));
    log.append(b"x");
    assert_eq!(*woken.lock().unwrap(), ["types", "watches"]);
}

#[test]
fn background_readers_are_woken_in_batches_until_all_are_awake() {
    struct WakeCounter(Mutex<u32>);
    impl std::task::Wake for WakeCounter {
        fn wake(self: Arc<Self>) {
            *self.0.lock().unwrap() += 1;
        }
    }
    let (typing, watching) = (Arc::new(WakeCounter(Mutex::new(0))), Arc::new(WakeCounter(Mutex::new(0))));
    let log = Log::new(Limits { ring_bytes: 100, writer_waits: false });
    let mut readers: Vec<_> = (0..31).map(|_| log.reader(0)).collect();
    readers[30].set_wake_priority(WakePriority::Interactive);
    let mut waits = Vec::new();
    for (number, reader) in readers.iter_mut().enumerate() {
        let waker = Waker::from(if number == 30 { typing.clone() } else { watching.clone() });
        let mut wait = Box::pin(reader.wait());
        assert!(wait.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        waits.push(wait);
    }
    let woken = || (*typing.0.lock().unwrap(), *watching.0.lock().unwrap());
    // The writer must not wait for a reader that has gone.
    drop(waits.remove(0));
    let mut has_more = log.append_scanned(b"x", &Default::default());
    let (first, some) = woken();
    assert!(first == 1 && 0 < some && some < 29 && has_more, "{some} of 29");
    while has_more {
        has_more = log.wake_more();
    }
    assert_eq!(woken(), (1, 29));
}

#[test]
fn a_new_reader_with_everything_hidden_gets_plain_text() {
    let log = Log::new(Limits { ring_bytes: 256 * 1024, writer_waits: false });
    log.append(b"$ ");
    let mut reader = log.reader(0);
    reader.set_hidden(SequenceKinds::ALL);
    assert!(matches!(reader.read(10), Read::Chunk(c) if &c.bytes[..] == b"$ "));
}

#[test]
fn a_resize_is_reported_between_the_bytes_before_and_after_it() {
    let log = Log::new(Limits { ring_bytes: 100, writer_waits: false });
    log.resize(80, 24);
    log.append(b"wide");
    log.resize(40, 12);
    log.append(b"narrow");
    let mut reader = log.reader(0);
    assert_eq!(reader.next_size(), None, "the first size is known when the reader attaches");
    assert!(matches!(reader.read(100), Read::Chunk(c) if &c.bytes[..] == b"wide"));
    assert!(is_ready(reader.wait()));
    assert_eq!(reader.next_size().map(|s| (s.offset, s.cols, s.rows)), Some((4, 40, 12)));
    assert!(matches!(reader.read(100), Read::Chunk(c) if &c.bytes[..] == b"narrow"));
    assert_eq!((log.size_at(3).unwrap().cols, log.size_at(4).unwrap().cols), (80, 40));
    assert!(!is_ready(reader.wait()));
    log.resize(41, 12);
    assert!(is_ready(reader.wait()) && reader.next_size().is_some() && reader.next_size().is_none());
}
