//! `cobox chat --no-tui`: a conversation in plain lines, for pipes, scripts and screen readers.

use std::{io::IsTerminal, time::Duration};

use cobox_client::{ClientError, EventsFrom};
use cobox_langgraph::{Decision, Deployment, Question, Review, RunEvent, RunInput, RunRequest, RunStream, Transcript};
use cobox_protocol::{ShellId, event::SandboxEvent};
use serde_json::json;
use tokio::sync::mpsc;
use tokio_util::task::AbortOnDropHandle;

use super::{
    Chat, Room, choose,
    lines::Lines,
    reading::{Line, read_lines},
    typed::{self, Slash},
    words::one_line,
};
use crate::{
    failure::{Failure, GENERAL_ERROR, INTERRUPTED},
    printer::Printer,
};

/// Events buffered between the event stream and the output.
const EVENTS: usize = 64;
/// The sandbox must be idle for this long before the chat ends, so that the last run's events are still printed.
const HEAR_OUT: Duration = Duration::from_millis(500);
/// Maximum number of threads or sandboxes in a list.
const THREADS: u32 = 20;
const HELP: &str = "a line is a message; one that ends with \\ goes on in the next.\n\
    /new a new thread, /threads [id] list them or go on with one, /assistant [name], /sandbox list, /quit; Ctrl-C ends the run under way";

pub async fn run(chat: Chat, printer: Printer) -> Result<u8, Failure> {
    let mut lines = Lines::new(printer);
    let outcome = async {
        let mut conversation = Conversation::begin(chat, &mut lines).await?;
        conversation.go_on(&mut lines).await
    }
    .await;
    // A closed stdout is not a failure.
    if lines.is_unread { Ok(0) } else { outcome }
}

struct Conversation {
    deployment: Deployment,
    assistant: String,
    thread: String,
    review: Option<Review>,
    transcript: Transcript,
    room: Rooming,
    events: (mpsc::Sender<SandboxEvent>, mpsc::Receiver<SandboxEvent>),
    /// Needed to open the sandbox of each later thread.
    broker: Option<(cobox_client::Client, super::Wish)>,
    last_failed: bool,
}

/// State of the sandbox, which is opened in the background while the user already types.
enum Rooming {
    Without,
    Opening(AbortOnDropHandle<Result<Option<Room>, ClientError>>),
    Open { room: Box<Room>, _following: AbortOnDropHandle<()> },
}

/// Outcome of a wait for the next input line.
enum Typed {
    Line(Line),
    End,
    Interrupt,
}

impl Conversation {
    async fn begin(chat: Chat, lines: &mut Lines) -> Result<Self, Failure> {
        let deployment = chat.deployment.ok_or_else(no_deployment)?;
        let assistants = deployment.assistants().await?;
        let assistant = choose(&assistants, chat.assistant.as_deref())?;
        let mut conversation = Self {
            assistant: assistant.id.clone(),
            thread: String::new(),
            review: None,
            transcript: Transcript::default(),
            room: Rooming::Without,
            events: mpsc::channel(EVENTS),
            broker: chat.broker.map(|client| (client, chat.wish)),
            last_failed: false,
            deployment,
        };
        lines.aside(
            &format!("{} at {}", assistant.name, conversation.deployment.url()),
            json!({"type": "assistant", "assistant_id": assistant.id, "name": assistant.name}),
        )?;
        conversation.enter(chat.thread, lines).await?;
        Ok(conversation)
    }

