//! The broker's configuration, read from TOML. Every omitted setting has a default that suits a single machine.

use std::{collections::BTreeMap, net::SocketAddr, path::PathBuf, time::Duration};

use cobox_gateway::Limits;
use cobox_protocol::{Secret, control::Alg, id::is_external_id, sandbox::is_sandbox_name};
use serde::Deserialize;

use crate::{
    body_rate::BodyLimits, domain::resources::records::TemplateSpec, oidc::OidcConfig, origin, thread_authority::ThreadAuthorityConfig,
};

/// Minimum lifetime of a token, in seconds: below it, clients would spend most of their time on refreshes.
pub const MIN_TOKEN_TTL_SECONDS: u64 = 60;
/// Maximum lifetime of a token, in seconds.
pub const MAX_TOKEN_TTL_SECONDS: u64 = 3600;
/// Minimum time without a heartbeat after which a node is considered dead, in seconds: one heartbeat a second, three of
/// them missed.
const MIN_NODE_TIMEOUT_SECONDS: u64 = 4;

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Address to listen on; port 0 selects a free one.
    pub listen: SocketAddr,
    /// URL under which clients reach the broker, without a trailing slash. Defaults to the address it is bound to.
    pub public_url: Option<String>,
    /// URL under which clients reach this broker's own sandboxes, if it differs from `public_url`. Brokers that share
    /// one address each need their own.
    pub node_url: Option<String>,
    /// Gives each sandbox its own host name, `{sandbox_id}.<this>`. The broker's own routes are not served there.
    pub dataplane_domain: Option<String>,
    /// A second address that serves only the dataplane.
    pub gateway_listen: Option<SocketAddr>,
    /// URL under which clients reach the dataplane if it has its own address, without a trailing slash. With
    /// `dataplane_domain`, only its scheme and port are used.
    pub gateway_url: Option<String>,
    /// Also serve `/dp/…` under the broker's own address when the dataplane has a separate one.
    pub dataplane_on_main_origin: bool,
    /// Limits on concurrent requests and connections through the gateway.
    pub gateway_limits: Limits,
    /// `postgres://…`: a database that several brokers may share. If unset, the broker uses a file in the data
    /// directory.
    pub database_url: Option<Secret>,
    /// Other brokers on the same database consider this one dead after this time without a heartbeat.
    pub node_timeout_seconds: u64,
    /// Contains `broker.db`, `master.key` and the sandboxes.
    pub data_dir: PathBuf,
    /// Workspace of the keys that are created at the first start.
    pub workspace: String,
    pub token_ttl_seconds: u64,
    /// Time without activity until a sandbox becomes `idle`.
    pub idle_timeout_seconds: u64,
    /// Time without activity until a sandbox becomes `suspended`.
    pub lease_seconds: u64,
    /// Time in suspension until a sandbox becomes `terminated`.
    pub keep_suspended_seconds: u64,
    /// How long a released or deleted sandbox can be restored; 0 removes its files at once. Until then it counts
    /// against the quotas.
    pub keep_deleted_seconds: u64,
    /// How long a sandbox without a record is kept before its files are removed: time to restore the database that
    /// contains the record.
    pub quarantine_keep_seconds: u64,
    /// Running time after which a session ends. Its sandbox is suspended, or deleted if the policy says so.
    pub hard_ttl_seconds: u64,
    pub alg: Alg,
    /// Maximum number of existing sandboxes in a workspace, including suspended ones.
    pub max_sandboxes_per_workspace: u32,
    /// Maximum number of open client connections on each listening address.
    pub max_connections: u32,
    /// Maximum number of those whose client has not authenticated yet. At the limit, the oldest is closed. At most half
    /// of `max_connections`.
    pub max_unauthenticated_connections: u32,
    /// The same for one address (for IPv6, one /64 network); 0 means no limit. By default there is none if a proxy may
    /// be in front, because all clients then share its address.
    pub max_unauthenticated_connections_per_address: Option<u32>,
    /// Minimum speed of a request body.
    pub body_limits: BodyLimits,
    /// Interval between checks of the leases, in milliseconds.
    pub reaper_interval_ms: u64,
    /// How long audit records are kept.
    pub audit_keep_seconds: u64,
    /// How long the broker tries to write an audit record of a use, unless too many others wait.
    pub audit_retry_seconds: u64,
    /// The policy file. Defaults to `policy.toml` in the data directory, if that exists.
    pub policy_file: Option<PathBuf>,
    /// How long events are kept for clients that resume a stream.
    pub events_keep_seconds: u64,
    /// Maximum number of events kept per workspace. The newest are kept.
    pub events_keep_per_workspace: u32,
    /// Contains the secret that signs notices to `/webhooks/threads`. Without it, notices are refused.
    pub webhook_secret_file: Option<PathBuf>,
    pub cors: Cors,
    /// An OIDC issuer whose tokens are accepted in addition to API keys.
    pub oidc: Option<OidcConfig>,
    /// A LangGraph deployment that controls access to threads.
    pub thread_authority: Option<ThreadAuthorityConfig>,
    pub rate_limits: RateLimits,
    pub metrics: MetricsAccess,
    /// Certificate files, if the broker itself serves TLS.
    pub tls: Option<TlsFiles>,
    /// Allow listening on external addresses without TLS, because a proxy in front terminates it or the network is
    /// trusted.
    pub insecure_listen: bool,
    /// The `[templates.<name>]` tables. They are available in every workspace and take precedence over its own
    /// templates.
    pub templates: BTreeMap<String, TemplateSpec>,
    /// Maximum number of snapshots in a workspace. Each takes as much space as its sandbox's files.
    pub max_snapshots_per_workspace: u32,
    pub max_volumes_per_workspace: u32,
    /// Maximum total bytes of a workspace's snapshots, at their actual size, and volumes, at their maximum size.
    pub max_stored_bytes_per_workspace: u64,
}

