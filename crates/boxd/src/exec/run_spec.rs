//! Turns a request into what will be run: validates every field and fills in the defaults.

use std::{collections::BTreeMap, time::Duration};

use base64::{Engine, engine::general_purpose::STANDARD};
use bytes::Bytes;
use cobox_protocol::{
    ApiError,
    control::DataplaneLimits,
    exec::ExecRequest,
    frame::{DEFAULT_COLS, DEFAULT_ROWS, ExecStart, MAX_TERMINAL_SIDE, StdinStart},
};

use crate::{
    activity_log::command_text,
    body::too_large,
    workload::{MAX_EXEC_ARGS_BYTES, ProgramSpec, STRING_OVERHEAD_BYTES, Stdio},
};

/// Timeout where the client sets none: long enough for a long build, while a forgotten server doesn't hold a client for
/// ever.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(600);
/// The longest timeout a client may set, and the meaning of 0: a day.
pub const MAX_TIMEOUT: Duration = Duration::from_secs(24 * 3600);
/// Default capture limit for each of stdout and stderr: many times what fits into a model's context.
const DEFAULT_OUTPUT_BYTES: usize = 1024 * 1024;
const DEFAULT_SHELL: &str = "/bin/sh";

pub struct OneShotSpec {
    pub program: ProgramSpec,
    pub stdin: Option<Vec<u8>>,
    pub timeout: Duration,
    pub max_output: usize,
}

impl OneShotSpec {
    /// The sandbox's limits define the maximum of `max_output_bytes`; a larger value is reduced to it, and `truncated`
    /// reports the cut.
    pub fn new(request: ExecRequest, limits: &DataplaneLimits) -> Result<Self, ApiError> {
        let stdin = match (request.stdin, request.stdin_b64) {
            (Some(_), Some(_)) => return Err(duplicate_stdin()),
            (text, None) => text.map(String::into_bytes),
            (None, Some(b64)) => Some(decode_base64(&b64)?),
        };
        let stdio = Stdio::Pipes { stdin: stdin.is_some() };
        let argv = build_argv(request.command, request.argv, request.shell)?;
        let program = ProgramSpec { argv, env: environment(request.env)?, cwd: working_directory(request.cwd)?, stdio };
        Ok(Self {
            program,
            stdin,
            timeout: parse_timeout(request.timeout_seconds, DEFAULT_TIMEOUT)?,
            max_output: max_output(request.max_output_bytes, limits),
        })
    }
}

pub fn max_output(requested: Option<u64>, limits: &DataplaneLimits) -> usize {
    let limit = usize::try_from(limits.output_bytes).unwrap_or(usize::MAX);
    requested.map_or(DEFAULT_OUTPUT_BYTES, |n| usize::try_from(n).unwrap_or(usize::MAX)).min(limit)
}

/// How long a command with retained output may run, and how long its output is retained.
#[derive(Clone, Copy, Debug)]
pub struct LifetimePolicy {
    /// Used where its `start` sets no timeout.
    pub default_timeout: Duration,
    pub unattended: UnattendedPolicy,
    /// A timeout that runs only while no client is connected: the one a client sets for a terminal, which a user may
    /// keep open for longer.
    pub unattended_timeout: Option<Duration>,
    /// How long its output is retained after its end; the sandbox's own limit may be shorter.
    pub retention: Option<Duration>,
}

impl LifetimePolicy {
    pub const fn with_timeout(default_timeout: Duration) -> Self {
        Self { default_timeout, unattended: UnattendedPolicy::Default, unattended_timeout: None, retention: None }
    }
}

/// What happens to a command while no client is connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnattendedPolicy {
    /// A command on a terminal, or without a timeout of its own, ends after the sandbox's limit, because its client may
    /// never come back. Any other ends with its timeout.
    Default,
    /// Ends after the time its client set.
    EndsAfter(Duration),
    /// Its client set no limit: it ends with its timeout, or without one after the sandbox's limit.
    EndsWithTimeout,
}

