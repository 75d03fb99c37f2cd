//! `cobox chat --no-tui`: a conversation in plain lines, for pipes, scripts and screen readers.

use std::{io::IsTerminal, time::Duration};

use cobox_client::{ClientError, EventsFrom};
use cobox_langgraph::{Decision, Deployment, Question, Review, RunEvent, RunInput, RunRequest, RunStream, Transcript};
use cobox_protocol::{ShellId, event::SandboxEvent};
use serde_json::json;
use tokio::sync::mpsc;
use tokio_util::task::AbortOnDropHandle;

use super::{
    ChatOptions, ChatSandbox, choose_assistant,
    formatting::one_line,
    input_parser::{self, SlashCommand},
    line_output::LineOutput,
    line_reader::{InputLine, read_lines},
};
use crate::{
    failure::{Failure, GENERAL_ERROR, INTERRUPTED},
    printer::Printer,
};

/// Events buffered between the event stream and the output.
const QUEUED_EVENTS: usize = 64;
/// The sandbox must be idle for this long before the chat ends, so that the last run's events are still printed.
const DRAIN_IDLE: Duration = Duration::from_millis(500);
/// Maximum number of threads or sandboxes in a list.
const LIST_LIMIT: u32 = 20;
const HELP: &str = "Each line is a message; a line that ends with \\ continues on the next line.\n\
    /new: new thread; /threads [id]: list or resume threads; /assistant [name]; /sandbox list; /quit; Ctrl-C cancels the current run";

pub async fn run(chat: ChatOptions, printer: Printer) -> Result<u8, Failure> {
    let mut output = LineOutput::new(printer);
    let outcome = async {
        let mut conversation = Conversation::start(chat, &mut output).await?;
        conversation.run_loop(&mut output).await
    }
    .await;
    // A closed stdout is not a failure.
    if output.is_output_closed { Ok(0) } else { outcome }
}

struct Conversation {
    deployment: Deployment,
    assistant: String,
    thread: String,
    review: Option<Review>,
    transcript: Transcript,
    sandbox: ChatSandboxState,
    events: (mpsc::Sender<SandboxEvent>, mpsc::Receiver<SandboxEvent>),
    /// Needed to open the sandbox of each later thread.
    broker: Option<(cobox_client::Client, super::SandboxChoice)>,
    last_failed: bool,
}

/// State of the sandbox, which is opened in the background while the user already types.
enum ChatSandboxState {
    None,
    Opening(AbortOnDropHandle<Result<Option<ChatSandbox>, ClientError>>),
    Open { sandbox: Box<ChatSandbox>, _event_task: AbortOnDropHandle<()> },
}

/// Outcome of a wait for the next input line.
enum NextInput {
    Line(InputLine),
    End,
    Interrupt,
}

impl Conversation {
    async fn start(chat: ChatOptions, output: &mut LineOutput) -> Result<Self, Failure> {
        let deployment = chat.deployment.ok_or_else(no_deployment)?;
        let assistants = deployment.assistants().await?;
        let assistant = choose_assistant(&assistants, chat.assistant.as_deref())?;
        let mut conversation = Self {
            assistant: assistant.id.clone(),
            thread: String::new(),
            review: None,
            transcript: Transcript::default(),
            sandbox: ChatSandboxState::None,
            events: mpsc::channel(QUEUED_EVENTS),
            broker: chat.broker.map(|client| (client, chat.sandbox_choice)),
            last_failed: false,
            deployment,
        };
        output.notice(
            &format!("{} at {}", assistant.name, conversation.deployment.url()),
            json!({"type": "assistant", "assistant_id": assistant.id, "name": assistant.name}),
        )?;
        conversation.enter_thread(chat.thread, output).await?;
        Ok(conversation)
    }

