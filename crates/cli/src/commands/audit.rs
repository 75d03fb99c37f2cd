//! `cobox audit`: shows the audit records and verifies that they are complete and unchanged. For operators.

use cobox_broker::audit_hash::{Fault, KeptHead, Verifier};
use cobox_client::{AuditFilter, Client};
use cobox_protocol::audit::{AuditEntry, AuditHead};
use serde_json::json;

use super::Outcome;
use crate::{context::Context, failure::Failure, printer::visible};

/// Records per request.
const PAGE_SIZE: u32 = 100;
/// Links per request: a chain may have millions.
const LINKS_PER_REQUEST: u32 = 1000;
/// The chain alone can't show that its end is missing.
const UNKNOWN_WITHOUT_HEAD: &str = "no saved head was given, so verification can't detect removed newest records, a chain \
    that was rewritten from its beginning, or an older copy of the database; save `cobox audit head` elsewhere and pass it with --head";
/// Exit code when verification finds a fault in the audit chain.
const EXIT_BROKEN: u8 = 1;

#[derive(Debug, clap::Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "\
Examples:
  cobox audit
  cobox audit --sandbox demo --limit 20
  cobox audit --token tok_01j8xq6x0ye8rf2zt9n5b3c7dm
  cobox audit --json | jq '.items[] | select(.action == \"token.issued\")'
  cobox audit head > elsewhere/head
  cobox audit verify --head \"$(cat elsewhere/head)\"

Records of type `sandbox.claim` were reported by a sandbox and are not verified. All others were recorded by the broker."
)]
pub struct AuditArgs {
    #[command(subcommand)]
    command: Option<AuditCommand>,
    /// Only records about this sandbox, by name or ID; by ID if the sandbox was deleted
    #[arg(long, value_name = "NAME|ID")]
    sandbox: Option<String>,
    /// Only records about the token with this ID (jti): its issue and each use
    #[arg(long, value_name = "JTI")]
    token: Option<String>,
    /// Maximum number of records
    #[arg(long, default_value_t = 50, value_name = "COUNT")]
    limit: u32,
}

#[derive(Debug, clap::Subcommand)]
pub enum AuditCommand {
    /// Print the newest hash of each broker's audit chain; save it where database administrators can't change it
    Head,
    /// Verify that no record is missing or changed; otherwise exits with 1 and prints the first fault
    Verify {
        /// A saved head, as printed by `cobox audit head`; may be repeated, or contain several lines
        #[arg(long = "head", value_name = "WRITER:NUMBER:HASH")]
        heads: Vec<String>,
    },
    /// Export all records with their hashes as JSON lines, oldest first; other workspaces' records are exported as
    /// hashes only
    Export,
}

pub async fn run(args: AuditArgs, context: &Context) -> Outcome {
    let client = context.client()?;
    match args.command {
        None => list(args, context, &client).await,
        Some(AuditCommand::Head) => head(context, &client).await,
        Some(AuditCommand::Verify { heads }) => verify(context, &client, &heads).await,
        Some(AuditCommand::Export) => export(context, &client).await,
    }
}

async fn list(args: AuditArgs, context: &Context, client: &Client) -> Outcome {
    let filter = AuditFilter { sandbox: args.sandbox, token: args.token };
    let mut entries: Vec<AuditEntry> = Vec::new();
    let mut cursor: Option<String> = None;
    while (entries.len() as u64) < u64::from(args.limit) {
        let remaining = args.limit - u32::try_from(entries.len()).unwrap_or(args.limit);
        let page = client.list_audit(&filter, Some(remaining.min(PAGE_SIZE)), cursor.as_deref()).await?;
        entries.extend(page.items);
        match page.next_cursor {
            Some(next) if cursor.as_ref() != Some(&next) => cursor = Some(next),
            _ => break,
        }
    }
    let rows: Vec<Vec<String>> = entries
        .iter()
        .map(|e| {
            let principal = match (&e.principal, &e.actor) {
                (Some(principal), Some(actor)) => format!("{principal} ({actor})"),
                (principal, _) => principal.clone().unwrap_or_default(),
            };
            vec![context.printer.moment(e.at), e.action.clone(), principal, e.detail.clone().unwrap_or_default()]
        })
        .collect();
    context.printer.list(&json!({ "items": entries }), &["WHEN", "ACTION", "WHO", "DETAIL"], &rows, "no records yet")?;
    Ok(0)
}

