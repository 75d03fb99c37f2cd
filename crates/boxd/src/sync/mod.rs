//! `WS /v1/sync/ws`: the sandbox's side of a folder sync. `cobox-sync` does the work; this provides a thread that
//! accesses files as the workload's user, and the connection to the client.

mod hooks;

use std::{collections::HashMap, sync::Arc, time::Duration};

use axum::{
    Extension,
    extract::{
        State, WebSocketUpgrade,
        ws::{Message, rejection::WebSocketUpgradeRejection},
    },
    response::Response,
};
use bytes::Bytes;
use cobox_protocol::{
    ApiError, Capability, ErrorCode,
    frame::{CLIENT_FRAME_TYPES, ClientFrame},
};
use cobox_sync::{DigestCache, Limits};
use cobox_token::Claims;
use http::{HeaderMap, StatusCode, Uri, header};
use parking_lot::Mutex;
use rustix::fs::OFlags;
use serde::{Deserialize, Deserializer, de::IgnoredAny};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{MissedTickBehavior, interval, timeout},
};

use self::hooks::SandboxFiles;
use crate::{
    files::{ChangeRecorder, Root, SandboxPath, create_directories, file_error, query_values, refuse_kernel_files},
    pipe,
    request_layer::{ErrorResponse, RequestRecord},
    server::Server,
    socket::{self, CloseReason, FrameProtocol, Peer, ReceivedFrame, SocketHandler},
};

/// Maximum number of folders synced at once. Each takes two threads, and memory for the state of its files.
const MAX_SYNCS: usize = 8;
/// Interval at which written files are added to the activity feed, many as one entry.
const REPORT_INTERVAL: Duration = Duration::from_millis(250);
/// How long a client may continue sending after its sync has ended, until it has received the reason.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// Total number of files whose digests are cached between a folder's connections: about 50 MiB of the sandbox's memory.
const MAX_CACHED_DIGESTS: usize = 200_000;

/// Limits the number of syncs, apart from other streams, and keeps the digests of ended ones, so that a reconnect reads
/// no file twice.
pub struct SyncLimiter {
    free: Arc<Semaphore>,
    digest_caches: Arc<DigestCaches>,
}

impl Default for SyncLimiter {
    fn default() -> Self {
        Self { free: Arc::new(Semaphore::new(MAX_SYNCS)), digest_caches: Arc::default() }
    }
}

/// Digests by folder. Sharing them between clients is safe, because every client that syncs may read the files anyway.
#[derive(Default)]
struct DigestCaches(Mutex<HashMap<Vec<u8>, DigestCache>>);

impl DigestCaches {
    fn take(&self, folder: &SandboxPath) -> DigestCache {
        self.0.lock().remove(folder.bytes()).unwrap_or_default()
    }

    /// Stores the digests. If they are too many they are dropped; if there is no space for them, older ones are
    /// dropped.
    fn store(&self, folder: &SandboxPath, digests: DigestCache) {
        let mut all = self.0.lock();
        let kept: usize = all.values().map(DigestCache::len).sum();
        if all.len() >= MAX_SYNCS || kept + digests.len() > MAX_CACHED_DIGESTS {
            all.clear();
        }
        if !digests.is_empty() && digests.len() <= MAX_CACHED_DIGESTS {
            all.insert(folder.bytes().to_vec(), digests);
        }
    }
}

impl SyncLimiter {
    fn take(&self) -> Result<OwnedSemaphorePermit, ApiError> {
        self.free.clone().try_acquire_owned().map_err(|_| {
            let message = format!("{MAX_SYNCS} folders are already being synced here; end one and try again");
            ApiError::new(ErrorCode::RateLimited, message)
        })
    }
}

/// `?path=` is the folder. With `?pull=true` nothing is written.
pub async fn open(
    State(server): State<Arc<Server>>,
    Extension(record): Extension<Arc<RequestRecord>>,
    uri: Uri,
    headers: HeaderMap,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, ErrorResponse> {
    let path = match query_values(&uri, "path").next() {
        Some(path) => SandboxPath::new(path)?,
        None => SandboxPath::new(server.programs.work_dir().as_bytes().to_vec())?,
    };
    let is_read_only = match query_values(&uri, "pull").next().as_deref() {
        None | Some(b"false") => false,
        Some(b"true") => true,
        Some(_) => return Err(ApiError::invalid("pull: must be true or false").into()),
    };
    if !is_read_only && headers.contains_key(header::AUTHORIZATION) {
        record.set_capability(Capability::FsWrite);
        server.authority.authorize(&headers, Capability::FsWrite)?;
    }
    socket::open(server, record, headers, upgrade, SyncSocket { path, is_read_only }).await
}

/// Messages from clients: data of the sync, and the frames common to all sockets.
enum SyncFrame {
    Control(ClientFrame<IgnoredAny>),
    Bytes(Bytes),
}

impl<'de> Deserialize<'de> for SyncFrame {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        ClientFrame::deserialize(deserializer).map(SyncFrame::Control)
    }
}

