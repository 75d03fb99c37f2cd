//! Row counts for the metrics.

use cobox_protocol::{Timestamp, session::State};
use sqlx::{AnyConnection, Row};

use super::rows;
use crate::store::{Counts, StoreError, Stored};

/// Each count uses an index that only covers rows that have not ended.
pub async fn all(connection: &mut AnyConnection, now: Timestamp) -> Stored<Counts> {
    let states = sqlx::query("SELECT state, count(*) AS many FROM sandboxes WHERE ended_at IS NULL GROUP BY state ORDER BY state")
        .fetch_all(&mut *connection)
        .await?;
    let mut sandboxes = Vec::with_capacity(states.len());
    for row in states {
        let word: String = row.try_get("state")?;
        let state = word.parse::<State>().ok().ok_or_else(|| StoreError::Corrupt(format!("a sandbox's state `{word}`")))?;
        sandboxes.push((state, rows::count(&row, "many")?));
    }
    let sessions = sqlx::query("SELECT count(*) AS many FROM sessions WHERE ended_at IS NULL").fetch_one(&mut *connection).await?;
    let revocations =
        sqlx::query("SELECT count(*) AS many FROM revocations WHERE until >= $1").bind(now.unix()).fetch_one(&mut *connection).await?;
    let largest = sqlx::query(
        "SELECT coalesce(max(many), 0) AS many FROM
         (SELECT count(*) AS many FROM sandboxes WHERE ended_at IS NULL GROUP BY workspace_id) AS workspaces",
    );
    let largest = largest.fetch_one(&mut *connection).await?;
    let size = match connection.backend_name() {
        "SQLite" => "SELECT page_count * page_size AS many FROM pragma_page_count(), pragma_page_size()",
        _ => "SELECT pg_database_size(current_database()) AS many",
    };
    let size = sqlx::query(size).fetch_one(&mut *connection).await?;
    Ok(Counts {
        sandboxes,
        sessions: rows::count(&sessions, "many")?,
        revocations: rows::count(&revocations, "many")?,
        largest_workspace: rows::count(&largest, "many")?,
        database_bytes: rows::count(&size, "many")?,
    })
}
