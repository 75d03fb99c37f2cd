//! A run and its stream: started once, followed over as many connections as it takes.

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

/// A stream that says nothing for this long is dead: a living one has a heartbeat every 5 s.
const SILENCE: Duration = Duration::from_secs(60);
/// How long a lost stream is looked for; the run itself goes on meanwhile.
const GIVE_UP_AFTER: Duration = Duration::from_secs(60);
const FIRST_WAIT: Duration = Duration::from_millis(200);
const LONGEST_WAIT: Duration = Duration::from_secs(5);
/// Longest id of an event that is sent back, in bytes.
const MAX_ID_BYTES: usize = 256;

/// What a run begins with.
#[derive(Clone, Debug, PartialEq)]
pub enum RunInput {
    /// A person's message; its id is how the stream speaks of it.
    Say { id: String, text: String },
    /// An answer to what the thread waits for.
    Resume(Value),
}

#[derive(Clone, Debug)]
pub struct RunRequest {
    pub assistant: String,
    pub input: RunInput,
    /// `config.configurable.sandbox`: where the agent is to work.
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
            RunInput::Say { id, text } => body["input"] = json!({"messages": [{"type": "human", "content": text, "id": id}]}),
            RunInput::Resume(answer) => body["command"] = json!({"resume": answer}),
        }
        if let Some(sandbox) = &self.sandbox {
            body["config"] = json!({"configurable": {"sandbox": sandbox}});
        }
        body
    }
}

/// Dropping it leaves the run going.
pub struct RunStream {
    deployment: Deployment,
    thread: String,
    run: Option<String>,
    last_id: Option<String>,
    response: Option<reqwest::Response>,
    parser: SseParser,
    told: VecDeque<RunEvent>,
    /// Since when nothing was told, and how long to wait before the next try.
    lost: Option<(Instant, Duration)>,
    is_over: bool,
}

impl RunStream {
    pub(crate) async fn start(deployment: Deployment, thread: &str, request: &RunRequest) -> Result<Self, LangGraphError> {
        let url = deployment.at(&format!("/threads/{}/runs/stream", segment(thread)));
        let asking = deployment.http.request(Method::POST, url).header(header::ACCEPT, "text/event-stream").json(&request.body());
        let response = deployment.checked("a run", asking).await?;
        Ok(Self {
            deployment,
            thread: thread.to_owned(),
            run: None,
            last_id: None,
            response: Some(response),
            parser: SseParser::default(),
            told: VecDeque::new(),
            lost: None,
            is_over: false,
        })
    }

    /// The run's id, once it was told.
    pub fn run_id(&self) -> Option<&str> {
        self.run.as_deref()
    }

    /// What happens next; `None` when the run has ended or waits. A lost connection is made again from where it broke off.
    pub async fn next(&mut self) -> Result<Option<RunEvent>, LangGraphError> {
        loop {
            if let Some(event) = self.told.pop_front() {
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
                Err(Loss::Passing(cause)) => cause,
            };
            self.response = None;
            let (since, wait) = self.lost.unwrap_or((Instant::now(), FIRST_WAIT));
            if since.elapsed() >= GIVE_UP_AFTER {
                self.is_over = true;
                return Err(LangGraphError::Lost { cause });
            }
            self.lost = Some((since, (wait * 2).min(LONGEST_WAIT)));
            sleep(wait).await;
        }
    }

    async fn receive(&mut self) -> Result<(), Loss> {
        if self.response.is_none() {
            self.response = Some(self.rejoin().await?);
            self.parser = SseParser::default();
            self.told.push_back(RunEvent::Reconnected);
        }
        let Some(response) = &mut self.response else { return Ok(()) };
        let chunk = timeout(SILENCE, response.chunk()).await.map_err(|_| Loss::Passing("nothing was heard for too long".to_owned()))?;
        match chunk.map_err(|e| Loss::Passing(self.deployment.transport(&e).to_string()))? {
            None => self.is_over = true,
            Some(bytes) => {
                let events = self.parser.push(&bytes).map_err(|_| Loss::Final(self.deployment.unreadable("a run's stream")))?;
                events.iter().for_each(|event| self.take(event));
            }
        }
        Ok(())
    }

    fn take(&mut self, event: &SseEvent) {
        self.lost = None;
        if let Some(id) = event.id.as_ref().filter(|id| id.len() <= MAX_ID_BYTES && id.bytes().all(|b| b.is_ascii_graphic())) {
            self.last_id = Some(id.clone());
        }
        for told in event::read(event) {
            if let RunEvent::Started { run_id } = &told {
                self.run = Some(run_id.clone());
            }
            self.told.push_back(told);
        }
    }

    /// Only a stream whose events have ids can be taken up without a hole in it.
    async fn rejoin(&self) -> Result<reqwest::Response, Loss> {
        let (Some(run), Some(last)) = (&self.run, &self.last_id) else {
            return Err(Loss::Final(LangGraphError::Lost {
                cause: "the connection broke, and this deployment can't take it up again".to_owned(),
            }));
        };
        let url = self.deployment.at(&format!("/threads/{}/runs/{}/stream", segment(&self.thread), segment(run)));
        let asking =
            self.deployment.http.request(Method::GET, url).header(header::ACCEPT, "text/event-stream").header("last-event-id", last);
        match self.deployment.checked("a run's stream", asking).await {
            Ok(response) => Ok(response),
            Err(error @ LangGraphError::Transport { .. }) => Err(Loss::Passing(error.to_string())),
            Err(LangGraphError::Refused { status: 429 | 500..=599, message, .. }) => Err(Loss::Passing(message)),
            Err(error) => Err(Loss::Final(error)),
        }
    }
}

enum Loss {
    Passing(String),
    Final(LangGraphError),
}
