//! `cobox sync trash` and `cobox sync undo`: list and restore what sync deleted or replaced in the local folder. They
//! work on the folder itself, whether a sync is running or not; a running one treats restored files as ordinary edits.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Component, Path, PathBuf},
    time::{Duration, SystemTime},
};

use cobox_protocol::Timestamp;
use cobox_sync::{Entry, RestoreReport, RestoreScope, Trash, TrashItem, TrashLimits};
use serde_json::{Value, json};

use super::{
    super::Outcome,
    subcommands::{SyncSelector, find_sync, relative_to_folder},
};
use crate::{
    byte_size::format_byte_size, confirm::confirm, context::Context, duration::parse_duration, failure::Failure, printer::visible,
};

/// Restored files shown to people; `--json` has them all.
const MAX_SHOWN: usize = 20;

#[derive(Debug, clap::Subcommand)]
pub enum TrashCommand {
    /// List local files that sync deleted or replaced, oldest first
    List(SyncSelector),
    /// Restore files; if a path has changed since, the old version is placed next to it
    Restore(RestoreArgs),
    /// Erase the trash
    Empty(EmptyArgs),
}

#[derive(Debug, clap::Args)]
pub struct RestoreArgs {
    #[command(flatten)]
    which: SyncSelector,
    /// Paths or IDs, as listed by `cobox sync trash list`; a path restores its latest version, a folder all files
    /// that were in it
    #[arg(value_name = "PATH|ID", required = true)]
    items: Vec<String>,
}

#[derive(Debug, clap::Args)]
pub struct EmptyArgs {
    #[command(flatten)]
    which: SyncSelector,
    /// Only batches older than this, such as 12h or 3d
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    older_than: Option<Duration>,
    /// Skip the confirmation
    #[arg(long, short = 'y')]
    yes: bool,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Restores the local files that the last batch of changes from the sandbox deleted or replaced. Nothing is overwritten: if a path has
changed since, the old version is placed next to it, for example as notes.restored.md; otherwise the sandbox's version moves to the trash.
If the sync is running, restored files are synced to the sandbox like any other change.

Examples:
  cobox sync undo
  cobox sync undo --since 10m
  cobox sync undo --since 2026-03-01T09:00:00Z")]
pub struct UndoArgs {
    #[command(flatten)]
    which: SyncSelector,
    /// Restore all changes since then: a time such as 2026-03-01T09:00:00Z, or an age such as 10m
    #[arg(long, value_name = "TIME", value_parser = parse_moment)]
    since: Option<SystemTime>,
}

/// Parses an absolute time, or an age such as `10m`.
fn parse_moment(text: &str) -> Result<SystemTime, String> {
    if let Ok(ago) = parse_duration(text) {
        return SystemTime::now().checked_sub(ago).ok_or_else(|| format!("`{text}` is too long ago"));
    }
    let at = Timestamp::try_from(text.to_owned())
        .map_err(|_| format!("`{text}` is neither a time such as 2026-03-01T09:00:00Z nor an age such as 10m"))?;
    Ok(SystemTime::UNIX_EPOCH + Duration::from_secs(u64::try_from(at.unix()).unwrap_or(0)))
}

pub async fn run(command: TrashCommand, context: &Context) -> Outcome {
    match command {
        TrashCommand::List(which) => {
            let items = in_trash(&which, |trash| Ok(trash.items()?)).await?;
            list(&items, context)
        }
        TrashCommand::Restore(RestoreArgs { which, items }) => {
            let (_, config) = find_sync(&which)?;
            let folder = config.folder.clone();
            let report = in_trash(&which, move |trash| {
                let scope = RestoreScope::Items(select_items(&items, &trash.items()?, &folder, std::env::current_dir().ok().as_deref())?);
                Ok(trash.restore(&scope)?)
            });
            print_report(&report.await?, "nothing was restored", context)
        }
        TrashCommand::Empty(args) => empty(args, context).await,
    }
}

pub async fn undo(UndoArgs { which, since }: UndoArgs, context: &Context) -> Outcome {
    let scope = since.map_or(RestoreScope::LastBatch, RestoreScope::Since);
    let report = in_trash(&which, move |trash| Ok(trash.restore(&scope)?)).await?;
    print_report(&report, "nothing to undo", context)
}

/// Runs file operations on the trash of a sync's folder, on a blocking thread.
async fn in_trash<T: Send + 'static>(
    which: &SyncSelector,
    operation_fn: impl FnOnce(&Trash) -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    let (_, config) = find_sync(which)?;
    let operation = move || operation_fn(&Trash::open(&config.folder, TrashLimits::default())?);
    tokio::task::spawn_blocking(operation).await.map_err(|e| Failure::new(e.to_string()))?
}

