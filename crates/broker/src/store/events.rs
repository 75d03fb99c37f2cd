//! Events: appended with the change they describe, read by number, and removed when they are too many or too old.
//!
//! A writer holds the workspace's lock until the commit, so that a reader never sees a number before all smaller ones.

use cobox_protocol::{
    SandboxId, SessionId, Timestamp,
    event::{EventKind, EventSource},
    session::State,
};
use sqlx::{AnyConnection, AssertSqlSafe, Row, any::AnyRow};

use super::{
    asked, lock,
    multi_row::{ROWS_AT_ONCE, values},
    notify, rows,
};
use crate::{
    domain::model::{AuditRecord, Event, Sandbox, Session},
    store::{ChangeNotice, CollectedActivity, EventBounds, EventMarks, EventPage, Store, StoreError, Stored},
};

/// The caller holds the workspace's lock. All events are of one sandbox.
pub async fn append(tx: &mut AnyConnection, events: &[Event]) -> Stored<()> {
    const COLUMNS: usize = 8;
    for events in events.chunks(ROWS_AT_ONCE) {
        let sql = format!(
            "INSERT INTO events (at, workspace_id, sandbox_id, session_id, principal, actor, claimed, what) VALUES {}",
            values(tx, events.len(), COLUMNS)
        );
        let mut query = sqlx::query(AssertSqlSafe(sql));
        for e in events {
            let what = serde_json::to_string(&e.what).map_err(|e| StoreError::Failed(format!("an event can't be written: {e}")))?;
            query = query
                .bind(e.at.unix())
                .bind(&e.workspace)
                .bind(e.sandbox.as_str())
                .bind(e.session.as_ref().map(|s| s.as_str()))
                .bind(e.principal.as_deref())
                .bind(e.actor.as_deref())
                .bind(i64::from(e.source == EventSource::Sandbox))
                .bind(what);
        }
        query.execute(&mut *tx).await?;
    }
    match events.first() {
        Some(first) => notify::send(tx, &ChangeNotice::Events(first.sandbox.clone())).await,
        None => Ok(()),
    }
}

/// Event for a change of a sandbox's state after which its sessions continue. The workspace's lock is taken before the
/// sandbox's.
pub fn of_change(old: &Sandbox, new: &Sandbox) -> Option<Event> {
    let reason = || new.reason.clone().unwrap_or_default();
    let (what, at) = match new.state {
        state if state == old.state => return None,
        State::Active if old.state == State::Suspended => (EventKind::Resumed, new.counted_until),
        // Leaving the idle state doesn't interrupt the running time.
        State::Active if old.state == State::Idle => (EventKind::Active, None),
        State::Active => (EventKind::Active, new.counted_until),
        State::Idle => (EventKind::Idle, None),
        State::Suspended => (EventKind::Suspended { reason: reason() }, new.suspended_at),
        // Each session gets its own end event for these.
        State::Provisioning | State::Terminated | State::Failed => return None,
    };
    Some(Event::of_sandbox(at.unwrap_or(new.last_active_at), new, what))
}

/// The caller holds the workspace's lock.
pub async fn created(tx: &mut AnyConnection, session: &Session, state: State, audit: &AuditRecord) -> Stored<()> {
    append(tx, &[Event::of_session(audit.at, session, EventKind::Created { state }).by(audit)]).await
}

/// The last event of a session. The caller holds the workspace's lock.
pub async fn ended(tx: &mut AnyConnection, session: &Session, state: State, reason: &str, audit: &AuditRecord) -> Stored<()> {
    let reason = reason.to_owned();
    let what = if state == State::Failed { EventKind::Failed { reason } } else { EventKind::Terminated { reason } };
    append(tx, &[Event::of_session(audit.at, session, what).by(audit)]).await
}

