//! A small client of a LangGraph deployment: assistants, threads, and runs whose stream survives a lost connection.
//!
//! [`Deployment`] makes the requests. Everything that it returns is untrusted, so it is limited in size and stripped of
//! control characters ([`clean`]) before it may be drawn on a terminal. [`Transcript`] and [`Review`] turn it into a
//! conversation, without any I/O.

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
pub use interrupt::{Action, Interrupt, InterruptKind};
pub use message::{Message, Role, ToolCall, ToolCallPiece};
pub use review::{Decision, Question, Review};
pub use run::{RunInput, RunRequest, RunStream};
pub use sse::{SseEvent, SseParser};
pub use text::{clean, is_invisible};
pub use thread::{Assistant, Thread, ThreadState};
pub use transcript::{Change, Entry, ToolOutcome, ToolUse, Transcript};