    /// Enters an existing or a new thread and starts to open its sandbox.
    async fn enter(&mut self, thread: Option<String>, lines: &mut Lines) -> Result<(), Failure> {
        let (thread, state) = match thread {
            Some(thread) => {
                let state = self.deployment.state(&thread).await?;
                (thread, state)
            }
            None => (self.deployment.create_thread().await?.id, cobox_langgraph::ThreadState::default()),
        };
        self.transcript = Transcript::default();
        for message in &state.messages {
            self.transcript.apply(message, false);
        }
        let before = match state.messages.len() {
            0 => String::new(),
            n => format!(", {n} messages so far"),
        };
        lines
            .aside(&format!("thread {thread}{before}"), json!({"type": "thread", "thread_id": thread, "messages": state.messages.len()}))?;
        self.review = Review::of(state.interrupts);
        self.room = match &self.broker {
            Some((client, wish)) => {
                let (client, wish, thread) = (client.clone(), wish.clone(), thread.clone());
                Rooming::Opening(AbortOnDropHandle::new(tokio::spawn(async move { Room::open(client, &thread, &wish).await })))
            }
            None => Rooming::Without,
        };
        self.thread = thread;
        Ok(())
    }

    async fn go_on(&mut self, lines: &mut Lines) -> Result<u8, Failure> {
        let is_terminal = std::io::stdin().is_terminal();
        let (mut typed, _reading) = read_lines(tokio::io::stdin());
        loop {
            match self.review.as_ref().and_then(|review| Some((review.next()?, review.progress()))) {
                Some((Question::Action(action), place)) => lines.asks(action, place)?,
                Some((Question::Text(question), _)) => lines.asks_words(question)?,
                None => {}
            }
            lines.prompt(is_terminal)?;
            let text = match self.typed(&mut typed, lines).await? {
                Typed::Line(Line::Text(text)) => text,
                Typed::Line(Line::TooLong) => {
                    lines.failed(
                        &Failure::new("this line is too long for a message").with_advice("put it into a file in the sandbox: `cobox cp`"),
                    )?;
                    continue;
                }
                Typed::Interrupt => return Ok(INTERRUPTED),
                Typed::End if self.review.is_some() => {
                    return Err(Failure::new("the agent waits for an answer, and there is no more input")
                        .with_advice(format!("go on with it: cobox chat --thread {}", self.thread)));
                }
                Typed::End => {
                    self.hear_out(lines).await?;
                    return Ok(if self.last_failed { GENERAL_ERROR } else { 0 });
                }
            };
            if text.trim().is_empty() {
                continue;
            }
            let input = match Slash::read(&text) {
                Some(Ok(Slash::Quit)) => return Ok(0),
                Some(Ok(slash)) => {
                    if let Err(failure) = self.obey(slash, lines).await {
                        lines.failed(&failure)?;
                    }
                    continue;
                }
                Some(Err(why)) => {
                    lines.failed(&Failure::new(why))?;
                    continue;
                }
                None => match self.input(&text) {
                    Ok(Some(input)) => input,
                    Ok(None) => continue,
                    Err(why) => {
                        lines.failed(&Failure::new(why))?;
                        continue;
                    }
                },
            };
            self.last_failed = false;
            if let Err(failure) = self.run(input, lines).await {
                if lines.is_unread {
                    return Err(failure);
                }
                self.last_failed = true;
                lines.failed(&failure)?;
            }
        }
    }

    /// Returns the next input line. Sandbox events that arrive during the wait are printed.
    async fn typed(&mut self, typed: &mut mpsc::Receiver<Line>, lines: &mut Lines) -> Result<Typed, Failure> {
        loop {
            tokio::select! {
                line = typed.recv() => return Ok(line.map_or(Typed::End, Typed::Line)),
                Some(event) = self.events.1.recv() => lines.event(&event)?,
                opened = opening(&mut self.room) => self.opened(opened, lines)?,
                _ = tokio::signal::ctrl_c() => return Ok(Typed::Interrupt),
            }
        }
    }

    /// Prints the remaining events: they have their own stream and arrive slightly later than the run's own events.
    async fn hear_out(&mut self, lines: &mut Lines) -> Result<(), Failure> {
        if let Rooming::Open { .. } = self.room {
            while let Ok(Some(event)) = tokio::time::timeout(HEAR_OUT, self.events.1.recv()).await {
                lines.event(&event)?;
            }
        }
        Ok(())
    }