    /// Enters an existing or a new thread and starts to open its sandbox.
    async fn enter_thread(&mut self, thread: Option<String>, output: &mut LineOutput) -> Result<(), Failure> {
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
        let history = match state.messages.len() {
            0 => String::new(),
            n => format!(", {n} messages so far"),
        };
        output.notice(
            &format!("thread {thread}{history}"),
            json!({"type": "thread", "thread_id": thread, "messages": state.messages.len()}),
        )?;
        self.review = Review::of(state.interrupts);
        self.sandbox = match &self.broker {
            Some((client, sandbox_choice)) => {
                let (client, sandbox_choice, thread) = (client.clone(), sandbox_choice.clone(), thread.clone());
                ChatSandboxState::Opening(AbortOnDropHandle::new(tokio::spawn(async move {
                    ChatSandbox::open(client, &thread, &sandbox_choice).await
                })))
            }
            None => ChatSandboxState::None,
        };
        self.thread = thread;
        Ok(())
    }

    async fn run_loop(&mut self, output: &mut LineOutput) -> Result<u8, Failure> {
        let is_terminal = std::io::stdin().is_terminal();
        let (mut input_lines, _reading) = read_lines(tokio::io::stdin());
        loop {
            match self.review.as_ref().and_then(|review| Some((review.next()?, review.progress()))) {
                Some((Question::Action(action), position)) => output.ask_action(action, position)?,
                Some((Question::Text(question), _)) => output.ask_text(question)?,
                None => {}
            }
            output.prompt(is_terminal)?;
            let text = match self.next_input(&mut input_lines, output).await? {
                NextInput::Line(InputLine::Text(text)) => text,
                NextInput::Line(InputLine::TooLong) => {
                    output.print_failure(
                        &Failure::new("the line exceeds the maximum message size")
                            .with_advice("copy it to the sandbox as a file with `cobox cp`"),
                    )?;
                    continue;
                }
                NextInput::Interrupt => return Ok(INTERRUPTED),
                NextInput::End if self.review.is_some() => {
                    return Err(Failure::new("the agent waits for an answer, but the input has ended")
                        .with_advice(format!("resume with `cobox chat --thread {}`", self.thread)));
                }
                NextInput::End => {
                    self.drain_events(output).await?;
                    return Ok(if self.last_failed { GENERAL_ERROR } else { 0 });
                }
            };
            if text.trim().is_empty() {
                continue;
            }
            let input = match SlashCommand::parse(&text) {
                Some(Ok(SlashCommand::Quit)) => return Ok(0),
                Some(Ok(command)) => {
                    if let Err(failure) = self.run_command(command, output).await {
                        output.print_failure(&failure)?;
                    }
                    continue;
                }
                Some(Err(reason)) => {
                    output.print_failure(&Failure::new(reason))?;
                    continue;
                }
                None => match self.input(&text) {
                    Ok(Some(input)) => input,
                    Ok(None) => continue,
                    Err(reason) => {
                        output.print_failure(&Failure::new(reason))?;
                        continue;
                    }
                },
            };
            self.last_failed = false;
            if let Err(failure) = self.run(input, output).await {
                if output.is_output_closed {
                    return Err(failure);
                }
                self.last_failed = true;
                output.print_failure(&failure)?;
            }
        }
    }

    /// Returns the next input line. Sandbox events that arrive during the wait are printed.
    async fn next_input(&mut self, input_lines: &mut mpsc::Receiver<InputLine>, output: &mut LineOutput) -> Result<NextInput, Failure> {
        loop {
            tokio::select! {
                line = input_lines.recv() => return Ok(line.map_or(NextInput::End, NextInput::Line)),
                Some(event) = self.events.1.recv() => output.print_event(&event)?,
                result = wait_for_sandbox(&mut self.sandbox) => self.finish_opening(result, output)?,
                _ = tokio::signal::ctrl_c() => return Ok(NextInput::Interrupt),
            }
        }
    }

    /// Prints the remaining events: they have their own stream and arrive slightly later than the run's own events.
    async fn drain_events(&mut self, output: &mut LineOutput) -> Result<(), Failure> {
        if let ChatSandboxState::Open { .. } = self.sandbox {
            while let Ok(Some(event)) = tokio::time::timeout(DRAIN_IDLE, self.events.1.recv()).await {
                output.print_event(&event)?;
            }
        }
        Ok(())
    }

