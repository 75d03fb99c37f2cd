//! The test suite that every implementation of the store must pass.

use std::time::Duration;

use crate::{store_resources, store_sandboxes, store_tokens};
use cobox_broker::{
    domain::model::{ApiKey, AuditRecord, Identity, Intent, Principal, Sandbox, Session, SessionWithSandbox},
    policy::Quota,
    store::{
        AddedKey, DisabledPrincipal, Ending, EnsureParams, Ensured, Idempotency, Note, PageParams, QuotaReached, QuotaSubject,
        RetentionLimits, RevokedKey, SandboxAfterSession, SessionFilter, Store, Viewer, postgres, sqlite,
    },
};
use cobox_protocol::{
    KeyId, SandboxId, SessionId, Timestamp,
    control::Revocation,
    key::PrincipalKind,
    session::{Access, State},
    tags::Tags,
};
use cobox_testkit::TestDatabase;

pub const WORKSPACE: &str = "w";
pub const NODE: &str = "node_1";

pub fn at(seconds: i64) -> Timestamp {
    Timestamp::from_unix(1_000_000 + seconds)
}

pub fn audit(action: &'static str) -> AuditRecord {
    AuditRecord::new(at(0), WORKSPACE, action)
}

pub fn ending(now: i64) -> Ending {
    Ending {
        now: at(now),
        reason: "because".into(),
        revoke_until: at(now + 100),
        keeps_sandbox: false,
        keep_files: Duration::ZERO,
        audit: audit("ended"),
    }
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
        counted_until: None,
        active: Duration::ZERO,
        suspended_at: None,
        downtime: Duration::ZERO,
        restore_until: None,
        ended_at: None,
        spec: Default::default(),
        template: None,
        pool: None,
    }
}

pub fn quota(of_workspace: u32) -> Quota {
    Quota { of_workspace, of_owner: None }
}

fn bound(thread: &str) -> SessionWithSandbox {
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
    SessionWithSandbox { session, sandbox }
}

pub fn ensure_params(thread: &str) -> EnsureParams {
    EnsureParams {
        fresh: bound(thread),
        is_attaching: false,
        must_create: false,
        tags: Tags::new(),
        quota: quota(100),
        taking: None,
        idempotency: None,
        audit: audit("session.created"),
    }
}

#[tokio::test]
async fn sqlite_passes_the_store_suite() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("broker.db");
    run(&sqlite::open(&path).await.unwrap()).await;
    assert_remembered(&sqlite::open(&path).await.unwrap()).await;
}

#[tokio::test]
async fn postgres_passes_the_store_suite() {
    let database = TestDatabase::new().await;
    run(&postgres::open(&database.secret_url()).await.unwrap()).await;
    assert_remembered(&postgres::open(&database.secret_url()).await.unwrap()).await;
}

async fn assert_remembered(again: &Store) {
    assert!(again.session_of(WORKSPACE, "thread", "race").await.unwrap().is_some());
}

/// Runs everything against one empty store.
pub async fn run(store: &Store) {
    keys(store).await;
    sessions_of_one_scope_are_one(store).await;
    a_key_and_its_session(store).await;
    idempotency(store).await;
    ending_a_session(store).await;
    ending_a_sandbox(store).await;
    replacing_is_conditional(store).await;
    store_sandboxes::names_and_quotas(store).await;
    store_sandboxes::attaching(store).await;
    store_sandboxes::tags(store).await;
    store_sandboxes::changing_a_sandbox(store).await;
    store_sandboxes::own_lifetimes(store).await;
    store_resources::names_of_snapshots(store).await;
    store_resources::items_in_use_are_not_removed(store).await;
    store_resources::pools(store).await;
    store_resources::unused_sandboxes_are_ended(store).await;
    store_tokens::revocations(store).await;
    store_tokens::a_retired_token_counts_for_a_moment(store).await;
    store_tokens::shares(store).await;
    store_tokens::opaque_tokens(store).await;
    store_tokens::what_was_issued_up_to_a_moment(store).await;
    store_tokens::rotating_a_key(store).await;
    notes_and_pruning(store).await;
}

