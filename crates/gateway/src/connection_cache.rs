//! Connections to boxd: a fresh one for each caller, kept for that caller's next request on the same connection.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use cobox_protocol::Secret;
use subtle::ConstantTimeEq;

use crate::{Admission, Credential, DirectoryVersion, Target, upstream::Upstream};

/// How long one waits for its caller's next request: well below the time after which boxd closes it.
const MAX_IDLE: Duration = Duration::from_secs(10);

/// What the gateway keeps for one connection of a client's: the connection to boxd that its last request used, and who that request was
/// of, for the next one of the same caller to the same sandbox. Never another's.
#[derive(Clone, Default)]
pub struct ConnectionCache {
    entries: Arc<Mutex<CacheEntries>>,
    on_authenticated: Option<Arc<dyn Fn() + Send + Sync>>,
}

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

/// An admission that holds for as long as the directory stays as it was.
struct CachedAdmission {
    target: Target,
    token: Secret,
    version: DirectoryVersion,
    admission: Arc<Admission>,
}

/// In the same time wherever they differ: a proxy's other callers must not find out a token letter by letter. Eight letters at a time, as
/// it is done with every request.
fn is_same(one: &[u8], other: &[u8]) -> bool {
    let ((one, one_rest), (other, other_rest)) = (one.as_chunks::<8>(), other.as_chunks::<8>());
    let (one, other) = (one.iter().copied().map(u64::from_ne_bytes), other.iter().copied().map(u64::from_ne_bytes));
    let is_same_length = one.len().ct_eq(&other.len());
    let words = one.zip(other).fold(is_same_length, |is_same, (one, other)| is_same & one.ct_eq(&other));
    bool::from(words & one_rest.ct_eq(other_rest))
}

/// Behind a proxy one connection carries many callers; each has connections of its own all the same.
fn is_same_caller(one: &Admission, other: &Admission) -> bool {
    let (Some(a), Some(b)) = (&one.caller, &other.caller) else { return false };
    one.sandbox == other.sandbox && a.workspace == b.workspace && a.principal == b.principal && a.session == b.session
}

impl ConnectionCache {
    /// For a connection whose owner wants to know that a client on it was authenticated. May be called several times.
    pub fn new(on_authenticated: impl Fn() + Send + Sync + 'static) -> Self {
        Self { entries: Arc::default(), on_authenticated: Some(Arc::new(on_authenticated)) }
    }

    /// Called by each part of the broker that has accepted a credential on this connection.
    pub fn mark_authenticated(&self) {
        if let Some(on_authenticated) = &self.on_authenticated {
            on_authenticated();
        }
    }

    /// The caller's idle connection to the sandbox, if it is still good.
    pub(crate) async fn take_connection(&self, admission: &Admission) -> Option<Upstream> {
        let idle = self.entries().idle.take()?;
        if !is_same_caller(admission, &idle.used_for) || idle.since.elapsed() > MAX_IDLE || idle.upstream.sender.is_closed() {
            return None;
        }
        let mut upstream = idle.upstream;
        // The last answer may have been passed on before its connection noticed that it was complete.
        upstream.sender.ready().await.ok()?;
        Some(upstream)
    }

    /// Where the connection of a request goes when its answer is complete.
    pub(crate) fn reserve(&self, admission: &Arc<Admission>) -> Option<CacheReturn> {
        admission.caller.as_ref()?;
        Some(CacheReturn { cache: self.clone(), used_for: admission.clone() })
    }

    /// Who was last let in here, where the same is shown for the same and nothing has changed since.
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

    /// Remembers it; the stamp is of before it was decided.
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
        // Each change is a single assignment.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A place for one connection once it is idle again.
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
    async fn a_kept_connection_is_its_callers_alone_and_used_once() {
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
    async fn one_that_ended_while_it_was_kept_is_not_used() {
        let (cache, ann) = (ConnectionCache::default(), admission(&SandboxId::new(), "ann"));
        let (boxd, connection) = keep(&cache, &ann).await;
        drop(boxd);
        while !connection.is_finished() {
            tokio::task::yield_now().await;
        }
        assert!(cache.take_connection(&ann).await.is_none());
    }

    #[test]
    fn who_was_let_in_is_known_by_the_same_token_for_the_same_target_until_something_changes() {
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
        // One that is decided anew each time is not remembered.
        let cache = ConnectionCache::default();
        let once = Arc::new(Admission { is_cacheable: false, ..Admission::clone(&ann) });
        cache.store_admission(target.clone(), token("a.b.c"), now, &once);
        assert!(cache.cached_admission(&target, token("a.b.c").as_ref(), now).is_none());
    }
}
