//! Activity feed: the operations in a sandbox, stored as events that are marked as reported by the sandbox (untrusted).

use cobox_protocol::{
    Timestamp,
    audit::claim_text,
    event::{Activity, EventKind, EventSource},
    report::{ReportBatch, ReportCursor},
};

use crate::{
    domain::model::{Event, Sandbox},
    store::CollectedActivity,
};

/// The new entries of a batch as events, with an event for each gap in their numbers.
pub fn to_store(sandbox: &Sandbox, known: &ReportCursor, batch: ReportBatch<Activity>, now: Timestamp) -> CollectedActivity {
    let (entries, next) = batch.after(known);
    let mut last = if next.run_id == known.run_id { known.seq } else { 0 };
    let mut events = Vec::new();
    // A number that the store can't hold violates the protocol, too.
    for entry in entries.into_iter().take_while(|entry| i64::try_from(entry.seq).is_ok()) {
        let seq = entry.seq;
        if seq > last + 1 {
            let lost = EventKind::Gap { lost: Some(seq - last - 1) };
            events.push((seq, Event { source: EventSource::Sandbox, ..Event::of_sandbox(now, sandbox, lost) }));
        }
        last = seq;
        events.push((seq, event(sandbox, entry, now)));
    }
    CollectedActivity { workspace: sandbox.workspace.clone(), sandbox: sandbox.id.clone(), life: next.run_id, events }
}

/// Untrusted input from the sandbox: text is bounded, and the time is clamped between the sandbox's creation and now. The
/// event always belongs to this sandbox, and isn't shown in a session of another one even if it names that session.
fn event(sandbox: &Sandbox, entry: Activity, now: Timestamp) -> Event {
    Event {
        at: entry.at.max(sandbox.created_at).min(now),
        workspace: sandbox.workspace.clone(),
        sandbox: sandbox.id.clone(),
        session: entry.session_id.and_then(|s| s.parse().ok()),
        principal: entry.principal.as_deref().map(claim_text),
        actor: entry.actor.map(|a| a.as_str().to_owned()),
        source: EventSource::Sandbox,
        what: entry.action.bounded().into(),
    }
}
