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
    answer::Failure,
    auth::{Caller, Exec},
    exec::{self, LifetimePolicy, MAX_TIMEOUT, UnattendedPolicy},
    listen::Connection,
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
) -> Result<Response, Failure> {
    let shells = Shells::of(&server).await?;
    let adapt = |asked: Execute| {
        let Execute { timeout_seconds, timeout, .. } = asked;
        let start = started(asked, &server, shells)?;
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
pub struct Shells {
    has_default: bool,
}

impl Shells {
    pub async fn of(server: &Server) -> Result<Self, ApiError> {
        Ok(Self { has_default: server.files.is_file(SDK_DEFAULT_SHELL).await? })
    }

    /// Picks the shell. The SDK's default is not a choice of its user, so the fallback replaces it where it is missing.
    fn choose(self, asked: Option<String>) -> String {
        match asked.unwrap_or_else(|| SDK_DEFAULT_SHELL.to_owned()) {
            shell if shell == SDK_DEFAULT_SHELL && !self.has_default => PLAIN_SHELL.to_owned(),
            shell => shell,
        }
    }
}

/// Plans a streamed command: the program, and the terms of its retention.
pub fn plan(asked: Execute, server: &Server, shells: Shells) -> Result<(ExecStart, LifetimePolicy), ApiError> {
    let unattended = match (asked.idle_timeout_seconds, span("idle_timeout_seconds", asked.idle_timeout_seconds)?) {
        (None, _) => UnattendedPolicy::Default,
        (Some(_), Some(limit)) => UnattendedPolicy::EndsAfter(limit),
        (Some(_), None) => UnattendedPolicy::EndsWithTimeout,
    };
    let retention = span("ttl_seconds", asked.ttl_seconds)?;
    let is_terminal = asked.pty == Some(true) || asked.close_stdin != Some(true) && asked.command.as_deref().is_some_and(is_bare_shell);
    let timeout_seconds = asked.timeout_seconds.or(asked.timeout.filter(|_| !is_terminal));
    // Older clients send a timeout with every command: it must not end a terminal while a user is connected to it.
    let unattended_timeout = span("timeout", asked.timeout.filter(|seconds| is_terminal && *seconds > 0.0))?;
    let start = ExecStart { timeout_seconds, ..started(asked, server, shells)? };
    Ok((start, LifetimePolicy { unattended, unattended_timeout, retention, ..LifetimePolicy::with_timeout(MAX_TIMEOUT) }))
}

fn started(asked: Execute, server: &Server, shells: Shells) -> Result<ExecStart, ApiError> {
    if asked.ssh_agent_forward == Some(true) {
        return Err(ApiError::invalid("ssh_agent_forward: no agent can be forwarded into this sandbox; leave it out"));
    }
    let (cwd, env) = match asked.run_config {
        Some(_) if asked.cwd.is_some() || asked.env.is_some() => {
            return Err(ApiError::invalid("run_config: goes in place of cwd and env, not beside them"));
        }
        Some(RunConfig { user, work_dir, env_vars }) => {
            may_run_as(user.as_deref(), server.programs.user())?;
            (work_dir, env_vars)
        }
        None => (asked.cwd, asked.env),
    };
    let pty = asked.pty == Some(true);
    let shell = shells.choose(asked.shell);
    // On a terminal without a command, the shell itself is the program.
    let (command, argv, shell) = match asked.command.filter(|command| !(pty && command.is_empty())) {
        Some(command) => (Some(command), None, Some(shell)),
        None if pty => (None, Some(vec![shell]), None),
        None => return Err(ApiError::invalid("command: is missing; only a terminal (`pty`) starts without one")),
    };
    Ok(ExecStart {
        command,
        argv,
        shell,
        cwd: cwd.filter(|cwd| !cwd.is_empty()),
        env,
        pty,
        cols: asked.cols,
        rows: asked.rows,
        stdin: Some(StdinStart::Open(pty || asked.close_stdin != Some(true))),
        kill_on_disconnect: asked.kill_on_disconnect == Some(true),
        command_id: asked.command_id,
        ..Default::default()
    })
}

/// All commands run as the sandbox's only user. A request for another user is refused, because it can't be honoured.
fn may_run_as(asked: Option<&str>, user: &str) -> Result<(), ApiError> {
    match asked.filter(|asked| !asked.is_empty() && *asked != user) {
        None => Ok(()),
        Some(_) => Err(ApiError::invalid(format!("run_config.user: commands run as `{user}` here; leave it out"))),
    }
}

fn is_bare_shell(command: &str) -> bool {
    let command = command.trim();
    command.rsplit('/').next().is_some_and(|name| SHELLS.contains(&name)) && !command.contains(char::is_whitespace)
}

/// Parses seconds; a negative value means no limit.
fn span(field: &str, seconds: Option<f64>) -> Result<Option<Duration>, ApiError> {
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
    fn a_bare_shell_is_a_terminal_and_a_shells_command_is_not() {
        for shell in ["/bin/bash", "bash", " sh ", "/usr/bin/zsh"] {
            assert!(is_bare_shell(shell), "{shell}");
        }
        for command in ["bash -c ls", "make", "/bin/bash-completion", "sh; ls", ""] {
            assert!(!is_bare_shell(command), "{command}");
        }
    }

    #[test]
    fn the_sdks_default_shell_is_replaced_where_it_is_missing_and_a_chosen_one_never() {
        let chosen = |has_default, shell: Option<&str>| Shells { has_default }.choose(shell.map(str::to_owned));
        assert_eq!(chosen(true, None), "/bin/bash");
        assert_eq!(chosen(false, Some("/bin/bash")), "/bin/sh");
        assert_eq!(chosen(false, Some("/bin/zsh")), "/bin/zsh");
    }

    #[test]
    fn a_negative_span_is_no_limit_and_a_huge_one_is_cut() {
        assert_eq!(span("x", Some(-1.0)).unwrap(), None);
        assert_eq!(span("x", None).unwrap(), None);
        assert_eq!(span("x", Some(0.0)).unwrap(), Some(Duration::ZERO));
        assert_eq!(span("x", Some(1e300)).unwrap(), Some(MAX_TIMEOUT));
        assert!(span("x", Some(f64::NAN)).is_err());
    }

    #[test]
    fn nobody_is_promised_another_user() {
        assert!(may_run_as(None, "user").is_ok() && may_run_as(Some(""), "user").is_ok() && may_run_as(Some("user"), "user").is_ok());
        assert!(may_run_as(Some("root"), "user").unwrap_err().message.contains("run_config.user"));
    }
}
