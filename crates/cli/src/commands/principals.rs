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
  cobox principals disable ann     every key, sign-in and token of ann ends now
  cobox principals enable ann      new keys may be made; old ones stay ended")]
pub enum PrincipalsCommand {
    /// The principals of a workspace
    List {
        /// Which workspace [default: yours]
        #[arg(long)]
        workspace: Option<String>,
    },
    /// End every key, sign-in and token of somebody, and let nobody in by that name
    Disable(PrincipalArgs),
    /// Let somebody in again, with new keys
    Enable(PrincipalArgs),
}

#[derive(Debug, clap::Args)]
pub struct PrincipalArgs {
    /// What the principal is called
    name: String,
    /// The workspace it belongs to [default: yours]
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
            context.printer.list(&json!({ "items": all }), &header, &rows, "no principals here; `cobox keys create` makes one")?;
        }
        PrincipalsCommand::Disable(PrincipalArgs { name, workspace }) => {
            client.disable_principal(workspace.as_deref(), &name).await?;
            context
                .printer
                .result(&json!({ "name": name, "disabled": true }), || format!("{name} is shut out: every key, sign-in and token ended"))?;
        }
        PrincipalsCommand::Enable(PrincipalArgs { name, workspace }) => {
            client.enable_principal(workspace.as_deref(), &name).await?;
            context
                .printer
                .result(&json!({ "name": name, "disabled": false }), || format!("{name} may come in again; the old keys stay ended"))?;
        }
    }
    Ok(0)
}

fn row(printer: Printer, p: &PrincipalInfo) -> Vec<String> {
    let used = p.last_used_at.map_or_else(|| "never".to_owned(), |t| printer.moment(t));
    let state = if p.disabled_at.is_some() { "disabled" } else { "enabled" };
    vec![p.name.clone(), p.kind.as_str().to_owned(), p.workspace.clone(), p.valid_keys.to_string(), used, state.to_owned()]
}
