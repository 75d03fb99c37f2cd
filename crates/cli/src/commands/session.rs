//! `cobox session`: the broker's record of which sandbox a thread uses.

use cobox_client::{Client, SessionFilter};
use cobox_protocol::{
    ErrorCode, SessionId,
    session::{Access, Mode, NegotiateRequest, NegotiateResponse, RefreshRequest, SessionInfo},
};
use serde_json::json;

use super::Outcome;
use crate::{
    context::Context,
    failure::Failure,
    printer::fields,
    way_in::{asking, no_session},
};

/// Sessions asked for at once.
const PAGE: u32 = 100;

#[derive(Debug, clap::Subcommand)]
#[command(after_help = "\
Examples:
  cobox session ensure demo
  cobox session ensure demo --sandbox dev
  cobox --json session get demo
  cobox session release demo")]
pub enum Command {
    /// The thread's session, made with a sandbox if there is none
    Ensure {
        /// The thread: any name, such as that of a conversation
        #[arg(value_parser = super::thread)]
        thread: String,
        /// Ask for these capabilities only, such as fs_read or exec; may be repeated
        #[arg(long = "capability", value_name = "CAPABILITY")]
        capabilities: Vec<String>,
        /// Who else may attach
        #[arg(long, value_enum)]
        access: Option<AccessArg>,
        /// How long the token should live
        #[arg(long, value_name = "SECONDS")]
        ttl: Option<u32>,
        /// A sandbox that exists, by name or id, for the thread to use
        #[arg(long, value_name = "NAME|ID", conflicts_with_all = ["name", "keep"])]
        sandbox: Option<String>,
        /// Use the sandbox of this name, made if need be
        #[arg(long)]
        name: Option<String>,
        /// A new sandbox is suspended, not ended, when its last session ends
        #[arg(long)]
        keep: bool,
        /// A tag for a new session, to find it by; may be repeated
        #[arg(long = "tag", value_name = "KEY=VALUE", value_parser = super::tag)]
        tags: Vec<(String, String)>,
        /// Print the token too
        #[arg(long)]
        show_token: bool,
    },
    /// The thread's session, if there is one
    Get {
        /// The thread whose session to show
        #[arg(value_parser = super::thread)]
        thread: String,
        /// Print the token too
        #[arg(long)]
        show_token: bool,
    },
    /// The sessions you can use
    List {
        /// Only those with this tag; may be repeated
        #[arg(long = "tag", value_name = "KEY[=VALUE]")]
        tags: Vec<String>,
    },
    /// A fresh token
    Refresh {
        /// A thread, or a session's id (ssn_…)
        #[arg(value_name = "THREAD|SESSION")]
        which: String,
        /// Print the token too
        #[arg(long)]
        show_token: bool,
    },
    /// End a session, its tokens and its sandbox (unless that is named or used elsewhere)
    Release {
        /// A thread, or a session's id (ssn_…)
        #[arg(value_name = "THREAD|SESSION")]
        which: String,
    },
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub enum AccessArg {
    /// Everybody in the workspace
    Workspace,
    /// You and operators
    Owner,
}

impl From<AccessArg> for Access {
    fn from(arg: AccessArg) -> Access {
        match arg {
            AccessArg::Workspace => Access::Workspace,
            AccessArg::Owner => Access::Owner,
        }
    }
}

pub async fn run(command: Command, context: &Context) -> Outcome {
    let client = context.client()?;
    match command {
        Command::Ensure { thread, capabilities, access, ttl, sandbox, name, keep, tags, show_token } => {
            let request = NegotiateRequest {
                requested_capabilities: (!capabilities.is_empty()).then_some(capabilities),
                access: access.map(Access::from),
                ttl,
                sandbox_hint: sandbox,
                name,
                keep: keep.then_some(true),
                tags: tags.into_iter().collect(),
                ..asking(&thread, Mode::Ensure)
            };
            show(context, &client.negotiate(&request).await?, show_token)?;
        }
        Command::Get { thread, show_token } => match client.negotiate(&asking(&thread, Mode::Get)).await {
            Ok(session) => show(context, &session, show_token)?,
            Err(e) if e.is(ErrorCode::SessionNotFound) => return Err(no_session(&thread, e.into())),
            Err(e) => return Err(e.into()),
        },
        Command::List { tags } => list(context, &client, tags).await?,
        Command::Refresh { which, show_token } => {
            let id = find(&client, &which).await?;
            let refreshed = client.refresh(&id, &RefreshRequest::default()).await?;
            context.printer.result(&refreshed, || {
                let mut pairs = vec![("session", id.to_string()), ("token expires", refreshed.expires_at.to_string())];
                if show_token {
                    pairs.push(("token", refreshed.token.expose().to_owned()));
                }
                fields(&pairs)
            })?;
        }
        Command::Release { which } => {
            let id = find(&client, &which).await?;
            client.release(&id).await?;
            context.printer.result(&json!({"session_id": id, "released": true}), || format!("released {id}"))?;
        }
    }
    Ok(0)
}

/// A session by its id, or by its thread.
pub async fn find(client: &Client, which: &str) -> Result<SessionId, Failure> {
    match which.parse() {
        Ok(id) => Ok(id),
        // A list wakes nothing up and mints no token, which releasing has no use for.
        Err(_) => {
            let filter = SessionFilter { thread_id: Some(which.to_owned()), limit: Some(PAGE), ..SessionFilter::default() };
            let found = client.list_sessions(&filter).await?.items;
            found
                .into_iter()
                .find(|s| s.thread_id == which && !s.state.is_ended())
                .map(|s| s.session_id)
                .ok_or_else(|| no_session(which, Failure::new("")))
        }
    }
}

fn show(context: &Context, session: &NegotiateResponse, show_token: bool) -> Result<(), Failure> {
    context.printer.result(session, || {
        let mut pairs = vec![
            ("session", session.session_id.to_string()),
            ("thread", session.thread_id.clone()),
            ("sandbox", session.sandbox.id.to_string()),
            ("provider", session.sandbox.provider.clone()),
            ("state", session.binding.state.word().to_owned()),
            ("capabilities", session.credentials.granted_capabilities.words().join(" ")),
            ("token expires", session.expires_at.to_string()),
            ("lease expires", session.binding.lease_expires_at.to_string()),
            ("url", session.sandbox.http_base_url.clone()),
        ];
        if show_token {
            pairs.push(("token", session.token.expose().to_owned()));
        }
        fields(&pairs)
    })?;
    Ok(())
}

async fn list(context: &Context, client: &Client, tags: Vec<String>) -> Result<(), Failure> {
    let mut sessions: Vec<SessionInfo> = Vec::new();
    let mut filter = SessionFilter { tags, limit: Some(PAGE), ..SessionFilter::default() };
    loop {
        let page = client.list_sessions(&filter).await?;
        sessions.extend(page.items);
        match page.next_cursor {
            Some(cursor) if filter.cursor.as_ref() != Some(&cursor) => filter.cursor = Some(cursor),
            _ => break,
        }
    }
    let row = |s: &SessionInfo| {
        let (session, sandbox) = (s.session_id.to_string(), s.sandbox_id.to_string());
        vec![s.thread_id.clone(), s.state.word().to_owned(), session, sandbox, s.owner.clone(), context.printer.moment(s.last_active_at)]
    };
    let rows: Vec<_> = sessions.iter().map(row).collect();
    let header = ["THREAD", "STATE", "SESSION", "SANDBOX", "OWNER", "LAST ACTIVE"];
    context.printer.list(&json!({ "items": sessions }), &header, &rows, "no sessions yet; `cobox session ensure THREAD` makes one")?;
    Ok(())
}
