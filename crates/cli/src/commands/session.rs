//! `cobox session`: the broker's record of which sandbox a thread uses.

use cobox_client::{Client, ClientError, EventsFrom, SessionFilter};
use cobox_protocol::{
    ErrorCode, SandboxId, SessionId,
    sandbox::SandboxUsage,
    session::{Access, Mode, NegotiateRequest, NegotiateResponse, RefreshRequest, SessionInfo},
};
use serde_json::json;

use super::{Outcome, exec, shell};
use crate::{
    confirm::{self, confirm},
    context::Context,
    event_printer::{self, FeedEnd},
    failure::Failure,
    printer::fields,
    target::{Target, negotiate_request, no_session_failure},
};

/// Page size of listings.
const PAGE_SIZE: u32 = 100;

#[derive(Debug, clap::Subcommand)]
#[command(after_help = "\
Examples:
  cobox session ensure demo
  cobox session ensure demo --sandbox dev
  cobox --json session get demo
  cobox session release demo --yes")]
pub enum SessionCommand {
    /// Get or create a thread's session and its sandbox
    #[command(after_help = "\
An existing session is not changed: if options differ from it, the command fails and reports the difference.")]
    Ensure {
        /// The thread: any name, for example a conversation's ID
        #[arg(value_parser = super::parse_thread)]
        thread: String,
        /// Capability to request, such as fs_read or exec; may be repeated [default: all that are allowed]
        #[arg(long = "capability", value_name = "CAPABILITY")]
        capabilities: Vec<String>,
        /// Principals with access to the session
        #[arg(long, value_enum)]
        access: Option<AccessArg>,
        /// Lifetime of the token
        #[arg(long, value_name = "SECONDS")]
        ttl: Option<u32>,
        /// Existing sandbox to use, by name or ID
        #[arg(long, value_name = "NAME|ID", conflicts_with_all = ["name", "keep"])]
        sandbox: Option<String>,
        /// Name of the sandbox to use; created if missing
        #[arg(long)]
        name: Option<String>,
        /// Suspend a new sandbox instead of deleting it when its last session ends
        #[arg(long)]
        keep: bool,
        /// Tag of a new session; may be repeated
        #[arg(long = "tag", value_name = "KEY=VALUE", value_parser = super::parse_tag)]
        tags: Vec<(String, String)>,
        /// Template of a new sandbox, as listed by `cobox sandbox templates`
        #[arg(long, value_name = "NAME")]
        template: Option<String>,
        /// Provider of a new sandbox; `auto` lets the broker choose
        #[arg(long, value_name = "NAME")]
        provider: Option<String>,
        /// Print the token, too
        #[arg(long)]
        show_token: bool,
    },
    /// Show a thread's session
    Get {
        /// The thread
        #[arg(value_parser = super::parse_thread)]
        thread: String,
        /// Print the token, too
        #[arg(long)]
        show_token: bool,
    },
    /// List the sessions that you can use
    List {
        /// Only sessions with this tag; may be repeated
        #[arg(long = "tag", value_name = "KEY[=VALUE]")]
        tags: Vec<String>,
    },
    /// Issue a new token
    Refresh {
        /// A thread, or a session ID (ssn_…)
        #[arg(value_name = "THREAD|SESSION")]
        which: String,
        /// Print the token, too
        #[arg(long)]
        show_token: bool,
    },
    /// Extend the lease of a session's sandbox
    Heartbeat {
        /// A thread, or a session ID (ssn_…)
        #[arg(value_name = "THREAD|SESSION")]
        which: String,
    },
    /// Run a command in a session's sandbox, like `cobox exec`
    #[command(
        override_usage = "cobox session exec [OPTIONS] <THREAD|SESSION> -- COMMAND [ARG]...\n       cobox session exec [OPTIONS] <THREAD|SESSION> -c 'SHELL COMMAND'"
    )]
    Exec {
        /// A thread, or a session ID (ssn_…)
        #[arg(value_name = "THREAD|SESSION")]
        which: String,
        #[command(flatten)]
        options: exec::ExecOptions,
    },
    /// Attach to a shell in a session's sandbox, like `cobox shell`
    Connect {
        /// A thread, or a session ID (ssn_…)
        #[arg(value_name = "THREAD|SESSION")]
        which: String,
        #[command(flatten)]
        options: shell::ShellOptions,
    },
    /// Stream a session's events: state changes, participants, file changes and commands
    #[command(after_help = "\
Runs until the session ends, and reconnects if the connection is lost. File events require permission to read files; command events
require permission to run commands or observe shells. Both are reported by the sandbox and not verified.

