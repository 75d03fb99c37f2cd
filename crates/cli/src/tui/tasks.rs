//! Executes the state's effects in tasks that answer with messages, and owns the open connections.

use std::{collections::BTreeMap, sync::Arc};

use cobox_client::{ClientError, EventsFrom};
use cobox_langgraph::{Deployment, RunRequest, ThreadState};
use cobox_protocol::{
    Capability,
    frame::{ControlAction, ShellStart},
};
use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
};
use tokio_util::task::AbortOnDropHandle;

use super::{
    message::{Effect, Message, News, RoomInfo, SandboxLine, Told},
    shell_task::{FAREWELL, ORDERS, ShellOrder, sit},
    sync, watching,
};
use crate::chat::{Chat, Room, Wish};

/// Concurrent requests: only a key that is held down causes more.
const MAX_ASKED: usize = 32;
/// Maximum number of threads or sandboxes in a list.
const LISTED: u32 = 50;

/// The sandbox of the current thread, for tasks that outlive a change of it.
type HeldRoom = watch::Sender<Option<Arc<Room>>>;

pub struct Tasks {
    chat: Chat,
    send: mpsc::Sender<Message>,
    room: Arc<HeldRoom>,
    asked: JoinSet<()>,
    run: Option<AbortOnDropHandle<()>>,
    following: Vec<AbortOnDropHandle<()>>,
    opening: Option<AbortOnDropHandle<()>>,
    shell: Option<(mpsc::Sender<ShellOrder>, tokio::task::JoinHandle<()>)>,
}

/// Sends a task's messages for one visit of a thread.
#[derive(Clone)]
pub struct Teller {
    send: mpsc::Sender<Message>,
    visit: u64,
}

impl Teller {
    /// Returns whether the state still receives messages.
    pub async fn tell(&self, news: News) -> bool {
        self.send.send(Message::Here { visit: self.visit, news }).await.is_ok()
    }
}

impl Tasks {
    pub fn new(chat: Chat, send: mpsc::Sender<Message>) -> Self {
        let room = Arc::new(watch::Sender::new(None));
        Self { chat, send, room, asked: JoinSet::new(), run: None, following: Vec::new(), opening: None, shell: None }
    }

