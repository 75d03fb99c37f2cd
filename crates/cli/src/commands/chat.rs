//! `cobox chat`: a conversation with an agent in a shared sandbox, in panes or in plain lines.

use std::io::IsTerminal;

use cobox_langgraph::Deployment;

use super::{Outcome, parse_thread};
use crate::{
    chat::{ChatOptions, SandboxChoice, plain, settings},
    context::Context,
    failure::Failure,
    target::Target,
    tui,
};

#[derive(Debug, Default, clap::Args)]
#[command(after_help = "\
Examples:
  cobox chat --sandbox                new thread with a new sandbox
  cobox chat -t 5f3c… --sandbox=dev   resume a thread in sandbox dev
  echo 'fix the tests' | cobox chat --sandbox > answer
                                      only the agent's reply on stdout
  cobox --json chat < questions       everything on stdout, as JSON lines

The deployment comes from --deployment, COBOX_DEPLOYMENT_URL, or chat.toml next to the
client config. Its key comes from COBOX_DEPLOYMENT_KEY, COBOX_DEPLOYMENT_KEY_FILE or
`api_key_file` in chat.toml; if the deployment and the broker have the same address, the broker's key is used.
Without a deployment, the TUI shows only the thread's terminal, events and files.
Type /help for a list of commands.")]
pub struct ChatArgs {
    /// URL of the LangGraph deployment
    #[arg(long, value_name = "URL")]
    deployment: Option<String>,
    /// Assistant, by name or ID [default: the deployment's first assistant]
    #[arg(long, value_name = "NAME|ID")]
    assistant: Option<String>,
    /// Resume this thread
    #[arg(short, long, value_name = "THREAD", value_parser = parse_thread)]
    thread: Option<String>,
    /// Create the thread's sandbox before the first message; with NAME, use the sandbox of that name
    #[arg(long, value_name = "NAME", num_args = 0..=1, require_equals = true, default_missing_value = "")]
    sandbox: Option<String>,
    /// Print plain lines instead of the TUI: for pipes, screen readers and output that is not a terminal
    #[arg(long)]
    no_tui: bool,
}

pub async fn run(args: ChatArgs, context: &Context) -> Outcome {
    let has_terminal = std::io::stdin().is_terminal() && std::io::stdout().is_terminal();
    let chat = resolve_options(&args, context)?;
    if args.no_tui || !has_terminal || context.printer.is_json() {
        return plain::run(chat, context.printer).await;
    }
    tui::run(chat).await
}

/// `cobox` without a command: the TUI if there is a terminal and a configuration; `None` if help is more useful.
pub async fn run_bare(context: &Context) -> Option<Outcome> {
    if !std::io::stdin().is_terminal() || !std::io::stdout().is_terminal() || context.printer.is_json() {
        return None;
    }
    match resolve_options(&ChatArgs::default(), context) {
        Ok(chat) => Some(tui::run(chat).await),
        // Nothing is configured yet.
        Err(_) if context.broker().is_err() => None,
        Err(failure) => Some(Err(failure)),
    }
}

fn resolve_options(args: &ChatArgs, context: &Context) -> Result<ChatOptions, Failure> {
    let broker = context.broker();
    let broker_credentials = broker.as_ref().ok().map(|broker| (broker.url.as_str(), &broker.api_key));
    let settings = settings::resolve(args.deployment.clone(), args.assistant.clone(), &|name| std::env::var_os(name), broker_credentials)?;
    let authorities = context.authorities()?;
    let deployment = match &settings.deployment {
        Some(url) => Some(Deployment::new(url, settings.key.as_ref(), authorities.as_deref())?),
        None => None,
    };
    let broker = match (broker, &settings.deployment, &settings.key) {
        (Ok(_), ..) => Some(context.client()?),
        // A deployment may serve the broker's routes itself: the deployment's key then works for both.
        (Err(_), Some(url), Some(key)) => Some(context.client_at(url, key.clone())?),
        (Err(_), Some(_), None) if args.sandbox.is_none() => None,
        (Err(failure), ..) => return Err(failure),
    };
    let sandbox_choice = match &args.sandbox {
        None => SandboxChoice::Existing,
        Some(name) => SandboxChoice::Ensure { name: Some(name.clone()).filter(|name| !name.is_empty()) },
    };
    // Without a deployment the default thread applies, as in every other command.
    let thread = match (&args.thread, &deployment) {
        (Some(thread), _) => Some(thread.clone()),
        (None, Some(_)) => None,
        (None, None) => match Target::default_thread(&|name| std::env::var_os(name)) {
            Target::Thread(thread) => Some(thread),
            _ => None,
        },
    };
    Ok(ChatOptions { deployment, assistant: settings.assistant, thread, broker, sandbox_choice })
}