impl From<cobox_sync::SyncError> for Failure {
    fn from(error: cobox_sync::SyncError) -> Self {
        Failure::new(error.to_string())
    }
}

fn list(items: &[TrashItem], context: &Context) -> Outcome {
    let at = |item: &TrashItem| {
        let since = item.at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Timestamp::from_unix(i64::try_from(since.as_secs()).unwrap_or(i64::MAX))
    };
    let action = |item: &TrashItem| match item {
        TrashItem { is_from_undo: true, .. } => "set aside",
        TrashItem { is_replaced: true, .. } => "replaced",
        _ => "deleted",
    };
    let kind = |item: &TrashItem| if matches!(item.old, Entry::Link { .. }) { "link" } else { "file" };
    let value: Vec<Value> = items
        .iter()
        .map(|item| {
            json!({
                "id": item.id, "batch": item.batch, "at": at(item), "path": item.path.to_string(), "action": action(item).replace(' ', "_"),
                "kind": kind(item), "size": item.size,
            })
        })
        .collect();
    let row = |item: &TrashItem| {
        vec![
            item.id.clone(),
            context.printer.moment(at(item)),
            action(item).to_owned(),
            format_byte_size(item.size),
            visible(&item.path.to_string()),
        ]
    };
    let rows: Vec<Vec<String>> = items.iter().map(row).collect();
    let header = ["ID", "TIME", "ACTION", "SIZE", "PATH"];
    context.printer.list(&json!({ "items": value }), &header, &rows, "the trash is empty")?;
    Ok(0)
}

/// The ids of the latest version of a path and of each path below it.
fn latest_versions(items: &[TrashItem], path: &str) -> Vec<String> {
    let beneath = format!("{}/", path.trim_end_matches('/'));
    let matches_path = |item: &&TrashItem| {
        let shown = item.path.to_string();
        path.is_empty() || shown == path || shown.starts_with(&beneath)
    };
    // Oldest first, so that collecting keeps the latest version of each path.
    let latest: BTreeMap<_, _> = items.iter().filter(matches_path).map(|item| (&item.path, &item.id)).collect();
    latest.into_values().cloned().collect()
}

/// Converts a path relative to the current directory to one relative to the folder. Compares names only, because the
/// file no longer exists.
fn relative_to_current(folder: &Path, current: Option<&Path>, text: &str) -> Option<String> {
    let mut path = PathBuf::new();
    for part in current?.join(text).components() {
        match part {
            Component::ParentDir => drop(path.pop()),
            Component::CurDir => {}
            part => path.push(part),
        }
    }
    path.strip_prefix(folder).ok().map(|path| path.display().to_string())
}

/// The ids of the requested items, which are given as ids or as paths.
fn select_items(requested: &[String], items: &[TrashItem], folder: &Path, current: Option<&Path>) -> Result<BTreeSet<String>, Failure> {
    let mut ids = BTreeSet::new();
    for text in requested {
        if items.iter().any(|item| item.id == *text) {
            ids.insert(text.clone());
            continue;
        }
        // First as a shell path, relative to the current directory, then as the list shows it.
        let candidates = [relative_to_current(folder, current, text), Some(relative_to_folder(folder, text))]
            .into_iter()
            .flatten()
            .filter(|_| !text.is_empty())
            .map(|path| latest_versions(items, &path))
            .collect::<Vec<_>>();
        let Some(found) = candidates.into_iter().find(|found| !found.is_empty()) else {
            return Err(Failure::new(format!("{text} is not in the trash")).with_advice("list its contents with `cobox sync trash list`"));
        };
        ids.extend(found);
    }
    Ok(ids)
}

