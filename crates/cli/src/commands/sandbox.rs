//! `cobox sandbox`: manages sandboxes, with or without a session.

use std::ffi::OsString;

use clap::{Args as _, FromArgMatches as _};
use cobox_client::{Client, ClientError};
use cobox_protocol::{
    ErrorCode,
    resources::TemplateInfo,
    sandbox::{CreateSandbox, PatchSandbox, RestoreResponse, RestoreSandbox, SandboxInfo, SandboxUsage},
};
use serde_json::json;

use super::{
    Outcome, exec,
    session::{self, AccessArg},
    shell, sync,
};
use crate::{
    confirm::{self, confirm},
    context::Context,
    failure::Failure,
    printer::{Printer, fields, visible},
    target::Target,
};

/// Page size of listings.
const PAGE_SIZE: u32 = 100;

#[derive(Debug, clap::Subcommand)]
#[command(after_help = "\
Examples:
  cobox sandbox create --name build
  cobox exec --sandbox build -- make
  cobox sandbox delete build --yes
  cobox sandbox restore build")]
pub enum SandboxCommand {
    /// List the sandboxes that you can use
    List {
        /// Only sandboxes with this tag, or used by a session with it; may be repeated
        #[arg(long = "tag", value_name = "KEY[=VALUE]")]
        tags: Vec<String>,
        /// List released and deleted sandboxes that can be restored
        #[arg(long, conflicts_with = "tags")]
        deleted: bool,
    },
    /// Create a sandbox without a session
    Create {
        /// Name of the sandbox: letters, digits, `-`, `_` and `.`
        #[arg(long)]
        name: Option<String>,
        /// Principals with access to the sandbox
        #[arg(long, value_enum)]
        access: Option<AccessArg>,
        /// Suspend the sandbox instead of deleting it when its last session ends
        #[arg(long)]
        keep: bool,
        /// Tag of the sandbox; may be repeated
        #[arg(long = "tag", value_name = "KEY=VALUE", value_parser = super::parse_tag)]
        tags: Vec<(String, String)>,
        /// Template, as listed by `cobox sandbox templates`
        #[arg(long, value_name = "NAME")]
        template: Option<String>,
        /// Snapshot to start from
        #[arg(long, value_name = "NAME[:TAG]|ID")]
        snapshot: Option<String>,
    },
    /// List the templates for new sandboxes
    Templates,
    /// Change a sandbox's name, access, tags or retention
    Set {
        /// The sandbox, as listed by `cobox sandbox list`
        #[arg(value_name = "NAME|ID")]
        which: String,
        /// New name
        #[arg(long, conflicts_with = "no_name")]
        name: Option<String>,
        /// Remove the sandbox's name
        #[arg(long)]
        no_name: bool,
        /// Keep the sandbox when its last session ends
        #[arg(long, conflicts_with = "no_keep")]
        keep: bool,
        /// Delete the sandbox when its last session ends
        #[arg(long)]
        no_keep: bool,
        /// Principals with access to the sandbox
        #[arg(long, value_enum)]
        access: Option<AccessArg>,
        /// Tag to add or replace; may be repeated
        #[arg(long = "tag", value_name = "KEY=VALUE", value_parser = super::parse_tag)]
        tags: Vec<(String, String)>,
        /// Tag to remove; may be repeated
        #[arg(long = "untag", value_name = "KEY")]
        untags: Vec<String>,
    },
    /// Show a sandbox
    Get {
        /// The sandbox, as listed by `cobox sandbox list`
        #[arg(value_name = "NAME|ID")]
        which: String,
    },
    /// Run a command in a sandbox; same as `cobox exec --sandbox`
    #[command(
        override_usage = "cobox sandbox exec [OPTIONS] <NAME|ID> -- COMMAND [ARG]...\n       cobox sandbox exec [OPTIONS] <NAME|ID> -c 'SHELL COMMAND'"
    )]
    Exec {
        /// The sandbox, as listed by `cobox sandbox list`
        #[arg(value_name = "NAME|ID")]
        which: String,
        #[command(flatten)]
        options: exec::ExecOptions,
    },
    /// Attach to a shell in a sandbox; same as `cobox shell --sandbox`
    Connect {
        /// The sandbox, as listed by `cobox sandbox list`
        #[arg(value_name = "NAME|ID")]
        which: String,
        #[command(flatten)]
        options: shell::ShellOptions,
    },
    /// Sync a folder with a sandbox; same as `cobox sync --sandbox`
    #[command(
        override_usage = "cobox sandbox sync [GLOBAL OPTIONS] <NAME|ID> [OPTIONS OF SYNC] [DIR [:/PATH]]",
        after_help = "\
`cobox sync --help` lists the options and arguments that may follow the sandbox.

