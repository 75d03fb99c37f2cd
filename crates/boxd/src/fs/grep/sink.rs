//! Collects the matches in one file in the form of the response: lines are truncated, and the request's limits apply.

use std::io;

use cobox_protocol::{
    exec::text_and_b64,
    fs::{GrepLine, GrepOutput},
};
use grep_matcher::Matcher;
use grep_searcher::{Searcher, Sink, SinkContext, SinkContextKind, SinkMatch};

use super::GrepSearch;

/// Maximum matches reported within a line: enough for highlighting.
const MAX_SPANS: usize = 16;

pub struct Hit {
    pub line: GrepLine,
    pub before: Vec<GrepLine>,
    pub after: Vec<GrepLine>,
}

impl Hit {
    pub fn bytes(&self) -> usize {
        [&self.line].into_iter().chain(&self.before).chain(&self.after).map(|line| line.text.len()).sum()
    }
}

pub struct FileSink<'a> {
    search: &'a GrepSearch,
    pub is_binary: bool,
    count: u64,
    hits: Vec<Hit>,
    /// Context lines of the next match.
    before: Vec<GrepLine>,
    /// Size of all collected lines.
    bytes: usize,
    /// Whether the limits ended the search of this file.
    pub is_cut_short: bool,
}

impl<'a> FileSink<'a> {
    pub fn new(search: &'a GrepSearch) -> Self {
        Self { search, is_binary: false, count: 0, hits: Vec::new(), before: Vec::new(), bytes: 0, is_cut_short: false }
    }

    pub fn finish(self) -> (u64, Vec<Hit>) {
        (self.count, self.hits)
    }

    fn line(&mut self, number: Option<u64>, bytes: &[u8], with_spans: bool) -> GrepLine {
        let text = bytes.strip_suffix(b"\n").map_or(bytes, |b| b.strip_suffix(b"\r").unwrap_or(b));
        let mut end = text.len().min(self.search.max_line_bytes);
        let is_cut = end < text.len();
        // Not in the middle of a character.
        while is_cut && end > 0 && text[end] & 0xc0 == 0x80 {
            end -= 1;
        }
        let shown = &text[..end];
        self.bytes += shown.len();
        let mut spans = Vec::new();
        if with_spans {
            // If the pattern can't be matched on the line alone, the line has no spans.
            let _ = self.search.matcher.find_iter(shown, |m| {
                if m.end() > m.start() {
                    spans.push((m.start() as u32, m.end() as u32));
                }
                spans.len() < MAX_SPANS
            });
        }
        let (text, text_b64) = text_and_b64(shown.to_vec());
        GrepLine { line_number: number.unwrap_or(0), text, text_b64, is_cut, spans }
    }

    /// Whether to continue. One match beyond the limit is collected, so that the response can report that there were
    /// more.
    fn should_continue(&mut self) -> bool {
        self.is_cut_short = self.search.exceeds_limits(self.hits.len(), self.bytes);
        !self.is_cut_short
    }
}

impl Sink for FileSink<'_> {
    type Error = io::Error;

    fn matched(&mut self, _: &Searcher, found: &SinkMatch<'_>) -> Result<bool, io::Error> {
        if self.search.output != GrepOutput::Content {
            self.count += 1;
            return Ok(self.search.output == GrepOutput::Count);
        }
        let line = self.line(found.line_number(), found.bytes(), true);
        self.count += 1;
        let before = std::mem::take(&mut self.before);
        self.hits.push(Hit { line, before, after: Vec::new() });
        Ok(self.should_continue())
    }

    fn context(&mut self, _: &Searcher, found: &SinkContext<'_>) -> Result<bool, io::Error> {
        let line = self.line(found.line_number(), found.bytes(), false);
        match (found.kind(), self.hits.last_mut()) {
            (SinkContextKind::After, Some(hit)) => hit.after.push(line),
            _ => self.before.push(line),
        }
        Ok(self.should_continue())
    }

    fn binary_data(&mut self, _: &Searcher, _: u64) -> Result<bool, io::Error> {
        self.is_binary = true;
        Ok(false)
    }
}
