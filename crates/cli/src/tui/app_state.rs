//! The state of the whole screen and its transitions: `update` takes a message and returns the effects to run, without
//! side effects.

use cobox_langgraph::{Assistant, RunInput, ThreadState};

use super::{
    chat_pane::{ChatPane, RunState},
    event_feed::EventFeed,
    file_tree::FileTree,
    layout::{Pane, ScreenLayout},
    message::{Effect, Message, OpenSandbox, ThreadUpdate, UserResult},
    picker::Picker,
    shell_pane::ShellPane,
    sync_status::SyncState,
};
use crate::chat::{SandboxChoice, choose_assistant};

/// The directory that human and agent share.
pub const WORKSPACE: &str = "/workspace";

/// Initial settings of a screen.
#[derive(Clone, Debug)]
pub struct AppOptions {
    pub size: (u16, u16),
    /// Address of the deployment, for display.
    pub deployment: Option<String>,
    pub assistant: Option<String>,
    pub thread: Option<String>,
    pub has_broker: bool,
    pub sandbox_choice: SandboxChoice,
}

pub struct AppState {
    pub size: (u16, u16),
    pub focus: Pane,
    /// The pane in the lower corner of a wide screen.
    pub side: Pane,
    pub overlay: Option<Overlay>,
    pub chat: ChatPane,
    pub shell: ShellPane,
    pub feed: EventFeed,
    pub files: FileTree,
    pub sync: SyncState,
    /// Scroll offset of the sync pane, in lines.
    pub sync_scroll: usize,
    pub deployment: Option<String>,
    pub assistants: Vec<Assistant>,
    pub assistant: Option<Assistant>,
    pub thread: Option<String>,
    pub sandbox: SandboxState,
    pub notice: Option<Notice>,
    pub has_broker: bool,
    /// The assistant requested at the start.
    pub(super) requested_assistant: Option<String>,
    pub(super) sandbox_choice: SandboxChoice,
    pub(super) visit: u64,
    /// A message that waits for its thread or its sandbox.
    pub(super) pending_input: Option<RunInput>,
    /// The key that must be pressed a second time to confirm.
    pub(super) pending_confirmation: Option<PendingConfirmation>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SandboxState {
    None,
    Opening,
    Open(OpenSandbox),
    Failed(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PendingConfirmation {
    Cancel,
    Quit,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Overlay {
    Help { scroll: u16 },
    Pick(Picker),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    pub text: String,
    pub is_error: bool,
}

impl AppState {
    pub fn begin(options: AppOptions) -> (Self, Vec<Effect>) {
        let mut state = Self {
            size: options.size,
            focus: if options.deployment.is_some() { Pane::Chat } else { Pane::Terminal },
            side: Pane::Events,
            overlay: None,
            chat: ChatPane::default(),
            shell: ShellPane::new(),
            feed: EventFeed::default(),
            files: FileTree::new(WORKSPACE),
            sync: SyncState::None,
            sync_scroll: 0,
            deployment: options.deployment,
            assistants: Vec::new(),
            assistant: None,
            thread: None,
            sandbox: SandboxState::None,
            notice: None,
            has_broker: options.has_broker,
            requested_assistant: options.assistant,
            sandbox_choice: options.sandbox_choice,
            visit: 0,
            pending_input: None,
            pending_confirmation: None,
        };
        let mut effects = Vec::new();
        if state.deployment.is_some() {
            effects.push(Effect::ListAssistants);
            effects.extend(state.enter_thread(options.thread));
        } else {
            let thread = options.thread.unwrap_or_else(|| "default".to_owned());
            state.visit = 1;
            effects.extend(state.open_sandbox(&thread));
            state.thread = Some(thread);
        }
        effects.extend(state.resize_shell_to_pane());
        (state, effects)
    }

    pub fn update(&mut self, message: Message) -> Vec<Effect> {
        let mut effects = match message {
            Message::Key(key) => self.key(&key),
            Message::Mouse(mouse) => self.mouse(&mouse),
            Message::Pasted(text) => self.pasted(&text),
            Message::Resized(cols, rows) => {
                self.size = (cols, rows);
                Vec::new()
            }
            Message::Assistants(result) => self.set_assistants(result),
            Message::Threads(result) => self.show_picker(result.map(|threads| Picker::threads(&threads, self.thread.as_deref()))),
            Message::Sandboxes(result) => {
                self.show_picker(result.map(|sandboxes| Picker::sandboxes(&sandboxes, self.opened_sandbox().map(|r| r.sandbox.as_str()))))
            }
            Message::Failed(reason) => {
                self.show_error(reason);
                Vec::new()
            }
            Message::Thread { visit, update } if visit == self.visit => self.apply_thread_update(update),
            // Belongs to a thread that was left.
            Message::Thread { .. } => Vec::new(),
        };
        effects.extend(self.resize_shell_to_pane());
        effects
    }

    pub fn layout(&self) -> Option<ScreenLayout> {
        ScreenLayout::compute(self.size, self.focus, self.side)
    }

    pub fn opened_sandbox(&self) -> Option<&OpenSandbox> {
        if let SandboxState::Open(info) = &self.sandbox { Some(info) } else { None }
    }

    pub fn principal(&self) -> Option<&str> {
        self.opened_sandbox().and_then(|info| info.principal.as_deref())
    }

    pub fn show_notice(&mut self, text: impl Into<String>) {
        self.notice = Some(Notice { text: text.into(), is_error: false });
    }

    pub fn show_error(&mut self, text: impl Into<String>) {
        self.notice = Some(Notice { text: text.into(), is_error: true });
    }

    pub(super) fn focus_pane(&mut self, pane: Pane) {
        self.focus = pane;
        if matches!(pane, Pane::Events | Pane::Files | Pane::Sync) {
            self.side = pane;
        }
    }

    /// Enters a thread of the deployment or a new one. Only the text being typed is kept.
    pub(super) fn enter_thread(&mut self, thread: Option<String>) -> Vec<Effect> {
        self.visit += 1;
        self.thread = None;
        self.pending_input = None;
        self.sandbox = SandboxState::None;
        self.chat.enter_thread(&ThreadState::default());
        self.shell = ShellPane::new();
        self.feed = EventFeed::default();
        self.files = FileTree::new(WORKSPACE);
        (self.sync, self.sync_scroll) = (SyncState::None, 0);
        vec![Effect::LeaveShell, Effect::Enter { visit: self.visit, thread }]
    }

    pub(super) fn open_sandbox(&mut self, thread: &str) -> Option<Effect> {
        if !self.has_broker {
            return None;
        }
        // An open sandbox stays until it is replaced.
        if self.opened_sandbox().is_none() {
            self.sandbox = SandboxState::Opening;
        }
        Some(Effect::OpenSandbox { visit: self.visit, thread: thread.to_owned(), sandbox_choice: self.sandbox_choice.clone() })
    }

    /// Sends the waiting message once the thread exists and its sandbox is open or has failed to open.
    pub(super) fn start_pending_run(&mut self) -> Option<Effect> {
        let (Some(thread), Some(assistant)) = (&self.thread, &self.assistant) else { return None };
        if self.sandbox == SandboxState::Opening && self.sandbox_choice != SandboxChoice::Existing {
            return None;
        }
        let input = self.pending_input.take()?;
        self.chat.start_run();
        Some(Effect::Run { visit: self.visit, thread: thread.clone(), assistant: assistant.id.clone(), input })
    }

    fn set_assistants(&mut self, result: UserResult<Vec<Assistant>>) -> Vec<Effect> {
        match result {
            Ok(assistants) => {
                let was_listing = !self.assistants.is_empty();
                self.assistants = assistants;
                let current = self.assistant.as_ref().map(|a| a.id.clone());
                if was_listing {
                    self.overlay = Some(Overlay::Pick(Picker::assistants(&self.assistants, current.as_deref())));
                    return Vec::new();
                }
                match choose_assistant(&self.assistants, self.requested_assistant.as_deref()) {
                    Ok(found) => self.assistant = Some(found.clone()),
                    Err(failure) => self.show_error(format!("{}; {}", failure.message, failure.advice.unwrap_or_default())),
                }
                self.start_pending_run().into_iter().collect()
            }
            Err(reason) => {
                self.show_error(reason);
                Vec::new()
            }
        }
    }

    fn show_picker(&mut self, result: UserResult<Picker>) -> Vec<Effect> {
        match result {
            Ok(picker) if picker.items.is_empty() => self.show_notice("nothing to choose from"),
            Ok(picker) => self.overlay = Some(Overlay::Pick(picker)),
            Err(reason) => self.show_error(reason),
        }
        Vec::new()
    }

    fn apply_thread_update(&mut self, update: ThreadUpdate) -> Vec<Effect> {
        match update {
            ThreadUpdate::Entered(Ok((thread, state))) => {
                self.chat.enter_thread(&state);
                let mut effects: Vec<Effect> = self.open_sandbox(&thread).into_iter().collect();
                self.thread = Some(thread);
                effects.extend(self.start_pending_run());
                effects
            }
            ThreadUpdate::Entered(Err(reason)) => {
                self.show_error(format!("no thread (start one with /new, list them with /threads): {reason}"));
                Vec::new()
            }
            ThreadUpdate::Run(event) => {
                let sandbox_event = self.chat.apply_run_event(event);
                let Some(sentence) = sandbox_event else { return Vec::new() };
                if self.opened_sandbox().is_none() {
                    // Without a broker this is the only source of sandbox events; with one it shows that the thread
                    // now has a sandbox.
                    self.feed.push_note(sentence, false);
                    return self.look_for_sandbox();
                }
                Vec::new()
            }
            ThreadUpdate::RunEnded(outcome) => {
                self.chat.finish_run(outcome);
                self.pending_confirmation = None;
                self.look_for_sandbox()
            }
            ThreadUpdate::Sandbox(result) => self.apply_sandbox_result(result),
            ThreadUpdate::Shell(update) => {
                let principal = self.principal().map(str::to_owned);
                self.shell.update(update, principal.as_deref()).into_iter().collect()
            }
            ThreadUpdate::SandboxEvent(event) => {
                self.feed.push_event(&event);
                Vec::new()
            }
            ThreadUpdate::Sync(sync) => {
                self.sync_scroll = self.sync_scroll.min(sync.details().len());
                self.sync = sync;
                Vec::new()
            }
            ThreadUpdate::FeedEnded(reason) => {
                self.feed.push_note(reason, true);
                Vec::new()
            }
            ThreadUpdate::FilesListed(Ok(entries)) => {
                self.files.set_listing(&entries);
                Vec::new()
            }
            ThreadUpdate::FilesListed(Err(reason)) => {
                self.show_error(format!("listing the files failed: {reason}"));
                Vec::new()
            }
            ThreadUpdate::FirstContents { path, contents } => {
                self.files.record_contents(&path, contents);
                Vec::new()
            }
            ThreadUpdate::FileChanged(update) => match self.files.apply_watch_event(&update) {
                true => vec![Effect::ListFiles { visit: self.visit }],
                false => Vec::new(),
            },
            ThreadUpdate::FileRead { path, contents } => {
                self.files.compare(&path, &contents);
                Vec::new()
            }
        }
    }

    fn apply_sandbox_result(&mut self, result: UserResult<Option<OpenSandbox>>) -> Vec<Effect> {
        let mut effects = Vec::new();
        match result {
            Ok(Some(info)) => {
                let may_type = info.may_type;
                self.sandbox = SandboxState::Open(info);
                effects.push(Effect::Follow { visit: self.visit });
                effects.push(self.shell.join(self.visit, None, may_type));
            }
            Ok(None) => {
                self.sandbox = SandboxState::None;
                if self.deployment.is_none() {
                    self.show_notice("this thread has no sandbox: create one with /sandbox new");
                    self.focus = Pane::Chat;
                }
            }
            Err(reason) => {
                self.show_error(format!("no sandbox: {reason}"));
                if self.opened_sandbox().is_none() {
                    self.sandbox = SandboxState::Failed(reason);
                }
            }
        }
        effects.extend(self.start_pending_run());
        effects
    }

    /// Looks for a sandbox that the agent may have created in the meantime.
    fn look_for_sandbox(&mut self) -> Vec<Effect> {
        if self.sandbox != SandboxState::None {
            return Vec::new();
        }
        let Some(thread) = self.thread.clone() else { return Vec::new() };
        self.open_sandbox(&thread).into_iter().collect()
    }

    /// Resizes the shell to its pane.
    fn resize_shell_to_pane(&mut self) -> Option<Effect> {
        let inner = self.layout()?.pane(Pane::Terminal)?;
        let principal = self.principal().map(str::to_owned);
        self.shell.resize(inner.width.saturating_sub(2), inner.height.saturating_sub(2), principal.as_deref())
    }

    pub(super) fn cancel(&mut self) -> Option<Effect> {
        let RunState::Running { id, is_cancelling } = &mut self.chat.run else { return None };
        let (Some(run), Some(thread)) = (id.clone(), self.thread.clone()) else { return None };
        *is_cancelling = true;
        Some(Effect::Cancel { thread, run })
    }
}

#[cfg(test)]
#[path = "app_state_tests.rs"]
pub(super) mod tests;
