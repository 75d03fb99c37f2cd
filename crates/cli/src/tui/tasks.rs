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
    message::{Effect, Message, OpenSandbox, SandboxLine, ThreadUpdate, UserResult},
    sandbox_watch,
    shell_task::{DETACH_TIMEOUT, QUEUED_COMMANDS, ShellCommand, run_shell},
    sync_status,
};
use crate::chat::{ChatOptions, ChatSandbox, SandboxChoice};

/// Concurrent requests: only a key that is held down causes more.
const MAX_REQUESTS: usize = 32;
/// Maximum number of threads or sandboxes in a list.
const LIST_LIMIT: u32 = 50;

/// The sandbox of the current thread, for tasks that outlive a change of it.
type CurrentSandbox = watch::Sender<Option<Arc<ChatSandbox>>>;

pub struct Tasks {
    chat: ChatOptions,
    sender: mpsc::Sender<Message>,
    sandbox: Arc<CurrentSandbox>,
    requests: JoinSet<()>,
    run: Option<AbortOnDropHandle<()>>,
    watchers: Vec<AbortOnDropHandle<()>>,
    opening: Option<AbortOnDropHandle<()>>,
    shell: Option<(mpsc::Sender<ShellCommand>, tokio::task::JoinHandle<()>)>,
}

/// Sends a task's messages for one visit of a thread.
#[derive(Clone)]
pub struct UpdateSender {
    sender: mpsc::Sender<Message>,
    visit: u64,
}

impl UpdateSender {
    /// Returns whether the state still receives messages.
    pub async fn send(&self, update: ThreadUpdate) -> bool {
        self.sender.send(Message::Thread { visit: self.visit, update }).await.is_ok()
    }
}

impl Tasks {
    pub fn new(chat: ChatOptions, sender: mpsc::Sender<Message>) -> Self {
        let sandbox = Arc::new(watch::Sender::new(None));
        Self { chat, sender, sandbox, requests: JoinSet::new(), run: None, watchers: Vec::new(), opening: None, shell: None }
    }

    pub fn start(&mut self, effect: Effect) {
        match effect {
            Effect::ListAssistants => {
                self.spawn_request(|deployment| async move {
                    Message::Assistants(deployment.assistants().await.map_err(|e| langgraph_error_text(&e)))
                });
            }
            Effect::ListThreads => {
                self.spawn_request(|deployment| async move {
                    Message::Threads(deployment.threads(LIST_LIMIT).await.map_err(|e| langgraph_error_text(&e)))
                });
            }
            Effect::ListSandboxes => self.list_sandboxes(),
            Effect::Enter { visit, thread } => self.enter(visit, thread),
            Effect::OpenSandbox { visit, thread, sandbox_choice } => {
                let Some(client) = self.chat.broker.clone() else { return };
                let (updates, current) = (self.update_sender(visit), self.sandbox.clone());
                self.opening = Some(spawn(async move {
                    let result = ChatSandbox::open(client, &thread, &sandbox_choice)
                        .await
                        .map(|sandbox| set_current_sandbox(&current, sandbox, &sandbox_choice))
                        .map_err(|e| error_text(&e));
                    updates.send(ThreadUpdate::Sandbox(result)).await;
                }));
            }
            Effect::Follow { visit } => {
                let Some(sandbox) = self.sandbox.borrow().clone() else { return };
                let (updates, events) = (self.update_sender(visit), sandbox.events(EventsFrom::Start));
                let dataplane = sandbox.session().dataplane().clone();
                let info = sandbox.session().info();
                self.watchers = vec![
                    spawn(sandbox_watch::follow_events(events, updates.clone())),
                    spawn(sandbox_watch::follow_files(dataplane, updates.clone())),
                    spawn(sync_status::watch(info.thread_id.clone(), info.sandbox.id.to_string(), updates)),
                ];
            }
            Effect::JoinShell { visit, name, cols, rows, observe } => self.join_shell(visit, name, (cols, rows), observe),
            Effect::LeaveShell => self.send_shell_command(ShellCommand::Detach),
            Effect::Type(bytes) => self.send_shell_command(ShellCommand::Type(bytes)),
            Effect::ResizeShell(cols, rows) => self.send_shell_command(ShellCommand::Resize(cols, rows)),
            Effect::TakeControl => self.send_shell_command(ShellCommand::Control(ControlAction::Take)),
            Effect::ReleaseControl => self.send_shell_command(ShellCommand::Control(ControlAction::Release)),
            Effect::Run { visit, thread, assistant, input } => {
                let Some(deployment) = self.chat.deployment.clone() else { return };
                let (updates, sandbox) = (self.update_sender(visit), self.sandbox.borrow().clone());
                self.run = Some(spawn(async move {
                    let sandbox = match &sandbox {
                        Some(sandbox) => Some(sandbox.run_configuration().await),
                        None => None,
                    };
                    let outcome = follow_run(&deployment, &thread, &RunRequest { assistant, input, sandbox }, &updates).await;
                    updates.send(ThreadUpdate::RunEnded(outcome)).await;
                }));
            }
            Effect::Cancel { thread, run } => self.spawn_request_reporting_errors(move |deployment| async move {
                deployment.cancel(&thread, &run).await.map_err(|e| langgraph_error_text(&e)).err()
            }),
            // The title is optional, so a failure is ignored.
            Effect::NameThread { thread, title } => self.spawn_request_reporting_errors(move |deployment| async move {
                let _ = deployment.name_thread(&thread, &title).await;
                None
            }),
            Effect::ListFiles { visit } => self.spawn_dataplane_request(visit, |dataplane| async move {
                ThreadUpdate::FilesListed(sandbox_watch::list_files(&dataplane).await)
            }),
            Effect::ReadFile { visit, path } => self.spawn_dataplane_request(visit, |dataplane| async move {
                let contents = sandbox_watch::read_file(&dataplane, &path).await;
                ThreadUpdate::FileRead { path, contents }
            }),
            // Handled by the main loop.
            Effect::Quit => {}
        }
    }

