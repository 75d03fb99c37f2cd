//! TCP proxy on loopback that cuts connections at random points in their traffic, or on request, or stalls them.

use std::{
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::watch,
};
use tokio_util::task::AbortOnDropHandle;

use crate::seeded_rng::SeededRng;

/// When connections are cut: each after a random number of bytes in both directions or a random time, if that is earlier.
#[derive(Clone, Copy, Debug)]
pub struct CutPolicy {
    /// Number of connections to cut; later ones pass.
    pub count: u64,
    /// Upper bound of the bytes, exclusive.
    pub within_bytes: u64,
    /// Upper bound of the time, exclusive.
    pub within: Duration,
}

pub struct CuttingProxy {
    address: SocketAddr,
    shared: Arc<Shared>,
    _accepting: AbortOnDropHandle<()>,
}

struct Shared {
    target: Mutex<Option<SocketAddr>>,
    cuts: CutPolicy,
    dice: Mutex<SeededRng>,
    done: AtomicU64,
    /// While true, connections are refused and open ones are cut.
    down: watch::Sender<bool>,
    made: AtomicU64,
    /// Connections up to this number forward nothing and stay open.
    silent: watch::Sender<u64>,
}

fn parse(url: &str) -> SocketAddr {
    url.trim_start_matches("http://").trim_end_matches('/').parse().expect("an address and a port")
}

impl CuttingProxy {
    /// Starts a proxy for the server at this `http://` URL.
    pub async fn in_front_of(url: &str, cuts: CutPolicy, seed: u64) -> Self {
        let proxy = Self::start(cuts, seed).await;
        proxy.point_at(url);
        proxy
    }

    /// Starts a proxy without a target, which cuts only on request.
    pub async fn without_target() -> Self {
        Self::start(CutPolicy { count: 0, within_bytes: 1, within: Duration::ZERO }, 1).await
    }

    async fn start(cuts: CutPolicy, seed: u64) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let dice = Mutex::new(SeededRng::new(seed));
        let shared = Arc::new(Shared {
            target: Mutex::new(None),
            cuts,
            dice,
            done: AtomicU64::new(0),
            down: watch::Sender::new(false),
            made: AtomicU64::new(0),
            silent: watch::Sender::new(0),
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

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Number of connections cut so far.
    pub fn cuts(&self) -> u64 {
        self.shared.done.load(Ordering::SeqCst)
    }

    /// Forwards later connections to this URL.
    pub fn point_at(&self, url: &str) {
        *self.shared.target.lock().expect("no thread panics while holding it") = Some(parse(url));
    }

    /// Stalls every open connection, like a firewall that lost its connection table; later connections pass.
    pub fn stall(&self) {
        self.shared.silent.send_replace(self.shared.made.load(Ordering::SeqCst));
    }

    /// While set, the network is down.
    pub fn set_down(&self, is_down: bool) {
        self.shared.down.send_replace(is_down);
    }
}

async fn pass(shared: Arc<Shared>, client: TcpStream) {
    let mut down = shared.down.subscribe();
    if *down.borrow_and_update() {
        return;
    }
    let Some(target) = *shared.target.lock().expect("no thread panics while holding it") else { return };
    let Ok(server) = TcpStream::connect(target).await else { return };
    let number = shared.made.fetch_add(1, Ordering::SeqCst) + 1;
    let silent = shared.silent.subscribe();
    // Otherwise small packets would be delayed and merged, and a cut would rarely fall inside one.
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let has_cuts_left = shared.done.load(Ordering::SeqCst) < shared.cuts.count;
    let (bytes, time) = {
        let mut dice = shared.dice.lock().expect("no thread panics while holding it");
        let (bytes, micros) = (dice.below(shared.cuts.within_bytes), dice.below(shared.cuts.within.as_micros() as u64));
        if has_cuts_left { (bytes, Duration::from_micros(micros)) } else { (u64::MAX, Duration::MAX) }
    };
    let left = AtomicU64::new(bytes);
    let was_cut = AtomicBool::new(false);
    let (client_in, client_out) = client.into_split();
    let (server_in, server_out) = server.into_split();
    let ended_by_itself = tokio::select! {
        () = copy(client_in, server_out, &left, &was_cut, (number, silent.clone())) => !was_cut.load(Ordering::SeqCst),
        () = copy(server_in, client_out, &left, &was_cut, (number, silent.clone())) => !was_cut.load(Ordering::SeqCst),
        () = tokio::time::sleep(time.min(Duration::from_secs(1 << 30))) => false,
        _ = down.changed() => true,
    };
    if !ended_by_itself {
        shared.done.fetch_add(1, Ordering::SeqCst);
    }
}

/// Forwards bytes until one side ends or the byte limit shared by both directions is reached; then the last chunk is truncated.
async fn copy(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    left: &AtomicU64,
    was_cut: &AtomicBool,
    (number, mut silent): (u64, watch::Receiver<u64>),
) {
    let mut buffer = vec![0; 32 * 1024];
    loop {
        let n = from.read(&mut buffer).await.unwrap_or(0);
        // The end of the connection is not forwarded either.
        if silent.wait_for(|silent| *silent < number).await.is_err() || n == 0 {
            return;
        }
        let before = left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |l| Some(l.saturating_sub(n as u64))).unwrap_or(0);
        let allowed = (n as u64).min(before) as usize;
        if to.write_all(&buffer[..allowed]).await.is_err() {
            return;
        }
        if allowed < n {
            was_cut.store(true, Ordering::SeqCst);
            return;
        }
    }
}