    /// Interprets a line as input for the run: a message or, once every action is decided, the answer to an interrupt.
    /// `None` while decisions are still missing.
    fn input(&mut self, text: &str) -> Result<Option<RunInput>, String> {
        let Some(review) = &mut self.review else {
            let (id, text) = (format!("cobox-{}", ShellId::new()), input_parser::message_text(text));
            self.transcript.add_user_message(&id, text);
            return Ok(Some(RunInput::Message { id, text: text.to_owned() }));
        };
        let decision = match review.next() {
            Some(Question::Text(_)) => Decision::Respond(text.trim().to_owned()),
            _ => input_parser::parse_decision(text).unwrap_or_else(|| Err("answer with one of the words above".to_owned()))?,
        };
        review.decide(decision)?;
        let answer = review.answer();
        if answer.is_some() {
            self.review = None;
        }
        Ok(answer.map(RunInput::Resume))
    }

    async fn run(&mut self, input: RunInput, output: &mut LineOutput) -> Result<(), Failure> {
        if let ChatSandboxState::Opening(_) = self.sandbox {
            let result = wait_for_sandbox(&mut self.sandbox).await;
            self.finish_opening(result, output)?;
        }
        let sandbox = match &self.sandbox {
            ChatSandboxState::Open { sandbox, .. } => Some(sandbox.run_configuration().await),
            _ => None,
        };
        let request = RunRequest { assistant: self.assistant.clone(), input, sandbox };
        let mut run = tokio::select! {
            run = self.deployment.run(&self.thread, &request) => run?,
            _ = tokio::signal::ctrl_c() => return Err(Failure::new("interrupted before the run started")),
        };
        let (mut failure_message, mut is_cancelled) = (None, false);
        loop {
            tokio::select! {
                event = run.next() => match event? {
                    Some(RunEvent::Failed { message }) => failure_message = Some(message),
                    Some(event) => self.handle_run_event(event, output)?,
                    None => break,
                },
                Some(event) = self.events.1.recv() => output.print_event(&event)?,
                _ = tokio::signal::ctrl_c() => {
                    self.cancel(&run, output).await?;
                    is_cancelled = true;
                }
            }
        }
        output.end_line()?;
        if let Some(message) = failure_message.filter(|_| !is_cancelled) {
            return Err(Failure::new(format!("the run failed: {message}")));
        }
        output.json_notice(json!({"type": "end", "thread_id": self.thread, "waits": self.review.is_some()}))?;
        Ok(())
    }

    fn handle_run_event(&mut self, event: RunEvent, output: &mut LineOutput) -> Result<(), Failure> {
        match event {
            RunEvent::Message { message, is_nested } => {
                for change in self.transcript.apply(&message, is_nested) {
                    output.print_change(&self.transcript, &change)?;
                }
            }
            RunEvent::Interrupted(interrupts) => self.review = Review::of(interrupts),
            // The broker's event stream reports the same events, and also those of other users.
            RunEvent::Custom(_) if matches!(self.sandbox, ChatSandboxState::Open { .. }) => {}
            RunEvent::Custom(event) => output.print_custom_event(&event)?,
            RunEvent::Reconnected => output.notice("(reconnected)", json!({"type": "reconnected"}))?,
            RunEvent::Started { run_id } => output.json_notice(json!({"type": "run", "run_id": run_id}))?,
            RunEvent::Failed { .. } => {}
        }
        Ok(())
    }

    async fn cancel(&self, run: &RunStream, output: &mut LineOutput) -> Result<(), Failure> {
        let Some(id) = run.run_id() else { return Ok(()) };
        self.deployment.cancel(&self.thread, id).await?;
        Ok(output.notice("(cancelling the run)", json!({"type": "cancelled", "run_id": id}))?)
    }

