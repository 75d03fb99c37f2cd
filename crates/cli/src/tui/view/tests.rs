//! Snapshots of the whole screen at common sizes.

use cobox_client::FileWatchEvent;
use cobox_langgraph::{Interrupt, Message as ChatMessage, RunEvent};
use cobox_protocol::{
    EventId, SandboxId, SessionId, Timestamp,
    event::{EventKind, EventSource, ExecEnd, FileChange, SandboxEvent},
    frame::Controller,
    fs::FileKind,
    key::PrincipalKind,
    watch::{ChangedBy, WatchEvent},
};
use crossterm::event::{KeyCode, KeyModifiers};
use ratatui::{Terminal, backend::TestBackend};
use serde_json::{Value, json};

use super::*;
use crate::tui::{
    app_state::tests::{app_options, apply_update, press, ready_state, submit_text},
    app_state::{AppOptions, SandboxState},
    file_tree::Contents,
    message::{Message, ShellUpdate, ThreadUpdate},
    sync_status::SyncState,
};

fn render(state: &mut AppState, cols: u16, rows: u16) -> String {
    state.update(Message::Resized(cols, rows));
    let mut terminal = Terminal::new(TestBackend::new(cols, rows)).unwrap();
    terminal.draw(|frame| draw(frame, state)).unwrap();
    terminal.backend().to_string()
}

fn add_message(state: &mut AppState, value: Value) {
    apply_update(state, ThreadUpdate::Run(RunEvent::Message { message: ChatMessage::read(&value).unwrap(), is_nested: false }));
}

fn add_event(state: &mut AppState, kind: EventKind) {
    let event = SandboxEvent {
        id: EventId::numbered(Timestamp::from_unix(1_700_000_000), 7),
        at: Timestamp::from_unix(1_700_000_000),
        session_id: SessionId::new(),
        sandbox_id: SandboxId::new(),
        principal: Some("my-deployment".into()),
        actor: Some("agent".into()),
        source: EventSource::Sandbox,
        kind,
    };
    apply_update(state, ThreadUpdate::SandboxEvent(Box::new(event)));
}

fn change_file(state: &mut AppState, path: &str, of: fn(WatchEvent) -> FileWatchEvent) {
    let by = ChangedBy::Client { principal: "my-deployment".into(), actor: "agent".into() };
    let event = WatchEvent {
        path: path.into(),
        path_b64: None,
        kind: FileKind::File,
        by,
        at: Timestamp::from_unix(0),
        from: None,
        from_b64: None,
        to: None,
        to_b64: None,
    };
    apply_update(state, ThreadUpdate::FileChanged(of(event)));
}

/// An agent in the middle of a run.
fn at_work() -> AppState {
    let mut state = ready_state();
    submit_text(&mut state, "fix the leap years");
    let call = |id: &str, name: &str, args: Value| json!({"type": "ai", "id": format!("m{id}"), "content": "", "tool_calls": [{"id": id, "name": name, "args": args}]});
    add_message(&mut state, call("1", "write_file", json!({"file_path": "/workspace/leap.py", "content": "def leap(year): …"})));
    add_message(&mut state, json!({"type": "tool", "tool_call_id": "1", "content": "Updated file /workspace/leap.py"}));
    add_message(&mut state, call("2", "execute", json!({"command": "cd /workspace && python3 test_leap.py"})));
    add_message(
        &mut state,
        json!({"type": "tool", "tool_call_id": "2", "content": "FAIL: test_years\nTraceback\n  line 1\n", "status": "error"}),
    );
    add_message(&mut state, json!({"type": "AIMessageChunk", "id": "m3", "content": "The year 2000 is missing; I fix it."}));
    add_event(
        &mut state,
        EventKind::FileWritten(FileChange { path: "/workspace/leap.py".into(), size: Some(68), ..FileChange::default() }),
    );
    let end = ExecEnd { command: "cd /workspace && python3 test_leap.py".into(), exit_code: Some(1), ..ExecEnd::default() };
    add_event(&mut state, EventKind::Exec(end));
    apply_update(
        &mut state,
        ThreadUpdate::Shell(ShellUpdate::Control {
            controller: Some(Controller { principal: "ann".into(), actor: PrincipalKind::Human }),
            yours: None,
        }),
    );
    apply_update(
        &mut state,
        ThreadUpdate::Shell(ShellUpdate::Output(
            "user@sandbox:/workspace$ ls\r\n\x1b[32mleap.py\x1b[0m  test_leap.py\r\nuser@sandbox:/workspace$ ".into(),
        )),
    );
    apply_update(&mut state, ThreadUpdate::FirstContents { path: "/workspace/README".into(), contents: Contents::Text("hello\n".into()) });
    change_file(&mut state, "/workspace/leap.py", FileWatchEvent::Created);
    change_file(&mut state, "/workspace/test_leap.py", FileWatchEvent::Created);
    change_file(&mut state, "/workspace/README", FileWatchEvent::Created);
    state
}