    pub fn start(&mut self, effect: Effect) {
        match effect {
            Effect::ListAssistants => {
                self.ask(|deployment| async move { Message::Assistants(deployment.assistants().await.map_err(|e| in_words(&e))) });
            }
            Effect::ListThreads => {
                self.ask(|deployment| async move { Message::Threads(deployment.threads(LISTED).await.map_err(|e| in_words(&e))) });
            }
            Effect::ListSandboxes => self.list_sandboxes(),
            Effect::Enter { visit, thread } => self.enter(visit, thread),
            Effect::OpenRoom { visit, thread, wish } => {
                let Some(client) = self.chat.broker.clone() else { return };
                let (teller, held) = (self.teller(visit), self.room.clone());
                self.opening = Some(spawn(async move {
                    let told = Room::open(client, &thread, &wish).await.map(|room| hold(&held, room, &wish)).map_err(|e| explained(&e));
                    teller.tell(News::Room(told)).await;
                }));
            }
            Effect::Follow { visit } => {
                let Some(room) = self.room.borrow().clone() else { return };
                let (teller, events) = (self.teller(visit), room.events(EventsFrom::Start));
                let dataplane = room.session().dataplane().clone();
                let info = room.session().info();
                self.following = vec![
                    spawn(watching::feed(events, teller.clone())),
                    spawn(watching::files(dataplane, teller.clone())),
                    spawn(sync::watch(info.thread_id.clone(), info.sandbox.id.to_string(), teller)),
                ];
            }
            Effect::JoinShell { visit, name, cols, rows, observe } => self.join_shell(visit, name, (cols, rows), observe),
            Effect::LeaveShell => self.order(ShellOrder::Leave),
            Effect::Type(bytes) => self.order(ShellOrder::Type(bytes)),
            Effect::ResizeShell(cols, rows) => self.order(ShellOrder::Resize(cols, rows)),
            Effect::TakeControl => self.order(ShellOrder::Control(ControlAction::Take)),
            Effect::ReleaseControl => self.order(ShellOrder::Control(ControlAction::Release)),
            Effect::Run { visit, thread, assistant, input } => {
                let Some(deployment) = self.chat.deployment.clone() else { return };
                let (teller, room) = (self.teller(visit), self.room.borrow().clone());
                self.run = Some(spawn(async move {
                    let sandbox = match &room {
                        Some(room) => Some(room.for_run().await),
                        None => None,
                    };
                    let over = follow_run(&deployment, &thread, &RunRequest { assistant, input, sandbox }, &teller).await;
                    teller.tell(News::RunOver(over)).await;
                }));
            }
            Effect::Cancel { thread, run } => {
                self.ask_quietly(move |deployment| async move { deployment.cancel(&thread, &run).await.map_err(|e| in_words(&e)).err() })
            }
            // The title is optional, so a failure is ignored.
            Effect::NameThread { thread, title } => self.ask_quietly(move |deployment| async move {
                let _ = deployment.name_thread(&thread, &title).await;
                None
            }),
            Effect::ListFiles { visit } => self.look(visit, |dataplane| async move { News::Listed(watching::list(&dataplane).await) }),
            Effect::ReadFile { visit, path } => self.look(visit, |dataplane| async move {
                let contents = watching::read(&dataplane, &path).await;
                News::Read { path, contents }
            }),
            // Handled by the main loop.
            Effect::Quit => {}
        }
    }

    /// Detaches from the shell in an orderly way.
    pub async fn leave(mut self) {
        if let Some((orders, task)) = self.shell.take() {
            // A shell task that has ended needs no order.
            let _ = orders.try_send(ShellOrder::Leave);
            let _ = tokio::time::timeout(FAREWELL, task).await;
        }
    }

    fn enter(&mut self, visit: u64, thread: Option<String>) {
        // The run continues on the server; everything else belongs to the thread that is left.
        self.run = None;
        self.opening = None;
        self.following.clear();
        self.room.send_replace(None);
        let Some(deployment) = self.chat.deployment.clone() else { return };
        let teller = self.teller(visit);
        self.opening = Some(spawn(async move {
            let entered = match thread {
                Some(thread) => deployment.state(&thread).await.map(|state| (thread, state)),
                None => deployment.create_thread().await.map(|thread| (thread.id, ThreadState::default())),
            };
            teller.tell(News::Entered(entered.map_err(|e| in_words(&e)))).await;
        }));
    }

    fn join_shell(&mut self, visit: u64, name: Option<String>, (cols, rows): (u16, u16), observe: bool) {
        self.order(ShellOrder::Leave);
        self.shell = None;
        let Some(room) = self.room.borrow().clone() else { return };
        let (orders, ordered) = mpsc::channel(ORDERS);
        // The pane's own emulator, which is independent of the terminal it is drawn on.
        let env = BTreeMap::from([("TERM".to_owned(), "xterm-256color".to_owned())]);
        let start = ShellStart { shell: name, cols: Some(cols), rows: Some(rows), observe, env: Some(env), ..ShellStart::default() };
        let (dataplane, teller) = (room.session().dataplane().clone(), self.teller(visit));
        let sitting = sit(dataplane, start, ordered, move |news| {
            let teller = teller.clone();
            async move { teller.tell(News::Shell(news)).await }
        });
        self.shell = Some((orders, tokio::spawn(sitting)));
    }

    fn order(&mut self, order: ShellOrder) {
        // A shell that has ended reports that itself; for one that is stuck, keys are dropped.
        if let Some((orders, _)) = &self.shell {
            let _ = orders.try_send(order);
        }
    }

