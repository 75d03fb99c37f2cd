//! Periodic tasks of a broker apart from the sandboxes: sends heartbeats, and removes expired keys and failure counts.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use cobox_gateway::ClientAddress;
use tokio_util::sync::CancellationToken;

use crate::{
    data_dir::DataDir,
    domain::{access::rate_limiter::Rates, context::Deployment, token_signer::LONGEST_TOKEN_LIFE},
    master_key,
};

/// Interval at which old failure counts are removed, and the previous master key once no token of it can be valid.
const TIDY_EVERY: Duration = Duration::from_secs(10);

pub async fn tidy(deployment: Arc<Deployment>, rates: Arc<Rates<ClientAddress>>, data_dir: Arc<DataDir>) {
    let mut ticks = tokio::time::interval(TIDY_EVERY);
    loop {
        ticks.tick().await;
        rates.tidy(deployment.now());
        match data_dir.previous_key(LONGEST_TOKEN_LIFE) {
            Ok(None) if deployment.tokens.forget_previous() => tracing::info!("the master key before this one has gone"),
            Ok(_) => {}
            Err(error) => tracing::error!(%error, "the master key before this one could not be removed"),
        }
    }
}

/// Why a broker stopped itself.
#[derive(Default)]
pub struct Stopped {
    pub is_key_replaced: AtomicBool,
    pub is_node_taken: AtomicBool,
}

/// Sends heartbeats, separately from the reaper, whose rounds may take long.
pub async fn beat(deployment: Arc<Deployment>, stop: CancellationToken, stopped: Arc<Stopped>) {
    let fingerprint = deployment.tokens.fingerprint();
    let mut ticks = tokio::time::interval(deployment.nodes.beat_every());
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        match deployment.nodes.beat(&*deployment.store, &*deployment.clock).await {
            Ok(true) => {}
            Ok(false) => {
                tracing::error!("another broker took over the node id of this data directory, so this one stops");
                stopped.is_node_taken.store(true, Ordering::SeqCst);
                return stop.cancel();
            }
            Err(error) => tracing::error!(%error, "the other brokers could not be told that this one lives"),
        }
        if !deployment.store.is_shared() {
            continue;
        }
        match deployment.store.agree(master_key::AGREED, &fingerprint).await {
            Ok(agreed) if agreed != fingerprint => {
                tracing::error!("the master key was replaced while this broker ran, so it stops; copy the new one here and start it again");
                stopped.is_key_replaced.store(true, Ordering::SeqCst);
                return stop.cancel();
            }
            Ok(_) => {}
            Err(error) => tracing::error!(%error, "whether the master key is still the database's could not be read"),
        }
    }
}
