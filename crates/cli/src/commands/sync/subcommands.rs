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
    control_socket::{ConflictWinner, Request, query},
    report::{as_text, unsynced_files},
    state_dir::{SyncConfig, SyncStateDir},
    trash::{self, TrashCommand, UndoArgs},
};
use crate::{context::Context, duration::parse_seconds, failure::Failure, printer::visible, target::Target};

/// Maximum time for an answer that requires no work.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum time that an exec waits for files that were saved just before it.
const EXEC_FLUSH_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum size of a file that is shown as a difference, in bytes.
const MAX_DIFF_BYTES: usize = 1024 * 1024;

#[derive(Debug, clap::Subcommand)]
pub enum SyncCommand {
    /// List the syncs of this machine
    List,
    /// Show the state of a sync: conflicts, problems and held-back files
    Status(SyncSelector),
    /// Pause a sync; changes are synced when it resumes
    Pause(SyncSelector),
    /// Resume a paused or halted sync
    Resume(ResumeArgs),
    /// Sync all changes saved so far
    Flush(FlushArgs),
    /// Resolve conflicts
    Resolve(ResolveArgs),
    /// Show the differences between the two versions of a conflict
    Diff(DiffArgs),
    /// Restore local files that the sandbox deleted or replaced
    Undo(UndoArgs),
    /// List, restore or erase local files that the sandbox deleted or replaced
    #[command(subcommand)]
    Trash(TrashCommand),
}

#[derive(Debug, clap::Args)]
pub struct SyncSelector {
    /// The sync: its folder, a path within it, or its ID [default: the current directory's]
    #[arg(long = "sync", short = 's', value_name = "DIR|ID")]
    selector: Option<PathBuf>,
}

#[derive(Debug, clap::Args)]
pub struct ResumeArgs {
    #[command(flatten)]
    which: SyncSelector,
    /// Confirm the deletions that halted the sync
    #[arg(long)]
    confirm: bool,
}

#[derive(Debug, clap::Args)]
pub struct FlushArgs {
    #[command(flatten)]
    which: SyncSelector,
    /// Wait until all changes are synced; fails immediately if the sandbox can't be reached
    #[arg(long)]
    wait: bool,
    /// Maximum time to wait: seconds, or a value such as 90s or 5m
    #[arg(long, value_name = "TIME", value_parser = parse_seconds, requires = "wait")]
    timeout: Option<f64>,
}

#[derive(Debug, clap::Args)]
pub struct ResolveArgs {
    #[command(flatten)]
    which: SyncSelector,
    /// Version to keep
    #[arg(long, value_name = "WHICH")]
    keep: ConflictWinner,
    /// All conflicts
    #[arg(long, conflicts_with = "paths")]
    all: bool,
    /// Paths of the conflicts, as listed by `cobox sync status`
    #[arg(value_name = "PATH", required_unless_present = "all")]
    paths: Vec<String>,
}

#[derive(Debug, clap::Args)]
pub struct DiffArgs {
    #[command(flatten)]
    which: SyncSelector,
    /// Path of the conflict, as listed by `cobox sync status`
    #[arg(value_name = "PATH")]
    path: String,
}

pub async fn run(command: SyncCommand, context: &Context) -> Outcome {
    match command {
        SyncCommand::List => list(context),
        SyncCommand::Status(which) => {
            let (state, config) = find_sync(&which)?;
            let answer = query_blocking(state.clone(), Request::Status, Some(ANSWER_TIMEOUT)).await?;
            let is_running = answer.is_some();
            let mut status = answer.or_else(|| state.status()).unwrap_or_else(|| unknown_status(&config));
            status["running"] = is_running.into();
            context.printer.result(&status, || as_text(&status, is_running))?;
            Ok(0)
        }
        SyncCommand::Pause(which) => {
            send_and_report(&which, Request::Pause, Some(ANSWER_TIMEOUT), context, "paused; continue with `cobox sync resume`").await
        }
        SyncCommand::Resume(ResumeArgs { which, confirm }) => {
            send_and_report(&which, Request::Resume { confirm }, Some(ANSWER_TIMEOUT), context, "resumed").await
        }
        SyncCommand::Flush(FlushArgs { which, wait, timeout }) => {
            if !wait {
                return send_and_report(&which, Request::Flush { wait }, Some(ANSWER_TIMEOUT), context, "flush requested").await;
            }
            let (state, config) = find_sync(&which)?;
            let status =
                require_running(query_blocking(state, Request::Flush { wait }, timeout.map(Duration::from_secs_f64)).await?, &config)?;
            let failures = failures(&status);
            let conflicts = status["conflicts"].as_array().map_or(0, Vec::len);
            context.printer.result(&status, || match failures {
                0 => in_sync_except(&[(conflicts, "conflict")]),
                _ => {
                    format!("{}\n{}", in_sync_except(&[(conflicts, "conflict"), (failures, "problem")]), unsynced_files(&status).join("\n"))
                }
            })?;
            Ok(u8::from(failures > 0))
        }
        SyncCommand::Resolve(ResolveArgs { which, keep, all: _, paths }) => {
            let (state, config) = find_sync(&which)?;
            let paths = paths.iter().map(|p| relative_to_folder(&config.folder, p)).collect();
            let answer = require_running(query_blocking(state, Request::Resolve { paths, keep }, Some(ANSWER_TIMEOUT)).await?, &config)?;
            context.printer.result(&answer, || format!("resolved {}", answer["resolved"]))?;
            Ok(0)
        }
        SyncCommand::Diff(args) => diff(&args, context).await,
        SyncCommand::Undo(args) => trash::undo(args, context).await,
        SyncCommand::Trash(command) => trash::run(command, context).await,
    }
}

