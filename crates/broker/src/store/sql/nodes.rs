//! The brokers that share this database, and what they must agree on.

use cobox_protocol::Timestamp;
use sqlx::{AnyConnection, Row};

use super::rows;
use crate::store::{Node, Stored};

pub async fn seen(tx: &mut AnyConnection, node: &Node) -> Stored<()> {
    sqlx::query(
        "INSERT INTO nodes (id, url, seen_at) VALUES ($1, $2, $3)
         ON CONFLICT (id) DO UPDATE SET url = excluded.url, seen_at = excluded.seen_at",
    )
    .bind(&node.id)
    .bind(&node.url)
    .bind(node.seen_at.unix())
    .execute(tx)
    .await?;
    Ok(())
}

pub async fn all(db: &mut AnyConnection) -> Stored<Vec<Node>> {
    let found = sqlx::query("SELECT id, url, seen_at FROM nodes ORDER BY id").fetch_all(db).await?;
    found.iter().map(|row| Ok(Node { id: row.try_get("id")?, url: row.try_get("url")?, seen_at: rows::time(row, "seen_at")? })).collect()
}

/// One that is silent for so long and has nothing left is not coming back.
pub async fn forget(tx: &mut AnyConnection, silent_since: Timestamp) -> Stored<()> {
    sqlx::query("DELETE FROM nodes WHERE seen_at < $1 AND NOT EXISTS (SELECT 1 FROM sandboxes WHERE node_id = nodes.id)")
        .bind(silent_since.unix())
        .execute(tx)
        .await?;
    Ok(())
}

/// Sets a value if there is none yet; answers with the one that counts.
pub async fn agree(tx: &mut AnyConnection, name: &str, value: &str) -> Stored<String> {
    sqlx::query("INSERT INTO agreed (name, value) VALUES ($1, $2) ON CONFLICT (name) DO NOTHING")
        .bind(name)
        .bind(value)
        .execute(&mut *tx)
        .await?;
    Ok(sqlx::query("SELECT value FROM agreed WHERE name = $1").bind(name).fetch_one(tx).await?.try_get("value")?)
}
