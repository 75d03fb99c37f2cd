//! The routes by which the broker fetches claims and activities. It polls for them, because boxd never opens a
//! connection.

use std::{future::pending, sync::Arc, time::Duration};

use axum::{
    Json,
    extract::{Query, State},
};
use cobox_protocol::{
    audit::SandboxClaim,
    event::Activity,
    report::{ReportBatch, ReportCursor, ReportQuery, Reports},
};
use serde::Deserialize;
use tokio::time::{sleep, timeout};

use crate::server::Server;

/// Records within this time are delivered together, so that a busy sandbox wakes its broker a few times per second and
/// not with every request.
const BATCH_WINDOW: Duration = Duration::from_millis(50);
/// Maximum time for which the broker may wait for records: below its timeout for a response.
const MAX_WAIT: Duration = Duration::from_secs(30);

/// `GET /control/reports?claims=&activities=&wait_ms=`: records of each kind after its cursor; waits until there are
/// some.
pub async fn get_reports(State(server): State<Arc<Server>>, Query(query): Query<ReportQuery>) -> Json<Reports> {
    Json(fetch(&server, &query).await)
}

/// Parameters of the routes for one kind.
#[derive(Deserialize)]
pub struct SingleKindQuery {
    /// Records up to this number were stored and can be dropped.
    #[serde(default)]
    after: u64,
    /// The run of boxd that the number is from.
    #[serde(default, rename = "life")]
    run_id: String,
    /// Seconds to wait if there are no records.
    #[serde(default)]
    wait: u64,
}

impl SingleKindQuery {
    fn cursor(self) -> Option<ReportCursor> {
        Some(ReportCursor { run_id: self.run_id, seq: self.after })
    }
}

/// `GET /control/claims?life=&after=`, for brokers that don't know [`get_reports`].
pub async fn get_claims(
    State(server): State<Arc<Server>>,
    Query(query): Query<SingleKindQuery>,
) -> Json<Option<ReportBatch<SandboxClaim>>> {
    let query = ReportQuery { claims: query.cursor(), ..ReportQuery::default() };
    Json(fetch(&server, &query).await.claims)
}

/// `GET /control/happenings?life=&after=&wait=`, for brokers that don't know [`get_reports`].
pub async fn get_activity(State(server): State<Arc<Server>>, Query(query): Query<SingleKindQuery>) -> Json<Option<ReportBatch<Activity>>> {
    let query = ReportQuery { wait_ms: query.wait.saturating_mul(1000), activities: query.cursor(), ..ReportQuery::default() };
    Json(fetch(&server, &query).await.activities)
}

async fn fetch(server: &Server, query: &ReportQuery) -> Reports {
    server.authority.note_broker_request();
    let (claims, activities) = (&server.sandbox_claims, &server.activity_log.entries);
    if let Some(stored) = &query.claims {
        claims.acknowledge(stored);
    }
    if let Some(stored) = &query.activities {
        activities.acknowledge(stored);
    }
    let available = async {
        tokio::select! {
            () = claims.available(), if query.claims.is_some() => {}
            () = activities.available(), if query.activities.is_some() => {}
            else => pending().await,
        }
    };
    let is_available = query.claims.is_some() && !claims.is_empty() || query.activities.is_some() && !activities.is_empty();
    if !is_available && query.wait_ms > 0 {
        let batch = async {
            if timeout(Duration::from_millis(query.wait_ms).min(MAX_WAIT), available).await.is_ok() {
                sleep(BATCH_WINDOW).await;
            }
        };
        tokio::select! {
            () = batch => {}
            // No more records will come.
            () = server.shutdown.cancelled() => {}
        }
    }
    Reports { claims: query.claims.as_ref().map(|_| claims.batch()), activities: query.activities.as_ref().map(|_| activities.batch()) }
}
