//! The most recent events of the sandbox as lines of the feed.

use std::collections::VecDeque;

use cobox_protocol::{Timestamp, event::SandboxEvent};

use crate::chat::words;

/// Lines kept; `cobox session events` shows all of them.
const MAX_LINES: usize = 500;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FeedLine {
    pub at: Option<Timestamp>,
    pub text: String,
    pub is_bad: bool,
    pub is_agents: bool,
}

#[derive(Debug, Default)]
pub struct Feed {
    lines: VecDeque<FeedLine>,
    /// Scroll offset, in lines from the end.
    pub scroll: usize,
}

impl Feed {
    pub fn lines(&self) -> impl DoubleEndedIterator<Item = &FeedLine> + ExactSizeIterator {
        self.lines.iter()
    }

    pub fn take(&mut self, event: &SandboxEvent) {
        let is_agents = event.actor.as_deref() == Some("agent");
        self.add(FeedLine { at: Some(event.at), text: words::event(event), is_bad: words::is_bad(event), is_agents });
    }

    /// Adds a line that is not an event of the sandbox.
    pub fn note(&mut self, text: String, is_bad: bool) {
        self.add(FeedLine { at: None, text, is_bad, is_agents: false });
    }

    pub fn scroll(&mut self, lines: isize) {
        self.scroll = self.scroll.saturating_add_signed(lines).min(self.lines.len().saturating_sub(1));
    }

    fn add(&mut self, line: FeedLine) {
        if self.lines.len() == MAX_LINES {
            self.lines.pop_front();
        }
        self.lines.push_back(line);
        if self.scroll > 0 {
            // Keeps the visible lines in place while the user is scrolled back.
            self.scroll(1);
        }
    }
}
