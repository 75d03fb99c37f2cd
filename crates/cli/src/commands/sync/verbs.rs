//! Subcommands for existing syncs: list, status, pause, resume, flush, resolve, diff; undo and trash are in `trash.rs`.

use std::{
    io::Read,
    path::{Path, PathBuf},
    time::Duration,
};

use cobox_sync::Problem;
use futures_util::StreamExt;
use serde_json::{Value, json};

use super::{
    super::Outcome,
    control::{Request, Winner, ask},
    report::{in_words, left_over},
    state::{Config, State},
    trash::{self, TrashVerb, UndoArgs},
};
use crate::{context::Context, duration::parse_seconds, failure::Failure, printer::visible, target::Target};

/// Maximum time for an answer that requires no work.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);
/// Maximum time that an exec waits for files that were saved just before it.
const EXEC_WAITS: Duration = Duration::from_secs(10);
/// Maximum size of a file that is shown as a difference, in bytes.
const MAX_DIFF_BYTES: usize = 1024 * 1024;

#[derive(Debug, clap::Subcommand)]
pub enum Verb {
    /// The syncs of this machine
    List,
    /// How a sync stands: conflicts, problems, what is held back
    Status(Which),
    /// Stop syncing for a while; changes are kept in mind
    Pause(Which),
    /// Go on after a pause, or after a halt
    Resume(ResumeArgs),
    /// Sync what was saved up to now
    Flush(FlushArgs),
    /// Settle conflicts
    Resolve(ResolveArgs),
    /// Show how the two sides of a conflict differ
    Diff(DiffArgs),
    /// Put back what the sandbox deleted or replaced here
    Undo(UndoArgs),
    /// What the sandbox deleted or replaced here: list, restore, empty
    #[command(subcommand)]
    Trash(TrashVerb),
}

#[derive(Debug, clap::Args)]
pub struct Which {
    /// The sync: its folder, one within it, or its id [default: the current folder's]
    #[arg(long = "sync", short = 's', value_name = "DIR|ID")]
    which: Option<PathBuf>,
}

#[derive(Debug, clap::Args)]
pub struct ResumeArgs {
    #[command(flatten)]
    which: Which,
    /// It halted because of deletions: they are right
    #[arg(long)]
    confirm: bool,
}

#[derive(Debug, clap::Args)]
pub struct FlushArgs {
    #[command(flatten)]
    which: Which,
    /// Wait until it is done; fails at once where the sandbox can't be reached
    #[arg(long)]
    wait: bool,
    /// Longest wait: seconds, or such as 90s or 5m
    #[arg(long, value_name = "TIME", value_parser = parse_seconds, requires = "wait")]
    timeout: Option<f64>,
}

#[derive(Debug, clap::Args)]
pub struct ResolveArgs {
    #[command(flatten)]
    which: Which,
    /// Which version stays
    #[arg(long, value_name = "WHICH")]
    keep: Winner,
    /// All conflicts
    #[arg(long, conflicts_with = "paths")]
    all: bool,
    /// The conflicts' paths, as `cobox sync status` shows them
    #[arg(value_name = "PATH", required_unless_present = "all")]
    paths: Vec<String>,
}

#[derive(Debug, clap::Args)]
pub struct DiffArgs {
    #[command(flatten)]
    which: Which,
    /// The conflict's path, as `cobox sync status` shows it
    #[arg(value_name = "PATH")]
    path: String,
}

pub async fn run(verb: Verb, context: &Context) -> Outcome {
    match verb {
        Verb::List => list(context),
        Verb::Status(which) => {
            let (state, config) = find(&which)?;
            let asked = blocking(state.clone(), Request::Status, Some(ANSWER_WITHIN)).await?;
            let is_running = asked.is_some();
            let mut status = asked.or_else(|| state.status()).unwrap_or_else(|| unknown(&config));
            status["running"] = is_running.into();
            context.printer.result(&status, || in_words(&status, is_running))?;
            Ok(0)
        }
        Verb::Pause(which) => told(&which, Request::Pause, Some(ANSWER_WITHIN), context, "paused; `cobox sync resume` goes on").await,
        Verb::Resume(ResumeArgs { which, confirm }) => {
            told(&which, Request::Resume { confirm }, Some(ANSWER_WITHIN), context, "goes on").await
        }
        Verb::Flush(FlushArgs { which, wait, timeout }) => {
            if !wait {
                return told(&which, Request::Flush { wait }, Some(ANSWER_WITHIN), context, "asked for").await;
            }
            let (state, config) = find(&which)?;
            let status = must(blocking(state, Request::Flush { wait }, timeout.map(Duration::from_secs_f64)).await?, &config)?;
            let failures = failures(&status);
            let conflicts = status["conflicts"].as_array().map_or(0, Vec::len);
            context.printer.result(&status, || match failures {
                0 => in_sync_but_for(&[(conflicts, "conflict")]),
                _ => format!("{}\n{}", in_sync_but_for(&[(conflicts, "conflict"), (failures, "problem")]), left_over(&status).join("\n")),
            })?;
            Ok(u8::from(failures > 0))
        }
        Verb::Resolve(ResolveArgs { which, keep, all: _, paths }) => {
            let (state, config) = find(&which)?;
            let paths = paths.iter().map(|p| within(&config.folder, p)).collect();
            let answer = must(blocking(state, Request::Resolve { paths, keep }, Some(ANSWER_WITHIN)).await?, &config)?;
            context.printer.result(&answer, || format!("settled {}", answer["resolved"]))?;
            Ok(0)
        }
        Verb::Diff(args) => diff(&args, context).await,
        Verb::Undo(args) => trash::undo(args, context).await,
        Verb::Trash(verb) => trash::run(verb, context).await,
    }
}

