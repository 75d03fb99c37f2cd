//! `cobox principals`: lists a workspace's principals, and disables one together with all its keys, sign-ins and
//! tokens.

use cobox_protocol::key::PrincipalInfo;
use serde_json::json;

use super::Outcome;
use crate::{context::Context, printer::Printer};

#[derive(Debug, clap::Subcommand)]
#[command(after_help = "\
Examples:
  cobox principals list
  cobox principals disable ann     revoke every key, sign-in and token of ann
  cobox principals enable ann      allow new keys; old ones stay revoked")]
pub enum PrincipalsCommand {
    /// List the principals of a workspace
    List {
        /// Workspace to list [default: yours]
        #[arg(long)]
        workspace: Option<String>,
    },
    /// Disable a principal: revoke its keys, sign-ins and tokens, and reject new ones
    Disable(PrincipalArgs),
    /// Enable a disabled principal; it needs new keys
    Enable(PrincipalArgs),
}

#[derive(Debug, clap::Args)]
pub struct PrincipalArgs {
    /// Name of the principal
    name: String,
    /// Workspace of the principal [default: yours]
    #[arg(long)]
    workspace: Option<String>,
}

pub async fn run(command: PrincipalsCommand, context: &Context) -> Outcome {
    let client = context.client()?;
    match command {
        PrincipalsCommand::List { workspace } => {
            let mut all: Vec<PrincipalInfo> = Vec::new();
            let mut cursor: Option<String> = None;
            loop {
                let page = client.list_principals(workspace.as_deref(), cursor.as_deref()).await?;
                all.extend(page.items);
                match page.next_cursor {
                    Some(next) if cursor.as_ref() != Some(&next) => cursor = Some(next),
                    _ => break,
                }
            }
            let rows: Vec<_> = all.iter().map(|p| row(context.printer, p)).collect();
            let header = ["NAME", "KIND", "WORKSPACE", "KEYS", "LAST USED", "STATE"];
            context.printer.list(&json!({ "items": all }), &header, &rows, "no principals; create one with `cobox keys create`")?;
        }
        PrincipalsCommand::Disable(PrincipalArgs { name, workspace }) => {
            client.disable_principal(workspace.as_deref(), &name).await?;
            context.printer.result(&json!({ "name": name, "disabled": true }), || {
                format!("disabled {name}; its keys, sign-ins and tokens are revoked")
            })?;
        }
        PrincipalsCommand::Enable(PrincipalArgs { name, workspace }) => {
            client.enable_principal(workspace.as_deref(), &name).await?;
            context.printer.result(&json!({ "name": name, "disabled": false }), || format!("enabled {name}; its old keys stay revoked"))?;
        }
    }
    Ok(0)
}

fn row(printer: Printer, p: &PrincipalInfo) -> Vec<String> {
    let used = p.last_used_at.map_or_else(|| "never".to_owned(), |t| printer.moment(t));
    let state = if p.disabled_at.is_some() { "disabled" } else { "enabled" };
    vec![p.name.clone(), p.kind.as_str().to_owned(), p.workspace.clone(), p.valid_keys.to_string(), used, state.to_owned()]
}
