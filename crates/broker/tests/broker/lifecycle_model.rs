//! Model-based test of sessions and sandboxes: for any order of requests, states change only along the allowed
//! transitions, a scope has one session, a living session has a living sandbox, and time has the effects that the lease
//! defines.

use std::collections::{BTreeMap, HashMap, HashSet};

use cobox_broker::Clock;
use cobox_protocol::{SandboxId, Timestamp, session::State};
use http::Method;
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::harness::{Client, World, eventually, sandbox_id};

const IDLE: i64 = 900;
const LEASE: i64 = 3600;
/// A few reaper rounds, because each counts at most a minute.
const KEEP_SUSPENDED: i64 = 150;
const HARD_TTL: i64 = 300;
const WEEK: i64 = 7 * 24 * 3600;
const MAX_COUNTED_GAP: i64 = 60;
const COUNT_EVERY: i64 = 30;
const THREADS: u8 = 3;
const NAME: &str = "dev";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SandboxChoice {
    /// Ends with its session.
    Own,
    Kept,
    /// The only sandbox of that name.
    Named,
}

#[derive(Clone, Debug)]
enum Step {
    Ensure(u8, SandboxChoice),
    CreateOnly(u8),
    Heartbeat(u8),
    Refresh(u8),
    Use(u8),
    Release(u8),
    DeleteNamed,
    Crash(u8),
    Time(i64),
    BrokerDies,
}

fn step() -> impl Strategy<Value = Step> {
    let home = prop_oneof![3 => Just(SandboxChoice::Own), 1 => Just(SandboxChoice::Kept), 2 => Just(SandboxChoice::Named)];
    prop_oneof![
        6 => (0..THREADS, home).prop_map(|(n, home)| Step::Ensure(n, home)),
        1 => (0..THREADS).prop_map(Step::CreateOnly),
        2 => (0..THREADS).prop_map(Step::Heartbeat),
        1 => (0..THREADS).prop_map(Step::Refresh),
        1 => (0..THREADS).prop_map(Step::Use),
        2 => (0..THREADS).prop_map(Step::Release),
        1 => Just(Step::DeleteNamed),
        2 => (0..THREADS).prop_map(Step::Crash),
        6 => prop_oneof![Just(10), Just(899), Just(IDLE), Just(3000), Just(LEASE), Just(9000), Just(28_800), Just(WEEK), Just(45)].prop_map(Step::Time),
        1 => Just(Step::BrokerDies),
    ]
}

proptest! {
    // Each case runs one or more brokers with a database on disk.
    #![proptest_config(ProptestConfig { cases: 24, max_shrink_iters: 300, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn sandbox_states_follow_the_lifecycle_model(steps in proptest::collection::vec(step(), 1..40)) {
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap().block_on(run(steps));
    }
}

/// The expected state of a sandbox.
#[derive(Clone, Debug)]
struct Expected {
    state: State,
    home: SandboxChoice,
    last_active: i64,
    /// While it runs: the time up to which its running time is included in `active`.
    counted_until: Option<i64>,
    active: i64,
    suspended_at: i64,
    /// Time since then that does not count.
    downtime: i64,
}

impl Expected {
    fn is_running(&self) -> bool {
        matches!(self.state, State::Active | State::Idle)
    }
    fn active_until(&self, now: i64) -> i64 {
        self.active + self.counted_until.map_or(0, |counted| (now - counted).min(MAX_COUNTED_GAP))
    }
    fn touch(&mut self, now: i64) {
        if !self.is_running() {
            self.counted_until = Some(now);
        }
        (self.state, self.last_active) = (State::Active, now);
    }
    fn suspend(&mut self, now: i64) {
        if self.is_running() {
            self.active = self.active_until(now);
            (self.state, self.counted_until, self.suspended_at, self.downtime) = (State::Suspended, None, now, 0);
        }
    }
}

struct ExpectedSession {
    id: String,
    sandbox: SandboxId,
    base: i64,
}

