//! boxd's log on the host, for operators of a misbehaving sandbox. Its size is limited, so that no client can fill the
//! host's disk with it.

use std::{
    io::{self, Write},
    sync::atomic::{AtomicUsize, Ordering},
};

/// Maximum size per start of a sandbox; each start truncates the file. Enough to see how a problem began.
const MAX_LOG_BYTES: usize = 4 * 1024 * 1024;

static WRITTEN: AtomicUsize = AtomicUsize::new(0);

/// Logs warnings and panics to standard error, which the launcher has opened as the log file.
pub fn start() {
    tracing_subscriber::fmt().with_max_level(tracing::Level::WARN).with_ansi(false).with_writer(|| BoundedWriter(io::stderr())).init();
    // The default hook would bypass the limit.
    std::panic::set_hook(Box::new(|panic| tracing::error!("{panic}")));
}

/// Drops output beyond the limit: a lost warning is better than a full disk.
struct BoundedWriter<W>(W);

impl<W: Write> Write for BoundedWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if WRITTEN.fetch_add(bytes.len(), Ordering::Relaxed) < MAX_LOG_BYTES {
            self.0.write_all(bytes)?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_beyond_the_limit_is_dropped_without_an_error() {
        let mut log = BoundedWriter(Vec::new());
        let line = [b'x'; 1000];
        for _ in 0..MAX_LOG_BYTES / line.len() + 1000 {
            log.write_all(&line).unwrap();
        }
        assert!((MAX_LOG_BYTES..MAX_LOG_BYTES + line.len()).contains(&log.0.len()), "{}", log.0.len());
    }
}
