//! The audit chain of a real broker that is killed at arbitrary moments.

use std::{process::Output, time::Duration};

use cobox_protocol::session::Mode;
use cobox_testkit::{SeededRng, TestBroker, negotiate};

fn cobox(broker: &TestBroker, args: &[&str]) -> Output {
    broker.cobox().args(args).output().expect("cobox runs")
}

fn output_text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

#[tokio::test]
async fn a_killed_broker_leaves_an_unbroken_audit_chain_and_a_truncated_chain_is_detected() {
    let mut broker = TestBroker::start().await;
    let mut rng = SeededRng::new(4);
    for round in 0..4 {
        let client = broker.client();
        let load: Vec<_> = (0..16)
            .map(|n| {
                let client = client.clone();
                // Until the broker is killed.
                tokio::spawn(async move { while client.negotiate(&negotiate(&format!("t{}", n % 2), Mode::Ensure)).await.is_ok() {} })
            })
            .collect();
        // At a random time, so that each round crashes at a different point.
        tokio::time::sleep(Duration::from_millis(200 + rng.below(400))).await;
        broker.kill();
        load.iter().for_each(|task| task.abort());
        broker.launch().await;
        let verified = cobox(&broker, &["audit", "verify"]);
        assert!(verified.status.success(), "round {round}: {}", output_text(&verified));
    }
    let head = cobox(&broker, &["audit", "head"]);
    let head = String::from_utf8(head.stdout).unwrap();
    let exported = cobox(&broker, &["audit", "export"]);
    let lines: Vec<serde_json::Value> =
        String::from_utf8(exported.stdout).unwrap().lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    let numbers: Vec<u64> = lines.iter().map(|l| l["number"].as_u64().unwrap()).collect();
    assert_eq!(numbers, (1..=numbers.len() as u64).collect::<Vec<_>>());
    assert!(lines.iter().any(|l| l["record"]["action"] == "token.issued" && l["record"]["jti"].is_string()));
    let verified = cobox(&broker, &["audit", "verify", "--head", &head]);
    assert!(verified.status.success(), "{}", output_text(&verified));

    // A head with that number but another hash, and a head that is missing.
    let (start, hash) = head.trim().rsplit_once(':').unwrap();
    let other = format!("{start}:{}", hash.chars().rev().collect::<String>());
    let broken = cobox(&broker, &["audit", "verify", "--head", &other]);
    assert!(broken.status.code() == Some(1) && output_text(&broken).contains("the chain was rewritten"), "{}", output_text(&broken));
    let (writer, number) = start.rsplit_once(':').unwrap();
    let later = format!("{writer}:{}:{hash}", number.parse::<u64>().unwrap() + 1_000_000);
    let broken = cobox(&broker, &["audit", "verify", "--head", &later]);
    assert!(broken.status.code() == Some(1) && output_text(&broken).contains("later records were removed"), "{}", output_text(&broken));
    let nonsense = cobox(&broker, &["audit", "verify", "--head", "nonsense"]);
    assert!(!nonsense.status.success() && output_text(&nonsense).contains("WRITER:NUMBER:HASH"), "{}", output_text(&nonsense));
}
