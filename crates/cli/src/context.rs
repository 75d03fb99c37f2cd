//! Which broker a command talks to and with which key: flags, then environment, then the config that `cobox up` wrote.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use anyhow::{Context as _, anyhow};
use cobox_client::{Client, ClientError, check_url};
use cobox_protocol::{ErrorCode, Secret};
use serde::{Deserialize, Serialize};

use crate::{failure::Failure, printer::Printer};

/// Longest key file read, in bytes: a key is 74 characters, and a wrong file need not be read whole.
const MAX_KEY_FILE: u64 = 4096;

/// Most that is read of a file of certificates, in bytes: a whole system's authorities are a quarter of it.
const MAX_CA_FILE: u64 = 1024 * 1024;

/// What `cobox up` leaves for the client commands of the same user.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientConfig {
    pub url: String,
    pub api_key_file: PathBuf,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca_file: Option<PathBuf>,
}

/// The flags that choose a broker.
#[derive(Clone, Debug, Default)]
pub struct Flags {
    pub url: Option<String>,
    pub api_key_file: Option<PathBuf>,
    pub ca_file: Option<PathBuf>,
}

/// Reads the environment; a closure so that precedence can be tested without touching the process's own.
pub type Environment<'a> = &'a dyn Fn(&str) -> Option<OsString>;

pub struct Context {
    pub printer: Printer,
    flags: Flags,
    key_source: OnceLock<String>,
}

impl Context {
    pub fn new(printer: Printer, flags: Flags) -> Self {
        Self { printer, flags, key_source: OnceLock::new() }
    }

    /// Where the broker is and what is shown to it.
    pub fn broker(&self) -> Result<Broker, Failure> {
        resolve(&self.flags, &|name| std::env::var_os(name))
    }

    /// Certificates of authorities to trust beside the system's, whoever is spoken to: those that were named for it.
    pub fn authorities(&self) -> Result<Option<Vec<u8>>, Failure> {
        let named = self.flags.ca_file.clone().or_else(|| std::env::var_os("COBOX_CA_FILE").filter(|v| !v.is_empty()).map(PathBuf::from));
        named.as_deref().map(read_ca).transpose()
    }

    /// A client of what speaks a broker's routes at another address.
    pub fn client_at(&self, url: &str, key: Secret) -> Result<Client, Failure> {
        Ok(match self.authorities()? {
            Some(pem) => Client::trusting(url, key, &pem)?,
            None => Client::new(url, key)?,
        })
    }

    pub fn client(&self) -> Result<Client, Failure> {
        let Broker { url, api_key, key_source, ca_file } = self.broker()?;
        // Resolved twice it is the same.
        let _ = self.key_source.set(key_source);
        match ca_file {
            None => Ok(Client::new(&url, api_key)?),
            Some(path) => Client::trusting(&url, api_key, &read_ca(&path)?).map_err(|e| match e {
                ClientError::InvalidAuthority { .. } => Failure::new(format!("{}: {e}", path.display())),
                other => other.into(),
            }),
        }
    }

    /// A refused key is named by where it came from: there are four places.
    pub fn explain(&self, failure: Failure) -> Failure {
        match self.key_source.get() {
            Some(source) if failure.api.as_ref().is_some_and(|a| a.code == ErrorCode::Unauthenticated.as_str()) => {
                failure.advise(format!("check the API key, which came from {source}"))
            }
            _ => failure,
        }
    }
}

#[derive(Debug)]
pub struct Broker {
    pub url: String,
    pub api_key: Secret,
    /// For people: the file or the variable.
    pub key_source: String,
    /// Authorities to trust beside the system's.
    pub ca_file: Option<PathBuf>,
}

