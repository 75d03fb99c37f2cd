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
pub const MAX_PARTICIPANTS: usize = 512;
/// How long control is reserved for a controller whose connection broke.
const CONTROL_RESERVED_FOR: Duration = Duration::from_secs(30);
/// How long after a human's last key an agent is refused control: longer than a pause between two words.
const HUMAN_TYPING_PAUSE: Duration = Duration::from_secs(10);

#[derive(Default)]
pub struct Participants {
    next_id: u64,
    by_id: HashMap<u64, Participant>,
    holder: Option<ControlHolder>,
    input_dedup: InputDeduplicator,
}

struct Participant {
    identity: Controller,
    client: Option<String>,
    size: Option<(u16, u16)>,
    taken_over: CancellationToken,
}

struct ControlHolder {
    identity: Controller,
    /// `None` while the connection is lost and may return.
    participant: Option<u64>,
    left_at: Option<Instant>,
    last_input_at: Option<Instant>,
}

/// A client that joins a shell.
pub struct JoinRequest {
    pub identity: Controller,
    pub client: Option<String>,
    pub may_control: bool,
    pub size: Option<(u16, u16)>,
}

impl Participants {
    /// Adds a participant, which gets control if it is free or reserved for this principal. The token is cancelled when
    /// another connection of the same client replaces this one.
    pub fn join(&mut self, request: JoinRequest, now: Instant) -> Result<(u64, CancellationToken), ApiError> {
        self.expire(now);
        let id = self.next_id;
        self.next_id += 1;
        let is_same_client = |v: &Participant| request.client.is_some() && v.client == request.client && v.identity == request.identity;
        let previous = self.by_id.iter().find(|(_, v)| is_same_client(v)).map(|(id, _)| *id);
        if let Some(previous) = previous
            && let Some(participant) = self.by_id.remove(&previous)
        {
            participant.taken_over.cancel();
            self.reserve_control(previous, now);
        }
        if self.by_id.len() >= MAX_PARTICIPANTS {
            return Err(ApiError::new(
                ErrorCode::RateLimited,
                format!("{MAX_PARTICIPANTS} participants are already connected to this shell, which is the limit; try again later"),
            ));
        }
        let taken_over = CancellationToken::new();
        let JoinRequest { identity, client, may_control, size } = request;
        self.by_id.insert(id, Participant { identity: identity.clone(), client, size, taken_over: taken_over.clone() });
        if may_control {
            match &mut self.holder {
                None => self.grant_control(id),
                Some(holder) if holder.participant.is_none() && holder.identity == identity => {
                    (holder.participant, holder.left_at) = (Some(id), None);
                }
                Some(_) => {}
            }
        }
        Ok((id, taken_over))
    }

    pub fn leave(&mut self, id: u64, now: Instant) {
        if self.by_id.remove(&id).is_some() {
            self.reserve_control(id, now);
        }
    }

    fn reserve_control(&mut self, id: u64, now: Instant) {
        if let Some(holder) = self.holder.as_mut().filter(|h| h.participant == Some(id)) {
            (holder.participant, holder.left_at) = (None, Some(now));
        }
    }

    /// Frees control that was reserved for a controller that did not return. Returns when to check again.
    pub fn expire(&mut self, now: Instant) -> Option<Instant> {
        let until = self.holder.as_ref()?.left_at? + CONTROL_RESERVED_FOR;
        if until > now {
            return Some(until);
        }
        self.holder = None;
        None
    }

    /// Handles a `control` frame.
    pub fn handle_control(&mut self, id: u64, action: ControlAction, now: Instant) -> Result<(), ApiError> {
        self.expire(now);
        let Some(participant) = self.by_id.get(&id) else { return Ok(()) };
        match (action, &self.holder) {
            (ControlAction::Release, Some(holder)) if holder.participant == Some(id) => {
                self.holder = None;
                Ok(())
            }
            (ControlAction::Release, _) => Ok(()),
            (ControlAction::Take | ControlAction::Request, Some(holder)) if holder.participant != Some(id) => {
                let is_typing = holder.last_input_at.is_some_and(|at| now.duration_since(at) < HUMAN_TYPING_PAUSE);
                if participant.identity.actor == PrincipalKind::Agent && holder.identity.actor != PrincipalKind::Agent && is_typing {
                    let message = format!("{} is typing; try again after a pause", holder.identity.principal);
                    return Err(ApiError::new(ErrorCode::ShellBusy, message).with_details(self.details()));
                }
                self.grant_control(id);
                Ok(())
            }
            (ControlAction::Take | ControlAction::Request, Some(_)) => Ok(()),
            (ControlAction::Take | ControlAction::Request, None) => {
                self.grant_control(id);
                Ok(())
            }
        }
    }

    fn grant_control(&mut self, id: u64) {
        if let Some(participant) = self.by_id.get(&id) {
            self.holder =
                Some(ControlHolder { identity: participant.identity.clone(), participant: Some(id), left_at: None, last_input_at: None });
        }
    }

    /// Whether this participant may type, resize and signal. If there is no controller, it gets control.
    pub fn require_control(&mut self, id: u64, now: Instant) -> Result<(), ApiError> {
        self.expire(now);
        match &mut self.holder {
            None => self.grant_control(id),
            Some(holder) if holder.participant == Some(id) => {}
            // Another connection of the principal for which control is reserved.
            Some(holder) if holder.participant.is_none() && self.by_id.get(&id).is_some_and(|v| v.identity == holder.identity) => {
                (holder.participant, holder.left_at) = (Some(id), None);
            }
            Some(holder) => {
                let message =
                    format!("{} has control of this shell; send `control` with `take` or `request` first", holder.identity.principal);
                return Err(ApiError::new(ErrorCode::Forbidden, message).with_details(self.details()));
            }
        }
        Ok(())
    }

