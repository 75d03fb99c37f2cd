//! What a command left in the background may go on printing: its pipes are read to nowhere, so that it doesn't end by writing to one
//! that nobody holds.

use std::{sync::Arc, time::Duration};

use tokio::sync::Semaphore;

use crate::{descriptor::Descriptor, server::Server};

/// A stream each. Past it they are closed, and whoever writes to one learns that: descriptors are for connections too.
const MAX_PIPES: usize = 256;
/// At once, and how long until the next: enough for a server's log, and one that prints without end takes next to nothing of boxd.
const READ_BYTES: usize = 16 * 1024;
const PAUSE: Duration = Duration::from_millis(10);

pub struct Leftovers(Arc<Semaphore>);

impl Default for Leftovers {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(MAX_PIPES)))
    }
}

impl Leftovers {
    /// Reads the pipe until nobody writes to it any more.
    pub fn read_to_nowhere(&self, server: &Server, pipe: Arc<Descriptor>) {
        let Ok(place) = self.0.clone().try_acquire_owned() else { return };
        let shutdown = server.shutdown.clone();
        server.tasks.spawn(async move {
            let _place = place;
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
