//! Connections that have not sent their token yet. At the limit the oldest is closed instead of refusing the new one,
//! so that a client with a valid token always has time to send it.

use std::{collections::BTreeMap, sync::Arc};

use parking_lot::{Mutex, MutexGuard};
use tokio_util::sync::CancellationToken;

pub struct Handshakes {
    max: usize,
    table: Mutex<OpenHandshakes>,
}

#[derive(Default)]
struct OpenHandshakes {
    next: u64,
    /// By sequence number, so oldest first.
    open: BTreeMap<u64, CancellationToken>,
}

impl Handshakes {
    pub fn new(max: usize) -> Arc<Self> {
        Arc::new(Self { max, table: Mutex::default() })
    }

    pub fn begin(self: &Arc<Self>) -> Handshake {
        let close = CancellationToken::new();
        let mut table = self.table();
        let number = table.next;
        table.next += 1;
        table.open.insert(number, close.clone());
        if table.open.len() > self.max
            && let Some((_, oldest)) = table.open.pop_first()
        {
            oldest.cancel();
        }
        Handshake { handshakes: self.clone(), number, close }
    }

    fn table(&self) -> MutexGuard<'_, OpenHandshakes> {
        // No code that runs under the lock can panic.
        self.table.lock()
    }
}

/// One connection in the handshake; dropping it frees its slot.
pub struct Handshake {
    handshakes: Arc<Handshakes>,
    number: u64,
    close: CancellationToken,
}

impl Handshake {
    /// Resolves when the connection must close in favour of a newer one.
    pub async fn must_close(&self) {
        self.close.cancelled().await;
    }
}

impl Drop for Handshake {
    fn drop(&mut self) {
        self.handshakes.table().open.remove(&self.number);
    }
}
