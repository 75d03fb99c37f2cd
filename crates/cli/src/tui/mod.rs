//! The TUI: chat, the shared terminal, events, files and sync on one screen.
//!
//! [`app::State`] is the whole screen, and only its `update` changes it: a message in, effects out, no I/O. `view`
//! draws it. [`run`] owns the terminal; [`tasks`] execute effects and answer with messages over one bounded channel.

mod app;
mod chat_pane;
mod editor;
mod emulator;
mod encode;
mod feed;
mod files;
mod keys;
mod layout;
mod message;
mod mouse;
mod orders;
mod picker;
mod run;
mod screen;
mod shell_pane;
mod shell_task;
mod sync;
mod tasks;
mod view;
mod watching;

pub use run::run;
