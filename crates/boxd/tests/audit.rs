//! Tests that every request leaves one audit record that the broker can fetch, and that the activity feed delivers
//! entries promptly. `claims` and `fetch_activity` use the routes of older brokers.

mod support;

use cobox_protocol::{
    audit::SandboxClaim,
    event::{Action, Activity, MAX_EVENT_TEXT_BYTES},
    report::{ReportBatch, Reports},
};
use http::Method;
use serde_json::json;
use support::TestBoxd;

async fn claims(boxd: &TestBoxd) -> ReportBatch<SandboxClaim> {
    boxd.control(Method::GET, "/control/claims").send().await.ok(200).json()
}

#[tokio::test]
async fn every_request_leaves_one_record_with_principal_target_and_result() {
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
    assert_eq!(claims(&boxd).await.items.len(), 3, "kept until they are acknowledged");
    let path = format!("/control/claims?life={}&after=2", fetched.run_id);
    let rest: ReportBatch<SandboxClaim> = boxd.control(Method::GET, &path).send().await.ok(200).json();
    assert_eq!(rest.items.iter().map(|c| c.seq).collect::<Vec<_>>(), [3]);
}

async fn fetch_activity(boxd: &TestBoxd, life: &str, after: u64, wait: u64) -> ReportBatch<Activity> {
    boxd.control(Method::GET, &format!("/control/happenings?life={life}&after={after}&wait={wait}")).send().await.ok(200).json()
}

fn summary(activity: &Activity) -> (&str, &str) {
    match &activity.action {
        Action::FileWritten(file) => ("written", &file.path),
        Action::FileRemoved(file) => ("removed", &file.path),
        Action::Exec(end) => ("exec", &end.command),
    }
}

#[tokio::test]
async fn written_files_and_ended_commands_are_reported_once_with_their_principal() {
    let boxd = TestBoxd::start();
    boxd.call(Method::PUT, "/v1/files/workspace/a.txt").body("hello").send().await.ok(201);
    boxd.post("/v1/exec", json!({ "command": "exit 3", "env": { "SECRET": "hidden" }, "stdin": "hidden" }).to_string())
        .send()
        .await
        .ok(200);
    boxd.post("/v1/exec", json!({ "argv": ["true", "x".repeat(5000)], "command_id": "one" }).to_string()).send().await.ok(200);
    boxd.post("/v1/exec", json!({ "command_id": "one" }).to_string()).send().await.ok(200);
    boxd.post("/v1/fs/edit", json!({ "path": "/workspace/a.txt", "old": "hello", "new": "bye" }).to_string()).send().await.ok(200);
    boxd.post("/v1/fs/move", json!({ "from": "/workspace/a.txt", "to": "/workspace/b.txt" }).to_string()).send().await.ok(200);
    boxd.call(Method::DELETE, "/v1/files/workspace/b.txt").send().await.ok(204);
    // Reads and failed requests add no entry.
    boxd.call(Method::GET, "/v1/files/workspace/b.txt").send().await.refused(404, "FILE_NOT_FOUND");
    boxd.call(Method::DELETE, "/v1/files/workspace/b.txt").send().await.refused(404, "FILE_NOT_FOUND");

    let first = fetch_activity(&boxd, "", 0, 0).await;
    let all: Vec<_> = first.items.iter().map(summary).collect();
    let long = &all[2].1;
    assert_eq!(long.len(), MAX_EVENT_TEXT_BYTES);
    let (a, b) = ("/workspace/a.txt", "/workspace/b.txt");
    assert_eq!(all, [("written", a), ("exec", "exit 3"), ("exec", long), ("written", a), ("removed", a), ("written", b), ("removed", b)]);
    let Action::Exec(end) = &first.items[1].action else { panic!() };
    assert_eq!((end.exit_code, end.timed_out), (Some(3), false));
    let ran = &first.items[1];
    assert_eq!((ran.principal.as_deref(), ran.session_id.as_deref(), ran.seq), (Some("ada"), Some("ssn_1"), 2));
    assert!(!serde_json::to_string(&first).unwrap().contains("hidden"));
    // Entries are kept until they are acknowledged; a number from another run acknowledges nothing.
    assert_eq!(fetch_activity(&boxd, "other", 7, 0).await.items.len(), 7);
    assert_eq!(fetch_activity(&boxd, &first.run_id, 6, 0).await.items.len(), 1);
}

