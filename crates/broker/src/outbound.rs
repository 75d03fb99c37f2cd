//! Outgoing HTTP requests of the broker: limited in time and size, without redirects, and unencrypted only to this
//! machine.

use std::{sync::Once, time::Duration};

use http::{HeaderMap, StatusCode};
use reqwest::{Client, Url, redirect};

/// Maximum wait for a complete response, because a client waits for ours.
const TIMEOUT: Duration = Duration::from_secs(5);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// Idle connections kept per host for later requests.
const IDLE_CONNECTIONS: usize = 8;

/// Why there is no response. Contains no headers or bodies, which may hold credentials.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OutboundError {
    #[error("it can't be reached")]
    Unreachable,
    #[error("it took too long")]
    TooSlow,
    #[error("its response ended early")]
    Broken,
    #[error("its response is larger than allowed")]
    TooLarge,
}

/// A client for one host. The configuration determines the host, and so whether it is on this machine.
pub struct Outbound {
    client: Client,
}

impl Outbound {
    pub fn new(is_local: bool) -> Result<Self, String> {
        install_tls();
        let builder = Client::builder()
            .redirect(redirect::Policy::none())
            .timeout(TIMEOUT)
            .connect_timeout(CONNECT_TIMEOUT)
            .pool_max_idle_per_host(IDLE_CONNECTIONS)
            .user_agent(concat!("cobox/", env!("CARGO_PKG_VERSION")));
        // Unencrypted requests go to this machine and never through a proxy.
        let builder = if is_local { builder.no_proxy() } else { builder };
        Ok(Self { client: builder.build().map_err(|e| e.to_string())? })
    }

    /// Reads only the start of the response and leaves the rest unread.
    pub async fn get_start(&self, url: &Url, headers: HeaderMap, bytes: usize) -> Result<(StatusCode, Vec<u8>), OutboundError> {
        let mut response = self.client.get(url.clone()).headers(headers).send().await.map_err(|e| unanswered(&e))?;
        let mut body = Vec::new();
        while let Some(piece) = response.chunk().await.map_err(|e| unanswered(&e))? {
            body.extend_from_slice(&piece[..piece.len().min(bytes - body.len())]);
            if body.len() >= bytes {
                break;
            }
        }
        Ok((response.status(), body))
    }

    pub async fn get(&self, url: &Url, headers: HeaderMap, max_bytes: usize) -> Result<(StatusCode, Vec<u8>), OutboundError> {
        let mut response = self.client.get(url.clone()).headers(headers).send().await.map_err(|e| unanswered(&e))?;
        let status = response.status();
        let mut body = Vec::new();
        while let Some(piece) = response.chunk().await.map_err(|e| unanswered(&e))? {
            if body.len() + piece.len() > max_bytes {
                return Err(OutboundError::TooLarge);
            }
            body.extend_from_slice(&piece);
        }
        Ok((status, body))
    }
}

fn unanswered(error: &reqwest::Error) -> OutboundError {
    match error {
        e if e.is_timeout() => OutboundError::TooSlow,
        e if e.is_connect() => OutboundError::Unreachable,
        _ => OutboundError::Broken,
    }
}

/// Checks a URL for requests: `https`, or `http` on this machine, without credentials, query and fragment.
pub fn read_url(text: &str) -> Result<Url, &'static str> {
    let url = Url::parse(text).map_err(|_| "must be a URL such as https://id.example.com")?;
    match url.scheme() {
        "https" => {}
        "http" if is_loopback(&url) => {}
        _ => return Err("must start with https://, or with http:// for an address of this machine"),
    }
    if !url.username().is_empty() || url.password().is_some() || url.fragment().is_some() || url.query().is_some() {
        return Err("must have no credentials, no query and no fragment");
    }
    Ok(url)
}

pub fn is_loopback(url: &Url) -> bool {
    cobox_protocol::host::is_loopback(url.host_str())
}

/// The TLS library requires a process-wide cryptography provider.
fn install_tls() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // Fails only if the program has already chosen a provider, which is fine.
        let _ = rustls::crypto::ring::default_provider().install_default();
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_safe_urls_are_accepted() {
        for good in
            ["https://id.example.com", "https://id.example.com/realms/x", "http://127.0.0.1:9000", "http://localhost:1", "http://[::1]:8/x"]
        {
            assert!(read_url(good).is_ok(), "{good}");
        }
        for bad in [
            "http://id.example.com",
            "ftp://x",
            "id.example.com",
            "https://u:p@x",
            "https://x/?a=1",
            "https://x/#f",
            "http://127.0.0.1.evil.example",
            "file:///etc/passwd",
        ] {
            assert!(read_url(bad).is_err(), "{bad}");
        }
    }
}
