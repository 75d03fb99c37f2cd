//! Whether this broker can do its work: the store answers, the provider can make sandboxes, and the other brokers know that it lives.

use std::{sync::Arc, time::Duration};

use tokio::{sync::Mutex, time::Instant};

use super::deployment::Deployment;

/// For one part to answer; who asks is a load balancer that asks again soon.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long an answer counts: anybody may ask, and each answer costs a read.
const FRESH: Duration = Duration::from_millis(500);

/// What is looked at, and whether it is well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Checks {
    pub store: bool,
    pub provider: bool,
    pub node: bool,
}

impl Checks {
    pub fn is_ready(self) -> bool {
        self.store && self.provider && self.node
    }

    pub fn named(self) -> [(&'static str, bool); 3] {
        [("store", self.store), ("provider", self.provider), ("node", self.node)]
    }
}

pub struct Health {
    deployment: Arc<Deployment>,
    last: Mutex<Option<(Instant, Checks)>>,
}

impl Health {
    pub fn new(deployment: Arc<Deployment>) -> Self {
        Self { deployment, last: Mutex::default() }
    }

    /// Those who ask at the same time share an answer. Why something is not well is for the log.
    pub async fn checks(&self) -> Checks {
        let mut last = self.last.lock().await;
        if let Some((at, checks)) = *last
            && at.elapsed() < FRESH
        {
            return checks;
        }
        let d = &self.deployment;
        // A database whose disk is full still answers questions.
        let store = async { d.store.probe_write(d.now()).await.map_err(|e| e.to_string()) };
        let provider = async { d.provider.ready().await.map_err(|e| e.to_string()) };
        let (store, provider) = tokio::join!(well("store", store), well("provider", provider));
        let node = d.nodes.is_known(&*d.store, d.now());
        if !node {
            tracing::warn!("not ready: the other brokers have not been told for too long that this one lives");
        }
        let checks = Checks { store, provider, node };
        *last = Some((Instant::now(), checks));
        checks
    }
}

async fn well(part: &'static str, asking: impl Future<Output = Result<(), String>>) -> bool {
    let problem = match tokio::time::timeout(PATIENCE, asking).await {
        Ok(Ok(())) => return true,
        Ok(Err(problem)) => problem,
        Err(_) => format!("it did not answer within {} s", PATIENCE.as_secs()),
    };
    tracing::warn!(part, problem, "not ready");
    false
}
