//! The broker's settings, read from TOML; what is left out has a default that suits one machine.

use std::{collections::BTreeMap, net::SocketAddr, path::PathBuf, time::Duration};

use cobox_gateway::Limits;
use cobox_protocol::{Secret, control::Alg, id::is_external_id, sandbox::is_sandbox_name};
use serde::Deserialize;

use crate::{domain::kinds::TemplateSpec, oidc::OidcConfig, paced::BodyLimits, thread_authority::ThreadAuthorityConfig};

use crate::origin;

/// Shortest life of a token, in seconds: below it clients would do little but refresh.
pub const MIN_TOKEN_TTL_SECONDS: u64 = 60;
/// Longest life of a token, in seconds.
pub const MAX_TOKEN_TTL_SECONDS: u64 = 3600;
/// Shortest silence that counts as death, in seconds: a beat a second, and three of them in vain.
const MIN_NODE_TIMEOUT_SECONDS: u64 = 4;

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Where the broker listens; port 0 takes a free one.
    pub listen: SocketAddr,
    /// How clients reach the broker, without a slash at the end. By default the address it is bound to.
    pub public_url: Option<String>,
    /// How clients reach this broker's own sandboxes, where that isn't `public_url`: several brokers behind one address have
    /// one of these each.
    pub node_url: Option<String>,
    /// Gives each sandbox a host name of its own, `{sandbox_id}.<this>`; nothing of the broker is served there.
    pub dataplane_domain: Option<String>,
    /// A second address, on which there is the dataplane and nothing else.
    pub gateway_listen: Option<SocketAddr>,
    /// How clients reach the dataplane where it has an address of its own, without a slash at the end. With `dataplane_domain` its
    /// scheme and its port count.
    pub gateway_url: Option<String>,
    /// Serve `/dp/…` under the broker's own address too, although the dataplane has another.
    pub dataplane_on_main_origin: bool,
    /// What may be under way through the gateway at once.
    pub gateway_limits: Limits,
    /// `postgres://…`: a database that several brokers may share. Without it, a file in the data directory.
    pub database_url: Option<Secret>,
    /// A broker that was silent for this long counts as dead for the others on its database.
    pub node_timeout_seconds: u64,
    /// Holds `broker.db`, `master.key` and the sandboxes.
    pub data_dir: PathBuf,
    /// Where keys made at the first start belong.
    pub workspace: String,
    pub token_ttl_seconds: u64,
    /// Without activity for this long: `idle`.
    pub idle_timeout_seconds: u64,
    /// Without activity for this long: `suspended`.
    pub lease_seconds: u64,
    /// Suspended for this long: `terminated`.
    pub keep_suspended_seconds: u64,
    /// A released or deleted sandbox can be restored for this long; 0 removes its files at once. It counts against the quotas until then.
    pub keep_deleted_seconds: u64,
    /// A sandbox that no record knows is kept for this long before its files are removed: time to restore the database that has it.
    pub quarantine_keep_seconds: u64,
    /// Running time after which a session ends. Its sandbox is suspended, or deleted where the policy says so.
    pub hard_ttl_seconds: u64,
    pub alg: Alg,
    /// Living sandboxes (suspended ones too) a workspace may have.
    pub max_sandboxes_per_workspace: u32,
    /// Open connections of clients, on each address it listens on.
    pub max_connections: u32,
    /// Of them, those whose client has shown no good credential yet; at the limit the oldest is closed. At most half of `max_connections`.
    pub max_unauthenticated_connections: u32,
    /// The same of one address (of IPv6: one /64 network); 0 is no limit. Unless told, none where a proxy in front may be: all clients
    /// have its address then.
    pub max_unauthenticated_connections_per_address: Option<u32>,
    /// How slowly a request's body may arrive.
    pub body_limits: BodyLimits,
    /// How often leases are looked at, in milliseconds.
    pub reaper_interval_ms: u64,
    /// How long audit records are kept.
    pub audit_keep_seconds: u64,
    /// What whom is allowed. Without it, `policy.toml` in the data directory where that is there.
    pub policy_file: Option<PathBuf>,
    /// How long events are kept, for whoever comes back to a stream of them.
    pub events_keep_seconds: u64,
    /// Events kept of one workspace: the newest.
    pub events_keep_per_workspace: u32,
    /// Holds the secret that notices to `/webhooks/threads` are signed with; without it none are taken.
    pub webhook_secret_file: Option<PathBuf>,
    pub cors: Cors,
    /// An issuer whose tokens are a second way in.
    pub oidc: Option<OidcConfig>,
    /// A LangGraph deployment that says who may see which thread.
    pub thread_authority: Option<ThreadAuthorityConfig>,
    pub rate_limits: RateLimits,
    pub metrics: MetricsAccess,
    /// What the broker shows to speak TLS itself.
    pub tls: Option<TlsFiles>,
    /// Listens beyond this machine without TLS: a proxy in front has it, or nobody else is on the network.
    pub insecure_listen: bool,
    /// The `[templates.<name>]` tables: for every workspace, and before their own.
    pub templates: BTreeMap<String, TemplateSpec>,
    /// Snapshots a workspace may have: each takes what its sandbox's files take.
    pub max_snapshots_per_workspace: u32,
    pub max_volumes_per_workspace: u32,
    /// Bytes that a workspace's snapshots, as they are, and volumes, as large as they may become, take together.
    pub max_stored_bytes_per_workspace: u64,
}

