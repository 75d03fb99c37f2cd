//! The client's config file: the brokers of a user, each as a named context, and the current context that commands
//! use.

use std::{
    collections::BTreeMap,
    fs::File,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, anyhow};
use serde::{Deserialize, Serialize};

use crate::{data_dir::replace_file, failure::Failure, printer::visible};

/// The context that `cobox up` writes. It is at the top of the file, for compatibility with files from before named
/// contexts.
pub const LOCAL: &str = "local";
/// Longest name of a context, in bytes: it is also a file name.
const MAX_NAME_BYTES: usize = 64;
/// First line of a file that cobox writes.
const HEADER: &str = "# Brokers that cobox knows. `cobox config` writes this file, and keeps no comments.\n";

/// Where a context's API key is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeyLocation {
    File(PathBuf),
    Keyring,
}

/// One broker: its address, key and authorities.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContextEntry {
    pub url: String,
    pub key: KeyLocation,
    pub ca_file: Option<PathBuf>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Contexts {
    current: Option<String>,
    entries: BTreeMap<String, ContextEntry>,
}

impl Contexts {
    /// A missing file has no contexts.
    pub fn read(path: &Path) -> Result<Self, Failure> {
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Self::default()),
            Err(e) => return Err(anyhow!(e).context(format!("reading {}", path.display())).into()),
        };
        let invalid = |what: String| {
            Failure::new(format!("{} is not a client config: {what}", path.display())).with_advice(
                "set url = \"http://…\" and api_key_file = \"/…\" at the top level or under [contexts.NAME], or delete the file and run `cobox up`",
            )
        };
        let file: ConfigFile = toml::from_str(&text).map_err(|e| invalid(e.message().to_owned()))?;
        file.try_into().map_err(invalid)
    }

    /// Changes the file, or leaves it unchanged if `update` fails. A lock serializes concurrent changes.
    pub fn update<T>(path: &Path, update: impl FnOnce(&mut Self) -> Result<T, Failure>) -> Result<T, Failure> {
        let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder).with_context(|| format!("creating {}", folder.display()))?;
        let _lock = lock(&path.with_extension("lock"))?;
        let mut contexts = Self::read(path)?;
        let before = contexts.clone();
        let outcome = update(&mut contexts)?;
        if contexts != before {
            let text = toml::to_string(&ConfigFile::from(contexts)).context("writing the client config")?;
            replace_file(path, format!("{HEADER}{text}").as_bytes()).with_context(|| format!("writing {}", path.display()))?;
        }
        Ok(outcome)
    }

    /// The context that commands use: the chosen one, else the one from `cobox up`, else the only one.
    pub fn current(&self) -> Option<&str> {
        let only = || self.entries.keys().next().filter(|_| self.entries.len() == 1);
        let local = || self.entries.get_key_value(LOCAL).map(|(name, _)| name);
        self.current.as_ref().or_else(local).or_else(only).map(String::as_str)
    }

    pub fn iter(&self) -> impl Iterator<Item = (&str, &ContextEntry)> {
        self.entries.iter().map(|(name, entry)| (name.as_str(), entry))
    }

    pub fn find(&self, name: &str) -> Option<&ContextEntry> {
        self.entries.get(name)
    }

    /// Like [`Contexts::find`], but the error for an unknown name lists the known ones.
    pub fn get(&self, name: &str) -> Result<&ContextEntry, Failure> {
        self.entries.get(name).ok_or_else(|| {
            let names: Vec<&str> = self.entries.keys().map(String::as_str).collect();
            let existing = if names.is_empty() { "no contexts".to_owned() } else { format!("available contexts: {}", names.join(", ")) };
            Failure::new(format!("no context `{}`", visible(name)))
                .with_advice(format!("{existing}; add one with `cobox config add NAME --url URL`"))
        })
    }

    pub fn select(&mut self, name: &str) -> Result<(), Failure> {
        self.get(name)?;
        self.current = Some(name.to_owned());
        Ok(())
    }

    pub fn insert(&mut self, name: &str, entry: ContextEntry) {
        self.entries.insert(name.to_owned(), entry);
    }

    pub fn remove(&mut self, name: &str) -> Result<ContextEntry, Failure> {
        self.get(name)?;
        if self.current.as_deref() == Some(name) {
            self.current = None;
        }
        self.entries.remove(name).ok_or_else(|| Failure::new(format!("no context `{}`", visible(name))))
    }
}