#[derive(Default)]
struct Model {
    sandboxes: HashMap<SandboxId, Expected>,
    sessions: BTreeMap<u8, ExpectedSession>,
    over: Vec<String>,
    /// Sandboxes of threads whose last session reached its hard TTL.
    left: BTreeMap<u8, SandboxId>,
    seen: HashMap<SandboxId, State>,
    /// The time up to which the broker has counted the retention of suspended sandboxes.
    counted_until: i64,
}

impl Model {
    fn named(&self) -> Option<SandboxId> {
        self.sandboxes.iter().find(|(_, b)| b.home == SandboxChoice::Named).map(|(id, _)| id.clone())
    }

    fn on(&self, sandbox: &SandboxId) -> Vec<u8> {
        self.sessions.iter().filter(|(_, s)| s.sandbox == *sandbox).map(|(n, _)| *n).collect()
    }

    fn end_session(&mut self, n: u8, now: i64) {
        let Some(ended) = self.sessions.remove(&n) else { return };
        self.over.push(ended.id);
        if !self.on(&ended.sandbox).is_empty() {
            return;
        }
        match self.sandboxes[&ended.sandbox].home {
            SandboxChoice::Own => drop(self.sandboxes.remove(&ended.sandbox)),
            SandboxChoice::Kept | SandboxChoice::Named => self.sandboxes.get_mut(&ended.sandbox).unwrap().suspend(now),
        }
    }

    fn end_sandbox(&mut self, id: &SandboxId) {
        for n in self.on(id) {
            self.over.push(self.sessions.remove(&n).unwrap().id);
        }
        self.sandboxes.remove(id);
    }

    /// Excludes the part of the time since the last call that exceeds `max_gap`.
    fn count_downtime(&mut self, now: i64, max_gap: i64) {
        let from = self.counted_until + max_gap;
        for sandbox in self.sandboxes.values_mut().filter(|s| s.state == State::Suspended) {
            sandbox.downtime += (now - from.max(sandbox.suspended_at)).max(0);
        }
        self.counted_until = now;
    }

    /// One reaper round.
    fn tick(&mut self, now: i64) {
        if now - self.counted_until >= COUNT_EVERY {
            self.count_downtime(now, MAX_COUNTED_GAP);
        }
        for sandbox in self.sandboxes.values_mut().filter(|s| s.counted_until.is_some_and(|counted| now - counted >= COUNT_EVERY)) {
            (sandbox.active, sandbox.counted_until) = (sandbox.active_until(now), Some(now));
        }
        for id in self.sandboxes.keys().cloned().collect::<Vec<_>>() {
            let sandbox = self.sandboxes[&id].clone();
            if sandbox.state == State::Suspended {
                if now - sandbox.suspended_at - sandbox.downtime >= KEEP_SUSPENDED {
                    self.end_sandbox(&id);
                }
                continue;
            }
            let active = sandbox.active_until(now);
            if active >= HARD_TTL {
                let due: Vec<u8> = self.on(&id).into_iter().filter(|n| active - self.sessions[n].base >= HARD_TTL).collect();
                for n in due {
                    self.over.push(self.sessions.remove(&n).unwrap().id);
                    self.left.insert(n, id.clone());
                }
                if self.on(&id).is_empty() {
                    let left = self.sandboxes.get_mut(&id).unwrap();
                    left.suspend(now);
                    // Its running time restarts when it is used again.
                    left.active = 0;
                    continue;
                }
            }
            let sandbox = self.sandboxes.get_mut(&id).unwrap();
            match now - sandbox.last_active {
                silence if silence >= LEASE => sandbox.suspend(now),
                silence if silence >= IDLE => sandbox.state = State::Idle,
                _ => {}
            }
        }
    }
}

