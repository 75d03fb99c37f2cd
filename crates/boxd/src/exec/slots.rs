//! Places for running commands: so many in the sandbox, and fewer for one principal, so that one who starts many leaves room for others.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use cobox_protocol::{ApiError, ErrorCode, control::DataplaneLimits};
use cobox_token::Claims;

pub struct ExecSlots {
    limit: u32,
    limit_per_principal: u32,
    taken: Mutex<Taken>,
}

#[derive(Default)]
struct Taken {
    total: u32,
    by_principal: HashMap<String, u32>,
}

impl ExecSlots {
    pub fn new(limits: &DataplaneLimits) -> Arc<Self> {
        let (limit, limit_per_principal) = (limits.execs, limits.execs_per_principal.min(limits.execs));
        Arc::new(Self { limit, limit_per_principal, taken: Mutex::default() })
    }

    /// The principal's own limit counts first: its message says whose commands to end.
    pub fn take(self: &Arc<Self>, claims: &Claims) -> Result<ExecSlot, ApiError> {
        let refused = |message| Err(ApiError::new(ErrorCode::RateLimited, message));
        let (principal, mut taken) = (claims.sub.clone(), self.taken());
        let own = taken.by_principal.get(&principal).copied().unwrap_or_default();
        if own >= self.limit_per_principal {
            return refused(format!("{principal} has {own} commands running here, the most for one principal; end one and try again"));
        }
        if taken.total >= self.limit {
            return refused(format!("{} commands are already running here; try again when one has ended", self.limit));
        }
        taken.total += 1;
        taken.by_principal.insert(principal.clone(), own + 1);
        drop(taken);
        Ok(ExecSlot { slots: self.clone(), principal })
    }

    fn taken(&self) -> MutexGuard<'_, Taken> {
        // Nothing in between can panic and leave one count without the other.
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A place, given back when dropped.
pub struct ExecSlot {
    slots: Arc<ExecSlots>,
    principal: String,
}

impl Drop for ExecSlot {
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
