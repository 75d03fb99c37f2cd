//! Part of the store's test suite: resources, meaning names, uses and pools.

use crate::store_suite::{NODE, WORKSPACE, api_key, at, audit, ending, ensure_params, quota, sandbox};
use cobox_broker::{
    domain::{
        model::Sandbox,
        resources::records::{Pool, PoolTrouble, Snapshot, Volume, VolumeState},
    },
    store::{
        AddedPoolMember, AddedResource, AddedSandbox, EnsureParams, Ensured, PoolAssignment, RemovedResource, ResourceLimits,
        SnapshotFilter, Store, Viewer,
    },
};
use cobox_protocol::{
    PoolId, SnapshotId, Timestamp, VolumeId,
    key::PrincipalKind,
    resources::{Env, SnapshotState},
    session::{Access, State},
    tags::Tags,
};
use cobox_provider::{SandboxSpec, VolumeMount};

const ROOM: ResourceLimits = ResourceLimits { most: 100, bytes: 1 << 40, alive_since: Timestamp::from_unix(0) };

fn viewer(principal: &str, sees_all: bool) -> Viewer {
    Viewer { workspace: WORKSPACE.into(), principal: principal.into(), sees_all }
}

fn snapshot(owner: &str, name: &str, access: Access) -> Snapshot {
    Snapshot {
        id: SnapshotId::new(),
        workspace: WORKSPACE.into(),
        name: name.into(),
        tag: "latest".into(),
        owner: owner.into(),
        access,
        provider: "local".into(),
        node: NODE.into(),
        state: SnapshotState::Ready,
        reason: None,
        sandbox: None,
        spec: SandboxSpec::default(),
        size_bytes: Some(0),
        created_at: at(0),
        updated_at: at(0),
    }
}

pub async fn names_of_snapshots(store: &Store) {
    let (ann, bob, root) = (viewer("ann", false), viewer("bob", false), viewer("root", true));
    let add = async |s: &Snapshot, by: &Viewer| store.add_snapshot(s, by, &ROOM, &audit("snapshot.created")).await.unwrap();
    let first = snapshot("ann", "Base", Access::Workspace);
    assert_eq!(add(&first, &ann).await, AddedResource::Added);
    assert_eq!(add(&snapshot("bob", "Base", Access::Owner), &bob).await, AddedResource::NameTaken);
    let helped = snapshot("root", "Base", Access::Owner);
    assert_eq!(add(&helped, &root).await, AddedResource::Added);
    let named = async |by: &Viewer, tag: Option<&str>| store.snapshot_named(by, "Base", tag).await.unwrap().map(|s| s.id);
    assert_eq!(named(&bob, Some("latest")).await, Some(first.id.clone()));
    assert_eq!(named(&root, Some("latest")).await, Some(helped.id.clone()));
    assert_eq!((named(&bob, Some("v2")).await, named(&bob, None).await), (None, Some(first.id.clone())));
    for part in ["base", "BAS", "Base"] {
        let filter = SnapshotFilter { name_contains: Some(part.into()), limit: 10, ..SnapshotFilter::default() };
        let found = store.snapshots(&ann, &filter).await.unwrap();
        assert_eq!(found.iter().map(|s| &s.id).collect::<Vec<_>>(), [&first.id], "{part}");
    }
    // A snapshot that becomes private and one that failed while it was being settled; a failed one doesn't reserve its
    // name.
    let closed = Snapshot { state: SnapshotState::Failed, access: Access::Owner, ..first.clone() };
    assert!(store.settle_snapshot(&first, &closed, None).await.unwrap());
    assert_eq!(store.snapshot(&first.id).await.unwrap().unwrap().access, Access::Owner);
    assert_eq!(named(&bob, None).await, None);
    store.settle_snapshot(&helped, &Snapshot { state: SnapshotState::Deleting, ..helped.clone() }, None).await.unwrap();
    assert_eq!(add(&snapshot("bob", "Base", Access::Workspace), &bob).await, AddedResource::Added);
}