    /// Detaches from the shell in an orderly way.
    pub async fn leave(mut self) {
        if let Some((commands, task)) = self.shell.take() {
            // A shell task that has ended needs no command.
            let _ = commands.try_send(ShellCommand::Detach);
            let _ = tokio::time::timeout(DETACH_TIMEOUT, task).await;
        }
    }

    fn enter(&mut self, visit: u64, thread: Option<String>) {
        // The run continues on the server; everything else belongs to the thread that is left.
        self.run = None;
        self.opening = None;
        self.watchers.clear();
        self.sandbox.send_replace(None);
        let Some(deployment) = self.chat.deployment.clone() else { return };
        let updates = self.update_sender(visit);
        self.opening = Some(spawn(async move {
            let entered = match thread {
                Some(thread) => deployment.state(&thread).await.map(|state| (thread, state)),
                None => deployment.create_thread().await.map(|thread| (thread.id, ThreadState::default())),
            };
            updates.send(ThreadUpdate::Entered(entered.map_err(|e| langgraph_error_text(&e)))).await;
        }));
    }

    fn join_shell(&mut self, visit: u64, name: Option<String>, (cols, rows): (u16, u16), observe: bool) {
        self.send_shell_command(ShellCommand::Detach);
        self.shell = None;
        let Some(sandbox) = self.sandbox.borrow().clone() else { return };
        let (commands, receiver) = mpsc::channel(QUEUED_COMMANDS);
        // The pane's own emulator, which is independent of the terminal it is drawn on.
        let env = BTreeMap::from([("TERM".to_owned(), "xterm-256color".to_owned())]);
        let start = ShellStart { shell: name, cols: Some(cols), rows: Some(rows), observe, env: Some(env), ..ShellStart::default() };
        let (dataplane, updates) = (sandbox.session().dataplane().clone(), self.update_sender(visit));
        let shell = run_shell(dataplane, start, receiver, move |update| {
            let updates = updates.clone();
            async move { updates.send(ThreadUpdate::Shell(update)).await }
        });
        self.shell = Some((commands, tokio::spawn(shell)));
    }

    fn send_shell_command(&mut self, command: ShellCommand) {
        // A shell that has ended reports that itself; for one that is stuck, keys are dropped.
        if let Some((commands, _)) = &self.shell {
            let _ = commands.try_send(command);
        }
    }

