//! Change notices between brokers on one PostgreSQL (LISTEN/NOTIFY): sent with the change they are about, received by every broker
//! that listens at that moment. Nothing depends on delivery: a notice only makes the receiver check earlier.

use std::time::Duration;

use cobox_protocol::Secret;
use sqlx::{AnyConnection, postgres::PgListener};
use tokio::sync::broadcast;
use tokio_util::task::AbortOnDropHandle;

use crate::store::{ChangeNotice, Store, Stored};

const CHANNEL: &str = "cobox";
/// Maximum backlog of a receiver. Above it the receiver gets `RecvError::Lagged`, and must assume that anything changed.
pub const BACKLOG: usize = 1024;
/// Pause between attempts to listen again.
const RETRY: Duration = Duration::from_secs(1);

/// Delivered when the transaction commits. SQLite has no other brokers to notify.
pub async fn send(tx: &mut AnyConnection, notice: &ChangeNotice) -> Stored<()> {
    if tx.backend_name() != "SQLite" {
        sqlx::query("SELECT pg_notify($1, $2)").bind(CHANNEL).bind(encode(notice)).execute(tx).await?;
    }
    Ok(())
}

/// Listens until the handle is dropped.
pub fn listen(url: Secret, sender: broadcast::Sender<ChangeNotice>) -> AbortOnDropHandle<()> {
    AbortOnDropHandle::new(tokio::spawn(async move {
        loop {
            let Err(error) = receive(&url, &sender).await;
            tracing::warn!(%error, "receiving notices of other brokers failed; polling for changes until it works again");
            tokio::time::sleep(RETRY).await;
        }
    }))
}

async fn receive(url: &Secret, sender: &broadcast::Sender<ChangeNotice>) -> Result<std::convert::Infallible, sqlx::Error> {
    let mut listener = PgListener::connect(url.expose()).await?;
    listener.listen(CHANNEL).await?;
    loop {
        // Notices sent while this broker didn't listen are unknown: at the start, and after a lost connection.
        let mut notice = ChangeNotice::Any;
        loop {
            // An error means that there is no receiver at the moment.
            let _ = sender.send(notice);
            match listener.try_recv().await? {
                Some(received) => notice = parse(received.payload()),
                None => break,
            }
        }
    }
}

fn encode(notice: &ChangeNotice) -> String {
    match notice {
        ChangeNotice::Sandbox(id) => format!("sandbox {id}"),
        ChangeNotice::Workspace(name) => format!("workspace {name}"),
        ChangeNotice::Events(id) => format!("news {id}"),
        ChangeNotice::HeartbeatRequest(node) => format!("beat {node}"),
        ChangeNotice::Any => "anything".to_owned(),
    }
}

/// An unknown notice of a newer broker also means that something changed.
fn parse(text: &str) -> ChangeNotice {
    match text.split_once(' ') {
        Some(("sandbox", id)) => id.parse().map_or(ChangeNotice::Any, ChangeNotice::Sandbox),
        Some(("workspace", name)) => ChangeNotice::Workspace(name.to_owned()),
        Some(("news", id)) => id.parse().map_or(ChangeNotice::Any, ChangeNotice::Events),
        Some(("beat", node)) => ChangeNotice::HeartbeatRequest(node.to_owned()),
        _ => ChangeNotice::Any,
    }
}

impl Store {
    /// Receives the changes made from now on by any broker on a shared database, this one included.
    pub fn notices(&self) -> broadcast::Receiver<ChangeNotice> {
        self.base.engine.notices.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use cobox_protocol::SandboxId;

    use super::*;

    #[test]
    fn notices_round_trip_and_an_invalid_one_means_any_change() {
        for notice in [
            ChangeNotice::Sandbox(SandboxId::new()),
            ChangeNotice::Workspace("a b".into()),
            ChangeNotice::Events(SandboxId::new()),
            ChangeNotice::HeartbeatRequest("node_a".into()),
            ChangeNotice::Any,
        ] {
            assert_eq!(parse(&encode(&notice)), notice);
        }
        assert_eq!(parse("sandbox nonsense"), ChangeNotice::Any);
    }
}
