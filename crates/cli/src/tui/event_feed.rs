//! The most recent events of the sandbox as lines of the feed.

use std::collections::VecDeque;

use cobox_protocol::{Timestamp, event::SandboxEvent};

use crate::chat::formatting;

/// Lines kept; `cobox session events` shows all of them.
const MAX_LINES: usize = 500;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FeedLine {
    pub at: Option<Timestamp>,
    pub text: String,
    pub is_error: bool,
    pub is_by_agent: bool,
}

#[derive(Debug, Default)]
pub struct EventFeed {
    lines: VecDeque<FeedLine>,
    /// Scroll offset, in lines from the end.
    pub scroll: usize,
}

impl EventFeed {
    pub fn lines(&self) -> impl DoubleEndedIterator<Item = &FeedLine> + ExactSizeIterator {
        self.lines.iter()
    }

    pub fn push_event(&mut self, event: &SandboxEvent) {
        let is_by_agent = event.actor.as_deref() == Some("agent");
        self.push(FeedLine {
            at: Some(event.at),
            text: formatting::format_event(event),
            is_error: formatting::is_failure(event),
            is_by_agent,
        });
    }

    /// Adds a line that is not an event of the sandbox.
    pub fn push_note(&mut self, text: String, is_error: bool) {
        self.push(FeedLine { at: None, text, is_error, is_by_agent: false });
    }

    pub fn scroll(&mut self, lines: isize) {
        self.scroll = self.scroll.saturating_add_signed(lines).min(self.lines.len().saturating_sub(1));
    }

    fn push(&mut self, line: FeedLine) {
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
