//! The broker's control channel: it pushes keys, revocations and the lease, and queries boxd's status. Every client of
//! this listener is trusted as the broker.

use std::{sync::Arc, time::Duration};

use axum::{Json, body::Body, extract::State};
use cobox_protocol::{
    ApiError, Timestamp,
    control::{BoxdStatus, ControlState},
};
use http::StatusCode;
use tokio_util::sync::CancellationToken;

use crate::{auth::Authority, body, request_layer::ErrorResponse, server::Server};

/// Room for some 100 000 revocations; a broker that has more must first let tokens of that age expire.
const MAX_STATE_BYTES: usize = 8 * 1024 * 1024;
/// Time to notify open streams why they end, before the response allows the broker to proceed.
const STREAM_CLOSE_TIMEOUT: Duration = Duration::from_millis(250);

/// `PUT /control/state`. A push older than the current version changes nothing; the response contains the version in
/// force. A push that announces the end is answered when all streams have been notified or the time for it is over.
pub async fn put_state(State(server): State<Arc<Server>>, content: Body) -> Result<Json<BoxdStatus>, ErrorResponse> {
    // Before the push is applied: a push that shortens the lease must not end boxd while its broker is there to decide.
    server.authority.note_broker_request();
    let bytes = body::collect(content, MAX_STATE_BYTES).await?;
    let state: ControlState = serde_json::from_slice(&bytes).map_err(|e| ApiError::invalid(format!("the state can't be read: {e}")))?;
    server.authority.apply_push(&state).map_err(ApiError::invalid)?;
    if state.stop_reason.is_some() {
        // Streams that are still open after this time are cut off; the broker stops waiting too.
        let _ = tokio::time::timeout(STREAM_CLOSE_TIMEOUT, server.authority.wait_until_idle()).await;
    }
    Ok(Json(server.authority.status()))
}

/// `GET /control/status`.
pub async fn get_status(State(server): State<Arc<Server>>) -> Json<BoxdStatus> {
    server.authority.note_broker_request();
    Json(server.authority.status())
}

/// `POST /control/shutdown`: sends the response, then shuts everything down.
pub async fn shutdown(State(server): State<Arc<Server>>) -> StatusCode {
    tracing::info!("the broker asked boxd to end");
    server.shutdown.cancel();
    StatusCode::ACCEPTED
}

/// Cancels `shutdown` once the lease has run out and the broker has been silent for the grace period. The lease is
/// wall-clock time and the silence is monotonic, so that after a clock jump or a suspended machine an available broker
/// still decides.
pub async fn enforce_lease(authority: Arc<Authority>, grace: Duration, shutdown: CancellationToken) {
    let mut pushes = authority.subscribe();
    loop {
        let time_left = time_until_end(authority.pushed_state().lease_expires_at, authority.clock.now(), authority.broker_silence(), grace);
        if time_left.is_zero() {
            tracing::warn!("the lease ran out and the broker has been silent since: boxd ends");
            shutdown.cancel();
            return;
        }
        tokio::select! {
            () = shutdown.cancelled() => return,
            () = tokio::time::sleep(time_left.min(authority.clock.recheck_interval())) => {}
            changed = pushes.changed() => if changed.is_err() { return },
        }
    }
}

/// Applies the broker's disk state to the sandbox's programs: writers stop when the disk is full and continue when
/// there is space.
pub async fn apply_disk_state(server: Arc<Server>) {
    let mut pushes = server.authority.subscribe();
    let mut is_stopped = false;
    loop {
        let should_stop = pushes.borrow_and_update().disk_full;
        if should_stop != is_stopped {
            match server.programs.stop_writers(should_stop).await {
                Ok(()) => is_stopped = should_stop,
                Err(error) => {
                    tracing::warn!(%error, stop = should_stop, "stopping or resuming writers failed; retrying with the next push")
                }
            }
        }
        tokio::select! {
            () = server.shutdown.cancelled() => return,
            changed = pushes.changed() => if changed.is_err() { return },
        }
    }
}

fn time_until_end(lease_expires_at: Timestamp, now: Timestamp, broker_silence: Duration, grace: Duration) -> Duration {
    let lease_left = lease_expires_at.plus(grace).saturating_since(now);
    lease_left.max(grace.saturating_sub(broker_silence))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRACE: Duration = Duration::from_secs(60);

    #[test]
    fn boxd_ends_when_its_lease_is_over_and_its_broker_is_silent() {
        let (lease, seconds) = (Timestamp::from_unix(100_000), Duration::from_secs);
        let time_left = |now, silence| time_until_end(lease, Timestamp::from_unix(now), silence, GRACE);
        assert_eq!(time_left(100_060, GRACE), Duration::ZERO);
        assert_eq!(time_left(100_060, seconds(10)), seconds(50), "a broker that sends requests is there to decide");
        assert_eq!(time_left(100_000, seconds(5000)), GRACE, "a broker that restarts gets the grace time");
    }

    #[test]
    fn a_clock_jump_does_not_end_boxd_while_the_broker_is_reachable() {
        let (lease, seconds) = (Timestamp::from_unix(100_000), Duration::from_secs);
        let time_left = |now, silence| time_until_end(lease, Timestamp::from_unix(now), silence, GRACE);
        // After a machine slept for a day, or the clock was set forward: the lease has expired, but the broker was
        // heard 25 s ago.
        assert_eq!(time_left(100_000 + 86_400, seconds(25)), seconds(35));
        // Setting the clock back by an hour extends the lease by an hour; the broker's next push corrects it.
        assert_eq!(time_left(100_000 - 3600, seconds(600)), seconds(3660));
    }
}