/// Access to `GET /metrics` in addition to operators. Addresses are no criterion: a proxy on this machine has a
/// local address.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MetricsAccess {
    /// Any client that reaches the broker.
    pub public: bool,
    /// File with a token that a scraper sends as `Authorization: Bearer …`, so that it needs no operator's key.
    pub token_file: Option<PathBuf>,
}

/// PEM files, reloaded when they change.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TlsFiles {
    /// The server's own certificate first, followed by its issuers.
    pub cert: PathBuf,
    pub key: PathBuf,
}

/// A person mistypes a key a few times; a loop with an outdated key must slow down.
const FAILURES_PER_MINUTE: u32 = 300;

/// Maximum number of unauthenticated connections per address. A thousand clients can start at once on one machine: each
/// needs only a few milliseconds to authenticate.
const UNAUTHENTICATED_PER_ADDRESS: u32 = 1024;

/// Connection limits of one listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionLimits {
    pub total: u32,
    pub unauthenticated: u32,
    pub unauthenticated_per_address: Option<u32>,
}

/// Rate limits of the control plane; 0 disables a limit.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RateLimits {
    /// Per principal, regardless of the key.
    pub requests_per_second: u32,
    /// Requests allowed at once after a pause.
    pub request_burst: u32,
    /// Per principal: refresh, heartbeat and all requests that end something.
    pub upkeep_per_second: u32,
    pub upkeep_burst: u32,
    /// Requests without a valid credential per address (for IPv6, per /64 network). By default there is no limit if a
    /// proxy may be in front, because all clients then share its address.
    pub failures_per_minute: Option<u32>,
    pub failure_burst: u32,
}

impl Default for RateLimits {
    fn default() -> Self {
        Self {
            // Far above the use of one key by a team, far below the capacity of one broker.
            requests_per_second: 1000,
            request_burst: 10_000,
            upkeep_per_second: 1000,
            upkeep_burst: 10_000,
            failures_per_minute: None,
            failure_burst: 300,
        }
    }
}