    fn finish_opening(&mut self, result: Result<Option<ChatSandbox>, ClientError>, output: &mut LineOutput) -> Result<(), Failure> {
        self.sandbox = ChatSandboxState::None;
        match result {
            Ok(None) => {}
            Ok(Some(sandbox)) => {
                let info = sandbox.session().info();
                output.notice(
                    &format!("sandbox {} is ready", info.sandbox.id),
                    json!({"type": "sandbox", "sandbox_id": info.sandbox.id, "session_id": info.session_id}),
                )?;
                let (mut events, sender) = (sandbox.events(EventsFrom::Now), self.events.0.clone());
                let event_task = tokio::spawn(async move {
                    // The next operation reports a stream that can't be resumed.
                    while let Ok(Some(event)) = events.next().await {
                        if sender.send(event).await.is_err() {
                            break;
                        }
                    }
                });
                self.sandbox = ChatSandboxState::Open { sandbox: Box::new(sandbox), _event_task: AbortOnDropHandle::new(event_task) };
            }
            Err(e) => output.print_failure(&Failure { message: format!("no sandbox: {e}"), ..e.into() })?,
        }
        Ok(())
    }

    async fn list_sandboxes(&self, output: &mut LineOutput) -> Result<(), Failure> {
        let Some((client, _)) = &self.broker else { return Err(Failure::new("no broker is configured, so there are no sandboxes")) };
        let current = match &self.sandbox {
            ChatSandboxState::Open { sandbox, .. } => Some(sandbox.session().info().sandbox.id.to_string()),
            _ => None,
        };
        for sandbox in client.list_sandboxes(Some(LIST_LIMIT), None).await?.items {
            let (id, name) = (sandbox.id.to_string(), sandbox.name.as_deref().unwrap_or("-"));
            let mark = if current.as_deref() == Some(id.as_str()) { "*" } else { " " };
            output.notice(
                &one_line(&format!("{mark} {name}  {}  {id}", sandbox.state.as_str())),
                json!({"type": "sandbox_listed", "sandbox_id": id, "name": sandbox.name, "state": sandbox.state.as_str()}),
            )?;
        }
        Ok(())
    }

    async fn run_command(&mut self, command: SlashCommand, output: &mut LineOutput) -> Result<(), Failure> {
        match command {
            SlashCommand::New => self.enter_thread(None, output).await,
            SlashCommand::Threads(Some(thread)) => self.enter_thread(Some(thread), output).await,
            SlashCommand::Threads(None) => {
                for thread in self.deployment.threads(LIST_LIMIT).await? {
                    let title = thread.title.as_deref().unwrap_or("-");
                    output.notice(
                        &format!("{}  {}  {}  {title}", thread.id, thread.status, thread.updated_at),
                        json!({"type": "thread_listed", "thread_id": thread.id, "status": thread.status, "title": thread.title}),
                    )?;
                }
                Ok(())
            }
            SlashCommand::Assistant(requested) => {
                let assistants = self.deployment.assistants().await?;
                if let Some(name) = requested {
                    self.assistant.clone_from(&choose_assistant(&assistants, Some(&name))?.id);
                }
                for assistant in &assistants {
                    let mark = if assistant.id == self.assistant { "*" } else { " " };
                    output.notice(
                        &format!("{mark} {}  {}", assistant.name, assistant.id),
                        json!({"type": "assistant", "assistant_id": assistant.id, "name": assistant.name}),
                    )?;
                }
                Ok(())
            }
            SlashCommand::SandboxList => self.list_sandboxes(output).await,
            SlashCommand::Help => Ok(output.notice(HELP, json!({"type": "help", "text": HELP}))?),
            _ => Err(Failure::new("this command works only in the TUI")
                .with_advice("outside the TUI, use cobox shell, cobox session events, cobox sandbox list or cobox cp")),
        }
    }
}

/// Waits for the sandbox; never resolves if none is being opened.
async fn wait_for_sandbox(sandbox: &mut ChatSandboxState) -> Result<Option<ChatSandbox>, ClientError> {
    match sandbox {
        ChatSandboxState::Opening(task) => task.await.unwrap_or(Ok(None)),
        _ => std::future::pending().await,
    }
}

pub fn no_deployment() -> Failure {
    Failure::new("no LangGraph deployment is configured").with_advice(
        "set --deployment URL or COBOX_DEPLOYMENT_URL (and COBOX_DEPLOYMENT_KEY for its key); examples/langgraph runs one offline",
    )
}
