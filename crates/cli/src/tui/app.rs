//! The state of the whole screen and its transitions: `update` takes a message and returns the effects to run, without
//! side effects.

use cobox_langgraph::{Assistant, RunInput, ThreadState};

use super::{
    chat_pane::{ChatPane, Run},
    feed::Feed,
    files::Files,
    layout::{Pane, Places},
    message::{Effect, Message, News, RoomInfo, Told},
    picker::Picker,
    shell_pane::ShellPane,
    sync::SyncState,
};
use crate::chat::{Wish, choose};

/// The directory that human and agent share.
pub const WORKSPACE: &str = "/workspace";

/// Initial settings of a screen.
#[derive(Clone, Debug)]
pub struct Beginning {
    pub size: (u16, u16),
    /// Address of the deployment, for display.
    pub deployment: Option<String>,
    pub assistant: Option<String>,
    pub thread: Option<String>,
    pub has_broker: bool,
    pub wish: Wish,
}

pub struct State {
    pub size: (u16, u16),
    pub focus: Pane,
    /// The pane in the lower corner of a wide screen.
    pub side: Pane,
    pub overlay: Option<Overlay>,
    pub chat: ChatPane,
    pub shell: ShellPane,
    pub feed: Feed,
    pub files: Files,
    pub sync: SyncState,
    /// Scroll offset of the sync pane, in lines.
    pub sync_scroll: usize,
    pub deployment: Option<String>,
    pub assistants: Vec<Assistant>,
    pub assistant: Option<Assistant>,
    pub thread: Option<String>,
    pub room: Room,
    pub notice: Option<Notice>,
    pub has_broker: bool,
    /// The assistant requested at the start.
    pub(super) asked_assistant: Option<String>,
    pub(super) wish: Wish,
    pub(super) visit: u64,
    /// A message that waits for its thread or its sandbox.
    pub(super) waiting: Option<RunInput>,
    /// The key that must be pressed a second time to confirm.
    pub(super) armed: Option<Armed>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Room {
    None,
    Opening,
    Open(RoomInfo),
    Failed(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Armed {
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
    pub is_bad: bool,
}

impl State {
    pub fn begin(with: Beginning) -> (Self, Vec<Effect>) {
        let mut state = Self {
            size: with.size,
            focus: if with.deployment.is_some() { Pane::Chat } else { Pane::Terminal },
            side: Pane::Events,
            overlay: None,
            chat: ChatPane::default(),
            shell: ShellPane::new(),
            feed: Feed::default(),
            files: Files::new(WORKSPACE),
            sync: SyncState::None,
            sync_scroll: 0,
            deployment: with.deployment,
            assistants: Vec::new(),
            assistant: None,
            thread: None,
            room: Room::None,
            notice: None,
            has_broker: with.has_broker,
            asked_assistant: with.assistant,
            wish: with.wish,
            visit: 0,
            waiting: None,
            armed: None,
        };
        let mut effects = Vec::new();
        if state.deployment.is_some() {
            effects.push(Effect::ListAssistants);
            effects.extend(state.enter(with.thread));
        } else {
            let thread = with.thread.unwrap_or_else(|| "default".to_owned());
            state.visit = 1;
            effects.extend(state.open_room(&thread));
            state.thread = Some(thread);
        }
        effects.extend(state.fit());
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
            Message::Assistants(told) => self.assistants_told(told),
            Message::Threads(told) => self.picked_from(told.map(|threads| Picker::threads(&threads, self.thread.as_deref()))),
            Message::Sandboxes(told) => {
                self.picked_from(told.map(|boxes| Picker::sandboxes(&boxes, self.room_info().map(|r| r.sandbox.as_str()))))
            }
            Message::Failed(why) => {
                self.complain(why);
                Vec::new()
            }
            Message::Here { visit, news } if visit == self.visit => self.news(news),
            // Belongs to a thread that was left.
            Message::Here { .. } => Vec::new(),
        };
        effects.extend(self.fit());
        effects
    }

    pub fn places(&self) -> Option<Places> {
        Places::of(self.size, self.focus, self.side)
    }

    pub fn room_info(&self) -> Option<&RoomInfo> {
        if let Room::Open(info) = &self.room { Some(info) } else { None }
    }

    pub fn me(&self) -> Option<&str> {
        self.room_info().and_then(|info| info.me.as_deref())
    }

    pub fn say(&mut self, text: impl Into<String>) {
        self.notice = Some(Notice { text: text.into(), is_bad: false });
    }

    pub fn complain(&mut self, text: impl Into<String>) {
        self.notice = Some(Notice { text: text.into(), is_bad: true });
    }

    pub(super) fn look_at(&mut self, pane: Pane) {
        self.focus = pane;
        if matches!(pane, Pane::Events | Pane::Files | Pane::Sync) {
            self.side = pane;
        }
    }

    /// Enters a thread of the deployment or a new one. Only the text being typed is kept.
    pub(super) fn enter(&mut self, thread: Option<String>) -> Vec<Effect> {
        self.visit += 1;
        self.thread = None;
        self.waiting = None;
        self.room = Room::None;
        self.chat.enter(&ThreadState::default());
        self.shell = ShellPane::new();
        self.feed = Feed::default();
        self.files = Files::new(WORKSPACE);
        (self.sync, self.sync_scroll) = (SyncState::None, 0);
        vec![Effect::LeaveShell, Effect::Enter { visit: self.visit, thread }]
    }

    pub(super) fn open_room(&mut self, thread: &str) -> Option<Effect> {
        if !self.has_broker {
            return None;
        }
        // An open sandbox stays until it is replaced.
        if self.room_info().is_none() {
            self.room = Room::Opening;
        }
        Some(Effect::OpenRoom { visit: self.visit, thread: thread.to_owned(), wish: self.wish.clone() })
    }

    /// Sends the waiting message once the thread exists and its sandbox is open or has failed to open.
    pub(super) fn send(&mut self) -> Option<Effect> {
        let (Some(thread), Some(assistant)) = (&self.thread, &self.assistant) else { return None };
        if self.room == Room::Opening && self.wish != Wish::Existing {
            return None;
        }
        let input = self.waiting.take()?;
        self.chat.started();
        Some(Effect::Run { visit: self.visit, thread: thread.clone(), assistant: assistant.id.clone(), input })
    }

    fn assistants_told(&mut self, told: Told<Vec<Assistant>>) -> Vec<Effect> {
        match told {
            Ok(assistants) => {
                let was_listing = !self.assistants.is_empty();
                self.assistants = assistants;
                let current = self.assistant.as_ref().map(|a| a.id.clone());
                if was_listing {
                    self.overlay = Some(Overlay::Pick(Picker::assistants(&self.assistants, current.as_deref())));
                    return Vec::new();
                }
                match choose(&self.assistants, self.asked_assistant.as_deref()) {
                    Ok(found) => self.assistant = Some(found.clone()),
                    Err(failure) => self.complain(format!("{}; {}", failure.message, failure.advice.unwrap_or_default())),
                }
                self.send().into_iter().collect()
            }
            Err(why) => {
                self.complain(why);
                Vec::new()
            }
        }
    }

    fn picked_from(&mut self, told: Told<Picker>) -> Vec<Effect> {
        match told {
            Ok(picker) if picker.items.is_empty() => self.say("there are none"),
            Ok(picker) => self.overlay = Some(Overlay::Pick(picker)),
            Err(why) => self.complain(why),
        }
        Vec::new()
    }

    fn news(&mut self, news: News) -> Vec<Effect> {
        match news {
            News::Entered(Ok((thread, state))) => {
                self.chat.enter(&state);
                let mut effects: Vec<Effect> = self.open_room(&thread).into_iter().collect();
                self.thread = Some(thread);
                effects.extend(self.send());
                effects
            }
            News::Entered(Err(why)) => {
                self.complain(format!("no thread (/new begins one, /threads lists them): {why}"));
                Vec::new()
            }
            News::Run(event) => {
                let told = self.chat.told(event);
                let Some(sentence) = told else { return Vec::new() };
                if self.room_info().is_none() {
                    // Without a broker this is the only source of sandbox events; with one it shows that the thread
                    // now has a sandbox.
                    self.feed.note(sentence, false);
                    return self.look_for_room();
                }
                Vec::new()
            }
            News::RunOver(outcome) => {
                self.chat.ended(outcome);
                self.armed = None;
                self.look_for_room()
            }
            News::Room(told) => self.room_told(told),
            News::Shell(news) => {
                let me = self.me().map(str::to_owned);
                self.shell.news(news, me.as_deref()).into_iter().collect()
            }
            News::Happened(event) => {
                self.feed.take(&event);
                Vec::new()
            }
            News::Sync(sync) => {
                self.sync_scroll = self.sync_scroll.min(sync.details().len());
                self.sync = sync;
                Vec::new()
            }
            News::FeedOver(why) => {
                self.feed.note(why, true);
                Vec::new()
            }
            News::Listed(Ok(entries)) => {
                self.files.listed(&entries);
                Vec::new()
            }
            News::Listed(Err(why)) => {
                self.complain(format!("the files could not be listed: {why}"));
                Vec::new()
            }
            News::Seen { path, contents } => {
                self.files.seen(&path, contents);
                Vec::new()
            }
            News::File(news) => match self.files.news(&news) {
                true => vec![Effect::ListFiles { visit: self.visit }],
                false => Vec::new(),
            },
            News::Read { path, contents } => {
                self.files.compare(&path, &contents);
                Vec::new()
            }
        }
    }

    fn room_told(&mut self, told: Told<Option<RoomInfo>>) -> Vec<Effect> {
        let mut effects = Vec::new();
        match told {
            Ok(Some(info)) => {
                let may_type = info.may_type;
                self.room = Room::Open(info);
                effects.push(Effect::Follow { visit: self.visit });
                effects.push(self.shell.join(self.visit, None, may_type));
            }
            Ok(None) => {
                self.room = Room::None;
                if self.deployment.is_none() {
                    self.say("this thread has no sandbox: /sandbox new makes one");
                    self.focus = Pane::Chat;
                }
            }
            Err(why) => {
                self.complain(format!("no sandbox: {why}"));
                if self.room_info().is_none() {
                    self.room = Room::Failed(why);
                }
            }
        }
        effects.extend(self.send());
        effects
    }

    /// Looks for a sandbox that the agent may have created in the meantime.
    fn look_for_room(&mut self) -> Vec<Effect> {
        if self.room != Room::None {
            return Vec::new();
        }
        let Some(thread) = self.thread.clone() else { return Vec::new() };
        self.open_room(&thread).into_iter().collect()
    }

    /// Resizes the shell to its pane.
    fn fit(&mut self) -> Option<Effect> {
        let inner = self.places()?.pane(Pane::Terminal)?;
        let me = self.me().map(str::to_owned);
        self.shell.fit(inner.width.saturating_sub(2), inner.height.saturating_sub(2), me.as_deref())
    }

    pub(super) fn cancel(&mut self) -> Option<Effect> {
        let Run::Going { id, is_ending } = &mut self.chat.run else { return None };
        let (Some(run), Some(thread)) = (id.clone(), self.thread.clone()) else { return None };
        *is_ending = true;
        Some(Effect::Cancel { thread, run })
    }
}

#[cfg(test)]
#[path = "app_tests.rs"]
pub(super) mod tests;