/// Parses a context's name from a command line.
pub fn parse_name(text: &str) -> Result<String, String> {
    let has_plain_characters = text.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b));
    let starts_alphanumeric = text.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric());
    if has_plain_characters && starts_alphanumeric && text.len() <= MAX_NAME_BYTES {
        Ok(text.to_owned())
    } else {
        Err(format!(
            "a context name consists of letters, digits, `-`, `_` and `.`, has at most {MAX_NAME_BYTES} characters, and starts with a letter or a digit"
        ))
    }
}

fn lock(path: &Path) -> Result<File, Failure> {
    let opened = File::options().write(true).create(true).truncate(false).mode(0o600).open(path);
    let file = opened.with_context(|| format!("opening {}", path.display()))?;
    file.lock().with_context(|| format!("locking {}", path.display()))?;
    Ok(file)
}

/// The file's format: the entry of `cobox up` is at the top, as before there were named contexts.
#[derive(Default, Serialize, Deserialize)]
struct ConfigFile {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    current: Option<String>,
    #[serde(flatten)]
    local: ConfigFileEntry,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    contexts: BTreeMap<String, ConfigFileEntry>,
}

#[derive(Default, Serialize, Deserialize)]
struct ConfigFileEntry {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    url: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    api_key_file: Option<PathBuf>,
    /// The key is stored in the system's keyring.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    keyring: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ca_file: Option<PathBuf>,
}

impl TryFrom<ConfigFile> for Contexts {
    type Error = String;

    fn try_from(file: ConfigFile) -> Result<Self, String> {
        let mut entries = BTreeMap::new();
        let local = &file.local;
        if local.url.is_some() || local.api_key_file.is_some() || local.keyring || local.ca_file.is_some() {
            entries.insert(LOCAL.to_owned(), file.local.into_entry()?);
        }
        for (name, entry) in file.contexts {
            let name = parse_name(&name)?;
            let entry = entry.into_entry().map_err(|e| format!("[contexts.{name}]: {e}"))?;
            if entries.insert(name, entry).is_some() {
                return Err(format!("`{LOCAL}` is defined at the top of the file and can't also be under [contexts]"));
            }
        }
        if let Some(current) = file.current.as_ref().filter(|current| !entries.contains_key(*current)) {
            return Err(format!("current = \"{current}\": no such context"));
        }
        Ok(Self { current: file.current, entries })
    }
}

impl From<Contexts> for ConfigFile {
    fn from(mut contexts: Contexts) -> Self {
        let local = contexts.entries.remove(LOCAL).map(ConfigFileEntry::from).unwrap_or_default();
        let others = contexts.entries.into_iter().map(|(name, entry)| (name, entry.into())).collect();
        Self { current: contexts.current, local, contexts: others }
    }
}

impl ConfigFileEntry {
    fn into_entry(self) -> Result<ContextEntry, String> {
        let key = match (self.api_key_file, self.keyring) {
            (Some(path), false) => KeyLocation::File(path),
            (None, true) => KeyLocation::Keyring,
            (Some(_), true) => return Err("api_key_file and keyring are mutually exclusive".to_owned()),
            (None, false) => return Err("missing field `api_key_file`".to_owned()),
        };
        Ok(ContextEntry { url: self.url.ok_or("missing field `url`")?, key, ca_file: self.ca_file })
    }
}

