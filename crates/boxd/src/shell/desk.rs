//! The participants of a shell: who controls it, who observes, and which input each client has already sent.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use cobox_protocol::{
    ApiError, ErrorCode,
    frame::{ControlAction, Controller},
    key::PrincipalKind,
};
use tokio_util::sync::CancellationToken;

use crate::input_dedup::{InputDeduplicator, InputSource};

/// Maximum participants per shell. Each costs a task and a few frames. The streams of a sandbox have a limit too.
pub const MAX_VIEWERS: usize = 512;
/// How long control is reserved for a controller whose connection broke.
const RETURN_WITHIN: Duration = Duration::from_secs(30);
/// How long after a human's last key an agent is refused control: longer than a pause between two words.
const HUMAN_IS_TYPING: Duration = Duration::from_secs(10);

#[derive(Default)]
pub struct Desk {
    next_viewer: u64,
    viewers: HashMap<u64, Viewer>,
    holder: Option<Holder>,
    input_dedup: InputDeduplicator,
}

struct Viewer {
    who: Controller,
    client: Option<String>,
    size: Option<(u16, u16)>,
    taken_over: CancellationToken,
}

struct Holder {
    who: Controller,
    /// `None` while the connection is lost and may return.
    viewer: Option<u64>,
    left_at: Option<Instant>,
    typed_at: Option<Instant>,
}

/// A client that joins a shell.
pub struct Newcomer {
    pub who: Controller,
    pub client: Option<String>,
    pub may_control: bool,
    pub size: Option<(u16, u16)>,
}

impl Desk {
    /// Adds a participant, which gets control if it is free or reserved for this principal. The token is cancelled when
    /// another connection of the same client replaces this one.
    pub fn join(&mut self, newcomer: Newcomer, now: Instant) -> Result<(u64, CancellationToken), ApiError> {
        self.expire(now);
        let id = self.next_viewer;
        self.next_viewer += 1;
        let is_same = |v: &Viewer| newcomer.client.is_some() && v.client == newcomer.client && v.who == newcomer.who;
        let before = self.viewers.iter().find(|(_, v)| is_same(v)).map(|(id, _)| *id);
        if let Some(before) = before
            && let Some(viewer) = self.viewers.remove(&before)
        {
            viewer.taken_over.cancel();
            self.leaves(before, now);
        }
        if self.viewers.len() >= MAX_VIEWERS {
            return Err(ApiError::new(
                ErrorCode::RateLimited,
                format!("{MAX_VIEWERS} are already connected to this shell; try again later"),
            ));
        }
        let taken_over = CancellationToken::new();
        let Newcomer { who, client, may_control, size } = newcomer;
        self.viewers.insert(id, Viewer { who: who.clone(), client, size, taken_over: taken_over.clone() });
        if may_control {
            match &mut self.holder {
                None => self.give(id),
                Some(holder) if holder.viewer.is_none() && holder.who == who => {
                    (holder.viewer, holder.left_at) = (Some(id), None);
                }
                Some(_) => {}
            }
        }
        Ok((id, taken_over))
    }

    pub fn leave(&mut self, id: u64, now: Instant) {
        if self.viewers.remove(&id).is_some() {
            self.leaves(id, now);
        }
    }

    fn leaves(&mut self, id: u64, now: Instant) {
        if let Some(holder) = self.holder.as_mut().filter(|h| h.viewer == Some(id)) {
            (holder.viewer, holder.left_at) = (None, Some(now));
        }
    }

    /// Frees control that was reserved for a controller that did not return. Returns when to check again.
    pub fn expire(&mut self, now: Instant) -> Option<Instant> {
        let until = self.holder.as_ref()?.left_at? + RETURN_WITHIN;
        if until > now {
            return Some(until);
        }
        self.holder = None;
        None
    }

