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
Runs until Ctrl-C. A file saved on one side is on the other within a moment. Where both sides changed the same file nothing is
overwritten: `cobox sync status` lists it and `cobox sync resolve` settles it.
What .gitignore and .coboxignore name stays where it is. Hidden files go too, .git among them: name it in .coboxignore to leave it here.
What would run on this machine by itself, such as .git/hooks, .envrc and .vscode, comes from a sandbox only with --allow-risky.
What the sandbox deletes or replaces here goes to a trash first: `cobox sync undo` puts it back, `cobox sync trash list` shows it.

Modes:
  two-way-safe    both ways; conflicts are left for you [default]
  prefer-here     both ways; this folder wins conflicts
  prefer-sandbox  both ways; the sandbox wins conflicts
  push            to the sandbox only; what was changed only there stays
  pull            from the sandbox only; what was changed only here stays
  mirror          the sandbox becomes this folder; what only it has is deleted

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
    /// Upload the folder once, as one archive, and end
    #[arg(long, conflicts_with_all = ["mode", "allow_risky", "until_synced", "trash_size", "trash_age", "directory_files"])]
    once: bool,
    /// Which side may change which
    #[arg(long, value_name = "MODE", default_value_t)]
    mode: Mode,
    /// Take from the sandbox also what would run on this machine by itself
    #[arg(long)]
    allow_risky: bool,
    /// End when both sides are the same, as far as they can be
    #[arg(long)]
    until_synced: bool,
    /// Size of the trash for what is deleted or replaced here; a full one halts the sync
    #[arg(long, value_name = "SIZE", default_value = "4GiB", value_parser = parse_byte_size)]
    trash_size: u64,
    /// How long it stays in the trash
    #[arg(long, value_name = "TIME", default_value = "7d", value_parser = parse_duration)]
    trash_age: Duration,
    /// Halt when a directory with more files than this disappears
    #[arg(long, value_name = "FILES", default_value_t = DEFAULT_DIRECTORY_DELETION_LIMIT)]
    directory_files: usize,
    /// Also where the folder is the home directory or /
    #[arg(long)]
    any_folder: bool,
    /// The local folder [default: the current one]
    #[arg(value_name = "DIR")]
    from: Option<PathBuf>,
    /// Where it is in the sandbox: THREAD:/path [default: /workspace of the thread]
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
        Ok(_) => return Err(Failure::new(format!("{} is not a folder", folder.display())).with_advice("`cobox cp` copies a file")),
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
                    .with_advice("write the sandbox's as THREAD:/path, or :/path for the default thread"));
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
        folder if folder.parent().is_none() => "is the whole machine",
        folder if Some(folder) == home.as_ref() => "is your home directory, with your keys in it",
        _ => return Ok(()),
    };
    Err(Failure::new(format!("{} {what}", folder.display())).with_advice("name a folder in it, or say --any-folder if you mean all of it"))
}
