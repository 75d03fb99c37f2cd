//! `cobox chat` and the LangGraph client with a real `langgraph dev` that serves the example, a real broker and real sandboxes.
//!
//! Ignored unless asked for, because they need what `scripts/setup langgraph` installs; `scripts/check-langgraph` runs them.

mod deployment;
mod plain;
mod screenshots;
mod speaking;
mod tui;