Example:
  cobox sandbox sync build --once . :/workspace/app"
    )]
    Sync {
        /// The sandbox, as listed by `cobox sandbox list`
        #[arg(value_name = "NAME|ID")]
        which: String,
        /// Options and arguments of `cobox sync`
        #[arg(value_name = "ARG", trailing_var_arg = true, allow_hyphen_values = true)]
        rest: Vec<OsString>,
    },
    /// Delete a sandbox and end every session that uses it
    #[command(after_help = "\
Shows the number of files in the sandbox and asks for confirmation. A deleted sandbox can be restored with `cobox sandbox restore`
for one hour by default (a broker setting), or until one of your new sandboxes would exceed a limit.")]
    Delete {
        /// The sandbox, as listed by `cobox sandbox list` or `cobox sandbox list --deleted`
        #[arg(value_name = "NAME|ID")]
        which: String,
        /// Skip the confirmation; required without a terminal
        #[arg(long, short)]
        yes: bool,
        /// Erase the sandbox's files immediately; it can't be restored
        #[arg(long)]
        permanent: bool,
    },
    /// Restore a released or deleted sandbox with its files
    #[command(after_help = "\
A restored sandbox is suspended. The next command of its thread resumes it. If the thread has used another sandbox since, use the
restored one with `--sandbox`, for example `cobox exec --sandbox demo -- ls`. Shares and tokens are not restored.

Examples:
  cobox sandbox list --deleted
  cobox sandbox restore demo")]
    Restore {
        /// The sandbox, or the thread that used it, as listed by `cobox sandbox list --deleted`
        #[arg(value_name = "NAME|ID|THREAD")]
        which: String,
        /// New name, if another sandbox uses the old one
        #[arg(long)]
        name: Option<String>,
    },
}

impl SandboxCommand {
    /// Removes `--json` from the arguments that are parsed later, and returns whether it was there.
    pub fn take_json(&mut self) -> bool {
        let SandboxCommand::Sync { rest, .. } = self else { return false };
        let before = rest.len();
        rest.retain(|arg| arg != "--json");
        rest.len() < before
    }
}

