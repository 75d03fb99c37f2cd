//! `cobox audit`: who did what, newest first. For operators.

use cobox_protocol::audit::AuditEntry;
use serde_json::json;

use super::Outcome;
use crate::context::Context;

/// Records asked for at once.
const PAGE: u32 = 100;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  cobox audit
  cobox audit --sandbox demo --limit 20
  cobox audit --json | jq '.items[] | select(.action == \"token.issued\")'

A `sandbox.claim` is what a sandbox says of itself; all others are the broker's own word.")]
pub struct Args {
    /// Only what is about this sandbox, by name or id; an ended one by its id
    #[arg(long, value_name = "NAME|ID")]
    sandbox: Option<String>,
    /// How many records, at most
    #[arg(long, default_value_t = 50, value_name = "COUNT")]
    limit: u32,
}

pub async fn run(args: Args, context: &Context) -> Outcome {
    let client = context.client()?;
    let mut entries: Vec<AuditEntry> = Vec::new();
    let mut cursor: Option<String> = None;
    while (entries.len() as u64) < u64::from(args.limit) {
        let left = args.limit - u32::try_from(entries.len()).unwrap_or(args.limit);
        let page = client.list_audit(args.sandbox.as_deref(), Some(left.min(PAGE)), cursor.as_deref()).await?;
        entries.extend(page.items);
        match page.next_cursor {
            Some(next) if cursor.as_ref() != Some(&next) => cursor = Some(next),
            _ => break,
        }
    }
    let rows: Vec<Vec<String>> = entries
        .iter()
        .map(|e| {
            let who = match (&e.principal, &e.actor) {
                (Some(principal), Some(actor)) => format!("{principal} ({actor})"),
                (principal, _) => principal.clone().unwrap_or_default(),
            };
            vec![context.printer.moment(e.at), e.action.clone(), who, e.detail.clone().unwrap_or_default()]
        })
        .collect();
    context.printer.list(&json!({ "items": entries }), &["WHEN", "ACTION", "WHO", "DETAIL"], &rows, "no records yet")?;
    Ok(0)
}