/// Appends events reported by a sandbox, each once: those stored before are left out. Returns whether any was new.
pub async fn take(tx: &mut AnyConnection, taken: &CollectedActivity) -> Stored<bool> {
    lock::workspace(tx, &taken.workspace).await?;
    let known = marks(tx, &taken.sandbox).await?;
    let after = if known.life == taken.life { known.taken } else { 0 };
    let fresh: Vec<Event> = taken.events.iter().filter(|(seq, _)| *seq > after).map(|(_, event)| event.clone()).collect();
    append(tx, &fresh).await?;
    sqlx::query(
        "INSERT INTO event_marks (sandbox_id, life, taken) VALUES ($1, $2, $3)
         ON CONFLICT (sandbox_id) DO UPDATE SET life = excluded.life, taken = excluded.taken",
    )
    .bind(taken.sandbox.as_str())
    .bind(&taken.life)
    .bind(stored(taken.events.iter().map(|(seq, _)| *seq).max().unwrap_or(0).max(after)))
    .execute(tx)
    .await?;
    Ok(!fresh.is_empty())
}

pub async fn marks(db: &mut AnyConnection, sandbox: &SandboxId) -> Stored<EventMarks> {
    let row =
        sqlx::query("SELECT life, taken, pruned FROM event_marks WHERE sandbox_id = $1").bind(sandbox.as_str()).fetch_optional(db).await?;
    let Some(row) = row else { return Ok(EventMarks::default()) };
    Ok(EventMarks { life: row.try_get("life")?, taken: rows::count(&row, "taken")?, pruned: rows::count(&row, "pruned")? })
}

/// Events of a session and its sandbox, oldest first, with the number up to which the sandbox's events were removed.
pub async fn after(db: &mut AnyConnection, sandbox: &SandboxId, session: &SessionId, after: u64, limit: u32) -> Stored<EventPage> {
    let found = sqlx::query(
        "SELECT e.*, coalesce((SELECT pruned FROM event_marks WHERE sandbox_id = $1), 0) AS pruned FROM events e
         WHERE e.sandbox_id = $1 AND e.sequence > $2 AND (e.session_id IS NULL OR e.session_id = $3) ORDER BY e.sequence LIMIT $4",
    )
    .bind(sandbox.as_str())
    .bind(stored(after))
    .bind(session.as_str())
    .bind(i64::from(limit))
    .fetch_all(db)
    .await?;
    let pruned = found.first().map_or(Ok(0), |row| rows::count(row, "pruned"))?;
    let events = found.iter().map(|row| Ok((rows::count(row, "sequence")?, event(row)?))).collect::<Stored<_>>()?;
    Ok(EventPage { pruned, events })
}

pub async fn bounds(db: &mut AnyConnection, sandbox: &SandboxId, session: &SessionId) -> Stored<EventBounds> {
    let row = sqlx::query(
        "SELECT coalesce((SELECT min(sequence) FROM events WHERE sandbox_id = $1 AND session_id = $2), 0) AS own_first,
                coalesce((SELECT max(sequence) FROM events WHERE sandbox_id = $1 AND session_id = $2 AND claimed = 0
                          AND (what LIKE '{\"type\":\"terminated\"%' OR what LIKE '{\"type\":\"failed\"%')), 0) AS own_end,
                coalesce((SELECT max(sequence) FROM events WHERE sandbox_id = $1), 0) AS newest,
                coalesce((SELECT pruned FROM event_marks WHERE sandbox_id = $1), 0) AS pruned",
    )
    .bind(sandbox.as_str())
    .bind(session.as_str())
    .fetch_one(db)
    .await?;
    let pruned = rows::count(&row, "pruned")?;
    Ok(EventBounds {
        own_first: rows::count(&row, "own_first")?,
        own_end: rows::count(&row, "own_end")?,
        newest: rows::count(&row, "newest")?.max(pruned),
        pruned,
    })
}

fn event(row: &AnyRow) -> Stored<Event> {
    let what: &str = row.try_get("what")?;
    Ok(Event {
        at: rows::time(row, "at")?,
        workspace: row.try_get("workspace_id")?,
        sandbox: rows::parsed(row, "sandbox_id")?,
        session: rows::parsed_optional(row, "session_id")?,
        principal: row.try_get("principal")?,
        actor: row.try_get("actor")?,
        source: if rows::count(row, "claimed")? == 0 { EventSource::Broker } else { EventSource::Sandbox },
        what: serde_json::from_str(what).map_err(|_| rows::corrupt("what", what))?,
    })
}

