//! A broker's settings file: one TOML file for the broker and its local sandboxes.

use std::path::Path;

use anyhow::Context as _;
use cobox_broker::Config;
use cobox_provider::local::LocalOptions;
use serde::Deserialize as _;
use toml::{
    Deserializer, Spanned,
    de::{DeTable, ValueDeserializer},
};

use crate::{context::default_data_dir, failure::Failure};

pub struct BrokerSettings {
    pub config: Config,
    pub options: LocalOptions,
}

impl BrokerSettings {
    pub fn read(path: &Path) -> Result<Self, Failure> {
        let text = std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
        parse(&text).map_err(|e| Failure::new(format!("{}: {e}", path.display())))
    }

    /// Like [`BrokerSettings::read`], with defaults if the file is missing.
    pub fn read_or_default(path: &Path) -> Result<Self, Failure> {
        if path.exists() { Self::read(path) } else { parse("").map_err(Failure::new) }
    }
}

/// The `[local]` table belongs to the provider, the rest to the broker. Both are deserialized in place, so that an
/// error has its line number.
pub fn parse(text: &str) -> Result<BrokerSettings, String> {
    let table = DeTable::parse(text).map_err(|e| error_with_line(text, &e))?;
    let span = table.span();
    let mut table = table.into_inner();
    let options = match table.remove("local") {
        Some(local) => LocalOptions::deserialize(ValueDeserializer::from(local)).map_err(|e| error_with_line(text, &e))?,
        None => LocalOptions::default(),
    };
    options.validate()?;
    let has_data_dir = table.contains_key("data_dir");
    let broker_table = Deserializer::from(Spanned::new(span, table));
    let mut config = Config::deserialize(broker_table).map_err(|e| match error_with_line(text, &e) {
        // `local` is also a top-level key, but this message doesn't list it.
        message if message.contains("expected one of `listen`") => message.replacen("expected one of ", "expected one of `local`, ", 1),
        message => message,
    })?;
    if !has_data_dir {
        let dir = default_data_dir(&|name| std::env::var_os(name));
        config.data_dir = dir.ok_or("data_dir is not set, and there is no home directory for the default")?;
    }
    config.validate().map_err(|e| e.to_string())?;
    Ok(BrokerSettings { config, options })
}

/// The error with its line number and the line itself.
fn error_with_line(text: &str, error: &toml::de::Error) -> String {
    let Some(line_start) = error.span().and_then(|span| text.get(..span.start)) else { return error.message().to_owned() };
    let number = line_start.matches('\n').count();
    let line = text.lines().nth(number).unwrap_or_default().trim_end();
    // The URL contains a password.
    let line = if line.contains("database_url") { "database_url = …" } else { line };
    let is_size = line.split('=').next().is_some_and(|key| key.trim().ends_with("_bytes"));
    let hint = if is_size && error.message().starts_with("invalid") { ": a size is a number of bytes" } else { "" };
    format!("line {}: {}{hint}\n{line}", number + 1, error.message())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn broker_and_provider_settings_come_from_one_file() {
        let text = "data_dir = \"/var/lib/cobox\"\nlease_seconds = 1000\n[local]\nprocesses = 77\n";
        let BrokerSettings { config, options } = parse(text).unwrap();
        assert_eq!((config.lease_seconds, options.processes), (1000, 77));
        assert_eq!(config.listen.to_string(), "127.0.0.1:8421");
    }

    #[test]
    fn an_invalid_setting_is_named() {
        for (text, expected) in
            [("data_dir = \"/x\"\nlease = 1", "lease"), ("[local]\nmemory = 1", "memory"), ("[local]\nprocesses = 1", "local.processes")]
        {
            let error = parse(text).map(drop).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn an_error_has_the_line_number_and_text() {
        let error = |text: &str| parse(text).map(drop).unwrap_err();
        let unknown = error("# mine\n\ndata_dir = \"/x\"\nlease = 1\n[local]\nprocesses = 77\n");
        assert!(unknown.starts_with("line 4: unknown field `lease`") && unknown.contains("`local`"), "{unknown}");
        assert!(unknown.ends_with("\nlease = 1"), "{unknown}");
        let size = error("data_dir = \"/x\"\n[local]\nmemory_bytes = \"4G\"\n");
        assert!(size.starts_with("line 3: ") && size.contains("a number of bytes"), "{size}");
        assert!(error("data_dir = \n").starts_with("line 1: "));
        let hidden = error("database_url = \"postgres://ann:hidden@x/y\n");
        assert!(hidden.starts_with("line 1: ") && !hidden.contains("hidden"), "{hidden}");
    }
}