    /// Interprets a line as input for the run: a message or, once every action is decided, the answer to an interrupt.
    /// `None` while decisions are still missing.
    fn input(&mut self, text: &str) -> Result<Option<RunInput>, String> {
        let Some(review) = &mut self.review else {
            let (id, text) = (format!("cobox-{}", ShellId::new()), typed::message(text));
            self.transcript.add_user_message(&id, text);
            return Ok(Some(RunInput::Message { id, text: text.to_owned() }));
        };
        let decision = match review.next() {
            Some(Question::Text(_)) => Decision::Respond(text.trim().to_owned()),
            _ => typed::decision(text).unwrap_or_else(|| Err("the answer is one of the words above".to_owned()))?,
        };
        review.decide(decision)?;
        let answer = review.answer();
        if answer.is_some() {
            self.review = None;
        }
        Ok(answer.map(RunInput::Resume))
    }

    async fn run(&mut self, input: RunInput, lines: &mut Lines) -> Result<(), Failure> {
        if let Rooming::Opening(_) = self.room {
            let opened = opening(&mut self.room).await;
            self.opened(opened, lines)?;
        }
        let sandbox = match &self.room {
            Rooming::Open { room, .. } => Some(room.for_run().await),
            _ => None,
        };
        let request = RunRequest { assistant: self.assistant.clone(), input, sandbox };
        let mut run = tokio::select! {
            run = self.deployment.run(&self.thread, &request) => run?,
            _ = tokio::signal::ctrl_c() => return Err(Failure::new("interrupted before the run began")),
        };
        let (mut failed, mut is_cancelled) = (None, false);
        loop {
            tokio::select! {
                told = run.next() => match told? {
                    Some(RunEvent::Failed { message }) => failed = Some(message),
                    Some(told) => self.told(told, lines)?,
                    None => break,
                },
                Some(event) = self.events.1.recv() => lines.event(&event)?,
                _ = tokio::signal::ctrl_c() => {
                    self.cancel(&run, lines).await?;
                    is_cancelled = true;
                }
            }
        }
        lines.end_line()?;
        if let Some(message) = failed.filter(|_| !is_cancelled) {
            return Err(Failure::new(format!("the run failed: {message}")));
        }
        lines.aside_json(json!({"type": "end", "thread_id": self.thread, "waits": self.review.is_some()}))?;
        Ok(())
    }

    fn told(&mut self, told: RunEvent, lines: &mut Lines) -> Result<(), Failure> {
        match told {
            RunEvent::Message { message, is_nested } => {
                for change in self.transcript.apply(&message, is_nested) {
                    lines.changed(&self.transcript, &change)?;
                }
            }
            RunEvent::Interrupted(asked) => self.review = Review::of(asked),
            // The broker's event stream reports the same events, and also those of other users.
            RunEvent::Custom(_) if matches!(self.room, Rooming::Open { .. }) => {}
            RunEvent::Custom(told) => lines.custom(&told)?,
            RunEvent::Reconnected => lines.aside("(connected again)", json!({"type": "reconnected"}))?,
            RunEvent::Started { run_id } => lines.aside_json(json!({"type": "run", "run_id": run_id}))?,
            RunEvent::Failed { .. } => {}
        }
        Ok(())
    }

    async fn cancel(&self, run: &RunStream, lines: &mut Lines) -> Result<(), Failure> {
        let Some(id) = run.run_id() else { return Ok(()) };
        self.deployment.cancel(&self.thread, id).await?;
        Ok(lines.aside("(the run is told to end)", json!({"type": "cancelled", "run_id": id}))?)
    }

