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

use crate::{data_dir::replace, failure::Failure, printer::visible};

/// The context that `cobox up` writes. It is at the top of the file, for compatibility with files from before named
/// contexts.
pub const LOCAL: &str = "local";
/// Longest name of a context, in bytes: it is also a file name.
const MAX_NAME: usize = 64;
/// First line of a file that cobox writes.
const HEADER: &str = "# Brokers that cobox knows. `cobox config` writes this file, and keeps no comments.\n";

/// Where a context's API key is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeyPlace {
    File(PathBuf),
    Keyring,
}

/// One broker: its address, key and authorities.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub url: String,
    pub key: KeyPlace,
    pub ca_file: Option<PathBuf>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Contexts {
    current: Option<String>,
    entries: BTreeMap<String, Entry>,
}

impl Contexts {
    /// A missing file has no contexts.
    pub fn read(path: &Path) -> Result<Self, Failure> {
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Self::default()),
            Err(e) => return Err(anyhow!(e).context(format!("reading {}", path.display())).into()),
        };
        let wrong = |what: String| {
            Failure::new(format!("{} is not a client config: {what}", path.display())).with_advice(
                "a broker is two lines, url = \"http://…\" and api_key_file = \"/…\", alone or under [contexts.NAME]; or delete it and run `cobox up`",
            )
        };
        let written: Written = toml::from_str(&text).map_err(|e| wrong(e.message().to_owned()))?;
        written.try_into().map_err(wrong)
    }

    /// Changes the file, or leaves it unchanged if `change` fails. A lock serializes concurrent changes.
    pub fn change<T>(path: &Path, change: impl FnOnce(&mut Self) -> Result<T, Failure>) -> Result<T, Failure> {
        let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder).with_context(|| format!("making {}", folder.display()))?;
        let _one_at_a_time = lock(&path.with_extension("lock"))?;
        let mut contexts = Self::read(path)?;
        let before = contexts.clone();
        let outcome = change(&mut contexts)?;
        if contexts != before {
            let text = toml::to_string(&Written::from(contexts)).context("writing the client config")?;
            replace(path, format!("{HEADER}{text}").as_bytes()).with_context(|| format!("writing {}", path.display()))?;
        }
        Ok(outcome)
    }

    /// The context that commands use: the chosen one, else the one from `cobox up`, else the only one.
    pub fn current(&self) -> Option<&str> {
        let only = || self.entries.keys().next().filter(|_| self.entries.len() == 1);
        let local = || self.entries.get_key_value(LOCAL).map(|(name, _)| name);
        self.current.as_ref().or_else(local).or_else(only).map(String::as_str)
    }

    pub fn iter(&self) -> impl Iterator<Item = (&str, &Entry)> {
        self.entries.iter().map(|(name, entry)| (name.as_str(), entry))
    }

    pub fn find(&self, name: &str) -> Option<&Entry> {
        self.entries.get(name)
    }

    /// Like [`Contexts::find`], but the error for an unknown name lists the known ones.
    pub fn get(&self, name: &str) -> Result<&Entry, Failure> {
        self.entries.get(name).ok_or_else(|| {
            let names: Vec<&str> = self.entries.keys().map(String::as_str).collect();
            let there = if names.is_empty() { "there are none yet".to_owned() } else { format!("there are: {}", names.join(", ")) };
            Failure::new(format!("there is no context `{}`", visible(name)))
                .with_advice(format!("{there}; `cobox config add NAME --url URL` adds one"))
        })
    }

    pub fn use_one(&mut self, name: &str) -> Result<(), Failure> {
        self.get(name)?;
        self.current = Some(name.to_owned());
        Ok(())
    }

    pub fn put(&mut self, name: &str, entry: Entry) {
        self.entries.insert(name.to_owned(), entry);
    }

    pub fn remove(&mut self, name: &str) -> Result<Entry, Failure> {
        self.get(name)?;
        if self.current.as_deref() == Some(name) {
            self.current = None;
        }
        self.entries.remove(name).ok_or_else(|| Failure::new(format!("there is no context `{}`", visible(name))))
    }
}