/// Flushes the sync of a sandbox before a command runs there, so that files saved just before are present. Reports a
/// sync that can't be flushed, and doesn't delay the command for it.
pub async fn flush_before_exec(context: &Context, sandbox_id: &str) {
    let is_same = |config: &SyncConfig| config.sandbox_id == sandbox_id;
    for (state, config) in SyncStateDir::all().into_iter().filter(|(state, config)| is_same(config) && state.is_running()) {
        if let Err(failure) = query_blocking(state, Request::Flush { wait: true }, Some(EXEC_FLUSH_TIMEOUT)).await {
            let folder = config.folder.display().to_string();
            context.printer.note(&format!(
                "cobox: {} may not be up to date in the sandbox: {}",
                visible(&folder),
                visible(&failure.message)
            ));
        }
    }
}

async fn send_and_report(which: &SyncSelector, request: Request, timeout: Option<Duration>, context: &Context, message: &str) -> Outcome {
    let (state, config) = find_sync(which)?;
    let status = require_running(query_blocking(state, request, timeout).await?, &config)?;
    context.printer.result(&status, || message.to_owned())?;
    Ok(0)
}

fn in_sync_except(remaining: &[(usize, &str)]) -> String {
    let count_of = |(count, noun): &(usize, &str)| format!("{count} {noun}{}", if *count == 1 { "" } else { "s" });
    let remaining: Vec<String> = remaining.iter().filter(|(count, _)| *count > 0).map(count_of).collect();
    if remaining.is_empty() { "in sync".to_owned() } else { format!("in sync, except for {}", remaining.join(" and ")) }
}

/// Number of problems that must be fixed before both sides can be the same.
fn failures(status: &Value) -> usize {
    let is_failure = |code: &Value| Problem::ALL.iter().any(|problem| problem.is_failure() && *code == *problem.as_str());
    status["problems"].as_array().map_or(0, |problems| problems.iter().filter(|p| is_failure(&p["problem"])).count())
}

async fn query_blocking(state: SyncStateDir, request: Request, timeout: Option<Duration>) -> Result<Option<Value>, Failure> {
    tokio::task::spawn_blocking(move || query(&state, &request, timeout)).await.map_err(|e| Failure::new(e.to_string()))?
}

fn require_running(answer: Option<Value>, config: &SyncConfig) -> Result<Value, Failure> {
    answer.ok_or_else(|| {
        Failure::new(format!("the sync of {} is not running", config.folder.display())).with_advice(format!(
            "start it with `cobox sync {} {}`",
            config.folder.display(),
            config.location()
        ))
    })
}

fn list(context: &Context) -> Outcome {
    let all = SyncStateDir::all();
    let describe = |state: &SyncStateDir, config: &SyncConfig| {
        let is_running = state.is_running();
        let answer = if is_running { query(state, &Request::Status, Some(ANSWER_TIMEOUT)).ok().flatten() } else { None };
        let status = answer.or_else(|| state.status()).unwrap_or_else(|| unknown_status(config));
        let phase = if is_running { status["phase"].as_str().unwrap_or("running").to_owned() } else { "stopped".to_owned() };
        (phase, status["conflicts"].as_array().map_or(0, Vec::len))
    };
    let (mut rows, mut items) = (Vec::new(), Vec::new());
    for (state, config) in &all {
        let (phase, conflicts) = describe(state, config);
        let folder = config.folder.display().to_string();
        rows.push(vec![config.id.clone(), folder, config.location(), config.mode.clone(), phase.clone(), conflicts.to_string()]);
        items.push(json!({
            "id": config.id, "folder": config.folder, "thread": config.thread, "sandbox": config.sandbox, "path": config.path,
            "mode": config.mode, "state": phase, "conflicts": conflicts,
        }));
    }
    let header = ["ID", "FOLDER", "SANDBOX", "MODE", "STATE", "CONFLICTS"];
    context.printer.list(&json!({ "items": items }), &header, &rows, "no syncs; start one with `cobox sync`")?;
    Ok(0)
}

