//! The memory budget shared by all commands, for their input and their captured output.

use std::sync::Arc;

use bytes::Bytes;
use cobox_protocol::{ApiError, ErrorCode};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Half of the minimum memory that boxd has, not counting the page cache of files that it serves.
const BUDGET_KIB: usize = 256 * 1024;

pub struct MemoryBudget(Arc<Semaphore>);

impl Default for MemoryBudget {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(BUDGET_KIB)))
    }
}

impl MemoryBudget {
    pub fn reserve(&self, bytes: usize) -> Result<MemoryReservation, ApiError> {
        self.0.clone().try_acquire_many_owned(kib(bytes)).map(MemoryReservation).map_err(|_| {
            let message = "the running commands use all memory for input and output; try again later or with a smaller max_output_bytes";
            ApiError::new(ErrorCode::RateLimited, message)
        })
    }
}

/// A reservation from the budget, returned on drop.
pub struct MemoryReservation(OwnedSemaphorePermit);

impl MemoryReservation {
    /// Releases the part of the reservation that exceeds `bytes`.
    pub fn shrink_to(mut self, bytes: usize) -> Self {
        match self.0.split(kib(bytes) as usize) {
            Some(needed) => Self(needed),
            None => self,
        }
    }

    /// Grows or shrinks the reservation to `bytes`.
    pub fn resize(mut self, bytes: usize, budget: &MemoryBudget) -> Result<Self, ApiError> {
        let held = self.0.num_permits() * 1024;
        if bytes >= held {
            self.0.merge(budget.reserve(bytes - held)?.0);
        }
        Ok(self.shrink_to(bytes))
    }

    /// Wraps bytes so that the reservation lasts as long as any copy of them.
    pub fn attach_to(self, bytes: impl AsRef<[u8]> + Send + 'static) -> Bytes {
        Bytes::from_owner(ReservedBytes { bytes, _memory: self })
    }
}

struct ReservedBytes<B> {
    bytes: B,
    _memory: MemoryReservation,
}

impl<B: AsRef<[u8]>> AsRef<[u8]> for ReservedBytes<B> {
    fn as_ref(&self) -> &[u8] {
        self.bytes.as_ref()
    }
}

fn kib(bytes: usize) -> u32 {
    u32::try_from(bytes / 1024 + 1).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reservation_is_held_until_the_last_copy_of_its_bytes_is_dropped() {
        let budget = MemoryBudget::default();
        let reserved = budget.reserve(BUDGET_KIB * 1024 - 1).unwrap();
        assert_eq!(budget.reserve(1).err().unwrap().code, ErrorCode::RateLimited);
        let bytes = reserved.shrink_to(2048).attach_to(vec![0; 2048]);
        assert_eq!(budget.0.available_permits(), BUDGET_KIB - 3);
        let copy = bytes.clone();
        drop(bytes);
        assert_eq!(budget.0.available_permits(), BUDGET_KIB - 3);
        drop(copy);
        assert_eq!(budget.0.available_permits(), BUDGET_KIB);
    }
}
