//! Captures the broker's log in a test: the JSON lines of everything in this process.

use std::{
    io::{self, Write},
    sync::{Arc, Mutex},
};

use serde_json::Value;
use tracing_subscriber::fmt::MakeWriter;

#[derive(Clone, Default)]
pub struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    /// Captures the log of this process from now on. Only one test per process can do so, and each test has its own
    /// process.
    pub fn capture() -> Self {
        let log = Self::default();
        let subscriber = tracing_subscriber::fmt().json().flatten_event(true).with_max_level(tracing_subscriber::filter::LevelFilter::INFO);
        subscriber.with_writer(log.clone()).init();
        log
    }

    pub fn lines(&self) -> Vec<Value> {
        let text = self.0.lock().unwrap().clone();
        String::from_utf8(text).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// Waits for a line whose message contains this text.
    pub async fn line(&self, part: &str) {
        let is_there = || async { self.lines().iter().any(|l| l["message"].as_str().is_some_and(|m| m.contains(part))) };
        crate::harness::eventually("the line in the log", is_there).await;
    }

    /// The line of a request.
    #[track_caller]
    pub fn request(&self, id: &str) -> Value {
        let lines = self.lines();
        lines.iter().find(|l| l["message"] == "request" && l["request_id"] == id).unwrap_or_else(|| panic!("{id} in {lines:#?}")).clone()
    }
}

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Log;
    fn make_writer(&'a self) -> Log {
        self.clone()
    }
}
