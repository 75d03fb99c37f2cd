//! `cobox serve`: the broker for production. It reads a config file, logs, and leaves sandboxes running when it stops.

use std::{net::SocketAddr, path::PathBuf};

use cobox_protocol::Secret;

use super::{HiddenBrokerFlags, Outcome};
use crate::{
    broker_settings::BrokerSettings,
    context::Context,
    cors::CorsArgs,
    daemon::{self, StopSignals},
    dataplane_address::DataplaneAddressArgs,
    running_broker::{FirstKeys, RunningBroker},
    tls::TlsArgs,
};

#[derive(Debug, clap::Args)]
#[command(after_help = "\
The config file is TOML; every setting has a default. The first API key, an operator's, is written to DATA_DIR/api_key.
Sandboxes keep running when the broker stops, and are found again when it starts. COBOX_LOG sets the log filter.
The policy is reloaded when its file changes and on SIGHUP; if the new one is invalid, the error is logged and the old one stays in use.
Several brokers can share a PostgreSQL database. Each has its own data directory with a copy of the same master.key. Behind a shared
public_url, each broker needs its own node_url, because its sandboxes can be reached only through it.

To listen beyond the loopback interface, pass a certificate (--tls-cert, --tls-key), or --insecure-listen if a proxy in front of
the broker terminates TLS.

Example config:
  listen = \"0.0.0.0:8421\"
  public_url = \"https://cobox.example.com\"
  data_dir = \"/var/lib/cobox\"
  database_url = \"postgres://cobox:password@db.example.com/cobox\"
  [tls]
  cert = \"/etc/cobox/tls.crt\"
  key = \"/etc/cobox/tls.key\"
  dataplane_domain = \"box.example.com\"
  [local]
  memory_bytes = 4294967296")]
pub struct ServeArgs {
    #[command(flatten)]
    _hidden_flags: HiddenBrokerFlags,
    /// The config file
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// Data directory; overrides data_dir of the config file
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// Listen address; overrides listen of the config file
    #[arg(long, value_name = "ADDR", value_parser = daemon::parse_address)]
    listen: Option<SocketAddr>,
    /// URL of a PostgreSQL database that several brokers share [default: a file in the data directory]; prefer
    /// COBOX_DATABASE_URL, because other users of this machine can see command line arguments
    #[arg(long, value_name = "URL", value_parser = secret)]
    database_url: Option<Secret>,
    /// Policy file [default: policy.toml in the data directory]
    #[arg(long, value_name = "FILE", env = "COBOX_POLICY")]
    policy: Option<PathBuf>,
    #[command(flatten)]
    dataplane_address: DataplaneAddressArgs,
    #[command(flatten)]
    tls: TlsArgs,
    #[command(flatten)]
    cors: CorsArgs,
    /// Log format
    #[arg(long, value_enum, default_value = "text")]
    log_format: LogFormat,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum LogFormat {
    Text,
    Json,
}

fn secret(text: &str) -> Result<Secret, std::convert::Infallible> {
    Ok(Secret::new(text))
}

pub async fn run(args: ServeArgs, context: &Context) -> Outcome {
    daemon::init_logging("info", args.log_format == LogFormat::Json);
    let mut signals = StopSignals::new()?;
    let mut reload_signal = daemon::reload_signal()?;
    let BrokerSettings { mut config, options } = BrokerSettings::read(&args.config)?;
    if let Some(dir) = args.data_dir {
        config.data_dir = dir;
    }
    let from_environment = || std::env::var("COBOX_DATABASE_URL").ok().filter(|url| !url.is_empty()).map(Secret::new);
    if let Some(url) = args.database_url.or_else(from_environment) {
        config.database_url = Some(url);
    }
    if let Some(listen) = args.listen {
        config.listen = listen;
    }
    args.dataplane_address.apply(&mut config);
    config.policy_file = args.policy.or(config.policy_file);
    args.tls.apply(&mut config)?;
    args.cors.apply(&mut config.cors);
    let mut running = RunningBroker::start(config, options, FirstKeys::Operator).await?;
    let info = running.info.clone();
    tracing::info!(url = %info.url, data_dir = %running.data_dir().display(), "the broker is ready");
    if running.is_first_run {
        tracing::info!(file = %info.api_key_file.display(), "created the first API key");
    }
    if context.printer.is_json() {
        context.printer.result(&info, String::new)?;
    }
    loop {
        tokio::select! {
            () = signals.recv() => break,
            _ = reload_signal.recv() => running.reload().await,
            failure = running.stopped() => return Err(failure),
        }
    }
    tracing::info!("stopping; sandboxes keep running");
    running.stop().await;
    Ok(0)
}
