//! Per-client-connection cache: the idle connection to boxd and the last admission, for the same caller's next request.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use cobox_protocol::{ApiError, Secret};
use parking_lot::{Mutex, MutexGuard};
use subtle::ConstantTimeEq;

use crate::{Admission, Caller, ClientAddress, Credential, DirectoryVersion, Target, upstream::Upstream};

/// How long an idle connection may be reused: well below the time after which boxd closes it.
const MAX_IDLE: Duration = Duration::from_secs(10);

/// State that the gateway keeps for one client connection: the connection to boxd that the last request used, and its admission. Both
/// are only used for requests of the same caller to the same sandbox.
#[derive(Clone, Default)]
pub struct ConnectionCache {
    entries: Arc<Mutex<CacheEntries>>,
    address: ClientAddress,
    on_authenticated: Option<Arc<OnAuthenticated>>,
}

/// Receives the workspace and the principal, and refuses principals with too many connections.
type OnAuthenticated = dyn Fn(&str, &str) -> Result<(), ApiError> + Send + Sync;

#[derive(Default)]
struct CacheEntries {
    idle: Option<IdleConnection>,
    admitted: Option<CachedAdmission>,
}

struct IdleConnection {
    used_for: Arc<Admission>,
    upstream: Upstream,
    since: Instant,
}

/// An admission that is valid while the directory's version is unchanged.
struct CachedAdmission {
    target: Target,
    token: Secret,
    version: DirectoryVersion,
    admission: Arc<Admission>,
}

/// Compares in constant time: other callers behind the same proxy must not be able to guess a token byte by byte. Compares eight bytes
/// at a time because it runs for every request.
fn is_same(one: &[u8], other: &[u8]) -> bool {
    let ((one, one_rest), (other, other_rest)) = (one.as_chunks::<8>(), other.as_chunks::<8>());
    let (one, other) = (one.iter().copied().map(u64::from_ne_bytes), other.iter().copied().map(u64::from_ne_bytes));
    let is_same_length = one.len().ct_eq(&other.len());
    let words = one.zip(other).fold(is_same_length, |is_same, (one, other)| is_same & one.ct_eq(&other));
    bool::from(words & one_rest.ct_eq(other_rest))
}

/// Whether both are for the same caller and sandbox: behind a proxy, one client connection carries requests of many callers.
fn is_same_caller(one: &Admission, other: &Admission) -> bool {
    let (Some(a), Some(b)) = (&one.caller, &other.caller) else { return false };
    one.sandbox == other.sandbox && a.workspace == b.workspace && a.principal == b.principal && a.session == b.session
}

impl ConnectionCache {
    /// `on_authenticated` is called with each authenticated request and may refuse it.
    pub fn new(address: ClientAddress, on_authenticated: impl Fn(&str, &str) -> Result<(), ApiError> + Send + Sync + 'static) -> Self {
        Self { entries: Arc::default(), address, on_authenticated: Some(Arc::new(on_authenticated)) }
    }

    pub(crate) fn address(&self) -> ClientAddress {
        self.address
    }

    /// Called by every part of the broker that accepts a credential of a workspace's principal on this connection.
    pub fn mark_authenticated(&self, workspace: &str, principal: &str) -> Result<(), ApiError> {
        self.on_authenticated.as_ref().map_or(Ok(()), |on_authenticated| on_authenticated(workspace, principal))
    }

    pub(crate) fn mark_caller(&self, caller: &Caller) -> Result<(), ApiError> {
        self.mark_authenticated(&caller.workspace, &caller.principal)
    }

    /// Takes the caller's idle connection to the sandbox, if it is still usable.
    pub(crate) async fn take_connection(&self, admission: &Admission) -> Option<Upstream> {
        let idle = self.entries().idle.take()?;
        if !is_same_caller(admission, &idle.used_for) || idle.since.elapsed() > MAX_IDLE || idle.upstream.sender.is_closed() {
            return None;
        }
        let mut upstream = idle.upstream;
        // The last response may have been forwarded before its connection task noticed that it was complete.
        upstream.sender.ready().await.ok()?;
        Some(upstream)
    }

    /// The handle that returns a request's connection to the cache when its response is complete. `None` without an authenticated
    /// caller.
    pub(crate) fn reserve(&self, admission: &Arc<Admission>) -> Option<CacheReturn> {
        admission.caller.as_ref()?;
        Some(CacheReturn { cache: self.clone(), used_for: admission.clone() })
    }

    /// The last admission, if it was for the same token and target and nothing has changed since.
    pub(crate) fn cached_admission(
        &self,
        target: &Target,
        credential: Option<&Credential>,
        version: DirectoryVersion,
    ) -> Option<Arc<Admission>> {
        let Some(Credential::Token(token)) = credential else { return None };
        let entries = self.entries();
        let known = entries.admitted.as_ref().filter(|known| known.version == version && known.target == *target)?;
        is_same(known.token.expose().as_bytes(), token.expose().as_bytes()).then(|| known.admission.clone())
    }

