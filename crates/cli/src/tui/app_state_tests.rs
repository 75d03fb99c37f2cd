//! Tests of the TUI's state machine: keys and events in, effects out.

use cobox_client::FileWatchEvent;
use cobox_langgraph::{Interrupt, Message as ChatMessage, RunEvent, RunInput};
use cobox_protocol::{
    Timestamp,
    frame::Controller,
    fs::FileKind,
    key::PrincipalKind,
    watch::{ChangedBy, WatchEvent},
};
use crossterm::event::{KeyCode, KeyEvent, KeyModifiers, MouseButton, MouseEvent, MouseEventKind};
use ratatui::widgets::Block;
use serde_json::json;

use super::*;
use crate::tui::message::{SandboxLine, ShellUpdate};

pub fn app_options() -> AppOptions {
    AppOptions {
        size: (120, 40),
        deployment: Some("http://127.0.0.1:2024".into()),
        assistant: None,
        thread: None,
        has_broker: true,
        sandbox_choice: SandboxChoice::Ensure { name: None },
    }
}

pub fn assistant() -> Assistant {
    Assistant { id: "a-1".into(), graph: "agent".into(), name: "agent".into() }
}

pub fn apply_update(state: &mut AppState, update: ThreadUpdate) -> Vec<Effect> {
    let visit = state.visit;
    state.update(Message::Thread { visit, update })
}

pub fn press(state: &mut AppState, code: KeyCode, modifiers: KeyModifiers) -> Vec<Effect> {
    state.update(Message::Key(KeyEvent::new(code, modifiers)))
}

pub fn submit_text(state: &mut AppState, text: &str) -> Vec<Effect> {
    for c in text.chars() {
        press(state, KeyCode::Char(c), KeyModifiers::NONE);
    }
    press(state, KeyCode::Enter, KeyModifiers::NONE)
}

pub fn open_sandbox() -> OpenSandbox {
    OpenSandbox { sandbox: "sb_1".into(), name: None, session: "ssn_1".into(), principal: Some("ann".into()), may_type: true }
}

/// In a thread, with its sandbox open and its shell joined.
pub fn ready_state() -> AppState {
    let (mut state, _) = AppState::begin(app_options());
    state.update(Message::Assistants(Ok(vec![assistant()])));
    apply_update(&mut state, ThreadUpdate::Entered(Ok(("t-1".into(), ThreadState::default()))));
    apply_update(&mut state, ThreadUpdate::Sandbox(Ok(Some(open_sandbox()))));
    apply_update(&mut state, ThreadUpdate::Shell(ShellUpdate::Ready { cols: 80, rows: 24, controller: None, yours: None }));
    state
}

fn run_message(value: serde_json::Value) -> RunEvent {
    RunEvent::Message { message: ChatMessage::read(&value).unwrap(), is_nested: false }
}

fn is_run(effect: &Effect) -> bool {
    matches!(effect, Effect::Run { .. })
}

#[test]
fn a_thread_and_its_sandbox_are_prepared_before_any_input() {
    let (mut state, effects) = AppState::begin(app_options());
    assert!(effects.contains(&Effect::ListAssistants) && effects.contains(&Effect::Enter { visit: 1, thread: None }));
    let effects = apply_update(&mut state, ThreadUpdate::Entered(Ok(("t-1".into(), ThreadState::default()))));
    assert_eq!(effects, [Effect::OpenSandbox { visit: 1, thread: "t-1".into(), sandbox_choice: SandboxChoice::Ensure { name: None } }]);
    let effects = apply_update(&mut state, ThreadUpdate::Sandbox(Ok(Some(open_sandbox()))));
    assert!(matches!(effects[..], [Effect::Follow { .. }, Effect::JoinShell { observe: false, .. }]), "{effects:?}");
}

