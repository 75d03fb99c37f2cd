//! Limits concurrent event streams: each stream queries the database twice a second, so one client must not use up a
//! broker's capacity.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use cobox_protocol::{ApiError, ErrorCode, SessionId};

use crate::domain::model::Principal;

/// Streams of one broker at once.
const MAX_STREAMS: u32 = 1024;
/// Streams of one principal, across all its keys and tokens: enough for a service that watches for many users, and for
/// seven more such services.
const MAX_STREAMS_OF_PRINCIPAL: u32 = 128;
/// Streams of one session, across all principals.
const MAX_STREAMS_OF_SESSION: u32 = 64;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Whose {
    Everybody,
    Principal { workspace: String, name: String },
    Session(SessionId),
}

impl Whose {
    fn limit(&self) -> (u32, &'static str) {
        match self {
            Whose::Everybody => (MAX_STREAMS, "at this broker"),
            Whose::Principal { .. } => (MAX_STREAMS_OF_PRINCIPAL, "of this principal"),
            Whose::Session(_) => (MAX_STREAMS_OF_SESSION, "of this session"),
        }
    }
}

/// Number of streams per key; entries without any are removed.
type Taken = Arc<Mutex<HashMap<Whose, u32>>>;

#[derive(Default)]
pub struct Places(Taken);

/// Returned when dropped.
pub struct Place {
    taken: Taken,
    whose: [Whose; 3],
}

impl Places {
    pub fn take(&self, principal: &Principal, session: &SessionId) -> Result<Place, ApiError> {
        let Principal { workspace, name, .. } = principal.clone();
        let whose = [Whose::Everybody, Whose::Principal { workspace, name }, Whose::Session(session.clone())];
        let mut taken = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for each in &whose {
            let (limit, of) = each.limit();
            if taken.get(each).is_some_and(|count| *count >= limit) {
                let message = format!("{limit} event streams {of} are open already; close one and try again");
                return Err(ApiError::new(ErrorCode::RateLimited, message));
            }
        }
        for each in &whose {
            *taken.entry(each.clone()).or_default() += 1;
        }
        Ok(Place { taken: self.0.clone(), whose })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        for each in &self.whose {
            if let Some(count) = taken.get_mut(each) {
                *count -= 1;
                if *count == 0 {
                    taken.remove(each);
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
    fn one_session_and_one_principal_leave_places_for_others_and_what_is_given_back_is_forgotten() {
        let places = Places::default();
        let who = |name: &str| Principal { workspace: "w".to_owned(), name: name.to_owned(), kind: PrincipalKind::Human };
        let (ann, session) = (who("ann"), SessionId::new());
        let take = |count: u32, who: &Principal, session: &SessionId| -> Vec<Place> {
            (0..count).map(|_| places.take(who, session).unwrap()).collect()
        };
        let refused = |who: &Principal, session: &SessionId| places.take(who, session).err().unwrap().message;
        let one = take(MAX_STREAMS_OF_SESSION, &ann, &session);
        assert!(refused(&who("bob"), &session).contains("of this session"));
        let more = take(MAX_STREAMS_OF_PRINCIPAL - MAX_STREAMS_OF_SESSION, &ann, &SessionId::new());
        assert!(refused(&ann, &SessionId::new()).contains("of this principal"));
        let others: Vec<_> =
            (0..MAX_STREAMS - MAX_STREAMS_OF_PRINCIPAL).map(|n| places.take(&who(&n.to_string()), &SessionId::new()).unwrap()).collect();
        assert!(refused(&who("bob"), &SessionId::new()).contains("at this broker"));
        drop((one, more, others));
        assert!(places.0.lock().unwrap().is_empty());
    }
}