impl LifetimePolicy {
    /// How long a command keeps running with no client connected; `None` where its timeout ends it anyway.
    /// `requested_timeout` is from its `start`, `sandbox_limit` is the sandbox's limit.
    fn unattended_for(&self, is_terminal: bool, requested_timeout: Option<Duration>, sandbox_limit: Duration) -> Option<Duration> {
        let has_timeout = requested_timeout.is_some() || self.default_timeout < MAX_TIMEOUT;
        let timeout = requested_timeout.into_iter().chain(self.unattended_timeout).min();
        match self.unattended {
            UnattendedPolicy::Default if !is_terminal && has_timeout => None,
            UnattendedPolicy::Default => Some(timeout.map_or(sandbox_limit, |timeout| timeout.min(sandbox_limit))),
            UnattendedPolicy::EndsAfter(limit) => Some(timeout.map_or(limit, |timeout| timeout.min(limit))),
            UnattendedPolicy::EndsWithTimeout => Some(timeout.unwrap_or(sandbox_limit)),
        }
    }
}

/// What to run for a command with retained output.
pub struct StreamSpec {
    pub program: ProgramSpec,
    /// Input that the program reads before any input frames.
    pub stdin: Option<Bytes>,
    pub stdin_stays_open: bool,
    pub timeout: Duration,
    pub unattended: Option<Duration>,
    pub retention: Option<Duration>,
    pub kill_on_disconnect: bool,
    /// The command as shown in the activity feed.
    pub activity_text: String,
}

impl StreamSpec {
    /// Returns `None` if nothing is to be run and an existing command is joined.
    pub fn new(start: ExecStart, policy: LifetimePolicy, sandbox_limit: Duration) -> Result<Option<Self>, ApiError> {
        if start.command.is_none() && start.argv.is_none() && start.command_id.is_some() {
            return Ok(None);
        }
        let activity_text = command_text(start.command.as_deref(), start.argv.as_deref());
        let (stdin, stdin_stays_open) = match (start.stdin, start.stdin_b64) {
            (Some(_), Some(_)) => return Err(duplicate_stdin()),
            (Some(StdinStart::Text(text)), None) => (Some(Bytes::from(text)), false),
            (None, Some(b64)) => (Some(Bytes::from(decode_base64(&b64)?)), false),
            (Some(StdinStart::Open(is_open)), None) => (None, is_open),
            // A client that asks for a terminal will send input.
            (None, None) => (None, start.pty),
        };
        let (cols, rows) = terminal_size(start.cols.unwrap_or(DEFAULT_COLS), start.rows.unwrap_or(DEFAULT_ROWS))?;
        let stdio = match start.pty {
            true => Stdio::Pty { cols, rows },
            false => Stdio::Pipes { stdin: stdin.is_some() || stdin_stays_open },
        };
        let mut env = environment(start.env)?;
        if start.pty && env.iter().all(|(name, _)| name != b"TERM") {
            env.push((b"TERM".to_vec(), b"xterm-256color".to_vec()));
        }
        let argv = build_argv(start.command, start.argv, start.shell)?;
        let requested_timeout = start.timeout_seconds.filter(|seconds| *seconds > 0.0);
        let timeout = parse_timeout(start.timeout_seconds, policy.default_timeout)?;
        let unattended = policy.unattended_for(start.pty && stdin_stays_open, requested_timeout.map(|_| timeout), sandbox_limit);
        Ok(Some(Self {
            program: ProgramSpec { argv, env, cwd: working_directory(start.cwd)?, stdio },
            stdin,
            stdin_stays_open,
            timeout,
            unattended,
            retention: policy.retention,
            kill_on_disconnect: start.kill_on_disconnect,
            activity_text,
        }))
    }
}

pub fn terminal_size(cols: u16, rows: u16) -> Result<(u16, u16), ApiError> {
    let allowed = 1..=MAX_TERMINAL_SIDE;
    match allowed.contains(&cols) && allowed.contains(&rows) {
        true => Ok((cols, rows)),
        false => Err(ApiError::invalid(format!("cols, rows: must be 1 to {MAX_TERMINAL_SIDE}"))),
    }
}

