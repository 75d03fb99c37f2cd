//! TCP proxy in front of a UNIX socket that stalls its open connections on request, without closing them, like a firewall that lost its
//! connection table. Later connections pass. It can also refuse all connections.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpListener, TcpStream, UnixStream},
    sync::watch,
};
use tokio_util::task::AbortOnDropHandle;

/// Which traffic stalls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Silence {
    Both,
    /// Requests arrive, responses do not.
    Answers,
    /// Both directions, also of later connections, as if the server had vanished without an error.
    Everything,
}

pub struct StallingProxy {
    address: SocketAddr,
    shared: Arc<Shared>,
    _accepting: AbortOnDropHandle<()>,
}

struct Shared {
    target: Mutex<PathBuf>,
    made: AtomicU64,
    silent: watch::Sender<Silent>,
    /// While true, connections are refused.
    is_refusing: watch::Sender<bool>,
    /// Number of refused connections.
    refused: watch::Sender<u64>,
    /// Numbers of the open connections.
    open: watch::Sender<Vec<u64>>,
    /// Numbers of the connections that hold back data to the server.
    holding: watch::Sender<Vec<u64>>,
}

/// Connections up to these numbers forward nothing in that direction.
#[derive(Clone, Copy, Default)]
struct Silent {
    requests: u64,
    responses: u64,
}

impl StallingProxy {
    pub async fn in_front_of(socket: &Path) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let shared = Arc::new(Shared {
            target: Mutex::new(socket.to_owned()),
            made: AtomicU64::new(0),
            silent: watch::Sender::default(),
            is_refusing: watch::Sender::new(false),
            refused: watch::Sender::default(),
            open: watch::Sender::default(),
            holding: watch::Sender::default(),
        });
        let accepting = tokio::spawn({
            let shared = shared.clone();
            async move {
                while let Ok((client, _)) = listener.accept().await {
                    tokio::spawn(pass(shared.clone(), client));
                }
            }
        });
        Self { address, shared, _accepting: AbortOnDropHandle::new(accepting) }
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Redirects later connections to another server, as a proxy does after a failover.
    pub fn redirect_to(&self, socket: &Path) {
        *self.shared.target.lock().unwrap_or_else(PoisonError::into_inner) = socket.to_owned();
    }

    /// Stalls every open connection, and with [`Silence::Everything`] also later ones.
    pub fn stall(&self, silence: Silence) {
        let last = if silence == Silence::Everything { u64::MAX } else { self.shared.made.load(Ordering::SeqCst) };
        let requests = if silence == Silence::Answers { 0 } else { last };
        self.shared.silent.send_replace(Silent { requests, responses: last });
    }

    /// While set, closes every open connection and refuses new ones.
    pub fn set_refusing(&self, is_refusing: bool) {
        self.shared.is_refusing.send_replace(is_refusing);
    }

    /// Waits until this many more connections were refused.
    pub async fn wait_for_refused(&self, more: u64) {
        let mut refused = self.shared.refused.subscribe();
        let before = *refused.borrow_and_update();
        let _ = refused.wait_for(|now| *now >= before + more).await;
    }

    /// Forwards the data that was held back; returns when all of it has arrived and the stalled connections, whose clients are gone, have
    /// ended.
    pub async fn resume_and_drain(&self) {
        let held = self.shared.holding.borrow().clone();
        assert!(!held.is_empty(), "nothing was held back");
        self.shared.silent.send_replace(Silent::default());
        let mut open = self.shared.open.subscribe();
        let _ = open.wait_for(|open| !open.iter().any(|number| held.contains(number))).await;
    }
}

async fn pass(shared: Arc<Shared>, client: TcpStream) {
    let mut refusing = shared.is_refusing.subscribe();
    if *refusing.borrow() {
        shared.refused.send_modify(|n| *n += 1);
        return;
    }
    let target = shared.target.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let Ok(server) = UnixStream::connect(target).await else { return };
    let number = shared.made.fetch_add(1, Ordering::SeqCst) + 1;
    shared.open.send_modify(|open| open.push(number));
    let _ = client.set_nodelay(true);
    let (client_in, client_out) = client.into_split();
    let (server_in, server_out) = server.into_split();
    // Each direction ends separately: data that a client sent before it closed is still delivered.
    let passing = async {
        tokio::join!(
            copy(client_in, server_out, shared.silent.subscribe(), |silent| {
                let is_silent = silent.requests >= number;
                if is_silent {
                    shared.holding.send_modify(|holding| holding.push(number));
                }
                is_silent
            }),
            copy(server_in, client_out, shared.silent.subscribe(), |silent| silent.responses >= number),
        )
    };
    tokio::select! {
        _ = passing => {}
        _ = refusing.wait_for(|is_refusing| *is_refusing) => {}
    }
    shared.open.send_modify(|open| open.retain(|n| *n != number));
}

async fn copy(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    mut silent: watch::Receiver<Silent>,
    is_silent: impl Fn(&Silent) -> bool,
) {
    let mut buffer = vec![0; 32 * 1024];
    loop {
        let n = from.read(&mut buffer).await.unwrap_or(0);
        if silent.wait_for(|silent| !is_silent(silent)).await.is_err() {
            return;
        }
        if n == 0 || to.write_all(&buffer[..n]).await.is_err() {
            // An error means that the receiver has already closed.
            let _ = to.shutdown().await;
            return;
        }
    }
}
