//! `cobox keys`: API keys of humans, agents and operators. A key is printed once, at creation.

use std::time::Duration;

use cobox_protocol::{
    KeyId, Timestamp,
    key::{CreateKey, KeyInfo, PrincipalKind},
};
use serde_json::json;

use super::Outcome;
use crate::{
    context::Context,
    duration::parse_duration,
    printer::{Printer, fields},
};

/// Keys per request.
const PAGE_SIZE: u32 = 100;

#[derive(Debug, clap::Subcommand)]
#[command(after_help = "\
Examples:
  cobox keys create ci-agent --kind agent --expires 30d
  cobox keys list
  cobox keys expire key_01j… --in 1d
  cobox keys revoke key_01j…")]
pub enum KeysCommand {
    /// List keys
    List,
    /// Create a key and print it; it can't be shown again
    Create {
        /// Name of the principal
        name: String,
        /// Kind of principal; can't be changed later
        #[arg(long, value_enum)]
        kind: PrincipalKindArg,
        /// Lifetime of the key: a number and s, m, h, d or w
        #[arg(long, value_name = "TIME", value_parser = parse_duration)]
        expires: Option<Duration>,
        /// Workspace of the principal [default: yours]
        #[arg(long)]
        workspace: Option<String>,
    },
    /// Set an expiry for a key, so that a new key can replace it first
    Expire {
        /// The key's ID (key_…)
        #[arg(value_name = "KEY")]
        id: KeyId,
        /// Time until the key expires: a number and s, m, h, d or w
        #[arg(long = "in", value_name = "TIME", value_parser = parse_duration)]
        after: Duration,
    },
    /// Revoke a key and every token issued under it
    Revoke {
        /// The key's ID (key_…)
        #[arg(value_name = "KEY")]
        id: KeyId,
    },
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub enum PrincipalKindArg {
    Human,
    Agent,
    Operator,
}

impl From<PrincipalKindArg> for PrincipalKind {
    fn from(kind: PrincipalKindArg) -> Self {
        match kind {
            PrincipalKindArg::Human => PrincipalKind::Human,
            PrincipalKindArg::Agent => PrincipalKind::Agent,
            PrincipalKindArg::Operator => PrincipalKind::Operator,
        }
    }
}

pub async fn run(command: KeysCommand, context: &Context) -> Outcome {
    let client = context.client()?;
    match command {
        KeysCommand::List => {
            let mut keys: Vec<KeyInfo> = Vec::new();
            let mut cursor: Option<String> = None;
            loop {
                let page = client.list_keys(Some(PAGE_SIZE), cursor.as_deref()).await?;
                keys.extend(page.items);
                match page.next_cursor {
                    Some(next) if cursor.as_ref() != Some(&next) => cursor = Some(next),
                    _ => break,
                }
            }
            let rows: Vec<_> = keys.iter().map(|key| row(context.printer, key)).collect();
            let header = ["KEY", "NAME", "KIND", "WORKSPACE", "CREATED", "LAST USED", "EXPIRES", "STATE"];
            context.printer.list(&json!({ "items": keys }), &header, &rows, "no keys; create one with `cobox keys create`")?;
        }
        KeysCommand::Create { name, kind, expires, workspace } => {
            let expires_at = expires.map(|after| Timestamp::now().plus(after));
            let created = client.create_key(&CreateKey { name, kind: kind.into(), workspace, expires_at }).await?;
            context.printer.result(&created, || {
                fields(&[
                    ("id", created.info.id.to_string()),
                    ("name", created.info.name.clone()),
                    ("kind", created.info.kind.as_str().to_owned()),
                    ("workspace", created.info.workspace.clone()),
                    ("expires", created.info.expires_at.map_or_else(|| "never".to_owned(), |t| t.to_string())),
                    ("api key", created.api_key.expose().to_owned()),
                ])
            })?;
            context.printer.note("Store the key now: it can't be shown again.");
        }
        KeysCommand::Expire { id, after } => {
            let key = client.expire_key(&id, Timestamp::now().plus(after)).await?;
            let at = key.expires_at.map_or_else(String::new, |t| context.printer.moment(t));
            context.printer.result(&key, || format!("{id} expires {at}"))?;
        }
        KeysCommand::Revoke { id } => {
            client.revoke_key(&id).await?;
            context.printer.result(&json!({"id": id, "revoked": true}), || format!("revoked {id}"))?;
        }
    }
    Ok(0)
}

fn row(printer: Printer, key: &KeyInfo) -> Vec<String> {
    let state = match (key.revoked_at, key.expires_at) {
        (Some(_), _) => "revoked",
        (None, Some(at)) if at <= Timestamp::now() => "expired",
        _ => "valid",
    };
    let expires = key.expires_at.map_or_else(|| "never".to_owned(), |t| printer.moment(t));
    let used = key.last_used_at.map_or_else(|| "never".to_owned(), |t| printer.moment(t));
    let (kind, created) = (key.kind.as_str().to_owned(), printer.moment(key.created_at));
    vec![key.id.to_string(), key.name.clone(), kind, key.workspace.clone(), created, used, expires, state.to_owned()]
}
