//! The chat pane: the conversation, the text being typed, the current run and its open questions.

use std::collections::HashSet;

use cobox_langgraph::{Decision, Question, Review, RunEvent, RunInput, ThreadState, Transcript};

use super::editor::Editor;
use crate::chat::{typed, words};

/// Longest title that a thread gets from its first message, in bytes.
const MAX_TITLE_BYTES: usize = 60;

#[derive(Default)]
pub struct ChatPane {
    pub transcript: Transcript,
    pub editor: Editor,
    pub review: Option<Review>,
    pub run: Run,
    /// Scroll offset, in lines from the end.
    pub scroll: usize,
    /// Whether tool calls show their full arguments and outcomes by default.
    pub is_unfolded: bool,
    /// Tool calls that are shown the opposite way.
    pub turned: HashSet<usize>,
    is_titled: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Run {
    #[default]
    None,
    Going {
        id: Option<String>,
        is_ending: bool,
    },
}

impl ChatPane {
    /// Switches to another thread; the text being typed is kept.
    pub fn enter(&mut self, state: &ThreadState) {
        let editor = std::mem::take(&mut self.editor);
        *self = Self { editor, is_unfolded: self.is_unfolded, is_titled: !state.messages.is_empty(), ..Self::default() };
        for message in &state.messages {
            self.transcript.apply(message, false);
        }
        self.review = Review::of(state.interrupts.clone());
    }

    pub fn is_running(&self) -> bool {
        self.run != Run::None
    }

    /// Interprets typed text as input for the run: a message or, once every action is decided, the answer. `None`
    /// while decisions are still missing.
    pub fn input(&mut self, text: &str) -> Result<Option<RunInput>, String> {
        let Some(review) = &mut self.review else {
            let (id, text) = (format!("cobox-{}", cobox_protocol::ShellId::new()), typed::message(text));
            self.transcript.add_user_message(&id, text);
            return Ok(Some(RunInput::Message { id, text: text.to_owned() }));
        };
        let decision = match review.next() {
            Some(Question::Text(_)) => Decision::Respond(text.trim().to_owned()),
            _ => match typed::decision(text) {
                Some(decision) => decision?,
                None => return Err("the agent waits for your decision: yes, no [why], or edit {…}".to_owned()),
            },
        };
        self.decide(decision)
    }

    /// Records a decision and returns the answer once every action is decided.
    fn decide(&mut self, decision: Decision) -> Result<Option<RunInput>, String> {
        let Some(review) = &mut self.review else { return Ok(None) };
        let said = match &decision {
            Decision::Approve => "you approved".to_owned(),
            Decision::Edit(args) => format!("you approved with other arguments: {}", words::one_line(&args.to_string())),
            Decision::Reject(why) if why.is_empty() => "you said no".to_owned(),
            Decision::Reject(why) => format!("you said no: {}", words::one_line(why)),
            Decision::Respond(text) => format!("you answered: {}", words::one_line(text)),
        };
        let about = match review.next() {
            Some(Question::Action(action)) => format!("{said} ({})", action.name),
            _ => said,
        };
        review.decide(decision)?;
        let answer = review.answer();
        if answer.is_some() {
            self.review = None;
        }
        self.transcript.add_note(about);
        self.scroll = 0;
        Ok(answer.map(RunInput::Resume))
    }

    pub fn started(&mut self) {
        self.run = Run::Going { id: None, is_ending: false };
        self.scroll = 0;
    }

    /// The thread's title in lists, from its first message.
    pub fn title(&mut self, text: &str) -> Option<String> {
        let is_first = !std::mem::replace(&mut self.is_titled, true);
        is_first.then(|| cobox_langgraph::clean(text, MAX_TITLE_BYTES).replace(['\n', '\t'], " "))
    }

    /// Applies an event of a run and returns a sentence for the feed if the event is about the sandbox.
    pub fn told(&mut self, event: RunEvent) -> Option<String> {
        match event {
            RunEvent::Started { run_id } => {
                if let Run::Going { id, .. } = &mut self.run {
                    *id = Some(run_id);
                }
            }
            RunEvent::Message { message, is_nested } => {
                self.transcript.apply(&message, is_nested);
            }
            RunEvent::Interrupted(asked) => self.review = Review::of(asked),
            RunEvent::Custom(told) => return words::custom(&told),
            RunEvent::Reconnected => {}
            // The user ended this run.
            RunEvent::Failed { .. } if matches!(self.run, Run::Going { is_ending: true, .. }) => {}
            RunEvent::Failed { message } => {
                self.transcript.add_note(format!("the run failed: {message}"));
            }
        }
        None
    }

    pub fn ended(&mut self, outcome: Result<(), String>) {
        let was_ending = matches!(self.run, Run::Going { is_ending: true, .. });
        self.run = Run::None;
        match outcome {
            Err(why) => {
                self.transcript.add_note(why);
            }
            Ok(()) if was_ending => {
                self.transcript.add_note("the run was ended");
            }
            Ok(()) => {}
        }
    }

    /// Whether a tool call is shown with its full arguments and outcome.
    pub fn is_open(&self, number: usize) -> bool {
        self.is_unfolded != self.turned.contains(&number)
    }

    pub fn turn(&mut self, number: usize) {
        if !self.turned.remove(&number) {
            self.turned.insert(number);
        }
    }
}
