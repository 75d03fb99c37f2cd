//! Cache of an issuer's public keys. Fetches them on demand and when a token names an unknown key, at a limited rate.

use std::{sync::Arc, time::Duration};

use cobox_protocol::Timestamp;
use http::{HeaderMap, StatusCode};
use parking_lot::RwLock;
use reqwest::Url;
use serde::Deserialize;
use tokio::{runtime::Handle, sync::Mutex};

use super::jwk::{self, Jwk};
use crate::outbound::{Outbound, is_loopback, read_url};

/// Maximum size of an issuer's document, in bytes; real ones have a few KiB.
const MAX_DOCUMENT_BYTES: usize = 256 * 1024;
/// Minimum interval between two fetches: unauthenticated clients can name keys that don't exist.
pub const MIN_FETCH_INTERVAL: Duration = Duration::from_secs(10);
/// Keys older than this are fetched again, so that a key withdrawn by the issuer becomes invalid.
pub const CACHE_TIME: Duration = Duration::from_secs(600);
/// How long the cached keys stay valid while the issuer is unreachable.
pub const KEEP: Duration = Duration::from_secs(3600);
const DISCOVERY_PATH: &str = "/.well-known/openid-configuration";

/// Source of the keys.
pub enum KeySource {
    Jwks(Url),
    /// The issuer's discovery document names the URL.
    Discover {
        issuer: String,
        document: Url,
    },
}

impl KeySource {
    pub fn discover(issuer: &str) -> Result<Self, &'static str> {
        let document = read_url(&format!("{}{DISCOVERY_PATH}", issuer.trim_end_matches('/')))?;
        Ok(KeySource::Discover { issuer: issuer.to_owned(), document })
    }

    pub fn is_local(&self) -> bool {
        match self {
            KeySource::Jwks(url) | KeySource::Discover { document: url, .. } => is_loopback(url),
        }
    }
}

pub struct Keyring {
    place: KeySource,
    outbound: Outbound,
    state: RwLock<State>,
    /// Held during a fetch. Requests that need an unknown key wait for this fetch; all others proceed.
    fetching: Mutex<()>,
    /// Runtime that finishes a fetch even if the client that caused it disconnects. Otherwise unauthenticated clients
    /// could keep every fetch from completing.
    background: Handle,
}

#[derive(Clone, Default)]
struct State {
    keys: Arc<Vec<Jwk>>,
    fetched_at: Option<Timestamp>,
    tried_at: Option<Timestamp>,
}

#[derive(Deserialize)]
struct Discovered {
    issuer: String,
    jwks_uri: String,
}

impl Keyring {
    pub fn new(place: KeySource) -> Result<Self, String> {
        Ok(Self {
            outbound: Outbound::new(place.is_local())?,
            place,
            state: RwLock::default(),
            fetching: Mutex::default(),
            background: Handle::current(),
        })
    }

    /// Returns the cached keys, including the wanted one if the issuer has it. `None` if no valid keys are available.
    pub async fn keys(self: &Arc<Self>, has_wanted: impl Fn(&[Jwk]) -> bool, now: Timestamp) -> Option<Arc<Vec<Jwk>>> {
        let is_younger = |state: &State, than: Duration| state.fetched_at.is_some_and(|at| now.saturating_since(at) < than);
        let known = self.state();
        if !(is_younger(&known, CACHE_TIME) && has_wanted(&known.keys)) {
            let turn = match is_younger(&known, KEEP) && has_wanted(&known.keys) {
                // The cached keys are still usable, and one request is enough to refresh them.
                true => self.fetching.try_lock().ok(),
                false => Some(self.fetching.lock().await),
            };
            let known = self.state();
            let may_fetch = known.tried_at.is_none_or(|at| at.is_due(MIN_FETCH_INTERVAL, now));
            if turn.is_some() && may_fetch && !(is_younger(&known, CACHE_TIME) && has_wanted(&known.keys)) {
                let this = self.clone();
                // Fails only during shutdown.
                let _ = self.background.spawn(async move { this.fetch_now(now).await }).await;
            }
        }
        let known = self.state();
        is_younger(&known, KEEP).then_some(known.keys)
    }

    fn state(&self) -> State {
        self.state.read().clone()
    }

    async fn fetch_now(&self, now: Timestamp) {
        self.state.write().tried_at = Some(now);
        match self.fetch().await {
            Ok(keys) => {
                tracing::debug!(count = keys.len(), "an issuer's keys were fetched");
                let mut state = self.state.write();
                (state.keys, state.fetched_at) = (Arc::new(keys), Some(now));
            }
            Err(error) => tracing::warn!(error, "fetching an issuer's keys failed"),
        }
    }

    async fn fetch(&self) -> Result<Vec<Jwk>, String> {
        let url = match &self.place {
            KeySource::Jwks(url) => url.clone(),
            KeySource::Discover { issuer, document } => {
                let found: Discovered =
                    serde_json::from_slice(&self.get(document).await?).map_err(|_| format!("{document} is not a discovery document"))?;
                // Otherwise one issuer could redirect the broker to the keys of another.
                if found.issuer != *issuer {
                    return Err(format!("{document} belongs to another issuer"));
                }
                let url = read_url(&found.jwks_uri).map_err(|why| format!("jwks_uri in {document} {why}"))?;
                // An external document must not make the broker send requests to this machine.
                if is_loopback(&url) && !is_loopback(document) {
                    return Err(format!("jwks_uri in {document} is an address of this machine"));
                }
                url
            }
        };
        jwk::read(&self.get(&url).await?).map_err(|why| format!("{url}: {why}"))
    }

    async fn get(&self, url: &Url) -> Result<Vec<u8>, String> {
        match self.outbound.get(url, HeaderMap::new(), MAX_DOCUMENT_BYTES).await {
            Ok((StatusCode::OK, body)) => Ok(body),
            Ok((status, _)) => Err(format!("{url} answered {}", status.as_u16())),
            Err(why) => Err(format!("{url}: {why}")),
        }
    }
}
