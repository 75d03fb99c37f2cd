//! Translates the LangSmith SDKs' command requests to boxd's: the program, its timeout, and how long a client can
//! reconnect to it.

use std::{sync::Arc, time::Duration};

use axum::{Extension, body::Body, extract::State, response::Response};
use cobox_protocol::{
    ApiError,
    exec::ExecRequest,
    frame::{ExecStart, StdinStart},
    langsmith::exec::{Execute, RunConfig},
};
use http::HeaderMap;

use crate::{
    auth::{Caller, Exec},
    exec::{self, LifetimePolicy, MAX_TIMEOUT, UnattendedPolicy},
    http_listener::Connection,
    request_layer::ErrorResponse,
    server::Server,
};

/// The SDK's default shell; not every root file system has it.
const SDK_DEFAULT_SHELL: &str = "/bin/bash";
/// The fallback where that shell is missing; every system has it.
const PLAIN_SHELL: &str = "/bin/sh";
/// A command that consists of just one of these names is a terminal over pipes.
const SHELLS: [&str; 6] = ["sh", "bash", "dash", "ash", "zsh", "fish"];

/// `POST /execute`.
pub async fn execute(
    State(server): State<Arc<Server>>,
    caller: Caller<Exec>,
    Extension(connection): Extension<Connection>,
    headers: HeaderMap,
    content: Body,
) -> Result<Response, ErrorResponse> {
    let shells = AvailableShells::find(&server).await?;
    let adapt = |request: Execute| {
        let Execute { timeout_seconds, timeout, .. } = request;
        let start = exec_start(request, &server, shells)?;
        Ok(ExecRequest {
            command: start.command,
            shell: start.shell,
            cwd: start.cwd,
            env: start.env,
            timeout_seconds: timeout_seconds.or(timeout),
            command_id: start.command_id,
            ..Default::default()
        })
    };
    Ok(exec::run_as(&server, &caller, &headers, content, adapt).await?.respond_langsmith(&connection)?)
}

/// The shells that are installed in the sandbox.
#[derive(Clone, Copy)]
pub struct AvailableShells {
    has_default: bool,
}

impl AvailableShells {
    pub async fn find(server: &Server) -> Result<Self, ApiError> {
        Ok(Self { has_default: server.files.is_file(SDK_DEFAULT_SHELL).await? })
    }

    /// Picks the shell. The SDK's default is not a choice of its user, so the fallback replaces it where it is missing.
    fn choose(self, requested: Option<String>) -> String {
        match requested.unwrap_or_else(|| SDK_DEFAULT_SHELL.to_owned()) {
            shell if shell == SDK_DEFAULT_SHELL && !self.has_default => PLAIN_SHELL.to_owned(),
            shell => shell,
        }
    }
}

/// Plans a streamed command: the program, and the terms of its retention.
pub fn stream_start(request: Execute, server: &Server, shells: AvailableShells) -> Result<(ExecStart, LifetimePolicy), ApiError> {
    let unattended = match (request.idle_timeout_seconds, parse_duration("idle_timeout_seconds", request.idle_timeout_seconds)?) {
        (None, _) => UnattendedPolicy::Default,
        (Some(_), Some(limit)) => UnattendedPolicy::EndsAfter(limit),
        (Some(_), None) => UnattendedPolicy::EndsWithTimeout,
    };
    let retention = parse_duration("ttl_seconds", request.ttl_seconds)?;
    let is_terminal =
        request.pty == Some(true) || request.close_stdin != Some(true) && request.command.as_deref().is_some_and(is_bare_shell);
    let timeout_seconds = request.timeout_seconds.or(request.timeout.filter(|_| !is_terminal));
    // Older clients send a timeout with every command: it must not end a terminal while a user is connected to it.
    let unattended_timeout = parse_duration("timeout", request.timeout.filter(|seconds| is_terminal && *seconds > 0.0))?;
    let start = ExecStart { timeout_seconds, ..exec_start(request, server, shells)? };
    Ok((start, LifetimePolicy { unattended, unattended_timeout, retention, ..LifetimePolicy::with_timeout(MAX_TIMEOUT) }))
}

