//! Tags of sessions and sandboxes: written with their owner's row, read for lists, and used as list filters.

use std::collections::HashMap;

use cobox_protocol::{
    SandboxId, SessionId,
    tags::{TagFilter, Tags},
};
use sqlx::{Any, AnyConnection, AssertSqlSafe, Row, any::AnyArguments, query::Query};

use super::{
    asked,
    multi_row::{ROWS_AT_ONCE, placeholders},
    tags,
};
use crate::store::{Store, Stored};

/// The record type that has the tags.
#[derive(Clone, Copy)]
pub enum TagOwner {
    Session,
    Sandbox,
}

impl TagOwner {
    const fn table(self) -> &'static str {
        match self {
            TagOwner::Session => "session_tags",
            TagOwner::Sandbox => "sandbox_tags",
        }
    }
    const fn id(self) -> &'static str {
        match self {
            TagOwner::Session => "session_id",
            TagOwner::Sandbox => "sandbox_id",
        }
    }
}

/// An existing key gets its new value.
pub async fn set(tx: &mut AnyConnection, on: TagOwner, workspace: &str, id: &str, tags: &Tags) -> Stored<()> {
    let tags: Vec<_> = tags.iter().collect();
    for tags in tags.chunks(ROWS_AT_ONCE) {
        let rows: Vec<String> = (0..tags.len()).map(|n| format!("($1, $2, {})", placeholders(n * 2 + 3, 2))).collect();
        let sql = format!(
            "INSERT INTO {table} ({id}, workspace_id, key, value) VALUES {}
             ON CONFLICT ({id}, key) DO UPDATE SET value = excluded.value",
            rows.join(", "),
            table = on.table(),
            id = on.id(),
        );
        let query = sqlx::query(AssertSqlSafe(sql)).bind(id).bind(workspace);
        tags.iter().fold(query, |query, (key, value)| query.bind(key.as_str()).bind(value.as_str())).execute(&mut *tx).await?;
    }
    Ok(())
}

pub async fn remove(tx: &mut AnyConnection, on: TagOwner, id: &str, key: &str) -> Stored<()> {
    let sql = format!("DELETE FROM {} WHERE {} = $1 AND key = $2", on.table(), on.id());
    sqlx::query(AssertSqlSafe(sql)).bind(id).bind(key).execute(tx).await?;
    Ok(())
}

/// By id; ids without tags are left out.
pub async fn of(db: &mut AnyConnection, on: TagOwner, ids: &[&str]) -> Stored<HashMap<String, Tags>> {
    let mut found: HashMap<String, Tags> = HashMap::new();
    for ids in ids.chunks(ROWS_AT_ONCE) {
        let sql = format!("SELECT {id} AS id, key, value FROM {} WHERE {id} IN ({})", on.table(), placeholders(1, ids.len()), id = on.id());
        let query = ids.iter().fold(sqlx::query(AssertSqlSafe(sql)), |query, id| query.bind(*id));
        for row in query.fetch_all(&mut *db).await? {
            found.entry(row.try_get("id")?).or_default().insert(row.try_get("key")?, row.try_get("value")?);
        }
    }
    Ok(found)
}

/// ` AND …` for each filter, with placeholders from `$next` on; `$1` is the workspace. [`bind`] binds their values.
pub fn conditions(on: TagOwner, filters: &[TagFilter], next: usize) -> String {
    let mut sql = String::new();
    for (n, _) in filters.iter().enumerate() {
        let (key, value) = (next + n * 2, next + n * 2 + 1);
        let is_so = format!("t.workspace_id = $1 AND t.key = ${key} AND (${value} IS NULL OR t.value = ${value})");
        sql += &match on {
            TagOwner::Session => format!(" AND s.id IN (SELECT t.session_id FROM session_tags t WHERE {is_so})"),
            // A sandbox is also found by the tags of the sessions that use it.
            TagOwner::Sandbox => format!(
                " AND id IN (SELECT t.sandbox_id FROM sandbox_tags t WHERE {is_so}
                             UNION SELECT s.sandbox_id FROM session_tags t JOIN sessions s ON s.id = t.session_id
                                    WHERE {is_so} AND s.ended_at IS NULL)"
            ),
        };
    }
    sql
}

pub fn bind<'q>(query: Query<'q, Any, AnyArguments>, filters: &'q [TagFilter]) -> Query<'q, Any, AnyArguments> {
    filters.iter().fold(query, |query, f| query.bind(f.key.as_str()).bind(f.value.as_deref()))
}

impl Store {
    /// Tags by session id; sessions without tags are left out.
    pub async fn session_tags(&self, ids: &[&SessionId]) -> Stored<HashMap<String, Tags>> {
        let ids: Vec<&str> = ids.iter().map(|id| id.as_str()).collect();
        asked!(self, db => of(db, tags::TagOwner::Session, &ids))
    }

    pub async fn sandbox_tags(&self, ids: &[&SandboxId]) -> Stored<HashMap<String, Tags>> {
        let ids: Vec<&str> = ids.iter().map(|id| id.as_str()).collect();
        asked!(self, db => of(db, tags::TagOwner::Sandbox, &ids))
    }
}
