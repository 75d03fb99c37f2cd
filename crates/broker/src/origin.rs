//! Where clients reach the dataplane: under the broker's own address, at a separate address, or by a host name per
//! sandbox.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use cobox_gateway::Domain;
use cobox_protocol::SandboxId;

use crate::config::{Config, ConfigError};

/// Placeholder for the sandbox's id in an [`Origin`].
const SANDBOX: &str = "{sandbox}";

/// Base URL of a node's sandboxes, without a trailing slash: either the parent of `/dp/{id}`, or a URL with a
/// placeholder for the id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin(String);

impl Origin {
    /// The origin of this broker. `public_url` is the broker's own URL, `gateway` the address its second listener is
    /// bound to.
    pub fn of(config: &Config, public_url: &str, gateway: Option<SocketAddr>) -> Self {
        let base = match (&config.gateway_url, gateway) {
            (Some(url), _) => url.clone(),
            (None, Some(address)) => format!("{}://{}", config.scheme(), reachable(address)),
            (None, None) => config.node_url.clone().unwrap_or_else(|| public_url.to_owned()),
        };
        match &config.dataplane_domain {
            None => Self(base),
            Some(domain) => {
                let (scheme, authority) = parts(&base);
                let port = port(authority).map_or_else(String::new, |p| format!(":{p}"));
                Self(format!("{scheme}://{SANDBOX}.{domain}{port}"))
            }
        }
    }

    /// The origin that another node recorded.
    pub fn read(text: String) -> Self {
        Self(text)
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    pub fn url(&self, sandbox: &SandboxId) -> String {
        if self.0.contains(SANDBOX) { self.0.replacen(SANDBOX, sandbox.as_str(), 1) } else { format!("{}/dp/{sandbox}", self.0) }
    }
}

/// Replaces the wildcard address, which doesn't work in a URL.
fn reachable(mut address: SocketAddr) -> SocketAddr {
    match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => address.set_ip(Ipv4Addr::LOCALHOST.into()),
        IpAddr::V6(ip) if ip.is_unspecified() => address.set_ip(Ipv6Addr::LOCALHOST.into()),
        _ => {}
    }
    address
}

/// Checks that the settings of the dataplane's address are consistent.
pub fn validate(config: &Config) -> Result<(), ConfigError> {
    let invalid = |field, problem: String| Err(ConfigError::Invalid { field, problem });
    let has_own_listener = config.gateway_listen.is_some();
    if let Some(name) = &config.dataplane_domain {
        let domain = match Domain::new(name) {
            Ok(domain) => domain,
            Err(e) => return invalid("dataplane_domain", e.to_string()),
        };
        if config.public_url.as_deref().is_some_and(|url| domain.contains(parts(url).1)) {
            return invalid(
                "dataplane_domain",
                format!("{name} contains the host of public_url, but is reserved for sandboxes; use another host for the broker"),
            );
        }
    } else if config.gateway_url.is_some() && !has_own_listener {
        let problem = "requires gateway_listen or dataplane_domain; node_url sets the URL of sandboxes under the broker's own address";
        return invalid("gateway_url", problem.to_owned());
    }
    if config.gateway_listen.is_some_and(|a| a.port() != 0 && a == config.listen) {
        return invalid("gateway_listen", "is the same address as listen; leave it out, or use another port".to_owned());
    }
    if config.node_url.is_some() && (has_own_listener || config.gateway_url.is_some()) {
        return invalid("node_url", "conflicts with the dataplane's own address; set gateway_url and leave node_url out".to_owned());
    }
    for (field, value) in [
        ("gateway_limits.requests_per_sandbox", u64::from(config.gateway_limits.requests_per_sandbox)),
        ("gateway_limits.websockets_per_sandbox", u64::from(config.gateway_limits.websockets_per_sandbox)),
        ("gateway_limits.requests_per_session", u64::from(config.gateway_limits.requests_per_session)),
        ("gateway_limits.websockets_per_session", u64::from(config.gateway_limits.websockets_per_session)),
        ("gateway_limits.bytes_in_flight_per_session", config.gateway_limits.bytes_in_flight_per_session),
        ("gateway_limits.websockets", u64::from(config.gateway_limits.websockets)),
    ] {
        if value == 0 {
            return invalid(field, "must be at least 1".to_owned());
        }
    }
    Ok(())
}