/// Who reads `GET /metrics` beside operators. An address says nothing about that: a proxy on this machine has this machine's.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MetricsAccess {
    /// Whoever reaches the broker.
    pub public: bool,
    /// Who sends what this file holds as `Authorization: Bearer …`: a scraper needs no operator's key.
    pub token_file: Option<PathBuf>,
}

/// PEM files; read anew when they change.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TlsFiles {
    /// The server's own certificate first, its issuers after it.
    pub cert: PathBuf,
    pub key: PathBuf,
}

/// A person types a key wrong a few times; a loop with an old key is told to slow down.
const FAILURES_PER_MINUTE: u32 = 300;

/// Unauthenticated connections of one address. A thousand clients that start at once on one machine have room; a client needs a few
/// milliseconds to show its credential.
const UNAUTHENTICATED_PER_ADDRESS: u32 = 1024;

/// How many connections one listener takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionLimits {
    pub total: u32,
    pub unauthenticated: u32,
    pub unauthenticated_per_address: Option<u32>,
}

/// How often somebody may ask the control plane. What is 0 is not limited.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RateLimits {
    /// Of one principal, whatever its keys.
    pub requests_per_second: u32,
    /// At once, after a pause.
    pub request_burst: u32,
    /// Of one principal: refresh, heartbeat and all that ends something.
    pub upkeep_per_second: u32,
    pub upkeep_burst: u32,
    /// Requests without a good credential from one address (of IPv6: one /64 network).
    /// Unless told, none where a proxy in front may be: all clients have its address then.
    pub failures_per_minute: Option<u32>,
    pub failure_burst: u32,
}

impl Default for RateLimits {
    fn default() -> Self {
        Self {
            // Far above what a team does with one key, far below what one broker answers.
            requests_per_second: 1000,
            request_burst: 10_000,
            upkeep_per_second: 1000,
            upkeep_burst: 10_000,
            failures_per_minute: None,
            failure_burst: 300,
        }
    }
}

/// Pages of which origins may speak to the broker: none, unless named.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Cors {
    /// As a browser says it: scheme, host and port, nothing after. `*` alone stands for all.
    pub allow_origins: Vec<String>,
    /// Left empty: all that the API has.
    pub allow_methods: Vec<String>,
    /// Left empty: all that the API reads.
    pub allow_headers: Vec<String>,
}

impl Cors {
    pub const ANY: &str = "*";

    pub fn methods(&self) -> Vec<String> {
        or_default(&self.allow_methods, &["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
    }

    pub fn headers(&self) -> Vec<String> {
        let read = ["authorization", "content-type", "x-api-key", "idempotency-key", "prefer", "if-match", "if-none-match", "range"];
        or_default(&self.allow_headers, &[&read[..], &["last-event-id", "x-file-mode", "x-thread-authorization"]].concat())
    }

    fn validate(&self) -> Result<(), ConfigError> {
        let invalid = |field, value: &str, problem: &str| Err(ConfigError::Invalid { field, problem: format!("`{value}` {problem}") });
        for origin in &self.allow_origins {
            let is_any = origin == Self::ANY;
            if is_any && self.allow_origins.len() > 1 {
                return invalid("cors.allow_origins", origin, "stands for all; leave the others out");
            }
            if !is_any && !is_origin(origin) {
                return invalid("cors.allow_origins", origin, "must be like https://app.example.com or http://localhost:5173");
            }
        }
        for method in &self.allow_methods {
            if method.is_empty() || !method.bytes().all(|b| b.is_ascii_uppercase()) {
                return invalid("cors.allow_methods", method, "must be a method such as GET");
            }
        }
        for header in &self.allow_headers {
            if http::HeaderName::try_from(header.as_str()).is_err() {
                return invalid("cors.allow_headers", header, "must be a header's name");
            }
        }
        Ok(())
    }
}

fn or_default(named: &[String], all: &[&str]) -> Vec<String> {
    if named.is_empty() { all.iter().map(|w| (*w).to_owned()).collect() } else { named.to_vec() }
}

/// Browsers write them in lower case and without the default port's number; another spelling would never match.
fn is_origin(text: &str) -> bool {
    let Some((scheme, host)) = text.split_once("://") else { return false };
    let is_scheme = scheme.starts_with(|c: char| c.is_ascii_lowercase())
        && scheme.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b"+-.".contains(&b));
    let is_host = !host.is_empty() && host.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b"-._:[]".contains(&b));
    let has_default_port = scheme == "http" && host.ends_with(":80") || scheme == "https" && host.ends_with(":443");
    is_scheme && is_host && !has_default_port
}

