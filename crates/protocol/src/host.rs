//! Hosts of URLs, as far as they decide what may be sent there.

/// Whether a URL's host is this very machine, so that nothing sent there crosses a network. A name counts only where nobody can make it
/// mean another machine.
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
    fn only_this_machine_is_this_machine() {
        for host in ["localhost", "127.0.0.1", "127.8.8.8", "[::1]", "::1"] {
            assert!(is_loopback(Some(host)), "{host}");
        }
        for host in ["", "localhost.example.com", "127.0.0.1.example.com", "10.0.0.1", "0.0.0.0", "[::2]"] {
            assert!(!is_loopback(Some(host)), "{host}");
        }
        assert!(!is_loopback(None));
    }
}