#[test]
fn a_message_waits_for_its_sandbox_and_is_sent_once() {
    let (mut state, _) = AppState::begin(app_options());
    state.update(Message::Assistants(Ok(vec![assistant()])));
    apply_update(&mut state, ThreadUpdate::Entered(Ok(("t-1".into(), ThreadState::default()))));
    assert!(!submit_text(&mut state, "hello").iter().any(is_run));
    assert!(!submit_text(&mut state, "again").iter().any(is_run), "one run at a time");
    assert_eq!(state.chat.editor.text(), "again", "a message that can't be sent stays in the editor");
    let effects = apply_update(&mut state, ThreadUpdate::Sandbox(Ok(Some(open_sandbox()))));
    let runs: Vec<_> = effects.iter().filter(|e| is_run(e)).collect();
    let [Effect::Run { thread, assistant, input: RunInput::Message { text, .. }, .. }] = runs[..] else { panic!("{effects:?}") };
    assert_eq!((thread.as_str(), assistant.as_str(), text.as_str()), ("t-1", "a-1", "hello"));
    assert!(!apply_update(&mut state, ThreadUpdate::Sandbox(Ok(Some(open_sandbox())))).iter().any(is_run));
}

#[test]
fn a_failed_sandbox_does_not_hold_the_message_back() {
    let (mut state, _) = AppState::begin(app_options());
    state.update(Message::Assistants(Ok(vec![assistant()])));
    apply_update(&mut state, ThreadUpdate::Entered(Ok(("t-1".into(), ThreadState::default()))));
    submit_text(&mut state, "hello");
    let effects = apply_update(&mut state, ThreadUpdate::Sandbox(Err("no provider".into())));
    assert!(effects.iter().any(is_run));
    assert!(state.notice.as_ref().unwrap().text.contains("no provider"));
}

#[test]
fn the_first_message_names_the_thread() {
    let mut state = ready_state();
    let effects = submit_text(&mut state, "fix the tests");
    assert!(effects.contains(&Effect::NameThread { thread: "t-1".into(), title: "fix the tests".into() }));
    apply_update(&mut state, ThreadUpdate::RunEnded(Ok(())));
    assert!(!submit_text(&mut state, "more").iter().any(|e| matches!(e, Effect::NameThread { .. })));
}

#[test]
fn updates_of_a_left_thread_are_ignored() {
    let mut state = ready_state();
    submit_text(&mut state, "hello");
    let effects = submit_text(&mut state, "/new");
    assert!(effects.contains(&Effect::Enter { visit: 2, thread: None }) && effects.contains(&Effect::LeaveShell));
    state.update(Message::Thread { visit: 1, update: ThreadUpdate::Run(run_message(json!({"type": "ai", "id": "m", "content": "late"}))) });
    assert!(state.chat.transcript.is_empty());
    assert_eq!(state.sandbox, SandboxState::None);
}