const DAY_SECONDS: u64 = 24 * 60 * 60;

impl Default for Config {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 8421)),
            public_url: None,
            node_url: None,
            dataplane_domain: None,
            gateway_listen: None,
            gateway_url: None,
            dataplane_on_main_origin: false,
            gateway_limits: Limits::default(),
            database_url: None,
            // Several beats in vain, and clocks that are a little off.
            node_timeout_seconds: 20,
            data_dir: PathBuf::from(".cobox"),
            workspace: "default".to_owned(),
            token_ttl_seconds: 900,
            idle_timeout_seconds: 900,
            lease_seconds: 3600,
            keep_suspended_seconds: 7 * DAY_SECONDS,
            keep_deleted_seconds: 3600,
            quarantine_keep_seconds: 7 * DAY_SECONDS,
            hard_ttl_seconds: 28_800,
            alg: Alg::EdDsa,
            // A machine holds several hundred; more than this is a runaway client.
            max_sandboxes_per_workspace: 1000,
            max_connections: 4096,
            max_unauthenticated_connections: 2048,
            max_unauthenticated_connections_per_address: None,
            body_limits: BodyLimits::default(),
            reaper_interval_ms: 1000,
            audit_keep_seconds: 90 * DAY_SECONDS,
            policy_file: None,
            events_keep_seconds: 7 * DAY_SECONDS,
            // Some 30 MiB.
            events_keep_per_workspace: 100_000,
            webhook_secret_file: None,
            cors: Cors::default(),
            rate_limits: RateLimits::default(),
            metrics: MetricsAccess::default(),
            tls: None,
            insecure_listen: false,
            oidc: None,
            thread_authority: None,
            templates: BTreeMap::new(),
            max_snapshots_per_workspace: 100,
            max_volumes_per_workspace: 100,
            max_stored_bytes_per_workspace: 1 << 40,
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("the configuration can't be read: {0}")]
    Unreadable(#[from] toml::de::Error),
    #[error("{field}: {problem}")]
    Invalid { field: &'static str, problem: String },
}

impl Config {
    pub fn from_toml(text: &str) -> Result<Self, ConfigError> {
        let config: Self = toml::from_str(text)?;
        config.validate()?;
        Ok(config)
    }

    pub fn validate(&self) -> Result<(), ConfigError> {
        let invalid = |field, problem: &str| Err(ConfigError::Invalid { field, problem: problem.to_owned() });
        if !(MIN_TOKEN_TTL_SECONDS..=MAX_TOKEN_TTL_SECONDS).contains(&self.token_ttl_seconds) {
            return invalid("token_ttl_seconds", "must be from 60 to 3600");
        }
        for (field, value) in [
            ("idle_timeout_seconds", self.idle_timeout_seconds),
            ("keep_suspended_seconds", self.keep_suspended_seconds),
            ("quarantine_keep_seconds", self.quarantine_keep_seconds),
            ("hard_ttl_seconds", self.hard_ttl_seconds),
            ("reaper_interval_ms", self.reaper_interval_ms),
            ("audit_keep_seconds", self.audit_keep_seconds),
            ("events_keep_seconds", self.events_keep_seconds),
            ("events_keep_per_workspace", u64::from(self.events_keep_per_workspace)),
            ("max_sandboxes_per_workspace", u64::from(self.max_sandboxes_per_workspace)),
            ("max_connections", u64::from(self.max_connections)),
            ("max_unauthenticated_connections", u64::from(self.max_unauthenticated_connections)),
            ("body_limits.grace_seconds", u64::from(self.body_limits.grace_seconds)),
            ("body_limits.minimum_bytes_per_second", u64::from(self.body_limits.minimum_bytes_per_second)),
            ("body_limits.deadline_seconds", u64::from(self.body_limits.deadline_seconds)),
        ] {
            if value == 0 {
                return invalid(field, "must be at least 1");
            }
        }
        if self.node_timeout_seconds < MIN_NODE_TIMEOUT_SECONDS {
            return invalid("node_timeout_seconds", "must be at least 4");
        }
        if self.lease_seconds < self.idle_timeout_seconds {
            return invalid("lease_seconds", "must not be shorter than idle_timeout_seconds");
        }
        if !is_external_id(&self.workspace) {
            return invalid("workspace", "must have 1 to 256 characters and no control characters");
        }
        for (field, url) in [("public_url", &self.public_url), ("node_url", &self.node_url), ("gateway_url", &self.gateway_url)] {
            if let Some(url) = url
                && (!(url.starts_with("http://") || url.starts_with("https://")) || url.ends_with('/') || url.contains(['?', '#', ' ']))
            {
                return invalid(field, "must start with http:// or https:// and have no slash at the end, no query and no fragment");
            }
        }
        // What is wrong with it is said without it: it has a password in it.
        if self.database_url.as_ref().is_some_and(|u| !["postgres://", "postgresql://"].iter().any(|s| u.expose().starts_with(s))) {
            return invalid("database_url", "must start with postgres://; without it the broker keeps a file in its data directory");
        }
        origin::validate(self)?;
        self.oidc.as_ref().map_or(Ok(()), OidcConfig::validate)?;
        self.thread_authority.as_ref().map_or(Ok(()), ThreadAuthorityConfig::validate)?;
        for (name, spec) in &self.templates {
            if !is_sandbox_name(name) {
                return invalid("templates", &format!("`{name}` can't be a name: 1 to 63 letters, digits, `-`, `_` or `.`"));
            }
            if let Err(e) = spec.check() {
                return invalid("templates", &format!("{name}: {}", e.message));
            }
        }
        self.cors.validate()
    }

    pub const fn quarantine_keep(&self) -> Duration {
        Duration::from_secs(self.quarantine_keep_seconds)
    }

    /// Whether sandboxes are reached elsewhere than under the broker's own address.
    pub fn has_own_origin(&self) -> bool {
        self.dataplane_domain.is_some() || self.gateway_listen.is_some()
    }

    /// Of URLs that lead to its own listeners.
    pub fn scheme(&self) -> &'static str {
        if self.tls.is_some() { "https" } else { "http" }
    }
    /// How many requests without a good credential one address may send. Behind a proxy it is everybody's, so there the proxy counts.
    pub fn failures_per_minute(&self) -> u32 {
        let unless_told = if self.insecure_listen { 0 } else { FAILURES_PER_MINUTE };
        self.rate_limits.failures_per_minute.unwrap_or(unless_told)
    }
    /// Behind a proxy one address is every client's, so there is no limit for each unless it is configured.
    pub fn connection_limits(&self) -> ConnectionLimits {
        let per_address = if self.insecure_listen { 0 } else { UNAUTHENTICATED_PER_ADDRESS };
        let per_address = self.max_unauthenticated_connections_per_address.unwrap_or(per_address);
        ConnectionLimits {
            total: self.max_connections,
            unauthenticated: self.max_unauthenticated_connections.min(self.max_connections.div_ceil(2)),
            unauthenticated_per_address: (per_address > 0).then_some(per_address),
        }
    }
    pub fn token_ttl(&self) -> Duration {
        Duration::from_secs(self.token_ttl_seconds)
    }
    pub fn node_timeout(&self) -> Duration {
        Duration::from_secs(self.node_timeout_seconds)
    }
    pub fn idle_timeout(&self) -> Duration {
        Duration::from_secs(self.idle_timeout_seconds)
    }
    pub fn lease(&self) -> Duration {
        Duration::from_secs(self.lease_seconds)
    }
    pub fn keep_deleted(&self) -> Duration {
        Duration::from_secs(self.keep_deleted_seconds)
    }

    pub fn keep_suspended(&self) -> Duration {
        Duration::from_secs(self.keep_suspended_seconds)
    }
    pub fn hard_ttl(&self) -> Duration {
        Duration::from_secs(self.hard_ttl_seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_of_an_address_are_not_counted_behind_a_proxy_unless_told() {
        let counted = |text: &str| Config::from_toml(text).unwrap().failures_per_minute();
        assert_eq!((counted(""), counted("insecure_listen = true")), (300, 0));
        assert_eq!(counted("insecure_listen = true\n[rate_limits]\nfailures_per_minute = 300"), 300);
        assert_eq!(counted("[rate_limits]\nfailures_per_minute = 0"), 0);
    }

    #[test]
    fn unauthenticated_connections_of_an_address_are_not_limited_behind_a_proxy_unless_told() {
        let limits = |text: &str| Config::from_toml(text).unwrap().connection_limits();
        let per_address = |text: &str| limits(text).unauthenticated_per_address;
        assert_eq!((per_address(""), per_address("insecure_listen = true")), (Some(1024), None));
        assert_eq!(per_address("insecure_listen = true\nmax_unauthenticated_connections_per_address = 9"), Some(9));
        assert_eq!(per_address("max_unauthenticated_connections_per_address = 0"), None);
        assert_eq!(limits("max_connections = 10").unauthenticated, 5);
    }

    #[test]
    fn an_empty_file_is_the_default_and_a_wrong_value_names_its_field() {
        assert_eq!(Config::from_toml("").unwrap().token_ttl_seconds, 900);
        for (text, field) in [
            ("token_ttl_seconds = 30", "token_ttl_seconds"),
            ("idle_timeout_seconds = 0", "idle_timeout_seconds"),
            ("lease_seconds = 10", "lease_seconds"),
            ("public_url = \"ftp://x\"", "public_url"),
            ("tokn_ttl = 3", "tokn_ttl"),
            ("node_url = \"http://x/\"", "node_url"),
            ("node_timeout_seconds = 1", "node_timeout_seconds"),
            ("database_url = \"mysql://ann:hidden@x/y\"", "database_url"),
            ("alg = \"none\"", "alg"),
            ("[cors]\nallow_origins = [\"https://a.example/\"]", "cors.allow_origins"),
            ("[cors]\nallow_origins = [\"https://A.example\"]", "cors.allow_origins"),
            ("[cors]\nallow_origins = [\"https://a.example:443\"]", "cors.allow_origins"),
            ("[cors]\nallow_origins = [\"null\"]", "cors.allow_origins"),
            ("[cors]\nallow_origins = [\"*\", \"https://a.example\"]", "cors.allow_origins"),
            ("[oidc]\nissuer = \"http://id.example\"\naudience = \"a\"", "oidc.issuer"),
            ("[oidc]\nissuer = \"https://id.example\"\naudience = []", "oidc.audience"),
            ("[oidc]\nissuer = \"https://id.example\"\naudience = \"a\"\nalgorithms = [\"HS256\"]", "HS256"),
            ("[oidc]\nissuer = \"https://id.example\"\naudience = \"a\"\nalgorithms = [\"none\"]", "none"),
            ("[oidc]\nissuer = \"https://id.example\"\naudience = \"a\"\nkind = \"operator\"", "oidc.kind"),
            ("[oidc]\nissuer = \"https://id.example\"\naudience = \"a\"\nkind_claim = \"roles\"", "oidc.kind_claim"),
            ("[oidc]\nissuer = \"https://id.example\"\naudience = \"a\"\nleeway_seconds = 900", "oidc.leeway_seconds"),
            ("[thread_authority]\nurl = \"http://lg.example\"", "thread_authority.url"),
            ("[thread_authority]\nurl = \"https://lg.example\"\ncredential_header = \"x-api-key\"", "thread_authority.credential_header"),
            (
                "[thread_authority]\nurl = \"https://lg.example\"\ncredential_header = \"authorization\"",
                "thread_authority.credential_header",
            ),
            ("[thread_authority]\nurl = \"https://lg.example\"\nuser_header = \"x-user\"", "thread_authority.service_key_file"),
            ("[thread_authority]\nurl = \"https://lg.example\"\nremember_seconds = 60", "thread_authority.remember_seconds"),
            ("[cors]\nallow_methods = [\"get\"]", "cors.allow_methods"),
            ("[cors]\nallow_headers = [\"a b\"]", "cors.allow_headers"),
        ] {
            let error = Config::from_toml(text).unwrap_err().to_string();
            assert!(error.contains(field) && !error.contains("hidden"), "{text}: {error}");
        }
    }
}