    fn list_sandboxes(&mut self) {
        let Some(client) = self.chat.broker.clone() else { return };
        let sender = self.sender.clone();
        self.spawn_bounded(async move {
            let line = |s: cobox_protocol::sandbox::SandboxInfo| SandboxLine {
                name: s.name.unwrap_or_default(),
                id: s.id.to_string(),
                state: s.state.as_str().to_owned(),
            };
            let result = client.list_sandboxes(Some(LIST_LIMIT), None).await.map(|page| page.items.into_iter().map(line).collect());
            let _ = sender.send(Message::Sandboxes(result.map_err(|e| error_text(&e)))).await;
        });
    }

    fn spawn_request<F: Future<Output = Message> + Send + 'static>(&mut self, request: impl FnOnce(Deployment) -> F) {
        let Some(deployment) = self.chat.deployment.clone() else { return };
        let (sender, response) = (self.sender.clone(), request(deployment));
        self.spawn_bounded(async move {
            // A send fails only when the TUI ends.
            let _ = sender.send(response.await).await;
        });
    }

    /// Reports only errors.
    fn spawn_request_reporting_errors<F: Future<Output = Option<String>> + Send + 'static>(
        &mut self,
        request: impl FnOnce(Deployment) -> F,
    ) {
        let Some(deployment) = self.chat.deployment.clone() else { return };
        let (sender, response) = (self.sender.clone(), request(deployment));
        self.spawn_bounded(async move {
            if let Some(error) = response.await {
                let _ = sender.send(Message::Failed(error)).await;
            }
        });
    }

    fn spawn_dataplane_request<F: Future<Output = ThreadUpdate> + Send + 'static>(
        &mut self,
        visit: u64,
        request: impl FnOnce(cobox_client::Dataplane) -> F,
    ) {
        let Some(sandbox) = self.sandbox.borrow().clone() else { return };
        let (updates, response) = (self.update_sender(visit), request(sandbox.session().dataplane().clone()));
        self.spawn_bounded(async move {
            updates.send(response.await).await;
        });
    }

    fn spawn_bounded(&mut self, task: impl Future<Output = ()> + Send + 'static) {
        while self.requests.try_join_next().is_some() {}
        if self.requests.len() < MAX_REQUESTS {
            self.requests.spawn(task);
        }
    }

    fn update_sender(&self, visit: u64) -> UpdateSender {
        UpdateSender { sender: self.sender.clone(), visit }
    }
}

fn spawn(task: impl Future<Output = ()> + Send + 'static) -> AbortOnDropHandle<()> {
    AbortOnDropHandle::new(tokio::spawn(task))
}

fn set_current_sandbox(current: &CurrentSandbox, sandbox: Option<ChatSandbox>, sandbox_choice: &SandboxChoice) -> Option<OpenSandbox> {
    let sandbox = sandbox?;
    let (info, granted) = (sandbox.session().info(), sandbox.session().info().credentials.granted_capabilities);
    let open_sandbox = OpenSandbox {
        sandbox: info.sandbox.id.to_string(),
        name: match sandbox_choice {
            SandboxChoice::Ensure { name } => name.clone(),
            SandboxChoice::Use { sandbox } => Some(sandbox.clone()).filter(|sandbox| *sandbox != info.sandbox.id.to_string()),
            SandboxChoice::Existing => None,
        },
        session: info.session_id.to_string(),
        principal: sandbox.session().principal(),
        may_type: granted.contains(Capability::Shell),
    };
    current.send_replace(Some(Arc::new(sandbox)));
    Some(open_sandbox)
}

async fn follow_run(deployment: &Deployment, thread: &str, request: &RunRequest, updates: &UpdateSender) -> UserResult<()> {
    let mut run = deployment.run(thread, request).await.map_err(|e| langgraph_error_text(&e))?;
    while let Some(event) = run.next().await.map_err(|e| langgraph_error_text(&e))? {
        if !updates.send(ThreadUpdate::Run(event)).await {
            break;
        }
    }
    Ok(())
}

fn langgraph_error_text(error: &cobox_langgraph::LangGraphError) -> String {
    match error.advice() {
        Some(advice) => format!("{error}; {advice}"),
        None => error.to_string(),
    }
}

pub fn error_text(error: &ClientError) -> String {
    match error.advice() {
        Some(advice) => format!("{error}; {advice}"),
        None => error.to_string(),
    }
}