fn print_report(report: &RestoreReport, nothing: &str, context: &Context) -> Outcome {
    let restored: Vec<Value> = report
        .restored
        .iter()
        .map(|item| json!({"path": item.path.to_string(), "to": item.to.to_string(), "beside": item.path != item.to}))
        .collect();
    let failed: Vec<Value> = report.failed.iter().map(|item| json!({"path": item.path.to_string(), "message": item.reason})).collect();
    context.printer.result(&json!({"restored": restored, "failed": failed}), || {
        let mut lines = match report.restored.len() {
            0 => vec![nothing.to_owned()],
            1 => vec!["restored 1 path:".to_owned()],
            count => vec![format!("restored {count} paths:")],
        };
        lines.extend(report.restored.iter().take(MAX_SHOWN).map(|item| match item.path == item.to {
            true => format!("  {}", visible(&item.path.to_string())),
            false => {
                format!("  {} as {}, because the path has changed since", visible(&item.path.to_string()), visible(&item.to.to_string()))
            }
        }));
        if report.restored.len() > MAX_SHOWN {
            lines.push(format!("  and {} more", report.restored.len() - MAX_SHOWN));
        }
        let failed = |item: &cobox_sync::RestoreFailure| {
            format!("not restored: {}: {}; it is still in the trash", visible(&item.path.to_string()), item.reason)
        };
        lines.extend(report.failed.iter().map(failed));
        lines.join("\n")
    })?;
    Ok(u8::from(!report.failed.is_empty()))
}

async fn empty(EmptyArgs { which, older_than, yes }: EmptyArgs, context: &Context) -> Outcome {
    let (_, config) = find_sync(&which)?;
    let before = older_than.and_then(|age| SystemTime::now().checked_sub(age));
    if !yes {
        let items = in_trash(&which, |trash| Ok(trash.items()?)).await?;
        let affected: Vec<&TrashItem> = items.iter().filter(|item| before.is_none_or(|before| item.at < before)).collect();
        let (count, bytes) = (affected.len(), affected.iter().map(|item| item.size).sum());
        let folder = visible(&config.folder.display().to_string());
        confirm(context, &format!("permanently erase {} in the trash of {folder}?", format_amount(count, bytes)), false)?;
    }
    let emptied = in_trash(&which, move |trash| Ok(trash.empty(before)?)).await?;
    context.printer.result(&json!({"files": emptied.files, "bytes": emptied.bytes}), || {
        format!("erased {} from the trash", format_amount(emptied.files, emptied.bytes))
    })?;
    Ok(0)
}

fn format_amount(files: usize, bytes: u64) -> String {
    format!("{files} file{} ({})", if files == 1 { "" } else { "s" }, format_byte_size(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moment_is_a_time_or_an_age() {
        let ago = SystemTime::now().duration_since(parse_moment("10m").unwrap()).unwrap().as_secs();
        assert!((599..=601).contains(&ago), "{ago}");
        assert_eq!(parse_moment("1970-01-01T00:01:00Z").unwrap(), SystemTime::UNIX_EPOCH + Duration::from_secs(60));
        assert!(parse_moment("yesterday").is_err());
    }

    #[test]
    fn a_path_is_relative_to_the_current_directory_or_to_the_folder() {
        let item = |id: &str, path: &str| TrashItem {
            id: id.to_owned(),
            batch: "b".to_owned(),
            at: SystemTime::UNIX_EPOCH,
            path: cobox_sync::RelPath::new(path.as_bytes()).unwrap(),
            old: Entry::Link { target: b"x".as_slice().into() },
            size: 1,
            is_replaced: false,
            is_from_undo: false,
        };
        let items = [item("1", "src/main.rs"), item("2", "main.rs"), item("3", "src/lib/a.rs"), item("4", "src/lib/a.rs")];
        let restore = |current: &str, text: &str| {
            let selected = select_items(&[text.to_owned()], &items, Path::new("/no/folder"), Some(Path::new(current)));
            selected.map(|ids| ids.into_iter().collect::<Vec<_>>().join(" ")).unwrap_or_default()
        };
        for (current, text, ids) in [
            ("/no/folder/src", "main.rs", "1"),
            ("/no/folder/src", "./main.rs", "1"),
            ("/no/folder/src/lib", "../main.rs", "1"),
            ("/no/folder/src", "../main.rs", "2"),
            ("/no/folder/src", "src/main.rs", "1"),
            ("/no/folder/src", "lib", "4"),
            ("/no/folder/src", ".", "1 4"),
            ("/no/folder", "main.rs", "2"),
            ("/elsewhere", "main.rs", "2"),
            ("/elsewhere", "/no/folder/src/main.rs", "1"),
            ("/no/folder/docs", "none", ""),
            ("/no/folder", "", ""),
        ] {
            assert_eq!(restore(current, text), ids, "{text} in {current}");
        }
    }
}