pub async fn items_in_use_are_not_removed(store: &Store) {
    let volume = Volume {
        id: VolumeId::new(),
        workspace: WORKSPACE.into(),
        name: "used".into(),
        owner: "ann".into(),
        access: Access::Workspace,
        provider: "local".into(),
        node: NODE.into(),
        state: VolumeState::Ready,
        size_bytes: 1,
        created_at: at(0),
        updated_at: at(0),
    };
    assert_eq!(store.add_volume(&volume, &ROOM, &audit("volume.created")).await.unwrap(), AddedResource::Added);
    let layer = snapshot("ann", "layer", Access::Workspace);
    let layer = Snapshot { spec: SandboxSpec { layers: vec![layer.id.clone()], ..SandboxSpec::default() }, ..layer };
    let ann = viewer("ann", false);
    store.add_snapshot(&layer, &ann, &ROOM, &audit("snapshot.created")).await.unwrap();
    let says = Env([("A".to_owned(), format!("{} {}", volume.id, layer.id))].into());
    let talker = Sandbox { spec: SandboxSpec { env: says.clone(), ..SandboxSpec::default() }, ..sandbox(None) };
    let user = SandboxSpec { layers: vec![layer.id.clone()], mounts: vec![mount(&volume)], ..SandboxSpec::default() };
    let user = Sandbox { spec: user, ..sandbox(None) };
    for sandbox in [&talker, &user] {
        let added = store.add_sandbox(sandbox, &Tags::new(), &quota(100), &audit("sandbox.created")).await.unwrap();
        assert_eq!(added, AddedSandbox::Added);
    }
    let talking = Snapshot { spec: SandboxSpec { env: says, ..SandboxSpec::default() }, ..snapshot("ann", "talking", Access::Workspace) };
    store.add_snapshot(&talking, &ann, &ROOM, &audit("snapshot.created")).await.unwrap();
    let used = async |id: &str| store.sandboxes_made_of(WORKSPACE, id).await.unwrap().into_iter().map(|s| s.id).collect::<Vec<_>>();
    assert_eq!((used(volume.id.as_str()).await, used(layer.id.as_str()).await), (vec![user.id.clone()], vec![user.id.clone()]));
    assert!(store.is_snapshot_used(&layer).await.unwrap());
    let removed = async || store.remove_volume(&volume, &audit("volume.deleted")).await.unwrap();
    assert_eq!(removed().await, RemovedResource::InUse(vec![user.id.to_string()]));
    let ended = store.end_sandbox(&user.id, State::Terminated, &ending(1)).await.unwrap().unwrap();
    assert_eq!(removed().await, RemovedResource::InUse(vec![user.id.to_string()]), "its processes may still be there");
    store.replace_sandbox(&ended, &Sandbox { intent: None, ..ended.clone() }, None).await.unwrap();
    assert!(!store.is_snapshot_used(&layer).await.unwrap());
    assert_eq!(removed().await, RemovedResource::Removed);
    // A resource that is being deleted counts until it is removed.
    let another = Volume { id: VolumeId::new(), name: "another".into(), size_bytes: 10, ..volume.clone() };
    let add = async |bytes| store.add_volume(&another, &ResourceLimits { bytes, ..ROOM }, &audit("volume.created")).await.unwrap();
    assert_eq!(add(10).await, AddedResource::TooLarge);
    store.forget_volume(&volume.id).await.unwrap();
    assert_eq!(add(10).await, AddedResource::Added);
    let more = Volume { id: VolumeId::new(), name: "more".into(), ..another };
    assert_eq!(
        store.add_volume(&more, &ResourceLimits { most: 1, ..ROOM }, &audit("volume.created")).await.unwrap(),
        AddedResource::TooMany
    );
}

fn mount(volume: &Volume) -> VolumeMount {
    VolumeMount { volume: volume.id.clone(), path: "/data".into(), read_only: false }
}

