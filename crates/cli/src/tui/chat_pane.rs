//! The chat pane: the conversation, the text being typed, the current run and its open questions.

use std::collections::HashSet;

use cobox_langgraph::{Decision, Question, Review, RunEvent, RunInput, ThreadState, Transcript};

use super::editor::Editor;
use crate::chat::{formatting, input_parser};

/// Longest title that a thread gets from its first message, in bytes.
const MAX_TITLE_BYTES: usize = 60;

#[derive(Default)]
pub struct ChatPane {
    pub transcript: Transcript,
    pub editor: Editor,
    pub review: Option<Review>,
    pub run: RunState,
    /// Scroll offset, in lines from the end.
    pub scroll: usize,
    /// Whether tool calls show their full arguments and outcomes by default.
    pub expands_by_default: bool,
    /// Tool calls that are shown the opposite way.
    pub toggled: HashSet<usize>,
    has_title: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum RunState {
    #[default]
    Idle,
    Running {
        id: Option<String>,
        is_cancelling: bool,
    },
}

impl ChatPane {
    /// Switches to another thread; the text being typed is kept.
    pub fn enter_thread(&mut self, state: &ThreadState) {
        let editor = std::mem::take(&mut self.editor);
        *self = Self { editor, expands_by_default: self.expands_by_default, has_title: !state.messages.is_empty(), ..Self::default() };
        for message in &state.messages {
            self.transcript.apply(message, false);
        }
        self.review = Review::of(state.interrupts.clone());
    }

    pub fn is_running(&self) -> bool {
        self.run != RunState::Idle
    }

    /// Interprets typed text as input for the run: a message or, once every action is decided, the answer. `None`
    /// while decisions are still missing.
    pub fn input(&mut self, text: &str) -> Result<Option<RunInput>, String> {
        let Some(review) = &mut self.review else {
            let (id, text) = (format!("cobox-{}", cobox_protocol::ShellId::new()), input_parser::message_text(text));
            self.transcript.add_user_message(&id, text);
            return Ok(Some(RunInput::Message { id, text: text.to_owned() }));
        };
        let decision = match review.next() {
            Some(Question::Text(_)) => Decision::Respond(text.trim().to_owned()),
            _ => match input_parser::parse_decision(text) {
                Some(decision) => decision?,
                None => return Err("the agent waits for your decision: yes, no [reason], or edit {…}".to_owned()),
            },
        };
        self.decide(decision)
    }

    /// Records a decision and returns the answer once every action is decided.
    fn decide(&mut self, decision: Decision) -> Result<Option<RunInput>, String> {
        let Some(review) = &mut self.review else { return Ok(None) };
        let description = match &decision {
            Decision::Approve => "you approved".to_owned(),
            Decision::Edit(args) => format!("you approved with edited arguments: {}", formatting::one_line(&args.to_string())),
            Decision::Reject(reason) if reason.is_empty() => "you rejected".to_owned(),
            Decision::Reject(reason) => format!("you rejected: {}", formatting::one_line(reason)),
            Decision::Respond(text) => format!("you answered: {}", formatting::one_line(text)),
        };
        let note = match review.next() {
            Some(Question::Action(action)) => format!("{description} ({})", action.name),
            _ => description,
        };
        review.decide(decision)?;
        let answer = review.answer();
        if answer.is_some() {
            self.review = None;
        }
        self.transcript.add_note(note);
        self.scroll = 0;
        Ok(answer.map(RunInput::Resume))
    }

    pub fn start_run(&mut self) {
        self.run = RunState::Running { id: None, is_cancelling: false };
        self.scroll = 0;
    }

    /// The thread's title in lists, from its first message.
    pub fn title(&mut self, text: &str) -> Option<String> {
        let is_first = !std::mem::replace(&mut self.has_title, true);
        is_first.then(|| cobox_langgraph::clean(text, MAX_TITLE_BYTES).replace(['\n', '\t'], " "))
    }

    /// Applies an event of a run and returns a sentence for the feed if the event is about the sandbox.
    pub fn apply_run_event(&mut self, event: RunEvent) -> Option<String> {
        match event {
            RunEvent::Started { run_id } => {
                if let RunState::Running { id, .. } = &mut self.run {
                    *id = Some(run_id);
                }
            }
            RunEvent::Message { message, is_nested } => {
                self.transcript.apply(&message, is_nested);
            }
            RunEvent::Interrupted(interrupts) => self.review = Review::of(interrupts),
            RunEvent::Custom(data) => return formatting::format_custom_event(&data),
            RunEvent::Reconnected => {}
            // The user ended this run.
            RunEvent::Failed { .. } if matches!(self.run, RunState::Running { is_cancelling: true, .. }) => {}
            RunEvent::Failed { message } => {
                self.transcript.add_note(format!("the run failed: {message}"));
            }
        }
        None
    }

    pub fn finish_run(&mut self, outcome: Result<(), String>) {
        let was_cancelling = matches!(self.run, RunState::Running { is_cancelling: true, .. });
        self.run = RunState::Idle;
        match outcome {
            Err(reason) => {
                self.transcript.add_note(reason);
            }
            Ok(()) if was_cancelling => {
                self.transcript.add_note("the run was cancelled");
            }
            Ok(()) => {}
        }
    }

    /// Whether a tool call is shown with its full arguments and outcome.
    pub fn is_expanded(&self, number: usize) -> bool {
        self.expands_by_default != self.toggled.contains(&number)
    }

    pub fn toggle_expanded(&mut self, number: usize) {
        if !self.toggled.remove(&number) {
            self.toggled.insert(number);
        }
    }
}
