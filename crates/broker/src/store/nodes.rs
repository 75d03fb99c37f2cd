//! The brokers that share this database, and the values they must agree on.

use cobox_protocol::Timestamp;
use sqlx::{AnyConnection, Row, any::AnyRow};

use super::{asked, notify, rows};
use crate::store::{ChangeNotice, Node, Store, Stored};

/// Returns false if another process has claimed the node.
pub async fn seen(tx: &mut AnyConnection, node: &Node) -> Stored<bool> {
    let updated = sqlx::query(
        "INSERT INTO nodes (id, url, seen_at, instance, beats, clock_offset_ms) VALUES ($1, $2, $3, $4, 1, $5)
         ON CONFLICT (id) DO UPDATE
         SET url = excluded.url, seen_at = excluded.seen_at, beats = nodes.beats + 1, clock_offset_ms = excluded.clock_offset_ms
         WHERE nodes.instance = excluded.instance",
    )
    .bind(&node.id)
    .bind(&node.url)
    .bind(node.seen_at.unix())
    .bind(&node.instance)
    .bind(node.clock_offset_ms)
    .execute(tx)
    .await?;
    Ok(updated.rows_affected() > 0)
}

/// The clock of the process that had the node before says nothing about this one's.
pub async fn take(tx: &mut AnyConnection, node: &Node) -> Stored<()> {
    sqlx::query(
        "INSERT INTO nodes (id, url, seen_at, instance, beats) VALUES ($1, $2, $3, $4, 1)
         ON CONFLICT (id) DO UPDATE
         SET url = excluded.url, seen_at = excluded.seen_at, instance = excluded.instance, beats = nodes.beats + 1,
             clock_offset_ms = NULL",
    )
    .bind(&node.id)
    .bind(&node.url)
    .bind(node.seen_at.unix())
    .bind(&node.instance)
    .execute(tx)
    .await?;
    Ok(())
}

pub async fn all(db: &mut AnyConnection) -> Stored<Vec<Node>> {
    let found = sqlx::query("SELECT id, url, seen_at, instance, beats, clock_offset_ms FROM nodes ORDER BY id").fetch_all(db).await?;
    let read = |row: &AnyRow| {
        Ok(Node {
            id: row.try_get("id")?,
            url: row.try_get("url")?,
            seen_at: rows::time(row, "seen_at")?,
            instance: row.try_get("instance")?,
            heartbeats: rows::count(row, "beats")?,
            clock_offset_ms: row.try_get("clock_offset_ms")?,
        })
    };
    found.iter().map(read).collect()
}

/// SQLite has this machine's clock.
pub async fn clock_millis(db: &mut AnyConnection) -> Stored<i64> {
    let sql = match db.backend_name() {
        "SQLite" => "SELECT CAST((julianday('now') - 2440587.5) * 86400000 AS BIGINT) AS ms",
        _ => "SELECT CAST(extract(epoch FROM clock_timestamp()) * 1000 AS BIGINT) AS ms",
    };
    Ok(sqlx::query(sql).fetch_one(db).await?.try_get("ms")?)
}

/// Removes nodes without a heartbeat since then and without sandboxes: they will not come back.
pub async fn forget(tx: &mut AnyConnection, silent_since: Timestamp) -> Stored<()> {
    sqlx::query("DELETE FROM nodes WHERE seen_at < $1 AND NOT EXISTS (SELECT 1 FROM sandboxes WHERE node_id = nodes.id)")
        .bind(silent_since.unix())
        .execute(&mut *tx)
        .await?;
    sqlx::query(
        "DELETE FROM node_clocks WHERE counted_until < $1 AND NOT EXISTS (SELECT 1 FROM sandboxes WHERE node_id = node_clocks.node_id)",
    )
    .bind(silent_since.unix())
    .execute(tx)
    .await?;
    Ok(())
}

/// Sets a value if there is none yet; returns the stored one.
pub async fn agree(tx: &mut AnyConnection, name: &str, value: &str) -> Stored<String> {
    sqlx::query("INSERT INTO agreed (name, value) VALUES ($1, $2) ON CONFLICT (name) DO NOTHING")
        .bind(name)
        .bind(value)
        .execute(&mut *tx)
        .await?;
    Ok(sqlx::query("SELECT value FROM agreed WHERE name = $1").bind(name).fetch_one(tx).await?.try_get("value")?)
}

/// Replaces a value that nothing reads.
pub async fn probe(tx: &mut AnyConnection, now: Timestamp) -> Stored<()> {
    sqlx::query("INSERT INTO agreed (name, value) VALUES ('write probe', $1) ON CONFLICT (name) DO UPDATE SET value = excluded.value")
        .bind(now.to_string())
        .execute(tx)
        .await?;
    Ok(())
}

impl Store {
    /// Writes and commits a few bytes, to check that the database accepts changes.
    pub async fn probe_write(&self, now: Timestamp) -> Stored<()> {
        let mut tx = self.base.begin().await?;
        probe(&mut tx, now).await?;
        // No query reads it, so cached reads stay valid.
        self.base.commit_timed(tx).await
    }

    /// Writes a heartbeat. False when another process has claimed the node since; then nothing is changed.
    pub async fn record_heartbeat(&self, node: &Node) -> Stored<bool> {
        let mut tx = self.base.begin_unsynced().await?;
        let is_same = seen(&mut tx, node).await?;
        self.base.commit(tx).await?;
        Ok(is_same)
    }

    /// Claims the node for this process.
    pub async fn take_node(&self, node: &Node) -> Stored<()> {
        let mut tx = self.base.begin().await?;
        take(&mut tx, node).await?;
        self.base.commit(tx).await
    }

    pub async fn nodes(&self) -> Stored<Vec<Node>> {
        asked!(self, db => all(db))
    }

    /// Asks another broker for an immediate heartbeat.
    pub async fn request_heartbeat(&self, node: &str) -> Stored<()> {
        let notice = ChangeNotice::HeartbeatRequest(node.to_owned());
        asked!(self, db => notify::send(db, &notice))
    }

    /// The database's own clock, in milliseconds since 1970.
    pub async fn clock_millis(&self) -> Stored<i64> {
        asked!(self, db => clock_millis(db))
    }

    /// Sets a value if there is none yet; returns the one that is valid for every broker.
    pub async fn agree(&self, name: &str, value: &str) -> Stored<String> {
        let mut tx = self.base.begin().await?;
        let agreed = agree(&mut tx, name, value).await?;
        self.base.commit(tx).await?;
        Ok(agreed)
    }
}
