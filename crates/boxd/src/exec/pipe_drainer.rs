//! Drains the output pipes of processes that a command left in the background, so that they don't die of SIGPIPE when
//! they print.

use std::{sync::Arc, time::Duration};

use tokio::sync::Semaphore;

use crate::{descriptor::Descriptor, server::Server};

/// Maximum pipes drained, one per stream. Beyond it pipes are closed and their writers get SIGPIPE: descriptors are
/// needed for connections too.
const MAX_PIPES: usize = 256;
/// Bytes per read, and the pause between reads: enough for a server's log, while a process that prints without end
/// costs boxd almost nothing.
const READ_BYTES: usize = 16 * 1024;
const PAUSE: Duration = Duration::from_millis(10);

pub struct PipeDrainer(Arc<Semaphore>);

impl Default for PipeDrainer {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(MAX_PIPES)))
    }
}

impl PipeDrainer {
    /// Reads and discards until all writers have closed the pipe.
    pub fn drain(&self, server: &Server, pipe: Arc<Descriptor>) {
        let Ok(permit) = self.0.clone().try_acquire_owned() else { return };
        let shutdown = server.shutdown.clone();
        server.tasks.spawn(async move {
            let _permit = permit;
            let mut buf = vec![0; READ_BYTES];
            let read = async {
                while let Ok(1..) = pipe.read(&mut buf).await {
                    tokio::time::sleep(PAUSE).await;
                }
            };
            tokio::select! {
                () = read => {}
                () = shutdown.cancelled() => {}
            }
        });
    }
}
