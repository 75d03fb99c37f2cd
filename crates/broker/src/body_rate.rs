//! A request body with a minimum rate. If the request is refused, the rest of the body is read for a while: otherwise a
//! client that is still sending would get a connection reset instead of the response.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use axum::body::{Bytes, HttpBody};
use cobox_gateway::TooSlow;
use http::{HeaderMap, header};
use http_body_util::BodyExt;
use hyper::body::{Frame, Incoming, SizeHint};
use serde::Deserialize;
use tokio::{
    runtime::Handle,
    time::{Instant, Sleep, sleep_until, timeout},
};

/// How long a body is read after its request was refused, as long as it meets the minimum rate. Many HTTP libraries
/// write the whole body before they read. Such a client gets its response if it sends everything within this time,
/// regardless of its size: 600 MB at 2 MB/s. It occupies a connection until then; without a valid credential, that
/// connection can still be closed in favor of newer ones.
const DRAIN_WITHIN: Duration = Duration::from_secs(300);

/// Minimum speed of a request body. Only time in which the broker waits for the client counts, not time in which the
/// sandbox reads nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct BodyLimits {
    /// Waiting time that is not counted, for a Wi-Fi reconnect or a slow start.
    pub grace_seconds: u32,
    /// Required average after that. Even a very poor mobile connection is several times as fast.
    pub minimum_bytes_per_second: u32,
    /// Limit for the whole body, however fast it arrives: no upload in one request takes longer.
    pub deadline_seconds: u32,
}

impl Default for BodyLimits {
    fn default() -> Self {
        Self { grace_seconds: 30, minimum_bytes_per_second: 1024, deadline_seconds: 24 * 60 * 60 }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum BodyError {
    #[error("{0}")]
    TooSlow(#[from] TooSlow),
    #[error(transparent)]
    Broken(#[from] hyper::Error),
}

pub struct MinRateBody {
    /// Taken when this is dropped.
    body: Option<Incoming>,
    limits: BodyLimits,
    received: u64,
    /// Total time spent waiting for the client, without the current wait.
    waited: Duration,
    waiting: Option<Waiting>,
    /// Set at the first poll.
    deadline: Option<Instant>,
    /// The client sent `Expect: 100-continue` and sends nothing until the body is read, so there is nothing to drain.
    waits_to_be_asked: bool,
    /// The request was refused, and this instance reads the rest of its body.
    is_draining: bool,
    is_over: bool,
}

struct Waiting {
    since: Instant,
    end: Pin<Box<Sleep>>,
    then: TooSlow,
}

impl MinRateBody {
    pub fn new(body: Incoming, limits: BodyLimits, headers: &HeaderMap) -> Self {
        let waits_to_be_asked = headers.get(header::EXPECT).is_some_and(|v| v.as_bytes().eq_ignore_ascii_case(b"100-continue"));
        Self {
            body: Some(body),
            limits,
            received: 0,
            waited: Duration::ZERO,
            waiting: None,
            deadline: None,
            waits_to_be_asked,
            is_draining: false,
            is_over: false,
        }
    }

    /// The rest of the body, under the same limits.
    fn rest(&mut self) -> Self {
        let waited = self.waited + self.waiting.take().map_or(Duration::ZERO, |waiting| waiting.since.elapsed());
        Self {
            body: self.body.take(),
            limits: self.limits,
            received: self.received,
            waited,
            waiting: None,
            deadline: self.deadline,
            waits_to_be_asked: false,
            is_draining: true,
            is_over: false,
        }
    }

    /// How much longer to wait for the next bytes, and which limit ends the wait.
    fn patience(&self, now: Instant, deadline: Instant) -> (Duration, TooSlow) {
        let BodyLimits { grace_seconds, minimum_bytes_per_second: rate, deadline_seconds } = self.limits;
        let earned = Duration::from_secs(self.received / u64::from(rate.max(1)));
        let patience = (Duration::from_secs(u64::from(grace_seconds)) + earned).saturating_sub(self.waited);
        let left = deadline.saturating_duration_since(now);
        if left < patience { (left, TooSlow::Deadline(deadline_seconds)) } else { (patience, TooSlow::Rate(rate)) }
    }
}

impl HttpBody for MinRateBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = &mut *self;
        let Some(body) = this.body.as_mut().filter(|_| !this.is_over) else { return Poll::Ready(None) };
        this.waits_to_be_asked = false;
        match Pin::new(body).poll_frame(cx) {
            Poll::Ready(polled) => {
                if let Some(waiting) = this.waiting.take() {
                    this.waited += waiting.since.elapsed();
                }
                this.is_over = !matches!(polled, Some(Ok(_)));
                if let Some(data) = polled.as_ref().and_then(|frame| frame.as_ref().ok()?.data_ref()) {
                    this.received += data.len() as u64;
                }
                Poll::Ready(polled.map(|frame| frame.map_err(BodyError::Broken)))
            }
            Poll::Pending => {
                if this.waiting.is_none() {
                    let now = Instant::now();
                    let within = Duration::from_secs(u64::from(this.limits.deadline_seconds));
                    let deadline = *this.deadline.get_or_insert(now + within);
                    let (patience, then) = this.patience(now, deadline);
                    this.waiting = Some(Waiting { since: now, end: Box::pin(sleep_until(now + patience)), then });
                }
                let Some(waiting) = &mut this.waiting else { return Poll::Pending };
                ready!(waiting.end.as_mut().poll(cx));
                let too_slow = waiting.then;
                // The rest of the body is not needed: the connection ends with the response.
                (this.is_over, this.body) = (true, None);
                Poll::Ready(Some(Err(too_slow.into())))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.is_over || self.body.as_ref().is_none_or(HttpBody::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or_else(|| SizeHint::with_exact(0), HttpBody::size_hint)
    }
}

impl Drop for MinRateBody {
    fn drop(&mut self) {
        if self.is_end_stream() || self.waits_to_be_asked || self.is_draining {
            return;
        }
        // Without a runtime, the process is ending.
        if let Ok(runtime) = Handle::try_current() {
            runtime.spawn(timeout(DRAIN_WITHIN, drain(self.rest())));
        }
    }
}

/// Reads and discards what the client still sends, while the response is being sent. Closing a connection with unread
/// bytes would reset it.
async fn drain(mut body: MinRateBody) {
    while let Some(Ok(_)) = body.frame().await {}
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_minimum_rate(received: u64, waited_seconds: u64) -> MinRateBody {
        MinRateBody {
            body: None,
            limits: BodyLimits::default(),
            received,
            waited: Duration::from_secs(waited_seconds),
            waiting: None,
            deadline: None,
            waits_to_be_asked: false,
            is_draining: false,
            is_over: false,
        }
    }

    #[test]
    fn the_rest_of_a_refused_body_is_read_while_it_meets_the_minimum_rate() {
        let now = Instant::now();
        let patience = |with_minimum_rate: &MinRateBody| with_minimum_rate.patience(now, now + Duration::from_secs(86_400));
        let rest = with_minimum_rate(60_000 * 250, 250).rest();
        assert!(rest.is_draining && !patience(&rest).0.is_zero(), "60 kB a second for four minutes");
        assert_eq!((rest.received, rest.waited), (60_000 * 250, Duration::from_secs(250)));
        assert_eq!(patience(&with_minimum_rate(100 * 40, 40).rest()), (Duration::ZERO, TooSlow::Rate(1024)), "100 bytes a second");
        assert!(DRAIN_WITHIN >= Duration::from_secs(60));
    }
}
