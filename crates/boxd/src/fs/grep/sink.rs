//! What the searcher finds in one file, kept as the answer will tell it: cut to size, and counted against the request's limits.

use std::io;

use cobox_protocol::{
    exec::text_and_b64,
    fs::{GrepLine, GrepOutput},
};
use grep_matcher::Matcher;
use grep_searcher::{Searcher, Sink, SinkContext, SinkContextKind, SinkMatch};

use super::Plan;

/// Places in a line that are told: enough to mark them on a screen.
const MAX_SPANS: usize = 16;

pub struct Hit {
    pub line: GrepLine,
    pub before: Vec<GrepLine>,
    pub after: Vec<GrepLine>,
}

pub struct FileSink<'a> {
    plan: &'a Plan,
    pub is_binary: bool,
    count: u64,
    hits: Vec<Hit>,
    /// Lines that belong to a match still to come.
    before: Vec<GrepLine>,
}

impl<'a> FileSink<'a> {
    pub fn new(plan: &'a Plan) -> Self {
        Self { plan, is_binary: false, count: 0, hits: Vec::new(), before: Vec::new() }
    }

    pub fn finish(self) -> (u64, Vec<Hit>) {
        (self.count, self.hits)
    }

    fn line(&self, number: Option<u64>, bytes: &[u8], marks: bool) -> Option<GrepLine> {
        let text = bytes.strip_suffix(b"\n").map_or(bytes, |b| b.strip_suffix(b"\r").unwrap_or(b));
        let mut end = text.len().min(self.plan.max_line_bytes);
        let is_cut = end < text.len();
        // Not in the middle of a character.
        while is_cut && end > 0 && text[end] & 0xc0 == 0x80 {
            end -= 1;
        }
        let shown = &text[..end];
        if !self.plan.take_bytes(shown.len()) {
            return None;
        }
        let mut spans = Vec::new();
        if marks {
            // A pattern that can't be tried again on its own line leaves the line unmarked.
            let _ = self.plan.matcher.find_iter(shown, |m| {
                if m.end() > m.start() {
                    spans.push((m.start() as u32, m.end() as u32));
                }
                spans.len() < MAX_SPANS
            });
        }
        let (text, text_b64) = text_and_b64(shown.to_vec());
        Some(GrepLine { line_number: number.unwrap_or(0), text, text_b64, is_cut, spans })
    }
}

impl Sink for FileSink<'_> {
    type Error = io::Error;

    fn matched(&mut self, _: &Searcher, found: &SinkMatch<'_>) -> Result<bool, io::Error> {
        if self.plan.output != GrepOutput::Content {
            self.count += 1;
            return Ok(self.plan.output == GrepOutput::Count);
        }
        if !self.plan.take_one() {
            return Ok(false);
        }
        let Some(line) = self.line(found.line_number(), found.bytes(), true) else { return Ok(false) };
        self.count += 1;
        let before = std::mem::take(&mut self.before);
        self.hits.push(Hit { line, before, after: Vec::new() });
        Ok(true)
    }

    fn context(&mut self, _: &Searcher, found: &SinkContext<'_>) -> Result<bool, io::Error> {
        let Some(line) = self.line(found.line_number(), found.bytes(), false) else { return Ok(false) };
        match (found.kind(), self.hits.last_mut()) {
            (SinkContextKind::After, Some(hit)) => hit.after.push(line),
            _ => self.before.push(line),
        }
        Ok(true)
    }

    fn binary_data(&mut self, _: &Searcher, _: u64) -> Result<bool, io::Error> {
        self.is_binary = true;
        Ok(false)
    }
}
