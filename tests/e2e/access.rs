//! Access control between workspaces, owners and keys.

use cobox_protocol::{
    ErrorCode,
    key::PrincipalKind,
    sandbox::CreateSandbox,
    session::{Access, Mode},
};
use cobox_testkit::{TestBroker, ensure, negotiate, sh};

#[tokio::test]
async fn a_principal_of_another_workspace_finds_nothing() {
    let broker = TestBroker::start().await;
    let ada = broker.client_of("ada", PrincipalKind::Human, None).await;
    let eve = broker.client_of("eve", PrincipalKind::Human, Some("elsewhere")).await;
    let session = ensure(&ada, "secret-thread").await;
    let info = session.info();

    let e = eve.negotiate(&negotiate("secret-thread", Mode::Get)).await.unwrap_err();
    assert!(e.is(ErrorCode::SessionNotFound), "{e}");
    assert!(eve.get_session(&info.session_id).await.is_err_and(|e| e.is(ErrorCode::SessionNotFound)));
    assert!(eve.release(&info.session_id).await.is_err_and(|e| e.is(ErrorCode::SessionNotFound)));
    assert!(eve.get_sandbox(info.sandbox.id.as_str()).await.is_err_and(|e| e.is(ErrorCode::SandboxNotFound)));
    assert!(eve.delete_sandbox(info.sandbox.id.as_str()).await.is_err_and(|e| e.is(ErrorCode::SandboxNotFound)));
    assert!(eve.list_sandboxes(None, None).await.unwrap().items.is_empty());
    let through_the_gateway = eve.sandbox(&info.sandbox.id).exec(&Default::default()).await.unwrap_err();
    assert!(through_the_gateway.is(ErrorCode::SandboxNotFound), "{through_the_gateway}");

    // A thread of the same name in another workspace is a different thread.
    let own = ensure(&eve, "secret-thread").await;
    assert_ne!(own.info().sandbox.id, info.sandbox.id);
}

#[tokio::test]
async fn a_private_session_excludes_colleagues_but_not_operators() {
    let broker = TestBroker::start().await;
    let ada = broker.client_of("ada", PrincipalKind::Human, None).await;
    let bob = broker.client_of("bob", PrincipalKind::Human, None).await;
    let mut request = negotiate("private", Mode::Ensure);
    request.access = Some(Access::Owner);
    let info = ada.negotiate(&request).await.unwrap();

    for mode in [Mode::Get, Mode::Ensure] {
        let e = bob.negotiate(&negotiate("private", mode)).await.unwrap_err();
        assert!(e.is(ErrorCode::Forbidden), "{e}");
    }
    assert!(bob.sandbox(&info.sandbox.id).exec(&Default::default()).await.is_err_and(|e| e.is(ErrorCode::Forbidden)));
    assert!(bob.get_sandbox(info.sandbox.id.as_str()).await.is_err_and(|e| e.is(ErrorCode::Forbidden)));
    assert!(broker.client().negotiate(&negotiate("private", Mode::Get)).await.is_ok(), "the operator may");
    assert!(ada.negotiate(&negotiate("private", Mode::Get)).await.is_ok());
}

#[tokio::test]
async fn only_the_owner_and_operators_can_release_a_session() {
    let broker = TestBroker::start().await;
    let ada = broker.client_of("ada", PrincipalKind::Human, None).await;
    let bot = broker.client_of("bot", PrincipalKind::Agent, None).await;
    let info = ada.negotiate(&negotiate("t", Mode::Ensure)).await.unwrap();
    assert!(bot.negotiate(&negotiate("t", Mode::Get)).await.is_ok(), "it may attach");
    assert!(bot.release(&info.session_id).await.is_err_and(|e| e.is(ErrorCode::Forbidden)));
    ada.release(&info.session_id).await.unwrap();
    assert!(ada.get_session(&info.session_id).await.is_err_and(|e| e.is(ErrorCode::SessionExpired)));
    assert!(ada.refresh(&info.session_id, &Default::default()).await.is_err_and(|e| e.is(ErrorCode::SessionExpired)));
    assert!(ada.release(&info.session_id).await.is_err_and(|e| e.is(ErrorCode::SessionNotFound)));
    let again = ada.negotiate(&negotiate("t", Mode::Ensure)).await.unwrap();
    assert_ne!(again.session_id, info.session_id);
}

#[tokio::test]
async fn a_sandbox_without_a_session_is_used_by_name_and_key() {
    let broker = TestBroker::start().await;
    let client = broker.client();
    let made = client.create_sandbox(&CreateSandbox { name: Some("bench".into()), ..CreateSandbox::default() }).await.unwrap();
    assert!(
        client
            .create_sandbox(&CreateSandbox { name: Some("bench".into()), ..CreateSandbox::default() })
            .await
            .is_err_and(|e| e.is(ErrorCode::SandboxConflict))
    );
    assert_eq!(client.get_sandbox("bench").await.unwrap().id, made.id);
    assert_eq!(sh(&client.sandbox(&made.id), "echo hi").await.stdout, "hi\n");
    client.delete_sandbox("bench").await.unwrap();
    assert!(client.get_sandbox("bench").await.is_err_and(|e| e.is(ErrorCode::SandboxNotFound)));
}

#[tokio::test]
async fn a_revoked_key_is_refused() {
    let broker = TestBroker::start().await;
    let client = broker.client_of("ada", PrincipalKind::Human, None).await;
    assert!(client.list_sandboxes(None, None).await.is_ok());
    let keys = broker.client().list_keys(None, None).await.unwrap();
    let ada = keys.items.iter().find(|k| k.name == "ada").unwrap();
    broker.client().revoke_key(&ada.id).await.unwrap();
    assert!(client.list_sandboxes(None, None).await.is_err_and(|e| e.is(ErrorCode::Unauthenticated)));
}
