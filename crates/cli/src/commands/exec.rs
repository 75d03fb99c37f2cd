//! `cobox exec`: runs one command in a sandbox, with its output, its bytes and its exit code as if it had run here.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    io::{IsTerminal, Read},
};

use cobox_client::{Dataplane, Session};
use cobox_protocol::exec::{ExecRequest, ExecResponse, exact_bytes};

use super::{Outcome, Thread};
use crate::{
    context::Context,
    failure::{EXEC_ERROR, Failure},
};

/// Most that `--stdin` reads, in bytes: escaped as JSON, at worst six for one, it still fits what a sandbox takes in one request.
const MAX_STDIN: u64 = 2 * 1024 * 1024;

/// Asked for of each of the two outputs, in bytes; a sandbox may give less, and says so.
const MAX_OUTPUT: u64 = 16 * 1024 * 1024;

#[derive(Debug, clap::Args)]
#[command(
    override_usage = "cobox exec [OPTIONS] -- COMMAND [ARG]...\n       cobox exec [OPTIONS] -c 'SHELL COMMAND'",
    after_help = "\
Examples:
  cobox exec -t demo -- uname -a
  cobox exec -t demo -c 'ls | wc -l'
  cobox exec --cwd /workspace/app --env CI=1 -- make test
  echo hello | cobox exec --stdin -- cat

Exit code: the command's own; 125 when cobox failed before the command ran."
)]
pub struct Args {
    #[command(flatten)]
    thread: Thread,
    /// Use this sandbox, by name or id, instead of a thread's
    #[arg(long, value_name = "NAME")]
    sandbox: Option<String>,
    /// Working directory in the sandbox [default: /workspace]
    #[arg(long, value_name = "DIR")]
    cwd: Option<String>,
    /// Set an environment variable; may be repeated
    #[arg(short, long = "env", value_name = "NAME=VALUE", value_parser = variable)]
    env: Vec<(String, String)>,
    /// End the command after so many seconds
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    timeout: Option<f64>,
    /// Give the command what this one gets on its standard input (UTF-8, up to 2 MiB)
    #[arg(long)]
    stdin: bool,
    /// A command for the sandbox's shell to run
    #[arg(short, value_name = "SHELL COMMAND", conflicts_with = "argv", required_unless_present = "argv")]
    c: Option<String>,
    /// The command and its arguments, run as they are
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
    argv: Vec<OsString>,
}

fn variable(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("it must look like NAME=VALUE".to_owned()),
    }
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(s) if s.is_finite() && s > 0.0 => Ok(s),
        _ => Err("it must be a number of seconds above 0".to_owned()),
    }
}

pub async fn run(args: Args, context: &Context) -> Outcome {
    remote(args, context).await.map_err(|f| f.exit_with(EXEC_ERROR))
}

async fn remote(args: Args, context: &Context) -> Outcome {
    let request = request(&args)?;
    // The session is held until the command ends: it keeps the token fresh.
    let (_session, dataplane) = way_in(&args, context).await?;
    let response = dataplane.exec(&request).await?;
    let code = exit_code(&response);
    if context.printer.is_json() {
        context.printer.result(&response, String::new)?;
        return Ok(code);
    }
    let decode = |text: &str, b64: Option<&str>| {
        exact_bytes(text, b64).map_err(|e| Failure::new(format!("the sandbox's answer has output that is not base64: {e}")))
    };
    context.printer.out(&decode(&response.stdout, response.stdout_b64.as_deref())?)?;
    context.printer.err(&decode(&response.stderr, response.stderr_b64.as_deref())?);
    if response.timed_out {
        context.printer.note(&format!("cobox: the command was ended after its time limit ({} ms)", response.duration_ms));
    }
    if response.truncated {
        context.printer.note("cobox: output was longer than the limit and was cut; redirect it to a file and use `cobox cp`");
    }
    Ok(code)
}

async fn way_in(args: &Args, context: &Context) -> Result<(Option<Session>, Dataplane), Failure> {
    match &args.sandbox {
        Some(name) => {
            let client = context.client()?;
            let sandbox = client.get_sandbox(name).await?;
            Ok((None, client.sandbox(&sandbox.id)))
        }
        None => {
            let session = context.ensure(&args.thread.thread).await?;
            let dataplane = session.dataplane().clone();
            Ok((Some(session), dataplane))
        }
    }
}

fn request(args: &Args) -> Result<ExecRequest, Failure> {
    let text = |arg: &OsString| {
        arg.to_str().map(str::to_owned).ok_or_else(|| {
            Failure::new(format!("the argument {arg:?} is not UTF-8")).advise("put it in a file in the sandbox and name the file instead")
        })
    };
    let argv = args.argv.iter().map(text).collect::<Result<Vec<_>, _>>()?;
    let env: BTreeMap<String, String> = args.env.iter().cloned().collect();
    Ok(ExecRequest {
        command: args.c.clone(),
        argv: (!argv.is_empty()).then_some(argv),
        cwd: args.cwd.clone(),
        env: (!env.is_empty()).then_some(env),
        stdin: if args.stdin { Some(read_stdin()?) } else { None },
        // 0 asks for no limit of its own: a build may take as long as it takes.
        timeout_seconds: Some(args.timeout.unwrap_or(0.0)),
        max_output_bytes: Some(MAX_OUTPUT),
        ..ExecRequest::default()
    })
}

fn read_stdin() -> Result<String, Failure> {
    let stdin = std::io::stdin();
    if stdin.is_terminal() {
        return Err(Failure::new("--stdin was given but standard input is a terminal").advise("pipe something in, or use `cobox shell`"));
    }
    let mut bytes = Vec::new();
    stdin.lock().take(MAX_STDIN + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_STDIN {
        return Err(
            Failure::new("standard input is longer than 2 MiB").advise("copy it in with `cobox cp` and redirect the command from the file")
        );
    }
    String::from_utf8(bytes).map_err(|_| {
        Failure::new("standard input is not UTF-8").advise("copy it in with `cobox cp` and redirect the command from the file")
    })
}

fn exit_code(response: &ExecResponse) -> u8 {
    // A process's exit code has eight bits; a wider one is a sandbox's claim, and not success.
    u8::try_from(response.exit_code).unwrap_or(u8::MAX)
}