/// Parses a context's name from a command line.
pub fn name(text: &str) -> Result<String, String> {
    let is_plain = text.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b));
    let starts_well = text.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric());
    if is_plain && starts_well && text.len() <= MAX_NAME {
        Ok(text.to_owned())
    } else {
        Err(format!("a context's name is letters, digits, `-`, `_` and `.`, at most {MAX_NAME}, and begins with a letter or a digit"))
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
struct Written {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    current: Option<String>,
    #[serde(flatten)]
    local: WrittenEntry,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    contexts: BTreeMap<String, WrittenEntry>,
}

#[derive(Default, Serialize, Deserialize)]
struct WrittenEntry {
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

impl TryFrom<Written> for Contexts {
    type Error = String;

    fn try_from(written: Written) -> Result<Self, String> {
        let mut entries = BTreeMap::new();
        let local = &written.local;
        if local.url.is_some() || local.api_key_file.is_some() || local.keyring || local.ca_file.is_some() {
            entries.insert(LOCAL.to_owned(), written.local.read()?);
        }
        for (name_, entry) in written.contexts {
            let name_ = name(&name_)?;
            let entry = entry.read().map_err(|e| format!("[contexts.{name_}]: {e}"))?;
            if entries.insert(name_, entry).is_some() {
                return Err(format!("`{LOCAL}` is the broker at the top of the file and can't be under [contexts] too"));
            }
        }
        if let Some(current) = written.current.as_ref().filter(|current| !entries.contains_key(*current)) {
            return Err(format!("current = \"{current}\" names a context that isn't there"));
        }
        Ok(Self { current: written.current, entries })
    }
}

impl From<Contexts> for Written {
    fn from(mut contexts: Contexts) -> Self {
        let local = contexts.entries.remove(LOCAL).map(WrittenEntry::from).unwrap_or_default();
        let others = contexts.entries.into_iter().map(|(name, entry)| (name, entry.into())).collect();
        Self { current: contexts.current, local, contexts: others }
    }
}

impl WrittenEntry {
    fn read(self) -> Result<Entry, String> {
        let key = match (self.api_key_file, self.keyring) {
            (Some(path), false) => KeyPlace::File(path),
            (None, true) => KeyPlace::Keyring,
            (Some(_), true) => return Err("api_key_file and keyring are two places for one key".to_owned()),
            (None, false) => return Err("missing field `api_key_file`".to_owned()),
        };
        Ok(Entry { url: self.url.ok_or("missing field `url`")?, key, ca_file: self.ca_file })
    }
}

impl From<Entry> for WrittenEntry {
    fn from(entry: Entry) -> Self {
        let (api_key_file, keyring) = match entry.key {
            KeyPlace::File(path) => (Some(path), false),
            KeyPlace::Keyring => (None, true),
        };
        Self { url: Some(entry.url), api_key_file, keyring, ca_file: entry.ca_file }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(url: &str, key: KeyPlace) -> Entry {
        Entry { url: url.into(), key, ca_file: None }
    }

    fn written(text: &str) -> Result<Contexts, Failure> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.toml"), text).unwrap();
        Contexts::read(&dir.path().join("config.toml"))
    }

    #[test]
    fn a_file_with_one_broker_is_the_context_local() {
        let contexts = written("url = \"http://x:1\"\napi_key_file = \"/k\"\n").unwrap();
        assert_eq!(contexts.current(), Some(LOCAL));
        assert_eq!(contexts.get(LOCAL).unwrap(), &entry("http://x:1", KeyPlace::File("/k".into())));
    }

    #[test]
    fn what_is_written_is_read_again_and_what_up_wrote_stays_where_it_was() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cobox/config.toml");
        let change = |change: &dyn Fn(&mut Contexts)| {
            Contexts::change(&path, |contexts| {
                change(contexts);
                Ok(())
            })
            .unwrap();
        };
        change(&|c| c.put(LOCAL, entry("http://x:1", KeyPlace::File("/k".into()))));
        change(&|c| c.put("prod", entry("https://y", KeyPlace::Keyring)));
        change(&|c| c.use_one("prod").unwrap());
        let contexts = Contexts::read(&path).unwrap();
        assert_eq!((contexts.current(), contexts.iter().count()), (Some("prod"), 2));
        assert_eq!(contexts.get("prod").unwrap().key, KeyPlace::Keyring);
        let text = std::fs::read_to_string(&path).unwrap();
        let top: toml::Table = toml::from_str(&text).unwrap();
        assert_eq!((top["url"].as_str(), top["api_key_file"].as_str()), (Some("http://x:1"), Some("/k")), "{text}");
        change(&|c| drop(c.remove("prod").unwrap()));
        assert_eq!(Contexts::read(&path).unwrap().current(), Some(LOCAL));
    }

    #[test]
    fn a_change_that_fails_leaves_the_file_as_it_was() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.toml");
        let failed = Contexts::change(&path, |contexts| {
            contexts.put("a", entry("http://x", KeyPlace::Keyring));
            contexts.use_one("b")
        });
        let failure = failed.unwrap_err();
        assert!(failure.message.contains("no context `b`") && failure.advice.unwrap().contains("there are: a"));
        assert!(!path.exists());
    }

    #[test]
    fn the_only_context_is_the_current_one_and_of_several_none_is_guessed() {
        let a = "[contexts.a]\nurl = \"http://a\"\nkeyring = true\n";
        assert_eq!(written(a).unwrap().current(), Some("a"));
        assert_eq!(written(&format!("{a}[contexts.b]\nurl = \"http://b\"\nkeyring = true\n")).unwrap().current(), None);
    }

    #[test]
    fn what_is_wrong_with_a_file_is_named() {
        for (text, named) in [
            ("url = \"http://x\"", "api_key_file"),
            ("api_key_file = \"/k\"", "url"),
            ("[contexts.a]\nurl = \"http://x\"", "[contexts.a]"),
            ("[contexts.\"../x\"]\nurl = \"http://x\"\nkeyring = true", "letters, digits"),
            ("current = \"gone\"", "gone"),
            ("url = 1", "url"),
        ] {
            let told = written(text).unwrap_err();
            assert!(told.message.contains(named) || told.message.contains("invalid type"), "{text}: {}", told.message);
        }
    }

    #[test]
    fn a_name_can_be_a_file_s_too() {
        for good in ["prod", "eu-1", "a.b_c", "1"] {
            assert!(name(good).is_ok(), "{good}");
        }
        for bad in ["", ".", "..", "-x", "a/b", "a b", "é", &"x".repeat(65)] {
            assert!(name(bad).is_err(), "{bad}");
        }
    }
}
