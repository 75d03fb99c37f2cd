//! Interprets text submitted in the chat: messages, decisions and slash commands become effects.

use cobox_langgraph::RunInput;

use super::{
    app_state::{AppState, Overlay, SandboxState},
    layout::Pane,
    message::Effect,
};
use crate::chat::{
    SandboxChoice, choose_assistant,
    input_parser::{self, SlashCommand},
};

/// Shown when the user sends a message without a deployment.
pub const NO_DEPLOYMENT: &str =
    "no deployment: start with --deployment URL, or set COBOX_DEPLOYMENT_URL or `deployment` in chat.toml (docs/chat.md)";

impl AppState {
    pub(super) fn submit(&mut self) -> Vec<Effect> {
        if self.chat.editor.text().trim().is_empty() {
            self.chat.editor.set("");
            return Vec::new();
        }
        let text = self.chat.editor.text().to_owned();
        match SlashCommand::parse(&text) {
            Some(Ok(command)) => {
                self.chat.editor.take();
                self.run_command(command)
            }
            Some(Err(reason)) => {
                self.show_error(reason);
                Vec::new()
            }
            None if self.deployment.is_none() => {
                self.show_error(NO_DEPLOYMENT);
                Vec::new()
            }
            // The typed text stays in the input line and can be sent later.
            None if self.chat.is_running() || self.pending_input.is_some() => {
                self.show_error("the agent is working: wait, or cancel the run with Esc Esc");
                Vec::new()
            }
            None => {
                let had_review = self.chat.review.is_some();
                match self.chat.input(&text) {
                    Ok(input) => {
                        self.chat.editor.take();
                        let title = if had_review { None } else { self.chat.title(input_parser::message_text(&text)) };
                        let mut effects = self.begin_run(input);
                        if let (Some(title), Some(thread)) = (title, self.thread.clone()) {
                            effects.push(Effect::NameThread { thread, title });
                        }
                        effects
                    }
                    Err(reason) => {
                        self.show_error(reason);
                        Vec::new()
                    }
                }
            }
        }
    }

    fn begin_run(&mut self, input: Option<RunInput>) -> Vec<Effect> {
        let Some(input) = input else { return Vec::new() };
        self.pending_input = Some(input);
        self.chat.scroll = 0;
        let effect = self.start_pending_run();
        if effect.is_none() {
            self.show_notice(match (&self.thread, &self.assistant, &self.sandbox) {
                (Some(_), Some(_), SandboxState::Opening) => "will be sent when the sandbox is ready",
                _ => "will be sent when the deployment responds",
            });
        }
        effect.into_iter().collect()
    }

    fn run_command(&mut self, command: SlashCommand) -> Vec<Effect> {
        let needs_deployment = matches!(command, SlashCommand::Threads(_) | SlashCommand::New | SlashCommand::Assistant(_));
        if needs_deployment && self.deployment.is_none() {
            self.show_error(NO_DEPLOYMENT);
            return Vec::new();
        }
        match command {
            SlashCommand::Help => self.overlay = Some(Overlay::Help { scroll: 0 }),
            SlashCommand::Threads(None) => return vec![Effect::ListThreads],
            SlashCommand::Threads(Some(thread)) => return self.enter_thread(Some(thread)),
            SlashCommand::New => return self.enter_thread(None),
            SlashCommand::Assistant(None) => return vec![Effect::ListAssistants],
            SlashCommand::Assistant(Some(name)) => match choose_assistant(&self.assistants, Some(&name)) {
                Ok(assistant) => self.assistant = Some(assistant.clone()),
                Err(failure) => self.show_error(format!("{}; {}", failure.message, failure.advice.unwrap_or_default())),
            },
            SlashCommand::SandboxList => return if self.require_broker() { vec![Effect::ListSandboxes] } else { Vec::new() },
            SlashCommand::SandboxUse(name) => return self.use_sandbox(&name),
            SlashCommand::SandboxNew(name) => return self.create_sandbox(name),
            SlashCommand::Terminal(name) => return self.join_shell(name),
            SlashCommand::Files => self.focus_pane(Pane::Files),
            SlashCommand::Diff(path) => return self.show_diff(path),
            SlashCommand::Events => self.focus_pane(Pane::Events),
            SlashCommand::Sync => self.focus_pane(Pane::Sync),
            SlashCommand::Cancel => match self.cancel() {
                Some(effect) => return vec![effect],
                None => self.show_notice("no run to cancel"),
            },
            SlashCommand::Clear => self.chat.transcript = cobox_langgraph::Transcript::default(),
            SlashCommand::Quit => return vec![Effect::Quit],
        }
        Vec::new()
    }

    fn require_broker(&mut self) -> bool {
        if !self.has_broker {
            self.show_error("no broker is configured: run `cobox up`, or set COBOX_URL and COBOX_API_KEY");
        }
        self.has_broker
    }

    /// Binds the thread to an existing sandbox.
    pub(super) fn use_sandbox(&mut self, name: &str) -> Vec<Effect> {
        self.sandbox_choice = SandboxChoice::Use { sandbox: name.to_owned() };
        self.open_chosen_sandbox()
    }

    fn create_sandbox(&mut self, name: Option<String>) -> Vec<Effect> {
        self.sandbox_choice = SandboxChoice::Ensure { name };
        self.open_chosen_sandbox()
    }

    fn open_chosen_sandbox(&mut self) -> Vec<Effect> {
        if !self.require_broker() {
            return Vec::new();
        }
        let Some(thread) = self.thread.clone() else {
            self.show_notice("the sandbox will be created with the thread");
            return Vec::new();
        };
        self.open_sandbox(&thread).into_iter().collect()
    }

    fn join_shell(&mut self, name: Option<String>) -> Vec<Effect> {
        let Some(may_type) = self.opened_sandbox().map(|info| info.may_type) else {
            // Without a sandbox there is no shell to name, so the name is a sandbox's.
            if let Some(name) = name {
                self.focus_pane(Pane::Terminal);
                return self.use_sandbox(&name);
            }
            self.show_error("this thread has no sandbox: create one with /sandbox new");
            return Vec::new();
        };
        self.focus_pane(Pane::Terminal);
        if self.shell.is_live() && self.shell.name == name {
            return Vec::new();
        }
        vec![self.shell.join(self.visit, name, may_type)]
    }

    /// Shows the difference of a file given by its path or the end of it; without one, of the first changed file in
    /// the list.
    fn show_diff(&mut self, path: Option<String>) -> Vec<Effect> {
        let file = match &path {
            Some(path) if path.starts_with('/') => Some(path.clone()),
            Some(path) => self.files.changed().map(|(known, ..)| known).find(|known| known.ends_with(path.as_str())).map(str::to_owned),
            None => self.files.changed().map(|(known, ..)| known.to_owned()).next(),
        };
        match file {
            Some(path) => {
                self.focus_pane(Pane::Files);
                vec![Effect::ReadFile { visit: self.visit, path }]
            }
            None => {
                self.show_notice(if path.is_some() { "no changed file has that name" } else { "no file has changed since you joined" });
                Vec::new()
            }
        }
    }
}
