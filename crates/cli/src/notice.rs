//! Status messages for a user whose terminal shows another program: temporary notices, the state of the connection,
//! and a status line on request.

use std::time::Duration;

use tokio::time::Instant;

use crate::printer::visible;

/// How long a notice stays visible: long enough to be read, short enough not to obstruct.
const STAYS: Duration = Duration::from_secs(4);
/// Shorter interruptions are not reported: the user would not notice them.
const LOST_AFTER: Duration = Duration::from_millis(700);
/// Longest message, in characters: no terminal is wider, and text from a sandbox can have any length.
const MAX_CHARS: usize = 1000;
/// Minimum interval between two bells: a user who keeps typing without effect needs a hint, not a constant alarm.
const BELL_PERIOD: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
pub struct Notices {
    notice: Option<(String, Instant)>,
    /// When the connection was lost, and advice for the user.
    lost: Option<(Instant, String)>,
    /// The status line, if the user switched it on.
    status: Option<String>,
    rang_at: Option<Instant>,
}

impl Notices {
    pub fn say(&mut self, words: &str) {
        self.say_at(words, Instant::now());
    }

    fn say_at(&mut self, words: &str, now: Instant) {
        self.notice = Some((words.chars().take(MAX_CHARS).collect(), now + STAYS));
    }

    /// Records a lost connection; it stays lost until [`Notices::is_back`].
    pub fn is_lost(&mut self, now: Instant, advice: &str) {
        self.lost.get_or_insert_with(|| (now, advice.to_owned()));
    }

    pub fn is_back(&mut self, now: Instant) {
        if self.lost.take().is_some_and(|(since, _)| now.duration_since(since) >= LOST_AFTER) {
            self.say_at("connected again", now);
        }
    }

    pub fn has_connection(&self) -> bool {
        self.lost.is_none()
    }

    /// Sets a permanent status line, or removes it.
    pub fn set_status(&mut self, words: Option<String>) {
        self.status = words;
    }

    /// The message to show now.
    pub fn words(&self, now: Instant) -> Option<String> {
        let notice = self.notice.as_ref().filter(|(_, until)| *until > now).map(|(words, _)| words.clone());
        let lost = self.lost.as_ref().filter(|(since, _)| now >= *since + LOST_AFTER).map(|(since, advice)| {
            let seconds = now.duration_since(*since).as_secs();
            format!("no connection for {seconds} s; trying again{advice}")
        });
        let words = notice.or(lost).or_else(|| self.status.clone())?;
        Some(format!(" cobox: {} ", visible(&words)))
    }

    /// When the message changes because of the time alone.
    pub fn changes_at(&self, now: Instant) -> Option<Instant> {
        let notice = self.notice.as_ref().map(|(_, until)| *until).filter(|until| *until > now);
        let lost = self.lost.as_ref().map(|(since, _)| match now.duration_since(*since) {
            young if young < LOST_AFTER => *since + LOST_AFTER,
            // The message counts the seconds.
            old => *since + Duration::from_secs(old.as_secs() + 1),
        });
        [notice, lost].into_iter().flatten().min()
    }

    /// Whether a bell may ring now; if so, records it.
    pub fn rings(&mut self, now: Instant) -> bool {
        let is_due = self.rang_at.is_none_or(|at| now.duration_since(at) >= BELL_PERIOD);
        if is_due {
            self.rang_at = Some(now);
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_outage_is_not_worth_a_word_and_a_long_one_is_counted() {
        let mut notices = Notices::default();
        let mut now = Instant::now();
        notices.set_status(Some("status".into()));
        notices.is_lost(now, "; leave");
        assert!(notices.words(now).unwrap().contains("status"));
        now += LOST_AFTER / 2;
        notices.is_back(now);
        assert!(notices.words(now).unwrap().contains("status"));
        notices.is_lost(now, "; leave");
        now = notices.changes_at(now).unwrap();
        assert_eq!(notices.words(now).unwrap(), " cobox: no connection for 0 s; trying again; leave ");
        now = notices.changes_at(now).unwrap();
        now = notices.changes_at(now).unwrap();
        assert!(notices.words(now).unwrap().contains("for 2 s"));
        notices.say_at("said \x1b[2J", now);
        assert!(notices.words(now).unwrap().contains("said \\u{1b}[2J"));
        notices.is_back(now);
        assert_eq!(notices.words(now).unwrap(), " cobox: connected again ");
        now = notices.changes_at(now).unwrap();
        assert_eq!((notices.words(now).unwrap().as_str(), notices.changes_at(now)), (" cobox: status ", None));
        assert!(notices.rings(now) && !notices.rings(now) && notices.rings(now + BELL_PERIOD));
    }
}