Examples:
  cobox session events demo
  cobox session events demo --json | jq -r 'select(.type == \"exec\").command'")]
    Events {
        /// A thread, or a session ID (ssn_…)
        #[arg(value_name = "THREAD|SESSION")]
        which: String,
        /// Only new events
        #[arg(long, conflicts_with = "after")]
        new: bool,
        /// Only events after the one with this ID (evt_…)
        #[arg(long, value_name = "EVENT")]
        after: Option<String>,
    },
    /// End a session and its tokens, and delete its sandbox unless it is named, kept or used by another session
    #[command(after_help = "\
Shows the number of files in the sandbox and asks for confirmation. A released sandbox can be restored with `cobox sandbox restore`
for one hour by default (a broker setting), or until one of your new sandboxes would exceed a limit.")]
    Release {
        /// A thread, or a session ID (ssn_…)
        #[arg(value_name = "THREAD|SESSION")]
        which: String,
        /// Skip the confirmation; required without a terminal
        #[arg(long, short)]
        yes: bool,
    },
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub enum AccessArg {
    /// Every principal of the workspace
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

pub async fn run(command: SessionCommand, context: &Context) -> Outcome {
    let client = context.client()?;
    match command {
        SessionCommand::Ensure { thread, capabilities, access, ttl, sandbox, name, keep, tags, template, provider, show_token } => {
            let request = NegotiateRequest {
                requested_capabilities: (!capabilities.is_empty()).then_some(capabilities),
                access: access.map(Access::from),
                ttl,
                sandbox_hint: sandbox,
                name,
                keep: keep.then_some(true),
                tags: tags.into_iter().collect(),
                template,
                provider_preference: provider,
                ..negotiate_request(&thread, Mode::Ensure)
            };
            let session = client.negotiate(&request).await?;
            check_tags(&client, &thread, &session, &request).await?;
            show(context, &session, show_token)?;
        }
        SessionCommand::Get { thread, show_token } => match client.negotiate(&negotiate_request(&thread, Mode::Get)).await {
            Ok(session) => show(context, &session, show_token)?,
            Err(e) if e.is(ErrorCode::SessionNotFound) => return Err(no_session_failure(&thread, e.into())),
            Err(e) => return Err(e.into()),
        },
        SessionCommand::List { tags } => list(context, &client, tags).await?,
        SessionCommand::Refresh { which, show_token } => {
            let id = find_session(&client, &which).await?;
            let refreshed = client.refresh(&id, &RefreshRequest::default()).await?;
            context.printer.result(&refreshed, || {
                let mut pairs = vec![("session", id.to_string()), ("token expires", refreshed.expires_at.to_string())];
                if show_token {
                    pairs.push(("token", refreshed.token.expose().to_owned()));
                }
                fields(&pairs)
            })?;
        }
        SessionCommand::Events { which, new, after } => {
            let id = find_session(&client, &which).await?;
            let from = match after {
                Some(id) => EventsFrom::After(id),
                None if new => EventsFrom::Now,
                None => EventsFrom::Start,
            };
            match event_printer::print_events(context.printer, &mut client.events(&id, from), &mut None).await? {
                FeedEnd::SessionEnded | FeedEnd::OutputClosed => {}
                FeedEnd::Failed(e) => return Err(e.into()),
            }
        }
        SessionCommand::Heartbeat { which } => {
            let id = find_session(&client, &which).await?;
            let heartbeat = client.heartbeat(&id).await?;
            let output = json!({"session_id": id, "state": heartbeat.state, "lease_expires_at": heartbeat.lease_expires_at});
            context.printer.result(&output, || {
                fields(&[
                    ("session", id.to_string()),
                    ("state", heartbeat.state.as_str().to_owned()),
                    ("lease expires", heartbeat.lease_expires_at.to_string()),
                ])
            })?;
        }
        SessionCommand::Exec { which, options } => return exec::run_in(&target(which), options, context).await,
        SessionCommand::Connect { which, options } => return shell::attach(&target(which), options, context).await,
        SessionCommand::Release { which, yes } => {
            let id = find_session(&client, &which).await?;
            let outcome = release_outcome(&client, &id).await?;
            confirm(context, &format!("release {which}? {}", outcome.describe_before()), yes)?;
            client.release(&id).await?;
            if let Some(cache) = context.thread_cache() {
                cache.forget_id(id.as_str());
            }
            let erased = outcome.erased.as_ref().map_or_else(confirm::nothing_erased_json, confirm::erased_json);
            let released = json!({"session_id": id, "sandbox_id": outcome.sandbox, "released": true});
            context.printer.result(&confirm::merge_members(released, erased), || format!("released {id}; {}", outcome.describe_after()))?;
        }
    }
    Ok(0)
}

/// Fails if an existing session lacks a requested tag. The broker accepts such a request, because other clients send
/// their tags with every request.
async fn check_tags(client: &Client, thread: &str, session: &NegotiateResponse, request: &NegotiateRequest) -> Result<(), Failure> {
    if request.tags.is_empty() {
        return Ok(());
    }
    let filter = SessionFilter { thread_id: Some(thread.to_owned()), ..SessionFilter::default() };
    let page = client.list_sessions(&filter).await?;
    let Some(found) = page.items.iter().find(|found| found.session_id == session.session_id) else { return Ok(()) };
    let differs = |(key, value): &(&String, &String)| found.tags.get(*key) != Some(*value);
    let Some((key, value)) = request.tags.iter().find(differs) else { return Ok(()) };
    let actual = found.tags.get(key).map_or("not set", String::as_str);
    let message = format!("thread `{thread}` already has a session, and its tag {key} is {actual}, not {value}");
    Err(Failure::new(message).with_advice("omit --tag to use it; tags are set when a session is created"))
}

/// What happens to a session's sandbox when the session is released.
struct ReleaseOutcome {
    sandbox: SandboxId,
    /// The files to be erased; `None` if the sandbox is kept.
    erased: Option<SandboxUsage>,
}

impl ReleaseOutcome {
    fn describe_before(&self) -> String {
        match &self.erased {
            None => format!("Its sandbox {} and its files are kept.", self.sandbox),
            Some(usage) => {
                format!(
                    "Its sandbox {} has {}; {}.",
                    self.sandbox,
                    confirm::format_usage(usage),
                    confirm::restore_hint(usage, self.sandbox.as_str())
                )
            }
        }
    }

    fn describe_after(&self) -> String {
        match &self.erased {
            None => format!("its sandbox {} and its files are kept", self.sandbox),
            Some(usage) => {
                format!("its sandbox had {}; {}", confirm::format_usage(usage), confirm::restore_hint(usage, self.sandbox.as_str()))
            }
        }
    }
}

async fn release_outcome(client: &Client, session: &SessionId) -> Result<ReleaseOutcome, ClientError> {
    let sandbox = client.get_sandbox(client.get_session(session).await?.sandbox.id.as_str()).await?;
    let is_erased = sandbox.name.is_none() && !sandbox.keep && sandbox.sessions.iter().all(|s| s == session);
    let erased = if is_erased { confirm::usage(client, sandbox.id.as_str()).await? } else { None };
    Ok(ReleaseOutcome { sandbox: sandbox.id, erased })
}

/// Finds a session by its id or its thread.
pub async fn find_session(client: &Client, which: &str) -> Result<SessionId, Failure> {
    match which.parse() {
        Ok(id) => Ok(id),
        Err(_) => session_of_thread(client, which).await?.ok_or_else(|| no_session_failure(which, Failure::new(""))),
    }
}

/// Uses the list request: unlike a negotiation, it neither resumes the sandbox nor issues a token.
pub async fn session_of_thread(client: &Client, thread: &str) -> Result<Option<SessionId>, ClientError> {
    let filter = SessionFilter { thread_id: Some(thread.to_owned()), limit: Some(PAGE_SIZE), ..SessionFilter::default() };
    let found = client.list_sessions(&filter).await?.items;
    Ok(found.into_iter().find(|s| s.thread_id == thread && !s.state.is_ended()).map(|s| s.session_id))
}

/// The target of a command, given by thread or session id.
fn target(which: String) -> Target {
    match which.parse() {
        Ok(id) => Target::Session(id),
        Err(_) => Target::Thread(which),
    }
}

fn show(context: &Context, session: &NegotiateResponse, show_token: bool) -> Result<(), Failure> {
    context.printer.result(session, || {
        let mut pairs = vec![
            ("session", session.session_id.to_string()),
            ("thread", session.thread_id.clone()),
            ("sandbox", session.sandbox.id.to_string()),
            ("provider", session.sandbox.provider.clone()),
            ("state", session.binding.state.as_str().to_owned()),
            ("capabilities", session.credentials.granted_capabilities.names().join(" ")),
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
    let mut filter = SessionFilter { tags, limit: Some(PAGE_SIZE), ..SessionFilter::default() };
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
        vec![s.thread_id.clone(), s.state.as_str().to_owned(), session, sandbox, s.owner.clone(), context.printer.moment(s.last_active_at)]
    };
    let rows: Vec<_> = sessions.iter().map(row).collect();
    let header = ["THREAD", "STATE", "SESSION", "SANDBOX", "OWNER", "LAST ACTIVE"];
    context.printer.list(&json!({ "items": sessions }), &header, &rows, "no sessions; create one with `cobox session ensure THREAD`")?;
    Ok(())
}