pub async fn run(command: SandboxCommand, context: &Context) -> Outcome {
    let client = context.client()?;
    match command {
        SandboxCommand::List { deleted: true, .. } => {
            let sandboxes = list_deleted(&client).await?;
            let row = |s: &SandboxInfo| {
                let until = s.restore_until.map_or_else(|| "-".to_owned(), |t| context.printer.moment(t));
                let deleted = s.deleted_at.map_or_else(|| "-".to_owned(), |t| context.printer.moment(t));
                vec![s.id.to_string(), s.name.clone().unwrap_or_else(|| "-".to_owned()), threads(s), s.owner.clone(), deleted, until]
            };
            let rows: Vec<_> = sandboxes.iter().map(row).collect();
            let header = ["SANDBOX", "NAME", "THREADS", "OWNER", "DELETED", "RESTORABLE UNTIL"];
            context.printer.list(&json!({ "items": sandboxes }), &header, &rows, "no deleted sandboxes to restore")?;
        }
        SandboxCommand::List { tags, .. } => {
            let mut sandboxes: Vec<SandboxInfo> = Vec::new();
            let mut cursor: Option<String> = None;
            loop {
                let page = client.list_tagged_sandboxes(&tags, Some(PAGE_SIZE), cursor.as_deref()).await?;
                sandboxes.extend(page.items);
                match page.next_cursor {
                    Some(next) if cursor.as_ref() != Some(&next) => cursor = Some(next),
                    _ => break,
                }
            }
            let rows: Vec<_> = sandboxes.iter().map(|s| row(context.printer, s)).collect();
            let header = ["SANDBOX", "NAME", "STATE", "THREADS", "OWNER", "LAST ACTIVE"];
            context.printer.list(&json!({ "items": sandboxes }), &header, &rows, "no sandboxes; create one with `cobox sandbox create`")?;
        }
        SandboxCommand::Create { name, access, keep, tags, template, snapshot } => {
            let (access, keep) = (access.map(Into::into), keep.then_some(true));
            show(
                context,
                &client
                    .create_sandbox(&CreateSandbox {
                        name,
                        access,
                        keep,
                        tags: tags.into_iter().collect(),
                        template,
                        snapshot,
                        ..CreateSandbox::default()
                    })
                    .await?,
            )?;
        }
        SandboxCommand::Set { which, name, no_name, keep, no_keep, access, tags, untags } => {
            let patch = PatchSandbox {
                name: if no_name { Some(None) } else { name.map(Some) },
                keep: (keep || no_keep).then_some(keep),
                access: access.map(Into::into),
                tags: tags.into_iter().map(|(key, value)| (key, Some(value))).chain(untags.into_iter().map(|key| (key, None))).collect(),
                ..Default::default()
            };
            if patch == PatchSandbox::default() {
                return Err(Failure::new("no change requested").with_advice("`cobox sandbox set --help` lists the options"));
            }
            show(context, &client.patch_sandbox(&which, &patch).await?)?;
        }
        SandboxCommand::Templates => {
            let templates = client.list_templates().await?.items;
            let rows: Vec<_> = templates.iter().map(template_row).collect();
            let header = ["TEMPLATE", "IMAGE", "CPUS", "MEMORY", "DISK", "OWNER"];
            context.printer.list(
                &json!({ "items": templates }),
                &header,
                &rows,
                "no templates; an operator can add them to the broker's settings",
            )?;
        }
        SandboxCommand::Get { which } => show(context, &client.get_sandbox(&which).await?)?,
        SandboxCommand::Exec { which, options } => return exec::run_in(&Target::Sandbox(which), options, context).await,
        SandboxCommand::Sync { which, rest } => return sync::run(sync_args(&which, rest), context).await,
        SandboxCommand::Connect { which, options } => return shell::attach(&Target::Sandbox(which), options, context).await,
        SandboxCommand::Delete { which, yes, permanent } => {
            let usage = match client.sandbox_usage(&which).await {
                // A sandbox that is already deleted can still be erased permanently.
                Err(e) if permanent && e.is(ErrorCode::SandboxNotFound) => {
                    client.deleted_sandbox_usage(&which).await.map_err(|missing| {
                        let is_missing = missing.is(ErrorCode::SandboxNotFound);
                        let failure = Failure::from(missing);
                        if is_missing {
                            failure.with_advice("list sandboxes with `cobox sandbox list` or `cobox sandbox list --deleted`")
                        } else {
                            failure
                        }
                    })?
                }
                usage => usage?,
            };
            let usage = SandboxUsage { restorable_seconds: if permanent { 0 } else { usage.restorable_seconds }, ..usage };
            let outcome = format!("{}; {}", confirm::format_usage(&usage), confirm::restore_hint(&usage, &which));
            confirm(context, &format!("delete sandbox {which}? It has {outcome}."), yes)?;
            match permanent {
                true => client.delete_sandbox_permanently(&which).await?,
                false => client.delete_sandbox(&which).await?,
            }
            if let Some(cache) = context.thread_cache() {
                cache.forget_id(&which);
            }
            let deleted = confirm::merge_members(json!({"sandbox": which, "deleted": true}), confirm::erased_json(&usage));
            context.printer.result(&deleted, || format!("deleted {which}; it had {outcome}"))?;
        }
        SandboxCommand::Restore { which, name } => {
            let request = RestoreSandbox { name };
            let restored = match client.restore_sandbox(&which, &request).await {
                Err(e) if e.is(ErrorCode::SandboxNotFound) => {
                    let deleted_sandbox = list_deleted(&client).await?.into_iter().find(|s| s.threads.contains(&which));
                    let Some(deleted_sandbox) = deleted_sandbox else {
                        return Err(Failure::from(e).with_advice("`cobox sandbox list --deleted` lists the sandboxes that can be restored"));
                    };
                    client.restore_sandbox(deleted_sandbox.id.as_str(), &request).await?
                }
                restored => restored?,
            };
            let RestoreResponse { sandbox, returning_threads, threads_elsewhere } = &restored;
            context.printer.result(&restored, || fields(&pairs(sandbox)))?;
            let name_or_id = sandbox.name.as_deref().unwrap_or(sandbox.id.as_str());
            for thread in returning_threads {
                context.printer.note(&format!("the next command of thread {} resumes it", visible(thread)));
            }
            for thread in threads_elsewhere {
                let (shown, has_session) = (visible(thread), session::session_of_thread(&client, thread).await?.is_some());
                let note =
                    if has_session { "uses another sandbox now and keeps it" } else { "has used another sandbox since and gets a new one" };
                context
                    .printer
                    .note(&format!("thread {shown} {note}; use the restored one with `cobox exec --sandbox {name_or_id} -- COMMAND`"));
            }
            if returning_threads.is_empty() && threads_elsewhere.is_empty() {
                context.printer.note(&format!("resume it with `cobox exec --sandbox {name_or_id} -- COMMAND`"));
            }
        }
    }
    Ok(0)
}

