//! The observers of a shell: connections whose data is read and discarded, and some whose data is never read.

use std::{
    io::{Read, Write},
    os::fd::AsFd,
    thread::JoinHandle,
};

use rustix::{
    event::epoll::{self, CreateFlags, EventData, EventFlags},
    io::Errno,
    pipe::{PipeFlags, pipe_with},
};
use serde_json::{Value, json};

use crate::{
    connection::Wire,
    contender::Endpoint,
    ws::{Message, Socket},
};

/// Maximum number of events taken at once.
const MAX_EVENTS: usize = 64;
/// Read at once from an observer's connection.
const PIECE_BYTES: usize = 256 * 1024;
/// Identifies the pipe that ends the reader; no observer has this number.
const END_EVENT: u64 = u64::MAX;

#[derive(Default)]
pub struct Observers {
    _stalled: Vec<Wire>,
    reader: Option<(std::fs::File, JoinHandle<()>)>,
}

impl Observers {
    /// Attaches `count` observers to the shell of `start`. The last `stalled` of them never read.
    pub fn attach(endpoint: &Endpoint, start: &Value, count: usize, stalled: usize) -> anyhow::Result<Self> {
        let look = json!({ "type": "start", "shell": start["shell"], "observe": true, "binary": true });
        let mut wires = Vec::with_capacity(count);
        for _ in 0..count {
            let mut socket = Socket::open(endpoint)?;
            socket.send_json(&look)?;
            loop {
                match socket.next()? {
                    Some(Message::Text(text)) if text.windows(7).any(|w| w == b"\"ready\"") => break,
                    Some(Message::Text(text)) if text.windows(7).any(|w| w == b"\"error\"") => {
                        anyhow::bail!("an observer was refused: {}", String::from_utf8_lossy(text))
                    }
                    Some(_) => {}
                    None => anyhow::bail!("an observer's connection was closed"),
                }
            }
            wires.push(socket.into_wire());
        }
        let _stalled = wires.split_off(count - stalled);
        let reader = if wires.is_empty() { None } else { Some(read_all(wires)?) };
        Ok(Self { _stalled, reader })
    }
}

impl Drop for Observers {
    fn drop(&mut self) {
        if let Some((mut end, reader)) = self.reader.take() {
            // Ignored: the reader may already have ended.
            let _ = end.write_all(b"x");
            let _ = reader.join();
        }
    }
}

/// Starts a thread that reads everything that arrives on the connections, until the returned pipe is written to.
fn read_all(mut wires: Vec<Wire>) -> anyhow::Result<(std::fs::File, JoinHandle<()>)> {
    let (end_reader, end_writer) = pipe_with(PipeFlags::CLOEXEC)?;
    let all = epoll::create(CreateFlags::CLOEXEC)?;
    epoll::add(&all, &end_reader, EventData::new_u64(END_EVENT), EventFlags::IN)?;
    for (number, wire) in wires.iter().enumerate() {
        epoll::add(&all, wire.as_fd(), EventData::new_u64(number as u64), EventFlags::IN)?;
    }
    let reader = std::thread::spawn(move || {
        let mut piece = vec![0; PIECE_BYTES];
        let mut events = Vec::with_capacity(MAX_EVENTS);
        loop {
            events.clear();
            match epoll::wait(&all, rustix::buffer::spare_capacity(&mut events), None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(_) => return,
            }
            for event in &events {
                let number = event.data.u64();
                if number == END_EVENT {
                    let _end_reader = &end_reader;
                    return;
                }
                let wire = &mut wires[number as usize];
                // A closed connection would be reported forever.
                if !matches!(wire.read(&mut piece), Ok(n) if n > 0) {
                    let _ = epoll::delete(&all, wire.as_fd());
                }
            }
        }
    });
    Ok((std::fs::File::from(end_writer), reader))
}
