//! How much of the door one sandbox may take, so that a busy one leaves room for the others.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use cobox_protocol::{ApiError, ErrorCode, SandboxId};

/// Requests of one sandbox under way at once, upgraded ones included: far above what people and agents do together,
/// and 500 sandboxes at an eighth of it still fit into the process's descriptors.
const MAX_REQUESTS_PER_SANDBOX: u32 = 512;
/// Upgraded connections of one sandbox: they last, so they get half.
const MAX_UPGRADES_PER_SANDBOX: u32 = 256;
/// Upgraded connections of all sandboxes: each holds two descriptors and two 8 KiB buffers.
const MAX_UPGRADES: u32 = 4096;

#[derive(Clone, Copy, Default)]
struct Taken {
    requests: u32,
    upgrades: u32,
}

#[derive(Clone, Default)]
pub(crate) struct Slots(Arc<Mutex<HashMap<SandboxId, Taken>>>);

impl Slots {
    pub(crate) fn take(&self, sandbox: &SandboxId, is_upgrade: bool) -> Result<Slot, ApiError> {
        let mut map = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let all_upgrades: u32 = if is_upgrade { map.values().map(|t| t.upgrades).sum() } else { 0 };
        let taken = map.get(sandbox).copied().unwrap_or_default();
        if taken.requests >= MAX_REQUESTS_PER_SANDBOX
            || is_upgrade && (taken.upgrades >= MAX_UPGRADES_PER_SANDBOX || all_upgrades >= MAX_UPGRADES)
        {
            return Err(ApiError::new(
                ErrorCode::RateLimited,
                format!("{sandbox} has {} requests and {} open streams under way; close some or wait", taken.requests, taken.upgrades),
            ));
        }
        let entry = map.entry(sandbox.clone()).or_default();
        entry.requests += 1;
        entry.upgrades += u32::from(is_upgrade);
        Ok(Slot { slots: self.clone(), sandbox: sandbox.clone(), is_upgrade })
    }
}

/// Given back when dropped.
pub(crate) struct Slot {
    slots: Slots,
    sandbox: SandboxId,
    is_upgrade: bool,
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut map = self.slots.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(taken) = map.get_mut(&self.sandbox) {
            taken.requests -= 1;
            taken.upgrades -= u32::from(self.is_upgrade);
            if taken.requests == 0 {
                map.remove(&self.sandbox);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_sandbox_is_bounded_and_leaves_room_for_another() {
        let slots = Slots::default();
        let (busy, quiet) = (SandboxId::new(), SandboxId::new());
        let held: Vec<_> = (0..MAX_UPGRADES_PER_SANDBOX).map(|_| slots.take(&busy, true).unwrap()).collect();
        assert_eq!(slots.take(&busy, true).err().unwrap().code, ErrorCode::RateLimited);
        assert!(slots.take(&busy, false).is_ok());
        assert!(slots.take(&quiet, true).is_ok());
        drop(held);
        assert!(slots.take(&busy, true).is_ok());
        assert!(slots.0.lock().unwrap().is_empty());
    }
}