pub async fn pools(store: &Store) {
    let pool = Pool {
        id: PoolId::new(),
        workspace: WORKSPACE.into(),
        name: "warm".into(),
        template: "t".into(),
        owner: "ann".into(),
        owner_kind: PrincipalKind::Human,
        replicas: 1,
        trouble: PoolTrouble::default(),
        created_at: at(0),
        updated_at: at(0),
    };
    assert_eq!(store.add_pool(&pool, 10, &audit("pool.created")).await.unwrap(), AddedResource::Added);
    // Of several callers that saw the same state, only one records a failure.
    let trouble = PoolTrouble { failures: 1, retry_at: Some(at(5)), reason: Some("because".into()) };
    assert!(store.note_pool_trouble(&pool, &trouble).await.unwrap());
    assert!(!store.note_pool_trouble(&pool, &trouble).await.unwrap());
    let troubled = store.pool_by_id(&pool.id).await.unwrap().unwrap();
    assert_eq!(troubled.trouble, trouble);
    let changed = Pool { replicas: 2, ..troubled.clone() };
    store.change_pool(&troubled, &changed, &audit("pool.changed")).await.unwrap();
    assert_eq!(store.pool(WORKSPACE, "warm").await.unwrap().unwrap().trouble, PoolTrouble::default());

    let running = |s: Sandbox| Sandbox { state: State::Active, intent: None, counted_until: Some(at(0)), ..s };
    let member = running(Sandbox { pool: Some(pool.id.clone()), ..sandbox(None) });
    assert_eq!(store.add_pool_member(&member, &quota(100), &audit("sandbox.created")).await.unwrap(), AddedPoolMember::Added);
    let taking = PoolAssignment { pool: pool.id.clone(), alive_since: at(0) };
    let fresh = Sandbox { owner: "bob".into(), ..sandbox(None) };
    let taken = store.take_pool_member(&taking, &fresh, &Tags::new(), &quota(100), &audit("sandbox.created")).await.unwrap().unwrap();
    assert_eq!((&taken.id, taken.owner.as_str()), (&member.id, "bob"));
    // A caller that read the sandbox while it waited in the pool can no longer end it.
    assert!(!store.leave_pool(&member).await.unwrap());
    let another = running(Sandbox { pool: Some(pool.id.clone()), ..sandbox(None) });
    store.add_pool_member(&another, &quota(100), &audit("sandbox.created")).await.unwrap();
    assert!(store.leave_pool(&another).await.unwrap());
    assert!(store.remove_pool(&changed, &audit("pool.deleted")).await.unwrap());
    assert_eq!(store.pool_by_id(&pool.id).await.unwrap(), None);
}

pub async fn unused_sandboxes_are_ended(store: &Store) {
    let made = ensure_params("unbound");
    let Ensured::Created(bound) = store.ensure(&EnsureParams { quota: quota(1000), ..made }).await.unwrap() else {
        panic!("expected a new session")
    };
    assert_eq!(store.end_unbound_sandbox(&bound.sandbox.id, &ending(1)).await.unwrap(), None);
    let idle = sandbox(Some("once"));
    store.add_sandbox(&idle, &Tags::new(), &quota(1000), &audit("sandbox.created")).await.unwrap();
    assert_eq!(store.sandbox_once_named(WORKSPACE, "once").await.unwrap(), None);
    assert!(store.end_unbound_sandbox(&idle.id, &ending(1)).await.unwrap().is_some());
    assert_eq!(store.end_unbound_sandbox(&idle.id, &ending(1)).await.unwrap(), None);
    assert_eq!(store.sandbox_once_named(WORKSPACE, "once").await.unwrap().map(|s| s.id), Some(idle.id));
    let key = api_key("keyed", PrincipalKind::Human);
    store.add_key(&key, &audit("key.created")).await.unwrap();
    assert!(store.has_valid_key(WORKSPACE, "keyed", at(0)).await.unwrap());
    assert!(!store.has_valid_key(WORKSPACE, "nobody", at(0)).await.unwrap());
    store.revoke_key(&key.id, &ending(1)).await.unwrap();
    assert!(!store.has_valid_key(WORKSPACE, "keyed", at(2)).await.unwrap());
}