/// Scheme and authority of a validated URL.
fn parts(url: &str) -> (&str, &str) {
    let (scheme, rest) = url.split_once("://").unwrap_or(("http", url));
    (scheme, rest.split('/').next().unwrap_or_default())
}

fn port(authority: &str) -> Option<&str> {
    authority.rsplit_once(':').map(|(_, port)| port).filter(|p| !p.is_empty() && p.bytes().all(|b| b.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_url_of_a_sandbox_follows_the_configuration() {
        let id = SandboxId::new();
        let url = |text: &str, gateway: Option<&str>| {
            let config = Config::from_toml(text).unwrap();
            Origin::of(&config, "https://cobox.example.com", gateway.map(|a| a.parse().unwrap())).url(&id)
        };
        let by_path = |base: &str| format!("{base}/dp/{id}");
        assert_eq!(url("", None), by_path("https://cobox.example.com"));
        assert_eq!(url("node_url = \"http://n1\"", None), by_path("http://n1"));
        assert_eq!(url("gateway_listen = \"127.0.0.1:0\"", Some("127.0.0.1:77")), by_path("http://127.0.0.1:77"));
        assert_eq!(url("gateway_listen = \"0.0.0.0:0\"", Some("0.0.0.0:77")), by_path("http://127.0.0.1:77"));
        let own = "gateway_listen = \"0.0.0.0:0\"\ngateway_url = \"https://dp.example.net:8443\"\n";
        assert_eq!(url(own, Some("0.0.0.0:77")), by_path("https://dp.example.net:8443"));
        let named = "dataplane_domain = \"box.example.com\"\n";
        assert_eq!(url(named, None), format!("https://{id}.box.example.com"));
        assert_eq!(url(&format!("{named}{own}"), Some("0.0.0.0:77")), format!("https://{id}.box.example.com:8443"));
        assert_eq!(url(&format!("{named}gateway_url = \"http://[::1]:80\""), None), format!("http://{id}.box.example.com:80"));
        assert_eq!(Origin::read("http://{sandbox}.n2:1".into()).url(&id), format!("http://{id}.n2:1"), "another node's");
    }

    #[test]
    fn contradictory_settings_are_refused_by_field() {
        for (text, field, words) in [
            ("dataplane_domain = \"Box.example.com\"", "dataplane_domain", "lower-case"),
            ("dataplane_domain = \"https://box.example.com\"", "dataplane_domain", "host name"),
            ("dataplane_domain = \"a.example\"\npublic_url = \"https://x.a.example:1\"", "dataplane_domain", "public_url"),
            ("dataplane_domain = \"a.example\"\npublic_url = \"https://a.example\"", "dataplane_domain", "public_url"),
            ("gateway_url = \"https://a.example\"", "gateway_url", "gateway_listen"),
            ("gateway_url = \"a.example\"\ngateway_listen = \"127.0.0.1:0\"", "gateway_url", "http://"),
            ("gateway_listen = \"127.0.0.1:8421\"", "gateway_listen", "same address"),
            ("gateway_listen = \"127.0.0.1:0\"\nnode_url = \"http://n1\"", "node_url", "gateway_url"),
            ("[gateway_limits]\nwebsockets_per_session = 0", "gateway_limits.websockets_per_session", "at least 1"),
            ("[gateway_limits]\nrequests = 1", "requests", "unknown field"),
        ] {
            let error = Config::from_toml(text).unwrap_err().to_string();
            assert!(error.contains(field) && error.contains(words), "{text}: {error}");
        }
    }
}