/// Origins whose pages may access the broker. None by default.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Cors {
    /// As browsers send them: scheme, host and port only. A single `*` allows all origins.
    pub allow_origins: Vec<String>,
    /// Empty allows all methods of the API.
    pub allow_methods: Vec<String>,
    /// Empty allows all headers that the API reads.
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
                return invalid("cors.allow_origins", origin, "allows every origin; remove the other entries");
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
                return invalid("cors.allow_headers", header, "must be a header name");
            }
        }
        Ok(())
    }
}

fn or_default(named: &[String], all: &[&str]) -> Vec<String> {
    if named.is_empty() { all.iter().map(|w| (*w).to_owned()).collect() } else { named.to_vec() }
}

/// Browsers send origins in lower case and without the default port. Any other spelling would never match.
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
            // Allows for several missed heartbeats and a small clock skew.
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
            // A machine holds several hundred; more indicates a runaway client.
            max_sandboxes_per_workspace: 1000,
            max_connections: 4096,
            max_unauthenticated_connections: 2048,
            max_unauthenticated_connections_per_address: None,
            body_limits: BodyLimits::default(),
            reaper_interval_ms: 1000,
            audit_keep_seconds: 90 * DAY_SECONDS,
            // A restart or a failover of the database takes less.
            audit_retry_seconds: 300,
            policy_file: None,
            events_keep_seconds: 7 * DAY_SECONDS,
            // About 30 MiB.
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
        // The error doesn't quote the URL, because it contains a password.
        if self.database_url.as_ref().is_some_and(|u| !["postgres://", "postgresql://"].iter().any(|s| u.expose().starts_with(s))) {
            return invalid(
                "database_url",
                "must start with postgres://; without this setting the broker uses a SQLite file in its data directory",
            );
        }
        origin::validate(self)?;
        self.oidc.as_ref().map_or(Ok(()), OidcConfig::validate)?;
        self.thread_authority.as_ref().map_or(Ok(()), ThreadAuthorityConfig::validate)?;
        for (name, spec) in &self.templates {
            if !is_sandbox_name(name) {
                return invalid("templates", &format!("`{name}` is not a valid name; use 1 to 63 letters, digits, `-`, `_` or `.`"));
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

    /// True if sandboxes are not reached under the broker's own address alone.
    pub fn has_own_origin(&self) -> bool {
        self.dataplane_domain.is_some() || self.gateway_listen.is_some()
    }

    /// Scheme of URLs to the broker's own listeners.
    pub fn scheme(&self) -> &'static str {
        if self.tls.is_some() { "https" } else { "http" }
    }
    /// Limit on requests without a valid credential per address. Behind a proxy all clients share one address, so the
    /// proxy must apply the limit.
    pub fn failures_per_minute(&self) -> u32 {
        let unless_told = if self.insecure_listen { 0 } else { FAILURES_PER_MINUTE };
        self.rate_limits.failures_per_minute.unwrap_or(unless_told)
    }
    /// Behind a proxy all clients share one address, so there is no limit per address unless it is configured.
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

    pub fn audit_retry(&self) -> Duration {
        Duration::from_secs(self.audit_retry_seconds)
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
    fn failures_of_an_address_are_not_counted_behind_a_proxy_by_default() {
        let counted = |text: &str| Config::from_toml(text).unwrap().failures_per_minute();
        assert_eq!((counted(""), counted("insecure_listen = true")), (300, 0));
        assert_eq!(counted("insecure_listen = true\n[rate_limits]\nfailures_per_minute = 300"), 300);
        assert_eq!(counted("[rate_limits]\nfailures_per_minute = 0"), 0);
    }

    #[test]
    fn unauthenticated_connections_of_an_address_are_not_limited_behind_a_proxy_by_default() {
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
