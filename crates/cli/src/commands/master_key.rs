//! `cobox master-key`: replaces the key that signs all tokens, while no broker runs.

use std::path::PathBuf;

use cobox_broker::{MasterKeyRotation, rotate_master_key};
use cobox_protocol::Secret;
use serde_json::json;

use super::{HiddenBrokerFlags, Outcome};
use crate::{
    broker_settings::BrokerSettings,
    context::{Context, default_data_dir},
    failure::Failure,
    printer::fields,
};

#[derive(Debug, clap::Subcommand)]
pub enum MasterKeyCommand {
    /// Create a new master key, and a new token key for every sandbox
    #[command(after_help = "\
Stop every broker on the database first. Sandboxes may keep running; they receive their new keys when their broker starts again.
With several brokers, run this command on one of them, copy its master.key (and master.previous.key, if present) to the data
directory of every other broker with mode 0600, then start them all.

Examples:
  cobox master-key rotate --config /etc/cobox.toml
  cobox master-key rotate --immediate            after a leak: revoke all tokens
  cobox master-key rotate --immediate --lost     the old key file is lost")]
    Rotate {
        #[command(flatten)]
        _hidden_flags: HiddenBrokerFlags,
        /// Config file of `cobox serve` [default: config.toml in the data directory]
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
        /// Data directory; overrides data_dir of the config file [default: ~/.local/share/cobox]
        #[arg(long, value_name = "DIR")]
        data_dir: Option<PathBuf>,
        /// Revoke all tokens issued so far, instead of letting them expire
        #[arg(long)]
        immediate: bool,
        /// Continue although the old key is lost
        #[arg(long, requires = "immediate")]
        lost: bool,
    },
}

pub async fn run(command: MasterKeyCommand, context: &Context) -> Outcome {
    let MasterKeyCommand::Rotate { _hidden_flags, config: file, data_dir, immediate, lost } = command;
    let explicit_dir = data_dir.or_else(|| if file.is_none() { default_data_dir(&|name| std::env::var_os(name)) } else { None });
    let BrokerSettings { mut config, .. } = match (&file, &explicit_dir) {
        (Some(file), _) => BrokerSettings::read(file)?,
        (None, Some(dir)) => BrokerSettings::read_or_default(&dir.join("config.toml"))?,
        (None, None) => {
            return Err(Failure::new("no data directory: neither XDG_DATA_HOME nor HOME is set").with_advice("pass one with --data-dir"));
        }
    };
    if let Some(dir) = explicit_dir {
        config.data_dir = dir;
    }
    if let Some(url) = std::env::var("COBOX_DATABASE_URL").ok().filter(|url| !url.is_empty()) {
        config.database_url = Some(Secret::new(url));
    }
    let rotated = rotate_master_key(&config, MasterKeyRotation { is_immediate: immediate, is_lost: lost })
        .await
        .map_err(|e| Failure::new(e.to_string()))?;
    let output = json!({
        "master_key": rotated.master_key, "previous_key": rotated.previous_key, "sandboxes": rotated.sandboxes,
        "old_tokens_until": rotated.old_tokens_until,
    });
    context.printer.result(&output, || {
        fields(&[
            ("master key", rotated.master_key.display().to_string()),
            ("previous key", rotated.previous_key.as_ref().map_or_else(|| "removed".to_owned(), |p| p.display().to_string())),
            ("sandboxes", rotated.sandboxes.to_string()),
            ("old tokens", rotated.old_tokens_until.map_or_else(|| "ended".to_owned(), |t| format!("valid until {t} at most"))),
        ])
    })?;
    if config.database_url.is_some() {
        context.printer.note("Copy these files to every other broker on this database, then start them all.");
    }
    Ok(0)
}
