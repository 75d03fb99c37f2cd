//! `cobox share`: whom else a thread's session is open to, and for what.

use std::time::Duration;

use cobox_protocol::{
    Timestamp,
    token::{ShareInfo, ShareRequest},
};
use serde_json::json;

use super::{Outcome, session};
use crate::{context::Context, printer::fields, span::span};

#[derive(Debug, clap::Subcommand)]
#[command(after_help = "\
A share lets one other principal of your workspace into a session that is yours alone (`cobox session ensure --access owner`), as
itself and with at most these capabilities. A session that the whole workspace may use is limited by no share.

Examples:
  cobox share grant demo bob --capability fs_read --expires 2h
  cobox share list demo
  cobox share revoke demo bob")]
pub enum Command {
    /// Let somebody in, or change what they get
    Grant {
        /// A thread, or a session's id (ssn_…)
        #[arg(value_name = "THREAD|SESSION")]
        which: String,
        /// Whom, by the name their keys have
        principal: String,
        /// What they get at most, such as fs_read or exec; may be repeated
        #[arg(long = "capability", value_name = "CAPABILITY", required = true)]
        capabilities: Vec<String>,
        /// When it ends: a number and s, m, h, d or w
        #[arg(long, value_name = "TIME", value_parser = span)]
        expires: Option<Duration>,
    },
    /// Who was let in
    List {
        /// A thread, or a session's id (ssn_…)
        #[arg(value_name = "THREAD|SESSION")]
        which: String,
    },
    /// Take it back: their tokens end at once
    Revoke {
        /// A thread, or a session's id (ssn_…)
        #[arg(value_name = "THREAD|SESSION")]
        which: String,
        principal: String,
    },
}

pub async fn run(command: Command, context: &Context) -> Outcome {
    let client = context.client()?;
    match command {
        Command::Grant { which, principal, capabilities, expires } => {
            let id = session::find(&client, &which).await?;
            let expires_at = expires.map(|after| Timestamp::now().plus(after));
            let request = ShareRequest { principal, capabilities: Some(capabilities), scopes: None, expires_at };
            let share = client.share(&id, &request).await?;
            context.printer.result(&share, || {
                fields(&[
                    ("session", share.session_id.to_string()),
                    ("principal", share.principal.clone()),
                    ("capabilities", share.capabilities.names().join(" ")),
                    ("expires", ends(&share).unwrap_or_else(|| "with the session".to_owned())),
                ])
            })?;
            if !share.is_limit {
                context.printer.note("note: the whole workspace may use this session; the share limits nothing while that is so");
            }
        }
        Command::List { which } => {
            let id = session::find(&client, &which).await?;
            let shares = client.list_shares(&id).await?.items;
            let row = |s: &ShareInfo| {
                let expires = s.expires_at.map_or_else(|| "with the session".to_owned(), |t| context.printer.moment(t));
                vec![
                    s.principal.clone(),
                    s.capabilities.names().join(" "),
                    s.shared_by.clone(),
                    context.printer.moment(s.created_at),
                    expires,
                ]
            };
            let rows: Vec<_> = shares.iter().map(row).collect();
            let header = ["PRINCIPAL", "CAPABILITIES", "BY", "SINCE", "EXPIRES"];
            context.printer.list(&json!({ "items": shares }), &header, &rows, "shared with nobody")?;
        }
        Command::Revoke { which, principal } => {
            let id = session::find(&client, &which).await?;
            let shares = client.list_shares(&id).await?.items;
            let can_still_enter = shares.iter().any(|share| share.principal == principal && !share.is_limit);
            if can_still_enter {
                context
                    .printer
                    .note(&format!("warning: the whole workspace may use this session; {principal} can enter without the share"));
            }
            client.unshare(&id, &principal).await?;
            let revoked = json!({"session_id": id, "principal": principal, "revoked": true, "can_still_enter": can_still_enter});
            context.printer.result(&revoked, || match can_still_enter {
                true => format!("the share of {principal} has ended, and its tokens"),
                false => format!("{principal} is no longer let in"),
            })?;
            if can_still_enter {
                let sandbox = client.get_session(&id).await?.sandbox.id;
                context.printer.note(&format!(
                    "warning: {principal} can still enter: `cobox sandbox set {sandbox} --access owner` keeps everyone but you and operators out"
                ));
            }
        }
    }
    Ok(0)
}

fn ends(share: &ShareInfo) -> Option<String> {
    share.expires_at.map(|t| t.to_string())
}
