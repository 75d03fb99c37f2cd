//! Part of the store's test suite: sandboxes that are found by name or tag, shared by sessions, counted and changed.

use std::time::Duration;

use cobox_broker::{
    domain::model::{Sandbox, SessionWithSandbox},
    policy::Quota,
    store::{
        AddedSandbox, ChangedSandbox, DueTimes, EnsureParams, Ensured, Idempotency, PageParams, QuotaReached, QuotaSubject,
        SandboxAfterSession, SandboxChange, SessionFilter, Store, Viewer,
    },
};
use cobox_protocol::{
    key::PrincipalKind,
    session::{Access, State},
    tags::{TagFilter, Tags},
};

use crate::store_suite::{NODE, WORKSPACE, at, audit, ending, ensure_params, quota, sandbox};

pub async fn names_and_quotas(store: &Store) {
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
        AddedSandbox::QuotaReached(QuotaReached { by: QuotaSubject::Workspace, deleted: 0 })
    );
    let living = store.sandboxes_of_node(NODE).await.unwrap().into_iter().filter(|s| s.ended_at.is_none() && s.owner == "ann").count();
    let owned = |more: u32| Quota { of_workspace: 100, of_owner: Some(u32::try_from(living).unwrap() + more) };
    let refused = store.add_sandbox(&sandbox(None), &Tags::new(), &owned(0), &audit("sandbox.created")).await.unwrap();
    assert_eq!(refused, AddedSandbox::QuotaReached(QuotaReached { by: QuotaSubject::Owner, deleted: 0 }));
    let others = Sandbox { owner: "bob".into(), owner_kind: PrincipalKind::Agent, ..sandbox(None) };
    assert_eq!(store.add_sandbox(&others, &Tags::new(), &owned(0), &audit("sandbox.created")).await.unwrap(), AddedSandbox::Added);
    assert_eq!(store.sandbox(&others.id).await.unwrap().unwrap().owner_kind, PrincipalKind::Agent);
    store.end_sandbox(&others.id, State::Terminated, &ending(1)).await.unwrap();
    assert_eq!(store.sandbox_named(WORKSPACE, "dev").await.unwrap().unwrap().id, first.id);
    let viewer = Viewer { workspace: WORKSPACE.into(), principal: "bob".into(), sees_all: false };
    let all = store.sandboxes(&viewer, &[], &PageParams { before: None, limit: 100 }).await.unwrap();
    let rest = store.sandboxes(&viewer, &[], &PageParams { before: Some(all[0].id.to_string()), limit: 100 }).await.unwrap();
    assert_eq!(rest.len(), all.len() - 1, "a cursor continues where the page ended");
    store.end_sandbox(&first.id, State::Terminated, &ending(1)).await.unwrap();
    assert_eq!(
        store.add_sandbox(&second, &Tags::new(), &quota(100), &audit("sandbox.created")).await.unwrap(),
        AddedSandbox::Added,
        "the name can be used again"
    );
}

/// The session of a scope on an existing sandbox.
fn attach(thread: &str, to: &Sandbox) -> EnsureParams {
    let mut ensure_params = EnsureParams { is_attaching: true, ..ensure_params(thread) };
    ensure_params.fresh.sandbox = to.clone();
    ensure_params.fresh.session.sandbox = to.id.clone();
    ensure_params
}

