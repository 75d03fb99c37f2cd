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
    /// Start a broker here with everything embedded, and say what to type next
    Up(up::UpArgs),
    /// Talk with an agent in a sandbox that you share; `cobox` alone does the same
    Chat(chat::ChatArgs),
    /// Run a command in a thread's sandbox
    Exec(exec::ExecArgs),
    /// Join a shell in a thread's sandbox, which human and agent share
    Shell(shell::ShellArgs),
    /// What goes on in a thread's sandbox: who ran what, who wrote what
    Watch(watch::WatchArgs),
    /// What runs in a thread's sandbox, and who started it
    Ps(ps::PsArgs),
    /// End a command or a shell, or send it a signal
    Kill(ps::KillArgs),
    /// Copy files and folders into or out of a sandbox
    Cp(cp::CpArgs),
    /// Keep a folder and a sandbox's the same, live
    Sync(sync::SyncArgs),
    /// Get, make, refresh or release a thread's session
    #[command(subcommand)]
    Session(session::SessionCommand),
    /// Let others into a thread's session, see who is, and take it back
    #[command(subcommand)]
    Share(share::ShareCommand),
    /// List, make, show or delete sandboxes
    #[command(subcommand)]
    Sandbox(sandbox::SandboxCommand),
    /// List, make, expire or revoke API keys
    #[command(subcommand)]
    Keys(keys::KeysCommand),
    /// List principals, shut one out or let one in again
    #[command(subcommand)]
    Principals(principals::PrincipalsCommand),
    /// Check a policy file, or say why somebody gets what they get
    #[command(subcommand)]
    Policy(policy::PolicyCommand),
    /// Replace a broker's master key, while it is stopped
    #[command(subcommand)]
    MasterKey(master_key::MasterKeyCommand),
    /// Show who did what, for operators
    Audit(audit::AuditArgs),
    /// The brokers you use, which of them commands go to, and where each setting comes from
    #[command(subcommand)]
    Config(config::ConfigCommand),
    /// Check what this machine offers for sandboxes
    Doctor(doctor::DoctorArgs),
    /// Run a broker for production from a config file
    Serve(serve::ServeArgs),
    /// Completions for a shell
    Completions(completions::CompletionsArgs),
    /// Manual pages
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
    /// The thread whose sandbox to use; it gets one if it has none [default: COBOX_THREAD, or `default`]
    #[arg(short, long, value_name = "THREAD", value_parser = parse_thread)]
    pub thread: Option<String>,
    /// Use this sandbox, by name or id, instead of a thread's
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
        return Err("a thread has a name".to_owned());
    }
    if text.parse::<SandboxId>().is_ok() {
        return Err("this is a sandbox's id, not a thread; name it with --sandbox".to_owned());
    }
    if text.parse::<SessionId>().is_ok() {
        return Err("this is a session's id; name its thread, which `cobox session list` shows".to_owned());
    }
    Ok(text.to_owned())
}

/// Parses `key=value` for `--tag` of commands that create something.
pub fn parse_tag(text: &str) -> Result<(String, String), String> {
    match text.split_once(['=', ':']) {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("it must look like KEY=VALUE".to_owned()),
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