async fn keys(store: &Store) {
    let key = api_key("ann", PrincipalKind::Human);
    assert!(matches!(store.add_key(&key, &audit("key.created")).await.unwrap(), AddedKey::Added));
    let other = api_key("ann", PrincipalKind::Agent);
    assert!(matches!(store.add_key(&other, &audit("key.created")).await.unwrap(), AddedKey::KindDiffers(PrincipalKind::Human)));
    let read = store.key(&key.id).await.unwrap().unwrap();
    assert_eq!((read.principal, read.hash), (key.principal.clone(), key.hash));
    assert!(store.key(&other.id).await.unwrap().is_none());
    assert_eq!(store.keys(&PageParams { before: None, limit: 10 }).await.unwrap().len(), 1);
    assert!(matches!(store.revoke_key(&key.id, &ending(5)).await.unwrap(), RevokedKey::Revoked(_)));
    assert!(matches!(store.revoke_key(&key.id, &ending(6)).await.unwrap(), RevokedKey::NotThere), "a key can be revoked only once");
    identities(store).await;
    assert_eq!(store.key(&key.id).await.unwrap().unwrap().revoked_at, Some(at(5)));
}

async fn sessions_of_one_scope_are_one(store: &Store) {
    let ensures: Vec<EnsureParams> = (0..20).map(|_| ensure_params("race")).collect();
    let outcomes = futures_util::future::join_all(ensures.iter().map(|w| store.ensure(w))).await;
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
    assert_eq!(found.sandbox.intent, Some(Intent::Create), "the intent is stored before the provider is called");
    assert!(store.session_of("elsewhere", "thread", "race").await.unwrap().is_none());
    assert_eq!(store.session(&found.session.id).await.unwrap().unwrap(), found);
    let viewer = |principal: &str| Viewer { workspace: WORKSPACE.into(), principal: principal.into(), sees_all: false };
    let page = PageParams { before: None, limit: 10 };
    let filter = SessionFilter { scope_id: Some("race".into()), ..SessionFilter::default() };
    assert_eq!(store.sessions(&viewer("bob"), &filter, &page).await.unwrap().len(), 1);
    let mut private = ensure_params("private");
    private.fresh.session.access = Access::Owner;
    store.ensure(&private).await.unwrap();
    let filter = SessionFilter { scope_id: Some("private".into()), ..SessionFilter::default() };
    assert_eq!(store.sessions(&viewer("bob"), &filter, &page).await.unwrap().len(), 0);
    assert_eq!(store.sessions(&viewer("ann"), &filter, &page).await.unwrap().len(), 1);
    let full = EnsureParams { quota: quota(1), ..ensure_params("too many") };
    assert_eq!(store.ensure(&full).await.unwrap(), Ensured::QuotaReached(QuotaReached { by: QuotaSubject::Workspace, deleted: 0 }));
}

/// A combined read returns the same as separate reads.
async fn a_key_and_its_session(store: &Store) {
    let key = api_key("kim", PrincipalKind::Agent);
    assert!(matches!(store.add_key(&key, &audit("key.created")).await.unwrap(), AddedKey::Added));
    let Ensured::Created(ended) = store.ensure(&ensure_params("read together")).await.unwrap() else { panic!("expected a new session") };
    store.end_session(&ended.session.id, &ending(10)).await.unwrap();
    let Ensured::Created(living) = store.ensure(&ensure_params("read together")).await.unwrap() else { panic!("expected a new session") };
    for session in [&ended.session.id, &living.session.id] {
        assert_eq!(key_and_session(store, &key, session).await, store.session(session).await.unwrap());
    }
    assert_eq!(key_and_session(store, &key, &SessionId::new()).await, None);
    assert!(store.key_and_session(&KeyId::new(), &living.session.id).await.unwrap().is_none());
}

async fn key_and_session(store: &Store, key: &ApiKey, session: &SessionId) -> Option<SessionWithSandbox> {
    let (read, bound) = store.key_and_session(&key.id, session).await.unwrap().unwrap();
    assert_eq!(format!("{read:?}"), format!("{:?}", store.key(&key.id).await.unwrap().unwrap()));
    assert_eq!((read.principal, read.hash), (key.principal.clone(), key.hash));
    bound
}

