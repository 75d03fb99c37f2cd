//! A broker's settings file: one TOML file for the broker and its local sandboxes.

use std::path::Path;

use anyhow::Context as _;
use cobox_broker::Config;
use cobox_provider::local::LocalOptions;

use crate::{context::default_data_dir, failure::Failure};

/// Where a broker listens unless told.
const DEFAULT_LISTEN: &str = "127.0.0.1:8421";

pub struct Settings {
    pub config: Config,
    pub options: LocalOptions,
}

impl Settings {
    pub fn read(path: &Path) -> Result<Self, Failure> {
        let text = std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
        parse(&text).map_err(|e| Failure::new(format!("{}: {e}", path.display())))
    }

    /// As [`Settings::read`]; a file that isn't there sets nothing.
    pub fn read_if_there(path: &Path) -> Result<Self, Failure> {
        if path.exists() { Self::read(path) } else { parse("").map_err(Failure::new) }
    }
}

/// The `[local]` table is the provider's, the rest is the broker's.
fn parse(text: &str) -> Result<Settings, String> {
    let mut table: toml::Table = toml::from_str(text).map_err(|e| e.to_string())?;
    let options = match table.remove("local") {
        Some(local) => local.try_into::<LocalOptions>().map_err(|e| format!("[local] {}", e.message()))?,
        None => LocalOptions::default(),
    };
    options.validate()?;
    table.entry("listen").or_insert_with(|| DEFAULT_LISTEN.into());
    if !table.contains_key("data_dir") {
        let dir =
            default_data_dir(&|name| std::env::var_os(name)).ok_or("data_dir is missing, and there is no home directory to default to")?;
        table.insert("data_dir".to_owned(), dir.display().to_string().into());
    }
    let rest = toml::to_string(&table).map_err(|e| e.to_string())?;
    Ok(Settings { config: Config::from_toml(&rest).map_err(|e| e.to_string())?, options })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn broker_and_provider_settings_come_from_one_file() {
        let text = "data_dir = \"/var/lib/cobox\"\nlease_seconds = 1000\n[local]\nprocesses = 77\n";
        let Settings { config, options } = parse(text).unwrap();
        assert_eq!((config.lease_seconds, options.processes), (1000, 77));
        assert_eq!(config.listen.to_string(), DEFAULT_LISTEN);
    }

    #[test]
    fn a_wrong_setting_is_named() {
        for (text, named) in
            [("data_dir = \"/x\"\nlease = 1", "lease"), ("[local]\nmemory = 1", "memory"), ("[local]\nprocesses = 1", "local.processes")]
        {
            let error = parse(text).map(drop).unwrap_err();
            assert!(error.contains(named), "{error}");
        }
    }
}
