//! Resolves which broker a command uses and with which key: flags, then environment, then a context of the config
//! file.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use anyhow::Context as _;
use cobox_client::{Client, ClientError, check_url};
use cobox_protocol::{ErrorCode, Secret};

use crate::{
    contexts::{Contexts, KeyLocation},
    credentials::{self, KeyFileOrigin, StoredKey},
    failure::Failure,
    keyring::Account,
    printer::Printer,
    thread_cache::ThreadCache,
};

/// Bytes read from a certificate file at most: all authorities of a system take a quarter of it.
const MAX_CA_FILE_BYTES: u64 = 1024 * 1024;

/// The flags that select a broker.
#[derive(Clone, Debug, Default)]
pub struct BrokerFlags {
    pub context: Option<String>,
    pub url: Option<String>,
    pub api_key_file: Option<PathBuf>,
    pub ca_file: Option<PathBuf>,
}

/// Reads an environment variable. A closure, so that tests of precedence don't touch the process's environment.
pub type Environment<'a> = &'a dyn Fn(&str) -> Option<OsString>;

pub struct Context {
    pub printer: Printer,
    pub flags: BrokerFlags,
    resolved: OnceLock<ResolvedBroker>,
}

/// The broker of this run, resolved once.
struct ResolvedBroker {
    client: Client,
    key_source: String,
    cache: Option<ThreadCache>,
}

impl Context {
    pub fn new(printer: Printer, flags: BrokerFlags) -> Self {
        Self { printer, flags, resolved: OnceLock::new() }
    }

    /// The broker's address and the credentials for it.
    pub fn broker(&self) -> Result<Broker, Failure> {
        resolve(&self.flags, &|name| std::env::var_os(name))
    }

    /// Certificates of additional authorities, from the flag or `COBOX_CA_FILE`, to trust for any server besides the
    /// system's.
    pub fn authorities(&self) -> Result<Option<Vec<u8>>, Failure> {
        let path = self.flags.ca_file.clone().or_else(|| std::env::var_os("COBOX_CA_FILE").filter(|v| !v.is_empty()).map(PathBuf::from));
        path.as_deref().map(read_ca).transpose()
    }

    /// A client for another server that implements the broker's routes.
    pub fn client_at(&self, url: &str, key: Secret) -> Result<Client, Failure> {
        Ok(match self.authorities()? {
            Some(pem) => Client::trusting(url, key, &pem)?,
            None => Client::new(url, key)?,
        })
    }

    pub fn client(&self) -> Result<Client, Failure> {
        if let Some(resolved) = self.resolved.get() {
            return Ok(resolved.client.clone());
        }
        let env: Environment = &|name| std::env::var_os(name);
        let Broker { url, api_key, key_source, ca_file, warning } = resolve(&self.flags, env)?;
        if let Some(warning) = warning {
            self.printer.note(&warning);
        }
        let cache = ThreadCache::for_broker(&url, &api_key, env);
        let client = match ca_file {
            None => Client::new(&url, api_key)?,
            Some(path) => Client::trusting(&url, api_key, &read_ca(&path)?).map_err(|e| match e {
                ClientError::InvalidAuthority { .. } => Failure::new(format!("{}: {e}", path.display())),
                other => other.into(),
            })?,
        };
        Ok(self.resolved.get_or_init(|| ResolvedBroker { client, key_source, cache }).client.clone())
    }

    /// The thread cache of this broker; `None` until the broker is resolved.
    pub fn thread_cache(&self) -> Option<&ThreadCache> {
        self.resolved.get()?.cache.as_ref()
    }

    /// Adds the source of a refused key to the error, because there are several possible sources.
    pub fn explain(&self, failure: Failure) -> Failure {
        match self.resolved.get() {
            Some(resolved) if failure.api.as_ref().is_some_and(|a| a.code == ErrorCode::Unauthenticated.as_str()) => {
                failure.with_advice(format!("check the API key, which came from {}", resolved.key_source))
            }
            _ => failure,
        }
    }
}

#[derive(Debug)]
pub struct Broker {
    pub url: String,
    pub api_key: Secret,
    /// For messages: the file, the variable or the context.
    pub key_source: String,
    /// Authorities to trust besides the system's.
    pub ca_file: Option<PathBuf>,
    /// A warning for the user that is no reason to stop.
    pub warning: Option<String>,
}

/// A value and, for messages, its source.
#[derive(Clone, Debug)]
pub struct Sourced<T> {
    pub value: T,
    pub source: String,
}

/// The source of the API key.
#[derive(Clone, Debug)]
pub enum KeySource {
    /// `COBOX_API_KEY`.
    Variable(Secret),
    File(PathBuf),
    Context(Account, KeyLocation),
}

