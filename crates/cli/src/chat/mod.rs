//! A conversation with an agent of a LangGraph deployment, in a sandbox shared with that agent: the parts common to
//! the TUI and the plain mode.

mod chat_sandbox;
pub mod formatting;
pub mod input_parser;
mod line_output;
mod line_reader;
pub mod plain;
pub mod settings;

use cobox_client::Client;
use cobox_langgraph::{Assistant, Deployment, LangGraphError};

use crate::{failure::Failure, printer::visible};

pub use chat_sandbox::{ChatSandbox, SandboxChoice};

/// Resolved settings of one `cobox chat` run.
pub struct ChatOptions {
    /// `None` without a configured deployment: the sandbox can still be viewed.
    pub deployment: Option<Deployment>,
    /// Assistant id, graph id or name; `None` selects the deployment's first assistant.
    pub assistant: Option<String>,
    /// A thread of the deployment or, without a deployment, the thread whose sandbox is shown.
    pub thread: Option<String>,
    /// `None` without a configured broker: the chat then has no sandbox.
    pub broker: Option<Client>,
    pub sandbox_choice: SandboxChoice,
}

impl From<LangGraphError> for Failure {
    fn from(e: LangGraphError) -> Self {
        let failure = Failure::new(visible(&e.to_string()));
        match e.advice() {
            Some(advice) => failure.with_advice(advice),
            None => failure,
        }
    }
}

/// Returns the requested assistant, or the first one if none was requested.
pub fn choose_assistant<'a>(assistants: &'a [Assistant], requested: Option<&str>) -> Result<&'a Assistant, Failure> {
    let found = match requested {
        Some(name) => assistants.iter().find(|a| a.is_named(name)),
        None => assistants.first(),
    };
    found.ok_or_else(|| {
        let known: Vec<&str> = assistants.iter().map(|a| a.name.as_str()).collect();
        match requested {
            Some(name) => Failure::new(format!("the deployment has no assistant `{}`", visible(name)))
                .with_advice(format!("available assistants: {}", if known.is_empty() { "none".to_owned() } else { known.join(", ") })),
            None => Failure::new("the deployment has no assistants").with_advice("is a graph named in its langgraph.json?"),
        }
    })
}