pub fn resolve(flags: &Flags, env: Environment) -> Result<Broker, Failure> {
    let text = |name: &str| env(name).and_then(|v| v.into_string().ok()).filter(|v| !v.is_empty());
    let config_path = config_path(env);
    let config = match &config_path {
        Some(path) => read_config(path)?,
        None => None,
    };
    let asked_url = flags.url.clone().or_else(|| text("COBOX_URL"));
    if let Some(url) = &asked_url {
        check_url(url)?;
    }
    let from_file = |path: &Path| read_key(path).map(|key| (key, path.display().to_string()));
    let asked_key = match &flags.api_key_file {
        Some(path) => Some(from_file(path)?),
        None => match (text("COBOX_API_KEY"), text("COBOX_API_KEY_FILE")) {
            (Some(key), _) => Some((Secret::new(key), "COBOX_API_KEY".to_owned())),
            (None, Some(path)) => Some(from_file(Path::new(&path))?),
            (None, None) => None,
        },
    };
    let missing = |what: &str| {
        let place = config_path.as_deref().map_or_else(|| "the client config".to_owned(), |p| p.display().to_string());
        Failure::new(format!("no {what} is configured: neither flags, environment nor {place} give one"))
            .advise("run `cobox up` to start a broker here, or set COBOX_URL and COBOX_API_KEY")
    };
    let url = match (&asked_url, &config) {
        (Some(url), _) => url.clone(),
        (None, Some(config)) => config.url.clone(),
        (None, None) => return Err(missing("broker")),
    };
    let (api_key, key_source) = match (asked_key, &config) {
        (Some(key), _) => key,
        // The configured key belongs to the configured broker: another one must not be shown it.
        (None, Some(config)) if config.url.trim_end_matches('/') != url.trim_end_matches('/') => {
            return Err(Failure::new(format!("no API key is given for {url}; the configured one belongs to {}", config.url))
                .advise("set COBOX_API_KEY, or name its file with --api-key-file"));
        }
        (None, Some(config)) => from_file(&config.api_key_file)?,
        (None, None) => return Err(missing("API key")),
    };
    let ca_file = flags.ca_file.clone().or_else(|| text("COBOX_CA_FILE").map(PathBuf::from));
    // Trust, too, is for the configured broker alone.
    let configured =
        config.filter(|config| config.url.trim_end_matches('/') == url.trim_end_matches('/')).and_then(|config| config.ca_file);
    Ok(Broker { url, api_key, key_source, ca_file: ca_file.or(configured) })
}

/// `COBOX_CONFIG`, or `cobox/config.toml` under the user's configuration directory.
pub fn config_path(env: Environment) -> Option<PathBuf> {
    if let Some(path) = env("COBOX_CONFIG").filter(|p| !p.is_empty()) {
        return Some(path.into());
    }
    Some(user_dir(env, "XDG_CONFIG_HOME", ".config")?.join("cobox/config.toml"))
}

/// `cobox` under the user's data directory, where `cobox up` keeps everything.
pub fn default_data_dir(env: Environment) -> Option<PathBuf> {
    Some(user_dir(env, "XDG_DATA_HOME", ".local/share")?.join("cobox"))
}

fn user_dir(env: Environment, variable: &str, in_home: &str) -> Option<PathBuf> {
    // The XDG rules: a relative path there is to be ignored.
    let named = env(variable).map(PathBuf::from).filter(|p| p.is_absolute());
    named.or_else(|| env("HOME").filter(|h| !h.is_empty()).map(|home| Path::new(&home).join(in_home)))
}

pub fn read_config(path: &Path) -> Result<Option<ClientConfig>, Failure> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(anyhow!(e).context(format!("reading {}", path.display())).into()),
    };
    let config = toml::from_str(&text).map_err(|e| {
        Failure::new(format!("{} is not a client config: {}", path.display(), e.message()))
            .advise("it has two lines: url = \"http://…\" and api_key_file = \"/…\"; or delete it and run `cobox up`")
    })?;
    Ok(Some(config))
}

fn read_ca(path: &Path) -> Result<Vec<u8>, Failure> {
    use std::io::Read;
    let mut pem = Vec::new();
    std::fs::File::open(path)
        .and_then(|file| file.take(MAX_CA_FILE).read_to_end(&mut pem))
        .with_context(|| format!("reading the authorities' certificates from {}", path.display()))?;
    Ok(pem)
}