/// All deleted sandboxes, newest first.
async fn list_deleted(client: &Client) -> Result<Vec<SandboxInfo>, ClientError> {
    let mut sandboxes: Vec<SandboxInfo> = Vec::new();
    let mut cursor: Option<String> = None;
    loop {
        let page = client.list_deleted_sandboxes(Some(PAGE_SIZE), cursor.as_deref()).await?;
        sandboxes.extend(page.items);
        match page.next_cursor {
            Some(next) if cursor.as_ref() != Some(&next) => cursor = Some(next),
            _ => return Ok(sandboxes),
        }
    }
}

fn threads(s: &SandboxInfo) -> String {
    if s.threads.is_empty() { "-".to_owned() } else { s.threads.join(",") }
}

/// Parses the arguments of `cobox sync`. An invalid argument is reported as by that command, and exits the process as
/// it does.
fn sync_args(which: &str, rest: Vec<OsString>) -> sync::SyncArgs {
    let leading = ["cobox sandbox sync".into(), "--sandbox".into(), OsString::from(which)];
    let command = sync::SyncArgs::augment_args(clap::Command::new("cobox sandbox sync"));
    let parsed =
        command.try_get_matches_from(leading.into_iter().chain(rest)).and_then(|matches| sync::SyncArgs::from_arg_matches(&matches));
    parsed.unwrap_or_else(|e| e.exit())
}

fn row(printer: Printer, s: &SandboxInfo) -> Vec<String> {
    let name = s.name.clone().unwrap_or_else(|| "-".to_owned());
    vec![s.id.to_string(), name, s.state.as_str().to_owned(), threads(s), s.owner.clone(), printer.moment(s.last_active_at)]
}

fn template_row(t: &TemplateInfo) -> Vec<String> {
    let or_dash = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
    let size = |bytes: Option<u64>| or_dash(bytes.map(|b| format!("{} MiB", b >> 20)));
    let r = &t.resources;
    vec![
        t.name.clone(),
        or_dash(t.image.clone()),
        or_dash(r.cpus.map(|c| c.count().to_string())),
        size(r.memory_bytes),
        size(r.disk_bytes),
        t.owner.clone().unwrap_or_else(|| "operator".to_owned()),
    ]
}

fn show(context: &Context, s: &SandboxInfo) -> Result<(), Failure> {
    context.printer.result(s, || fields(&pairs(s)))?;
    Ok(())
}

fn pairs(s: &SandboxInfo) -> Vec<(&'static str, String)> {
    let mut pairs = vec![
        ("sandbox", s.id.to_string()),
        ("name", s.name.clone().unwrap_or_else(|| "-".to_owned())),
        ("state", s.state.as_str().to_owned()),
        ("provider", s.provider.clone()),
        ("owner", s.owner.clone()),
        ("threads", if s.threads.is_empty() { "-".to_owned() } else { s.threads.join(", ") }),
        ("created", s.created_at.to_string()),
        ("last active", s.last_active_at.to_string()),
        ("lease expires", s.lease_expires_at.to_string()),
        ("url", s.http_base_url.clone()),
    ];
    if s.keep {
        pairs.push(("kept", "yes".to_owned()));
    }
    if !s.tags.is_empty() {
        pairs.push(("tags", s.tags.iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(" ")));
    }
    if let Some(reason) = &s.reason {
        pairs.push(("reason", reason.clone()));
    }
    pairs
}