/// Converts a request to the `start` of a stream.
pub fn to_exec_start(request: ExecRequest) -> ExecStart {
    ExecStart {
        command: request.command,
        argv: request.argv,
        shell: request.shell,
        cwd: request.cwd,
        env: request.env,
        stdin: request.stdin.map(StdinStart::Text),
        stdin_b64: request.stdin_b64,
        timeout_seconds: request.timeout_seconds,
        command_id: request.command_id,
        stdout_from: request.stdout_from,
        stderr_from: request.stderr_from,
        ..Default::default()
    }
}

fn duplicate_stdin() -> ApiError {
    ApiError::invalid("stdin and stdin_b64 are mutually exclusive")
}

fn decode_base64(b64: &str) -> Result<Vec<u8>, ApiError> {
    STANDARD.decode(b64).map_err(|e| ApiError::invalid(format!("stdin_b64: invalid base64: {e}")))
}

fn build_argv(command: Option<String>, argv: Option<Vec<String>>, shell: Option<String>) -> Result<Vec<Vec<u8>>, ApiError> {
    let argv: Vec<Vec<u8>> = match (command, argv) {
        (Some(command), None) => {
            let shell = shell.unwrap_or_else(|| DEFAULT_SHELL.to_owned());
            vec![reject_nul("shell", shell)?, b"-c".to_vec(), reject_nul("command", command)?]
        }
        (None, Some(argv)) => {
            if shell.is_some() {
                return Err(ApiError::invalid("shell can be set only with command, not with argv"));
            }
            argv.into_iter().map(|arg| reject_nul("argv", arg)).collect::<Result<_, _>>()?
        }
        (Some(_), Some(_)) => return Err(ApiError::invalid("command and argv are mutually exclusive")),
        (None, None) => return Err(ApiError::invalid("command or argv is required")),
    };
    check_total_length("argv", argv.iter().map(Vec::len))?;
    if argv.first().is_none_or(Vec::is_empty) {
        return Err(ApiError::invalid("the program to run (argv[0], or shell) is empty"));
    }
    Ok(argv)
}

/// Display text of the command, or the id of the command that is joined.
pub fn describe_command(command: Option<&str>, argv: Option<&[String]>, command_id: Option<&str>) -> String {
    match (command, argv) {
        (Some(command), _) => command.to_owned(),
        (None, Some(argv)) => argv.join(" "),
        (None, None) => command_id.unwrap_or_default().to_owned(),
    }
}

/// Name and value.
pub type Variable = (Vec<u8>, Vec<u8>);

/// Environment variables as the kernel takes them.
pub fn environment(env: Option<BTreeMap<String, String>>) -> Result<Vec<Variable>, ApiError> {
    let env = env.unwrap_or_default();
    check_total_length("env", env.iter().map(|(name, value)| name.len() + 1 + value.len()))?;
    env.into_iter()
        .map(|(name, value)| {
            if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') {
                let display_name: String = name.escape_default().take(64).collect();
                return Err(ApiError::invalid(format!("env: `{display_name}` is not a valid variable (no `=` in the name, no NUL)")));
            }
            Ok((name.into_bytes(), value.into_bytes()))
        })
        .collect()
}

/// Checks the total length of the strings before they are processed one by one.
fn check_total_length(field: &str, lengths: impl Iterator<Item = usize>) -> Result<(), ApiError> {
    match lengths.map(|length| length + STRING_OVERHEAD_BYTES).sum::<usize>() > MAX_EXEC_ARGS_BYTES {
        true => {
            Err(too_large(&format!("{field} (counting {STRING_OVERHEAD_BYTES} extra bytes for each string)"), MAX_EXEC_ARGS_BYTES as u64))
        }
        false => Ok(()),
    }
}

/// The working directory; must be absolute, so that it means the same to every process.
pub fn working_directory(cwd: Option<String>) -> Result<Option<Vec<u8>>, ApiError> {
    match cwd {
        Some(cwd) if !cwd.starts_with('/') => Err(ApiError::invalid("cwd must be an absolute path in the sandbox")),
        Some(cwd) => reject_nul("cwd", cwd).map(Some),
        None => Ok(None),
    }
}

