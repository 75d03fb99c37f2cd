//! `cobox share`: grants other principals access to a thread's session, lists such shares and revokes them.

use std::time::Duration;

use cobox_client::{Client, ClientError};
use cobox_protocol::{
    ErrorCode, SessionId, Timestamp,
    sandbox::SandboxInfo,
    token::{AccessPath, ShareInfo, ShareRequest},
};
use serde_json::json;

use super::{Outcome, session};
use crate::{context::Context, duration::parse_duration, printer::fields};

#[derive(Debug, clap::Subcommand)]
#[command(after_help = "\
A share gives another principal of your workspace access to a session with owner access (`cobox session ensure --access owner`),
with at most the given capabilities. A share does not limit principals that have access without it: the whole workspace if the
sandbox has workspace access, operators, and principals with a share of another session of the same sandbox.

Examples:
  cobox share grant demo bob --capability fs_read --expires 2h
  cobox share list demo
  cobox share revoke demo bob")]
pub enum ShareCommand {
    /// Share a session with a principal, or change an existing share
    Grant {
        /// A thread, or a session ID (ssn_…)
        #[arg(value_name = "THREAD|SESSION")]
        which: String,
        /// Name of the principal
        principal: String,
        /// Capability to grant, such as fs_read or exec; may be repeated
        #[arg(long = "capability", value_name = "CAPABILITY", required = true)]
        capabilities: Vec<String>,
        /// Lifetime of the share: a number and s, m, h, d or w
        #[arg(long, value_name = "TIME", value_parser = parse_duration)]
        expires: Option<Duration>,
    },
    /// List the shares of a session
    List {
        /// A thread, or a session ID (ssn_…)
        #[arg(value_name = "THREAD|SESSION")]
        which: String,
    },
    /// Revoke a share and the tokens issued under it
    Revoke {
        /// A thread, or a session ID (ssn_…)
        #[arg(value_name = "THREAD|SESSION")]
        which: String,
        principal: String,
    },
}

pub async fn run(command: ShareCommand, context: &Context) -> Outcome {
    let client = context.client()?;
    match command {
        ShareCommand::Grant { which, principal, capabilities, expires } => {
            let id = session::find_session(&client, &which).await?;
            let expires_at = expires.map(|after| Timestamp::now().plus(after));
            let request = ShareRequest { principal, capabilities: Some(capabilities), scopes: None, expires_at };
            let share = client.share(&id, &request).await?;
            context.printer.result(&share, || {
                fields(&[
                    ("session", share.session_id.to_string()),
                    ("principal", share.principal.clone()),
                    ("capabilities", share.capabilities.names().join(" ")),
                    ("expires", expiry(&share).unwrap_or_else(|| "with the session".to_owned())),
                ])
            })?;
            if !share.is_limit {
                let paths = AccessPaths::of(&client, &id, &share.principal).await?;
                let description = paths.describe();
                context.printer.note(&format!(
                    "note: {} has access without the share, so the share's limits have no effect: {description}",
                    share.principal
                ));
            }
        }
        ShareCommand::List { which } => {
            let id = session::find_session(&client, &which).await?;
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
            context.printer.list(&json!({ "items": shares }), &header, &rows, "no shares")?;
        }
        ShareCommand::Revoke { which, principal } => {
            let id = session::find_session(&client, &which).await?;
            let before = AccessPaths::of(&client, &id, &principal).await?;
            if !before.paths.is_empty() {
                context.printer.note(&format!("warning: {principal} has access without the share: {}", before.describe()));
            }
            // If there is no share, the error states again that the principal has access.
            client.unshare(&id, &principal).await?;
            let after = AccessPaths::of(&client, &id, &principal).await?;
            let can_still_enter = !after.paths.is_empty();
            let revoked = json!({"session_id": id, "principal": principal, "revoked": true, "can_still_enter": can_still_enter, "access_paths": after.paths});
            context.printer.result(&revoked, || match can_still_enter {
                true => format!("revoked the share of {principal} and its tokens"),
                false => format!("{principal} no longer has access"),
            })?;
            if can_still_enter {
                context.printer.note(&format!("warning: {principal} still has access: {}", after.describe_with_advice()));
            }
        }
    }
    Ok(0)
}

/// Ways in which a principal can use a session's sandbox without a share of the session.
struct AccessPaths {
    paths: Vec<AccessPath>,
    /// The sandbox's name, or its id if it has none.
    sandbox: String,
    principal: String,
}

impl AccessPaths {
    async fn of(client: &Client, session: &SessionId, principal: &str) -> Result<Self, ClientError> {
        let paths = match client.principal_access(session, principal).await {
            Ok(access) => access.access_paths,
            // The principal is not in the workspace: the command's own request reports that.
            Err(e) if e.is(ErrorCode::PrincipalNotFound) => Vec::new(),
            Err(e) => return Err(e),
        };
        let sandbox = match paths.is_empty() {
            true => String::new(),
            false => name_of_sandbox(client, session).await?,
        };
        Ok(Self { paths, sandbox, principal: principal.to_owned() })
    }

    fn describe(&self) -> String {
        let Self { sandbox, principal, .. } = self;
        let describe = |path: &AccessPath| match path {
            AccessPath::WorkspaceAccess => format!("sandbox {sandbox} has workspace access"),
            AccessPath::SandboxOwner => format!("sandbox {sandbox} belongs to {principal}"),
            AccessPath::Operator => format!("{principal} is an operator"),
            AccessPath::Share { session_id } => format!("session {session_id}, which uses the same sandbox, is shared with {principal}"),
            AccessPath::Unknown => "by a rule that this version of cobox does not know".to_owned(),
        };
        self.paths.iter().map(describe).collect::<Vec<_>>().join("; ")
    }

    /// Describes these ways, with the commands that close them.
    fn describe_with_advice(&self) -> String {
        let advice = |path: &AccessPath| match path {
            AccessPath::WorkspaceAccess => {
                Some(format!("`cobox sandbox set {} --access owner` restricts it to its owner and operators", self.sandbox))
            }
            AccessPath::Share { session_id } => Some(format!("`cobox share revoke {session_id} {}` revokes that share", self.principal)),
            AccessPath::SandboxOwner | AccessPath::Operator | AccessPath::Unknown => None,
        };
        let advice: Vec<String> = self.paths.iter().filter_map(advice).collect();
        std::iter::once(self.describe()).chain(advice).collect::<Vec<_>>().join("; ")
    }
}

async fn name_of_sandbox(client: &Client, session: &SessionId) -> Result<String, ClientError> {
    let id = client.get_session(session).await?.sandbox.id;
    match client.get_sandbox(id.as_str()).await {
        Ok(SandboxInfo { name: Some(name), .. }) => Ok(name),
        Ok(_) => Ok(id.to_string()),
        // A session's owner does not necessarily have access to its sandbox.
        Err(e) if e.is(ErrorCode::Forbidden) => Ok(id.to_string()),
        Err(e) => Err(e),
    }
}

fn expiry(share: &ShareInfo) -> Option<String> {
    share.expires_at.map(|t| t.to_string())
}