pub async fn attaching(store: &Store) {
    let shared = sandbox(Some("shared"));
    store.add_sandbox(&shared, &Tags::new(), &quota(100), &audit("sandbox.created")).await.unwrap();
    store.replace_sandbox(&shared, &shared.started(at(0)), None).await.unwrap();
    let mut late = attach("attached 1", &shared);
    late.fresh.session.created_at = at(40);
    let Ensured::Created(first) = store.ensure(&late).await.unwrap() else { panic!("expected a new session") };
    assert_eq!((first.session.active_base, first.sandbox.state), (Duration::from_secs(40), State::Active), "its running time starts now");
    // Allowed beyond the quota, which counts only sandboxes.
    let Ensured::Created(second) = store.ensure(&EnsureParams { quota: quota(1), ..attach("attached 2", &shared) }).await.unwrap() else {
        panic!("expected a new session")
    };
    assert_eq!(store.sessions_on(&shared.id).await.unwrap().len(), 2);
    let mut taken = ensure_params("attached 3");
    taken.fresh.sandbox.name = Some("shared".into());
    assert_eq!(store.ensure(&taken).await.unwrap(), Ensured::NameTaken(shared.id.clone()));
    assert_eq!(store.end_session(&first.session.id, &ending(50)).await.unwrap(), Some(SandboxAfterSession::InUse));
    assert_eq!(store.end_session(&second.session.id, &ending(50)).await.unwrap(), Some(SandboxAfterSession::Suspend));
    store.end_sandbox(&shared.id, State::Terminated, &ending(51)).await.unwrap();
    assert_eq!(store.ensure(&attach("attached 4", &shared)).await.unwrap(), Ensured::SandboxGone);

    // Running time restarts only while no session uses the sandbox.
    let worn = sandbox(Some("worn"));
    store.add_sandbox(&worn, &Tags::new(), &quota(100), &audit("sandbox.created")).await.unwrap();
    let running = worn.started(at(0));
    store.replace_sandbox(&worn, &running, None).await.unwrap();
    store.replace_sandbox(&running, &running.suspended(at(50), "rest"), None).await.unwrap();
    let active = async || store.sandbox(&worn.id).await.unwrap().unwrap().active.as_secs();
    let user = attach("attached 6", &worn);
    store.ensure(&user).await.unwrap();
    store.renew_sandbox(&worn.id).await.unwrap();
    assert_eq!(active().await, 50);
    store.end_session(&user.fresh.session.id, &ending(95)).await.unwrap();
    store.renew_sandbox(&worn.id).await.unwrap();
    assert_eq!(active().await, 0);

    // A session of another principal doesn't end the owner's sandbox.
    let shared = sandbox(None);
    store.add_sandbox(&shared, &Tags::new(), &quota(100), &audit("sandbox.created")).await.unwrap();
    let mut guest = attach("attached 5", &shared);
    guest.fresh.session.owner = "bob".into();
    store.ensure(&guest).await.unwrap();
    assert_eq!(store.end_session(&guest.fresh.session.id, &ending(60)).await.unwrap(), Some(SandboxAfterSession::Suspend));

    // A conflict isn't stored as an idempotent response.
    let keyed = Idempotency { principal: "ann".into(), key: "create".into(), request_hash: [1; 32], since: at(-100) };
    let conflicting = EnsureParams { must_create: true, idempotency: Some(keyed.clone()), ..ensure_params("race") };
    for _ in 0..2 {
        assert!(matches!(store.ensure(&conflicting).await.unwrap(), Ensured::Existing(_)));
    }
    let creating = EnsureParams { must_create: true, idempotency: Some(keyed.clone()), ..ensure_params("create") };
    assert!(matches!(store.ensure(&creating).await.unwrap(), Ensured::Created(_)));
    assert!(matches!(store.ensure(&creating).await.unwrap(), Ensured::Replayed(_)));
    let later = EnsureParams { idempotency: Some(Idempotency { request_hash: [2; 32], since: at(1), ..keyed }), ..creating };
    assert!(matches!(store.ensure(&later).await.unwrap(), Ensured::Existing(_)), "an idempotency key expires");
}

fn tag(text: &str) -> TagFilter {
    text.parse().unwrap()
}

pub async fn tags(store: &Store) {
    let tags = |pairs: &[(&str, &str)]| -> Tags { pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect() };
    let one = EnsureParams { tags: tags(&[("team", "a"), ("run", "1")]), ..ensure_params("tagged 1") };
    let two = EnsureParams { tags: tags(&[("team", "a"), ("run", "2")]), ..ensure_params("tagged 2") };
    for ensure_params in [&one, &two] {
        store.ensure(ensure_params).await.unwrap();
    }
    let viewer = Viewer { workspace: WORKSPACE.into(), principal: "bob".into(), sees_all: false };
    let page = PageParams { before: None, limit: 10 };
    let sessions = async |filters: &[&str]| {
        let filter = SessionFilter { tags: filters.iter().map(|f| tag(f)).collect(), ..SessionFilter::default() };
        let found = store.sessions(&viewer, &filter, &page).await.unwrap();
        // Ids of the same millisecond are not ordered.
        found.into_iter().map(|b| b.session.scope_id).collect::<std::collections::BTreeSet<_>>().into_iter().collect::<Vec<_>>()
    };
    assert_eq!(sessions(&["team:a"]).await, ["tagged 1", "tagged 2"]);
    assert_eq!(sessions(&["team:a", "run:1"]).await, ["tagged 1"]);
    assert_eq!(sessions(&["run"]).await.len(), 2);
    assert_eq!(sessions(&["team:b"]).await.len(), 0);
    let known = store.session_tags(&[&one.fresh.session.id, &two.fresh.session.id]).await.unwrap();
    assert_eq!(known[one.fresh.session.id.as_str()], one.tags);

    // A sandbox is found by its own tags and by those of its sessions.
    store.ensure(&EnsureParams { tags: tags(&[("guest", "yes")]), ..attach("tagged 3", &one.fresh.sandbox) }).await.unwrap();
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
    assert_eq!(ended.iter().map(SessionWithSandbox::state).collect::<Vec<_>>(), [State::Failed]);
    assert!(store.sessions(&viewer, &terminated, &page).await.unwrap().is_empty());
    store.end_sandbox(&one.fresh.sandbox.id, State::Terminated, &ending(70)).await.unwrap();
    let terminated = SessionFilter { tags: vec![tag("run:1")], ..terminated };
    assert_eq!(store.sessions(&viewer, &terminated, &page).await.unwrap().len(), 1);
}

