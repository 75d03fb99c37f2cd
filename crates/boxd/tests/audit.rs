//! Every request leaves one line, fetched by the broker.

mod support;

use cobox_protocol::audit::Claims;
use http::Method;
use serde_json::json;
use support::TestBoxd;

async fn claims(boxd: &TestBoxd) -> Claims {
    boxd.control(Method::GET, "/control/claims").send().await.ok(200).json()
}

#[tokio::test]
async fn every_request_leaves_one_line_with_who_what_and_how_it_ended() {
    let boxd = TestBoxd::start();
    boxd.post("/v1/exec", json!({ "command": "true" }).to_string()).send().await.ok(200);
    boxd.call(Method::GET, "/v1/files/workspace/a%20b%1b").send().await.refused(404, "FILE_NOT_FOUND");
    boxd.post("/v1/exec", "{}").token(&boxd.token("fs_read")).send().await.refused(403, "CAPABILITY_DENIED");
    boxd.call(Method::GET, "/healthz").send().await.ok(200);
    let fetched = claims(&boxd).await;
    let [ran, read, denied] = fetched.items.as_slice() else { panic!("{fetched:?}") };
    assert_eq!((ran.route.as_str(), ran.method.as_str(), ran.status, &ran.error), ("/v1/exec", "POST", 200, &None));
    assert_eq!(
        (ran.principal.as_deref(), ran.session_id.as_deref(), ran.capability.as_deref()),
        (Some("ada"), Some("ssn_1"), Some("exec"))
    );
    assert!(ran.jti.is_some() && ran.actor.is_some() && ran.request_id.starts_with("req_"));
    assert_eq!((read.target.as_deref(), read.status, read.error.as_deref()), (Some("/workspace/a b\u{fffd}"), 404, Some("FILE_NOT_FOUND")));
    assert_eq!((denied.jti.as_deref(), denied.status, denied.error.as_deref()), (None, 403, Some("CAPABILITY_DENIED")));
    assert_eq!(claims(&boxd).await.items.len(), 3, "kept until they are taken");
    let path = format!("/control/claims?life={}&after=2", fetched.life);
    let rest: Claims = boxd.control(Method::GET, &path).send().await.ok(200).json();
    assert_eq!(rest.items.iter().map(|c| c.seq).collect::<Vec<_>>(), [3]);
}