async fn idempotency(store: &Store) {
    let keyed = |hash: u8| EnsureParams {
        idempotency: Some(Idempotency { principal: "ann".into(), key: "k1".into(), request_hash: [hash; 32], since: at(-100) }),
        ..ensure_params("idem")
    };
    let Ensured::Created(first) = store.ensure(&keyed(1)).await.unwrap() else { panic!("expected a new session") };
    let Ensured::Replayed(again) = store.ensure(&keyed(1)).await.unwrap() else { panic!("expected a replay") };
    assert_eq!(again.session.id, first.session.id);
    assert_eq!(store.ensure(&keyed(2)).await.unwrap(), Ensured::KeyReused);
    store.end_sandbox(&first.sandbox.id, State::Failed, &ending(1)).await.unwrap();
    assert!(matches!(store.ensure(&keyed(1)).await.unwrap(), Ensured::Created(_)), "a failed request may be retried");
}

async fn ending_a_session(store: &Store) {
    store.ensure(&ensure_params("end")).await.unwrap();
    let found = store.session_of(WORKSPACE, "thread", "end").await.unwrap().unwrap();
    assert_eq!(store.end_session(&found.session.id, &ending(10)).await.unwrap(), Some(SandboxAfterSession::Destroy));
    assert_eq!(store.end_session(&found.session.id, &ending(11)).await.unwrap(), None);
    let after = store.session(&found.session.id).await.unwrap().unwrap();
    assert_eq!(
        (after.session.ended_at, after.sandbox.state, after.sandbox.intent),
        (Some(at(10)), State::Terminated, Some(Intent::Destroy))
    );
    assert!(store.session_of(WORKSPACE, "thread", "end").await.unwrap().is_none());
    assert!(matches!(store.ensure(&ensure_params("end")).await.unwrap(), Ensured::Created(_)), "an ended scope can get a new session");

    let mut named = ensure_params("named");
    named.fresh.sandbox.name = Some("tool-box".into());
    named.fresh.sandbox.state = State::Active;
    named.fresh.sandbox.intent = None;
    store.ensure(&named).await.unwrap();
    assert_eq!(store.end_session(&named.fresh.session.id, &ending(10)).await.unwrap(), Some(SandboxAfterSession::Suspend));
    let kept = store.sandbox(&named.fresh.sandbox.id).await.unwrap().unwrap();
    assert_eq!((kept.state, kept.intent), (State::Active, Some(Intent::Suspend)));
}

async fn ending_a_sandbox(store: &Store) {
    let ensure_params = ensure_params("sandbox ends");
    store.ensure(&ensure_params).await.unwrap();
    let id = &ensure_params.fresh.sandbox.id;
    assert_eq!(store.sessions_on(id).await.unwrap().len(), 1);
    let ended = store.end_sandbox(id, State::Failed, &ending(20)).await.unwrap().unwrap();
    assert_eq!((ended.state, ended.reason.as_deref()), (State::Failed, Some("because")));
    assert!(store.end_sandbox(id, State::Terminated, &ending(21)).await.unwrap().is_none());
    assert_eq!(store.sessions_on(id).await.unwrap().len(), 0);
    assert!(store.sandboxes_of_node(NODE).await.unwrap().iter().any(|s| s.id == *id), "the sandbox must still be destroyed");
    assert!(store.replace_sandbox(&ended, &Sandbox { intent: None, ..ended.clone() }, None).await.unwrap());
    assert!(!store.sandboxes_of_node(NODE).await.unwrap().iter().any(|s| s.id == *id));
}

async fn replacing_is_conditional(store: &Store) {
    let made = sandbox(None);
    store.add_sandbox(&made, &Tags::new(), &quota(100), &audit("sandbox.created")).await.unwrap();
    let started = made.started(at(5));
    assert!(store.replace_sandbox(&made, &started, None).await.unwrap());
    assert!(!store.replace_sandbox(&made, &started, None).await.unwrap(), "the second change finds the sandbox already changed");
    assert!(store.running_in(WORKSPACE, NODE).await.unwrap().contains(&made.id));
    store.note(&Note { sandboxes: vec![(made.id.clone(), at(50))], ..Note::default() }).await.unwrap();
    let idle = Sandbox { state: State::Idle, ..started.clone() };
    assert!(store.replace_sandbox(&started, &idle, None).await.unwrap());
    assert_eq!(store.sandbox(&made.id).await.unwrap().unwrap().last_active_at, at(50), "the last use never moves back");
    store.note(&Note { sandboxes: vec![(made.id.clone(), at(60))], ..Note::default() }).await.unwrap();
    assert_eq!(store.sandbox(&made.id).await.unwrap().unwrap().state, State::Active, "use makes an idle sandbox active");
}

