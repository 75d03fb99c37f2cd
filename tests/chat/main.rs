//! `cobox chat` and the LangGraph client with a real `langgraph dev` that serves the example, a real broker and real
//! sandboxes.
//!
//! Ignored by default, because the tests need the programs that `scripts/setup langgraph` installs;
//! `scripts/check-langgraph` runs them.

mod deployment;
mod langgraph_client;
mod plain;
mod screenshots;
mod tui;
