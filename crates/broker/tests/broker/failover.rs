//! Test of a PostgreSQL failover to the standby while two brokers write: every request succeeds or is refused with
//! `503`, no acknowledged change is lost, and the brokers continue by themselves on the new primary.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};

use cobox_protocol::{control::Revocation, key::PrincipalKind};
use cobox_testkit::{StallingProxy, TestDatabase};
use serde_json::{Value, json};

use crate::{
    audit_chain::chains,
    harness::{Client, TestBroker, World, eventually, sandbox_id, session_path},
};

/// Two brokers that reach their database through a proxy, as with a virtual address.
struct Cluster {
    primary: TestDatabase,
    standby: TestDatabase,
    proxy: StallingProxy,
    worlds: Vec<World>,
    brokers: [TestBroker; 2],
}

impl Cluster {
    async fn start() -> Self {
        let primary = TestDatabase::on_own_server().await;
        let proxy = StallingProxy::in_front_of(&primary.socket()).await;
        let mut worlds = World::cluster(&primary, 2);
        for world in &mut worlds {
            world.config.database_url = Some(primary.secret_url_at(proxy.address()));
        }
        let standby = primary.add_standby().await;
        let brokers = [worlds[0].start().await, worlds[1].start().await];
        Self { primary, standby, proxy, worlds, brokers }
    }

    fn promote_standby(&self) {
        self.standby.promote();
        self.proxy.redirect_to(&self.standby.socket());
    }
}

/// Creates sessions one after the other until stopped.
struct Writer {
    made: Arc<Mutex<Vec<Value>>>,
    refused: Arc<AtomicUsize>,
    is_stopped: Arc<AtomicBool>,
    task: tokio::task::JoinHandle<()>,
}

impl Writer {
    fn start(client: Client, name: &'static str) -> Self {
        let (made, refused, is_stopped) = (Arc::<Mutex<Vec<_>>>::default(), Arc::<AtomicUsize>::default(), Arc::<AtomicBool>::default());
        let task = tokio::spawn({
            let (made, refused, is_stopped) = (made.clone(), refused.clone(), is_stopped.clone());
            async move {
                for n in 0.. {
                    if is_stopped.load(Ordering::SeqCst) {
                        return;
                    }
                    let body = json!({ "thread_id": format!("{name}-{n}"), "mode": "ensure" });
                    let answer = client.post("/v1/sandbox/sessions", body).await;
                    if answer.status == 200 {
                        made.lock().unwrap().push(answer.json());
                    } else {
                        assert_eq!(answer.status, 503, "{}", String::from_utf8_lossy(&answer.bytes));
                        assert!(answer.headers.contains_key("retry-after"), "{:?}", answer.headers);
                        refused.fetch_add(1, Ordering::SeqCst);
                    }
                }
            }
        });
        Self { made, refused, is_stopped, task }
    }

    fn made(&self) -> usize {
        self.made.lock().unwrap().len()
    }

    async fn wait_until_made(&self, more: usize) {
        let enough = self.made() + more;
        eventually("enough created sessions", || async { self.made() >= enough }).await;
    }

    async fn stop(self) -> Vec<Value> {
        self.is_stopped.store(true, Ordering::SeqCst);
        self.task.await.unwrap();
        std::mem::take(&mut *self.made.lock().unwrap())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failover_to_a_synchronous_standby_loses_no_acknowledged_change() {
    let cluster = Cluster::start().await;
    let [a, b] = &cluster.brokers;
    let (ann, root) = (a.human("ann").await, b.key("root", PrincipalKind::Operator).await);
    let writers = [Writer::start(ann.clone(), "at-a"), Writer::start(ann.at(b), "at-b")];
    for writer in &writers {
        writer.wait_until_made(5).await;
    }
    cluster.primary.crash_server().await;
    for writer in &writers {
        eventually("refused requests", || async { writer.refused.load(Ordering::SeqCst) > 0 }).await;
    }
    cluster.promote_standby();
    let mut made = Vec::new();
    for writer in writers {
        writer.wait_until_made(5).await;
        made.extend(writer.stop().await);
    }
    for session in &made {
        assert_eq!(ann.at(b).get(&session_path(session)).await.ok(200)["sandbox"], session["sandbox"]);
    }
    for (head, _, faults) in chains(&root).await {
        assert!(faults.is_empty(), "{}: {faults:?}", head.writer);
    }
    eventually("both brokers to be ready", || async {
        ann.get("/readyz").await.status == 200 && ann.at(b).get("/readyz").await.status == 200
    })
    .await;

    // Changes of one broker still reach the sandboxes of the other.
    let bot = root.post("/v1/keys", json!({ "name": "bot", "kind": "agent" })).await.ok(201);
    let bot_id = bot["id"].as_str().unwrap().to_owned();
    let of_a = made.iter().find(|s| s["thread_id"].as_str().unwrap().starts_with("at-a")).unwrap();
    let boxd = cluster.worlds[0].provider.boxd(&sandbox_id(of_a));
    root.delete(&format!("/v1/keys/{bot_id}")).await.ok(204);
    // At once by a notification, or in the next round of the reaper if a push failed while the database moved.
    eventually("the push of the revocation to boxd", || async {
        a.tick().await;
        boxd.state.lock().unwrap().revoked.contains(&Revocation::Grant(bot_id.clone()))
    })
    .await;
}
