//! A broker in a team setup: TLS with a certificate from its own authority, and logs in JSON.

use std::{collections::HashSet, process::Command};

use cobox_client::Client;
use cobox_testkit::{BrokerOptions, TestAuthority, TestBroker, ensure, sh};
use serde_json::Value;

fn options(authority: &TestAuthority) -> BrokerOptions {
    let signed = authority.sign("broker");
    let config = format!("[tls]\ncert = {:?}\nkey = {:?}\n", signed.cert, signed.key);
    BrokerOptions { config, is_serving: true, ..BrokerOptions::default() }
}

#[tokio::test]
async fn commands_streams_and_the_command_line_work_over_tls() {
    let authority = TestAuthority::new();
    let broker = TestBroker::start_with(options(&authority)).await;
    assert!(broker.url().starts_with("https://127.0.0.1:"), "{}", broker.url());
    let client = Client::trusting(broker.url(), broker.key().clone(), &authority.pem()).unwrap();
    let session = ensure(&client, "demo").await;
    assert!(session.info().sandbox.ws_base_url.starts_with("wss://"));
    assert_eq!(sh(session.dataplane(), "echo over TLS").await.stdout, "over TLS\n");

    // Exec uses a WebSocket.
    let exec = ["exec", "-t", "demo", "--", "sh", "-c", "head -c 3000000 /dev/zero | tr '\\0' x"];
    let trusting = run(broker.cobox().arg("--ca-file").arg(authority.certificate()).args(exec)).await;
    assert!(trusting.0 && trusting.1.len() == 3_000_000, "{} bytes, {}", trusting.1.len(), trusting.2);
    let by_environment = run(broker.cobox().env("COBOX_CA_FILE", authority.certificate()).args(["session", "list"])).await;
    assert!(by_environment.0 && by_environment.1.contains("demo"), "{}", by_environment.2);
    let (worked, _, why) = run(broker.cobox().args(["session", "list"])).await;
    assert!(!worked && why.contains("--ca-file"), "{why}");
}

async fn run(command: &mut Command) -> (bool, String, String) {
    let mut command = std::mem::replace(command, Command::new("true"));
    let output = tokio::task::spawn_blocking(move || command.output().expect("cobox runs")).await.unwrap();
    (output.status.success(), String::from_utf8_lossy(&output.stdout).into(), String::from_utf8_lossy(&output.stderr).into())
}

#[tokio::test]
async fn every_request_is_logged_as_one_json_line_without_secrets() {
    let broker = TestBroker::start_with(BrokerOptions { is_serving: true, ..BrokerOptions::default() }).await;
    let client = broker.client();
    let session = ensure(&client, "a-thread").await;
    sh(session.dataplane(), "true").await;
    let get = async |path: &str| {
        let request = reqwest::Client::new().get(format!("{}{path}", broker.url())).bearer_auth(broker.key().expose());
        let answer = request.send().await.unwrap();
        answer.headers()["x-request-id"].to_str().unwrap().to_owned()
    };
    let id = get("/v1/sandbox/sessions?limit=1&cursor=a-query").await;
    let lost = get(&format!("/elsewhere/{}?x=a-query", session.info().token.expose())).await;
    let log = broker.log();
    let lines: Vec<Value> = log.lines().map(|l| serde_json::from_str(l).unwrap_or_else(|e| panic!("{e}: {l}"))).collect();
    let requests: Vec<&Value> = lines.iter().filter(|l| l["message"] == "request").collect();
    let ids: HashSet<&str> = requests.iter().map(|l| l["request_id"].as_str().unwrap()).collect();
    assert_eq!(ids.len(), requests.len(), "one line a request");
    let line = |id: &str| *requests.iter().find(|l| l["request_id"] == id).unwrap();
    let refused = line(&id);
    assert_eq!((&refused["route"], &refused["status"], &refused["method"]), (&"/v1/sandbox/sessions".into(), &400.into(), &"GET".into()));
    assert_eq!(refused["code"], "INVALID_REQUEST");
    assert!(!refused["principal"].as_str().unwrap().is_empty() && refused["took_ms"].is_u64());
    assert_eq!(line(&lost)["status"], 404);
    let passed = requests.iter().find(|l| l["route"] == "/dp/{*rest}").expect("the exec through the gateway");
    assert!(!passed["principal"].as_str().unwrap().is_empty());
    for secret in ["a-query", "a-thread", broker.key().expose(), session.info().token.expose()] {
        assert!(!log.contains(secret), "{log}");
    }
}