async fn run(steps: Vec<Step>) {
    let mut world = World::new();
    world.config.hard_ttl_seconds = HARD_TTL as u64;
    world.config.keep_suspended_seconds = KEEP_SUSPENDED as u64;
    let mut broker = world.start().await;
    let mut ann = broker.human("ann").await;
    let mut model = Model { counted_until: world.clock.now().unix(), ..Model::default() };
    for step in steps {
        let now = world.clock.now().unix();
        match step {
            Step::Ensure(n, home) => ensure(&mut model, &ann, n, home, now).await,
            Step::CreateOnly(n) => {
                let body = json!({ "thread_id": format!("t{n}"), "mode": "create_only" });
                let answer = ann.post("/v1/sandbox/sessions", body).await;
                match model.sessions.get(&n) {
                    Some(there) => {
                        assert_eq!(answer.json()["error"]["details"]["session_id"], there.id);
                        answer.error(409);
                    }
                    None => model.made(n, SandboxChoice::Own, &answer.ok(200), now),
                }
            }
            Step::Heartbeat(n) | Step::Refresh(n) | Step::Use(n) => {
                let Some(session) = model.sessions.get(&n) else { continue };
                let path = format!("/v1/sandbox/sessions/{}", session.id);
                match step {
                    Step::Heartbeat(_) => assert_eq!(ann.post(&format!("{path}/heartbeat"), json!({})).await.ok(200)["state"], "active"),
                    Step::Refresh(_) => drop(ann.post(&format!("{path}/refresh"), json!({})).await.ok(200)),
                    _ => {
                        ann.get(&format!("/dp/{}/v1/x", session.sandbox)).await.ok(200);
                        // Traffic through the gateway is recorded at the next tick.
                        broker.tick().await;
                    }
                }
                model.sandboxes.get_mut(&session.sandbox).unwrap().touch(now);
                if matches!(step, Step::Use(_)) {
                    model.tick(now);
                }
            }
            Step::Release(n) => {
                let Some(session) = model.sessions.get(&n) else { continue };
                assert_eq!(ann.delete(&format!("/v1/sandbox/sessions/{}", session.id)).await.status, 204);
                model.end_session(n, now);
            }
            Step::DeleteNamed => {
                let status = ann.delete(&format!("/v1/sandboxes/{NAME}")).await.status.as_u16();
                match model.named() {
                    Some(id) => {
                        assert_eq!(status, 204);
                        model.end_sandbox(&id);
                    }
                    None => assert_eq!(status, 404),
                }
            }
            Step::Crash(n) => {
                let Some(session) = model.sessions.get(&n) else { continue };
                let id = session.sandbox.clone();
                world.provider.kill(&id);
                eventually("the suspension", || async { ann.state(&id).await == "suspended" }).await;
                model.sandboxes.get_mut(&id).unwrap().suspend(now);
            }
            Step::Time(seconds) => {
                world.clock.advance(seconds);
                broker.tick().await;
                model.tick(now + seconds);
            }
            Step::BrokerDies => {
                broker.kill().await;
                broker = world.start().await;
                ann = broker.human("ann").await;
                model.count_downtime(now, 0);
                // The broker may have been down since the last count.
                model.sandboxes.values_mut().for_each(|s| s.counted_until = s.counted_until.map(|_| now));
            }
        }
        agree(&mut model, &world, &ann).await;
    }
}

async fn ensure(model: &mut Model, ann: &Client, n: u8, home: SandboxChoice, now: i64) {
    let mut body = json!({ "thread_id": format!("t{n}"), "mode": "ensure" });
    match home {
        SandboxChoice::Own => {}
        SandboxChoice::Kept => body["keep"] = json!(true),
        SandboxChoice::Named => body["name"] = json!(NAME),
    }
    let answer = ann.post("/v1/sandbox/sessions", body).await;
    let Some(there) = model.sessions.get(&n) else {
        let left = model.left.get(&n).and_then(|left| model.sandboxes.get(left));
        if home == SandboxChoice::Kept && left.is_some_and(|left| left.home == SandboxChoice::Own) {
            answer.error(409);
            return;
        }
        return model.made(n, home, &answer.ok(200), now);
    };
    let sandbox = model.sandboxes.get_mut(&there.sandbox).unwrap();
    let is_other = match home {
        SandboxChoice::Own => false,
        SandboxChoice::Kept => sandbox.home == SandboxChoice::Own,
        SandboxChoice::Named => sandbox.home != SandboxChoice::Named,
    };
    if is_other {
        assert_eq!(answer.json()["error"]["details"]["sandbox_id"], there.sandbox.as_str());
        answer.error(409);
        return;
    }
    let answer = answer.ok(200);
    assert_eq!((answer["session_id"].as_str().unwrap(), sandbox_id(&answer)), (there.id.as_str(), there.sandbox.clone()));
    sandbox.touch(now);
    let left = HARD_TTL - (sandbox.active_until(now) - there.base);
    let expires = serde_json::from_value::<Timestamp>(answer["expires_at"].clone()).unwrap().unix();
    assert_eq!(expires - now, left.min(900), "no token outlives the hard end");
}

