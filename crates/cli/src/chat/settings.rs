//! Resolves which deployment a chat uses and with which key: flags, then environment, then `chat.toml` beside the
//! client's config.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use cobox_protocol::Secret;
use serde::Deserialize;

use crate::{
    context::{Environment, config_path},
    credentials::{KeyFileOrigin, read_file},
    failure::Failure,
};

/// Variables from which LangGraph's own clients read their key; reused because users may have set them already.
const LANGGRAPH_KEY_VARIABLES: [&str; 2] = ["LANGGRAPH_API_KEY", "LANGSMITH_API_KEY"];

/// Contents of `chat.toml`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct ChatFile {
    deployment: Option<String>,
    api_key_file: Option<PathBuf>,
    assistant: Option<String>,
}

#[derive(Debug, Default)]
pub struct ChatSettings {
    pub deployment: Option<String>,
    pub key: Option<Secret>,
    pub assistant: Option<String>,
}

/// The broker's address and key: a deployment at the same address is used with the same key.
pub type BrokerCredentials<'a> = Option<(&'a str, &'a Secret)>;

pub fn resolve(
    deployment: Option<String>,
    assistant: Option<String>,
    env: Environment,
    broker: BrokerCredentials,
) -> Result<ChatSettings, Failure> {
    let text = |name: &str| env(name).and_then(|v| v.into_string().ok()).filter(|v| !v.is_empty());
    let config = match config_path(env).map(|path| path.with_file_name("chat.toml")) {
        Some(path) => read_chat_file(&path)?,
        None => ChatFile::default(),
    };
    let assistant = assistant.or_else(|| text("COBOX_ASSISTANT")).or(config.assistant);
    let Some(url) = deployment.or_else(|| text("COBOX_DEPLOYMENT_URL")).or_else(|| config.deployment.clone()) else {
        return Ok(ChatSettings { assistant, ..ChatSettings::default() });
    };
    let is_same_url = |other: &str| other.trim_end_matches('/') == url.trim_end_matches('/');
    let key = if let Some(key) = text("COBOX_DEPLOYMENT_KEY") {
        Some(Secret::new(key))
    } else if let Some(path) = text("COBOX_DEPLOYMENT_KEY_FILE") {
        Some(read_file(Path::new(&path), KeyFileOrigin::Caller)?.key)
    // The configured key belongs to the configured deployment, and the broker's key to the broker: no other server may
    // receive them.
    } else if let (Some(path), true) = (&config.api_key_file, config.deployment.as_deref().is_some_and(is_same_url)) {
        Some(read_file(path, KeyFileOrigin::Config)?.key)
    } else if let Some((_, key)) = broker.filter(|(broker, _)| is_same_url(broker)) {
        Some(key.clone())
    } else {
        LANGGRAPH_KEY_VARIABLES.iter().find_map(|name| text(name)).map(Secret::new)
    };
    Ok(ChatSettings { deployment: Some(url), key, assistant })
}

fn read_chat_file(path: &Path) -> Result<ChatFile, Failure> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(ChatFile::default()),
        Err(e) => return Err(anyhow::Error::new(e).context(format!("reading {}", path.display())).into()),
    };
    toml::from_str(&text)
        .with_context(|| format!("{} is not a chat config", path.display()))
        .map_err(|e| Failure::from(e).with_advice("it may contain deployment = \"http://…\", api_key_file = \"/…\" and assistant = \"…\""))
}

#[cfg(test)]
mod tests {
    use std::{collections::HashMap, ffi::OsString};

    use super::*;

    fn resolved(vars: &[(&str, &str)], deployment: Option<&str>, broker: BrokerCredentials) -> ChatSettings {
        let vars: HashMap<&str, &str> = vars.iter().copied().collect();
        resolve(deployment.map(str::to_owned), None, &|name| vars.get(name).map(OsString::from), broker).unwrap()
    }

    #[test]
    fn flags_win_over_environment_and_environment_over_the_file() {
        let home = tempfile::tempdir().unwrap();
        let key = home.path().join("key");
        std::fs::write(&key, "from-file\n").unwrap();
        let folder = home.path().join(".config/cobox");
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(
            folder.join("chat.toml"),
            format!("deployment = \"http://file:1\"\napi_key_file = {key:?}\nassistant = \"coder\"\n"),
        )
        .unwrap();
        let home = home.path().display().to_string();

        let found = resolved(&[("HOME", &home)], None, None);
        assert_eq!((found.deployment.as_deref(), found.assistant.as_deref()), (Some("http://file:1"), Some("coder")));
        assert_eq!(found.key.unwrap().expose(), "from-file");

        let found = resolved(&[("HOME", &home), ("COBOX_DEPLOYMENT_URL", "http://env:2")], None, None);
        assert_eq!(found.deployment.as_deref(), Some("http://env:2"));
        assert!(found.key.is_none(), "the configured key is not sent to another deployment");

        let found = resolved(&[("HOME", &home), ("COBOX_DEPLOYMENT_KEY", "k")], Some("http://flag:3"), None);
        assert_eq!((found.deployment.as_deref(), found.key.unwrap().expose()), (Some("http://flag:3"), "k"));
    }

    #[test]
    fn a_deployment_at_the_brokers_address_uses_the_brokers_key() {
        let key = Secret::new("ann");
        let broker = Some(("http://here:1", &key));
        assert_eq!(resolved(&[], Some("http://here:1/"), broker).key.unwrap().expose(), "ann");
        assert!(resolved(&[], Some("http://there:1"), broker).key.is_none());
        assert_eq!(resolved(&[("LANGSMITH_API_KEY", "l")], Some("http://there:1"), broker).key.unwrap().expose(), "l");
        assert!(resolved(&[], None, broker).deployment.is_none());
    }
}