    fn list_sandboxes(&mut self) {
        let Some(client) = self.chat.broker.clone() else { return };
        let send = self.send.clone();
        self.one_more(async move {
            let line = |s: cobox_protocol::sandbox::SandboxInfo| SandboxLine {
                name: s.name.unwrap_or_default(),
                id: s.id.to_string(),
                state: s.state.as_str().to_owned(),
            };
            let told = client.list_sandboxes(Some(LISTED), None).await.map(|page| page.items.into_iter().map(line).collect());
            let _ = send.send(Message::Sandboxes(told.map_err(|e| explained(&e)))).await;
        });
    }

    fn ask<F: Future<Output = Message> + Send + 'static>(&mut self, ask: impl FnOnce(Deployment) -> F) {
        let Some(deployment) = self.chat.deployment.clone() else { return };
        let (send, asking) = (self.send.clone(), ask(deployment));
        self.one_more(async move {
            // A send fails only when the TUI ends.
            let _ = send.send(asking.await).await;
        });
    }

    /// Reports only errors.
    fn ask_quietly<F: Future<Output = Option<String>> + Send + 'static>(&mut self, ask: impl FnOnce(Deployment) -> F) {
        let Some(deployment) = self.chat.deployment.clone() else { return };
        let (send, asking) = (self.send.clone(), ask(deployment));
        self.one_more(async move {
            if let Some(why) = asking.await {
                let _ = send.send(Message::Failed(why)).await;
            }
        });
    }

    fn look<F: Future<Output = News> + Send + 'static>(&mut self, visit: u64, look: impl FnOnce(cobox_client::Dataplane) -> F) {
        let Some(room) = self.room.borrow().clone() else { return };
        let (teller, looking) = (self.teller(visit), look(room.session().dataplane().clone()));
        self.one_more(async move {
            teller.tell(looking.await).await;
        });
    }

    fn one_more(&mut self, task: impl Future<Output = ()> + Send + 'static) {
        while self.asked.try_join_next().is_some() {}
        if self.asked.len() < MAX_ASKED {
            self.asked.spawn(task);
        }
    }

    fn teller(&self, visit: u64) -> Teller {
        Teller { send: self.send.clone(), visit }
    }
}

fn spawn(task: impl Future<Output = ()> + Send + 'static) -> AbortOnDropHandle<()> {
    AbortOnDropHandle::new(tokio::spawn(task))
}

fn hold(held: &HeldRoom, room: Option<Room>, wish: &Wish) -> Option<RoomInfo> {
    let room = room?;
    let (info, granted) = (room.session().info(), room.session().info().credentials.granted_capabilities);
    let told = RoomInfo {
        sandbox: info.sandbox.id.to_string(),
        name: match wish {
            Wish::Ready { name } => name.clone(),
            Wish::Use { sandbox } => Some(sandbox.clone()).filter(|sandbox| *sandbox != info.sandbox.id.to_string()),
            Wish::Existing => None,
        },
        session: info.session_id.to_string(),
        me: room.session().principal(),
        may_type: granted.contains(Capability::Shell),
    };
    held.send_replace(Some(Arc::new(room)));
    Some(told)
}

async fn follow_run(deployment: &Deployment, thread: &str, request: &RunRequest, teller: &Teller) -> Told<()> {
    let mut run = deployment.run(thread, request).await.map_err(|e| in_words(&e))?;
    while let Some(event) = run.next().await.map_err(|e| in_words(&e))? {
        if !teller.tell(News::Run(event)).await {
            break;
        }
    }
    Ok(())
}

fn in_words(error: &cobox_langgraph::LangGraphError) -> String {
    match error.advice() {
        Some(advice) => format!("{error}; {advice}"),
        None => error.to_string(),
    }
}

pub fn explained(error: &ClientError) -> String {
    match error.advice() {
        Some(advice) => format!("{error}; {advice}"),
        None => error.to_string(),
    }
}