pub fn reject_nul(field: &str, value: String) -> Result<Vec<u8>, ApiError> {
    if value.contains('\0') {
        return Err(ApiError::invalid(format!("{field} contains a NUL character")));
    }
    Ok(value.into_bytes())
}

fn parse_timeout(seconds: Option<f64>, default: Duration) -> Result<Duration, ApiError> {
    match seconds {
        None => Ok(default),
        Some(0.0) => Ok(MAX_TIMEOUT),
        Some(s) if s.is_finite() && s > 0.0 => Ok(Duration::from_secs_f64(s.min(MAX_TIMEOUT.as_secs_f64()))),
        Some(_) => Err(ApiError::invalid("timeout_seconds must be a non-negative number of seconds")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(c: &str) -> ExecRequest {
        ExecRequest { command: Some(c.into()), ..Default::default() }
    }

    fn parse(request: ExecRequest) -> Result<OneShotSpec, ApiError> {
        OneShotSpec::new(request, &DataplaneLimits::default())
    }

    #[test]
    fn a_command_is_run_by_a_shell_and_argv_directly() {
        let spec = parse(command("echo hi")).unwrap();
        assert_eq!(spec.program.argv, [b"/bin/sh".to_vec(), b"-c".to_vec(), b"echo hi".to_vec()]);
        assert_eq!(spec.timeout, DEFAULT_TIMEOUT);
        let argv = ExecRequest { argv: Some(vec!["ls".into(), "-l".into()]), ..Default::default() };
        assert_eq!(parse(argv).unwrap().program.argv, [b"ls".to_vec(), b"-l".to_vec()]);
    }

    #[test]
    fn an_invalid_request_is_refused_with_the_name_of_its_field() {
        let cases = [
            (ExecRequest::default(), "command or argv"),
            (ExecRequest { argv: Some(vec!["ls".into()]), ..command("ls") }, "command and argv"),
            (ExecRequest { argv: Some(vec![]), ..Default::default() }, "argv[0]"),
            (ExecRequest { cwd: Some("relative".into()), ..command("ls") }, "cwd"),
            (ExecRequest { env: Some([("A=B".to_owned(), "c".to_owned())].into()), ..command("ls") }, "env"),
            (ExecRequest { timeout_seconds: Some(-1.0), ..command("ls") }, "timeout_seconds"),
            (ExecRequest { timeout_seconds: Some(f64::NAN), ..command("ls") }, "timeout_seconds"),
            (command("a\0b"), "command"),
            (ExecRequest { stdin_b64: Some("%".into()), ..command("cat") }, "stdin_b64"),
            (ExecRequest { stdin: Some(String::new()), stdin_b64: Some(String::new()), ..command("cat") }, "stdin and stdin_b64"),
        ];
        for (request, named) in cases {
            let error = parse(request).err().unwrap();
            assert!(error.message.contains(named), "{named}: {error}");
        }
    }

    #[test]
    fn too_many_arguments_or_variables_are_refused_by_name() {
        let many = MAX_EXEC_ARGS_BYTES / STRING_OVERHEAD_BYTES + 1;
        let env = (0..many).map(|n| (n.to_string(), String::new())).collect();
        for (request, field) in [
            (ExecRequest { env: Some(env), ..command("ls") }, "env"),
            (ExecRequest { argv: Some(vec![String::new(); many]), ..Default::default() }, "argv"),
        ] {
            let error = parse(request).err().unwrap();
            assert!(error.code == cobox_protocol::ErrorCode::TooLarge && error.message.starts_with(field), "{error}");
        }
    }

    #[test]
    fn requested_limits_are_reduced_to_the_maximum() {
        let request = ExecRequest { timeout_seconds: Some(1e300), max_output_bytes: Some(u64::MAX), ..command("ls") };
        let spec = parse(request).unwrap();
        assert_eq!((spec.timeout, spec.max_output as u64), (MAX_TIMEOUT, DataplaneLimits::default().output_bytes));
        assert_eq!(parse(ExecRequest { timeout_seconds: Some(0.0), ..command("ls") }).unwrap().timeout, MAX_TIMEOUT);
    }
}