pub async fn changing_a_sandbox(store: &Store) {
    let (one, other) = (sandbox(Some("one")), sandbox(Some("other")));
    for made in [&one, &other] {
        store.add_sandbox(made, &Tags::from([("a".into(), "1".into())]), &quota(100), &audit("sandbox.created")).await.unwrap();
    }
    let change = SandboxChange { max_tags: 2, ..SandboxChange::default() };
    let name = |name: &str| SandboxChange { name: Some(Some(name.into())), ..change.clone() };
    let apply = async |change: &SandboxChange| store.change_sandbox(&one.id, change, &audit("sandbox.changed")).await.unwrap();
    assert_eq!(apply(&name("other")).await, ChangedSandbox::NameTaken(other.id.clone()));
    assert!(matches!(apply(&name("one")).await, ChangedSandbox::Changed(_)), "a sandbox may keep its own name");
    let all = SandboxChange {
        name: Some(None),
        is_kept: Some(true),
        access: Some(Access::Owner),
        set_tags: Tags::from([("b".into(), "2".into()), ("c".into(), "3".into())]),
        remove_tags: vec!["a".into()],
        ..change.clone()
    };
    let ChangedSandbox::Changed(changed) = apply(&all).await else { panic!("the change must succeed") };
    let read = store.sandbox(&one.id).await.unwrap().unwrap();
    assert_eq!((read.name.clone(), read.is_kept, read.access), (None, true, Access::Owner));
    assert_eq!((read.generation, one.generation), (2, 1), "restricting access to the owner revokes other principals' tokens");
    assert_eq!(read, *changed);
    let ChangedSandbox::Changed(again) = apply(&SandboxChange { access: Some(Access::Owner), ..change.clone() }).await else {
        panic!("the change must succeed")
    };
    assert_eq!(again.generation, 2, "an unchanged access revokes no tokens");
    let too_many = SandboxChange { is_kept: Some(false), set_tags: Tags::from([("d".into(), "4".into())]), ..change.clone() };
    assert_eq!(apply(&too_many).await, ChangedSandbox::TooManyTags(3));
    assert!(store.sandbox(&one.id).await.unwrap().unwrap().is_kept, "a refused change changes nothing");
    let tags = store.sandbox_tags(&[&one.id]).await.unwrap();
    assert_eq!(tags[one.id.as_str()].keys().collect::<Vec<_>>(), ["b", "c"]);
    for made in [&one, &other] {
        store.end_sandbox(&made.id, State::Terminated, &ending(1)).await.unwrap();
    }
    assert_eq!(apply(&change).await, ChangedSandbox::Gone);
}

/// A sandbox with a shorter retention is due when that ends, and each is due once.
pub async fn own_lifetimes(store: &Store) {
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
        let mut ids: Vec<_> = store
            .sandboxes_due("own-lifetimes", DueTimes { now: at(now), suspended: at(suspended_by), restorable: at(now) })
            .await
            .unwrap()
            .into_iter()
            .map(|s| s.id)
            .collect();
        ids.sort();
        ids
    };
    assert!(due(500, 1099).await.is_empty());
    assert_eq!(due(500, 1100).await, std::slice::from_ref(&short.id));
    let mut all = [short.id.clone(), long.id.clone(), other.id.clone()];
    all.sort();
    assert_eq!(due(1000, 8000).await, all);
    let change =
        SandboxChange { own_keep: Some(None), own_lease: Some(Some(Duration::from_secs(120))), max_tags: 9, ..SandboxChange::default() };
    let ChangedSandbox::Changed(changed) = store.change_sandbox(&short.id, &change, &audit("sandbox.changed")).await.unwrap() else {
        panic!("the change must succeed")
    };
    assert_eq!((changed.own_lease, changed.own_keep), (Some(Duration::from_secs(120)), None));
    assert_eq!(store.sandbox(&short.id).await.unwrap().as_ref(), Some(&*changed));
    assert!(due(500, 1100).await.is_empty());
    for made in [&short, &long, &other] {
        store.end_sandbox(&made.id, State::Terminated, &ending(1)).await.unwrap();
    }
}
