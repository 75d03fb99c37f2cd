//! A small client of a LangGraph deployment: who there is to talk to, threads, and runs whose stream survives a lost connection.
//!
//! [`Deployment`] does the asking. Everything it hands out was read as a stranger's word: cut to a bound and without control characters
//! ([`clean`]), so that it may be drawn on a terminal. [`Transcript`] and [`Review`] make a conversation of it, without any I/O.

#![forbid(unsafe_code)]

mod deployment;
mod error;
mod event;
mod interrupt;
mod message;
mod review;
mod run;
mod sse;
mod text;
mod thread;
mod transcript;

pub use deployment::Deployment;
pub use error::LangGraphError;
pub use event::{RunEvent, read as read_event};
pub use interrupt::{Action, Asks, Interrupt};
pub use message::{Message, Role, ToolCall, ToolCallPiece};
pub use review::{Ask, Decision, Review};
pub use run::{RunInput, RunRequest, RunStream};
pub use sse::{SseEvent, SseParser};
pub use text::{clean, is_unseen};
pub use thread::{Assistant, Thread, ThreadState};
pub use transcript::{Change, Entry, Outcome, Tool, Transcript};
