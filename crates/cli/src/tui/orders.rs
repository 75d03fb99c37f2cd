//! Interprets text submitted in the chat: messages, decisions and slash commands become effects.

use cobox_langgraph::RunInput;

use super::{
    app::{Overlay, Room, State},
    layout::Pane,
    message::Effect,
};
use crate::chat::{
    Wish, choose,
    typed::{self, Slash},
};

/// Shown when the user sends a message without a deployment.
pub const NO_DEPLOYMENT: &str =
    "nobody to talk to: start with --deployment URL, or set COBOX_DEPLOYMENT_URL or `deployment` in chat.toml (docs/chat.md)";

impl State {
    pub(super) fn submit(&mut self) -> Vec<Effect> {
        if self.chat.editor.text().trim().is_empty() {
            self.chat.editor.set("");
            return Vec::new();
        }
        let text = self.chat.editor.text().to_owned();
        match Slash::read(&text) {
            Some(Ok(slash)) => {
                self.chat.editor.take();
                self.obey(slash)
            }
            Some(Err(why)) => {
                self.complain(why);
                Vec::new()
            }
            None if self.deployment.is_none() => {
                self.complain(NO_DEPLOYMENT);
                Vec::new()
            }
            // The typed text stays in the input line and can be sent later.
            None if self.chat.is_running() || self.waiting.is_some() => {
                self.complain("the agent is at work: wait, or end the run with Esc Esc");
                Vec::new()
            }
            None => {
                let had_review = self.chat.review.is_some();
                match self.chat.input(&text) {
                    Ok(input) => {
                        self.chat.editor.take();
                        let title = if had_review { None } else { self.chat.title(typed::message(&text)) };
                        let mut effects = self.begin_run(input);
                        if let (Some(title), Some(thread)) = (title, self.thread.clone()) {
                            effects.push(Effect::NameThread { thread, title });
                        }
                        effects
                    }
                    Err(why) => {
                        self.complain(why);
                        Vec::new()
                    }
                }
            }
        }
    }

    fn begin_run(&mut self, input: Option<RunInput>) -> Vec<Effect> {
        let Some(input) = input else { return Vec::new() };
        self.waiting = Some(input);
        self.chat.scroll = 0;
        let effect = self.send();
        if effect.is_none() {
            self.say(match (&self.thread, &self.assistant, &self.room) {
                (Some(_), Some(_), Room::Opening) => "sent as soon as the sandbox is ready",
                _ => "sent as soon as the deployment answers",
            });
        }
        effect.into_iter().collect()
    }

    fn obey(&mut self, slash: Slash) -> Vec<Effect> {
        let needs_deployment = matches!(slash, Slash::Threads(_) | Slash::New | Slash::Assistant(_));
        if needs_deployment && self.deployment.is_none() {
            self.complain(NO_DEPLOYMENT);
            return Vec::new();
        }
        match slash {
            Slash::Help => self.overlay = Some(Overlay::Help { scroll: 0 }),
            Slash::Threads(None) => return vec![Effect::ListThreads],
            Slash::Threads(Some(thread)) => return self.enter(Some(thread)),
            Slash::New => return self.enter(None),
            Slash::Assistant(None) => return vec![Effect::ListAssistants],
            Slash::Assistant(Some(name)) => match choose(&self.assistants, Some(&name)) {
                Ok(found) => self.assistant = Some(found.clone()),
                Err(failure) => self.complain(format!("{}; {}", failure.message, failure.advice.unwrap_or_default())),
            },
            Slash::SandboxList => return if self.has_a_broker() { vec![Effect::ListSandboxes] } else { Vec::new() },
            Slash::SandboxUse(name) => return self.use_sandbox(&name),
            Slash::SandboxNew(name) => return self.want_sandbox(name),
            Slash::Terminal(name) => return self.use_shell(name),
            Slash::Files => self.look_at(Pane::Files),
            Slash::Diff(path) => return self.show_diff(path),
            Slash::Events => self.look_at(Pane::Events),
            Slash::Sync => self.look_at(Pane::Sync),
            Slash::Cancel => match self.cancel() {
                Some(effect) => return vec![effect],
                None => self.say("no run is under way"),
            },
            Slash::Clear => self.chat.transcript = cobox_langgraph::Transcript::default(),
            Slash::Quit => return vec![Effect::Quit],
        }
        Vec::new()
    }

    fn has_a_broker(&mut self) -> bool {
        if !self.has_broker {
            self.complain("no broker is configured: run `cobox up`, or set COBOX_URL and COBOX_API_KEY");
        }
        self.has_broker
    }

    /// Binds the thread to an existing sandbox.
    pub(super) fn use_sandbox(&mut self, name: &str) -> Vec<Effect> {
        self.wish = Wish::Use { sandbox: name.to_owned() };
        self.open_wished()
    }

    fn want_sandbox(&mut self, name: Option<String>) -> Vec<Effect> {
        self.wish = Wish::Ready { name };
        self.open_wished()
    }

    fn open_wished(&mut self) -> Vec<Effect> {
        if !self.has_a_broker() {
            return Vec::new();
        }
        let Some(thread) = self.thread.clone() else {
            self.say("the sandbox is made with the thread");
            return Vec::new();
        };
        self.open_room(&thread).into_iter().collect()
    }

    fn use_shell(&mut self, name: Option<String>) -> Vec<Effect> {
        let Some(may_type) = self.room_info().map(|info| info.may_type) else {
            // Without a sandbox there is no shell to name, so the name is a sandbox's.
            if let Some(name) = name {
                self.look_at(Pane::Terminal);
                return self.use_sandbox(&name);
            }
            self.complain("this thread has no sandbox yet: /sandbox new makes one");
            return Vec::new();
        };
        self.look_at(Pane::Terminal);
        if self.shell.is_live() && self.shell.name == name {
            return Vec::new();
        }
        vec![self.shell.join(self.visit, name, may_type)]
    }

    /// Shows the difference of a file given by its path or the end of it; without one, of the first changed file in
    /// the list.
    fn show_diff(&mut self, path: Option<String>) -> Vec<Effect> {
        let found = match &path {
            Some(path) if path.starts_with('/') => Some(path.clone()),
            Some(path) => self.files.changed().map(|(known, ..)| known).find(|known| known.ends_with(path.as_str())).map(str::to_owned),
            None => self.files.changed().map(|(known, ..)| known.to_owned()).next(),
        };
        match found {
            Some(path) => {
                self.look_at(Pane::Files);
                vec![Effect::ReadFile { visit: self.visit, path }]
            }
            None => {
                self.say(if path.is_some() { "no file of that name changed" } else { "no file changed since you came" });
                Vec::new()
            }
        }
    }
}
