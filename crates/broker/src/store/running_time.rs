//! Counts the running time of sandboxes, and excludes time in which a node's broker did not run from the retention of suspended and
//! deleted ones.

use std::{collections::BTreeSet, time::Duration};

use cobox_protocol::Timestamp;
use sqlx::{AnyConnection, Row};

use super::{lock, rows};
use crate::store::{Store, Stored, TimeAccounting};

/// Adds the part of the time since the last call that doesn't count. Returns that part.
async fn count_downtime(tx: &mut AnyConnection, node: &str, now: Timestamp, counting: TimeAccounting) -> Stored<Duration> {
    let found = sqlx::query("SELECT counted_until FROM node_clocks WHERE node_id = $1").bind(node).fetch_optional(&mut *tx).await?;
    let counted_until = found.map(|row| rows::time(&row, "counted_until")).transpose()?;
    if counted_until.is_some_and(|at| !at.is_due(counting.every, now)) {
        return Ok(Duration::ZERO);
    }
    sqlx::query(
        "INSERT INTO node_clocks (node_id, counted_until) VALUES ($1, $2)
         ON CONFLICT (node_id) DO UPDATE SET counted_until = excluded.counted_until",
    )
    .bind(node)
    .bind(now.unix())
    .execute(&mut *tx)
    .await?;
    // A clock that was set back, and a node's first start, add nothing.
    let gap = counted_until.map_or(Duration::ZERO, |at| now.saturating_since(at));
    let downtime = gap.saturating_sub(counting.max_gap);
    if !downtime.is_zero() {
        add(tx, node, now, now.unix().saturating_sub(rows::stored_seconds(downtime))).await?;
    }
    Ok(downtime)
}

/// Adds the time from `from` to `now`, or the part of it after the suspension or deletion.
async fn add(tx: &mut AnyConnection, node: &str, now: Timestamp, from: i64) -> Stored<()> {
    let kept = sqlx::query(
        "SELECT id FROM sandboxes WHERE node_id = $1 AND state = 'suspended' AND suspended_at < $2
         UNION ALL
         SELECT id FROM sandboxes WHERE node_id = $1 AND restore_until IS NOT NULL AND ended_at < $2",
    );
    let kept = kept.bind(node).bind(now.unix()).fetch_all(&mut *tx).await?;
    let ids = kept.iter().map(|row| row.try_get("id")).collect::<Result<BTreeSet<&str>, _>>()?;
    lock::sandboxes(tx, ids).await?;
    for sql in [
        "UPDATE sandboxes SET downtime_seconds = downtime_seconds + $2 - CASE WHEN suspended_at > $3 THEN suspended_at ELSE $3 END
         WHERE node_id = $1 AND state = 'suspended' AND suspended_at < $2",
        "UPDATE sandboxes SET restore_until = restore_until + $2 - CASE WHEN ended_at > $3 THEN ended_at ELSE $3 END
         WHERE node_id = $1 AND restore_until IS NOT NULL AND ended_at < $2",
    ] {
        sqlx::query(sql).bind(node).bind(now.unix()).bind(from).execute(&mut *tx).await?;
    }
    Ok(())
}

/// After a clock was set back, the time in between doesn't count.
async fn count_running(tx: &mut AnyConnection, node: &str, now: Timestamp, counting: TimeAccounting) -> Stored<()> {
    let due = sqlx::query(
        "SELECT id FROM sandboxes WHERE node_id = $1 AND (state IN ('active', 'idle') OR intent IS NOT NULL)
                                    AND (running_since <= $2 - $3 OR running_since > $2)",
    )
    .bind(node)
    .bind(now.unix())
    .bind(rows::stored_seconds(counting.every))
    .fetch_all(&mut *tx)
    .await?;
    let ids = due.iter().map(|row| row.try_get("id")).collect::<Result<BTreeSet<&str>, _>>()?;
    lock::sandboxes(tx, ids).await?;
    sqlx::query(
        "UPDATE sandboxes
         SET running_since = $2, active_seconds = active_seconds + CASE WHEN running_since > $2 THEN 0
                                                                        WHEN $2 - running_since > $4 THEN $4 ELSE $2 - running_since END
         WHERE node_id = $1 AND (state IN ('active', 'idle') OR intent IS NOT NULL) AND (running_since <= $2 - $3 OR running_since > $2)",
    )
    .bind(node)
    .bind(now.unix())
    .bind(rows::stored_seconds(counting.every))
    .bind(rows::stored_seconds(counting.max_gap))
    .execute(tx)
    .await?;
    Ok(())
}

impl Store {
    /// Adds the time since the last count to the running time of each running sandbox of a node that is due for it.
    pub async fn count_running(&self, node: &str, now: Timestamp, counting: TimeAccounting) -> Stored<()> {
        let mut tx = self.base.begin_unsynced().await?;
        count_running(&mut tx, node, now, counting).await?;
        self.base.commit(tx).await
    }

    /// Excludes time in which the node's broker did not run from the retention of its suspended and deleted sandboxes.
    /// Returns that time since the last call. Call before [`Store::sandboxes_due`].
    pub async fn count_downtime(&self, node: &str, now: Timestamp, counting: TimeAccounting) -> Stored<Duration> {
        let mut tx = self.base.begin_unsynced().await?;
        let downtime = count_downtime(&mut tx, node, now, counting).await?;
        self.base.commit(tx).await?;
        Ok(downtime)
    }
}
