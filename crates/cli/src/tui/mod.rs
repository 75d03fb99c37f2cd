//! The TUI: chat, the shared terminal, events, files and sync on one screen.
//!
//! [`app_state::AppState`] is the whole screen, and only its `update` changes it: a message in, effects out, no I/O. `view`
//! draws it. [`event_loop`] owns the terminal; [`tasks`] execute effects and answer with messages over one bounded channel.

mod app_state;
mod chat_pane;
mod editor;
mod emulator;
mod event_feed;
mod event_loop;
mod file_tree;
mod key_encoding;
mod keys;
mod layout;
mod message;
mod mouse;
mod picker;
mod sandbox_watch;
mod shell_pane;
mod shell_task;
mod submit;
mod sync_status;
mod tasks;
mod terminal_screen;
mod view;

pub use event_loop::run;
