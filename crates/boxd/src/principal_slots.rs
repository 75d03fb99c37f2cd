//! Places for running commands or open streams: so many in the sandbox, and fewer for one principal, so that one who takes many leaves
//! room for others.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use cobox_protocol::{ApiError, ErrorCode};

/// What the places are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Commands,
    Streams,
}

pub struct PrincipalSlots {
    kind: Kind,
    limit: u32,
    limit_per_principal: u32,
    taken: Mutex<Taken>,
}

#[derive(Default)]
struct Taken {
    total: u32,
    by_principal: HashMap<String, u32>,
}

impl PrincipalSlots {
    pub fn new(kind: Kind, limit: u32, limit_per_principal: u32) -> Arc<Self> {
        Arc::new(Self { kind, limit, limit_per_principal: limit_per_principal.min(limit), taken: Mutex::default() })
    }

    /// The principal's own limit counts first: its message says whose to end.
    pub fn take(self: &Arc<Self>, principal: &str) -> Result<PrincipalSlot, ApiError> {
        let refused = |message| Err(ApiError::new(ErrorCode::RateLimited, message));
        let (principal, limit, mut taken) = (principal.to_owned(), self.limit, self.taken());
        let own = taken.by_principal.get(&principal).copied().unwrap_or_default();
        if own >= self.limit_per_principal {
            return refused(match self.kind {
                Kind::Commands => format!("{principal} has {own} commands running here, the most for one principal; end one and try again"),
                Kind::Streams => format!("{principal} has {own} streams open here, the most for one principal; close one and try again"),
            });
        }
        if taken.total >= limit {
            return refused(match self.kind {
                Kind::Commands => format!("{limit} commands are already running here; try again when one has ended"),
                Kind::Streams => format!("{limit} streams are already open in this sandbox; close one and try again"),
            });
        }
        taken.total += 1;
        taken.by_principal.insert(principal.clone(), own + 1);
        drop(taken);
        Ok(PrincipalSlot { slots: self.clone(), principal })
    }

    fn taken(&self) -> MutexGuard<'_, Taken> {
        // Nothing in between can panic and leave one count without the other.
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A place, given back when dropped.
pub struct PrincipalSlot {
    slots: Arc<PrincipalSlots>,
    principal: String,
}

impl Drop for PrincipalSlot {
    fn drop(&mut self) {
        let mut taken = self.slots.taken();
        taken.total -= 1;
        if let Some(own) = taken.by_principal.get_mut(&self.principal) {
            *own -= 1;
            if *own == 0 {
                taken.by_principal.remove(&self.principal);
            }
        }
    }
}
