//! A conversation with an agent of a LangGraph deployment, in a sandbox that both share: what the TUI and the plain mode have in common.

mod lines;
pub mod plain;
mod reading;
pub mod room;
pub mod settings;
pub mod typed;
pub mod words;

use cobox_client::Client;
use cobox_langgraph::{Assistant, Deployment, LangGraphError};

use crate::{failure::Failure, printer::visible};

pub use room::{Room, Wish};

/// With whom, where and about what.
pub struct Chat {
    /// Missing where none is configured: the sandbox can still be looked at.
    pub deployment: Option<Deployment>,
    /// By id, graph or name; the deployment's first where none is named.
    pub assistant: Option<String>,
    /// Of the deployment, or, without one, the thread whose sandbox is shown.
    pub thread: Option<String>,
    /// Missing where no broker is configured: then there is only talk.
    pub broker: Option<Client>,
    pub wish: Wish,
}

impl From<LangGraphError> for Failure {
    fn from(e: LangGraphError) -> Self {
        let failure = Failure::new(visible(&e.to_string()));
        match e.advice() {
            Some(advice) => failure.advise(advice),
            None => failure,
        }
    }
}

/// The one that was asked for, or the first there is.
pub fn choose<'a>(assistants: &'a [Assistant], asked: Option<&str>) -> Result<&'a Assistant, Failure> {
    let found = match asked {
        Some(word) => assistants.iter().find(|a| a.is_named(word)),
        None => assistants.first(),
    };
    found.ok_or_else(|| {
        let known: Vec<&str> = assistants.iter().map(|a| a.name.as_str()).collect();
        match asked {
            Some(word) => Failure::new(format!("the deployment has no assistant `{}`", visible(word)))
                .advise(format!("it has: {}", if known.is_empty() { "none".to_owned() } else { known.join(", ") })),
            None => Failure::new("the deployment has no assistants").advise("is a graph named in its langgraph.json?"),
        }
    })
}