/// Removes older events, and all but the newest of every workspace.
pub async fn prune(tx: &mut AnyConnection, before: Timestamp, keep: u32) -> Stored<()> {
    remove(tx, "at < $1", before.unix(), None).await?;
    let found = sqlx::query("SELECT id FROM workspaces ORDER BY id").fetch_all(&mut *tx).await?;
    for row in &found {
        trim(tx, row.try_get("id")?, keep).await?;
    }
    Ok(())
}

pub async fn trim(tx: &mut AnyConnection, workspace: &str, keep: u32) -> Stored<()> {
    let row = sqlx::query("SELECT sequence FROM events WHERE workspace_id = $1 ORDER BY sequence DESC LIMIT 1 OFFSET $2")
        .bind(workspace)
        .bind(i64::from(keep))
        .fetch_optional(&mut *tx)
        .await?;
    let Some(row) = row else { return Ok(()) };
    remove(tx, "sequence <= $1 AND workspace_id = $2", row.try_get("sequence")?, Some(workspace)).await
}

/// Stores the number up to which events were removed, so that a reader that resumes before it learns of the gap.
async fn remove(tx: &mut AnyConnection, which: &'static str, number: i64, workspace: Option<&str>) -> Stored<()> {
    let mark = format!(
        "INSERT INTO event_marks (sandbox_id, pruned)
         SELECT sandbox_id, max(sequence) FROM events WHERE {which} AND sandbox_id IN (SELECT id FROM sandboxes) GROUP BY sandbox_id
         ON CONFLICT (sandbox_id) DO UPDATE
         SET pruned = CASE WHEN event_marks.pruned < excluded.pruned THEN excluded.pruned ELSE event_marks.pruned END"
    );
    for sql in [mark, format!("DELETE FROM events WHERE {which}")] {
        let query = sqlx::query(AssertSqlSafe(sql)).bind(number);
        match workspace {
            Some(workspace) => query.bind(workspace),
            None => query,
        }
        .execute(&mut *tx)
        .await?;
    }
    Ok(())
}

/// Real numbers are far below the column's limit; one sent by a client may not be.
fn stored(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

impl Store {
    /// All of one sandbox. Events of session and sandbox changes are appended together with the change itself.
    pub async fn append_events(&self, events: &[Event]) -> Stored<()> {
        let Some(first) = events.first() else { return Ok(()) };
        let mut tx = self.base.begin_unsynced().await?;
        lock::workspace(&mut tx, &first.workspace).await?;
        append(&mut tx, events).await?;
        self.base.commit_with_event(tx, &first.sandbox).await
    }

    /// Appends the new entries of a sandbox's activity feed.
    pub async fn append_activity(&self, taken: &CollectedActivity) -> Stored<()> {
        let mut tx = self.base.begin_unsynced().await?;
        take(&mut tx, taken).await?;
        self.base.commit_with_event(tx, &taken.sandbox).await
    }

    /// Events of a session and its sandbox after a number, oldest first.
    pub async fn events(&self, sandbox: &SandboxId, session: &SessionId, after: u64, limit: u32) -> Stored<EventPage> {
        asked!(self, db => self::after(db, sandbox, session, after, limit))
    }

    pub async fn event_bounds(&self, sandbox: &SandboxId, session: &SessionId) -> Stored<EventBounds> {
        asked!(self, db => bounds(db, sandbox, session))
    }

    pub async fn event_marks(&self, sandbox: &SandboxId) -> Stored<EventMarks> {
        asked!(self, db => marks(db, sandbox))
    }

    /// Removes older events, and all but the `keep` newest of each workspace. Does nothing while another broker prunes.
    pub async fn prune_events(&self, before: Timestamp, keep: u32) -> Stored<()> {
        let mut tx = self.base.begin_unsynced().await?;
        if lock::is_alone(&mut tx, "prune events").await? {
            prune(&mut tx, before, keep).await?;
        }
        self.base.commit(tx).await
    }

    /// Removes all but the `keep` newest events of a workspace.
    pub async fn trim_events(&self, workspace: &str, keep: u32) -> Stored<()> {
        let mut tx = self.base.begin_unsynced().await?;
        if lock::is_alone(&mut tx, "prune events").await? {
            trim(&mut tx, workspace, keep).await?;
        }
        self.base.commit(tx).await
    }
}
