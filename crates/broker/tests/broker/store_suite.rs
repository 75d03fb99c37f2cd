//! What every store must do, as one suite that any implementation runs: a second database passes it or isn't one.

use std::time::Duration;

use cobox_protocol::{
    KeyId, SandboxId, SessionId, ShareId, Timestamp,
    control::{Earlier, IssuedTo, Revocation},
    key::PrincipalKind,
    session::{Access, State},
    tags::{TagFilter, Tags},
};

use cobox_testkit::TestDatabase;

use cobox_broker::domain::{
    audit::AuditRecord,
    model::{ApiKey, Bound, Identity, Intent, Principal, Sandbox, Session, Share},
};
use cobox_broker::policy::Quota;
use cobox_broker::store::{
    AddedKey, AddedSandbox, ChangedSandbox, Counted, DisabledPrincipal, Ending, EnsureWish, Ensured, Horizon, Idempotency, Leftover, Note,
    OpaqueToken, PageWish, RetiredToken, RevokeWish, RevokedKey, RevokedTokens, Rotated, Rotation, SandboxChange, SessionFilter, Shared,
    Store, Viewer,
    sql::{SqlStore, postgres, sqlite},
};

pub const WORKSPACE: &str = "w";
pub const NODE: &str = "node_1";

pub fn at(seconds: i64) -> Timestamp {
    Timestamp::from_unix(1_000_000 + seconds)
}

pub fn audit(action: &'static str) -> AuditRecord {
    AuditRecord::new(at(0), WORKSPACE, action)
}

pub fn ending(now: i64) -> Ending {
    Ending { now: at(now), reason: "because".into(), revoke_until: at(now + 100), audit: audit("ended") }
}

pub fn api_key(name: &str, kind: PrincipalKind) -> ApiKey {
    let principal = Principal { workspace: WORKSPACE.into(), name: name.into(), kind };
    ApiKey {
        id: KeyId::new(),
        principal,
        hash: [7; 32],
        created_at: at(0),
        expires_at: None,
        last_used_at: None,
        revoked_at: None,
        identity: None,
    }
}

pub fn sandbox(name: Option<&str>) -> Sandbox {
    Sandbox {
        id: SandboxId::new(),
        workspace: WORKSPACE.into(),
        name: name.map(str::to_owned),
        owner: "ann".into(),
        owner_kind: PrincipalKind::Human,
        access: Access::Workspace,
        provider: "local".into(),
        node: NODE.into(),
        generation: 1,
        old_keys: None,
        master_from: 1,
        state: State::Provisioning,
        intent: Some(Intent::Create),
        reason: None,
        is_kept: false,
        own_lease: None,
        own_keep: None,
        created_at: at(0),
        last_active_at: at(0),
        running_since: None,
        active: Duration::ZERO,
        suspended_at: None,
        ended_at: None,
    }
}

pub fn quota(of_workspace: u32) -> Quota {
    Quota { of_workspace, of_owner: None }
}

fn bound(thread: &str) -> Bound {
    let sandbox = sandbox(None);
    let session = Session {
        id: SessionId::new(),
        workspace: WORKSPACE.into(),
        scope_type: "thread".into(),
        scope_id: thread.into(),
        sandbox: sandbox.id.clone(),
        owner: "ann".into(),
        access: Access::Workspace,
        created_at: at(0),
        active_base: Duration::ZERO,
        ended_at: None,
        end_reason: None,
    };
    Bound { session, sandbox }
}

pub fn wish(thread: &str) -> EnsureWish {
    EnsureWish {
        fresh: bound(thread),
        is_attaching: false,
        must_create: false,
        tags: Tags::new(),
        quota: quota(100),
        idempotency: None,
        audit: audit("session.created"),
    }
}

#[tokio::test]
async fn sqlite_is_a_store_and_remembers() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("broker.db");
    run(&sqlite::open(&path).await.unwrap()).await;
    remembers(&sqlite::open(&path).await.unwrap()).await;
}

#[tokio::test]
async fn postgres_is_a_store_and_remembers() {
    let database = TestDatabase::new().await;
    run(&postgres::open(&database.secret_url()).await.unwrap()).await;
    remembers(&postgres::open(&database.secret_url()).await.unwrap()).await;
}

async fn remembers(again: &SqlStore) {
    assert!(again.session_of(WORKSPACE, "thread", "race").await.unwrap().is_some());
}

/// Runs everything against one empty store.
pub async fn run(store: &dyn Store) {
    keys(store).await;
    sessions_of_one_scope_are_one(store).await;
    idempotency(store).await;
    ending_a_session(store).await;
    ending_a_sandbox(store).await;
    replacing_is_conditional(store).await;
    names_and_quotas(store).await;
    attaching(store).await;
    tags(store).await;
    changing_a_sandbox(store).await;
    own_lifetimes(store).await;
    revocations(store).await;
    a_retired_token_counts_for_a_moment(store).await;
    shares(store).await;
    opaque_tokens(store).await;
    what_was_issued_up_to_a_moment(store).await;
    rotating_a_key(store).await;
    notes_and_pruning(store).await;
}