/// The settings that flags, environment and config resolve to, before any key is read.
#[derive(Clone, Debug)]
pub struct BrokerSelection {
    pub config_path: Option<PathBuf>,
    pub context: Option<Sourced<String>>,
    pub url: Option<Sourced<String>>,
    pub key: Option<Sourced<KeySource>>,
    /// Set when there is a key that belongs to the broker at this URL, which is not the selected one.
    pub key_belongs_to: Option<String>,
    pub ca_file: Option<Sourced<PathBuf>>,
}

pub fn select_broker(flags: &BrokerFlags, env: Environment) -> Result<BrokerSelection, Failure> {
    let text = |name: &str| env(name).and_then(|v| v.into_string().ok()).filter(|v| !v.is_empty());
    let sourced = |source: &str, value: Option<String>| value.map(|value| Sourced { value, source: source.to_owned() });
    let config_path = config_path(env);
    let contexts = config_path.as_deref().map(Contexts::read).transpose()?.unwrap_or_default();
    let context = sourced("--context", flags.context.clone())
        .or_else(|| sourced("COBOX_CONTEXT", text("COBOX_CONTEXT")))
        .or_else(|| sourced("the config file", contexts.current().map(str::to_owned)));
    let entry = context.as_ref().map(|context| contexts.get(&context.value)).transpose()?;
    let by_context = context.as_ref().map(|context| format!("context `{}`", context.value)).unwrap_or_default();
    // A context selected by a flag has a flag's precedence: environment variables don't override it.
    let variable = |name: &str| if flags.context.is_some() { None } else { sourced(name, text(name)) };

    let explicit_url = sourced("--url", flags.url.clone()).or_else(|| variable("COBOX_URL"));
    if let Some(url) = &explicit_url {
        check_url(&url.value)?;
    }
    let url = explicit_url.or_else(|| sourced(&by_context, entry.map(|entry| entry.url.clone())));
    // A context's key and authorities are only for its own broker: no other server may receive the key.
    let is_same_broker =
        |entry_url: &str| url.as_ref().is_some_and(|selected| selected.value.trim_end_matches('/') == entry_url.trim_end_matches('/'));
    let own_entry = entry.filter(|entry| is_same_broker(&entry.url));

    let file = |source: &str, path: Option<PathBuf>| path.map(|path| Sourced { value: KeySource::File(path), source: source.to_owned() });
    let from_variable = |key: Sourced<String>| Sourced { value: KeySource::Variable(Secret::new(key.value)), source: key.source };
    let key = file("--api-key-file", flags.api_key_file.clone())
        .or_else(|| variable("COBOX_API_KEY").map(from_variable))
        .or_else(|| file("COBOX_API_KEY_FILE", variable("COBOX_API_KEY_FILE").map(|path| path.value.into())))
        .or_else(|| {
            let (context, entry) = (context.as_ref()?, own_entry?);
            let account = Account { context: context.value.clone(), url: entry.url.clone() };
            Some(Sourced { value: KeySource::Context(account, entry.key.clone()), source: by_context.clone() })
        });
    let path = |sourced: Sourced<String>| Sourced { value: PathBuf::from(sourced.value), source: sourced.source };
    let ca_file = flags
        .ca_file
        .clone()
        .map(|value| Sourced { value, source: "--ca-file".to_owned() })
        .or_else(|| variable("COBOX_CA_FILE").map(path))
        .or_else(|| own_entry.and_then(|entry| entry.ca_file.clone()).map(|value| Sourced { value, source: by_context.clone() }));
    let key_belongs_to = entry.filter(|_| own_entry.is_none()).map(|entry| entry.url.clone());
    Ok(BrokerSelection { config_path, context, url, key, key_belongs_to, ca_file })
}

pub fn resolve(flags: &BrokerFlags, env: Environment) -> Result<Broker, Failure> {
    let BrokerSelection { config_path, context: _, url, key, key_belongs_to, ca_file } = select_broker(flags, env)?;
    let not_configured = |what: &str| {
        let location = config_path.as_deref().map_or_else(|| "the client config".to_owned(), |p| p.display().to_string());
        Failure::new(format!("no {what} is configured in flags, environment or {location}"))
            .with_advice("run `cobox up` to start a broker here, `cobox config use` to choose one, or set COBOX_URL and COBOX_API_KEY")
    };
    let url = url.ok_or_else(|| not_configured("broker"))?.value;
    let key = key.ok_or_else(|| match key_belongs_to {
        Some(owner_url) => Failure::new(format!("no API key is configured for {url}; the configured key belongs to {owner_url}"))
            .with_advice("set COBOX_API_KEY, or pass its file with --api-key-file"),
        None => not_configured("API key"),
    })?;
    let (StoredKey { key: api_key, warning }, key_source) = match &key.value {
        KeySource::Variable(key) => (StoredKey { key: key.clone(), warning: None }, "COBOX_API_KEY".to_owned()),
        KeySource::File(path) => (credentials::read_file(path, KeyFileOrigin::Caller)?, path.display().to_string()),
        KeySource::Context(account, location) => {
            let source = match location {
                KeyLocation::File(path) => path.display().to_string(),
                KeyLocation::Keyring => format!("the keyring, for context `{}`", account.context),
            };
            (credentials::read_key(account, location)?, source)
        }
    };
    Ok(Broker { url, api_key, key_source, ca_file: ca_file.map(|sourced| sourced.value), warning })
}