async fn identities(store: &Store) {
    let identity = Identity { issuer: "https://id.example".into(), subject: "u1".into() };
    let of = |n: u8| ApiKey { hash: [n; 32], identity: Some(identity.clone()), ..api_key("sso", PrincipalKind::Agent) };
    let first = of(9);
    assert!(matches!(store.add_key(&first, &audit("key.created")).await.unwrap(), AddedKey::Added));
    let AddedKey::Known(known) = store.add_key(&of(9), &audit("key.created")).await.unwrap() else {
        panic!("the identity is already known")
    };
    assert_eq!(known.id, first.id);
    assert_eq!(known.identity, Some(identity.clone()));
    let found = async |n: u8| store.identity(&first.principal, &[n; 32]).await.unwrap();
    assert_eq!(found(9).await.unwrap().id, first.id);
    assert!(found(8).await.is_none());
    assert_eq!(store.disable_principal(WORKSPACE, "nobody", &ending(5)).await.unwrap(), DisabledPrincipal::NotThere);
    assert_eq!(store.disable_principal(WORKSPACE, "sso", &ending(5)).await.unwrap(), DisabledPrincipal::Disabled);
    assert!(found(9).await.unwrap().revoked_at.is_some(), "the record stays, so that the identity remains disabled");
    assert!(matches!(store.add_key(&of(8), &audit("key.created")).await.unwrap(), AddedKey::Disabled));
    let view = store.revocations(&sandbox(None), at(6)).await.unwrap().list.clone();
    assert!(view.contains(&Revocation::Principal("sso".into())) && view.contains(&Revocation::Grant(first.id.to_string())));
    let listed = store.principals(WORKSPACE, at(6), &PageParams { before: None, limit: 10 }).await.unwrap();
    let sso = listed.iter().find(|p| p.principal.name == "sso").unwrap();
    assert_eq!((sso.valid_keys, sso.disabled_at), (0, Some(at(5))));
    assert!(store.enable_principal(WORKSPACE, "sso", &audit("principal.enabled")).await.unwrap());
    assert!(!store.enable_principal(WORKSPACE, "nobody", &audit("principal.enabled")).await.unwrap());
    assert!(found(9).await.is_none(), "the next sign-in creates a new record");
    let view = store.revocations(&sandbox(None), at(6)).await.unwrap().list.clone();
    assert!(!view.contains(&Revocation::Principal("sso".into())) && view.contains(&Revocation::Grant(first.id.to_string())));
    assert!(matches!(store.add_key(&of(9), &audit("key.created")).await.unwrap(), AddedKey::Added));
}

async fn records(store: &Store, limit: u32) -> Vec<AuditRecord> {
    let newest = store.audit(WORKSPACE, None, &PageParams { before: None, limit }).await.unwrap();
    newest.into_iter().map(|(_, record)| record).collect()
}

async fn notes_and_pruning(store: &Store) {
    let mut record = audit("dataplane.used");
    record.jti = Some("tok".into());
    store.note(&Note { audit: vec![record.clone()], ..Note::default() }).await.unwrap();
    assert_eq!(records(store, 1).await, [record]);
    let ensure_params = ensure_params("forgotten");
    store.ensure(&ensure_params).await.unwrap();
    store.end_session(&ensure_params.fresh.session.id, &ending(1)).await.unwrap();
    let horizon = |t| RetentionLimits { now: at(t), idempotency_before: at(t), ended_before: at(t), audit_before: at(t) };
    store.prune(&horizon(1000)).await.unwrap();
    assert!(store.sandbox(&ensure_params.fresh.sandbox.id).await.unwrap().is_some(), "a sandbox that must still be destroyed is kept");
    let ended = store.sandbox(&ensure_params.fresh.sandbox.id).await.unwrap().unwrap();
    store.replace_sandbox(&ended, &Sandbox { intent: None, ..ended.clone() }, None).await.unwrap();
    store.prune(&horizon(1000)).await.unwrap();
    assert!(store.sandbox(&ensure_params.fresh.sandbox.id).await.unwrap().is_none());
    assert!(store.session(&ensure_params.fresh.session.id).await.unwrap().is_none());
    assert!(records(store, 10).await.is_empty());
    assert!(store.session_of(WORKSPACE, "thread", "race").await.unwrap().is_some(), "active sessions are kept");
}