async fn keys(store: &dyn Store) {
    let key = api_key("ann", PrincipalKind::Human);
    assert!(matches!(store.add_key(&key, &audit("key.created")).await.unwrap(), AddedKey::Added));
    let other = api_key("ann", PrincipalKind::Agent);
    assert!(matches!(store.add_key(&other, &audit("key.created")).await.unwrap(), AddedKey::KindDiffers(PrincipalKind::Human)));
    let read = store.key(&key.id).await.unwrap().unwrap();
    assert_eq!((read.principal, read.hash), (key.principal.clone(), key.hash));
    assert!(store.key(&other.id).await.unwrap().is_none());
    assert_eq!(store.keys(&PageWish { before: None, limit: 10 }).await.unwrap().len(), 1);
    assert!(matches!(store.revoke_key(&key.id, &ending(5)).await.unwrap(), RevokedKey::Revoked(_)));
    assert!(matches!(store.revoke_key(&key.id, &ending(6)).await.unwrap(), RevokedKey::NotThere), "a key is revoked once");
    identities(store).await;
    assert_eq!(store.key(&key.id).await.unwrap().unwrap().revoked_at, Some(at(5)));
}

async fn sessions_of_one_scope_are_one(store: &dyn Store) {
    let wishes: Vec<EnsureWish> = (0..20).map(|_| wish("race")).collect();
    let outcomes = futures_util::future::join_all(wishes.iter().map(|w| store.ensure(w))).await;
    let mut created = 0;
    let mut ids = std::collections::HashSet::new();
    for outcome in outcomes {
        match outcome.unwrap() {
            Ensured::Created(b) => {
                created += 1;
                ids.insert((b.session.id, b.sandbox.id));
            }
            Ensured::Existing(b) => {
                ids.insert((b.session.id, b.sandbox.id));
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((created, ids.len()), (1, 1));
    let found = store.session_of(WORKSPACE, "thread", "race").await.unwrap().unwrap();
    assert_eq!(found.sandbox.intent, Some(Intent::Create), "the intent is there before anybody asks a provider");
    assert!(store.session_of("elsewhere", "thread", "race").await.unwrap().is_none());
    assert_eq!(store.session(&found.session.id).await.unwrap().unwrap(), found);
    let viewer = |principal: &str| Viewer { workspace: WORKSPACE.into(), principal: principal.into(), sees_all: false };
    let page = PageWish { before: None, limit: 10 };
    let filter = SessionFilter { scope_id: Some("race".into()), ..SessionFilter::default() };
    assert_eq!(store.sessions(&viewer("bob"), &filter, &page).await.unwrap().len(), 1);
    let mut private = wish("private");
    private.fresh.session.access = Access::Owner;
    store.ensure(&private).await.unwrap();
    let filter = SessionFilter { scope_id: Some("private".into()), ..SessionFilter::default() };
    assert_eq!(store.sessions(&viewer("bob"), &filter, &page).await.unwrap().len(), 0);
    assert_eq!(store.sessions(&viewer("ann"), &filter, &page).await.unwrap().len(), 1);
    let full = EnsureWish { quota: quota(1), ..wish("too many") };
    assert_eq!(store.ensure(&full).await.unwrap(), Ensured::QuotaReached(Counted::Workspace));
}

async fn idempotency(store: &dyn Store) {
    let keyed = |hash: u8| EnsureWish {
        idempotency: Some(Idempotency { principal: "ann".into(), key: "k1".into(), request_hash: [hash; 32], since: at(-100) }),
        ..wish("idem")
    };
    let Ensured::Created(first) = store.ensure(&keyed(1)).await.unwrap() else { panic!("it is new") };
    let Ensured::Replayed(again) = store.ensure(&keyed(1)).await.unwrap() else { panic!("it is a replay") };
    assert_eq!(again.session.id, first.session.id);
    assert_eq!(store.ensure(&keyed(2)).await.unwrap(), Ensured::KeyReused);
    store.end_sandbox(&first.sandbox.id, State::Failed, &ending(1)).await.unwrap();
    assert!(matches!(store.ensure(&keyed(1)).await.unwrap(), Ensured::Created(_)), "what came to nothing may be tried again");
}

async fn ending_a_session(store: &dyn Store) {
    store.ensure(&wish("end")).await.unwrap();
    let found = store.session_of(WORKSPACE, "thread", "end").await.unwrap().unwrap();
    assert_eq!(store.end_session(&found.session.id, &ending(10)).await.unwrap(), Some(Leftover::Destroy));
    assert_eq!(store.end_session(&found.session.id, &ending(11)).await.unwrap(), None);
    let after = store.session(&found.session.id).await.unwrap().unwrap();
    assert_eq!(
        (after.session.ended_at, after.sandbox.state, after.sandbox.intent),
        (Some(at(10)), State::Terminated, Some(Intent::Destroy))
    );
    assert!(store.session_of(WORKSPACE, "thread", "end").await.unwrap().is_none());
    assert!(matches!(store.ensure(&wish("end")).await.unwrap(), Ensured::Created(_)), "an ended scope is free again");

    let mut named = wish("named");
    named.fresh.sandbox.name = Some("tool-box".into());
    named.fresh.sandbox.state = State::Active;
    named.fresh.sandbox.intent = None;
    store.ensure(&named).await.unwrap();
    assert_eq!(store.end_session(&named.fresh.session.id, &ending(10)).await.unwrap(), Some(Leftover::Suspend));
    let kept = store.sandbox(&named.fresh.sandbox.id).await.unwrap().unwrap();
    assert_eq!((kept.state, kept.intent), (State::Active, Some(Intent::Suspend)));
}

async fn ending_a_sandbox(store: &dyn Store) {
    let wish = wish("sandbox ends");
    store.ensure(&wish).await.unwrap();
    let id = &wish.fresh.sandbox.id;
    assert_eq!(store.sessions_on(id).await.unwrap().len(), 1);
    let ended = store.end_sandbox(id, State::Failed, &ending(20)).await.unwrap().unwrap();
    assert_eq!((ended.state, ended.reason.as_deref()), (State::Failed, Some("because")));
    assert!(store.end_sandbox(id, State::Terminated, &ending(21)).await.unwrap().is_none());
    assert_eq!(store.sessions_on(id).await.unwrap().len(), 0);
    assert!(store.sandboxes_of_node(NODE).await.unwrap().iter().any(|s| s.id == *id), "it is still to be destroyed");
    assert!(store.replace_sandbox(&ended, &Sandbox { intent: None, ..ended.clone() }, None).await.unwrap());
    assert!(!store.sandboxes_of_node(NODE).await.unwrap().iter().any(|s| s.id == *id));
}

async fn replacing_is_conditional(store: &dyn Store) {
    let made = sandbox(None);
    store.add_sandbox(&made, &Tags::new(), &quota(100), &audit("sandbox.created")).await.unwrap();
    let started = made.started(at(5));
    assert!(store.replace_sandbox(&made, &started, None).await.unwrap());
    assert!(!store.replace_sandbox(&made, &started, None).await.unwrap(), "the second to settle finds it settled");
    assert!(store.running_in(WORKSPACE, NODE).await.unwrap().contains(&made.id));
    store.note(&Note { sandboxes: vec![(made.id.clone(), at(50))], ..Note::default() }).await.unwrap();
    let idle = Sandbox { state: State::Idle, ..started.clone() };
    assert!(store.replace_sandbox(&started, &idle, None).await.unwrap());
    assert_eq!(store.sandbox(&made.id).await.unwrap().unwrap().last_active_at, at(50), "the last use never moves back");
    store.note(&Note { sandboxes: vec![(made.id.clone(), at(60))], ..Note::default() }).await.unwrap();
    assert_eq!(store.sandbox(&made.id).await.unwrap().unwrap().state, State::Active, "use ends idleness");
}

async fn identities(store: &dyn Store) {
    let identity = Identity { issuer: "https://id.example".into(), subject: "u1".into() };
    let of = |n: u8| ApiKey { hash: [n; 32], identity: Some(identity.clone()), ..api_key("sso", PrincipalKind::Agent) };
    let first = of(9);
    assert!(matches!(store.add_key(&first, &audit("key.created")).await.unwrap(), AddedKey::Added));
    let AddedKey::Known(known) = store.add_key(&of(9), &audit("key.created")).await.unwrap() else { panic!("it has one") };
    assert_eq!(known.id, first.id);
    assert_eq!(known.identity, Some(identity.clone()));
    let found = async |n: u8| store.identity(&first.principal, &[n; 32]).await.unwrap();
    assert_eq!(found(9).await.unwrap().id, first.id);
    assert!(found(8).await.is_none());
    assert_eq!(store.disable_principal(WORKSPACE, "nobody", &ending(5)).await.unwrap(), DisabledPrincipal::NotThere);
    assert_eq!(store.disable_principal(WORKSPACE, "sso", &ending(5)).await.unwrap(), DisabledPrincipal::Disabled);
    assert!(found(9).await.unwrap().revoked_at.is_some(), "it stays, to keep them out");
    assert!(matches!(store.add_key(&of(8), &audit("key.created")).await.unwrap(), AddedKey::Disabled));
    let view = store.revocations(&sandbox(None), at(6)).await.unwrap().list.clone();
    assert!(view.contains(&Revocation::Principal("sso".into())) && view.contains(&Revocation::Grant(first.id.to_string())));
    let listed = store.principals(WORKSPACE, at(6), &PageWish { before: None, limit: 10 }).await.unwrap();
    let sso = listed.iter().find(|p| p.principal.name == "sso").unwrap();
    assert_eq!((sso.valid_keys, sso.disabled_at), (0, Some(at(5))));
    assert!(store.enable_principal(WORKSPACE, "sso", &audit("principal.enabled")).await.unwrap());
    assert!(!store.enable_principal(WORKSPACE, "nobody", &audit("principal.enabled")).await.unwrap());
    assert!(found(9).await.is_none(), "the next sign-in makes another");
    let view = store.revocations(&sandbox(None), at(6)).await.unwrap().list.clone();
    assert!(!view.contains(&Revocation::Principal("sso".into())) && view.contains(&Revocation::Grant(first.id.to_string())));
    assert!(matches!(store.add_key(&of(9), &audit("key.created")).await.unwrap(), AddedKey::Added));
}

async fn names_and_quotas(store: &dyn Store) {
    assert!(store.has_sandboxes(Some(NODE)).await.unwrap());
    let first = sandbox(Some("dev"));
    assert_eq!(store.add_sandbox(&first, &Tags::new(), &quota(100), &audit("sandbox.created")).await.unwrap(), AddedSandbox::Added);
    let second = sandbox(Some("dev"));
    assert_eq!(
        store.add_sandbox(&second, &Tags::new(), &quota(100), &audit("sandbox.created")).await.unwrap(),
        AddedSandbox::NameTaken(first.id.clone())
    );
    assert_eq!(
        store.add_sandbox(&sandbox(None), &Tags::new(), &quota(1), &audit("sandbox.created")).await.unwrap(),
        AddedSandbox::QuotaReached(Counted::Workspace)
    );
    let living = store.sandboxes_of_node(NODE).await.unwrap().into_iter().filter(|s| s.ended_at.is_none() && s.owner == "ann").count();
    let owned = |more: u32| Quota { of_workspace: 100, of_owner: Some(u32::try_from(living).unwrap() + more) };
    let refused = store.add_sandbox(&sandbox(None), &Tags::new(), &owned(0), &audit("sandbox.created")).await.unwrap();
    assert_eq!(refused, AddedSandbox::QuotaReached(Counted::Owner));
    let others = Sandbox { owner: "bob".into(), owner_kind: PrincipalKind::Agent, ..sandbox(None) };
    assert_eq!(store.add_sandbox(&others, &Tags::new(), &owned(0), &audit("sandbox.created")).await.unwrap(), AddedSandbox::Added);
    assert_eq!(store.sandbox(&others.id).await.unwrap().unwrap().owner_kind, PrincipalKind::Agent);
    store.end_sandbox(&others.id, State::Terminated, &ending(1)).await.unwrap();
    assert_eq!(store.sandbox_named(WORKSPACE, "dev").await.unwrap().unwrap().id, first.id);
    let viewer = Viewer { workspace: WORKSPACE.into(), principal: "bob".into(), sees_all: false };
    let all = store.sandboxes(&viewer, &[], &PageWish { before: None, limit: 100 }).await.unwrap();
    let rest = store.sandboxes(&viewer, &[], &PageWish { before: Some(all[0].id.to_string()), limit: 100 }).await.unwrap();
    assert_eq!(rest.len(), all.len() - 1, "a cursor goes on where the page ended");
    store.end_sandbox(&first.id, State::Terminated, &ending(1)).await.unwrap();
    assert_eq!(
        store.add_sandbox(&second, &Tags::new(), &quota(100), &audit("sandbox.created")).await.unwrap(),
        AddedSandbox::Added,
        "a name is free again"
    );
}

/// The session of a scope on a sandbox that is there.
fn attach(thread: &str, to: &Sandbox) -> EnsureWish {
    let mut wish = EnsureWish { is_attaching: true, ..wish(thread) };
    wish.fresh.sandbox = to.clone();
    wish.fresh.session.sandbox = to.id.clone();
    wish
}

async fn attaching(store: &dyn Store) {
    let shared = sandbox(Some("shared"));
    store.add_sandbox(&shared, &Tags::new(), &quota(100), &audit("sandbox.created")).await.unwrap();
    store.replace_sandbox(&shared, &shared.started(at(0)), None).await.unwrap();
    let mut late = attach("attached 1", &shared);
    late.fresh.session.created_at = at(40);
    let Ensured::Created(first) = store.ensure(&late).await.unwrap() else { panic!("it is new") };
    assert_eq!((first.session.active_base, first.sandbox.state), (Duration::from_secs(40), State::Active), "its hard end begins now");
    // Beyond the quota, which counts sandboxes.
    let Ensured::Created(second) = store.ensure(&EnsureWish { quota: quota(1), ..attach("attached 2", &shared) }).await.unwrap() else {
        panic!("it is new")
    };
    assert_eq!(store.sessions_on(&shared.id).await.unwrap().len(), 2);
    let mut taken = wish("attached 3");
    taken.fresh.sandbox.name = Some("shared".into());
    assert_eq!(store.ensure(&taken).await.unwrap(), Ensured::NameTaken(shared.id.clone()));
    assert_eq!(store.end_session(&first.session.id, &ending(50)).await.unwrap(), Some(Leftover::InUse));
    assert_eq!(store.end_session(&second.session.id, &ending(50)).await.unwrap(), Some(Leftover::Suspend));
    store.end_sandbox(&shared.id, State::Terminated, &ending(51)).await.unwrap();
    assert_eq!(store.ensure(&attach("attached 4", &shared)).await.unwrap(), Ensured::SandboxGone);

    // Running time is counted anew only while no session counts on it.
    let worn = sandbox(Some("worn"));
    store.add_sandbox(&worn, &Tags::new(), &quota(100), &audit("sandbox.created")).await.unwrap();
    let running = worn.started(at(0));
    store.replace_sandbox(&worn, &running, None).await.unwrap();
    store.replace_sandbox(&running, &running.suspended(at(90), "rest"), None).await.unwrap();
    let active = async || store.sandbox(&worn.id).await.unwrap().unwrap().active.as_secs();
    let user = attach("attached 6", &worn);
    store.ensure(&user).await.unwrap();
    store.renew_sandbox(&worn.id).await.unwrap();
    assert_eq!(active().await, 90);
    store.end_session(&user.fresh.session.id, &ending(95)).await.unwrap();
    store.renew_sandbox(&worn.id).await.unwrap();
    assert_eq!(active().await, 0);

    // Another's sandbox isn't ended by a guest who leaves.
    let lent = sandbox(None);
    store.add_sandbox(&lent, &Tags::new(), &quota(100), &audit("sandbox.created")).await.unwrap();
    let mut guest = attach("attached 5", &lent);
    guest.fresh.session.owner = "bob".into();
    store.ensure(&guest).await.unwrap();
    assert_eq!(store.end_session(&guest.fresh.session.id, &ending(60)).await.unwrap(), Some(Leftover::Suspend));

    // A conflict isn't remembered as an answer.
    let keyed = Idempotency { principal: "ann".into(), key: "create".into(), request_hash: [1; 32], since: at(-100) };
    let conflicting = EnsureWish { must_create: true, idempotency: Some(keyed.clone()), ..wish("race") };
    for _ in 0..2 {
        assert!(matches!(store.ensure(&conflicting).await.unwrap(), Ensured::Existing(_)));
    }
    let creating = EnsureWish { must_create: true, idempotency: Some(keyed.clone()), ..wish("create") };
    assert!(matches!(store.ensure(&creating).await.unwrap(), Ensured::Created(_)));
    assert!(matches!(store.ensure(&creating).await.unwrap(), Ensured::Replayed(_)));
    let later = EnsureWish { idempotency: Some(Idempotency { request_hash: [2; 32], since: at(1), ..keyed }), ..creating };
    assert!(matches!(store.ensure(&later).await.unwrap(), Ensured::Existing(_)), "a key is forgotten in time");
}

fn tag(text: &str) -> TagFilter {
    text.parse().unwrap()
}

async fn tags(store: &dyn Store) {
    let tags = |pairs: &[(&str, &str)]| -> Tags { pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect() };
    let one = EnsureWish { tags: tags(&[("team", "a"), ("run", "1")]), ..wish("tagged 1") };
    let two = EnsureWish { tags: tags(&[("team", "a"), ("run", "2")]), ..wish("tagged 2") };
    for wish in [&one, &two] {
        store.ensure(wish).await.unwrap();
    }
    let viewer = Viewer { workspace: WORKSPACE.into(), principal: "bob".into(), sees_all: false };
    let page = PageWish { before: None, limit: 10 };
    let sessions = async |filters: &[&str]| {
        let filter = SessionFilter { tags: filters.iter().map(|f| tag(f)).collect(), ..SessionFilter::default() };
        let found = store.sessions(&viewer, &filter, &page).await.unwrap();
        // Ids of one millisecond are in no order.
        found.into_iter().map(|b| b.session.scope_id).collect::<std::collections::BTreeSet<_>>().into_iter().collect::<Vec<_>>()
    };
    assert_eq!(sessions(&["team:a"]).await, ["tagged 1", "tagged 2"]);
    assert_eq!(sessions(&["team:a", "run:1"]).await, ["tagged 1"]);
    assert_eq!(sessions(&["run"]).await.len(), 2);
    assert_eq!(sessions(&["team:b"]).await.len(), 0);
    let known = store.session_tags(&[&one.fresh.session.id, &two.fresh.session.id]).await.unwrap();
    assert_eq!(known[one.fresh.session.id.as_str()], one.tags);

    // A sandbox is found by its own tags and by those of who uses it.
    store.ensure(&EnsureWish { tags: tags(&[("guest", "yes")]), ..attach("tagged 3", &one.fresh.sandbox) }).await.unwrap();
    let sandboxes = async |filter: &str| {
        let found = store.sandboxes(&viewer, &[tag(filter)], &page).await.unwrap();
        found.into_iter().map(|s| s.id).collect::<Vec<_>>()
    };
    assert_eq!(sandboxes("run:1").await, *std::slice::from_ref(&one.fresh.sandbox.id));
    assert_eq!(sandboxes("guest:yes").await, *std::slice::from_ref(&one.fresh.sandbox.id));
    assert_eq!(store.sandbox_tags(&[&one.fresh.sandbox.id]).await.unwrap()[one.fresh.sandbox.id.as_str()], one.tags);
    let failed = SessionFilter { state: Some(State::Failed), tags: vec![tag("run:2")], ..SessionFilter::default() };
    let terminated = SessionFilter { state: Some(State::Terminated), ..failed.clone() };
    store.end_sandbox(&two.fresh.sandbox.id, State::Failed, &ending(70)).await.unwrap();
    let ended = store.sessions(&viewer, &failed, &page).await.unwrap();
    assert_eq!(ended.iter().map(Bound::state).collect::<Vec<_>>(), [State::Failed]);
    assert!(store.sessions(&viewer, &terminated, &page).await.unwrap().is_empty());
    store.end_sandbox(&one.fresh.sandbox.id, State::Terminated, &ending(70)).await.unwrap();
    let terminated = SessionFilter { tags: vec![tag("run:1")], ..terminated };
    assert_eq!(store.sessions(&viewer, &terminated, &page).await.unwrap().len(), 1);
}

async fn changing_a_sandbox(store: &dyn Store) {
    let (one, other) = (sandbox(Some("one")), sandbox(Some("other")));
    for made in [&one, &other] {
        store.add_sandbox(made, &Tags::from([("a".into(), "1".into())]), &quota(100), &audit("sandbox.created")).await.unwrap();
    }
    let change = SandboxChange { max_tags: 2, ..SandboxChange::default() };
    let name = |name: &str| SandboxChange { name: Some(Some(name.into())), ..change.clone() };
    let apply = async |change: &SandboxChange| store.change_sandbox(&one.id, change, &audit("sandbox.changed")).await.unwrap();
    assert_eq!(apply(&name("other")).await, ChangedSandbox::NameTaken(other.id.clone()));
    assert!(matches!(apply(&name("one")).await, ChangedSandbox::Changed(_)), "its own name is free for it");
    let all = SandboxChange {
        name: Some(None),
        is_kept: Some(true),
        access: Some(Access::Owner),
        set_tags: Tags::from([("b".into(), "2".into()), ("c".into(), "3".into())]),
        remove_tags: vec!["a".into()],
        ..change.clone()
    };
    let ChangedSandbox::Changed(changed) = apply(&all).await else { panic!("nothing is in the way") };
    let read = store.sandbox(&one.id).await.unwrap().unwrap();
    assert_eq!((read.name.clone(), read.is_kept, read.access), (None, true, Access::Owner));
    assert_eq!((read.generation, one.generation), (2, 1), "what others hold ends when it is its owner's alone");
    assert_eq!(read, *changed);
    let ChangedSandbox::Changed(again) = apply(&SandboxChange { access: Some(Access::Owner), ..change.clone() }).await else {
        panic!("nothing is in the way")
    };
    assert_eq!(again.generation, 2, "and nothing ends when it was already");
    let too_many = SandboxChange { is_kept: Some(false), set_tags: Tags::from([("d".into(), "4".into())]), ..change.clone() };
    assert_eq!(apply(&too_many).await, ChangedSandbox::TooManyTags(3));
    assert!(store.sandbox(&one.id).await.unwrap().unwrap().is_kept, "all of it or nothing");
    let tags = store.sandbox_tags(&[&one.id]).await.unwrap();
    assert_eq!(tags[one.id.as_str()].keys().collect::<Vec<_>>(), ["b", "c"]);
    for made in [&one, &other] {
        store.end_sandbox(&made.id, State::Terminated, &ending(1)).await.unwrap();
    }
    assert_eq!(apply(&change).await, ChangedSandbox::Gone);
}

/// One that is to be kept for a shorter time than others is due when that is over, and each is due once.
async fn own_lifetimes(store: &dyn Store) {
    let suspended = |keep: Option<u64>, at_second: i64| Sandbox {
        node: "own-lifetimes".into(),
        state: State::Suspended,
        intent: None,
        own_lease: Some(Duration::from_secs(60)),
        own_keep: keep.map(Duration::from_secs),
        suspended_at: Some(at(at_second)),
        ..sandbox(None)
    };
    let (short, long, other) = (suspended(Some(100), 1000), suspended(Some(5000), 1000), suspended(None, 1000));
    for made in [&short, &long, &other] {
        store.add_sandbox(made, &Tags::new(), &quota(100), &audit("sandbox.created")).await.unwrap();
        assert_eq!(store.sandbox(&made.id).await.unwrap().as_ref(), Some(made));
    }
    let due = async |suspended_by: i64, now: i64| {
        let mut ids: Vec<_> =
            store.sandboxes_due("own-lifetimes", at(suspended_by), at(now)).await.unwrap().into_iter().map(|s| s.id).collect();
        ids.sort();
        ids
    };
    assert!(due(500, 1099).await.is_empty());
    assert_eq!(due(500, 1100).await, [short.id.clone()]);
    let mut all = [short.id.clone(), long.id.clone(), other.id.clone()];
    all.sort();
    assert_eq!(due(1000, 8000).await, all);
    let change =
        SandboxChange { own_keep: Some(None), own_lease: Some(Some(Duration::from_secs(120))), max_tags: 9, ..SandboxChange::default() };
    let ChangedSandbox::Changed(changed) = store.change_sandbox(&short.id, &change, &audit("sandbox.changed")).await.unwrap() else {
        panic!("nothing is in the way")
    };
    assert_eq!((changed.own_lease, changed.own_keep), (Some(Duration::from_secs(120)), None));
    assert_eq!(store.sandbox(&short.id).await.unwrap().as_ref(), Some(&*changed));
    assert!(due(500, 1100).await.is_empty());
    for made in [&short, &long, &other] {
        store.end_sandbox(&made.id, State::Terminated, &ending(1)).await.unwrap();
    }
}

async fn a_retired_token_counts_for_a_moment(store: &dyn Store) {
    let of = sandbox(None);
    let retired = |jti: &str, from: i64| RetiredToken {
        workspace: WORKSPACE.into(),
        sandbox: of.id.clone(),
        jti: jti.into(),
        from: at(from),
        until: at(500),
        audit: audit("token.retired"),
    };
    assert!(store.retire_token(&retired("later", 130)).await.unwrap());
    store.retire_token(&retired("later", 140)).await.unwrap();
    store.retire_token(&retired("sooner", 120)).await.unwrap();
    let view = async |t: i64| {
        let view = store.revocations(&of, at(t)).await.unwrap();
        let jtis: Vec<_> = view.list.iter().filter_map(|r| if let Revocation::Jti(v) = r { Some(v.clone()) } else { None }).collect();
        (jtis, (view.sequence, view.last_start))
    };
    let (early, between, after) = (view(119).await, view(120).await, view(130).await);
    assert_eq!((early.0.len(), &between.0[..], after.0.len()), (0, &["sooner".to_owned()][..], 2));
    assert_ne!(between.1, after.1, "what begins to count makes another list, whatever came after it");
    assert!(view(500).await.0.is_empty());
}

async fn revocations(store: &dyn Store) {
    let wish = wish("revoked");
    store.ensure(&wish).await.unwrap();
    let before = store.revocations(&wish.fresh.sandbox, at(10)).await.unwrap();
    store.end_session(&wish.fresh.session.id, &ending(10)).await.unwrap();
    let view = store.revocations(&wish.fresh.sandbox, at(11)).await.unwrap();
    assert!(view.sequence > before.sequence);
    assert!(view.list.contains(&Revocation::Session(wish.fresh.session.id.to_string())));
    assert!(view.list.iter().any(|r| matches!(r, Revocation::Grant(_))), "a revoked key counts in every sandbox of its workspace");
    let other = store.revocations(&sandbox(None), at(11)).await.unwrap();
    assert!(!other.list.contains(&Revocation::Session(wish.fresh.session.id.to_string())), "a session only in its own");
    assert!(store.revocations(&wish.fresh.sandbox, at(10_000)).await.unwrap().list.is_empty());
}

async fn records(store: &dyn Store, limit: u32) -> Vec<AuditRecord> {
    let newest = store.audit(WORKSPACE, None, &PageWish { before: None, limit }).await.unwrap();
    newest.into_iter().map(|(_, record)| record).collect()
}

fn share(session: &SessionId, principal: &str, words: &str, expires_at: Option<i64>) -> Share {
    Share {
        id: ShareId::new(),
        workspace: WORKSPACE.into(),
        session: session.clone(),
        principal: principal.into(),
        capabilities: words.parse().unwrap(),
        shared_by: "ann".into(),
        created_at: at(0),
        expires_at: expires_at.map(at),
    }
}

async fn shares(store: &dyn Store) {
    let Ensured::Created(made) = store.ensure(&wish("shared")).await.unwrap() else { panic!("it is new") };
    let (session, sandbox) = (&made.session.id, &made.sandbox);
    let first = share(session, "bob", "fs_read exec", None);
    assert_eq!(store.share(&first, 2, &ending(0)).await.unwrap(), Shared::Added(first.clone()));
    assert_eq!(store.share_of(session, "bob").await.unwrap(), Some(first.clone()));
    assert_eq!(store.share_of(session, "carl").await.unwrap(), None);
    let wider = share(session, "bob", "fs_read exec shell", None);
    let kept = Share { id: first.id.clone(), ..wider.clone() };
    assert_eq!(store.share(&wider, 2, &ending(0)).await.unwrap(), Shared::Changed(kept), "nothing was taken away");
    assert_eq!(store.revocations(sandbox, at(0)).await.unwrap().list, []);
    for (number, less) in [share(session, "bob", "fs_read", None), share(session, "bob", "fs_read", Some(50))].into_iter().enumerate() {
        assert_eq!(store.share(&less, 2, &ending(0)).await.unwrap(), Shared::Changed(less.clone()));
        assert_eq!(store.revocations(sandbox, at(0)).await.unwrap().list.len(), number + 1);
    }
    store.share(&share(session, "carl", "exec", None), 2, &ending(0)).await.unwrap();
    assert_eq!(store.share(&share(session, "dora", "exec", None), 2, &ending(0)).await.unwrap(), Shared::TooMany);
    let names = |list: Vec<Share>| list.into_iter().map(|s| s.principal).collect::<Vec<_>>();
    assert_eq!(names(store.shares(session).await.unwrap()), ["bob", "carl"]);
    let gone = store.unshare(session, "carl", &ending(0)).await.unwrap().unwrap();
    assert!(store.revocations(sandbox, at(0)).await.unwrap().list.contains(&Revocation::Jti(gone.id.to_string())));
    assert_eq!(store.unshare(session, "carl", &ending(0)).await.unwrap(), None);
    store.end_session(session, &ending(1)).await.unwrap();
    assert_eq!(store.share(&share(session, "dora", "exec", None), 9, &ending(2)).await.unwrap(), Shared::SessionGone);
    assert!(store.principal(WORKSPACE, "ann").await.unwrap().is_some());
    assert!(store.principal(WORKSPACE, "nobody").await.unwrap().is_none());
    assert!(store.principal("elsewhere", "ann").await.unwrap().is_none());
}

async fn opaque_tokens(store: &dyn Store) {
    let claims: cobox_token::Claims = serde_json::from_value(serde_json::json!({
        "iss": "cobox", "sub": "ann", "aud": SandboxId::new(), "scope": "fs:ro", "iat": 1, "nbf": 1, "exp": 2, "jti": "tok_1",
        "act": { "type": "human", "id": "ann" }, "gen": 1, "grant": "key_1", "parent": "tok_0", "via": ["shr_1"],
    }))
    .unwrap();
    let token = OpaqueToken { hash: [9; 32], claims: claims.clone(), keep_until: at(10) };
    store.note(&Note { tokens: vec![token], ..Note::default() }).await.unwrap();
    assert_eq!(store.opaque_token(&[9; 32]).await.unwrap(), Some(claims));
    assert_eq!(store.opaque_token(&[8; 32]).await.unwrap(), None);
    let horizon = |now: i64| Horizon { now: at(now), idempotency_before: at(-9), ended_before: at(-9), audit_before: at(-9) };
    store.prune(&horizon(10)).await.unwrap();
    assert!(store.opaque_token(&[9; 32]).await.unwrap().is_some());
    store.prune(&horizon(11)).await.unwrap();
    assert_eq!(store.opaque_token(&[9; 32]).await.unwrap(), None);
}

async fn what_was_issued_up_to_a_moment(store: &dyn Store) {
    let workspace = "moments";
    let sandbox = Sandbox { workspace: workspace.into(), ..sandbox(None) };
    let earlier = |issued_by| Earlier { of: IssuedTo::Principal, value: "ann".into(), issued_by };
    let mut last = 0;
    for issued_by in [5, 7] {
        let wish = RevokeWish {
            workspace: workspace.into(),
            sandbox: None,
            tokens: RevokedTokens::Earlier { of: IssuedTo::Principal, value: "ann".into(), issued_by },
            until: at(100),
            audit: audit("tokens.revoked"),
        };
        let sequence = store.revoke(&wish).await.unwrap();
        assert!(sequence > last);
        last = sequence;
    }
    let seen = store.revocations(&sandbox, at(50)).await.unwrap();
    assert_eq!((seen.sequence, seen.list.clone()), (last, vec![Revocation::Earlier(earlier(5)), Revocation::Earlier(earlier(7))]));
    assert_eq!(store.revocations(&sandbox, at(100)).await.unwrap().list, []);
}

async fn rotating_a_key(store: &dyn Store) {
    let sandbox = sandbox(None);
    store.add_sandbox(&sandbox, &Tags::new(), &quota(1000), &audit("sandbox.created")).await.unwrap();
    let rotate = async |now: i64, until: Option<i64>| {
        store.rotate_key(&sandbox.id, &Rotation { now: at(now), old_until: until.map(at) }, &audit("rotated")).await.unwrap()
    };
    let done = |rotated: Rotated| if let Rotated::Rotated(sandbox) = rotated { *sandbox } else { panic!("{rotated:?}") };
    let keys = |s: &Sandbox, now: i64| (s.keys_from(at(now)), s.generation);
    let rotated = done(rotate(0, Some(10)).await);
    assert_eq!((keys(&rotated, 0), keys(&rotated, 9), keys(&rotated, 10)), ((1, 2), (1, 2), (2, 2)));
    assert_eq!(store.sandbox(&sandbox.id).await.unwrap().unwrap(), rotated);
    assert_eq!(rotate(9, Some(19)).await, Rotated::TooSoon(at(10)), "nothing puts an old key's end off");
    assert_eq!(store.sandbox(&sandbox.id).await.unwrap().unwrap(), rotated);
    assert_eq!(keys(&done(rotate(10, Some(30)).await), 20), (2, 3), "the one before it is over");
    assert_eq!(keys(&done(rotate(21, None).await), 21), (4, 4), "who can't wait ends them all");
    // What else happens to a sandbox leaves its keys alone.
    assert!(store.replace_sandbox(&sandbox, &sandbox.started(at(22)), None).await.unwrap());
    assert_eq!(keys(&store.sandbox(&sandbox.id).await.unwrap().unwrap(), 22), (4, 4));
    store.end_sandbox(&sandbox.id, State::Terminated, &ending(23)).await.unwrap();
    assert_eq!(rotate(24, None).await, Rotated::Gone);
}

async fn notes_and_pruning(store: &dyn Store) {
    let mut record = audit("dataplane.used");
    record.jti = Some("tok".into());
    store.note(&Note { audit: vec![record.clone()], ..Note::default() }).await.unwrap();
    assert_eq!(records(store, 1).await, [record]);
    let wish = wish("forgotten");
    store.ensure(&wish).await.unwrap();
    store.end_session(&wish.fresh.session.id, &ending(1)).await.unwrap();
    let horizon = |t| Horizon { now: at(t), idempotency_before: at(t), ended_before: at(t), audit_before: at(t) };
    store.prune(&horizon(1000)).await.unwrap();
    assert!(store.sandbox(&wish.fresh.sandbox.id).await.unwrap().is_some(), "what is still to be destroyed is not forgotten");
    let ended = store.sandbox(&wish.fresh.sandbox.id).await.unwrap().unwrap();
    store.replace_sandbox(&ended, &Sandbox { intent: None, ..ended.clone() }, None).await.unwrap();
    store.prune(&horizon(1000)).await.unwrap();
    assert!(store.sandbox(&wish.fresh.sandbox.id).await.unwrap().is_none());
    assert!(store.session(&wish.fresh.session.id).await.unwrap().is_none());
    assert!(records(store, 10).await.is_empty());
    assert!(store.session_of(WORKSPACE, "thread", "race").await.unwrap().is_some(), "the living stay");
}
