//! The engine's state machine: whether rounds may run, what a pause or a halt keeps for later, and when to retry.
//!
//! The state outlives a connection, because a pause and a halt do. [`State::transition`] is the only place that changes
//! it.

use std::time::{Duration, Instant};

use crate::{engine::Responder, halt::Halt};

/// Input of the next round.
#[derive(Default)]
pub struct NextRound {
    /// The user confirmed the deletions that the sync halted for.
    deletions_confirmed: bool,
    /// Resumes without a confirmation, answered after the round: with an error if the sync halts again.
    resumes: Vec<Responder<()>>,
}

/// What the engine may do.
pub enum State {
    /// Rounds run when they are due.
    Running(NextRound),
    /// A round is in progress; its end answers these resumes.
    InRound { resumes: Vec<Responder<()>> },
    /// The user paused the sync.
    Paused(NextRound),
    /// The last round has halted; the user has to decide.
    Halted(Halt),
    /// The user paused the sync while it was halted.
    PausedWhileHalted(Halt),
}

impl Default for State {
    fn default() -> Self {
        State::Running(NextRound::default())
    }
}

/// Causes of a transition.
pub enum Trigger<'a> {
    Pause(Responder<()>),
    Resume {
        confirmed: bool,
        respond: Responder<()>,
    },
    RoundStarted,
    /// The round is complete, or has halted without any change.
    RoundEnded(Option<&'a Halt>),
    /// The connection or the round has failed.
    Failed(&'a str),
    /// All waiting commands are rejected for this reason.
    CommandsRejected(&'a str),
}

/// Answers to commands. The engine sends them after it has published the new phase, so that the status does not
/// contradict an answer.
#[derive(Default)]
#[must_use = "commands wait for their responses"]
pub struct Replies(Vec<(Responder<()>, Result<(), String>)>);

impl Replies {
    fn all(responders: Vec<Responder<()>>, answer: &Result<(), String>) -> Self {
        Self(responders.into_iter().map(|respond| (respond, answer.clone())).collect())
    }

    pub fn send(self) {
        self.0.into_iter().for_each(|(respond, answer)| respond(answer));
    }
}

impl State {
    /// Changes the state and returns the answers that are due.
    pub fn transition(&mut self, trigger: Trigger) -> Replies {
        let (next, replies) = std::mem::take(self).next(trigger);
        *self = next;
        replies
    }

    fn next(self, trigger: Trigger) -> (Self, Replies) {
        match (self, trigger) {
            (state, Trigger::Pause(respond)) => (state.paused(), Replies::all(vec![respond], &Ok(()))),
            (state, Trigger::Resume { confirmed, respond }) => state.resumed(confirmed, respond),
            (State::Running(NextRound { resumes, .. }), Trigger::RoundStarted) => (State::InRound { resumes }, Replies::default()),
            (State::InRound { resumes }, Trigger::RoundEnded(Some(halt))) => {
                let answer = Err(format!("the sync is halted: {halt}; {}", halt.advice()));
                (State::Halted(halt.clone()), Replies::all(resumes, &answer))
            }
            (State::InRound { resumes }, Trigger::RoundEnded(None)) => (State::default(), Replies::all(resumes, &Ok(()))),
            // Rounds start only in the running state and end only once, so these do not occur.
            (state, Trigger::RoundStarted | Trigger::RoundEnded(_)) => (state, Replies::default()),
            (state, Trigger::Failed(reason)) => state.failed(reason),
            (state, Trigger::CommandsRejected(reason)) => state.without_resumes(reason),
        }
    }

    fn paused(self) -> Self {
        match self {
            State::Running(round) | State::Paused(round) => State::Paused(round),
            State::InRound { resumes } => State::Paused(NextRound { deletions_confirmed: false, resumes }),
            State::Halted(halt) | State::PausedWhileHalted(halt) => State::PausedWhileHalted(halt),
        }
    }

    fn resumed(self, confirmed: bool, respond: Responder<()>) -> (Self, Replies) {
        match self {
            // A confirmation does not free space in the trash, so the trash is checked again.
            State::Halted(halt) | State::PausedWhileHalted(halt) if confirmed && halt.is_confirmable() => {
                let round = NextRound { deletions_confirmed: true, resumes: Vec::new() };
                (State::Running(round), Replies::all(vec![respond], &Ok(())))
            }
            // The missing files may be back, which the next round finds out.
            State::Halted(_) | State::PausedWhileHalted(_) => {
                let round = NextRound { deletions_confirmed: false, resumes: vec![respond] };
                (State::Running(round), Replies::default())
            }
            State::Running(round) | State::Paused(round) => (State::Running(round), Replies::all(vec![respond], &Ok(()))),
            State::InRound { resumes } => (State::InRound { resumes }, Replies::all(vec![respond], &Ok(()))),
        }
    }

    /// A confirmation covers only the deletions known at that time, so it ends with the connection.
    fn failed(self, reason: &str) -> (Self, Replies) {
        let (mut state, replies) = self.without_resumes(reason);
        match &mut state {
            State::Running(round) | State::Paused(round) => round.deletions_confirmed = false,
            State::InRound { .. } => state = State::default(),
            State::Halted(_) | State::PausedWhileHalted(_) => {}
        }
        (state, replies)
    }

    fn without_resumes(mut self, reason: &str) -> (Self, Replies) {
        let resumes = match &mut self {
            State::Running(round) | State::Paused(round) => std::mem::take(&mut round.resumes),
            State::InRound { resumes } => std::mem::take(resumes),
            State::Halted(_) | State::PausedWhileHalted(_) => Vec::new(),
        };
        (self, Replies::all(resumes, &Err(reason.to_owned())))
    }

    /// Whether rounds may run.
    pub fn is_running(&self) -> bool {
        matches!(self, State::Running(_))
    }

    pub fn is_paused(&self) -> bool {
        matches!(self, State::Paused(_) | State::PausedWhileHalted(_))
    }

    /// The halt that waits for the user, also during a pause.
    pub fn halt(&self) -> Option<&Halt> {
        match self {
            State::Halted(halt) | State::PausedWhileHalted(halt) => Some(halt),
            _ => None,
        }
    }

    /// Whether the user has resumed the sync without confirming the deletions that it halted for.
    pub fn is_resumed(&self) -> bool {
        matches!(self, State::Running(NextRound { resumes, .. }) if !resumes.is_empty())
    }

    /// Whether the next round may make the deletions that the sync halted for.
    pub fn deletions_confirmed(&self) -> bool {
        matches!(self, State::Running(NextRound { deletions_confirmed: true, .. }))
    }
}

/// Delays rounds while files change during each of them: such files must not keep both sides busy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pacing {
    #[default]
    Stable,
    /// Files changed during the last `rounds` rounds.
    Unstable { rounds: u32, retry_at: Instant },
}

impl Pacing {
    /// The delay doubles with every unstable round, from `min` to `max`.
    pub fn after_round(self, is_unstable: bool, min: Duration, max: Duration, now: Instant) -> Self {
        if !is_unstable {
            return Pacing::Stable;
        }
        let rounds = self.rounds();
        Pacing::Unstable { rounds: rounds + 1, retry_at: now + min.saturating_mul(1 << rounds.min(8)).min(max) }
    }

    pub fn rounds(self) -> u32 {
        match self {
            Pacing::Stable => 0,
            Pacing::Unstable { rounds, .. } => rounds,
        }
    }

    /// Earliest time of the next round; `None` if rounds are not delayed.
    pub fn retry_at(self) -> Option<Instant> {
        match self {
            Pacing::Stable => None,
            Pacing::Unstable { retry_at, .. } => Some(retry_at),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{self, Receiver};

    use super::*;
    use crate::side::Side;

    type Answer = Receiver<Result<(), String>>;

    fn responder() -> (Responder<()>, Answer) {
        let (sender, answer) = mpsc::channel();
        (Box::new(move |result| drop(sender.send(result))), answer)
    }

    fn deletions() -> Halt {
        Halt::FolderEmptied { side: Side::Local, files: 3, already_deleted: 0 }
    }

    fn halted() -> State {
        let mut state = State::default();
        state.transition(Trigger::RoundStarted).send();
        state.transition(Trigger::RoundEnded(Some(&deletions()))).send();
        state
    }

    fn resume(state: &mut State, confirmed: bool) -> Answer {
        let (respond, answer) = responder();
        state.transition(Trigger::Resume { confirmed, respond }).send();
        answer
    }

    fn pause(state: &mut State) {
        let (respond, answer) = responder();
        state.transition(Trigger::Pause(respond)).send();
        assert_eq!(answer.try_recv(), Ok(Ok(())));
    }

    #[test]
    fn a_pause_keeps_a_halt_and_a_resume_ends_both() {
        let mut state = halted();
        pause(&mut state);
        assert!(state.is_paused() && state.halt() == Some(&deletions()) && !state.is_running());
        assert_eq!(resume(&mut state, true).try_recv(), Ok(Ok(())));
        assert!(state.is_running() && state.halt().is_none() && state.deletions_confirmed());
    }

    #[test]
    fn a_resume_without_confirmation_is_answered_by_the_next_round() {
        for halt in [None, Some(deletions())] {
            let mut state = halted();
            let answer = resume(&mut state, false);
            assert!(answer.try_recv().is_err() && state.is_running() && !state.deletions_confirmed());
            state.transition(Trigger::RoundStarted).send();
            state.transition(Trigger::RoundEnded(halt.as_ref())).send();
            assert_eq!(answer.try_recv().unwrap().is_err(), halt.is_some());
        }
    }

    #[test]
    fn a_failure_ends_a_confirmation_but_not_a_pause_or_a_halt() {
        let mut state = halted();
        resume(&mut state, true).try_recv().unwrap().unwrap();
        state.transition(Trigger::Failed("the connection was lost")).send();
        assert!(state.is_running() && !state.deletions_confirmed());
        pause(&mut state);
        state.transition(Trigger::Failed("the connection was lost")).send();
        assert!(state.is_paused());
        let mut state = halted();
        state.transition(Trigger::Failed("the connection was lost")).send();
        assert_eq!(state.halt(), Some(&deletions()));
        let answer = resume(&mut state, false);
        state.transition(Trigger::RoundStarted).send();
        state.transition(Trigger::Failed("the connection was lost")).send();
        assert_eq!(answer.try_recv(), Ok(Err("the connection was lost".to_owned())));
        assert!(state.is_running());
    }

    #[test]
    fn a_full_trash_can_not_be_confirmed() {
        let mut state = State::default();
        let full = Halt::TrashFull(crate::trash::TrashFull { needed: 2, used: 1, limit: 2 });
        state.transition(Trigger::RoundStarted).send();
        state.transition(Trigger::RoundEnded(Some(&full))).send();
        let answer = resume(&mut state, true);
        assert!(state.is_running() && !state.deletions_confirmed() && answer.try_recv().is_err());
        state.transition(Trigger::CommandsRejected("the sync has ended")).send();
        assert_eq!(answer.try_recv(), Ok(Err("the sync has ended".to_owned())));
    }

    #[test]
    fn delays_double_while_files_keep_changing_and_end_with_a_stable_round() {
        let (now, min, max) = (Instant::now(), Duration::from_millis(50), Duration::from_secs(5));
        let mut pacing = Pacing::default();
        for millis in [50, 100, 200, 400, 800, 1600, 3200, 5000, 5000, 5000] {
            pacing = pacing.after_round(true, min, max, now);
            assert_eq!(pacing.retry_at(), Some(now + Duration::from_millis(millis)));
        }
        assert_eq!(pacing.rounds(), 10);
        assert_eq!(pacing.after_round(false, min, max, now), Pacing::Stable);
    }
}