fn unknown_status(config: &SyncConfig) -> Value {
    json!({
        "id": config.id, "folder": config.folder, "thread": config.thread, "sandbox": config.sandbox, "path": config.path,
        "mode": config.mode, "phase": "unknown", "files": {"here": null, "sandbox": null, "agreed": 0},
        "conflicts": [], "problems": [], "held_back": [],
    })
}

/// Finds a sync by id, by its folder or by a folder within it; without an argument the current folder's, or the only
/// one there is.
pub fn find_sync(selector: &SyncSelector) -> Result<(SyncStateDir, SyncConfig), Failure> {
    let all = SyncStateDir::all();
    if let Some(id) = selector.selector.as_ref().and_then(|text| text.to_str())
        && let Some(found) = all.iter().find(|(_, config)| config.id == id)
    {
        return Ok(found.clone());
    }
    let requested = selector.selector.clone().unwrap_or_else(|| PathBuf::from("."));
    let path = requested.canonicalize().unwrap_or(requested);
    let mut enclosing: Vec<_> = all.iter().filter(|(_, config)| path.starts_with(&config.folder)).collect();
    // Running syncs first, then the nearest enclosing folder.
    enclosing.sort_by_key(|(state, config)| (!state.is_running(), std::cmp::Reverse(config.folder.components().count())));
    match (enclosing.as_slice(), all.as_slice(), &selector.selector) {
        ([found, ..], ..) => Ok((*found).clone()),
        ([], [only], None) => Ok(only.clone()),
        _ => Err(Failure::new(format!("no sync matches {}", path.display()))
            .with_advice("list the syncs with `cobox sync list` and choose one with --sync")),
    }
}

/// A path relative to the sync's folder, given in that form or as a shell completes it.
pub fn relative_to_folder(folder: &Path, path: &str) -> String {
    let absolute = Path::new(path).canonicalize().unwrap_or_else(|_| PathBuf::from(path));
    match absolute.strip_prefix(folder) {
        Ok(relative) if !folder.join(path).exists() || Path::new(path).is_absolute() => relative.display().to_string(),
        _ => path.trim_start_matches("./").to_owned(),
    }
}

/// Reads just enough to detect that a file is too large.
fn read_prefix(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    std::fs::File::open(path)?.take(MAX_DIFF_BYTES as u64 + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

async fn diff(args: &DiffArgs, context: &Context) -> Outcome {
    let (_, config) = find_sync(&args.which)?;
    let path = relative_to_folder(&config.folder, &args.path);
    let target = match (&config.thread, &config.sandbox) {
        (Some(thread), _) => Target::Thread(thread.clone()),
        (None, Some(sandbox)) => Target::Sandbox(sandbox.clone()),
        (None, None) => return Err(Failure::new("the sync has no sandbox")),
    };
    let local = match read_prefix(&config.folder.join(&path)) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Vec::new(),
        Err(e) => return Err(Failure::new(format!("{path}: {e}"))),
    };
    let connection = context.open_existing_sandbox(&target).await?;
    let remote = match connection.dataplane.read_file(format!("{}/{path}", config.path).as_bytes()).await {
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
    if local.len() > MAX_DIFF_BYTES || remote.len() > MAX_DIFF_BYTES {
        return Err(
            Failure::new(format!("{path} is larger than 1 MiB")).with_advice("copy the sandbox's version with `cobox cp` and compare them")
        );
    }
    let (Ok(local), Ok(remote)) = (String::from_utf8(local), String::from_utf8(remote)) else {
        return Err(
            Failure::new(format!("{path} is not a text file")).with_advice("copy the sandbox's version with `cobox cp` and compare them")
        );
    };
    let text = similar::TextDiff::from_lines(&local, &remote)
        .unified_diff()
        .header(&format!("here/{path}"), &format!("sandbox/{path}"))
        .to_string();
    context.printer.result(&json!({"path": path, "diff": text}), || text.lines().map(visible).collect::<Vec<_>>().join("\n"))?;
    Ok(u8::from(!text.is_empty()))
}
