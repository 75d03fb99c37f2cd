//! The broker: manages access to sandboxes and their lifetimes, and keeps store and providers consistent.

#![forbid(unsafe_code)]

pub mod audit_hash;
mod ballast;
mod body_rate;
mod clock;
mod config;
mod connection_runtimes;
mod connections;
mod data_dir;
mod dataplane;
#[doc(hidden)]
pub mod domain;
mod health;
mod heartbeat;
mod http;
mod master_key;
mod metered_stream;
mod metrics;
mod oidc;
mod origin;
mod outbound;
pub mod policy;
mod server;
mod services;
#[doc(hidden)]
pub mod store;
mod thread_authority;
mod tls;
mod traces;

use std::{
    future::Future,
    net::SocketAddr,
    path::PathBuf,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use cobox_protocol::{ApiError, ErrorCode, SandboxId, Secret, Timestamp, key::PrincipalKind};
use cobox_provider::Provider;
use tokio::{net::TcpListener, runtime::Handle};
use tokio_util::sync::CancellationToken;

use ballast::Ballast;
pub use body_rate::BodyLimits;
pub use clock::{Clock, SystemClock};
pub use cobox_gateway::Limits as GatewayLimits;
pub use config::{Config, ConfigError, Cors, MetricsAccess, RateLimits, TlsFiles};
use data_dir::Database;
use domain::{
    access::{
        last_used::LastUsed,
        rate_limiter::RateLimiter,
        webhook::{MIN_SECRET_BYTES, Webhook},
    },
    audit::{audit_writer::AuditTrail, restore_detection::AuditMark},
    cluster::nodes::{self, Nodes},
    context::BrokerContext,
    events::{event_streams::EventStreams, presence::Presence},
    lifecycle::{
        change_listener::listen_for_changes, host_disk, quarantine::Quarantine, reaper::Reaper, reconcile::reconcile,
        transitions::Lifecycle,
    },
    model::{AuditRecord, Principal},
    resources::{reconciler::ResourceReconciler, sandbox_spec::check_template},
    token_signer::{LONGEST_TOKEN_LIFE, TokenSigner},
};
pub use domain::{
    audit::restore_detection::{Restored, acknowledge_restored, read_restored},
    lifecycle::quarantine::{Quarantined, read as read_quarantine},
};
use health::Health;
#[doc(hidden)]
pub use http::paths;
pub use master_key::{MasterKeyRotation, RotatedMasterKey, rotate_master_key};
use metrics::Metrics;
use oidc::Oidc;
pub use oidc::OidcConfig;
use origin::Origin;
use policy::{PolicyFileError, Reloaded};
use services::Services;
use store::{Store, StoreError, TimeAccounting};
use thread_authority::ThreadAuthority;
pub use thread_authority::ThreadAuthorityConfig;
use tls::Tls;
pub use tls::TlsError;
pub use traces::{RequestSpan, TraceContext, TraceSink};

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    DataDir(#[from] data_dir::DataDirError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("{}", .0.message)]
    Reconcile(ApiError),
    #[error(transparent)]
    Policy(#[from] policy::PolicyFileError),
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error(
        "{0} can be reached from other machines, and keys and tokens would be sent unencrypted: set a certificate with --tls-cert and \
         --tls-key (tls.cert and tls.key in the config), or, behind a proxy that terminates TLS, set --insecure-listen (insecure_listen = \
         true)"
    )]
    Exposed(SocketAddr),
    #[error(
        "tokens of older keys are valid until {0}, and another graceful replacement would extend that: replace the master key after that, \
         or now with --immediate, which revokes every token"
    )]
    TooSoon(Timestamp),
    #[error(
        "{data_dir}: {why}. To run a second broker on this database, give it an empty data directory with a copy of master.key in it. To move the broker \
         here, stop the other one first and start this one again"
    )]
    Node { data_dir: PathBuf, why: nodes::ClaimNodeError },
    #[error("oidc: {0}")]
    Oidc(String),
    #[error("thread_authority: {0}")]
    ThreadAuthority(String),
    #[error("templates.{0}: {1}")]
    Template(String, String),
    #[error("webhook_secret_file: {0}")]
    Webhook(String),
    #[error("metrics.token_file: {0}")]
    Metrics(String),
    #[error("the listener has no address: {0}")]
    Listener(std::io::Error),
    #[error("gateway_listen: can't listen on {0}: {1}")]
    Gateway(std::net::SocketAddr, std::io::Error),
    #[error("{0}: the disk is full, and removing the ballast file failed: {1}; remove files from the disk and try again")]
    Ballast(PathBuf, std::io::Error),
    #[error("starting the threads that serve connections: {0}")]
    ConnectionRuntimes(std::io::Error),
}