fn exec_start(request: Execute, server: &Server, shells: AvailableShells) -> Result<ExecStart, ApiError> {
    if request.ssh_agent_forward == Some(true) {
        return Err(ApiError::invalid("ssh_agent_forward: not supported by this sandbox; omit it"));
    }
    let (cwd, env) = match request.run_config {
        Some(_) if request.cwd.is_some() || request.env.is_some() => {
            return Err(ApiError::invalid("run_config: can't be combined with cwd and env"));
        }
        Some(RunConfig { user, work_dir, env_vars }) => {
            check_user(user.as_deref(), server.programs.user())?;
            (work_dir, env_vars)
        }
        None => (request.cwd, request.env),
    };
    let pty = request.pty == Some(true);
    let shell = shells.choose(request.shell);
    // On a terminal without a command, the shell itself is the program.
    let (command, argv, shell) = match request.command.filter(|command| !(pty && command.is_empty())) {
        Some(command) => (Some(command), None, Some(shell)),
        None if pty => (None, Some(vec![shell]), None),
        None => return Err(ApiError::invalid("command: is missing; only a terminal (`pty`) can be started without one")),
    };
    Ok(ExecStart {
        command,
        argv,
        shell,
        cwd: cwd.filter(|cwd| !cwd.is_empty()),
        env,
        pty,
        cols: request.cols,
        rows: request.rows,
        stdin: Some(StdinStart::Open(pty || request.close_stdin != Some(true))),
        kill_on_disconnect: request.kill_on_disconnect == Some(true),
        command_id: request.command_id,
        ..Default::default()
    })
}

/// All commands run as the sandbox's only user. A request for another user is refused, because it can't be honoured.
fn check_user(requested: Option<&str>, user: &str) -> Result<(), ApiError> {
    match requested.filter(|requested| !requested.is_empty() && *requested != user) {
        None => Ok(()),
        Some(_) => Err(ApiError::invalid(format!("run_config.user: commands always run as `{user}`; omit it"))),
    }
}

fn is_bare_shell(command: &str) -> bool {
    let command = command.trim();
    command.rsplit('/').next().is_some_and(|name| SHELLS.contains(&name)) && !command.contains(char::is_whitespace)
}

/// Parses seconds; a negative value means no limit.
fn parse_duration(field: &str, seconds: Option<f64>) -> Result<Option<Duration>, ApiError> {
    match seconds {
        Some(s) if !s.is_finite() => Err(ApiError::invalid(format!("{field}: must be a number of seconds, or -1 for no limit"))),
        Some(s) if s >= 0.0 => Ok(Some(Duration::from_secs_f64(s.min(MAX_TIMEOUT.as_secs_f64())))),
        _ => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_without_arguments_is_a_terminal_and_a_shell_command_is_not() {
        for shell in ["/bin/bash", "bash", " sh ", "/usr/bin/zsh"] {
            assert!(is_bare_shell(shell), "{shell}");
        }
        for command in ["bash -c ls", "make", "/bin/bash-completion", "sh; ls", ""] {
            assert!(!is_bare_shell(command), "{command}");
        }
    }

    #[test]
    fn a_missing_default_shell_is_replaced_and_a_chosen_one_is_not() {
        let choose = |has_default, shell: Option<&str>| AvailableShells { has_default }.choose(shell.map(str::to_owned));
        assert_eq!(choose(true, None), "/bin/bash");
        assert_eq!(choose(false, Some("/bin/bash")), "/bin/sh");
        assert_eq!(choose(false, Some("/bin/zsh")), "/bin/zsh");
    }

    #[test]
    fn a_negative_duration_means_no_limit_and_a_huge_one_is_reduced() {
        assert_eq!(parse_duration("x", Some(-1.0)).unwrap(), None);
        assert_eq!(parse_duration("x", None).unwrap(), None);
        assert_eq!(parse_duration("x", Some(0.0)).unwrap(), Some(Duration::ZERO));
        assert_eq!(parse_duration("x", Some(1e300)).unwrap(), Some(MAX_TIMEOUT));
        assert!(parse_duration("x", Some(f64::NAN)).is_err());
    }

    #[test]
    fn another_user_is_refused() {
        assert!(check_user(None, "user").is_ok() && check_user(Some(""), "user").is_ok() && check_user(Some("user"), "user").is_ok());
        assert!(check_user(Some("root"), "user").unwrap_err().message.contains("run_config.user"));
    }
}
