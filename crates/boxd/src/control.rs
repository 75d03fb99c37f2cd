//! The broker's own channel: it pushes keys, revocations and the lease, and asks how boxd is. Whoever reaches this listener is the broker.

use std::{sync::Arc, time::Duration};

use axum::{
    Json,
    body::Body,
    extract::{Query, State},
};
use cobox_protocol::{
    ApiError, Timestamp,
    audit::Claims,
    control::{BoxdStatus, ControlState},
    event::Happenings,
};
use http::StatusCode;
use tokio_util::sync::CancellationToken;

use crate::{answer::Failure, audit::After, auth::Authority, body, happenings::Wish, server::Server};

/// Some 100 000 revocations; a broker that has more must let tokens of that age expire first.
const MAX_STATE_BYTES: usize = 8 * 1024 * 1024;
/// What open streams get to hear why they end, before an answer tells the broker to go on with it.
const FAREWELL_WITHIN: Duration = Duration::from_millis(250);
/// How long after the lease a broker may still come back: a restart with many sandboxes to greet.
const LEASE_GRACE: Duration = Duration::from_secs(60);
/// The lease is in wall-clock time and sleeping is not, so the clock is looked at again at least this often.
const CLOCK_CHECK: Duration = Duration::from_secs(30);

/// `PUT /control/state`. One older than what is known changes nothing; the answer says which version holds. One that
/// announces the end is answered when everybody has been told, or has had the time for it.
pub async fn put_state(State(server): State<Arc<Server>>, content: Body) -> Result<Json<BoxdStatus>, Failure> {
    // Before the push is taken: one that shortens the lease must not end boxd while its broker is there to decide.
    server.authority.spoken_to();
    let bytes = body::collect(content, MAX_STATE_BYTES).await?;
    let state: ControlState = serde_json::from_slice(&bytes).map_err(|e| ApiError::invalid(format!("the state can't be read: {e}")))?;
    server.authority.replace(&state).map_err(ApiError::invalid)?;
    if state.ending.is_some() {
        // Past this they are cut off: the broker doesn't wait any longer either.
        let _ = tokio::time::timeout(FAREWELL_WITHIN, server.authority.quiet()).await;
    }
    Ok(Json(server.authority.status()))
}

/// `GET /control/status`.
pub async fn get_status(State(server): State<Arc<Server>>) -> Json<BoxdStatus> {
    server.authority.spoken_to();
    Json(server.authority.status())
}

/// `GET /control/claims?life=&after=`: the audit's lines, oldest first.
pub async fn get_claims(State(server): State<Arc<Server>>, after: Query<After>) -> Json<Claims> {
    server.authority.spoken_to();
    Json(server.audit.fetch(after))
}

/// `GET /control/happenings?life=&after=&wait=`: what was done, oldest first, as soon as there is some.
pub async fn get_happenings(State(server): State<Arc<Server>>, Query(wish): Query<Wish>) -> Json<Happenings> {
    server.authority.spoken_to();
    Json(tokio::select! {
        happenings = server.happenings.fetch(&wish) => happenings,
        // Nobody waits for what won't come any more.
        () = server.shutdown.cancelled() => server.happenings.take(&wish),
    })
}

/// `POST /control/shutdown`: answers, then everything ends.
pub async fn shutdown(State(server): State<Arc<Server>>) -> StatusCode {
    tracing::info!("the broker asked boxd to end");
    server.shutdown.cancel();
    StatusCode::ACCEPTED
}

/// Cancels `shutdown` once the lease has run out and no broker has spoken for the grace time.
pub async fn end_with_the_lease(authority: Arc<Authority>, shutdown: CancellationToken) {
    let mut pushes = authority.subscribe();
    loop {
        let end = end_of_life(authority.view().lease_expires_at, authority.last_spoken());
        let now = Timestamp::now();
        if now > end {
            tracing::warn!("the lease ran out and no broker has spoken since: boxd ends");
            shutdown.cancel();
            return;
        }
        // One second more, because timestamps are whole seconds rounded down.
        let nap = (end.saturating_since(now) + Duration::from_secs(1)).min(CLOCK_CHECK);
        tokio::select! {
            () = shutdown.cancelled() => return,
            () = tokio::time::sleep(nap) => {}
            changed = pushes.changed() => if changed.is_err() { return },
        }
    }
}

/// Passes on to the sandbox's programs what the broker says of the disk: writers stop when it is full and go on when there is room.
pub async fn hold_writers(server: Arc<Server>) {
    let mut pushes = server.authority.subscribe();
    let mut is_stopped = false;
    loop {
        let wanted = pushes.borrow_and_update().disk_full;
        if wanted != is_stopped {
            match server.programs.stop_writers(wanted).await {
                Ok(()) => is_stopped = wanted,
                // Tried again with the next push.
                Err(error) => tracing::warn!(%error, stop = wanted, "telling the programs about the disk failed"),
            }
        }
        tokio::select! {
            () = server.shutdown.cancelled() => return,
            changed = pushes.changed() => if changed.is_err() { return },
        }
    }
}

fn end_of_life(lease: Timestamp, last_spoken: Option<Timestamp>) -> Timestamp {
    last_spoken.map_or(lease, |spoken| spoken.max(lease)).plus(LEASE_GRACE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_broker_that_speaks_after_the_lease_keeps_boxd_for_the_grace_time() {
        let at = Timestamp::from_unix;
        assert_eq!(end_of_life(at(1000), None), at(1060));
        assert_eq!(end_of_life(at(1000), Some(at(900))), at(1060));
        assert_eq!(end_of_life(at(1000), Some(at(1050))), at(1110));
    }
}