pub fn read_key(path: &Path) -> Result<Secret, Failure> {
    use std::io::Read;
    let mut text = String::new();
    std::fs::File::open(path)
        .and_then(|file| file.take(MAX_KEY_FILE).read_to_string(&mut text))
        .with_context(|| format!("reading the API key from {}", path.display()))?;
    match text.trim() {
        "" => Err(Failure::new(format!("{} holds no API key: it is empty", path.display()))),
        text if !text.bytes().all(|b| b.is_ascii_graphic()) => {
            Err(Failure::new(format!("{} holds no API key: a key is one word that starts with cbx_", path.display())))
        }
        key => Ok(Secret::new(key)),
    }
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
        fn resolve(&self, flags: &Flags) -> Result<Broker, Failure> {
            resolve(flags, &|name| self.vars.get(name).map(OsString::from))
        }
    }

    #[test]
    fn flags_win_over_environment_and_environment_over_config() {
        let home = Home::new().configured();
        let broker = home.resolve(&Flags::default()).unwrap();
        assert_eq!((broker.url.as_str(), broker.api_key.expose()), ("http://config:1", "from-config"));

        let home = home.with("COBOX_URL", "http://env:2").with("COBOX_API_KEY", "from-env");
        let broker = home.resolve(&Flags::default()).unwrap();
        assert_eq!((broker.url.as_str(), broker.api_key.expose()), ("http://env:2", "from-env"));

        let flags = Flags { url: Some("http://flag:3".into()), api_key_file: Some(home.file("other", "from-flag")), ca_file: None };
        let broker = home.resolve(&flags).unwrap();
        assert_eq!((broker.url.as_str(), broker.api_key.expose()), ("http://flag:3", "from-flag"));
    }

    #[test]
    fn a_key_file_named_in_the_environment_is_read() {
        let home = Home::new().configured();
        let path = home.file("third", "from-file");
        let home = home.with("COBOX_API_KEY_FILE", path.display().to_string());
        assert_eq!(home.resolve(&Flags::default()).unwrap().api_key.expose(), "from-file");
    }

    #[test]
    fn the_configured_key_is_not_shown_to_another_broker() {
        let home = Home::new().configured().with("COBOX_URL", "http://stranger:9");
        let failure = home.resolve(&Flags::default()).unwrap_err();
        assert!(failure.what.contains("http://stranger:9"), "{failure:?}");
        let home = home.with("COBOX_URL", "http://config:1/");
        assert_eq!(home.resolve(&Flags::default()).unwrap().api_key.expose(), "from-config");
    }

    #[test]
    fn what_is_wrong_with_a_url_or_a_key_file_is_said_first_and_by_name() {
        let home = Home::new().configured().with("COBOX_URL", "nonsense");
        assert!(home.resolve(&Flags::default()).unwrap_err().what.contains("`nonsense` is not a usable broker URL"));
        for text in ["", "two words", "caf\u{e9}"] {
            let home = Home::new().configured();
            let flags = Flags { url: None, api_key_file: Some(home.file("bad-key", text)), ca_file: None };
            assert!(home.resolve(&flags).unwrap_err().what.contains("bad-key holds no API key"), "{text}");
        }
    }

    #[test]
    fn without_any_configuration_the_error_says_to_run_cobox_up() {
        let failure = Home::new().resolve(&Flags::default()).unwrap_err();
        assert!(failure.advice.unwrap().contains("cobox up"));
    }

    #[test]
    fn cobox_config_and_the_xdg_directory_move_the_config() {
        let home = Home::new();
        let key = home.file("key", "k");
        let path = home.file("elsewhere.toml", &format!("url = \"http://moved:1\"\napi_key_file = {key:?}\n"));
        let xdg = home.dir.path().join("xdg");
        home.file("xdg/cobox/config.toml", &format!("url = \"http://xdg:1\"\napi_key_file = {key:?}\n"));
        let home = home.with("XDG_CONFIG_HOME", xdg.display().to_string());
        assert_eq!(home.resolve(&Flags::default()).unwrap().url, "http://xdg:1");
        let home = home.with("COBOX_CONFIG", path.display().to_string());
        assert_eq!(home.resolve(&Flags::default()).unwrap().url, "http://moved:1");
    }
}