    /// Stores an admission. `version` is the directory's version before the decision.
    pub(crate) fn store_admission(
        &self,
        target: Target,
        credential: Option<Credential>,
        version: DirectoryVersion,
        admission: &Arc<Admission>,
    ) {
        if let Some(Credential::Token(token)) = credential.filter(|_| admission.is_cacheable) {
            self.entries().admitted = Some(CachedAdmission { target, token, version, admission: admission.clone() });
        }
    }

    fn entries(&self) -> MutexGuard<'_, CacheEntries> {
        self.entries.lock()
    }
}

/// Returns one connection to the cache once it is idle again.
pub(crate) struct CacheReturn {
    cache: ConnectionCache,
    used_for: Arc<Admission>,
}

impl CacheReturn {
    pub fn put(self, upstream: Upstream) {
        self.cache.entries().idle = Some(IdleConnection { used_for: self.used_for, upstream, since: Instant::now() });
    }
}

#[cfg(test)]
mod tests {
    use cobox_protocol::{CapabilitySet, SandboxId};
    use tokio::task::AbortHandle;

    use super::*;
    use crate::Caller;

    fn admission(sandbox: &SandboxId, principal: &str) -> Arc<Admission> {
        let (workspace, principal, actor) = ("w".to_owned(), principal.to_owned(), "human".to_owned());
        let caller =
            Caller { workspace, principal, actor, session: None, thread: None, jti: "tok".to_owned(), capabilities: CapabilitySet::EMPTY };
        Arc::new(Admission { sandbox: sandbox.clone(), is_running: true, is_cacheable: true, token: None, caller: Some(caller) })
    }

    async fn keep(cache: &ConnectionCache, admission: &Arc<Admission>) -> (tokio::io::DuplexStream, AbortHandle) {
        let (ours, theirs) = tokio::io::duplex(1024);
        let upstream = Upstream::new(Box::new(ours)).await.unwrap();
        let connection = upstream.connection.clone();
        cache.reserve(admission).unwrap().put(upstream);
        (theirs, connection)
    }

    #[tokio::test]
    async fn a_cached_connection_is_reused_once_and_only_by_its_caller() {
        let (cache, sandbox) = (ConnectionCache::default(), SandboxId::new());
        let ann = admission(&sandbox, "ann");
        let _boxd = keep(&cache, &ann).await;
        assert!(cache.take_connection(&ann).await.is_some());
        assert!(cache.take_connection(&ann).await.is_none());
        for other in [admission(&sandbox, "bob"), admission(&SandboxId::new(), "ann")] {
            let _boxd = keep(&cache, &ann).await;
            assert!(cache.take_connection(&other).await.is_none());
        }
    }

    #[tokio::test]
    async fn a_connection_that_closed_in_the_cache_is_not_reused() {
        let (cache, ann) = (ConnectionCache::default(), admission(&SandboxId::new(), "ann"));
        let (boxd, connection) = keep(&cache, &ann).await;
        drop(boxd);
        while !connection.is_finished() {
            tokio::task::yield_now().await;
        }
        assert!(cache.take_connection(&ann).await.is_none());
    }

    #[test]
    fn a_cached_admission_requires_the_same_token_target_and_directory_version() {
        let sandbox = SandboxId::new();
        let (cache, ann) = (ConnectionCache::default(), admission(&sandbox, "ann"));
        let (target, other) = (Target::Sandbox(sandbox), Target::Sandbox(SandboxId::new()));
        let token = |text: &str| Some(Credential::Token(Secret::new(text)));
        let (now, later) = (DirectoryVersion { change: 1, second: 7 }, DirectoryVersion { change: 1, second: 8 });
        cache.store_admission(target.clone(), token("a.b.c"), now, &ann);
        assert!(cache.cached_admission(&target, token("a.b.c").as_ref(), now).is_some());
        for (target, credential, version) in [
            (&target, token("a.b.d"), now),
            (&target, token("a.b.cc"), now),
            (&target, None, now),
            (&target, Some(Credential::ApiKey(Secret::new("a.b.c"))), now),
            (&other, token("a.b.c"), now),
            (&target, token("a.b.c"), later),
            (&target, token("a.b.c"), DirectoryVersion { change: 2, second: 7 }),
        ] {
            assert!(cache.cached_admission(target, credential.as_ref(), version).is_none());
        }
        // An admission that isn't cacheable is not stored.
        let cache = ConnectionCache::default();
        let once = Arc::new(Admission { is_cacheable: false, ..Admission::clone(&ann) });
        cache.store_admission(target.clone(), token("a.b.c"), now, &once);
        assert!(cache.cached_admission(&target, token("a.b.c").as_ref(), now).is_none());
    }
}