/// Why a broker stopped without a request to do so.
#[derive(Debug, thiserror::Error)]
pub enum StopError {
    #[error(
        "the master key of this database was replaced while the broker ran: copy the new one to {0} (and the previous one beside it, if there \
         is one) from where it was replaced, and start the broker again"
    )]
    KeyReplaced(PathBuf),
    #[error(
        "another broker was started with the node id of {0}, probably from a copy of it, and took over: stop that one, or give it an empty data \
         directory, before this one is started again"
    )]
    NodeTaken(PathBuf),
}

/// A broker whose store and provider are reconciled, ready to serve.
pub struct Broker {
    listener: TcpListener,
    /// Set if the dataplane has its own address.
    gateway_listener: Option<TcpListener>,
    /// Lives as long as the broker: a database connection that was opened on one of these runtimes is also polled
    /// there.
    connection_runtimes: connection_runtimes::ConnectionRuntimes,
    /// Locked as long as the broker lives, so that no other broker uses the data directory.
    data_dir: Arc<data_dir::DataDir>,
    context: Arc<BrokerContext>,
    services: Arc<Services>,
    lifecycle: Arc<Lifecycle>,
    reaper: Arc<Reaper>,
    audit_mark: Arc<AuditMark>,
    audit: AuditTrail,
    webhook: Option<Arc<Webhook>>,
    scraper: Option<Arc<Secret>>,
    metrics: Arc<Metrics>,
    traces: Option<Arc<dyn TraceSink>>,
    tls: Option<Arc<Tls>>,
}

impl Broker {
    /// Opens the data directory and reconciles store and provider. Clients that connect to the listener wait until
    /// [`Broker::run`].
    pub async fn start(config: Config, provider: Arc<dyn Provider>, listener: TcpListener) -> Result<Self, StartError> {
        Self::start_with_clock(config, provider, listener, Arc::new(SystemClock)).await
    }