    pub fn note_input(&mut self, id: u64, now: Instant) {
        if let Some(holder) = self.holder.as_mut().filter(|h| h.participant == Some(id)) {
            holder.last_input_at = Some(now);
        }
    }

    /// Takes control from a participant whose renewed token no longer allows it.
    pub fn revoke_control(&mut self, id: u64) {
        self.holder.take_if(|h| h.participant == Some(id));
    }

    fn details(&self) -> serde_json::Value {
        serde_json::json!({ "controller": self.controller() })
    }

    pub fn controller(&self) -> Option<Controller> {
        self.holder.as_ref().map(|h| h.identity.clone())
    }

    pub fn controlling_participant(&self) -> Option<u64> {
        self.holder.as_ref()?.participant
    }

    pub fn set_size(&mut self, id: u64, size: (u16, u16)) {
        if let Some(participant) = self.by_id.get_mut(&id) {
            participant.size = Some(size);
        }
    }

    pub fn size_of(&self, id: u64) -> Option<(u16, u16)> {
        self.by_id.get(&id)?.size
    }

    pub fn count(&self) -> usize {
        self.by_id.len()
    }

    /// Whether input with this number is new for this client. The number is recorded, so call this once per input.
    pub fn is_new_input(&mut self, id: u64, seq: Option<u64>) -> bool {
        let (Some(seq), Some(participant)) = (seq, self.by_id.get(&id)) else { return true };
        let source = InputSource::new(&participant.identity.principal, participant.client.as_deref(), id);
        let is_new = self.input_dedup.is_new(&source, seq);
        self.input_dedup.record(&source, seq);
        is_new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn join_request(name: &str, actor: PrincipalKind) -> JoinRequest {
        JoinRequest { identity: Controller { principal: name.into(), actor }, client: None, may_control: true, size: None }
    }

    fn controller_name(participants: &Participants) -> Option<String> {
        participants.controller().map(|c| c.principal)
    }

    #[test]
    fn an_agent_is_refused_control_while_a_human_types_and_a_human_never_is() {
        let (mut participants, start) = (Participants::default(), Instant::now());
        let (human, _) = participants.join(join_request("ada", PrincipalKind::Human), start).unwrap();
        let (agent, _) = participants.join(join_request("bot", PrincipalKind::Agent), start).unwrap();
        participants.note_input(human, start);
        let within_pause = start + Duration::from_secs(9);
        assert_eq!(participants.handle_control(agent, ControlAction::Take, within_pause).unwrap_err().code, ErrorCode::ShellBusy);
        assert!(participants.require_control(agent, within_pause).is_err());
        participants.handle_control(agent, ControlAction::Request, start + Duration::from_secs(11)).unwrap();
        assert_eq!(controller_name(&participants).as_deref(), Some("bot"));
        participants.note_input(agent, start + Duration::from_secs(12));
        participants.handle_control(human, ControlAction::Take, start + Duration::from_secs(12)).unwrap();
        assert_eq!(controller_name(&participants).as_deref(), Some("ada"));
        participants.handle_control(human, ControlAction::Release, start).unwrap();
        assert_eq!(controller_name(&participants), None);
        assert!(participants.require_control(agent, start).is_ok(), "there is no controller");
    }

    #[test]
    fn control_is_reserved_for_30_seconds_for_a_controller_that_lost_its_connection() {
        let (mut participants, start) = (Participants::default(), Instant::now());
        let (first, _) = participants.join(join_request("ada", PrincipalKind::Human), start).unwrap();
        participants.leave(first, start);
        let (other, _) = participants.join(join_request("bob", PrincipalKind::Human), start + Duration::from_secs(1)).unwrap();
        assert_eq!(controller_name(&participants).as_deref(), Some("ada"));
        let (rejoined, _) = participants.join(join_request("ada", PrincipalKind::Human), start + Duration::from_secs(29)).unwrap();
        assert_eq!(participants.controlling_participant(), Some(rejoined));
        participants.leave(rejoined, start + Duration::from_secs(30));
        assert!(participants.expire(start + Duration::from_secs(59)).is_some());
        participants.expire(start + Duration::from_secs(60));
        assert_eq!(controller_name(&participants), None);
        participants.handle_control(other, ControlAction::Take, start + Duration::from_secs(61)).unwrap();
        assert_eq!(controller_name(&participants).as_deref(), Some("bob"));
    }

    #[test]
    fn a_reconnecting_client_replaces_its_old_connection_and_its_input_is_deduplicated() {
        let (mut participants, now) = (Participants::default(), Instant::now());
        let ada = || JoinRequest { client: Some("tab-1".into()), ..join_request("ada", PrincipalKind::Human) };
        let (first, taken_over) = participants.join(ada(), now).unwrap();
        assert!([0, 1, 2].into_iter().all(|seq| participants.is_new_input(first, Some(seq))));
        let (second, _) = participants.join(ada(), now).unwrap();
        assert!(taken_over.is_cancelled());
        assert_eq!((participants.count(), participants.controlling_participant()), (1, Some(second)));
        assert!(!participants.is_new_input(second, Some(2)) && participants.is_new_input(second, Some(3)));
        participants.leave(first, now);
        assert_eq!(participants.controlling_participant(), Some(second), "closing the old connection has no effect");
        let (unnamed, _) = participants.join(join_request("ada", PrincipalKind::Human), now).unwrap();
        assert!(
            participants.is_new_input(unnamed, Some(1)) && !participants.is_new_input(unnamed, Some(1)),
            "a client without a name counts separately"
        );
        let (next, _) = participants.join(join_request("ada", PrincipalKind::Human), now).unwrap();
        assert!(participants.is_new_input(next, Some(1)), "its next connection starts at zero again");
    }
}