    fn opened(&mut self, opened: Result<Option<Room>, ClientError>, lines: &mut Lines) -> Result<(), Failure> {
        self.room = Rooming::Without;
        match opened {
            Ok(None) => {}
            Ok(Some(room)) => {
                let info = room.session().info();
                lines.aside(
                    &format!("sandbox {} is ready", info.sandbox.id),
                    json!({"type": "sandbox", "sandbox_id": info.sandbox.id, "session_id": info.session_id}),
                )?;
                let (mut events, send) = (room.events(EventsFrom::Now), self.events.0.clone());
                let following = tokio::spawn(async move {
                    // The next operation reports a stream that can't be resumed.
                    while let Ok(Some(event)) = events.next().await {
                        if send.send(event).await.is_err() {
                            break;
                        }
                    }
                });
                self.room = Rooming::Open { room: Box::new(room), _following: AbortOnDropHandle::new(following) };
            }
            Err(e) => lines.failed(&Failure { message: format!("no sandbox: {e}"), ..e.into() })?,
        }
        Ok(())
    }

    async fn list_sandboxes(&self, lines: &mut Lines) -> Result<(), Failure> {
        let Some((client, _)) = &self.broker else { return Err(Failure::new("no broker is configured, so there are no sandboxes")) };
        let here = match &self.room {
            Rooming::Open { room, .. } => Some(room.session().info().sandbox.id.to_string()),
            _ => None,
        };
        for sandbox in client.list_sandboxes(Some(THREADS), None).await?.items {
            let (id, name) = (sandbox.id.to_string(), sandbox.name.as_deref().unwrap_or("-"));
            let mark = if here.as_deref() == Some(id.as_str()) { "*" } else { " " };
            lines.aside(
                &one_line(&format!("{mark} {name}  {}  {id}", sandbox.state.as_str())),
                json!({"type": "sandbox_listed", "sandbox_id": id, "name": sandbox.name, "state": sandbox.state.as_str()}),
            )?;
        }
        Ok(())
    }

    async fn obey(&mut self, slash: Slash, lines: &mut Lines) -> Result<(), Failure> {
        match slash {
            Slash::New => self.enter(None, lines).await,
            Slash::Threads(Some(thread)) => self.enter(Some(thread), lines).await,
            Slash::Threads(None) => {
                for thread in self.deployment.threads(THREADS).await? {
                    let title = thread.title.as_deref().unwrap_or("-");
                    lines.aside(
                        &format!("{}  {}  {}  {title}", thread.id, thread.status, thread.updated_at),
                        json!({"type": "thread_listed", "thread_id": thread.id, "status": thread.status, "title": thread.title}),
                    )?;
                }
                Ok(())
            }
            Slash::Assistant(named) => {
                let assistants = self.deployment.assistants().await?;
                if let Some(name) = named {
                    self.assistant.clone_from(&choose(&assistants, Some(&name))?.id);
                }
                for assistant in &assistants {
                    let mark = if assistant.id == self.assistant { "*" } else { " " };
                    lines.aside(
                        &format!("{mark} {}  {}", assistant.name, assistant.id),
                        json!({"type": "assistant", "assistant_id": assistant.id, "name": assistant.name}),
                    )?;
                }
                Ok(())
            }
            Slash::SandboxList => self.list_sandboxes(lines).await,
            Slash::Help => Ok(lines.aside(HELP, json!({"type": "help", "text": HELP}))?),
            _ => Err(Failure::new("this is for the TUI")
                .with_advice("without it: cobox shell, cobox session events, cobox sandbox list, cobox cp")),
        }
    }
}

/// Waits for the sandbox; never resolves if none is being opened.
async fn opening(room: &mut Rooming) -> Result<Option<Room>, ClientError> {
    match room {
        Rooming::Opening(task) => task.await.unwrap_or(Ok(None)),
        _ => std::future::pending().await,
    }
}

pub fn no_deployment() -> Failure {
    Failure::new("no LangGraph deployment is configured, so there is nobody to chat with").with_advice(
        "name one with --deployment URL or COBOX_DEPLOYMENT_URL (its key: COBOX_DEPLOYMENT_KEY); examples/langgraph is one that runs offline",
    )
}
