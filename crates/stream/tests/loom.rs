//! Every order in which a writer and a reader can meet: no wake-up is lost, even after a wait was dropped.
#![cfg(loom)]

use std::{
    pin::pin,
    task::{Context, Waker},
};

use cobox_stream::{Limits, Log, Read, Reader};
use loom::{future::block_on, thread};

/// Maximum number of forced thread switches in one run. Lost wake-ups need one or two, and every further one multiplies
/// the runs.
const MAX_PREEMPTIONS: usize = 3;

fn model(run: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(MAX_PREEMPTIONS);
    builder.check(run);
}

fn log(ring_bytes: usize) -> Log {
    Log::new(Limits { ring_bytes, writer_waits: true })
}

/// Reads to the end and waits in between.
fn read_all(mut reader: Reader) -> Vec<u8> {
    let mut all = Vec::new();
    loop {
        match reader.read(64) {
            Read::Chunk(chunk) => all.extend_from_slice(&chunk.bytes),
            Read::Pending => block_on(reader.wait()),
            Read::End => return all,
            Read::Gap { .. } => panic!("no bytes should have been released"),
        }
    }
}

#[test]
fn a_reader_gets_everything_and_the_end() {
    model(|| {
        let log = log(64);
        let reader = log.reader(0);
        let reading = thread::spawn(move || read_all(reader));
        log.append(b"a");
        log.append(b"b");
        log.finish();
        assert_eq!(reading.join().unwrap(), b"ab");
    });
}

#[test]
fn a_dropped_wait_does_not_consume_the_wake_up_of_another() {
    model(|| {
        let log = log(64);
        let mut dropped = log.reader(0);
        let reader = log.reader(0);
        let reading = thread::spawn(move || read_all(reader));
        let dropping = thread::spawn(move || {
            let mut wait = pin!(dropped.wait());
            let _ = wait.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        });
        log.append(b"a");
        log.finish();
        assert_eq!(reading.join().unwrap(), b"a");
        dropping.join().unwrap();
    });
}

#[test]
fn a_waiting_writer_continues_when_the_reader_has_read() {
    model(|| {
        let log = log(2);
        let reader = log.reader(0);
        let reading = thread::spawn(move || read_all(reader));
        let mut rest: &[u8] = b"abcd";
        while !rest.is_empty() {
            rest = &rest[log.append(rest)..];
            if !rest.is_empty() {
                block_on(log.writable());
            }
        }
        log.finish();
        assert_eq!(reading.join().unwrap(), b"abcd");
    });
}

#[test]
fn a_waiting_writer_continues_when_the_faster_of_two_readers_has_read() {
    model(|| {
        let log = log(2);
        let (reader, mut slow) = (log.reader(0), log.reader(0));
        let reading = thread::spawn(move || read_all(reader));
        let mut rest: &[u8] = b"abc";
        while !rest.is_empty() {
            rest = &rest[log.append(rest)..];
            if !rest.is_empty() {
                block_on(log.writable());
            }
        }
        log.finish();
        assert_eq!(reading.join().unwrap(), b"abc");
        assert_eq!(slow.read(64), Read::Gap { from: 0, to: 1 });
    });
}

#[test]
fn a_waiting_writer_continues_when_the_reader_detaches() {
    model(|| {
        let log = log(2);
        let reader = log.reader(0);
        log.append(b"ab");
        let leaving = thread::spawn(move || drop(reader));
        block_on(log.writable());
        assert_eq!(log.append(b"cd"), 2);
        leaving.join().unwrap();
    });
}