#[tokio::test]
async fn a_client_that_disconnects_early_leaves_a_record_and_its_command_is_reported() {
    let boxd = TestBoxd::start();
    let leaving = boxd.post("/v1/exec", json!({ "command": "touch begun; sleep 1000" }).to_string()).send();
    tokio::select! {
        _ = leaving => panic!("it takes longer"),
        () = support::wait_for(|| boxd.host("/workspace/begun").exists()) => {}
    }
    let ended = fetch_activity(&boxd, "", 0, 30).await;
    let Action::Exec(end) = &ended.items[0].action else { panic!("{ended:?}") };
    assert_eq!((end.command.as_str(), end.exit_code), ("touch begun; sleep 1000", Some(137)));
    assert_eq!(ended.items[0].principal.as_deref(), Some("ada"));
    let fetched = claims(&boxd).await;
    let [left] = fetched.items.as_slice() else { panic!("{fetched:?}") };
    assert_eq!((left.route.as_str(), left.status, left.principal.as_deref()), ("/v1/exec", 499, Some("ada")));
    assert_eq!(left.target.as_deref(), Some("touch begun; sleep 1000"));
}

#[tokio::test]
async fn a_waiting_broker_is_answered_on_activity() {
    let boxd = TestBoxd::start();
    let (waited, ()) = tokio::join!(fetch_activity(&boxd, "", 0, 30), async {
        boxd.call(Method::PUT, "/v1/files/workspace/a.txt").body("hello").send().await.ok(201);
    });
    assert_eq!(waited.items.iter().map(summary).collect::<Vec<_>>(), [("written", "/workspace/a.txt")]);
}

async fn fetch_reports(boxd: &TestBoxd, query: &str) -> Reports {
    boxd.control(Method::GET, &format!("/control/reports?{query}")).send().await.ok(200).json()
}

#[tokio::test]
async fn one_request_fetches_and_acknowledges_claims_and_activities_each_by_its_cursor() {
    let boxd = TestBoxd::start();
    boxd.call(Method::PUT, "/v1/files/workspace/a.txt").body("hello").send().await.ok(201);
    boxd.call(Method::GET, "/v1/files/workspace/a.txt").send().await.ok(200);
    boxd.post("/v1/exec", json!({ "command": "true" }).to_string()).send().await.ok(200);
    let all = fetch_reports(&boxd, "claims=:0&activities=:0&wait_ms=30000").await;
    let (claims, activities) = (all.claims.unwrap(), all.activities.unwrap());
    let routes: Vec<_> = claims.items.iter().map(|c| (c.seq, c.method.as_str())).collect();
    assert_eq!(routes, [(1, "PUT"), (2, "GET"), (3, "POST")]);
    assert_eq!(activities.items.iter().map(summary).collect::<Vec<_>>(), [("written", "/workspace/a.txt"), ("exec", "true")]);

    // Only the kinds that the query names are acknowledged and returned. Fetches of older brokers see the same records.
    let rest = fetch_reports(&boxd, &format!("claims={}:2", claims.run_id)).await;
    assert_eq!(rest.claims.unwrap().items.iter().map(|c| c.seq).collect::<Vec<_>>(), [3]);
    assert!(rest.activities.is_none());
    let rest = fetch_reports(&boxd, &format!("activities={}:1", activities.run_id)).await;
    assert_eq!(rest.activities.unwrap().items.iter().map(summary).collect::<Vec<_>>(), [("exec", "true")]);
    assert!(rest.claims.is_none());
    assert_eq!((self::claims(&boxd).await.items.len(), fetch_activity(&boxd, "", 0, 0).await.items.len()), (1, 1));
    boxd.control(Method::GET, "/control/reports?claims=1").send().await.ok(400);
}

#[tokio::test]
async fn a_waiting_broker_is_answered_on_a_claim_only_if_it_asked_for_claims() {
    let boxd = TestBoxd::start();
    let read = async || boxd.call(Method::GET, "/v1/files/workspace").send().await;
    let (reports, _) = tokio::join!(fetch_reports(&boxd, "claims=:0&activities=:0&wait_ms=30000"), read());
    assert_eq!((reports.claims.unwrap().items.len(), reports.activities.unwrap().items.len()), (1, 0));
    let write = async {
        read().await;
        boxd.call(Method::PUT, "/v1/files/workspace/a.txt").body("hello").send().await.ok(201);
    };
    let (reports, ()) = tokio::join!(fetch_reports(&boxd, "activities=:0&wait_ms=30000"), write);
    assert_eq!(reports.activities.unwrap().items.iter().map(summary).collect::<Vec<_>>(), [("written", "/workspace/a.txt")]);
}
