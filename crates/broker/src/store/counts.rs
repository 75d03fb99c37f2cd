//! Row counts for the metrics.

use cobox_protocol::{Timestamp, session::State};
use sqlx::{AnyConnection, Row};

use super::{asked, rows};
use crate::store::{Counts, Store, StoreError, Stored, WorkspaceTotals};

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
    let fullest = fullest(&mut *connection).await?;
    let size = match connection.backend_name() {
        "SQLite" => "SELECT page_count * page_size AS many FROM pragma_page_count(), pragma_page_size()",
        _ => "SELECT pg_database_size(current_database()) AS many",
    };
    let size = sqlx::query(size).fetch_one(&mut *connection).await?;
    Ok(Counts {
        sandboxes,
        sessions: rows::count(&sessions, "many")?,
        revocations: rows::count(&revocations, "many")?,
        fullest,
        database_bytes: rows::count(&size, "many")?,
    })
}

/// Number of rows of the workspace with the most.
macro_rules! most_rows {
    ($from:literal) => {
        concat!("SELECT coalesce(max(many), 0) AS many FROM (SELECT count(*) AS many FROM ", $from, " GROUP BY workspace_id) AS workspaces")
    };
}

/// Apart from sandboxes, a workspace has at most hundreds of each.
async fn fullest(connection: &mut AnyConnection) -> Stored<WorkspaceTotals> {
    // As for the limit, a volume counts at its maximum size, and a snapshot whose size is not known yet not at all.
    const STORED_BYTES: &str = "SELECT coalesce(max(many), 0) AS many FROM
         (SELECT CAST(sum(bytes) AS BIGINT) AS many FROM
          (SELECT workspace_id, coalesce(size_bytes, 0) AS bytes FROM snapshots
           UNION ALL SELECT workspace_id, size_bytes AS bytes FROM volumes) AS stored
          GROUP BY workspace_id) AS workspaces";
    let mut most = async |sql: &'static str| rows::count(&sqlx::query(sql).fetch_one(&mut *connection).await?, "many");
    Ok(WorkspaceTotals {
        sandboxes: most(most_rows!("sandboxes WHERE ended_at IS NULL")).await?,
        snapshots: most(most_rows!("snapshots")).await?,
        volumes: most(most_rows!("volumes")).await?,
        stored_bytes: most(STORED_BYTES).await?,
        templates: most(most_rows!("templates")).await?,
        pools: most(most_rows!("pools")).await?,
    })
}

impl Store {
    pub async fn counts(&self, now: Timestamp) -> Stored<Counts> {
        asked!(self, db => all(db, now))
    }
}
