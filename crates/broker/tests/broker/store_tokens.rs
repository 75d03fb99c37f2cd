//! Part of the store's test suite: revoked, retired, shared and hashed tokens, and which key is current.

use cobox_broker::{
    domain::model::{Sandbox, Share},
    store::{Ensured, Note, OpaqueToken, RetentionLimits, RetiredToken, RevokeParams, RevokedTokens, Rotated, Rotation, Shared, Store},
};
use cobox_protocol::{
    SandboxId, SessionId, ShareId,
    control::{IssuedBefore, IssuedTo, Revocation},
    session::State,
    tags::Tags,
};

use crate::store_suite::{WORKSPACE, at, audit, ending, ensure_params, quota, sandbox};

pub async fn a_retired_token_counts_for_a_moment(store: &Store) {
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
    assert_ne!(between.1, after.1, "a revocation that takes effect changes the list, also if newer ones exist");
    assert!(view(500).await.0.is_empty());
}

pub async fn revocations(store: &Store) {
    let ensure_params = ensure_params("revoked");
    store.ensure(&ensure_params).await.unwrap();
    let before = store.revocations(&ensure_params.fresh.sandbox, at(10)).await.unwrap();
    store.end_session(&ensure_params.fresh.session.id, &ending(10)).await.unwrap();
    let view = store.revocations(&ensure_params.fresh.sandbox, at(11)).await.unwrap();
    assert!(view.sequence > before.sequence);
    assert!(view.list.contains(&Revocation::Session(ensure_params.fresh.session.id.to_string())));
    assert!(view.list.iter().any(|r| matches!(r, Revocation::Grant(_))), "a revoked key counts in every sandbox of its workspace");
    let other = store.revocations(&sandbox(None), at(11)).await.unwrap();
    assert!(
        !other.list.contains(&Revocation::Session(ensure_params.fresh.session.id.to_string())),
        "a revoked session counts only in its own sandbox"
    );
    assert!(store.revocations(&ensure_params.fresh.sandbox, at(10_000)).await.unwrap().list.is_empty());
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

pub async fn shares(store: &Store) {
    let Ensured::Created(made) = store.ensure(&ensure_params("shared")).await.unwrap() else { panic!("expected a new session") };
    let (session, sandbox) = (&made.session.id, &made.sandbox);
    let first = share(session, "bob", "fs_read exec", None);
    assert_eq!(store.share(&first, 2, &ending(0)).await.unwrap(), Shared::Added(first.clone()));
    assert_eq!(store.share_of(session, "bob").await.unwrap(), Some(first.clone()));
    assert_eq!(store.share_of(session, "carl").await.unwrap(), None);
    let wider = share(session, "bob", "fs_read exec shell", None);
    let kept = Share { id: first.id.clone(), ..wider.clone() };
    assert_eq!(store.share(&wider, 2, &ending(0)).await.unwrap(), Shared::Changed(kept), "wider terms revoke nothing");
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

pub async fn opaque_tokens(store: &Store) {
    let claims: cobox_token::Claims = serde_json::from_value(serde_json::json!({
        "iss": "cobox", "sub": "ann", "aud": SandboxId::new(), "scope": "fs:ro", "iat": 1, "nbf": 1, "exp": 2, "jti": "tok_1",
        "act": { "type": "human", "id": "ann" }, "gen": 1, "grant": "key_1", "parent": "tok_0", "via": ["shr_1"],
    }))
    .unwrap();
    let token = OpaqueToken { hash: [9; 32], claims: claims.clone(), keep_until: at(10) };
    store.note(&Note { tokens: vec![token], ..Note::default() }).await.unwrap();
    assert_eq!(store.opaque_token(&[9; 32]).await.unwrap(), Some(claims));
    assert_eq!(store.opaque_token(&[8; 32]).await.unwrap(), None);
    let horizon = |now: i64| RetentionLimits { now: at(now), idempotency_before: at(-9), ended_before: at(-9), audit_before: at(-9) };
    store.prune(&horizon(10)).await.unwrap();
    assert!(store.opaque_token(&[9; 32]).await.unwrap().is_some());
    store.prune(&horizon(11)).await.unwrap();
    assert_eq!(store.opaque_token(&[9; 32]).await.unwrap(), None);
}

pub async fn what_was_issued_up_to_a_moment(store: &Store) {
    let workspace = "moments";
    let sandbox = Sandbox { workspace: workspace.into(), ..sandbox(None) };
    let earlier = |issued_by| IssuedBefore { of: IssuedTo::Principal, value: "ann".into(), issued_by };
    let mut last = 0;
    for issued_by in [5, 7] {
        let ensure_params = RevokeParams {
            workspace: workspace.into(),
            sandbox: None,
            tokens: RevokedTokens::Earlier { of: IssuedTo::Principal, value: "ann".into(), issued_by },
            until: at(100),
            audit: audit("tokens.revoked"),
        };
        let sequence = store.revoke(&ensure_params).await.unwrap();
        assert!(sequence > last);
        last = sequence;
    }
    let seen = store.revocations(&sandbox, at(50)).await.unwrap();
    assert_eq!(
        (seen.sequence, seen.list.clone()),
        (last, vec![Revocation::IssuedBefore(earlier(5)), Revocation::IssuedBefore(earlier(7))])
    );
    assert_eq!(store.revocations(&sandbox, at(100)).await.unwrap().list, []);
}

pub async fn rotating_a_key(store: &Store) {
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
    assert_eq!(rotate(9, Some(19)).await, Rotated::TooSoon(at(10)), "a rotation must not extend an old key");
    assert_eq!(store.sandbox(&sandbox.id).await.unwrap().unwrap(), rotated);
    assert_eq!(keys(&done(rotate(10, Some(30)).await), 20), (2, 3), "the key before it has expired");
    assert_eq!(keys(&done(rotate(21, None).await), 21), (4, 4), "an immediate rotation ends all older keys");
    // Other changes to a sandbox don't affect its keys.
    assert!(store.replace_sandbox(&sandbox, &sandbox.started(at(22)), None).await.unwrap());
    assert_eq!(keys(&store.sandbox(&sandbox.id).await.unwrap().unwrap(), 22), (4, 4));
    store.end_sandbox(&sandbox.id, State::Terminated, &ending(23)).await.unwrap();
    assert_eq!(rotate(24, None).await, Rotated::Gone);
}