    /// Handles a `control` frame.
    pub fn control(&mut self, id: u64, action: ControlAction, now: Instant) -> Result<(), ApiError> {
        self.expire(now);
        let Some(viewer) = self.viewers.get(&id) else { return Ok(()) };
        match (action, &self.holder) {
            (ControlAction::Release, Some(holder)) if holder.viewer == Some(id) => {
                self.holder = None;
                Ok(())
            }
            (ControlAction::Release, _) => Ok(()),
            (ControlAction::Take | ControlAction::Request, Some(holder)) if holder.viewer != Some(id) => {
                let is_typing = holder.typed_at.is_some_and(|at| now.duration_since(at) < HUMAN_IS_TYPING);
                if viewer.who.actor == PrincipalKind::Agent && holder.who.actor != PrincipalKind::Agent && is_typing {
                    let message = format!("{} is typing; ask again when they have paused", holder.who.principal);
                    return Err(ApiError::new(ErrorCode::ShellBusy, message).with_details(self.details()));
                }
                self.give(id);
                Ok(())
            }
            (ControlAction::Take | ControlAction::Request, Some(_)) => Ok(()),
            (ControlAction::Take | ControlAction::Request, None) => {
                self.give(id);
                Ok(())
            }
        }
    }

    fn give(&mut self, id: u64) {
        if let Some(viewer) = self.viewers.get(&id) {
            self.holder = Some(Holder { who: viewer.who.clone(), viewer: Some(id), left_at: None, typed_at: None });
        }
    }

    /// Whether this participant may type, resize and signal. If control is free, it gets control.
    pub fn acts(&mut self, id: u64, now: Instant) -> Result<(), ApiError> {
        self.expire(now);
        match &mut self.holder {
            None => self.give(id),
            Some(holder) if holder.viewer == Some(id) => {}
            // Another connection of the principal for which control is reserved.
            Some(holder) if holder.viewer.is_none() && self.viewers.get(&id).is_some_and(|v| v.who == holder.who) => {
                (holder.viewer, holder.left_at) = (Some(id), None);
            }
            Some(holder) => {
                let message = format!("{} has control of this shell; send `control` with `take` or `request` first", holder.who.principal);
                return Err(ApiError::new(ErrorCode::Forbidden, message).with_details(self.details()));
            }
        }
        Ok(())
    }

    pub fn has_typed(&mut self, id: u64, now: Instant) {
        if let Some(holder) = self.holder.as_mut().filter(|h| h.viewer == Some(id)) {
            holder.typed_at = Some(now);
        }
    }

    /// Takes control from a participant whose renewed token no longer allows it.
    pub fn lose(&mut self, id: u64) {
        self.holder.take_if(|h| h.viewer == Some(id));
    }

    fn details(&self) -> serde_json::Value {
        serde_json::json!({ "controller": self.controller() })
    }

    pub fn controller(&self) -> Option<Controller> {
        self.holder.as_ref().map(|h| h.who.clone())
    }

    pub fn controlling_viewer(&self) -> Option<u64> {
        self.holder.as_ref()?.viewer
    }

    pub fn set_size(&mut self, id: u64, size: (u16, u16)) {
        if let Some(viewer) = self.viewers.get_mut(&id) {
            viewer.size = Some(size);
        }
    }

    pub fn size_of(&self, id: u64) -> Option<(u16, u16)> {
        self.viewers.get(&id)?.size
    }

    pub fn viewers(&self) -> usize {
        self.viewers.len()
    }

