//! `cobox up`: a broker on this machine with everything embedded, for one person and their agents.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
};

use serde_json::json;

use super::{HiddenBrokerFlags, Outcome};
use crate::{
    broker_settings::BrokerSettings,
    context::{Context, config_path, default_data_dir},
    contexts::{ContextEntry, Contexts, KeyLocation, LOCAL},
    cors::CorsArgs,
    daemon::{self, StopSignals},
    data_dir::BrokerInfo,
    failure::{Failure, INTERRUPTED},
    running_broker::{FirstKeys, RunningBroker},
    tls::TlsArgs,
};

/// Warnings, and what the broker does to sandboxes by itself: a user should see why a sandbox was suspended or ended.
const LOG_FILTER: &str = "warn,cobox_broker::domain::lifecycle=info";

#[derive(Debug, clap::Args)]
#[command(after_help = "\
The first run creates an API key for you, one for an agent, and a client config, so that other commands find this broker.
Ctrl-C suspends the sandboxes: their processes are killed, their files are kept, and the next use resumes them.
Settings, such as limits on sandboxes, are read from config.toml in the data directory; `cobox serve --help` shows an example.

Examples:
  cobox up
  cobox up --data-dir /tmp/try --listen 127.0.0.1:0")]
pub struct UpArgs {
    #[command(flatten)]
    _hidden_flags: HiddenBrokerFlags,
    /// Data directory [default: ~/.local/share/cobox]
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// Address and port to listen on; port 0 selects a free port [default: 127.0.0.1:8421]
    #[arg(long, value_name = "ADDR", value_parser = daemon::parse_address)]
    listen: Option<SocketAddr>,
    /// Policy file [default: policy.toml in the data directory]
    #[arg(long, value_name = "FILE", env = "COBOX_POLICY")]
    policy: Option<PathBuf>,
    #[command(flatten)]
    tls: TlsArgs,
    #[command(flatten)]
    cors: CorsArgs,
}

pub async fn run(args: UpArgs, context: &Context) -> Outcome {
    daemon::init_logging(LOG_FILTER, false);
    let mut signals = StopSignals::new()?;
    let data_dir = match args.data_dir.or_else(|| default_data_dir(&|name| std::env::var_os(name))) {
        Some(dir) => dir,
        None => {
            return Err(Failure::new("no data directory: neither XDG_DATA_HOME nor HOME is set").with_advice("pass one with --data-dir"));
        }
    };
    let BrokerSettings { mut config, options } = BrokerSettings::read_or_default(&data_dir.join("config.toml"))?;
    config.data_dir = data_dir;
    if let Some(listen) = args.listen {
        config.listen = listen;
    }
    config.policy_file = args.policy.or(config.policy_file);
    args.tls.apply(&mut config)?;
    args.cors.apply(&mut config.cors);
    let is_protected = config.listen.ip().is_loopback() || config.tls.is_some();
    let mut running = RunningBroker::start(config, options, FirstKeys::OperatorAndAgent).await?;
    let is_configured = write_client_config(context, &running.info)?;
    print_welcome(context, &running, is_configured)?;
    if !rustix::process::geteuid().is_root() {
        context.printer.note(&format!("note: isolation is weaker than as root; see `{} doctor`", program_name()));
    }
    if !is_protected {
        context.printer.note("note: listening beyond this machine without TLS; keys and tokens are sent unencrypted");
    }

    tokio::select! {
        () = signals.recv() => {}
        failure = running.stopped() => return Err(failure),
    }
    context.printer.note("\nstopping; press Ctrl-C again to stop immediately and leave the sandboxes running");
    let sandboxes = running.sandboxes_dir();
    let stopping = async {
        let stopped = running.stop().await;
        stopped.suspend_all().await
    };
    let suspended = tokio::select! {
        suspended = stopping => suspended?,
        () = signals.recv() => {
            context.printer.note("stopped; sandboxes that are not yet suspended keep running, and the next `cobox up` finds them");
            return Ok(INTERRUPTED);
        }
    };
    let ids: Vec<_> = suspended.iter().map(ToString::to_string).collect();
    context.printer.result(&json!({"suspended": ids, "kept_in": sandboxes}), || match suspended.len() {
        0 => "no sandboxes were running".to_owned(),
        1 => format!("suspended 1 sandbox; its files are kept in {}", sandboxes.display()),
        n => format!("suspended {n} sandboxes; their files are kept in {}", sandboxes.display()),
    })?;
    Ok(0)
}

