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
    /// Make a new master key, and a new token key for every sandbox
    #[command(after_help = "\
Stop every broker on the database first. Sandboxes may go on running; they get their new keys when their broker starts again.
Several brokers: run this at one of them, copy its master.key (and master.previous.key, if there is one) to the data directory
of each of the others, with mode 0600, then start them all.

Examples:
  cobox master-key rotate --config /etc/cobox.toml
  cobox master-key rotate --immediate            after a leak: every token ends
  cobox master-key rotate --immediate --lost     the file is gone for good")]
    Rotate {
        #[command(flatten)]
        _hidden_flags: HiddenBrokerFlags,
        /// The config file of `cobox serve` [default: config.toml in the data directory]
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
        /// Overrides the file's data_dir [default: ~/.local/share/cobox]
        #[arg(long, value_name = "DIR")]
        data_dir: Option<PathBuf>,
        /// Tokens issued so far end now, instead of when they expire
        #[arg(long)]
        immediate: bool,
        /// The old key is gone for good
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
        (None, None) => return Err(Failure::new("there is no home directory to find data in").with_advice("name one with --data-dir")),
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
            ("old tokens", rotated.old_tokens_until.map_or_else(|| "ended".to_owned(), |t| format!("good until {t} at most"))),
        ])
    })?;
    if config.database_url.is_some() {
        context.printer.note("Copy these files to every other broker on this database, then start them all.");
    }
    Ok(0)
}
