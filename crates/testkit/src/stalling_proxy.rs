//! A network that forgets: a TCP proxy before a UNIX socket whose open connections go silent when told, without ever being closed, as
//! behind a firewall that lost its table. Those that are made later pass. Or it lets nobody through at all.

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

/// What of a connection goes silent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Silence {
    Both,
    /// What is asked arrives; what is answered doesn't.
    Answers,
    /// Both ways, also of connections that are made later: the server is gone and nothing says so.
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
    /// While true, nobody gets through; how many were turned away.
    is_away: watch::Sender<bool>,
    turned_away: watch::Sender<u64>,
    /// The connections there are, by their numbers, and those of them that hold something back on its way to the server.
    open: watch::Sender<Vec<u64>>,
    holding: watch::Sender<Vec<u64>>,
}

/// Connections up to this number pass nothing on, one way or both.
#[derive(Clone, Copy, Default)]
struct Silent {
    asking: u64,
    answering: u64,
}

impl StallingProxy {
    pub async fn before(socket: &Path) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let shared = Arc::new(Shared {
            target: Mutex::new(socket.to_owned()),
            made: AtomicU64::new(0),
            silent: watch::Sender::default(),
            is_away: watch::Sender::new(false),
            turned_away: watch::Sender::default(),
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

    /// Leads connections that are made later to another server, as a proxy does after a failover.
    pub fn lead_to(&self, socket: &Path) {
        *self.shared.target.lock().unwrap_or_else(PoisonError::into_inner) = socket.to_owned();
    }

    /// Every connection that is open now, and with [`Silence::Everything`] those that follow.
    pub fn stall(&self, silence: Silence) {
        let last = if silence == Silence::Everything { u64::MAX } else { self.shared.made.load(Ordering::SeqCst) };
        let asking = if silence == Silence::Answers { 0 } else { last };
        self.shared.silent.send_replace(Silent { asking, answering: last });
    }

    /// Closes every connection, and each that is made until it is told otherwise.
    pub fn set_away(&self, is_away: bool) {
        self.shared.is_away.send_replace(is_away);
    }

    /// Returns when as many more came while it was away.
    pub async fn turned_away(&self, more: u64) {
        let mut turned_away = self.shared.turned_away.subscribe();
        let before = *turned_away.borrow_and_update();
        let _ = turned_away.wait_for(|now| *now >= before + more).await;
    }

    /// What was held back goes on its way; returns when all of it has arrived and those connections are over, as their clients are.
    pub async fn resume_and_end(&self) {
        let held = self.shared.holding.borrow().clone();
        assert!(!held.is_empty(), "nothing was held back");
        self.shared.silent.send_replace(Silent::default());
        let mut open = self.shared.open.subscribe();
        let _ = open.wait_for(|open| !open.iter().any(|number| held.contains(number))).await;
    }
}

async fn pass(shared: Arc<Shared>, client: TcpStream) {
    let mut away = shared.is_away.subscribe();
    if *away.borrow() {
        shared.turned_away.send_modify(|n| *n += 1);
        return;
    }
    let target = shared.target.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let Ok(server) = UnixStream::connect(target).await else { return };
    let number = shared.made.fetch_add(1, Ordering::SeqCst) + 1;
    shared.open.send_modify(|open| open.push(number));
    let _ = client.set_nodelay(true);
    let (client_in, client_out) = client.into_split();
    let (server_in, server_out) = server.into_split();
    // Each way ends by itself: a client that is gone doesn't take back what it sent.
    let passing = async {
        tokio::join!(
            copy(client_in, server_out, shared.silent.subscribe(), |silent| {
                let is_silent = silent.asking >= number;
                if is_silent {
                    shared.holding.send_modify(|holding| holding.push(number));
                }
                is_silent
            }),
            copy(server_in, client_out, shared.silent.subscribe(), |silent| silent.answering >= number),
        )
    };
    tokio::select! {
        _ = passing => {}
        _ = away.wait_for(|is_away| *is_away) => {}
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
            // An error means that nobody is there to be told of the end.
            let _ = to.shutdown().await;
            return;
        }
    }
}
