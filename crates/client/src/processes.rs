//! What runs in a sandbox, over plain HTTP: its shells and commands, and how they are told to stop.

use std::time::Duration;

use cobox_protocol::{
    process::{ProcessInfo, ProcessList, SignalName, SignalRequest},
    shell::{ShellCreate, ShellInfo, ShellList, ShellRun, ShellRunResult},
};
use http::Method;
use serde::de::DeserializeOwned;

use crate::{
    ClientError, Dataplane,
    call::{Call, read_json},
    path::encode_segment,
};

/// For one of these answers: ending a program gives it a moment to put its things in order.
const ANSWER_WITHIN: Duration = Duration::from_secs(30);
/// Largest list or description read, in bytes: thousands of processes fit.
const MAX_ANSWER: usize = 16 * 1024 * 1024;
/// Largest answer of a command run in a shell, in bytes: its output at the most a server gives, escaped, and in base64 beside it.
const MAX_RUN_ANSWER: usize = 256 * 1024 * 1024;

impl Dataplane {
    pub async fn list_shells(&self) -> Result<Vec<ShellInfo>, ClientError> {
        let list: ShellList = self.answer(self.ask(Method::GET, "/shells"), MAX_ANSWER).await?;
        Ok(list.items)
    }

    /// A new shell; joining one by name makes it too.
    pub async fn create_shell(&self, create: &ShellCreate) -> Result<ShellInfo, ClientError> {
        self.answer(self.ask(Method::POST, "/shells").json(create), MAX_ANSWER).await
    }

    /// By name or id, as with the others.
    pub async fn get_shell(&self, shell: &str) -> Result<ShellInfo, ClientError> {
        self.answer(self.ask(Method::GET, &shell_route(shell)), MAX_ANSWER).await
    }

    /// Ends a shell and everything in it, for everybody.
    pub async fn end_shell(&self, shell: &str) -> Result<(), ClientError> {
        self.nothing(self.ask(Method::DELETE, &shell_route(shell))).await
    }

    /// Runs a command in a shell where everybody at it sees it happen, and waits for its end.
    pub async fn run_in_shell(&self, shell: &str, run: &ShellRun) -> Result<ShellRunResult, ClientError> {
        let call = Call::new(Method::POST, self.url(&format!("{}/run", shell_route(shell)))).json(run);
        self.answer(call, MAX_RUN_ANSWER).await
    }

    /// Commands and shells, also those that have ended and are still remembered.
    pub async fn list_processes(&self) -> Result<Vec<ProcessInfo>, ClientError> {
        let list: ProcessList = self.answer(self.ask(Method::GET, "/processes"), MAX_ANSWER).await?;
        Ok(list.items)
    }

    pub async fn signal(&self, id: &str, signal: SignalName) -> Result<(), ClientError> {
        let route = format!("{}/signal", process_route(id));
        self.nothing(self.ask(Method::POST, &route).json(&SignalRequest { signal })).await
    }

    /// Ends a command and everything it started.
    pub async fn cancel(&self, command_id: &str) -> Result<(), ClientError> {
        self.nothing(self.ask(Method::DELETE, &process_route(command_id))).await
    }

    fn ask(&self, method: Method, route: &str) -> Call {
        Call::new(method, self.url(route)).timeout(ANSWER_WITHIN)
    }

    async fn answer<T: DeserializeOwned>(&self, call: Call, max_bytes: usize) -> Result<T, ClientError> {
        let response = self.sender.send(&call, &self.credential).await?;
        read_json(&call.url, response, max_bytes).await
    }

    async fn nothing(&self, call: Call) -> Result<(), ClientError> {
        self.sender.send(&call, &self.credential).await.map(drop)
    }
}

fn shell_route(shell: &str) -> String {
    format!("/shells/{}", encode_segment(shell.as_bytes()))
}

fn process_route(id: &str) -> String {
    format!("/processes/{}", encode_segment(id.as_bytes()))
}
