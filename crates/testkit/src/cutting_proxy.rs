//! A network that cuts: a TCP proxy on loopback that drops connections at random moments, in the middle of whatever goes through, or when told;
//! or lets them go silent.

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

use crate::dice::Dice;

/// How a connection comes to its end: after so many bytes both ways or so much time, whichever is first, each anywhere below this.
#[derive(Clone, Copy, Debug)]
pub struct Cuts {
    pub count: u64,
    pub within_bytes: u64,
    pub within: Duration,
}

pub struct CuttingProxy {
    address: SocketAddr,
    shared: Arc<Shared>,
    _accepting: AbortOnDropHandle<()>,
}

struct Shared {
    target: Mutex<Option<SocketAddr>>,
    cuts: Cuts,
    dice: Mutex<Dice>,
    done: AtomicU64,
    /// Nothing gets through, and what was open is cut.
    down: watch::Sender<bool>,
    made: AtomicU64,
    /// Connections up to this number pass nothing on, and nobody closes them.
    silent: watch::Sender<u64>,
}

fn parse(url: &str) -> SocketAddr {
    url.trim_start_matches("http://").trim_end_matches('/').parse().expect("an address and a port")
}

impl CuttingProxy {
    /// Stands before whoever listens at this `http://` URL.
    pub async fn before(url: &str, cuts: Cuts, seed: u64) -> Self {
        let proxy = Self::start(cuts, seed).await;
        proxy.point_at(url);
        proxy
    }

    /// Stands before nobody yet, and cuts when told.
    pub async fn before_nobody() -> Self {
        Self::start(Cuts { count: 0, within_bytes: 1, within: Duration::ZERO }, 1).await
    }

    async fn start(cuts: Cuts, seed: u64) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let dice = Mutex::new(Dice::new(seed));
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

    /// How many connections were cut so far.
    pub fn cuts(&self) -> u64 {
        self.shared.done.load(Ordering::SeqCst)
    }

    /// Whoever comes from now on gets to this one.
    pub fn point_at(&self, url: &str) {
        *self.shared.target.lock().expect("nobody panics with it") = Some(parse(url));
    }

    /// Every connection that is open now goes silent, as behind a firewall that forgot it; those made later pass.
    pub fn stall(&self) {
        self.shared.silent.send_replace(self.shared.made.load(Ordering::SeqCst));
    }

    /// The network is gone until told otherwise.
    pub fn set_down(&self, is_down: bool) {
        self.shared.down.send_replace(is_down);
    }
}

async fn pass(shared: Arc<Shared>, client: TcpStream) {
    let mut down = shared.down.subscribe();
    if *down.borrow_and_update() {
        return;
    }
    let Some(target) = *shared.target.lock().expect("nobody panics with it") else { return };
    let Ok(server) = TcpStream::connect(target).await else { return };
    let number = shared.made.fetch_add(1, Ordering::SeqCst) + 1;
    let silent = shared.silent.subscribe();
    // Kept-alive packets would be held back otherwise, and a cut would rarely be in the middle of one.
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let has_cuts_left = shared.done.load(Ordering::SeqCst) < shared.cuts.count;
    let (bytes, time) = {
        let mut dice = shared.dice.lock().expect("nobody panics with it");
        let (bytes, micros) = (dice.roll(shared.cuts.within_bytes), dice.roll(shared.cuts.within.as_micros() as u64));
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

/// Passes bytes on until one side ends or the allowance of both directions is used up: then the last piece is cut short.
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
        // An end is not told either.
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