impl Model {
    /// Records a new session, and a sandbox unless the named one already existed.
    fn made(&mut self, n: u8, home: SandboxChoice, answer: &Value, now: i64) {
        let id = sandbox_id(answer);
        let left = self.left.remove(&n).filter(|left| self.sandboxes.contains_key(left));
        let expected = if home == SandboxChoice::Named { self.named() } else { left };
        let is_known = self.sandboxes.contains_key(&id).then(|| id.clone());
        assert_eq!(is_known, expected, "only a name or a hard end leads to an existing sandbox");
        let fresh =
            Expected { state: State::Provisioning, home, last_active: now, counted_until: None, active: 0, suspended_at: 0, downtime: 0 };
        let sandbox = self.sandboxes.entry(id.clone()).or_insert(fresh);
        let base = sandbox.active_until(now);
        sandbox.touch(now);
        let session = answer["session_id"].as_str().unwrap().to_owned();
        assert!(!self.over.contains(&session), "an id is never reused");
        self.sessions.insert(n, ExpectedSession { id: session, sandbox: id, base });
    }
}

async fn agree(model: &mut Model, world: &World, ann: &Client) {
    let listed = ann.get("/v1/sandbox/sessions?limit=200").await.ok(200);
    let listed = listed["items"].as_array().unwrap();
    let threads: HashSet<&str> = listed.iter().map(|s| s["thread_id"].as_str().unwrap()).collect();
    assert_eq!(threads.len(), listed.len(), "a scope has one active session");
    assert_eq!(listed.len(), model.sessions.len());
    for (n, session) in &model.sessions {
        let found = listed.iter().find(|s| s["thread_id"] == format!("t{n}")).expect("it lives");
        assert_eq!(found["session_id"], session.id);
        assert_eq!(found["sandbox_id"], session.sandbox.as_str());
        assert_eq!(found["state"], model.sandboxes[&session.sandbox].state.as_str(), "a session has its sandbox's state");
    }
    let sandboxes = ann.get("/v1/sandboxes?limit=200").await.ok(200);
    let sandboxes = sandboxes["items"].as_array().unwrap();
    assert_eq!(sandboxes.len(), model.sandboxes.len());
    for sandbox in sandboxes {
        let id: SandboxId = sandbox["id"].as_str().unwrap().parse().unwrap();
        let wanted = &model.sandboxes[&id];
        assert_eq!(sandbox["state"], wanted.state.as_str(), "{id} {wanted:?}");
        assert_eq!(world.provider.is_up(&id), wanted.is_running());
        if let Some(before) = model.seen.insert(id, wanted.state) {
            assert!(may_become(before, wanted.state), "{before:?} to {:?}", wanted.state);
        }
    }
    // Ended sandboxes are permanently removed with their files; kept ones are not.
    let destroyed: HashSet<SandboxId> = world.provider.destroyed.lock().unwrap().iter().cloned().collect();
    for id in model.seen.keys() {
        assert_eq!(destroyed.contains(id), !model.sandboxes.contains_key(id));
    }
    if let Some(last) = model.over.last() {
        assert_eq!(ann.call(Method::GET, &format!("/v1/sandbox/sessions/{last}"), None, &[]).await.error(410), "SESSION_EXPIRED");
        assert_eq!(ann.delete(&format!("/v1/sandbox/sessions/{last}")).await.error(404), "SESSION_NOT_FOUND");
    }
}

/// Whether a transition may be observed between two requests. It may skip intermediate states.
fn may_become(from: State, to: State) -> bool {
    use State::*;
    match from {
        Provisioning => true,
        Active => matches!(to, Active | Idle | Suspended | Terminated | Failed),
        Idle => matches!(to, Active | Idle | Suspended | Terminated | Failed),
        Suspended => matches!(to, Active | Suspended | Terminated | Failed),
        Terminated | Failed => to == from,
    }
}
