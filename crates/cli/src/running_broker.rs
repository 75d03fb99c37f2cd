//! A broker running in this process, from its start to its orderly shutdown.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::Context as _;
use cobox_broker::{Broker, Config, StopError};
use cobox_protocol::{ApiError, SandboxId, Secret, key::PrincipalKind};
use cobox_provider::local::LocalOptions;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::{sync::oneshot, task::JoinHandle};

use crate::{
    daemon::{listen, local_provider, local_url},
    data_dir::{BrokerInfo, DataDir, write_key},
    failure::Failure,
};

/// Principal of the first key if the environment doesn't name the user.
const FIRST_PRINCIPAL: &str = "operator";
/// Principal of the agent key of a single-user broker.
const AGENT_PRINCIPAL: &str = "agent";

/// Environment variable for the OpenTelemetry collector that receives a span per request; the standard name.
const OTLP_ENDPOINT: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";

/// The API keys that a broker creates at its start if they are missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FirstKeys {
    Operator,
    OperatorAndAgent,
}

pub struct RunningBroker {
    broker: Arc<Broker>,
    server: JoinHandle<Result<(), StopError>>,
    shutdown: oneshot::Sender<()>,
    data_dir: DataDir,
    pub info: BrokerInfo,
    /// Set when this start wrote the key file.
    pub is_first_run: bool,
}

impl RunningBroker {
    /// Starts everything; on return the broker accepts requests and `broker.json` has its address.
    pub async fn start(mut config: Config, options: LocalOptions, first_keys: FirstKeys) -> Result<Self, Failure> {
        raise_descriptor_limit();
        let data_dir = DataDir::lock(&config.data_dir)?;
        config.data_dir = data_dir.path().to_owned();
        let listener = listen(config.listen).await?;
        let local = local_url(config.scheme(), listener.local_addr()?);
        // A broker bound to all addresses would otherwise hand out URLs that lead nowhere.
        config.public_url.get_or_insert(local);
        let provider = local_provider(data_dir.path(), options).await?;
        let mut broker = Broker::start(config, Arc::new(provider), listener).await.context("starting the broker")?;
        if let Some(endpoint) = std::env::var(OTLP_ENDPOINT).ok().filter(|url| !url.is_empty()) {
            export_spans(&mut broker, &endpoint)?;
        }
        let broker = Arc::new(broker);
        let (shutdown, shutdown_requested) = oneshot::channel::<()>();
        let server = tokio::spawn({
            let broker = broker.clone();
            async move {
                // A dropped sender also stops the broker.
                broker.run(async { drop(shutdown_requested.await) }).await
            }
        });
        let (api_key_file, agent_key_file) = (data_dir.api_key_file(), data_dir.agent_key_file());
        let user = std::env::var("USER").ok().filter(|u| !u.is_empty()).unwrap_or_else(|| FIRST_PRINCIPAL.to_owned());
        let is_first_run = ensure_key(&broker, &api_key_file, &user, PrincipalKind::Operator).await?;
        let agent_key_file = match first_keys {
            FirstKeys::Operator => None,
            FirstKeys::OperatorAndAgent => match ensure_key(&broker, &agent_key_file, AGENT_PRINCIPAL, PrincipalKind::Agent).await {
                Ok(_) => Some(agent_key_file),
                // The name may belong to a human by now. An agent key can be created by hand, so the broker starts
                // without one.
                Err(failure) => {
                    tracing::warn!(reason = failure.message, "no agent key; create one with `cobox keys create`");
                    None
                }
            },
        };
        let info = BrokerInfo { url: broker.url().to_owned(), pid: std::process::id(), api_key_file, agent_key_file };
        data_dir.write_info(&info)?;
        Ok(Self { broker, server, shutdown, data_dir, info, is_first_run })
    }

    pub fn sandboxes_dir(&self) -> PathBuf {
        self.data_dir.path().join("sandboxes")
    }

    pub fn data_dir(&self) -> &std::path::Path {
        self.data_dir.path()
    }

    /// Resolves with the reason when the broker stops without a request to stop.
    pub async fn stopped(&mut self) -> Failure {
        let reason = match (&mut self.server).await {
            Ok(Ok(())) => "the broker stopped by itself".to_owned(),
            Ok(Err(reason)) => reason.to_string(),
            Err(e) => format!("the broker stopped unexpectedly: {e}"),
        };
        // Clients that read the note would look for a broker that is gone.
        self.data_dir.remove_info();
        Failure::new(reason)
    }

    /// Reloads the policy and the certificate.
    pub async fn reload(&self) {
        // Errors are logged by the broker.
        let _ = self.broker.reload_policy().await;
        match self.broker.reload_tls() {
            Ok(true) => tracing::info!("reloaded the certificate"),
            Ok(false) => {}
            Err(error) => tracing::error!(%error, "reloading the certificate failed; the old one stays in use"),
        }
    }

    /// Stops accepting requests and lets current ones finish. Sandboxes keep running.
    pub async fn stop(self) -> StoppedBroker {
        self.data_dir.remove_info();
        // Fails only if the broker has stopped already.
        let _ = self.shutdown.send(());
        match self.server.await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::error!(%error, "the broker stopped by itself"),
            Err(error) => tracing::error!(%error, "the broker did not shut down cleanly"),
        }
        StoppedBroker { broker: self.broker, _data_dir: self.data_dir }
    }
}

#[cfg(feature = "otel")]
fn export_spans(broker: &mut Broker, endpoint: &str) -> Result<(), Failure> {
    let exporter = cobox_telemetry::Exporter::start(endpoint).context(OTLP_ENDPOINT)?;
    broker.trace_to(Arc::new(exporter));
    tracing::info!(endpoint, "exporting request spans to OpenTelemetry");
    Ok(())
}

#[cfg(not(feature = "otel"))]
fn export_spans(_: &mut Broker, endpoint: &str) -> Result<(), Failure> {
    tracing::warn!(endpoint, "not exporting spans: built without OpenTelemetry (feature `otel`)");
    Ok(())
}

/// A connection takes two descriptors. The usual soft limit of 1024 exists for programs that use select(2), which this
/// one doesn't.
fn raise_descriptor_limit() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        tracing::warn!(%error, "raising the limit of open files failed");
    }
}

/// A broker that no longer serves; the data directory stays locked until this is dropped.
pub struct StoppedBroker {
    broker: Arc<Broker>,
    _data_dir: DataDir,
}

impl StoppedBroker {
    pub async fn suspend_all(&self) -> Result<Vec<SandboxId>, Failure> {
        self.broker.suspend_all().await.map_err(|e| api_failure("suspending the sandboxes", e))
    }
}

/// Creates a key if there is none, or if the existing one is unknown to this broker's database. Returns whether it
/// did.
async fn ensure_key(broker: &Broker, path: &Path, principal: &str, kind: PrincipalKind) -> Result<bool, Failure> {
    match std::fs::read_to_string(path) {
        Ok(key) => {
            let is_known = broker.knows_key(&Secret::new(key.trim())).await.map_err(|e| api_failure("checking the existing key", e))?;
            if is_known {
                return Ok(false);
            }
            tracing::warn!(path = %path.display(), "the existing key is not valid; creating a new one")
        }
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
        Err(e) => return Err(anyhow::Error::from(e).context(format!("reading {}", path.display())).into()),
    }
    let key = broker.bootstrap_key(principal, kind).await.map_err(|e| api_failure(&format!("creating a key for {principal}"), e))?;
    write_key(path, &key)?;
    Ok(true)
}

fn api_failure(action: &str, e: ApiError) -> Failure {
    Failure::new(format!("{action}: {}", e.message))
}
