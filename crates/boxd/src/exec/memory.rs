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
    pub fn take(&self, bytes: usize) -> Result<Memory, ApiError> {
        self.0.clone().try_acquire_many_owned(kib(bytes)).map(Memory).map_err(|_| {
            let message = "the commands running here use all memory for input and output; try again, or with a smaller max_output_bytes";
            ApiError::new(ErrorCode::RateLimited, message)
        })
    }
}

/// A reservation from the budget, returned on drop.
pub struct Memory(OwnedSemaphorePermit);

impl Memory {
    /// Releases the part of the reservation that exceeds `bytes`.
    pub fn cut(mut self, bytes: usize) -> Self {
        match self.0.split(kib(bytes) as usize) {
            Some(needed) => Self(needed),
            None => self,
        }
    }

    /// Grows or shrinks the reservation to `bytes`.
    pub fn resized(mut self, bytes: usize, budget: &MemoryBudget) -> Result<Self, ApiError> {
        let held = self.0.num_permits() * 1024;
        if bytes >= held {
            self.0.merge(budget.take(bytes - held)?.0);
        }
        Ok(self.cut(bytes))
    }

    /// Wraps bytes so that the reservation lasts as long as any copy of them.
    pub fn owned_by(self, bytes: impl AsRef<[u8]> + Send + 'static) -> Bytes {
        Bytes::from_owner(Owned { bytes, _memory: self })
    }
}

struct Owned<B> {
    bytes: B,
    _memory: Memory,
}

impl<B: AsRef<[u8]>> AsRef<[u8]> for Owned<B> {
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
    fn memory_is_held_by_the_bytes_that_take_it_and_given_back_with_them() {
        let budget = MemoryBudget::default();
        let taken = budget.take(BUDGET_KIB * 1024 - 1).unwrap();
        assert_eq!(budget.take(1).err().unwrap().code, ErrorCode::RateLimited);
        let bytes = taken.cut(2048).owned_by(vec![0; 2048]);
        assert_eq!(budget.0.available_permits(), BUDGET_KIB - 3);
        let copy = bytes.clone();
        drop(bytes);
        assert_eq!(budget.0.available_permits(), BUDGET_KIB - 3);
        drop(copy);
        assert_eq!(budget.0.available_permits(), BUDGET_KIB);
    }
}