/// Flushes the sync of a sandbox before a command runs there, so that files saved just before are present. Reports a
/// sync that can't be flushed, and doesn't delay the command for it.
pub async fn flush_before(context: &Context, sandbox_id: &str) {
    let is_its = |config: &Config| config.sandbox_id == sandbox_id;
    for (state, config) in State::all().into_iter().filter(|(state, config)| is_its(config) && state.is_running()) {
        if let Err(failure) = blocking(state, Request::Flush { wait: true }, Some(EXEC_WAITS)).await {
            let folder = config.folder.display().to_string();
            context.printer.note(&format!(
                "cobox: {} may not be up to date in the sandbox: {}",
                visible(&folder),
                visible(&failure.message)
            ));
        }
    }
}

async fn told(which: &Which, request: Request, within: Option<Duration>, context: &Context, words: &str) -> Outcome {
    let (state, config) = find(which)?;
    let status = must(blocking(state, request, within).await?, &config)?;
    context.printer.result(&status, || words.to_owned())?;
    Ok(0)
}

fn in_sync_but_for(left: &[(usize, &str)]) -> String {
    let some = |(count, what): &(usize, &str)| format!("{count} {what}{}", if *count == 1 { "" } else { "s" });
    let left: Vec<String> = left.iter().filter(|(count, _)| *count > 0).map(some).collect();
    if left.is_empty() { "in sync".to_owned() } else { format!("in sync, but for {}", left.join(" and ")) }
}

/// Number of problems that must be fixed before both sides can be the same.
fn failures(status: &Value) -> usize {
    let is_failure = |word: &Value| Problem::ALL.iter().any(|problem| problem.is_failure() && *word == *problem.as_str());
    status["problems"].as_array().map_or(0, |problems| problems.iter().filter(|p| is_failure(&p["problem"])).count())
}

async fn blocking(state: State, request: Request, within: Option<Duration>) -> Result<Option<Value>, Failure> {
    tokio::task::spawn_blocking(move || ask(&state, &request, within)).await.map_err(|e| Failure::new(e.to_string()))?
}

fn must(answer: Option<Value>, config: &Config) -> Result<Value, Failure> {
    answer.ok_or_else(|| {
        Failure::new(format!("the sync of {} does not run", config.folder.display())).with_advice(format!(
            "start it with `cobox sync {} {}`",
            config.folder.display(),
            config.place()
        ))
    })
}

fn list(context: &Context) -> Outcome {
    let all = State::all();
    let describe = |state: &State, config: &Config| {
        let is_running = state.is_running();
        let answer = if is_running { ask(state, &Request::Status, Some(ANSWER_WITHIN)).ok().flatten() } else { None };
        let status = answer.or_else(|| state.status()).unwrap_or_else(|| unknown(config));
        let phase = if is_running { status["phase"].as_str().unwrap_or("running").to_owned() } else { "stopped".to_owned() };
        (phase, status["conflicts"].as_array().map_or(0, Vec::len))
    };
    let (mut rows, mut items) = (Vec::new(), Vec::new());
    for (state, config) in &all {
        let (phase, conflicts) = describe(state, config);
        let folder = config.folder.display().to_string();
        rows.push(vec![config.id.clone(), folder, config.place(), config.mode.clone(), phase.clone(), conflicts.to_string()]);
        items.push(json!({
            "id": config.id, "folder": config.folder, "thread": config.thread, "sandbox": config.sandbox, "path": config.path,
            "mode": config.mode, "state": phase, "conflicts": conflicts,
        }));
    }
    let header = ["ID", "FOLDER", "SANDBOX", "MODE", "STATE", "CONFLICTS"];
    context.printer.list(&json!({ "items": items }), &header, &rows, "no folder is synced; `cobox sync` begins one")?;
    Ok(0)
}

