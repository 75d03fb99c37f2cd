//! Hints between brokers on one PostgreSQL (LISTEN/NOTIFY): sent with the change they are about, received by every broker
//! that listens at that moment. Nothing depends on delivery: a hint only makes the receiver check earlier.

use std::time::Duration;

use cobox_protocol::Secret;
use sqlx::{AnyConnection, postgres::PgListener};
use tokio::sync::broadcast;
use tokio_util::task::AbortOnDropHandle;

use crate::store::{Hint, Store, Stored};

const CHANNEL: &str = "cobox";
/// Maximum backlog of a receiver. Above it the receiver gets `RecvError::Lagged`, and must assume that anything changed.
pub const BACKLOG: usize = 1024;
/// Pause between attempts to listen again.
const RETRY: Duration = Duration::from_secs(1);

/// Delivered when the transaction commits. SQLite has no other brokers to notify.
pub async fn send(tx: &mut AnyConnection, hint: &Hint) -> Stored<()> {
    if tx.backend_name() != "SQLite" {
        sqlx::query("SELECT pg_notify($1, $2)").bind(CHANNEL).bind(words(hint)).execute(tx).await?;
    }
    Ok(())
}

/// Listens until the handle is dropped.
pub fn listen(url: Secret, heard: broadcast::Sender<Hint>) -> AbortOnDropHandle<()> {
    AbortOnDropHandle::new(tokio::spawn(async move {
        loop {
            let Err(error) = hear(&url, &heard).await;
            tracing::warn!(%error, "other brokers are not heard; what they change is found by looking until they are again");
            tokio::time::sleep(RETRY).await;
        }
    }))
}

async fn hear(url: &Secret, heard: &broadcast::Sender<Hint>) -> Result<std::convert::Infallible, sqlx::Error> {
    let mut listener = PgListener::connect(url.expose()).await?;
    listener.listen(CHANNEL).await?;
    loop {
        // Hints sent while this broker didn't listen are unknown: at the start, and after a lost connection.
        let mut hint = Hint::Anything;
        loop {
            // An error means that there is no receiver at the moment.
            let _ = heard.send(hint);
            match listener.try_recv().await? {
                Some(said) => hint = parse(said.payload()),
                None => break,
            }
        }
    }
}

fn words(hint: &Hint) -> String {
    match hint {
        Hint::Sandbox(id) => format!("sandbox {id}"),
        Hint::Workspace(name) => format!("workspace {name}"),
        Hint::News(id) => format!("news {id}"),
        Hint::Beat(node) => format!("beat {node}"),
        Hint::Anything => "anything".to_owned(),
    }
}

/// An unknown hint of a newer broker also means that something changed.
fn parse(words: &str) -> Hint {
    match words.split_once(' ') {
        Some(("sandbox", id)) => id.parse().map_or(Hint::Anything, Hint::Sandbox),
        Some(("workspace", name)) => Hint::Workspace(name.to_owned()),
        Some(("news", id)) => id.parse().map_or(Hint::Anything, Hint::News),
        Some(("beat", node)) => Hint::Beat(node.to_owned()),
        _ => Hint::Anything,
    }
}

impl Store {
    /// Receives the changes made from now on by any broker on a shared database, this one included.
    pub fn hints(&self) -> broadcast::Receiver<Hint> {
        self.base.engine.hints.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use cobox_protocol::SandboxId;

    use super::*;

    #[test]
    fn a_hint_is_heard_as_it_was_meant() {
        for hint in [
            Hint::Sandbox(SandboxId::new()),
            Hint::Workspace("a b".into()),
            Hint::News(SandboxId::new()),
            Hint::Beat("node_a".into()),
            Hint::Anything,
        ] {
            assert_eq!(parse(&words(&hint)), hint);
        }
        assert_eq!(parse("sandbox nonsense"), Hint::Anything);
    }
}
