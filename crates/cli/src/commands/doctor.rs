//! `cobox doctor`: checks what this machine offers for local sandboxes, which protections are weaker, and how to fix
//! that.

use std::path::{Path, PathBuf};

use cobox_broker::{Quarantined, Restored, acknowledge_restored, read_quarantine, read_restored};
use cobox_protocol::Timestamp;
use cobox_provider::local::{Check, CheckStatus};
use serde_json::json;

use super::{HiddenBrokerFlags, Outcome};
use crate::{
    context::{Context, default_data_dir},
    daemon::check_boxd,
    failure::{Failure, GENERAL_ERROR},
    printer::{Printer, Tone, visible},
};

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Run it as the user who runs the broker, on its machine.
Exit code: 0 if sandboxes can run here, even with weaker isolation; 1 if a requirement is missing.")]
pub struct DoctorArgs {
    #[command(flatten)]
    _hidden_flags: HiddenBrokerFlags,
    /// Data directory of the broker to check for quarantined files [default: ~/.local/share/cobox]
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// Acknowledge that the database was restored from a backup, so that it is no longer reported
    #[arg(long)]
    acknowledge_restore: bool,
}

pub async fn run(args: DoctorArgs, context: &Context) -> Outcome {
    let mut checks = tokio::task::spawn_blocking(cobox_provider::local::doctor).await.map_err(anyhow::Error::from)?;
    checks.push(check_boxd()?);
    let data_dir = args.data_dir.or_else(|| default_data_dir(&|name| std::env::var_os(name)));
    if args.acknowledge_restore {
        acknowledge(data_dir.as_deref())?;
    }
    let (quarantine, restored) = match &data_dir {
        Some(dir) => inspect_data_dir(dir)?,
        None => (Vec::new(), None),
    };
    checks.extend(data_dir.as_deref().zip(restored.as_ref()).map(|(dir, restored)| restored_check(dir, restored)));
    checks.extend(data_dir.filter(|_| !quarantine.is_empty()).map(|dir| quarantine_check(&dir, &quarantine)));
    let is_missing = checks.iter().any(|c| c.status == CheckStatus::Missing);
    let items: Vec<_> =
        checks.iter().map(|c| json!({"name": c.name, "status": status_name(c.status), "detail": c.detail, "mend": c.fix})).collect();
    let report = json!({"ok": !is_missing, "checks": items, "quarantine": quarantine, "restored": restored});
    context.printer.result(&report, || format_checks(context.printer, &checks))?;
    Ok(if is_missing { GENERAL_ERROR } else { 0 })
}

fn acknowledge(data_dir: Option<&Path>) -> Result<(), Failure> {
    let no_restored_database = |directory: String| {
        Failure::new(format!("{directory} has no unacknowledged database restore")).with_advice("name it with --data-dir")
    };
    let Some(dir) = data_dir else { return Err(no_restored_database("the default data directory".to_owned())) };
    match acknowledge_restored(dir, Timestamp::now()).map_err(|e| unreadable(dir, &e))? {
        true => Ok(()),
        false => Err(no_restored_database(dir.display().to_string())),
    }
}

/// What the data directory has in quarantine, and whether its database was restored from a backup that no operator acknowledged.
fn inspect_data_dir(data_dir: &Path) -> Result<(Vec<Quarantined>, Option<Restored>), Failure> {
    let failed = |e| unreadable(data_dir, &e);
    let restored = read_restored(data_dir).map_err(failed)?.filter(|r| r.acknowledged_at.is_none());
    Ok((read_quarantine(data_dir).map_err(failed)?, restored))
}

fn unreadable(data_dir: &Path, error: &std::io::Error) -> Failure {
    Failure::new(format!("reading {}: {error}", data_dir.display())).with_advice("run it as the user who runs the broker")
}

fn restored_check(data_dir: &Path, restored: &Restored) -> Check {
    let from = restored.database_at.map_or_else(|| "before its first record".to_owned(), |at| format!("from {at}"));
    let mut detail = format!(
        "the database was restored from a backup {from}, but was in use until {}: {} audit records are lost",
        restored.seen_at,
        restored.last_lost.saturating_sub(restored.first_lost) + 1
    );
    for record in &restored.lost {
        detail += &format!("; lost: {}", visible(&record.to_string()));
    }
    let fix = format!(
        "create lost keys and revocations again if still needed, then run `cobox doctor --acknowledge-restore --data-dir {}`; or stop the \
broker and restore the newer database",
        data_dir.display()
    );
    Check { name: "database".to_owned(), status: CheckStatus::Weaker, detail, fix: Some(fix) }
}

fn quarantine_check(data_dir: &Path, quarantine: &[Quarantined]) -> Check {
    let items: Vec<String> = quarantine.iter().map(|q| format!("{} until {}", q.item, q.until)).collect();
    let dir = data_dir.display();
    let fix = format!(
        "to recover them, stop the broker, restore the database that contains them, and start the broker; the files are in {dir}/sandboxes/ID (disk.img, which \
         mount -o ro,loop opens, or data/upper), {dir}/snapshots/ID and {dir}/volumes/ID; to remove one early, remove its directory"
    );
    let detail = format!("{} not found in the database; files kept in quarantine: {}", format_counts(quarantine), items.join(", "));
    Check { name: "quarantine".to_owned(), status: CheckStatus::Weaker, detail, fix: Some(fix) }
}

/// As in `2 sandboxes and 1 volume`.
fn format_counts(quarantine: &[Quarantined]) -> String {
    let kinds = ["sandbox", "snapshot", "volume"].map(|kind| (kind, quarantine.iter().filter(|q| q.item.kind() == kind).count()));
    let parts = kinds.iter().filter(|(_, count)| *count > 0).map(|(kind, count)| match (*count, *kind) {
        (1, kind) => format!("1 {kind}"),
        (count, "sandbox") => format!("{count} sandboxes"),
        (count, kind) => format!("{count} {kind}s"),
    });
    parts.collect::<Vec<_>>().join(" and ")
}

const fn status_name(status: CheckStatus) -> &'static str {
    match status {
        CheckStatus::Enforced => "holds",
        CheckStatus::Weaker => "weaker",
        CheckStatus::Missing => "missing",
    }
}

fn format_checks(printer: Printer, checks: &[Check]) -> String {
    let width = checks.iter().map(|c| c.name.chars().count()).max().unwrap_or(0);
    let mut lines = Vec::new();
    for check in checks {
        let tone = match check.status {
            CheckStatus::Enforced => Tone::Good,
            CheckStatus::Weaker => Tone::Warn,
            CheckStatus::Missing => Tone::Bad,
        };
        let status = printer.paint(tone, &format!("{:<7}", status_name(check.status)));
        lines.push(format!("{status}  {:<width$}  {}", check.name, check.detail));
        lines.extend(check.fix.iter().map(|fix| format!("{:<7}  {:<width$}  fix: {fix}", "", "")));
    }
    let count = |status| checks.iter().filter(|c| c.status == status).count();
    lines.push(match (count(CheckStatus::Missing), count(CheckStatus::Weaker)) {
        (0, 0) => "This machine can run sandboxes; all checks passed.".to_owned(),
        (0, weaker) => format!("This machine can run sandboxes; {weaker} of {} checks report weaker isolation.", checks.len()),
        (missing, _) => format!("This machine can't run sandboxes: {missing} of {} checks failed.", checks.len()),
    });
    lines.join("\n")
}