    /// Whether input with this number is new for this client. The number is recorded, so call this once per input.
    pub fn is_new_input(&mut self, id: u64, seq: Option<u64>) -> bool {
        let (Some(seq), Some(viewer)) = (seq, self.viewers.get(&id)) else { return true };
        let source = InputSource::new(&viewer.who.principal, viewer.client.as_deref(), id);
        let is_new = self.input_dedup.is_new(&source, seq);
        self.input_dedup.record(&source, seq);
        is_new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn newcomer(name: &str, actor: PrincipalKind) -> Newcomer {
        Newcomer { who: Controller { principal: name.into(), actor }, client: None, may_control: true, size: None }
    }

    fn name(desk: &Desk) -> Option<String> {
        desk.controller().map(|c| c.principal)
    }

    #[test]
    fn an_agent_waits_for_a_human_who_types_and_a_human_for_nobody() {
        let (mut desk, start) = (Desk::default(), Instant::now());
        let (human, _) = desk.join(newcomer("ada", PrincipalKind::Human), start).unwrap();
        let (agent, _) = desk.join(newcomer("bot", PrincipalKind::Agent), start).unwrap();
        desk.has_typed(human, start);
        let soon = start + Duration::from_secs(9);
        assert_eq!(desk.control(agent, ControlAction::Take, soon).unwrap_err().code, ErrorCode::ShellBusy);
        assert!(desk.acts(agent, soon).is_err());
        desk.control(agent, ControlAction::Request, start + Duration::from_secs(11)).unwrap();
        assert_eq!(name(&desk).as_deref(), Some("bot"));
        desk.has_typed(agent, start + Duration::from_secs(12));
        desk.control(human, ControlAction::Take, start + Duration::from_secs(12)).unwrap();
        assert_eq!(name(&desk).as_deref(), Some("ada"));
        desk.control(human, ControlAction::Release, start).unwrap();
        assert_eq!(name(&desk), None);
        assert!(desk.acts(agent, start).is_ok(), "nobody has it, so it is for the taking");
    }

    #[test]
    fn control_is_kept_for_half_a_minute_for_whoever_lost_the_connection() {
        let (mut desk, start) = (Desk::default(), Instant::now());
        let (first, _) = desk.join(newcomer("ada", PrincipalKind::Human), start).unwrap();
        desk.leave(first, start);
        let (other, _) = desk.join(newcomer("bob", PrincipalKind::Human), start + Duration::from_secs(1)).unwrap();
        assert_eq!(name(&desk).as_deref(), Some("ada"));
        let (again, _) = desk.join(newcomer("ada", PrincipalKind::Human), start + Duration::from_secs(29)).unwrap();
        assert_eq!(desk.controlling_viewer(), Some(again));
        desk.leave(again, start + Duration::from_secs(30));
        assert!(desk.expire(start + Duration::from_secs(59)).is_some());
        desk.expire(start + Duration::from_secs(60));
        assert_eq!(name(&desk), None);
        desk.control(other, ControlAction::Take, start + Duration::from_secs(61)).unwrap();
        assert_eq!(name(&desk).as_deref(), Some("bob"));
    }

    #[test]
    fn the_same_client_stands_in_its_own_place_and_its_input_counts_once() {
        let (mut desk, now) = (Desk::default(), Instant::now());
        let ada = || Newcomer { client: Some("tab-1".into()), ..newcomer("ada", PrincipalKind::Human) };
        let (first, taken_over) = desk.join(ada(), now).unwrap();
        assert!([0, 1, 2].into_iter().all(|seq| desk.is_new_input(first, Some(seq))));
        let (second, _) = desk.join(ada(), now).unwrap();
        assert!(taken_over.is_cancelled());
        assert_eq!((desk.viewers(), desk.controlling_viewer()), (1, Some(second)));
        assert!(!desk.is_new_input(second, Some(2)) && desk.is_new_input(second, Some(3)));
        desk.leave(first, now);
        assert_eq!(desk.controlling_viewer(), Some(second), "the old connection's end takes nothing away");
        let (unnamed, _) = desk.join(newcomer("ada", PrincipalKind::Human), now).unwrap();
        assert!(desk.is_new_input(unnamed, Some(1)) && !desk.is_new_input(unnamed, Some(1)), "one without a name counts on its own");
        let (next, _) = desk.join(newcomer("ada", PrincipalKind::Human), now).unwrap();
        assert!(desk.is_new_input(next, Some(1)), "and its next connection anew");
    }
}
