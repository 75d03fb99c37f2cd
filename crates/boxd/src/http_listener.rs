//! HTTP/1.1 on an inherited UNIX listener: bounded connections, bounded headers, and shutdown on request.

use std::{io, sync::Arc, time::Duration};

use axum::{Router, extract::Request};
use cobox_kernel::{FileSender, LocalSocketStream, Peer};
use hyper::body::Incoming;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{net::UnixListener, sync::Semaphore};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tower::ServiceExt;

/// Maximum time for a client to send a request's headers, and for a connection to stay idle.
const HEADERS_TIMEOUT: Duration = Duration::from_secs(30);
/// Request line and headers together: tokens are below 4 KiB, paths below 4 KiB times three when percent-encoded.
const MAX_HEADER_BYTES: usize = 32 * 1024;
/// Buffer per connection for a body that is not read yet: enough for full speed on a local socket.
const CONNECTION_BUFFER_BYTES: usize = 256 * 1024;
/// Pause after a failed accept: usually descriptors are used up, so an immediate retry would fail too.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Added to every request's extensions: what a handler can do with the connection that carries its response.
#[derive(Clone)]
pub struct Connection {
    /// Cancelling it closes the connection.
    pub end: CancellationToken,
    /// Sends files over the connection without reading them into memory.
    pub outgoing: FileSender,
}

pub async fn accept_loop(listener: UnixListener, router: Router, max_connections: usize, tasks: TaskTracker, shutdown: CancellationToken) {
    let slots = Arc::new(Semaphore::new(max_connections));
    loop {
        // Beyond the limit clients wait in the listener's backlog.
        let accepted = tokio::select! {
            () = shutdown.cancelled() => return,
            accepted = async {
                let slot = slots.clone().acquire_owned().await.map_err(io::Error::other)?;
                listener.accept().await.map(|(stream, _)| (slot, stream))
            } => accepted,
        };
        match accepted {
            Ok((slot, stream)) => {
                let (router, shutdown) = (router.clone(), shutdown.clone());
                tasks.spawn(async move {
                    match LocalSocketStream::new(stream, Peer::Proxy) {
                        Ok(stream) => serve_connection(stream, router, shutdown).await,
                        Err(error) => tracing::warn!(%error, "registering a connection failed"),
                    }
                    drop(slot);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "accepting a connection failed");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn serve_connection(stream: LocalSocketStream, router: Router, shutdown: CancellationToken) {
    let end = CancellationToken::new();
    let handle = Connection { end: end.clone(), outgoing: stream.file_sender() };
    let service = hyper::service::service_fn(move |request: Request<Incoming>| {
        let mut request = request.map(axum::body::Body::new);
        request.extensions_mut().insert(handle.clone());
        router.clone().oneshot(request)
    });
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADERS_TIMEOUT)
        .max_header_size(MAX_HEADER_BYTES)
        .max_buf_size(CONNECTION_BUFFER_BYTES)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades();
    tokio::pin!(connection);
    let mut is_ending = false;
    loop {
        tokio::select! {
            done = connection.as_mut() => {
                if let Err(error) = done {
                    tracing::debug!(%error, "a connection ended early");
                }
                return;
            }
            () = end.cancelled() => return,
            () = shutdown.cancelled(), if !is_ending => {
                is_ending = true;
                connection.as_mut().graceful_shutdown();
            }
        }
    }
}
