//! Sandboxes by host name: `{sandbox_id}.box.example.com` is an origin of each sandbox's own.

use cobox_protocol::SandboxId;
use http::{HeaderMap, Uri, header};

/// A DNS name has at most 253 characters; a sandbox's id and its dot take 30 of them.
const MAX_DOMAIN_CHARS: usize = 253 - 30;
const MAX_LABEL_CHARS: usize = 63;

/// The name that sandboxes' host names end in, in lower case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Domain(String);

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("`{0}` is not a host name in lower case, such as box.example.com, of {MAX_DOMAIN_CHARS} characters or fewer")]
pub struct InvalidDomain(String);

/// What a request's host stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostTarget {
    /// None of the domain's.
    OutsideDomain,
    /// The domain itself.
    DomainItself,
    Sandbox(SandboxId),
    /// In the domain, and no sandbox's.
    UnknownInDomain,
    /// Two hosts in one request: whoever stands before us may have read the other one.
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
        // An address has no names below it.
        let is_number = name.rsplit('.').next().is_some_and(|last| last.bytes().all(|b| b.is_ascii_digit()));
        if name.len() > MAX_DOMAIN_CHARS || !name.split('.').all(is_label) || is_number {
            return Err(InvalidDomain(name.chars().take(MAX_DOMAIN_CHARS).collect()));
        }
        Ok(Self(name.to_owned()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether a host is the domain itself or a name in it; its port and a last dot don't count.
    pub fn contains(&self, host: &str) -> bool {
        self.classify_host(host) != HostTarget::OutsideDomain
    }

    pub fn classify(&self, uri: &Uri, headers: &HeaderMap) -> HostTarget {
        let mut hosts = headers.get_all(header::HOST).iter();
        let (host, other) = (hosts.next(), hosts.next());
        if other.is_some() {
            return HostTarget::Ambiguous;
        }
        // A whole URL in the request line counts before the header.
        match (uri.host(), host.map(|h| h.to_str())) {
            (Some(host), _) | (None, Some(Ok(host))) => self.classify_host(host),
            (None, Some(Err(_))) => HostTarget::Ambiguous,
            (None, None) => HostTarget::OutsideDomain,
        }
    }

    fn classify_host(&self, host: &str) -> HostTarget {
        // No name has a colon; an IPv6 address is nobody's here.
        let name = host.split(':').next().unwrap_or_default().to_ascii_lowercase();
        let name = name.strip_suffix('.').unwrap_or(&name);
        let Some(before) = name.strip_suffix(self.as_str()) else { return HostTarget::OutsideDomain };
        if before.is_empty() {
            return HostTarget::DomainItself;
        }
        let Some(label) = before.strip_suffix('.') else { return HostTarget::OutsideDomain };
        // Some programs refuse an underscore in a host name; to them it is a hyphen.
        let id = label.strip_prefix("sb-").map_or_else(|| label.to_owned(), |rest| format!("sb_{rest}"));
        id.parse().map_or(HostTarget::UnknownInDomain, HostTarget::Sandbox)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_a_sandboxs_by_its_first_label_alone() {
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
    fn the_request_line_counts_before_the_header_and_two_headers_count_for_nothing() {
        let (domain, id) = (Domain::new("localhost").unwrap(), SandboxId::new());
        let mut headers = HeaderMap::new();
        headers.append(header::HOST, "broker".parse().unwrap());
        assert_eq!(domain.classify(&"/x".parse().unwrap(), &headers), HostTarget::OutsideDomain);
        assert_eq!(domain.classify(&format!("http://{id}.localhost/x").parse().unwrap(), &headers), HostTarget::Sandbox(id.clone()));
        headers.append(header::HOST, format!("{id}.localhost").parse().unwrap());
        assert_eq!(domain.classify(&"/x".parse().unwrap(), &headers), HostTarget::Ambiguous);
    }

    #[test]
    fn what_is_no_domain_is_refused() {
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
