//! Status messages for a user whose terminal shows another program: temporary notices, the state of the connection,
//! and a status line on request.

use std::time::Duration;

use tokio::time::Instant;

use crate::printer::visible;

/// How long a notice stays visible: long enough to be read, short enough not to obstruct.
const NOTICE_DURATION: Duration = Duration::from_secs(4);
/// Shorter interruptions are not reported: the user would not notice them.
const OUTAGE_THRESHOLD: Duration = Duration::from_millis(700);
/// Longest message, in characters: no terminal is wider, and text from a sandbox can have any length.
const MAX_CHARS: usize = 1000;
/// Minimum interval between two bells: a user who keeps typing without effect needs a hint, not a constant alarm.
const BELL_PERIOD: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
pub struct Notices {
    notice: Option<(String, Instant)>,
    /// When the connection was lost, and advice for the user.
    outage: Option<(Instant, String)>,
    /// The status line, if the user switched it on.
    status: Option<String>,
    last_bell_at: Option<Instant>,
}

impl Notices {
    pub fn notify(&mut self, message: &str) {
        self.notify_at(message, Instant::now());
    }

    fn notify_at(&mut self, message: &str, now: Instant) {
        self.notice = Some((message.chars().take(MAX_CHARS).collect(), now + NOTICE_DURATION));
    }

    /// Records a lost connection; it stays lost until [`Notices::set_connected`].
    pub fn set_disconnected(&mut self, now: Instant, advice: &str) {
        self.outage.get_or_insert_with(|| (now, advice.to_owned()));
    }

    pub fn set_connected(&mut self, now: Instant) {
        if self.outage.take().is_some_and(|(since, _)| now.duration_since(since) >= OUTAGE_THRESHOLD) {
            self.notify_at("reconnected", now);
        }
    }

    pub fn is_connected(&self) -> bool {
        self.outage.is_none()
    }

    /// Sets a permanent status line, or removes it.
    pub fn set_status(&mut self, message: Option<String>) {
        self.status = message;
    }

    /// The message to show now.
    pub fn message(&self, now: Instant) -> Option<String> {
        let notice = self.notice.as_ref().filter(|(_, until)| *until > now).map(|(message, _)| message.clone());
        let outage = self.outage.as_ref().filter(|(since, _)| now >= *since + OUTAGE_THRESHOLD).map(|(since, advice)| {
            let seconds = now.duration_since(*since).as_secs();
            format!("no connection for {seconds} s; reconnecting{advice}")
        });
        let message = notice.or(outage).or_else(|| self.status.clone())?;
        Some(format!(" cobox: {} ", visible(&message)))
    }

    /// When the message changes because of the time alone.
    pub fn next_change_at(&self, now: Instant) -> Option<Instant> {
        let notice = self.notice.as_ref().map(|(_, until)| *until).filter(|until| *until > now);
        let outage = self.outage.as_ref().map(|(since, _)| match now.duration_since(*since) {
            young if young < OUTAGE_THRESHOLD => *since + OUTAGE_THRESHOLD,
            // The message counts the seconds.
            old => *since + Duration::from_secs(old.as_secs() + 1),
        });
        [notice, outage].into_iter().flatten().min()
    }

    /// Whether a bell may ring now; if so, records it.
    pub fn try_ring(&mut self, now: Instant) -> bool {
        let is_due = self.last_bell_at.is_none_or(|at| now.duration_since(at) >= BELL_PERIOD);
        if is_due {
            self.last_bell_at = Some(now);
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_outage_is_not_reported_and_a_long_one_is_counted() {
        let mut notices = Notices::default();
        let mut now = Instant::now();
        notices.set_status(Some("status".into()));
        notices.set_disconnected(now, "; leave");
        assert!(notices.message(now).unwrap().contains("status"));
        now += OUTAGE_THRESHOLD / 2;
        notices.set_connected(now);
        assert!(notices.message(now).unwrap().contains("status"));
        notices.set_disconnected(now, "; leave");
        now = notices.next_change_at(now).unwrap();
        assert_eq!(notices.message(now).unwrap(), " cobox: no connection for 0 s; reconnecting; leave ");
        now = notices.next_change_at(now).unwrap();
        now = notices.next_change_at(now).unwrap();
        assert!(notices.message(now).unwrap().contains("for 2 s"));
        notices.notify_at("said \x1b[2J", now);
        assert!(notices.message(now).unwrap().contains("said \\u{1b}[2J"));
        notices.set_connected(now);
        assert_eq!(notices.message(now).unwrap(), " cobox: reconnected ");
        now = notices.next_change_at(now).unwrap();
        assert_eq!((notices.message(now).unwrap().as_str(), notices.next_change_at(now)), (" cobox: status ", None));
        assert!(notices.try_ring(now) && !notices.try_ring(now) && notices.try_ring(now + BELL_PERIOD));
    }
}