impl FrameProtocol for SyncFrame {
    const TYPES: &'static [&'static str] = &CLIENT_FRAME_TYPES;

    fn classify(self) -> ReceivedFrame<Self> {
        match self {
            SyncFrame::Control(ClientFrame::Auth { token }) => ReceivedFrame::Auth(token),
            SyncFrame::Control(ClientFrame::Ping { id }) => ReceivedFrame::Ping(id),
            SyncFrame::Control(ClientFrame::Close) => ReceivedFrame::Close,
            frame => ReceivedFrame::Frame(frame),
        }
    }

    fn from_binary(bytes: Bytes) -> Option<Self> {
        Some(SyncFrame::Bytes(bytes))
    }
}

struct SyncSocket {
    path: SandboxPath,
    is_read_only: bool,
}

impl SocketHandler for SyncSocket {
    type Frame = SyncFrame;
    const REQUIRED_CAPABILITY: Capability = Capability::FsRead;

    async fn handle(self, peer: &mut Peer<'_, SyncFrame>) -> Result<(), CloseReason> {
        let SyncSocket { path, is_read_only } = self;
        peer.record.set_target(&path.to_string());
        let server = peer.server.clone();
        let claims = peer.claims();
        if !is_read_only {
            require_write(&claims)?;
        }
        let permit = server.syncs.take()?;
        let recorder = server.files.recorder(&claims);
        let files = Arc::new(SandboxFiles::new(&server, claims, path.clone(), recorder.clone(), is_read_only));
        let folder = {
            let path = path.clone();
            server.files.workers().run(move |root| open_folder(root, &path, is_read_only, &recorder)).await??
        };
        peer.record.record_once(&server.sandbox_claims, StatusCode::SWITCHING_PROTOCOLS.as_u16(), None);
        let (out, mut chunks) = pipe::to_client();
        let (bytes, from_client) = pipe::from_client();
        let limits = Limits { watches: server.limits.watches as usize, ..Limits::default() };
        let hooks = files.clone();
        let work = move |_: &Root| {
            // Held until the thread has finished with the files.
            let _permit = permit;
            if let Err(error) = cobox_sync::serve(from_client, out, folder, limits, hooks) {
                tracing::debug!(%error, "a sync ended");
            }
        };
        server.files.workers().spawn("sync", work).map_err(|e| ApiError::new(ErrorCode::Internal, format!("starting a sync: {e}")))?;
        let mut report_tick = interval(REPORT_INTERVAL);
        report_tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut waiting: Option<Bytes> = None;
        loop {
            tokio::select! {
                frame = peer.next(), if waiting.is_none() => match frame? {
                    SyncFrame::Bytes(bytes) => {
                        // The newest token applies.
                        files.renew(peer.claims());
                        waiting = Some(bytes);
                    }
                    SyncFrame::Control(_) => peer.out.send_error(&ApiError::invalid("a sync is spoken in binary frames")).await?,
                },
                permit = bytes.reserve(), if waiting.is_some() => match permit {
                    Ok(permit) => permit.send(waiting.take()),
                    // The sync has ended; its last output is still being sent.
                    Err(_) => waiting = None,
                },
                piece = chunks.recv() => match piece {
                    Some(piece) => peer.out.message(Message::Binary(piece)).await?,
                    None => {
                        files.report_changes(&server.activity_log);
                        // Reads until the client closes. Closing the connection while the client is still sending could
                        // discard the reason for the end.
                        let drain = async { while peer.next().await.is_ok() {} };
                        // A client that doesn't close is disconnected.
                        let _ = timeout(CLOSE_TIMEOUT, drain).await;
                        return Ok(());
                    }
                },
                _ = report_tick.tick() => files.report_changes(&server.activity_log),
            }
        }
    }
}

fn require_write(claims: &Claims) -> Result<(), ApiError> {
    if claims.scope.contains(Capability::FsWrite) {
        return Ok(());
    }
    let message = "a sync that writes needs the capability `fs_write`, which the token doesn't have; sync with `pull=true` to read only";
    Err(ApiError::new(ErrorCode::CapabilityDenied, message).with_details(serde_json::json!({ "capability": "fs_write" })))
}

/// Opens the folder, and creates it if it is missing and writing is allowed.
fn open_folder(root: &Root, path: &SandboxPath, is_read_only: bool, recorder: &ChangeRecorder) -> Result<std::os::fd::OwnedFd, ApiError> {
    if !is_read_only {
        create_directories(root, path.bytes(), true, recorder).map_err(|e| file_error(e, path))?;
    }
    let opened = root.open(path.bytes(), OFlags::RDONLY | OFlags::DIRECTORY);
    opened.and_then(|folder| refuse_kernel_files(&folder).map(|()| folder)).map_err(|e| file_error(e, path))
}