/// `COBOX_CONFIG`, or `cobox/config.toml` under the user's configuration directory.
pub fn config_path(env: Environment) -> Option<PathBuf> {
    if let Some(path) = env("COBOX_CONFIG").filter(|p| !p.is_empty()) {
        return Some(path.into());
    }
    Some(user_dir(env, "XDG_CONFIG_HOME", ".config")?.join("cobox/config.toml"))
}

/// `cobox` under the user's data directory, where `cobox up` stores its data.
pub fn default_data_dir(env: Environment) -> Option<PathBuf> {
    Some(user_dir(env, "XDG_DATA_HOME", ".local/share")?.join("cobox"))
}

/// A user directory according to the XDG rules.
pub fn user_dir(env: Environment, variable: &str, in_home: &str) -> Option<PathBuf> {
    // The XDG rules require that relative paths are ignored.
    let absolute = env(variable).map(PathBuf::from).filter(|p| p.is_absolute());
    absolute.or_else(|| env("HOME").filter(|h| !h.is_empty()).map(|home| Path::new(&home).join(in_home)))
}

pub fn read_ca(path: &Path) -> Result<Vec<u8>, Failure> {
    use std::io::Read;
    let mut pem = Vec::new();
    std::fs::File::open(path)
        .and_then(|file| file.take(MAX_CA_FILE_BYTES).read_to_end(&mut pem))
        .with_context(|| format!("reading CA certificates from {}", path.display()))?;
    Ok(pem)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    struct Home {
        dir: tempfile::TempDir,
        vars: HashMap<&'static str, String>,
    }

    impl Home {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let vars = HashMap::from([("HOME", dir.path().display().to_string())]);
            Self { dir, vars }
        }
        fn with(mut self, name: &'static str, value: impl Into<String>) -> Self {
            self.vars.insert(name, value.into());
            self
        }
        fn file(&self, name: &str, text: &str) -> PathBuf {
            let path = self.dir.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, text).unwrap();
            path
        }
        fn configured(self) -> Self {
            let key = self.file("key", "from-config\n");
            self.file(".config/cobox/config.toml", &format!("url = \"http://config:1\"\napi_key_file = {key:?}\n"));
            self
        }
        fn resolve(&self, flags: &BrokerFlags) -> Result<Broker, Failure> {
            resolve(flags, &|name| self.vars.get(name).map(OsString::from))
        }
    }

    #[test]
    fn flags_win_over_environment_and_environment_over_config() {
        let home = Home::new().configured();
        let broker = home.resolve(&BrokerFlags::default()).unwrap();
        assert_eq!((broker.url.as_str(), broker.api_key.expose()), ("http://config:1", "from-config"));

        let home = home.with("COBOX_URL", "http://env:2").with("COBOX_API_KEY", "from-env");
        let broker = home.resolve(&BrokerFlags::default()).unwrap();
        assert_eq!((broker.url.as_str(), broker.api_key.expose()), ("http://env:2", "from-env"));

        let flags = BrokerFlags {
            url: Some("http://flag:3".into()),
            api_key_file: Some(home.file("other", "from-flag")),
            ..BrokerFlags::default()
        };
        let broker = home.resolve(&flags).unwrap();
        assert_eq!((broker.url.as_str(), broker.api_key.expose()), ("http://flag:3", "from-flag"));
    }

    #[test]
    fn a_key_file_named_in_the_environment_is_read() {
        let home = Home::new().configured();
        let path = home.file("third", "from-file");
        let home = home.with("COBOX_API_KEY_FILE", path.display().to_string());
        assert_eq!(home.resolve(&BrokerFlags::default()).unwrap().api_key.expose(), "from-file");
    }

    #[test]
    fn the_configured_key_is_not_sent_to_another_broker() {
        let home = Home::new().configured().with("COBOX_URL", "http://stranger:9");
        let failure = home.resolve(&BrokerFlags::default()).unwrap_err();
        assert!(failure.message.contains("http://stranger:9"), "{failure:?}");
        let home = home.with("COBOX_URL", "http://config:1/");
        assert_eq!(home.resolve(&BrokerFlags::default()).unwrap().api_key.expose(), "from-config");
    }

    #[test]
    fn errors_name_the_invalid_url_or_key_file() {
        let home = Home::new().configured().with("COBOX_URL", "nonsense");
        assert!(home.resolve(&BrokerFlags::default()).unwrap_err().message.contains("`nonsense` is not a usable broker URL"));
        for text in ["", "two words", "caf\u{e9}"] {
            let home = Home::new().configured();
            let flags = BrokerFlags { api_key_file: Some(home.file("bad-key", text)), ..BrokerFlags::default() };
            assert!(home.resolve(&flags).unwrap_err().message.contains("bad-key contains no API key"), "{text}");
        }
    }

    #[test]
    fn without_any_configuration_the_error_says_to_run_cobox_up() {
        let failure = Home::new().resolve(&BrokerFlags::default()).unwrap_err();
        assert!(failure.advice.unwrap().contains("cobox up"));
    }

    #[test]
    fn the_config_path_follows_cobox_config_and_xdg() {
        let home = Home::new();
        let key = home.file("key", "k");
        let path = home.file("elsewhere.toml", &format!("url = \"http://moved:1\"\napi_key_file = {key:?}\n"));
        let xdg = home.dir.path().join("xdg");
        home.file("xdg/cobox/config.toml", &format!("url = \"http://xdg:1\"\napi_key_file = {key:?}\n"));
        let home = home.with("XDG_CONFIG_HOME", xdg.display().to_string());
        assert_eq!(home.resolve(&BrokerFlags::default()).unwrap().url, "http://xdg:1");
        let home = home.with("COBOX_CONFIG", path.display().to_string());
        assert_eq!(home.resolve(&BrokerFlags::default()).unwrap().url, "http://moved:1");
    }

    #[test]
    fn a_context_is_chosen_by_flag_then_environment_then_the_file() {
        let home = Home::new().configured();
        let keys = ["prod", "test"].map(|name| home.file(&format!("keys/{name}"), &format!("key-of-{name}")));
        let file = home.dir.path().join(".config/cobox/config.toml");
        let local = std::fs::read_to_string(&file).unwrap();
        let context = |name: &str, key: &Path| format!("[contexts.{name}]\nurl = \"https://{name}\"\napi_key_file = {key:?}\n");
        let others = context("prod", &keys[0]) + &context("test", &keys[1]);
        std::fs::write(&file, format!("{local}{others}")).unwrap();
        let url_and_key = |home: &Home, flags: &BrokerFlags| home.resolve(flags).map(|b| (b.url, b.api_key.expose().to_owned()));
        let expected = |url: &str, key: &str| (url.to_owned(), key.to_owned());
        assert_eq!(url_and_key(&home, &BrokerFlags::default()).unwrap(), expected("http://config:1", "from-config"));
        std::fs::write(&file, format!("current = \"test\"\n{local}{others}")).unwrap();
        assert_eq!(url_and_key(&home, &BrokerFlags::default()).unwrap(), expected("https://test", "key-of-test"));
        let home = home.with("COBOX_CONTEXT", "prod");
        assert_eq!(url_and_key(&home, &BrokerFlags::default()).unwrap(), expected("https://prod", "key-of-prod"));
        let flags = BrokerFlags { context: Some("local".into()), ..BrokerFlags::default() };
        assert_eq!(url_and_key(&home, &flags).unwrap(), expected("http://config:1", "from-config"));
        let unknown = BrokerFlags { context: Some("nope".into()), ..BrokerFlags::default() };
        assert!(url_and_key(&home, &unknown).unwrap_err().advice.unwrap().contains("local, prod, test"));
    }

    #[test]
    fn the_environment_overrides_a_context_unless_a_flag_selected_it() {
        let home =
            Home::new().configured().with("COBOX_URL", "http://env:2").with("COBOX_API_KEY", "from-env").with("COBOX_CONTEXT", "local");
        assert_eq!(home.resolve(&BrokerFlags::default()).unwrap().url, "http://env:2");
        let broker = home.resolve(&BrokerFlags { context: Some("local".into()), ..BrokerFlags::default() }).unwrap();
        assert_eq!((broker.url.as_str(), broker.api_key.expose()), ("http://config:1", "from-config"));
    }

    #[test]
    fn the_selection_has_the_source_of_each_value_and_reads_no_key() {
        let home = Home::new().configured().with("COBOX_CA_FILE", "/nonexistent");
        std::fs::remove_file(home.dir.path().join("key")).unwrap();
        let selection = select_broker(&BrokerFlags::default(), &|name| home.vars.get(name).map(OsString::from)).unwrap();
        assert_eq!(selection.context.unwrap().source, "the config file");
        assert_eq!(selection.url.unwrap().source, "context `local`");
        assert_eq!(selection.ca_file.unwrap().source, "COBOX_CA_FILE");
        assert!(matches!(selection.key.unwrap().value, KeySource::Context(..)));
    }
}
