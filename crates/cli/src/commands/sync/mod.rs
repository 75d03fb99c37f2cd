//! `cobox sync`: keeps a local folder and a sandbox folder identical in real time, and reports the state of such a
//! sync.

mod control_socket;
mod live;
mod once;
mod report;
mod running_status;
mod state_dir;
mod subcommands;
mod trash;

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
    time::Duration,
};

use cobox_sync::{DEFAULT_DIRECTORY_DELETION_LIMIT, Limits, Mode, Settings, TrashLimits};

pub use self::{running_status::running_sync_status, subcommands::flush_before_exec};
use super::{Outcome, TargetArgs};
use crate::{
    byte_size::parse_byte_size,
    context::Context,
    duration::parse_duration,
    failure::Failure,
    location::{self, Location, RemotePath, WORK_DIR},
    target::Target,
};

#[derive(Debug, clap::Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "\
Runs until Ctrl-C and copies each change to the other side. If both sides changed the same file, neither is overwritten:
`cobox sync status` lists the conflict and `cobox sync resolve` resolves it.
Files that match .gitignore or .coboxignore are not synced. Hidden files are, including .git: add it to .coboxignore to exclude it.
Files that this machine would run automatically, such as .git/hooks, .envrc and .vscode, are downloaded only with --allow-risky.
Local files that the sandbox deletes or replaces are moved to a trash: `cobox sync trash list` lists them and `cobox sync undo` restores them.

Modes:
  two-way-safe    both directions; conflicts must be resolved [default]
  prefer-here     both directions; the local folder wins conflicts
  prefer-sandbox  both directions; the sandbox wins conflicts
  push            to the sandbox only; changes made only there are kept
  pull            from the sandbox only; changes made only here are kept
  mirror          to the sandbox only; files that exist only there are deleted

Examples:
  cobox sync
  cobox sync ~/project demo:/workspace/project
  cobox sync --mode pull . demo:
  cobox sync status
  cobox sync resolve --keep here notes.txt
  cobox sync undo
  cobox sync --once ."
)]
pub struct SyncArgs {
    #[command(subcommand)]
    command: Option<subcommands::SyncCommand>,
    #[command(flatten)]
    options: SyncOptions,
}

#[derive(Debug, clap::Args)]
struct SyncOptions {
    #[command(flatten)]
    target: TargetArgs,
    /// Upload the folder once as an archive, then exit
    #[arg(long, conflicts_with_all = ["mode", "allow_risky", "until_synced", "trash_size", "trash_age", "directory_files"])]
    once: bool,
    /// Direction of the sync and conflict handling
    #[arg(long, value_name = "MODE", default_value_t)]
    mode: Mode,
    /// Also download files that this machine would run automatically
    #[arg(long)]
    allow_risky: bool,
    /// Exit when both sides are in sync, apart from conflicts and problems
    #[arg(long)]
    until_synced: bool,
    /// Size of the trash for local files that are deleted or replaced; the sync halts when it is full
    #[arg(long, value_name = "SIZE", default_value = "4GiB", value_parser = parse_byte_size)]
    trash_size: u64,
    /// Time that files stay in the trash
    #[arg(long, value_name = "TIME", default_value = "7d", value_parser = parse_duration)]
    trash_age: Duration,
    /// Halt if a directory with more files than this disappears
    #[arg(long, value_name = "FILES", default_value_t = DEFAULT_DIRECTORY_DELETION_LIMIT)]
    directory_files: usize,
    /// Allow the folder to be the home directory or /
    #[arg(long)]
    any_folder: bool,
    /// The local folder [default: the current directory]
    #[arg(value_name = "DIR")]
    from: Option<PathBuf>,
    /// The folder in the sandbox: THREAD:/path [default: /workspace of the thread]
    #[arg(value_name = "THREAD:/PATH")]
    to: Option<OsString>,
}

/// The local and the sandbox folder of a sync.
pub struct SyncPair {
    pub folder: PathBuf,
    pub target: Target,
    /// Absolute path in the sandbox.
    pub path: Vec<u8>,
}

pub async fn run(args: SyncArgs, context: &Context) -> Outcome {
    match args.command {
        Some(command) => subcommands::run(command, context).await,
        None => {
            let pair = resolve_pair(&args.options, context).await?;
            match args.options.once {
                true => once::run(pair, context).await,
                false => {
                    let SyncOptions { mode, allow_risky, until_synced, trash_size, trash_age, directory_files, .. } = args.options;
                    let trash = TrashLimits { bytes: trash_size, age: trash_age };
                    let settings = Settings {
                        mode,
                        allow_risky,
                        limits: Limits::default(),
                        once: until_synced,
                        trash,
                        directory_deletion_limit: directory_files,
                    };
                    live::run(pair, settings, context).await
                }
            }
        }
    }
}

async fn resolve_pair(args: &SyncOptions, context: &Context) -> Result<SyncPair, Failure> {
    let folder = args.from.clone().unwrap_or_else(|| PathBuf::from("."));
    match std::fs::metadata(&folder) {
        Ok(meta) if meta.is_dir() => {}
        Ok(_) => return Err(Failure::new(format!("{} is not a folder", folder.display())).with_advice("copy a file with `cobox cp`")),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            return Err(Failure::new(format!("{} does not exist", folder.display())));
        }
        Err(e) => return Err(Failure::new(format!("{}: {e}", folder.display()))),
    }
    if !args.any_folder {
        refuse_home_and_root(&folder)?;
    }
    let to = match &args.to {
        None => RemotePath { target: None, path: WORK_DIR.into(), is_directory: true },
        Some(text) => match location::parse(text) {
            Ok(Location::Remote(remote)) => remote,
            Ok(Location::Local(path)) => {
                return Err(Failure::new(format!("{} is a local path", path.display()))
                    .with_advice("write the sandbox folder as THREAD:/path, or :/path for the default thread"));
            }
            Err(e) => return Err(Failure::new(format!("{}: {e}", text.display()))),
        },
    };
    let target = match to.resolve_target(&args.target, context).await {
        Ok(target) => target,
        // The sync waits for a broker that is unreachable.
        Err(_) => to.target(&args.target)?,
    };
    Ok(SyncPair { folder, target, path: to.path })
}

/// Refuses the home directory and `/`: a home directory holds keys, histories and caches of everything the user does,
/// and files that a sandbox places there may be executed on this machine.
fn refuse_home_and_root(folder: &Path) -> Result<(), Failure> {
    let Ok(folder) = folder.canonicalize() else { return Ok(()) };
    let home = std::env::var_os("HOME").filter(|home| !home.is_empty()).and_then(|home| Path::new(&home).canonicalize().ok());
    let what = match &folder {
        folder if folder.parent().is_none() => "is the root directory of this machine",
        folder if Some(folder) == home.as_ref() => "is your home directory, which contains your keys",
        _ => return Ok(()),
    };
    Err(Failure::new(format!("{} {what}", folder.display())).with_advice("choose a folder in it, or pass --any-folder to sync all of it"))
}