#[test]
fn a_wide_screen_shows_chat_terminal_and_events_side_by_side() {
    insta::assert_snapshot!(render(&mut at_work(), 120, 40));
}

#[test]
fn a_small_screen_shows_one_pane_and_the_last_events() {
    insta::assert_snapshot!(render(&mut at_work(), 80, 24));
}

#[test]
fn a_small_screen_shows_the_focused_terminal() {
    let mut state = at_work();
    press(&mut state, KeyCode::Char('2'), KeyModifiers::ALT);
    insta::assert_snapshot!(render(&mut state, 80, 24));
}

#[test]
fn files_that_changed_are_marked_and_one_is_compared() {
    let mut state = at_work();
    press(&mut state, KeyCode::Char('4'), KeyModifiers::ALT);
    insta::assert_snapshot!("files", render(&mut state, 80, 24));
    apply_update(
        &mut state,
        ThreadUpdate::FileRead { path: "/workspace/README".into(), contents: Contents::Text("hello\nagain\n".into()) },
    );
    insta::assert_snapshot!("difference", render(&mut state, 80, 24));
}

#[test]
fn a_question_is_shown_above_the_input() {
    let mut state = at_work();
    let interrupts =
        json!([{"id": "i", "value": {"action_requests": [{"name": "execute", "args": {"command": "rm -rf /workspace/build"}}]}}]);
    apply_update(&mut state, ThreadUpdate::Run(RunEvent::Interrupted(Interrupt::read_all(&interrupts))));
    apply_update(&mut state, ThreadUpdate::RunEnded(Ok(())));
    insta::assert_snapshot!(render(&mut state, 80, 24));
}

#[test]
fn expanded_tools_show_arguments_and_outcomes() {
    let mut state = at_work();
    press(&mut state, KeyCode::Char('o'), KeyModifiers::CONTROL);
    insta::assert_snapshot!(render(&mut state, 100, 30));
}

#[test]
fn help_lists_keys_and_commands() {
    let mut state = ready_state();
    press(&mut state, KeyCode::F(1), KeyModifiers::NONE);
    insta::assert_snapshot!(render(&mut state, 120, 40));
}

#[test]
fn a_start_without_a_deployment_explains_how_to_add_one() {
    let (mut state, _) = AppState::begin(AppOptions { deployment: None, thread: Some("demo".into()), ..app_options() });
    press(&mut state, KeyCode::Char('1'), KeyModifiers::ALT);
    insta::assert_snapshot!(render(&mut state, 80, 24));
}

#[test]
fn sync_is_summarized_in_the_header() {
    let mut state = ready_state();
    assert!(render(&mut state, 80, 24).contains("no sync"));
    let sync = SyncState::Running { summary: "synced".into(), details: vec!["conflict: a.txt".into()], conflicts: 1 };
    apply_update(&mut state, ThreadUpdate::Sync(sync));
    state.focus_pane(Pane::Sync);
    let shown = render(&mut state, 80, 24);
    assert!(shown.contains("synced, 1 conflict") && shown.contains("conflict: a.txt"), "{shown}");
}

#[test]
fn a_screen_that_is_too_small_shows_a_message() {
    insta::assert_snapshot!(render(&mut at_work(), 50, 10));
}

#[test]
fn every_size_and_state_can_be_drawn() {
    for (cols, rows) in [(1, 1), (2, 40), (79, 24), (80, 24), (81, 25), (119, 29), (120, 30), (121, 31), (300, 100)] {
        let mut state = at_work();
        for pane in Pane::ALL {
            state.focus_pane(pane);
            render(&mut state, cols, rows);
        }
        for sandbox in [SandboxState::None, SandboxState::Opening, SandboxState::Failed("why".into())] {
            state.sandbox = sandbox;
            state.shell = crate::tui::shell_pane::ShellPane::new();
            state.focus_pane(Pane::Terminal);
            render(&mut state, cols, rows);
        }
    }
}

#[test]
fn untrusted_text_cannot_repaint_the_screen() {
    let mut state = ready_state();
    add_message(&mut state, json!({"type": "ai", "id": "m", "content": "a\u{1b}[2Jb\u{7}c\u{202e}d"}));
    add_event(&mut state, EventKind::FileWritten(FileChange { path: "/workspace/\u{1b}]0;x\u{7}y".into(), ..FileChange::default() }));
    change_file(&mut state, "/workspace/\u{1b}[31mz", FileWatchEvent::Created);
    apply_update(&mut state, ThreadUpdate::Shell(ShellUpdate::Output("\u{1b}[31mred\u{1b}]0;title\u{7}".into())));
    state.focus_pane(Pane::Files);
    let shown = render(&mut state, 120, 40);
    assert!(shown.contains("abcd") && !shown.chars().any(|c| c.is_control() && c != '\n'), "{shown}");
}