#[test]
fn questions_are_answered_by_a_letter_or_a_sentence() {
    let interrupts = json!([{"id": "i", "value": {"action_requests": [{"name": "execute", "args": {"command": "rm x"}}]}}]);
    let interrupt = || ThreadUpdate::Run(RunEvent::Interrupted(Interrupt::read_all(&interrupts)));
    let resumed = |effects: &[Effect]| match effects {
        [Effect::Run { input: RunInput::Resume(answer), .. }] => answer["decisions"][0].clone(),
        other => panic!("{other:?}"),
    };
    let mut state = ready_state();
    submit_text(&mut state, "go");
    apply_update(&mut state, interrupt());
    apply_update(&mut state, ThreadUpdate::RunEnded(Ok(())));
    assert!(press(&mut state, KeyCode::Char('y'), KeyModifiers::NONE).is_empty(), "no key alone approves anything");
    let effects = press(&mut state, KeyCode::Enter, KeyModifiers::NONE);
    assert_eq!(resumed(&effects), json!({"type": "approve"}));

    apply_update(&mut state, interrupt());
    apply_update(&mut state, ThreadUpdate::RunEnded(Ok(())));
    assert!(submit_text(&mut state, "what is this?").is_empty());
    assert!(state.notice.as_ref().unwrap().is_error);
    state.chat.editor.set("");
    assert_eq!(resumed(&submit_text(&mut state, "no not that one")), json!({"type": "reject", "message": "not that one"}));

    apply_update(&mut state, interrupt());
    apply_update(&mut state, ThreadUpdate::RunEnded(Ok(())));
    press(&mut state, KeyCode::Char('e'), KeyModifiers::NONE);
    press(&mut state, KeyCode::Tab, KeyModifiers::NONE);
    assert_eq!(state.chat.editor.text(), r#"edit {"command":"rm x"}"#);
    state.chat.editor.set(r#"edit {"command":"ls"}"#);
    let edited = resumed(&press(&mut state, KeyCode::Enter, KeyModifiers::NONE));
    assert_eq!(edited["edited_action"], json!({"name": "execute", "args": {"command": "ls"}}));
}

#[test]
fn escape_twice_cancels_a_run_and_interrupt_twice_quits() {
    let mut state = ready_state();
    submit_text(&mut state, "go");
    apply_update(&mut state, ThreadUpdate::Run(RunEvent::Started { run_id: "r-1".into() }));
    assert!(press(&mut state, KeyCode::Esc, KeyModifiers::NONE).is_empty());
    let effects = press(&mut state, KeyCode::Esc, KeyModifiers::NONE);
    assert_eq!(effects, [Effect::Cancel { thread: "t-1".into(), run: "r-1".into() }]);
    apply_update(&mut state, ThreadUpdate::RunEnded(Ok(())));
    assert!(press(&mut state, KeyCode::Char('c'), KeyModifiers::CONTROL).is_empty());
    assert_eq!(press(&mut state, KeyCode::Char('c'), KeyModifiers::CONTROL), [Effect::Quit]);
    press(&mut state, KeyCode::Char('c'), KeyModifiers::CONTROL);
    press(&mut state, KeyCode::Left, KeyModifiers::NONE);
    assert!(press(&mut state, KeyCode::Char('c'), KeyModifiers::CONTROL).is_empty(), "another key cancels the confirmation");
}

#[test]
fn keys_reach_the_shell_only_without_another_controller() {
    let mut state = ready_state();
    press(&mut state, KeyCode::Char('2'), KeyModifiers::ALT);
    assert_eq!(press(&mut state, KeyCode::Char('l'), KeyModifiers::NONE), [Effect::Type(b"l".to_vec())]);
    let bob = Controller { principal: "bob".into(), actor: PrincipalKind::Human };
    apply_update(&mut state, ThreadUpdate::Shell(ShellUpdate::Control { controller: Some(bob), yours: None }));
    assert!(press(&mut state, KeyCode::Char('l'), KeyModifiers::NONE).is_empty());
    assert!(state.shell.message.as_ref().unwrap().contains("bob (human) has control"));
    assert_eq!(press(&mut state, KeyCode::Char('t'), KeyModifiers::ALT), [Effect::TakeControl]);
    let ann = Controller { principal: "ann".into(), actor: PrincipalKind::Human };
    let effects = apply_update(&mut state, ThreadUpdate::Shell(ShellUpdate::Control { controller: Some(ann), yours: None }));
    assert!(matches!(effects[..], [Effect::ResizeShell(..)]), "taking control resizes the shell: {effects:?}");
    assert_eq!(press(&mut state, KeyCode::Char('c'), KeyModifiers::CONTROL), [Effect::Type(vec![3])], "Ctrl-C goes to the shell");
    press(&mut state, KeyCode::Char('5'), KeyModifiers::CONTROL);
    assert_eq!(state.focus, Pane::Chat);
}

#[test]
fn an_observer_cannot_type() {
    let (mut state, _) = AppState::begin(app_options());
    apply_update(&mut state, ThreadUpdate::Entered(Ok(("t-1".into(), ThreadState::default()))));
    let effects = apply_update(&mut state, ThreadUpdate::Sandbox(Ok(Some(OpenSandbox { may_type: false, ..open_sandbox() }))));
    assert!(effects.iter().any(|e| matches!(e, Effect::JoinShell { observe: true, .. })));
    apply_update(&mut state, ThreadUpdate::Shell(ShellUpdate::Ready { cols: 80, rows: 24, controller: None, yours: None }));
    state.focus_pane(Pane::Terminal);
    assert!(press(&mut state, KeyCode::Char('x'), KeyModifiers::NONE).is_empty());
    assert!(press(&mut state, KeyCode::Char('t'), KeyModifiers::ALT).is_empty());
}

#[test]
fn the_shell_follows_the_size_of_its_pane() {
    let mut state = ready_state();
    let ann = Controller { principal: "ann".into(), actor: PrincipalKind::Human };
    apply_update(&mut state, ThreadUpdate::Shell(ShellUpdate::Control { controller: Some(ann), yours: None }));
    let effects = state.update(Message::Resized(160, 50));
    assert!(matches!(effects[..], [Effect::ResizeShell(78, _)]), "{effects:?}");
    assert!(state.update(Message::Resized(40, 10)).is_empty(), "a screen that is too small does not resize the shared shell");
}

#[test]
fn without_a_broker_the_feed_shows_the_sandbox_events_of_the_run() {
    let (mut state, _) = AppState::begin(AppOptions { has_broker: false, sandbox_choice: SandboxChoice::Existing, ..app_options() });
    state.update(Message::Assistants(Ok(vec![assistant()])));
    let effects = apply_update(&mut state, ThreadUpdate::Entered(Ok(("t-1".into(), ThreadState::default()))));
    assert!(effects.is_empty());
    assert!(submit_text(&mut state, "go").iter().any(is_run));
    let data = json!({"type": "sandbox", "event": {"type": "exec", "command": "ls", "exit_code": 0, "actor": "agent"}});
    assert!(apply_update(&mut state, ThreadUpdate::Run(RunEvent::Custom(data))).is_empty());
    assert_eq!(state.feed.lines().next().unwrap().text, "agent ran ls → exit 0");
}

#[test]
fn a_sandbox_made_by_the_agent_is_opened_at_its_first_event() {
    let (mut state, _) = AppState::begin(AppOptions { sandbox_choice: SandboxChoice::Existing, ..app_options() });
    state.update(Message::Assistants(Ok(vec![assistant()])));
    apply_update(&mut state, ThreadUpdate::Entered(Ok(("t-1".into(), ThreadState::default()))));
    apply_update(&mut state, ThreadUpdate::Sandbox(Ok(None)));
    submit_text(&mut state, "go");
    let data = json!({"type": "sandbox", "event": {"type": "connected", "actor": "agent"}});
    let effects = apply_update(&mut state, ThreadUpdate::Run(RunEvent::Custom(data.clone())));
    assert!(matches!(effects[..], [Effect::OpenSandbox { .. }]), "{effects:?}");
    assert!(apply_update(&mut state, ThreadUpdate::Run(RunEvent::Custom(data))).is_empty(), "once");
}

#[test]
fn without_a_deployment_the_sandbox_opens_and_a_notice_explains_how_to_add_one() {
    let (mut state, effects) = AppState::begin(AppOptions {
        deployment: None,
        thread: Some("demo".into()),
        sandbox_choice: SandboxChoice::Existing,
        ..app_options()
    });
    assert_eq!(effects, [Effect::OpenSandbox { visit: 1, thread: "demo".into(), sandbox_choice: SandboxChoice::Existing }]);
    apply_update(&mut state, ThreadUpdate::Sandbox(Ok(None)));
    assert!(state.notice.as_ref().unwrap().text.contains("/sandbox new"));
    submit_text(&mut state, "hello");
    assert!(state.notice.as_ref().unwrap().text.contains("--deployment"));
    state.chat.editor.set("");
    let effects = submit_text(&mut state, "/sandbox new dev");
    assert_eq!(
        effects,
        [Effect::OpenSandbox { visit: 1, thread: "demo".into(), sandbox_choice: SandboxChoice::Ensure { name: Some("dev".into()) } }]
    );
}

#[test]
fn slash_commands_start_their_actions() {
    let mut state = ready_state();
    assert_eq!(submit_text(&mut state, "/threads"), [Effect::ListThreads]);
    assert_eq!(submit_text(&mut state, "/sandbox list"), [Effect::ListSandboxes]);
    let sandboxes = vec![SandboxLine { name: "dev".into(), id: "sb_2".into(), state: "active".into() }];
    state.update(Message::Sandboxes(Ok(sandboxes)));
    let effects = press(&mut state, KeyCode::Enter, KeyModifiers::NONE);
    assert_eq!(
        effects,
        [Effect::OpenSandbox { visit: 1, thread: "t-1".into(), sandbox_choice: SandboxChoice::Use { sandbox: "sb_2".into() } }]
    );
    apply_update(&mut state, ThreadUpdate::Sandbox(Ok(Some(open_sandbox()))));
    assert!(matches!(&submit_text(&mut state, "/terminal build")[..], [Effect::JoinShell { name: Some(name), .. }] if name == "build"));
    assert_eq!(state.focus, Pane::Terminal);
    state.focus_pane(Pane::Chat);
    submit_text(&mut state, "/files");
    assert_eq!((state.focus, state.side), (Pane::Files, Pane::Files));
    state.focus_pane(Pane::Chat);
    submit_text(&mut state, "/help");
    assert!(matches!(state.overlay, Some(Overlay::Help { .. })));
    press(&mut state, KeyCode::Esc, KeyModifiers::NONE);
    assert_eq!(submit_text(&mut state, "/quit"), [Effect::Quit]);
}

#[test]
fn agent_changes_are_marked_and_can_be_compared() {
    let mut state = ready_state();
    let event = WatchEvent {
        path: "/workspace/leap.py".into(),
        path_b64: None,
        kind: FileKind::File,
        by: ChangedBy::Client { principal: "bot".into(), actor: "agent".into() },
        at: Timestamp::from_unix(0),
        from: None,
        from_b64: None,
        to: None,
        to_b64: None,
    };
    apply_update(&mut state, ThreadUpdate::FileChanged(FileWatchEvent::Created(event)));
    let effects = submit_text(&mut state, "/diff leap.py");
    assert_eq!(effects, [Effect::ReadFile { visit: 1, path: "/workspace/leap.py".into() }]);
    let contents = crate::tui::file_tree::Contents::Text("x = 1\n".into());
    apply_update(&mut state, ThreadUpdate::FileRead { path: "/workspace/leap.py".into(), contents });
    assert_eq!(state.files.diff.as_ref().unwrap().lines[0].tag, '+');
    press(&mut state, KeyCode::Esc, KeyModifiers::NONE);
    assert!(state.files.diff.is_none() && state.focus == Pane::Files);
}

#[test]
fn the_mouse_focuses_scrolls_and_expands() {
    let mut state = ready_state();
    let at = |kind, column, row| Message::Mouse(MouseEvent { kind, column, row, modifiers: KeyModifiers::NONE });
    state.update(at(MouseEventKind::Down(MouseButton::Left), 100, 5));
    assert_eq!(state.focus, Pane::Terminal);
    state.update(at(MouseEventKind::Down(MouseButton::Left), 100, 35));
    assert_eq!(state.focus, Pane::Events);
    apply_update(
        &mut state,
        ThreadUpdate::Run(run_message(
            json!({"type": "ai", "id": "m", "content": "", "tool_calls": [{"id": "c", "name": "ls", "args": {}}]}),
        )),
    );
    state.update(at(MouseEventKind::Down(MouseButton::Left), 5, 2));
    assert!(state.chat.is_expanded(0));
    state.update(at(MouseEventKind::ScrollUp, 5, 5));
    assert_eq!(state.chat.scroll, 0, "there is nothing to scroll to");
}

fn mouse_at(kind: MouseEventKind, column: u16, row: u16) -> Message {
    Message::Mouse(MouseEvent { kind, column, row, modifiers: KeyModifiers::NONE })
}

#[test]
fn mouse_events_go_to_a_program_that_enabled_the_mouse() {
    let mut state = ready_state();
    let inner = Block::bordered().inner(state.layout().unwrap().pane(Pane::Terminal).unwrap());
    let (left, at) = (MouseButton::Left, |kind| mouse_at(kind, inner.x + 4, inner.y + 2));
    state.focus_pane(Pane::Terminal);
    assert!(state.update(at(MouseEventKind::Down(left))).is_empty(), "the program did not request mouse events");
    apply_update(&mut state, ThreadUpdate::Shell(ShellUpdate::Output((&b"\x1b[?1002h\x1b[?1006h"[..]).into())));
    let input = |text: &str| [Effect::Type(text.as_bytes().to_vec())];
    assert_eq!(state.update(at(MouseEventKind::Down(left))), input("\x1b[<0;5;3M"));
    assert_eq!(state.update(mouse_at(MouseEventKind::Drag(left), 0, inner.y + 2)), input("\x1b[<32;1;3M"), "a drag stays in the pane");
    assert_eq!(state.update(at(MouseEventKind::Up(left))), input("\x1b[<0;5;3m"));
    assert_eq!(state.update(at(MouseEventKind::ScrollUp)), input("\x1b[<64;5;3M"));
    assert!(state.update(at(MouseEventKind::Moved)).is_empty(), "the program did not request movement events");
    // A click that moves the focus to the pane is not passed to its program, nor are the events that follow from it.
    state.focus_pane(Pane::Chat);
    assert!(state.update(at(MouseEventKind::Down(left))).is_empty() && state.focus == Pane::Terminal);
    assert!(state.update(at(MouseEventKind::Up(left))).is_empty());
    let bob = Controller { principal: "bob".into(), actor: PrincipalKind::Human };
    apply_update(&mut state, ThreadUpdate::Shell(ShellUpdate::Control { controller: Some(bob), yours: None }));
    assert!(state.update(at(MouseEventKind::Down(left))).is_empty(), "another participant has control");
}

#[test]
fn another_terminal_of_the_same_user_counts_as_another_controller() {
    let mut state = ready_state();
    state.focus_pane(Pane::Terminal);
    let ann = || Some(Controller { principal: "ann".into(), actor: PrincipalKind::Human });
    apply_update(&mut state, ThreadUpdate::Shell(ShellUpdate::Control { controller: ann(), yours: Some(false) }));
    assert!(press(&mut state, KeyCode::Char('l'), KeyModifiers::NONE).is_empty());
    assert_eq!(state.shell.message.as_deref(), Some("another terminal of yours has control; Alt-t takes it"));
    apply_update(&mut state, ThreadUpdate::Shell(ShellUpdate::Control { controller: ann(), yours: Some(true) }));
    assert_eq!(press(&mut state, KeyCode::Char('l'), KeyModifiers::NONE), [Effect::Type(b"l".to_vec())]);
}

#[test]
fn a_click_chooses_a_list_item() {
    let mut state = ready_state();
    let line = |n: u8| SandboxLine { name: format!("dev{n}"), id: format!("sb_{n}"), state: "active".into() };
    let sandboxes = (2..6).map(line).collect();
    state.update(Message::Sandboxes(Ok(sandboxes)));
    // Four rows, centred in forty, inside a border.
    state.update(mouse_at(MouseEventKind::Down(MouseButton::Left), 2, 19));
    assert!(matches!(state.overlay, Some(Overlay::Pick(_))), "a click beside the list chooses nothing");
    let effects = state.update(mouse_at(MouseEventKind::Down(MouseButton::Left), 60, 19));
    assert_eq!(
        effects,
        [Effect::OpenSandbox { visit: 1, thread: "t-1".into(), sandbox_choice: SandboxChoice::Use { sandbox: "sb_3".into() } }]
    );
    assert!(state.overlay.is_none());
}

#[test]
fn the_sync_pane_scrolls_to_its_last_line() {
    let mut state = ready_state();
    state.focus_pane(Pane::Sync);
    press(&mut state, KeyCode::Down, KeyModifiers::NONE);
    assert_eq!(state.sync_scroll, 0);
    let details = (0..30).map(|n| format!("line {n}")).collect();
    apply_update(&mut state, ThreadUpdate::Sync(SyncState::Running { summary: "in sync".into(), details, conflicts: 0 }));
    (0..9).for_each(|_| drop(press(&mut state, KeyCode::PageDown, KeyModifiers::NONE)));
    let visible_rows = usize::from(state.layout().unwrap().pane(Pane::Sync).unwrap().height) - 2;
    assert_eq!(state.sync_scroll, 31 - visible_rows);
    state.update(mouse_at(MouseEventKind::ScrollUp, 100, 35));
    assert_eq!(state.sync_scroll, 31 - visible_rows - 3);
}

#[test]
fn a_terminal_name_means_a_sandbox_if_the_thread_has_none() {
    let (mut state, _) = AppState::begin(AppOptions { sandbox_choice: SandboxChoice::Existing, ..app_options() });
    apply_update(&mut state, ThreadUpdate::Entered(Ok(("t-1".into(), ThreadState::default()))));
    apply_update(&mut state, ThreadUpdate::Sandbox(Ok(None)));
    let effects = submit_text(&mut state, "/terminal build");
    assert_eq!(
        effects,
        [Effect::OpenSandbox { visit: 1, thread: "t-1".into(), sandbox_choice: SandboxChoice::Use { sandbox: "build".into() } }]
    );
    assert_eq!(state.focus, Pane::Terminal);
}
