//! From a request to what will be run: every field checked, every default filled in.

use std::{collections::BTreeMap, time::Duration};

use cobox_protocol::{ApiError, exec::ExecRequest};

use crate::workload::{Command, Stdio};

/// A command nobody set a time for: a long build ends by itself, a forgotten server doesn't hold a client for ever.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(600);
/// The longest anybody may set, and what 0 means: a day.
const MAX_TIMEOUT: Duration = Duration::from_secs(24 * 3600);
/// Of stdout and of stderr: what fits a model's context many times over.
const DEFAULT_OUTPUT_BYTES: usize = 1024 * 1024;
/// What a request may raise it to; more is cut to this, and `truncated` tells. Larger results belong in files.
const MAX_OUTPUT_BYTES: u64 = 16 * 1024 * 1024;
const DEFAULT_SHELL: &str = "/bin/sh";

pub struct Plan {
    pub command: Command,
    pub stdin: Option<Vec<u8>>,
    pub timeout: Duration,
    pub max_output: usize,
}

impl Plan {
    pub fn new(request: ExecRequest) -> Result<Self, ApiError> {
        let argv = match (request.command, request.argv) {
            (Some(command), None) => {
                let shell = request.shell.unwrap_or_else(|| DEFAULT_SHELL.to_owned());
                vec![text("shell", shell)?, b"-c".to_vec(), text("command", command)?]
            }
            (None, Some(argv)) => {
                if request.shell.is_some() {
                    return Err(ApiError::invalid("shell goes with command, not with argv"));
                }
                argv.into_iter().map(|word| text("argv", word)).collect::<Result<_, _>>()?
            }
            (Some(_), Some(_)) => return Err(ApiError::invalid("command and argv can't both be given")),
            (None, None) => return Err(ApiError::invalid("command or argv is needed")),
        };
        if argv.first().is_none_or(Vec::is_empty) {
            return Err(ApiError::invalid("the program to run (argv[0], or shell) is empty"));
        }
        let stdin = request.stdin.map(String::into_bytes);
        let stdio = Stdio::Pipes { stdin: stdin.is_some() };
        let command = Command { argv, env: environment(request.env)?, cwd: directory(request.cwd)?, stdio };
        Ok(Self {
            command,
            stdin,
            timeout: timeout(request.timeout_seconds)?,
            max_output: request.max_output_bytes.map_or(DEFAULT_OUTPUT_BYTES, |n| n.min(MAX_OUTPUT_BYTES) as usize),
        })
    }
}

/// A name and its value.
pub type Variable = (Vec<u8>, Vec<u8>);

/// Variables as the kernel takes them.
pub fn environment(env: Option<BTreeMap<String, String>>) -> Result<Vec<Variable>, ApiError> {
    env.unwrap_or_default()
        .into_iter()
        .map(|(name, value)| {
            if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') {
                let shown: String = name.escape_default().take(64).collect();
                return Err(ApiError::invalid(format!("env: `{shown}` can't be a variable (no `=` in its name, no NUL)")));
            }
            Ok((name.into_bytes(), value.into_bytes()))
        })
        .collect()
}

/// A working directory: absolute, so that it means the same to everybody.
pub fn directory(cwd: Option<String>) -> Result<Option<Vec<u8>>, ApiError> {
    match cwd {
        Some(cwd) if !cwd.starts_with('/') => Err(ApiError::invalid("cwd must be an absolute path in the sandbox")),
        Some(cwd) => text("cwd", cwd).map(Some),
        None => Ok(None),
    }
}

pub fn text(field: &str, value: String) -> Result<Vec<u8>, ApiError> {
    if value.contains('\0') {
        return Err(ApiError::invalid(format!("{field} has a NUL character in it")));
    }
    Ok(value.into_bytes())
}

fn timeout(seconds: Option<f64>) -> Result<Duration, ApiError> {
    match seconds {
        None => Ok(DEFAULT_TIMEOUT),
        Some(0.0) => Ok(MAX_TIMEOUT),
        Some(s) if s.is_finite() && s > 0.0 => Ok(Duration::from_secs_f64(s.min(MAX_TIMEOUT.as_secs_f64()))),
        Some(_) => Err(ApiError::invalid("timeout_seconds must be a number of seconds, 0 or more")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(c: &str) -> ExecRequest {
        ExecRequest { command: Some(c.into()), ..Default::default() }
    }

    #[test]
    fn a_command_goes_to_a_shell_and_argv_goes_as_it_is() {
        let plan = Plan::new(command("echo hi")).unwrap();
        assert_eq!(plan.command.argv, [b"/bin/sh".to_vec(), b"-c".to_vec(), b"echo hi".to_vec()]);
        assert_eq!(plan.timeout, DEFAULT_TIMEOUT);
        let argv = ExecRequest { argv: Some(vec!["ls".into(), "-l".into()]), ..Default::default() };
        assert_eq!(Plan::new(argv).unwrap().command.argv, [b"ls".to_vec(), b"-l".to_vec()]);
    }

    #[test]
    fn a_request_that_can_not_be_run_names_the_field() {
        let cases = [
            (ExecRequest::default(), "command or argv"),
            (ExecRequest { argv: Some(vec!["ls".into()]), ..command("ls") }, "both"),
            (ExecRequest { argv: Some(vec![]), ..Default::default() }, "argv[0]"),
            (ExecRequest { cwd: Some("relative".into()), ..command("ls") }, "cwd"),
            (ExecRequest { env: Some([("A=B".to_owned(), "c".to_owned())].into()), ..command("ls") }, "env"),
            (ExecRequest { timeout_seconds: Some(-1.0), ..command("ls") }, "timeout_seconds"),
            (ExecRequest { timeout_seconds: Some(f64::NAN), ..command("ls") }, "timeout_seconds"),
            (command("a\0b"), "command"),
        ];
        for (request, named) in cases {
            let error = Plan::new(request).err().unwrap();
            assert!(error.message.contains(named), "{named}: {error}");
        }
    }

    #[test]
    fn limits_are_cut_to_the_largest_allowed() {
        let request = ExecRequest { timeout_seconds: Some(1e300), max_output_bytes: Some(u64::MAX), ..command("ls") };
        let plan = Plan::new(request).unwrap();
        assert_eq!((plan.timeout, plan.max_output as u64), (MAX_TIMEOUT, MAX_OUTPUT_BYTES));
        assert_eq!(Plan::new(ExecRequest { timeout_seconds: Some(0.0), ..command("ls") }).unwrap().timeout, MAX_TIMEOUT);
    }
}
