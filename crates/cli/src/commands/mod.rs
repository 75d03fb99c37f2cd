//! The commands, one file each with its arguments and its implementation.

pub mod audit;
pub mod chat;
pub mod completions;
pub mod config;
pub mod cp;
pub mod doctor;
pub mod exec;
pub mod keys;
pub mod master_key;
pub mod policy;
pub mod principals;
pub mod ps;
pub mod sandbox;
pub mod serve;
pub mod session;
pub mod share;
pub mod shell;
pub mod sync;
pub mod up;
pub mod watch;

use clap::Subcommand;
use cobox_protocol::{SandboxId, SessionId};

use crate::{context::Context, failure::Failure, target::Target};

/// Result of a command: the process's exit code, or why it failed.
pub type Outcome = Result<u8, Failure>;

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Start a broker on this machine with everything included, and print the next steps
    Up(up::UpArgs),
    /// Chat with an agent in a shared sandbox; same as `cobox` without a command
    Chat(chat::ChatArgs),
    /// Run a command in a thread's sandbox
    Exec(exec::ExecArgs),
    /// Attach to a shell in a thread's sandbox that humans and agents share
    Shell(shell::ShellArgs),
    /// Stream the events of a thread's sandbox: commands, file changes and their actors
    Watch(watch::WatchArgs),
    /// List the commands and shells in a thread's sandbox
    Ps(ps::PsArgs),
    /// Kill a command or a shell, or send it a signal
    Kill(ps::KillArgs),
    /// Copy files and folders to or from a sandbox
    Cp(cp::CpArgs),
    /// Keep a local folder and a sandbox folder in sync
    Sync(sync::SyncArgs),
    /// Manage the sessions of threads
    #[command(subcommand)]
    Session(session::SessionCommand),
    /// Share a thread's session with other principals
    #[command(subcommand)]
    Share(share::ShareCommand),
    /// Manage sandboxes
    #[command(subcommand)]
    Sandbox(sandbox::SandboxCommand),
    /// Manage API keys
    #[command(subcommand)]
    Keys(keys::KeysCommand),
    /// List, disable and enable principals
    #[command(subcommand)]
    Principals(principals::PrincipalsCommand),
    /// Check a policy file, or explain its decisions
    #[command(subcommand)]
    Policy(policy::PolicyCommand),
    /// Rotate the master key of a stopped broker
    #[command(subcommand)]
    MasterKey(master_key::MasterKeyCommand),
    /// Show and verify the audit records
    Audit(audit::AuditArgs),
    /// Manage the contexts of this client and show where each setting comes from
    #[command(subcommand)]
    Config(config::ConfigCommand),
    /// Check whether this machine can run sandboxes
    Doctor(doctor::DoctorArgs),
    /// Run a broker for production from a config file
    Serve(serve::ServeArgs),
    /// Generate shell completions
    Completions(completions::CompletionsArgs),
    /// Generate manual pages
    Man(completions::ManArgs),
}

impl Command {
    pub async fn run(self, context: &Context) -> Outcome {
        match self {
            Command::Up(args) => up::run(args, context).await,
            Command::Chat(args) => chat::run(args, context).await,
            Command::Exec(args) => exec::run(args, context).await,
            Command::Shell(args) => shell::run(args, context).await,
            Command::Watch(args) => watch::run(args, context).await,
            Command::Ps(args) => ps::run(args, context).await,
            Command::Kill(args) => ps::kill(args, context).await,
            Command::Cp(args) => cp::run(args, context).await,
            Command::Sync(args) => sync::run(args, context).await,
            Command::Session(command) => session::run(command, context).await,
            Command::Share(command) => share::run(command, context).await,
            Command::MasterKey(command) => master_key::run(command, context).await,
            Command::Sandbox(command) => sandbox::run(command, context).await,
            Command::Keys(command) => keys::run(command, context).await,
            Command::Principals(command) => principals::run(command, context).await,
            Command::Policy(command) => policy::run(command, context),
            Command::Audit(args) => audit::run(args, context).await,
            Command::Config(command) => config::run(command, context).await,
            Command::Completions(args) => completions::run_completions(args, context),
            Command::Man(args) => completions::run_man(args, context),
            Command::Doctor(args) => doctor::run(args, context).await,
            Command::Serve(args) => serve::run(args, context).await,
        }
    }
}

/// Selects the sandbox of a command: a thread's, or one by its own name.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct TargetArgs {
    /// The thread whose sandbox to use; created if missing [default: COBOX_THREAD, or `default`]
    #[arg(short, long, value_name = "THREAD", value_parser = parse_thread)]
    pub thread: Option<String>,
    /// Use this sandbox, by name or ID, instead of a thread's
    #[arg(long, value_name = "NAME|ID", conflicts_with = "thread")]
    pub sandbox: Option<String>,
}

impl TargetArgs {
    pub fn resolve(&self) -> Target {
        match (&self.sandbox, &self.thread) {
            (Some(sandbox), _) => Target::Sandbox(sandbox.clone()),
            (None, Some(thread)) => Target::Thread(thread.clone()),
            (None, None) => Target::default_thread(&|name| std::env::var_os(name)),
        }
    }
}

/// Rejects sandbox and session ids: the broker generates ids and users name threads, so an id here is a mistake that
/// would create a new sandbox.
pub fn parse_thread(text: &str) -> Result<String, String> {
    if text.is_empty() {
        return Err("the thread name is empty".to_owned());
    }
    if text.parse::<SandboxId>().is_ok() {
        return Err("this is a sandbox ID, not a thread; pass it with --sandbox".to_owned());
    }
    if text.parse::<SessionId>().is_ok() {
        return Err("this is a session ID, not a thread; `cobox session list` shows its thread".to_owned());
    }
    Ok(text.to_owned())
}

/// Parses `key=value` for `--tag` of commands that create something.
pub fn parse_tag(text: &str) -> Result<(String, String), String> {
    match text.split_once(['=', ':']) {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("expected KEY=VALUE".to_owned()),
    }
}

/// Hides the options that choose a broker on commands that use none: they are accepted, but not shown in the help.
#[derive(Debug, clap::Args)]
pub struct HiddenBrokerFlags {
    #[arg(id = "context", long = "context", hide = true)]
    _context: Option<String>,
    #[arg(id = "url", long = "url", hide = true)]
    _url: Option<String>,
    #[arg(id = "api_key_file", long = "api-key-file", hide = true)]
    _api_key_file: Option<std::path::PathBuf>,
    #[arg(id = "ca_file", long = "ca-file", hide = true)]
    _ca_file: Option<std::path::PathBuf>,
}