fn print_welcome(context: &Context, running: &RunningBroker, is_configured: bool) -> Result<(), Failure> {
    let info = &running.info;
    let ready = json!({
        "url": info.url, "pid": info.pid, "data_dir": running.data_dir(),
        "api_key_file": info.api_key_file, "agent_key_file": info.agent_key_file,
    });
    context.printer.result(&ready, || {
        let cobox = program_name();
        let mut lines = vec![format!("cobox is up at {}; its data is in {}", info.url, running.data_dir().display())];
        if running.is_first_run {
            lines.push(format!("created an API key in {}", info.api_key_file.display()));
        }
        lines.push("\nNext, in another terminal:".to_owned());
        if !is_configured {
            lines.push(format!("  export COBOX_URL={} COBOX_API_KEY_FILE={}", info.url, shell_quote(&info.api_key_file)));
        }
        lines.push(format!("  {cobox} exec -t demo -- uname -a"));
        lines.push(format!("  {cobox} shell -t demo"));
        lines.push(format!("  python3 examples/agent.py --thread demo{}", agent_data_dir_option(running.data_dir(), is_configured)));
        lines.push("\nCtrl-C suspends the sandboxes and keeps their files.".to_owned());
        lines.join("\n")
    })?;
    Ok(())
}

/// The option that an agent needs to find this broker. Empty if the broker is in the default place and no environment
/// variable overrides it.
fn agent_data_dir_option(data_dir: &Path, is_configured: bool) -> String {
    let default = default_data_dir(&|name| std::env::var_os(name)).and_then(|dir| dir.canonicalize().ok());
    if is_configured && default.as_deref() == Some(data_dir) { String::new() } else { format!(" --data-dir {}", shell_quote(data_dir)) }
}

/// Makes this broker the context `local`, unless that context is another broker. Returns whether commands now use this
/// broker.
fn write_client_config(context: &Context, info: &BrokerInfo) -> Result<bool, Failure> {
    let Some(path) = config_path(&|name| std::env::var_os(name)) else { return Ok(false) };
    let entry = ContextEntry { url: info.url.clone(), key: KeyLocation::File(info.api_key_file.clone()), ca_file: None };
    let left_unchanged = |reason: String| {
        context.printer.note(&format!("note: {reason}; it was not changed"));
        Ok(false)
    };
    let current = Contexts::update(&path, |contexts| {
        match contexts.find(LOCAL) {
            // The context is missing, or an earlier run on the same data directory wrote it with another address.
            Some(existing) if existing.key != entry.key => return Ok(Err(existing.url.clone())),
            Some(existing) if existing.url == entry.url => {}
            _ => contexts.insert(LOCAL, entry),
        }
        Ok(Ok(contexts.current().map(str::to_owned)))
    });
    match current {
        Ok(Ok(Some(current))) if current != LOCAL => {
            context.printer.note(&format!("note: commands use context `{current}`; switch to this broker with `cobox config use {LOCAL}`"));
            Ok(false)
        }
        Ok(Ok(_)) => Ok(true),
        Ok(Err(url)) => left_unchanged(format!("{} points at {url}", path.display())),
        Err(failure) => left_unchanged(failure.message),
    }
}

/// How to type this program's name: `cobox` if that resolves to it on the PATH, otherwise its path.
fn program_name() -> String {
    let Ok(program) = std::env::current_exe() else { return "cobox".to_owned() };
    let is_on_path = std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|dir| dir.join("cobox").canonicalize().is_ok_and(|found| found == program)));
    if is_on_path {
        return "cobox".to_owned();
    }
    let here = std::env::current_dir().ok().and_then(|dir| program.strip_prefix(dir).ok().map(Path::to_owned));
    match here {
        // Without a slash, a shell would search the PATH for it.
        Some(name) if name.components().count() == 1 => shell_quote(&Path::new(".").join(name)),
        Some(relative) => shell_quote(&relative),
        None => shell_quote(&program),
    }
}

/// Quotes a path for a shell.
fn shell_quote(path: &Path) -> String {
    let text = path.display().to_string();
    let is_plain = text.bytes().all(|b| b.is_ascii_alphanumeric() || b"/._-+=:@,".contains(&b));
    if is_plain { text } else { format!("'{}'", text.replace('\'', r"'\''")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_can_be_pasted_into_a_shell() {
        assert_eq!(shell_quote(Path::new("/a/b-c.d")), "/a/b-c.d");
        assert_eq!(shell_quote(Path::new("/a b/it's")), r"'/a b/it'\''s'");
    }
}
