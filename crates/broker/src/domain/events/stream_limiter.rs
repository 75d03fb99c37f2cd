//! Limits concurrent event streams: each stream queries the database twice a second, so one client must not use up a
//! broker's capacity.

use std::{collections::HashMap, sync::Arc};

use cobox_protocol::{ApiError, ErrorCode, SessionId};
use parking_lot::Mutex;

use crate::domain::model::Principal;

/// Streams of one broker at once.
const MAX_STREAMS: u32 = 1024;
/// Streams of one principal, across all its keys and tokens: enough for a service that watches for many users, and for
/// seven more such services.
const MAX_STREAMS_OF_PRINCIPAL: u32 = 128;
/// Streams of one session, across all principals.
const MAX_STREAMS_OF_SESSION: u32 = 64;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum LimitScope {
    Broker,
    Principal { workspace: String, name: String },
    Session(SessionId),
}

impl LimitScope {
    fn limit(&self) -> (u32, &'static str) {
        match self {
            LimitScope::Broker => (MAX_STREAMS, "at this broker"),
            LimitScope::Principal { .. } => (MAX_STREAMS_OF_PRINCIPAL, "of this principal"),
            LimitScope::Session(_) => (MAX_STREAMS_OF_SESSION, "of this session"),
        }
    }
}

/// Number of streams per key; entries without any are removed.
type OpenStreams = Arc<Mutex<HashMap<LimitScope, u32>>>;

#[derive(Default)]
pub struct StreamLimiter(OpenStreams);

/// Returned when dropped.
pub struct StreamPermit {
    open_streams: OpenStreams,
    scopes: [LimitScope; 3],
}

impl StreamLimiter {
    pub fn acquire(&self, principal: &Principal, session: &SessionId) -> Result<StreamPermit, ApiError> {
        let Principal { workspace, name, .. } = principal.clone();
        let scopes = [LimitScope::Broker, LimitScope::Principal { workspace, name }, LimitScope::Session(session.clone())];
        let mut open_streams = self.0.lock();
        for scope in &scopes {
            let (limit, of) = scope.limit();
            if open_streams.get(scope).is_some_and(|count| *count >= limit) {
                let message = format!("{limit} event streams {of} are open already; close one and try again");
                return Err(ApiError::new(ErrorCode::RateLimited, message));
            }
        }
        for scope in &scopes {
            *open_streams.entry(scope.clone()).or_default() += 1;
        }
        Ok(StreamPermit { open_streams: self.0.clone(), scopes })
    }
}

impl Drop for StreamPermit {
    fn drop(&mut self) {
        let mut open_streams = self.open_streams.lock();
        for scope in &self.scopes {
            if let Some(count) = open_streams.get_mut(scope) {
                *count -= 1;
                if *count == 0 {
                    open_streams.remove(scope);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use cobox_protocol::key::PrincipalKind;

    use super::*;

    #[test]
    fn sessions_and_principals_are_limited_separately_and_returned_permits_are_forgotten() {
        let limiter = StreamLimiter::default();
        let who = |name: &str| Principal { workspace: "w".to_owned(), name: name.to_owned(), kind: PrincipalKind::Human };
        let (ann, session) = (who("ann"), SessionId::new());
        let acquire = |count: u32, who: &Principal, session: &SessionId| -> Vec<StreamPermit> {
            (0..count).map(|_| limiter.acquire(who, session).unwrap()).collect()
        };
        let refused = |who: &Principal, session: &SessionId| limiter.acquire(who, session).err().unwrap().message;
        let one = acquire(MAX_STREAMS_OF_SESSION, &ann, &session);
        assert!(refused(&who("bob"), &session).contains("of this session"));
        let more = acquire(MAX_STREAMS_OF_PRINCIPAL - MAX_STREAMS_OF_SESSION, &ann, &SessionId::new());
        assert!(refused(&ann, &SessionId::new()).contains("of this principal"));
        let others: Vec<_> = (0..MAX_STREAMS - MAX_STREAMS_OF_PRINCIPAL)
            .map(|n| limiter.acquire(&who(&n.to_string()), &SessionId::new()).unwrap())
            .collect();
        assert!(refused(&who("bob"), &SessionId::new()).contains("at this broker"));
        drop((one, more, others));
        assert!(limiter.0.lock().is_empty());
    }
}
