//! Sends heartbeats, stops the broker if its master key or node id was taken over, and removes the previous master key and old failure
//! counts.

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
    domain::{access::rate_limiter::RateLimiter, context::BrokerContext, token_signer::LONGEST_TOKEN_LIFE},
    master_key,
};

/// Interval at which old failure counts are removed, and the previous master key once no token of it can be valid.
const SWEEP_INTERVAL: Duration = Duration::from_secs(10);

pub async fn sweep(context: Arc<BrokerContext>, rate_limiter: Arc<RateLimiter<ClientAddress>>, data_dir: Arc<DataDir>) {
    let mut ticks = tokio::time::interval(SWEEP_INTERVAL);
    loop {
        ticks.tick().await;
        rate_limiter.sweep(context.now());
        match data_dir.previous_key(LONGEST_TOKEN_LIFE) {
            Ok(None) if context.tokens.forget_previous() => tracing::info!("removed the previous master key"),
            Ok(_) => {}
            Err(error) => tracing::error!(%error, "removing the previous master key failed"),
        }
    }
}

/// Why a broker stopped itself.
#[derive(Default)]
pub struct StopCause {
    pub is_key_replaced: AtomicBool,
    pub is_node_taken: AtomicBool,
}

/// Sends heartbeats, separately from the reaper, whose rounds may take long.
pub async fn send_heartbeats(context: Arc<BrokerContext>, stop: CancellationToken, cause: Arc<StopCause>) {
    let fingerprint = context.tokens.fingerprint();
    let mut ticks = tokio::time::interval(context.nodes.heartbeat_interval());
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        match context.nodes.send_heartbeat(&context.store, &*context.clock).await {
            Ok(true) => {}
            Ok(false) => {
                tracing::error!("another broker took over the node id of this data directory; stopping");
                cause.is_node_taken.store(true, Ordering::SeqCst);
                return stop.cancel();
            }
            Err(error) => tracing::error!(%error, "writing the heartbeat failed"),
        }
        if !context.store.is_shared() {
            continue;
        }
        match context.store.agree(master_key::FINGERPRINT_ENTRY, &fingerprint).await {
            Ok(agreed) if agreed != fingerprint => {
                tracing::error!(
                    "the master key was replaced while this broker ran; stopping; copy the new key here and start the broker again"
                );
                cause.is_key_replaced.store(true, Ordering::SeqCst);
                return stop.cancel();
            }
            Ok(_) => {}
            Err(error) => tracing::error!(%error, "comparing the master key with the database failed"),
        }
    }
}
