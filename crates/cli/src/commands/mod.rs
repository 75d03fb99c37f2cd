//! One verb per file: each holds its arguments and what it does.

pub mod cp;
pub mod doctor;
pub mod exec;
pub mod keys;
pub mod sandbox;
pub mod serve;
pub mod session;
pub mod shell;
pub mod sync;
pub mod up;

use clap::Subcommand;

use crate::{context::Context, failure::Failure};

/// What a command comes to: the process's exit code, or why it failed.
pub type Outcome = Result<u8, Failure>;

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Start a broker here with everything embedded, and say what to type next
    Up(up::Args),
    /// Run a command in a thread's sandbox
    Exec(exec::Args),
    /// Open a shell in a thread's sandbox
    Shell(shell::Args),
    /// Copy files and folders into or out of a sandbox
    Cp(cp::Args),
    /// Upload a folder, without what its ignore files name
    Sync(sync::Args),
    /// Get, make, refresh or release a thread's session
    #[command(subcommand)]
    Session(session::Command),
    /// List, make, show or delete sandboxes
    #[command(subcommand)]
    Sandbox(sandbox::Command),
    /// List, make or revoke API keys
    #[command(subcommand)]
    Keys(keys::Command),
    /// Check what this machine offers for sandboxes
    Doctor(doctor::Args),
    /// Run a broker for production from a config file
    Serve(serve::Args),
}

impl Command {
    pub async fn run(self, context: &Context) -> Outcome {
        match self {
            Command::Up(args) => up::run(args, context).await,
            Command::Exec(args) => exec::run(args, context).await,
            Command::Shell(args) => shell::run(args, context).await,
            Command::Cp(args) => cp::run(args, context).await,
            Command::Sync(args) => sync::run(args, context).await,
            Command::Session(command) => session::run(command, context).await,
            Command::Sandbox(command) => sandbox::run(command, context).await,
            Command::Keys(command) => keys::run(command, context).await,
            Command::Doctor(args) => doctor::run(args, context).await,
            Command::Serve(args) => serve::run(args, context).await,
        }
    }
}

/// The thread a command works on.
#[derive(Clone, Debug, clap::Args)]
pub struct Thread {
    /// The thread whose sandbox to use; it gets one if it has none
    #[arg(short, long, env = "COBOX_THREAD", default_value = crate::context::DEFAULT_THREAD, value_name = "THREAD")]
    pub thread: String,
}