impl From<ContextEntry> for ConfigFileEntry {
    fn from(entry: ContextEntry) -> Self {
        let (api_key_file, keyring) = match entry.key {
            KeyLocation::File(path) => (Some(path), false),
            KeyLocation::Keyring => (None, true),
        };
        Self { url: Some(entry.url), api_key_file, keyring, ca_file: entry.ca_file }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(url: &str, key: KeyLocation) -> ContextEntry {
        ContextEntry { url: url.into(), key, ca_file: None }
    }

    fn parse_config(text: &str) -> Result<Contexts, Failure> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.toml"), text).unwrap();
        Contexts::read(&dir.path().join("config.toml"))
    }

    #[test]
    fn a_file_with_one_broker_is_the_context_local() {
        let contexts = parse_config("url = \"http://x:1\"\napi_key_file = \"/k\"\n").unwrap();
        assert_eq!(contexts.current(), Some(LOCAL));
        assert_eq!(contexts.get(LOCAL).unwrap(), &entry("http://x:1", KeyLocation::File("/k".into())));
    }

    #[test]
    fn contexts_are_read_back_and_the_local_one_stays_at_the_top() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cobox/config.toml");
        let update = |update: &dyn Fn(&mut Contexts)| {
            Contexts::update(&path, |contexts| {
                update(contexts);
                Ok(())
            })
            .unwrap();
        };
        update(&|c| c.insert(LOCAL, entry("http://x:1", KeyLocation::File("/k".into()))));
        update(&|c| c.insert("prod", entry("https://y", KeyLocation::Keyring)));
        update(&|c| c.select("prod").unwrap());
        let contexts = Contexts::read(&path).unwrap();
        assert_eq!((contexts.current(), contexts.iter().count()), (Some("prod"), 2));
        assert_eq!(contexts.get("prod").unwrap().key, KeyLocation::Keyring);
        let text = std::fs::read_to_string(&path).unwrap();
        let top: toml::Table = toml::from_str(&text).unwrap();
        assert_eq!((top["url"].as_str(), top["api_key_file"].as_str()), (Some("http://x:1"), Some("/k")), "{text}");
        update(&|c| drop(c.remove("prod").unwrap()));
        assert_eq!(Contexts::read(&path).unwrap().current(), Some(LOCAL));
    }

    #[test]
    fn a_failed_update_leaves_the_file_unchanged() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.toml");
        let failed = Contexts::update(&path, |contexts| {
            contexts.insert("a", entry("http://x", KeyLocation::Keyring));
            contexts.select("b")
        });
        let failure = failed.unwrap_err();
        assert!(failure.message.contains("no context `b`") && failure.advice.unwrap().contains("available contexts: a"));
        assert!(!path.exists());
    }

    #[test]
    fn a_single_context_is_current_and_none_of_several_is() {
        let a = "[contexts.a]\nurl = \"http://a\"\nkeyring = true\n";
        assert_eq!(parse_config(a).unwrap().current(), Some("a"));
        assert_eq!(parse_config(&format!("{a}[contexts.b]\nurl = \"http://b\"\nkeyring = true\n")).unwrap().current(), None);
    }

    #[test]
    fn an_invalid_file_is_reported_with_the_offending_key() {
        for (text, named) in [
            ("url = \"http://x\"", "api_key_file"),
            ("api_key_file = \"/k\"", "url"),
            ("[contexts.a]\nurl = \"http://x\"", "[contexts.a]"),
            ("[contexts.\"../x\"]\nurl = \"http://x\"\nkeyring = true", "letters, digits"),
            ("current = \"gone\"", "gone"),
            ("url = 1", "url"),
        ] {
            let failure = parse_config(text).unwrap_err();
            assert!(failure.message.contains(named) || failure.message.contains("invalid type"), "{text}: {}", failure.message);
        }
    }

    #[test]
    fn a_context_name_is_a_valid_file_name() {
        for valid in ["prod", "eu-1", "a.b_c", "1"] {
            assert!(parse_name(valid).is_ok(), "{valid}");
        }
        for invalid in ["", ".", "..", "-x", "a/b", "a b", "é", &"x".repeat(65)] {
            assert!(parse_name(invalid).is_err(), "{invalid}");
        }
    }
}
