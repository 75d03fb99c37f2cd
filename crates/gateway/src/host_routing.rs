//! Maps host names to sandboxes: `{sandbox_id}.box.example.com` gives each sandbox an origin of its own.

use cobox_protocol::SandboxId;
use http::{HeaderMap, Uri, header};

/// A DNS name has at most 253 characters; a sandbox's ID and its dot take 30 of them.
const MAX_DOMAIN_CHARS: usize = 253 - 30;
const MAX_LABEL_CHARS: usize = 63;

/// The domain that contains all sandbox host names, in lower case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Domain(String);

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("`{0}` is not a valid domain: use a lower-case host name of at most {MAX_DOMAIN_CHARS} characters, such as box.example.com")]
pub struct InvalidDomain(String);

/// What a request's host name refers to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostTarget {
    /// A host outside the domain.
    OutsideDomain,
    DomainItself,
    Sandbox(SandboxId),
    /// A host in the domain whose label is not a sandbox ID.
    UnknownInDomain,
    /// Two hosts in one request: a proxy in front may have used the other one. Also a host that can't be parsed.
    Ambiguous,
}

impl Domain {
    pub fn new(name: &str) -> Result<Self, InvalidDomain> {
        let is_label = |label: &str| {
            !label.is_empty()
                && label.len() <= MAX_LABEL_CHARS
                && !label.starts_with('-')
                && !label.ends_with('-')
                && label.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
        };
        // An IP address has no subdomains.
        let is_number = name.rsplit('.').next().is_some_and(|last| last.bytes().all(|b| b.is_ascii_digit()));
        if name.len() > MAX_DOMAIN_CHARS || !name.split('.').all(is_label) || is_number {
            return Err(InvalidDomain(name.chars().take(MAX_DOMAIN_CHARS).collect()));
        }
        Ok(Self(name.to_owned()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether a host is the domain itself or a name in it, ignoring its port and a trailing dot.
    pub fn contains(&self, host: &str) -> bool {
        self.classify_host(host) != HostTarget::OutsideDomain
    }

    pub fn classify(&self, uri: &Uri, headers: &HeaderMap) -> HostTarget {
        let mut hosts = headers.get_all(header::HOST).iter();
        let (host, other) = (hosts.next(), hosts.next());
        if other.is_some() {
            return HostTarget::Ambiguous;
        }
        // An absolute URL in the request line takes precedence over the header.
        match (uri.host(), host.map(|h| h.to_str())) {
            (Some(host), _) | (None, Some(Ok(host))) => self.classify_host(host),
            (None, Some(Err(_))) => HostTarget::Ambiguous,
            (None, None) => HostTarget::OutsideDomain,
        }
    }

    fn classify_host(&self, host: &str) -> HostTarget {
        // A name has no colon; an IPv6 address never matches.
        let name = host.split(':').next().unwrap_or_default().to_ascii_lowercase();
        let name = name.strip_suffix('.').unwrap_or(&name);
        let Some(before) = name.strip_suffix(self.as_str()) else { return HostTarget::OutsideDomain };
        if before.is_empty() {
            return HostTarget::DomainItself;
        }
        let Some(label) = before.strip_suffix('.') else { return HostTarget::OutsideDomain };
        // Some programs refuse an underscore in a host name, so a hyphen is accepted in its place.
        let id = label.strip_prefix("sb-").map_or_else(|| label.to_owned(), |rest| format!("sb_{rest}"));
        id.parse().map_or(HostTarget::UnknownInDomain, HostTarget::Sandbox)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_name_selects_a_sandbox_by_its_first_label_only() {
        let (domain, id) = (Domain::new("box.example.com").unwrap(), SandboxId::new());
        for host in [
            format!("{id}.box.example.com"),
            format!("{id}.BOX.example.com:8443"),
            format!("{}.box.example.com.:80", id.as_str().to_uppercase()),
            format!("{}.box.example.com", id.as_str().replace('_', "-")),
        ] {
            assert_eq!(domain.classify_host(&host), HostTarget::Sandbox(id.clone()), "{host}");
        }
        for host in
            ["x.box.example.com".to_owned(), format!("a.{id}.box.example.com"), format!("{id}..box.example.com"), ".box.example.com".into()]
        {
            assert_eq!(domain.classify_host(&host), HostTarget::UnknownInDomain, "{host}");
        }
        for host in [
            format!("{id}.example.com"),
            format!("{id}box.example.com"),
            format!("{id}.box.example.com.evil.example"),
            "[::1]:80".into(),
            "".into(),
        ] {
            assert_eq!(domain.classify_host(&host), HostTarget::OutsideDomain, "{host}");
        }
        assert_eq!(domain.classify_host("box.example.com:1"), HostTarget::DomainItself);
    }

    #[test]
    fn the_request_line_takes_precedence_and_two_host_headers_are_ambiguous() {
        let (domain, id) = (Domain::new("localhost").unwrap(), SandboxId::new());
        let mut headers = HeaderMap::new();
        headers.append(header::HOST, "broker".parse().unwrap());
        assert_eq!(domain.classify(&"/x".parse().unwrap(), &headers), HostTarget::OutsideDomain);
        assert_eq!(domain.classify(&format!("http://{id}.localhost/x").parse().unwrap(), &headers), HostTarget::Sandbox(id.clone()));
        headers.append(header::HOST, format!("{id}.localhost").parse().unwrap());
        assert_eq!(domain.classify(&"/x".parse().unwrap(), &headers), HostTarget::Ambiguous);
    }

    #[test]
    fn invalid_domains_are_refused() {
        for bad in [
            "",
            "Box.example.com",
            "box..com",
            ".com",
            "box.example.com.",
            "*.example.com",
            "a_b.example",
            "10.0.0.1",
            "-a.example",
            "a.example:80",
        ] {
            assert!(Domain::new(bad).is_err(), "{bad}");
        }
        assert!(Domain::new(&"a.".repeat(120)).is_err());
    }
}