fn unknown(config: &Config) -> Value {
    json!({
        "id": config.id, "folder": config.folder, "thread": config.thread, "sandbox": config.sandbox, "path": config.path,
        "mode": config.mode, "phase": "unknown", "files": {"here": null, "sandbox": null, "agreed": 0},
        "conflicts": [], "problems": [], "held_back": [],
    })
}

/// Finds a sync by id, by its folder or by a folder within it; without an argument the current folder's, or the only
/// one there is.
pub fn find(which: &Which) -> Result<(State, Config), Failure> {
    let all = State::all();
    if let Some(id) = which.which.as_ref().and_then(|w| w.to_str())
        && let Some(found) = all.iter().find(|(_, config)| config.id == id)
    {
        return Ok(found.clone());
    }
    let asked = which.which.clone().unwrap_or_else(|| PathBuf::from("."));
    let at = asked.canonicalize().unwrap_or(asked);
    let mut within: Vec<_> = all.iter().filter(|(_, config)| at.starts_with(&config.folder)).collect();
    // Running syncs first, then the nearest enclosing folder.
    within.sort_by_key(|(state, config)| (!state.is_running(), std::cmp::Reverse(config.folder.components().count())));
    match (within.as_slice(), all.as_slice(), &which.which) {
        ([found, ..], ..) => Ok((*found).clone()),
        ([], [only], None) => Ok(only.clone()),
        _ => Err(Failure::new(format!("no sync has {}", at.display())).with_advice("`cobox sync list` shows them; name one with --sync")),
    }
}

/// A path relative to the sync's folder, given in that form or as a shell completes it.
pub fn within(folder: &Path, path: &str) -> String {
    let absolute = Path::new(path).canonicalize().unwrap_or_else(|_| PathBuf::from(path));
    match absolute.strip_prefix(folder) {
        Ok(relative) if !folder.join(path).exists() || Path::new(path).is_absolute() => relative.display().to_string(),
        _ => path.trim_start_matches("./").to_owned(),
    }
}

/// Reads just enough to detect that a file is too large.
fn read_some(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    std::fs::File::open(path)?.take(MAX_DIFF_BYTES as u64 + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

async fn diff(args: &DiffArgs, context: &Context) -> Outcome {
    let (_, config) = find(&args.which)?;
    let path = within(&config.folder, &args.path);
    let target = match (&config.thread, &config.sandbox) {
        (Some(thread), _) => Target::Thread(thread.clone()),
        (None, Some(sandbox)) => Target::Sandbox(sandbox.clone()),
        (None, None) => return Err(Failure::new("the sync names no sandbox")),
    };
    let here = match read_some(&config.folder.join(&path)) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Vec::new(),
        Err(e) => return Err(Failure::new(format!("{path}: {e}"))),
    };
    let connection = context.open_existing_sandbox(&target).await?;
    let there = match connection.dataplane.read_file(format!("{}/{path}", config.path).as_bytes()).await {
        Ok(file) => {
            let mut bytes = Vec::new();
            let mut chunks = std::pin::pin!(file.into_stream());
            while let Some(chunk) = chunks.next().await {
                bytes.extend_from_slice(&chunk?);
                if bytes.len() > MAX_DIFF_BYTES {
                    break;
                }
            }
            bytes
        }
        Err(e) if e.is(cobox_protocol::ErrorCode::FileNotFound) => Vec::new(),
        Err(e) => return Err(e.into()),
    };
    if here.len() > MAX_DIFF_BYTES || there.len() > MAX_DIFF_BYTES {
        return Err(
            Failure::new(format!("{path} is larger than 1 MiB")).with_advice("copy the sandbox's version with `cobox cp` and compare them")
        );
    }
    let (Ok(here), Ok(there)) = (String::from_utf8(here), String::from_utf8(there)) else {
        return Err(Failure::new(format!("{path} is not text")).with_advice("copy the sandbox's version with `cobox cp` and compare them"));
    };
    let text =
        similar::TextDiff::from_lines(&here, &there).unified_diff().header(&format!("here/{path}"), &format!("sandbox/{path}")).to_string();
    context.printer.result(&json!({"path": path, "diff": text}), || text.lines().map(visible).collect::<Vec<_>>().join("\n"))?;
    Ok(u8::from(!text.is_empty()))
}
