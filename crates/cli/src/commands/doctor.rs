//! `cobox doctor`: what this machine offers for local sandboxes, what is weaker than it could be, and how to mend it.

use cobox_provider::local::{Check, Status};
use serde_json::json;

use super::{NoBroker, Outcome};
use crate::{
    context::Context,
    daemon::check_boxd,
    failure::OWN_ERROR,
    printer::{Printer, Tone},
};

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Run it as the user who runs the broker, on its machine.
Exit code: 0 when sandboxes can run here, also where something is weaker; 1 when something they need is missing.")]
pub struct Args {
    #[command(flatten)]
    _no_broker: NoBroker,
}

pub async fn run(_args: Args, context: &Context) -> Outcome {
    let mut checks = tokio::task::spawn_blocking(cobox_provider::local::doctor).await.map_err(anyhow::Error::from)?;
    checks.push(check_boxd()?);
    let is_missing = checks.iter().any(|c| c.status == Status::Missing);
    let items: Vec<_> =
        checks.iter().map(|c| json!({"name": c.name, "status": word(c.status), "detail": c.detail, "mend": c.mend})).collect();
    context.printer.result(&json!({"ok": !is_missing, "checks": items}), || words(context.printer, &checks))?;
    Ok(if is_missing { OWN_ERROR } else { 0 })
}

const fn word(status: Status) -> &'static str {
    match status {
        Status::Holds => "holds",
        Status::Weaker => "weaker",
        Status::Missing => "missing",
    }
}

fn words(printer: Printer, checks: &[Check]) -> String {
    let width = checks.iter().map(|c| c.name.chars().count()).max().unwrap_or(0);
    let mut lines = Vec::new();
    for check in checks {
        let tone = match check.status {
            Status::Holds => Tone::Good,
            Status::Weaker => Tone::Warn,
            Status::Missing => Tone::Bad,
        };
        let status = printer.paint(tone, &format!("{:<7}", word(check.status)));
        lines.push(format!("{status}  {:<width$}  {}", check.name, check.detail));
        lines.extend(check.mend.iter().map(|mend| format!("{:<7}  {:<width$}  to mend it: {mend}", "", "")));
    }
    let count = |status| checks.iter().filter(|c| c.status == status).count();
    lines.push(match (count(Status::Missing), count(Status::Weaker)) {
        (0, 0) => "Everything sandboxes need is here.".to_owned(),
        (0, weaker) => format!("Sandboxes can run here; {weaker} of {} checks are weaker than they could be.", checks.len()),
        (missing, _) => format!("Sandboxes can't run here: {missing} of {} checks fail.", checks.len()),
    });
    lines.join("\n")
}