    /// Like [`Broker::start`], with a custom clock.
    pub async fn start_with_clock(
        config: Config,
        provider: Arc<dyn Provider>,
        listener: TcpListener,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, StartError> {
        config.validate()?;
        check_templates(&config, &*provider)?;
        let address = listener.local_addr().map_err(StartError::Listener)?;
        let tls = config.tls.as_ref().map(Tls::load).transpose()?;
        let webhook = read_webhook(&config)?;
        let scraper = read_scraper(&config)?;
        let data_dir = data_dir::DataDir::open(&config.data_dir)?;
        let ballast = Ballast::new(&config.data_dir);
        // The database may need space to be opened.
        ballast.release_if_full().map_err(|e| StartError::Ballast(config.data_dir.clone(), e))?;
        let oidc = config.oidc.clone().map(Oidc::new).transpose().map_err(StartError::Oidc)?;
        let thread_authority =
            config.thread_authority.as_ref().map(ThreadAuthority::new).transpose().map_err(StartError::ThreadAuthority)?;
        let policy = Arc::new(policy::PolicySource::open(config.policy_file.as_deref(), &config.data_dir)?);
        let store = open_store(&config, &data_dir).await?;
        let public_url = match &config.public_url {
            Some(url) => url.clone(),
            None => format!("{}://{address}", config.scheme()),
        };
        let node = data_dir.node_id()?;
        store.write_as(&node);
        let gateway_listener = match config.gateway_listen {
            Some(address) => Some(TcpListener::bind(address).await.map_err(|e| StartError::Gateway(address, e))?),
            None => None,
        };
        let gateway = gateway_listener.as_ref().map(TcpListener::local_addr).transpose().map_err(StartError::Listener)?;
        if let Some(exposed) = [Some(address), gateway].into_iter().flatten().find(|a| !a.ip().to_canonical().is_loopback())
            && tls.is_none()
            && !config.insecure_listen
        {
            return Err(StartError::Exposed(exposed));
        }
        let audit_mark = Arc::new(AuditMark::new(&config.data_dir));
        let small_loss = audit_mark.compare(&store, &node, clock.now()).await?;
        audit_mark.restore_gap(&store, &node).await?;
        let nodes = Nodes::new(node.clone(), Origin::of(&config, &public_url, gateway), config.node_timeout());
        nodes
            .claim(&store, &*clock, data_dir.is_original_directory()?)
            .await
            .map_err(|why| StartError::Node { data_dir: config.data_dir.clone(), why })?;
        data_dir.record_directory_identity()?;
        // Send the heartbeat before reading the key, so that a rotation of the key detects this broker.
        nodes.send_heartbeat(&store, &*clock).await?;
        let master = master_key::read(&data_dir, &store).await?;
        store.seal_with(master.audit_seal());
        let previous = data_dir.previous_key(LONGEST_TOKEN_LIFE)?;
        let tokens = TokenSigner::new(master, previous, config.alg, config.token_ttl(), policy.clone());
        let quarantine = Arc::new(Quarantine::open(&config.data_dir, config.quarantine_keep()));
        let context = Arc::new(BrokerContext {
            config,
            public_url,
            store: store.clone(),
            provider,
            clock,
            tokens,
            policy,
            oidc,
            thread_authority,
            node,
            nodes,
            ballast,
            background: Handle::current(),
            metrics: Arc::default(),
            started_at: Timestamp::now(),
        });
        let last_used = Arc::new(LastUsed::default());
        let lifecycle = Arc::new(Lifecycle::new(context.clone(), last_used, quarantine));
        // The time without a running broker counts neither as running time nor against retention periods.
        store.count_running(&context.node, context.now(), TimeAccounting::START).await?;
        lifecycle.count_downtime(context.now(), TimeAccounting::START).await?;
        let quarantined = reconcile(&lifecycle).await.map_err(StartError::Reconcile)?;
        if let Some(loss) = small_loss {
            audit_mark.settle(loss, quarantined);
        }
        let services = Arc::new(Services::new(&context, &lifecycle));
        let resources = ResourceReconciler {
            context: context.clone(),
            snapshots: services.snapshots.clone(),
            volumes: services.volumes.clone(),
            pools: services.pools.clone(),
        };
        Ok(Self {
            listener,
            gateway_listener,
            connection_runtimes: connection_runtimes::ConnectionRuntimes::start().map_err(StartError::ConnectionRuntimes)?,
            data_dir: Arc::new(data_dir),
            services,
            reaper: Arc::new(Reaper::new(lifecycle.clone(), Arc::new(resources), audit_mark.clone())),
            audit: AuditTrail::start(store, audit_mark.clone(), context.config.audit_retry()),
            webhook,
            scraper,
            metrics: context.metrics.clone(),
            traces: None,
            tls,
            audit_mark,
            lifecycle,
            context,
        })
    }

    /// Sends a span of every request to this sink. Call before [`Broker::run`].
    pub fn trace_to(&mut self, sink: Arc<dyn TraceSink>) {
        self.traces = Some(sink);
    }

    /// URL under which clients reach the broker, without a trailing slash.
    pub fn url(&self) -> &str {
        &self.context.public_url
    }

    /// Address of the dataplane's own listener, if it has one.
    pub fn gateway_address(&self) -> Option<std::net::SocketAddr> {
        self.gateway_listener.as_ref().and_then(|l| l.local_addr().ok())
    }

    /// Returns whether a key is a valid key of this deployment.
    pub async fn knows_key(&self, key: &Secret) -> Result<bool, ApiError> {
        match self.services.keys.authenticate(key).await {
            Ok(_) => Ok(true),
            Err(e) if e.code == ErrorCode::Unauthenticated => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// Reloads the certificate files immediately. Returns whether they had changed.
    pub fn reload_tls(&self) -> Result<bool, TlsError> {
        self.tls.as_ref().map_or(Ok(false), |tls| tls.reload())
    }

    /// Serves until `shutdown` resolves. Ends with an error if the master key no longer matches the database's. Then
    /// gives pending requests a few seconds to finish. Sandboxes keep running.
    pub async fn run(&self, shutdown: impl Future<Output = ()> + Send) -> Result<(), StopError> {
        let interval = Duration::from_millis(self.context.config.reaper_interval_ms);
        let reaper = self.reaper.clone();
        let reaping = tokio::spawn(async move {
            let mut ticks = tokio::time::interval(interval);
            ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
            loop {
                ticks.tick().await;
                reaper.tick().await;
            }
        });
        let rate_limiter = Arc::new(RateLimiter::new(&self.context.config.rate_limits, self.context.config.failures_per_minute()));
        let sweeping = tokio::spawn(heartbeat::sweep(self.context.clone(), rate_limiter.clone(), self.data_dir.clone()));
        let stop = CancellationToken::new();
        let stop_cause = Arc::<heartbeat::StopCause>::default();
        let beating = tokio::spawn(heartbeat::send_heartbeats(self.context.clone(), stop.clone(), stop_cause.clone()));
        let watching_disk = tokio::spawn(host_disk::watch(self.lifecycle.clone()));
        let listening = tokio::spawn(listen_for_changes(self.lifecycle.clone()));
        let watching = tokio::spawn(watch_policy(self.context.clone()));
        let dataplane = dataplane::Dataplane {
            context: self.context.clone(),
            lifecycle: self.lifecycle.clone(),
            keys: self.services.keys.clone(),
            audit: self.audit.clone(),
            presence: Presence::default(),
        };
        let api = http::Api {
            services: self.services.clone(),
            context: self.context.clone(),
            webhook: self.webhook.clone(),
            audit: self.audit.clone(),
            events: Arc::new(EventStreams::new(self.context.clone(), self.services.keys.clone())),
            rate_limiter: rate_limiter.clone(),
            quarantine: self.lifecycle.quarantine.clone(),
            health: Arc::new(Health::new(self.context.clone())),
            metrics: self.metrics.clone(),
            scraper: self.scraper.clone(),
            operators: Arc::default(),
            traces: self.traces.clone(),
        };
        let config = &self.context.config;
        let gateway = cobox_gateway::Gateway::new(Arc::new(dataplane), config.gateway_limits);
        let http::Dispatchers { main, dataplane } = http::dispatchers(&api, &gateway);
        let serve = |listener, dispatcher| {
            let (tls, metrics) = (self.tls.clone(), self.metrics.clone());
            let serving = server::ConnectionContext { dispatcher: Arc::new(dispatcher), tls, metrics, body_limits: config.body_limits };
            server::serve(listener, &self.connection_runtimes, serving, config.connection_limits(), stop.cancelled())
        };
        let renewing = self.tls.clone().map(|tls| tokio::spawn(tls.watch()));
        let serving = async {
            match &self.gateway_listener {
                Some(own) => drop(tokio::join!(serve(&self.listener, main), serve(own, dataplane))),
                None => serve(&self.listener, main).await,
            }
        };
        tokio::join!(serving, async {
            tokio::select! {
                () = shutdown => stop.cancel(),
                () = stop.cancelled() => {}
            }
        });
        // Aborting a tick at any await leaves nothing that the next start wouldn't finish.
        for task in [reaping, beating, watching_disk, listening, watching, sweeping].into_iter().chain(renewing) {
            task.abort();
        }
        self.audit.close().await;
        let context = &self.context;
        if stop_cause.is_node_taken.load(Ordering::SeqCst) {
            self.audit_mark.save(&context.store, context.now()).await;
            return Err(StopError::NodeTaken(context.config.data_dir.clone()));
        }
        self.audit_mark.close(&context.store, context.now()).await;
        if stop_cause.is_key_replaced.load(Ordering::SeqCst) {
            Err(StopError::KeyReplaced(self.data_dir.master_key_path()))
        } else {
            Ok(())
        }
    }

    /// Suspends every sandbox that runs on this node and returns their ids.
    pub async fn suspend_all(&self) -> Result<Vec<SandboxId>, ApiError> {
        self.reaper.suspend_all().await
    }

    /// Creates a key for a principal of the configured workspace without authorization, for the first start.
    pub async fn bootstrap_key(&self, principal: &str, kind: PrincipalKind) -> Result<Secret, ApiError> {
        let workspace = self.context.config.workspace.clone();
        let principal = Principal { workspace, name: principal.to_owned(), kind };
        Ok(self.services.keys.bootstrap(principal).await?.api_key)
    }

    /// Reloads the policy. A broken one is reported and changes nothing.
    pub async fn reload_policy(&self) -> Result<(), policy::PolicyFileError> {
        report_reloaded(&self.context, self.context.policy.reload()).await
    }

    /// Runs one reaper round over all sandboxes, as [`Broker::run`] does at each interval.
    pub async fn tick(&self) {
        self.reaper.tick().await;
    }

    /// The store, for tests and tools that need access below the API.
    #[doc(hidden)]
    pub fn store(&self) -> &Arc<Store> {
        &self.context.store
    }
}

/// Fails at startup if a configured template can't be used, instead of at its first use.
fn check_templates(config: &Config, provider: &dyn Provider) -> Result<(), StartError> {
    for (name, spec) in &config.templates {
        let refused = |why: String| StartError::Template(name.clone(), why);
        if let Some(other) = spec.provider.as_deref().filter(|p| *p != provider.name()) {
            return Err(refused(format!("provider: there is no `{other}` here; this broker has `{}`", provider.name())));
        }
        check_template(provider, spec).map_err(|e| refused(e.to_string()))?;
    }
    Ok(())
}

async fn open_store(config: &Config, data_dir: &data_dir::DataDir) -> Result<Arc<Store>, StartError> {
    Ok(match &config.database_url {
        Some(url) => {
            data_dir.use_database(Database::Postgres)?;
            Arc::new(store::postgres::open(url).await?)
        }
        None => {
            data_dir.use_database(Database::Sqlite)?;
            Arc::new(store::sqlite::open(&data_dir.database()?).await?)
        }
    })
}

/// How often the policy file is checked with `stat`, so that an edit takes effect within moments. The file must be
/// unchanged between two checks.
const WATCH_POLICY_EVERY: Duration = Duration::from_secs(1);

async fn watch_policy(context: Arc<BrokerContext>) {
    let mut ticks = tokio::time::interval(WATCH_POLICY_EVERY);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        if let Some(outcome) = context.policy.reload_if_changed() {
            // The error has already been reported.
            let _ = report_reloaded(&context, outcome).await;
        }
    }
}

/// Reports in log and audit which policy is now in effect, or in the log why the old one stays in effect.
async fn report_reloaded(context: &BrokerContext, outcome: Result<Reloaded, PolicyFileError>) -> Result<(), PolicyFileError> {
    let path = context.policy.path().display().to_string();
    match outcome {
        Ok(Reloaded::Nothing) => {}
        Ok(Reloaded::Read { fingerprint }) => {
            tracing::info!(path, fingerprint, "the policy was read");
            let record = AuditRecord::new(context.now(), &context.config.workspace, "policy.read").detail(format!("{path} {fingerprint}"));
            if let Err(error) = context.store.note(&store::Note { audit: vec![record], ..store::Note::default() }).await {
                tracing::error!(%error, "recording that the policy was read failed");
            }
        }
        Err(error) => {
            tracing::error!(%error, "reading the policy failed; the previous policy stays in effect");
            return Err(error);
        }
    }
    Ok(())
}

fn read_webhook(config: &Config) -> Result<Option<Arc<Webhook>>, StartError> {
    let Some(path) = &config.webhook_secret_file else { return Ok(None) };
    let secret = std::fs::read_to_string(path).map(zeroize::Zeroizing::new);
    let secret = secret.map_err(|e| StartError::Webhook(format!("{} can't be read: {e}", path.display())))?;
    let too_short = || StartError::Webhook(format!("{} must contain a secret of at least {MIN_SECRET_BYTES} bytes", path.display()));
    Ok(Some(Arc::new(Webhook::new(&secret).ok_or_else(too_short)?)))
}

/// Minimum length of a scraper's token, in characters, so that it can't be guessed.
const MIN_SCRAPER_CHARS: usize = 16;

fn read_scraper(config: &Config) -> Result<Option<Arc<Secret>>, StartError> {
    let Some(path) = &config.metrics.token_file else { return Ok(None) };
    let token = std::fs::read_to_string(path).map(zeroize::Zeroizing::new);
    let token = token.map_err(|e| StartError::Metrics(format!("{} can't be read: {e}", path.display())))?;
    let token = token.trim();
    if token.len() < MIN_SCRAPER_CHARS || !token.bytes().all(|b| b.is_ascii_graphic()) {
        let problem = format!("{} must contain a token of at least {MIN_SCRAPER_CHARS} printable characters", path.display());
        return Err(StartError::Metrics(problem));
    }
    Ok(Some(Arc::new(Secret::new(token))))
}