async fn head(context: &Context, client: &Client) -> Outcome {
    let heads = client.audit_heads().await?;
    let lines: Vec<String> = heads.items.iter().map(|h| visible(&format!("{}:{}:{}", h.writer, h.number, h.hash))).collect();
    context.printer.result(&heads, || lines.join("\n"))?;
    Ok(0)
}

async fn verify(context: &Context, client: &Client, saved_heads: &[String]) -> Outcome {
    let saved_heads: Vec<KeptHead> = saved_heads
        .iter()
        .flat_map(|text| text.lines())
        .filter(|line| !line.trim().is_empty())
        .map(|line| line.parse().map_err(|e| Failure::new(format!("--head: {e}"))))
        .collect::<Result<_, _>>()?;
    let heads = client.audit_heads().await?.items;
    let mut chains = Vec::new();
    let mut messages = Vec::new();
    let mut faults: Vec<Fault> = Vec::new();
    for head in &heads {
        let mut head = head.clone();
        let mut verifier = verify_chain(client, &head, &saved_heads).await?;
        if !verifier.faults.is_empty() {
            // A fault is expected if retention removed the oldest records during the walk: repeat it with the new
            // beginning.
            let updated = client.audit_heads().await?.items.into_iter().find(|h| h.writer == head.writer);
            if let Some(updated) = updated.filter(|h| h.kept_after > head.kept_after) {
                verifier = verify_chain(client, &updated, &saved_heads).await?;
                head = updated;
            }
        }
        for number in &verifier.too_old {
            messages.push(format!(
                "note: head {number} of {} is older than the retained records, which begin after {}",
                head.writer, head.kept_after
            ));
        }
        if verifier.faults.is_empty() {
            messages.push(format!("ok: {} records of {}, {} to {}", verifier.checked, head.writer, head.kept_after + 1, head.number));
        }
        let fault_messages: Vec<String> = verifier.faults.iter().map(Fault::to_string).collect();
        messages.extend(fault_messages.iter().map(|f| format!("broken: {f}")));
        chains.push(json!({
            "writer": head.writer, "checked": verifier.checked, "number": head.number, "hash": head.hash, "faults": fault_messages,
            "kept_after": head.kept_after, "heads_too_old": verifier.too_old,
        }));
        faults.extend(verifier.faults);
    }
    for saved_head in saved_heads.iter().filter(|k| heads.iter().all(|h| h.writer != k.writer)) {
        let fault = Fault::NoChain { writer: saved_head.writer.clone() };
        messages.push(format!("broken: {fault}"));
        chains.push(json!({ "writer": saved_head.writer, "checked": 0, "faults": [fault.to_string()] }));
        faults.push(fault);
    }
    let is_ok = faults.is_empty();
    let unknown = saved_heads.is_empty().then_some(UNKNOWN_WITHOUT_HEAD);
    messages.extend(unknown.map(|unknown| format!("note: {unknown}")));
    let messages: Vec<String> = messages.iter().map(|w| visible(w)).collect();
    context.printer.result(&json!({ "ok": is_ok, "chains": chains, "unknown": unknown }), || messages.join("\n"))?;
    Ok(if is_ok { 0 } else { EXIT_BROKEN })
}

/// Verifies every link up to the given head. Records written during the walk are left for the next verification.
async fn verify_chain(client: &Client, head: &AuditHead, saved_heads: &[KeptHead]) -> Result<Verifier, Failure> {
    let mut verifier = Verifier::new(head, saved_heads);
    loop {
        let links = client.audit_links(&head.writer, verifier.last(), LINKS_PER_REQUEST).await?;
        let Some(newest) = links.last().map(|l| l.number) else { break };
        links.iter().filter(|l| l.number <= head.number).for_each(|link| verifier.take(link));
        if newest >= head.number {
            break;
        }
    }
    verifier.finish(head);
    Ok(verifier)
}

async fn export(context: &Context, client: &Client) -> Outcome {
    for head in client.audit_heads().await?.items {
        let mut after = head.kept_after;
        loop {
            let links = client.audit_links(&head.writer, after, LINKS_PER_REQUEST).await?;
            let Some(newest) = links.last().map(|l| l.number).filter(|n| *n > after) else { break };
            after = newest;
            let mut lines = String::new();
            for link in links.iter().filter(|l| l.number <= head.number) {
                lines += &serde_json::to_string(link).map_err(anyhow::Error::from)?;
                lines.push('\n');
            }
            match context.printer.stream(lines.as_bytes()) {
                Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => return Ok(0),
                other => other?,
            }
            if newest >= head.number {
                break;
            }
        }
    }
    Ok(0)
}
