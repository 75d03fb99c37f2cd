//! Shells and processes of a sandbox, over HTTP: list, create, run, signal and end.

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

/// Timeout of one response: a process that is ended gets a moment to clean up.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum size of a list or description, in bytes: thousands of processes fit.
const MAX_ANSWER: usize = 16 * 1024 * 1024;
/// Maximum response of a command run in a shell, in bytes: the server's maximum output, escaped, and again in base64.
const MAX_RUN_ANSWER: usize = 256 * 1024 * 1024;

impl Dataplane {
    pub async fn list_shells(&self) -> Result<Vec<ShellInfo>, ClientError> {
        let list: ShellList = self.send_json(self.request(Method::GET, "/shells"), MAX_ANSWER).await?;
        Ok(list.items)
    }

    /// Creates a shell. Joining one by name also creates it.
    pub async fn create_shell(&self, create: &ShellCreate) -> Result<ShellInfo, ClientError> {
        self.send_json(self.request(Method::POST, "/shells").json(create), MAX_ANSWER).await
    }

    /// `shell` is a name or an id, as in the other methods.
    pub async fn get_shell(&self, shell: &str) -> Result<ShellInfo, ClientError> {
        self.send_json(self.request(Method::GET, &shell_route(shell)), MAX_ANSWER).await
    }

    /// Ends a shell and its processes for all participants.
    pub async fn end_shell(&self, shell: &str) -> Result<(), ClientError> {
        self.no_content(self.request(Method::DELETE, &shell_route(shell))).await
    }

    /// Runs a command in a shell, visible to all participants, and waits for its end.
    pub async fn run_in_shell(&self, shell: &str, run: &ShellRun) -> Result<ShellRunResult, ClientError> {
        let call = Call::new(Method::POST, self.url(&format!("{}/run", shell_route(shell)))).json(run);
        self.send_json(call, MAX_RUN_ANSWER).await
    }

    /// Lists commands and shells, including ended ones that boxd still keeps.
    pub async fn list_processes(&self) -> Result<Vec<ProcessInfo>, ClientError> {
        let list: ProcessList = self.send_json(self.request(Method::GET, "/processes"), MAX_ANSWER).await?;
        Ok(list.items)
    }

    pub async fn signal(&self, id: &str, signal: SignalName) -> Result<(), ClientError> {
        let route = format!("{}/signal", process_route(id));
        self.no_content(self.request(Method::POST, &route).json(&SignalRequest { signal })).await
    }

    /// Ends a command and its process tree.
    pub async fn cancel(&self, command_id: &str) -> Result<(), ClientError> {
        self.no_content(self.request(Method::DELETE, &process_route(command_id))).await
    }

    fn request(&self, method: Method, route: &str) -> Call {
        Call::new(method, self.url(route)).timeout(RESPONSE_TIMEOUT)
    }

    async fn send_json<T: DeserializeOwned>(&self, call: Call, max_bytes: usize) -> Result<T, ClientError> {
        let response = self.sender.send(&call, &self.credential).await?;
        read_json(&call.url, response, max_bytes).await
    }

    async fn no_content(&self, call: Call) -> Result<(), ClientError> {
        self.sender.send(&call, &self.credential).await.map(drop)
    }
}

fn shell_route(shell: &str) -> String {
    format!("/shells/{}", encode_segment(shell.as_bytes()))
}

fn process_route(id: &str) -> String {
    format!("/processes/{}", encode_segment(id.as_bytes()))
}
