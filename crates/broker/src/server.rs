//! Accepts a limited number of connections, and lets their requests finish at shutdown.

use std::{
    convert::Infallible,
    future::Future,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use axum::{body::Body, extract::Request};
use cobox_gateway::{ClientAddress, ConnectionCache, UnauthenticatedConnections};
use hyper::{
    body::{Body as _, Incoming},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    sync::Semaphore,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    body_rate::{BodyLimits, MinRateBody},
    config::ConnectionLimits,
    connection_runtimes::ConnectionRuntimes,
    connections::{AuthenticatedConnections, ClientConnection},
    http::{Dispatcher, Peer},
    metered_stream::MeteredStream,
    metrics::Metrics,
    tls::Tls,
};

/// Maximum time for a client to send a request's head.
const HEADER_READ_TIMEOUT: Duration = Duration::from_secs(15);
/// Maximum time for a TLS handshake, which occupies one of the connections.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Limits a request's head and the read-ahead of its body.
const MAX_BUFFER_BYTES: usize = 256 * 1024;
/// How long pending requests may continue after shutdown begins.
const DRAIN: Duration = Duration::from_secs(5);
/// Pause after a failed accept, usually for lack of file descriptors: enough time for some to be closed.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// State shared by all connections.
#[derive(Clone)]
pub struct ConnectionContext {
    pub dispatcher: Arc<Dispatcher>,
    /// Without it, connections are plain HTTP.
    pub tls: Option<Arc<Tls>>,
    pub metrics: Arc<Metrics>,
    pub body_limits: BodyLimits,
}

pub async fn serve(
    listener: &TcpListener,
    connection_runtimes: &ConnectionRuntimes,
    connection_context: ConnectionContext,
    limits: ConnectionLimits,
    shutdown: impl Future<Output = ()> + Send,
) {
    let slots = Arc::new(Semaphore::new(limits.total as usize));
    let unauthenticated =
        UnauthenticatedConnections::new(limits.unauthenticated as usize, limits.unauthenticated_per_address.map(|n| n as usize));
    let authenticated = AuthenticatedConnections::new(limits.total as usize);
    let stop = CancellationToken::new();
    let connections = TaskTracker::new();
    let mut shutdown = std::pin::pin!(shutdown);
    loop {
        let accepting = async {
            let slot = match slots.clone().try_acquire_owned() {
                Ok(slot) => Ok(slot),
                // One slot is reserved for a new connection. If all clients are authenticated, it waits in the kernel's
                // queue.
                Err(_) => {
                    unauthenticated.make_room();
                    slots.clone().acquire_owned().await
                }
            };
            (listener.accept().await, slot)
        };
        let (accepted, slot) = tokio::select! {
            () = &mut shutdown => break,
            accepted = accepting => accepted,
        };
        match accepted {
            Ok((stream, peer)) => {
                let (connection_context, stop) = (connection_context.clone(), stop.clone());
                let unauthenticated_connection = unauthenticated.register(ClientAddress::from(peer.ip()));
                let client = Arc::new(ClientConnection::new(unauthenticated_connection, authenticated.clone()));
                // Convert to a plain socket, so that the connection's own runtime can poll it.
                let stream = stream.into_std();
                connection_runtimes.spawn(connections.track_future(async move {
                    let _slot = slot;
                    match stream.and_then(TcpStream::from_std) {
                        Ok(stream) => tokio::select! {
                            () = start_connection(stream, Peer(peer.ip()), connection_context, stop, &client) => {}
                            () = client.must_close() => tracing::debug!("closed an unauthenticated connection to accept a newer one"),
                        },
                        Err(error) => tracing::warn!(%error, "handing a connection to its runtime failed"),
                    }
                    client.ended();
                }));
            }
            Err(error) => {
                tracing::warn!(%error, "accepting a connection failed");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    stop.cancel();
    connections.close();
    if tokio::time::timeout(DRAIN, connections.wait()).await.is_err() {
        tracing::info!(open = connections.len(), "stopping with requests still in progress");
    }
}

async fn start_connection(
    stream: TcpStream,
    peer: Peer,
    connection_context: ConnectionContext,
    stop: CancellationToken,
    connection: &Arc<ClientConnection>,
) {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "setting TCP_NODELAY failed");
    }
    let ConnectionContext { dispatcher, tls, metrics, body_limits } = connection_context;
    let stream = MeteredStream::new(stream, metrics.clone());
    let connection = connection.clone();
    // The gateway's cache for this client lives as long as the connection.
    let cache =
        ConnectionCache::new(ClientAddress::from(peer.0), move |workspace, principal| connection.authenticated(workspace, principal));
    let client = Client { peer, cache, body_limits };
    let Some(tls) = tls else { return serve_connection(stream, client, dispatcher, stop).await };
    let accepting = tokio::time::timeout(HANDSHAKE_TIMEOUT, tls.acceptor().accept(stream));
    let handshake = tokio::select! {
        handshake = accepting => handshake,
        () = stop.cancelled() => return,
    };
    match handshake {
        Ok(Ok(stream)) => serve_connection(stream, client, dispatcher, stop).await,
        Ok(Err(error)) => {
            metrics.handshakes_failed.fetch_add(1, Ordering::Relaxed);
            tracing::debug!(%error, "TLS handshake failed");
        }
        Err(_) => {
            metrics.handshakes_failed.fetch_add(1, Ordering::Relaxed);
            tracing::debug!("TLS handshake timed out");
        }
    }
}

/// The remote end of a connection.
#[derive(Clone)]
struct Client {
    peer: Peer,
    cache: ConnectionCache,
    body_limits: BodyLimits,
}

impl Client {
    /// Applies the minimum rate to the request's body.
    fn with_minimum_rate(&self, request: Request<Incoming>) -> Request {
        let (parts, body) = request.into_parts();
        let body = match body.is_end_stream() {
            true => Body::empty(),
            false => Body::new(MinRateBody::new(body, self.body_limits, &parts.headers)),
        };
        Request::from_parts(parts, body)
    }
}

async fn serve_connection<S>(stream: S, client: Client, dispatcher: Arc<Dispatcher>, stop: CancellationToken)
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let service = service_fn(move |request: Request<Incoming>| {
        let (dispatcher, client) = (dispatcher.clone(), client.clone());
        async move { Ok::<_, Infallible>(dispatcher.answer(client.with_minimum_rate(request), client.peer, &client.cache).await) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_READ_TIMEOUT)
        .max_buf_size(MAX_BUFFER_BYTES)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades();
    let mut connection = std::pin::pin!(connection);
    let ended = tokio::select! {
        ended = &mut connection => ended,
        () = stop.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection ended");
    }
}
