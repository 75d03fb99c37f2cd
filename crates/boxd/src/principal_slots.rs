//! Slots for running commands or open streams: a limit for the sandbox and a lower one for each principal, so that one
//! principal leaves slots for others.

use std::{collections::HashMap, sync::Arc};

use cobox_protocol::{ApiError, ErrorCode};
use parking_lot::{Mutex, MutexGuard};

/// What the slots are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotKind {
    Commands,
    Streams,
}

pub struct PrincipalSlots {
    kind: SlotKind,
    limit: u32,
    limit_per_principal: u32,
    counts: Mutex<SlotCounts>,
}

#[derive(Default)]
struct SlotCounts {
    total: u32,
    by_principal: HashMap<String, u32>,
}

impl PrincipalSlots {
    pub fn new(kind: SlotKind, limit: u32, limit_per_principal: u32) -> Arc<Self> {
        Arc::new(Self { kind, limit, limit_per_principal: limit_per_principal.min(limit), counts: Mutex::default() })
    }

    /// Checks the principal's own limit first, because its message names whose commands or streams to end.
    pub fn take(self: &Arc<Self>, principal: &str) -> Result<PrincipalSlot, ApiError> {
        let refused = |message| Err(ApiError::new(ErrorCode::RateLimited, message));
        let (principal, limit, mut counts) = (principal.to_owned(), self.limit, self.counts());
        let in_use = counts.by_principal.get(&principal).copied().unwrap_or_default();
        if in_use >= self.limit_per_principal {
            return refused(match self.kind {
                SlotKind::Commands => {
                    format!("{principal} has {in_use} commands running, which is the limit for one principal; end one and try again")
                }
                SlotKind::Streams => {
                    format!("{principal} has {in_use} streams open, which is the limit for one principal; close one and try again")
                }
            });
        }
        if counts.total >= limit {
            return refused(match self.kind {
                SlotKind::Commands => {
                    format!("{limit} commands are already running, which is the sandbox's limit; try again when one has exited")
                }
                SlotKind::Streams => format!("{limit} streams are already open, which is the sandbox's limit; close one and try again"),
            });
        }
        counts.total += 1;
        counts.by_principal.insert(principal.clone(), in_use + 1);
        drop(counts);
        Ok(PrincipalSlot { slots: self.clone(), principal })
    }

    fn counts(&self) -> MutexGuard<'_, SlotCounts> {
        // Nothing in between can panic and leave one count without the other.
        self.counts.lock()
    }
}

/// A slot, released when dropped.
pub struct PrincipalSlot {
    slots: Arc<PrincipalSlots>,
    principal: String,
}

impl Drop for PrincipalSlot {
    fn drop(&mut self) {
        let mut counts = self.slots.counts();
        counts.total -= 1;
        if let Some(in_use) = counts.by_principal.get_mut(&self.principal) {
            *in_use -= 1;
            if *in_use == 0 {
                counts.by_principal.remove(&self.principal);
            }
        }
    }
}
