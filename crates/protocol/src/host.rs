//! Classification of URL hosts, which decides whether credentials may be sent there in plain text.

/// Whether a URL's host is the local machine, so that nothing sent there crosses a network. `localhost` is the only name accepted,
/// because other names can resolve to another machine.
pub fn is_loopback(host: Option<&str>) -> bool {
    match host {
        Some("localhost") => true,
        Some(host) => host.trim_matches(['[', ']']).parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback()),
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_loopback_hosts_are_loopback() {
        for host in ["localhost", "127.0.0.1", "127.8.8.8", "[::1]", "::1"] {
            assert!(is_loopback(Some(host)), "{host}");
        }
        for host in ["", "localhost.example.com", "127.0.0.1.example.com", "10.0.0.1", "0.0.0.0", "[::2]"] {
            assert!(!is_loopback(Some(host)), "{host}");
        }
        assert!(!is_loopback(None));
    }
}
