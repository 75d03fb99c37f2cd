//! A run and its event stream, which reconnects when the connection is lost.

use std::{collections::VecDeque, time::Duration};

use http::{Method, header};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep, timeout};

use crate::{
    Deployment, LangGraphError, RunEvent,
    deployment::segment,
    event,
    sse::{SseEvent, SseParser},
};

/// A stream without any data for this long is considered dead: a live one has a heartbeat every 5 s.
const STREAM_IDLE_TIMEOUT: Duration = Duration::from_secs(60);
/// How long to try to reconnect a lost stream; the run itself continues.
const RECONNECT_TIMEOUT: Duration = Duration::from_secs(60);
const MIN_RETRY_WAIT: Duration = Duration::from_millis(200);
const MAX_RETRY_WAIT: Duration = Duration::from_secs(5);
/// Maximum size of an event id that is sent back.
const MAX_ID_BYTES: usize = 256;

/// The input of a run.
#[derive(Clone, Debug, PartialEq)]
pub enum RunInput {
    /// A person's message. Its id identifies it in the stream.
    Message { id: String, text: String },
    /// The answer to the thread's interrupts.
    Resume(Value),
}

#[derive(Clone, Debug)]
pub struct RunRequest {
    pub assistant: String,
    pub input: RunInput,
    /// `config.configurable.sandbox`: the sandbox in which the agent works.
    pub sandbox: Option<Value>,
}

impl RunRequest {
    fn body(&self) -> Value {
        let mut body = json!({
            "assistant_id": self.assistant,
            "stream_mode": ["messages-tuple", "updates", "custom"],
            "stream_subgraphs": true,
            "stream_resumable": true,
            "on_disconnect": "continue",
            "multitask_strategy": "reject",
        });
        match &self.input {
            RunInput::Message { id, text } => body["input"] = json!({"messages": [{"type": "human", "content": text, "id": id}]}),
            RunInput::Resume(answer) => body["command"] = json!({"resume": answer}),
        }
        if let Some(sandbox) = &self.sandbox {
            body["config"] = json!({"configurable": {"sandbox": sandbox}});
        }
        body
    }
}

/// The event stream of a run. The run continues when this is dropped.
pub struct RunStream {
    deployment: Deployment,
    thread: String,
    run: Option<String>,
    last_id: Option<String>,
    response: Option<reqwest::Response>,
    parser: SseParser,
    events: VecDeque<RunEvent>,
    /// Since when no event has arrived, and how long to wait before the next attempt.
    lost: Option<(Instant, Duration)>,
    is_over: bool,
}

impl RunStream {
    pub(crate) async fn start(deployment: Deployment, thread: &str, request: &RunRequest) -> Result<Self, LangGraphError> {
        let url = deployment.at(&format!("/threads/{}/runs/stream", segment(thread)));
        let request = deployment.http.request(Method::POST, url).header(header::ACCEPT, "text/event-stream").json(&request.body());
        let response = deployment.checked("a run", request).await?;
        Ok(Self {
            deployment,
            thread: thread.to_owned(),
            run: None,
            last_id: None,
            response: Some(response),
            parser: SseParser::default(),
            events: VecDeque::new(),
            lost: None,
            is_over: false,
        })
    }

    /// The run's id, once the deployment has sent it.
    pub fn run_id(&self) -> Option<&str> {
        self.run.as_deref()
    }

    /// The next event; `None` when the run has ended or waits. A lost connection is resumed where it broke off.
    pub async fn next(&mut self) -> Result<Option<RunEvent>, LangGraphError> {
        loop {
            if let Some(event) = self.events.pop_front() {
                return Ok(Some(event));
            }
            if self.is_over {
                return Ok(None);
            }
            let cause = match self.receive().await {
                Ok(()) => continue,
                Err(Loss::Final(error)) => {
                    self.is_over = true;
                    return Err(error);
                }
                Err(Loss::Transient(cause)) => cause,
            };
            self.response = None;
            let (since, wait) = self.lost.unwrap_or((Instant::now(), MIN_RETRY_WAIT));
            if since.elapsed() >= RECONNECT_TIMEOUT {
                self.is_over = true;
                return Err(LangGraphError::Lost { cause });
            }
            self.lost = Some((since, (wait * 2).min(MAX_RETRY_WAIT)));
            sleep(wait).await;
        }
    }

    async fn receive(&mut self) -> Result<(), Loss> {
        if self.response.is_none() {
            self.response = Some(self.reconnect().await?);
            self.parser = SseParser::default();
            self.events.push_back(RunEvent::Reconnected);
        }
        let Some(response) = &mut self.response else { return Ok(()) };
        let chunk =
            timeout(STREAM_IDLE_TIMEOUT, response.chunk()).await.map_err(|_| Loss::Transient("no data arrived for too long".to_owned()))?;
        match chunk.map_err(|e| Loss::Transient(self.deployment.transport(&e).to_string()))? {
            None => self.is_over = true,
            Some(bytes) => {
                let events = self.parser.push(&bytes).map_err(|_| Loss::Final(self.deployment.unreadable("a run's stream")))?;
                events.iter().for_each(|event| self.handle_event(event));
            }
        }
        Ok(())
    }

    fn handle_event(&mut self, event: &SseEvent) {
        self.lost = None;
        if let Some(id) = event.id.as_ref().filter(|id| id.len() <= MAX_ID_BYTES && id.bytes().all(|b| b.is_ascii_graphic())) {
            self.last_id = Some(id.clone());
        }
        for events in event::read(event) {
            if let RunEvent::Started { run_id } = &events {
                self.run = Some(run_id.clone());
            }
            self.events.push_back(events);
        }
    }

    /// Resumes the stream. Without event ids, events could be missed, so that is an error.
    async fn reconnect(&self) -> Result<reqwest::Response, Loss> {
        let (Some(run), Some(last)) = (&self.run, &self.last_id) else {
            return Err(Loss::Final(LangGraphError::Lost {
                cause: "the connection was lost, and this deployment can't resume the stream".to_owned(),
            }));
        };
        let url = self.deployment.at(&format!("/threads/{}/runs/{}/stream", segment(&self.thread), segment(run)));
        let request =
            self.deployment.http.request(Method::GET, url).header(header::ACCEPT, "text/event-stream").header("last-event-id", last);
        match self.deployment.checked("a run's stream", request).await {
            Ok(response) => Ok(response),
            Err(error @ LangGraphError::Transport { .. }) => Err(Loss::Transient(error.to_string())),
            Err(LangGraphError::Refused { status: 429 | 500..=599, message, .. }) => Err(Loss::Transient(message)),
            Err(error) => Err(Loss::Final(error)),
        }
    }
}

enum Loss {
    Transient(String),
    Final(LangGraphError),
}
