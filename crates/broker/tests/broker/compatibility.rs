//! Snapshots of names that existing databases, dashboards and clients depend on. A snapshot changes only with a
//! deliberate addition.

use std::{
    collections::BTreeSet,
    fmt::Write as _,
    path::{Path, PathBuf},
};

use cobox_broker::{
    audit_hash::{Content, NOTHING, link, seal},
    store::sqlite,
};
use cobox_protocol::{Timestamp, capability::Capability, session::State};
use serde_json::Value;
use sha2::{Digest, Sha256};
use sqlx::{AnyConnection, Connection};

use crate::{
    audit_chain::verify,
    harness::{Client, NEWEST, World},
};

/// Allowed first parts of an audit action.
const AUDIT_SUBJECTS: [&str; 17] = [
    "audit",
    "dataplane",
    "key",
    "master_key",
    "policy",
    "pool",
    "principal",
    "sandbox",
    "session",
    "snapshot",
    "template",
    "thread",
    "token",
    "tokens",
    "volume",
    "webhook",
    "workspace",
];

/// Strings of the same form that are not audit actions.
const NO_ACTIONS: [&str; 3] = ["master_key.", "policy.toml", "thread_authority."];

fn crate_dir() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn files_beneath(dir: &Path, extension: &str) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.append(&mut files_beneath(&path, extension));
        } else if path.extension().is_some_and(|e| e == extension) {
            found.insert(path);
        }
    }
    found
}

fn check(name: &str, text: &str) {
    let mut settings = insta::Settings::clone_current();
    settings.set_snapshot_path("frozen");
    settings.set_prepend_module_to_snapshot(false);
    settings.set_omit_expression(true);
    settings.bind(|| insta::assert_snapshot!(name, text.trim_end()));
}

/// sqlx compares a hash of each applied migration with its file: even a changed comment makes every existing database
/// fail to open.
#[test]
fn released_migrations_are_unchanged() {
    let mut lines = String::new();
    for path in files_beneath(&crate_dir().join("migrations"), "sql") {
        let name = path.strip_prefix(crate_dir()).unwrap().display();
        writeln!(lines, "{}  {name}", hex::encode(Sha256::digest(std::fs::read(&path).unwrap()))).unwrap();
    }
    check("migrations", &lines);
}

#[tokio::test]
async fn metrics_keep_their_names_and_labels() {
    let mut world = World::new();
    world.config.metrics.public = true;
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    ann.ensure("t").await;
    ann.get("/no/such/route").await.error(404);
    let anyone = Client { addr: broker.addr, key: None };
    let text = String::from_utf8(anyone.get("/metrics").await.bytes.to_vec()).unwrap();
    let mut names = BTreeSet::new();
    for line in text.lines() {
        if let Some(kind) = line.strip_prefix("# TYPE ") {
            names.insert(kind.to_owned());
        } else if let Some((series, _)) = line.split_once(' ').filter(|_| !line.starts_with('#')) {
            let (name, labels) = series.split_once('{').unwrap_or((series, ""));
            let labels: Vec<_> = labels.split("\",").filter_map(|label| Some(label.split_once('=')?.0)).collect();
            names.insert(format!("{name}{{{}}}", labels.join(",")));
        }
    }
    check("metrics", &names.into_iter().collect::<Vec<_>>().join("\n"));
}

/// Audit records are hashed together with their actions, and operators search for actions.
#[test]
fn audit_actions_keep_their_names() {
    let mut actions = BTreeSet::new();
    for path in files_beneath(&crate_dir().join("src"), "rs") {
        let source = std::fs::read_to_string(path).unwrap();
        for literal in source.split('"').skip(1).step_by(2) {
            let is_word = |word: &str| !word.is_empty() && word.bytes().all(|b| b.is_ascii_lowercase() || b == b'_');
            let Some((subject, verb)) = literal.split_once('.') else { continue };
            let is_other = NO_ACTIONS.iter().any(|other| literal.starts_with(other)) && literal != "master_key.rotated";
            if AUDIT_SUBJECTS.contains(&subject) && is_word(verb) && !is_other {
                actions.insert(literal.to_owned());
            }
        }
    }
    check("audit_actions", &actions.into_iter().collect::<Vec<_>>().join("\n"));
}

#[test]
fn audit_hashes_are_computed_as_before() {
    let content = Content {
        at: Timestamp::from_unix(1_700_000_000),
        workspace: "default",
        action: "token.issued",
        request_id: Some("req_1"),
        principal: Some("ann"),
        actor: Some("human"),
        thread: None,
        session: Some("ssn_1"),
        sandbox: Some("sb_1"),
        jti: Some("tok_1"),
        detail: Some(""),
    };
    let digest = content.digest();
    let first = link("node_a", 1, &NOTHING, &digest);
    let sealed = seal(&[5; 32], "node_a", 1, &first);
    check("audit_chain", &format!("digest {}\nlink {}\nseal {}", hex::encode(digest), hex::encode(first), hex::encode(sealed)));
}

/// Removes the prose of an OpenAPI document.
fn without_prose(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            // `description` is also the name of a field, whose value is a schema.
            fields.retain(|name, value| !(matches!(name.as_str(), "description" | "summary") && value.is_string()));
            fields.values_mut().for_each(without_prose);
        }
        Value::Array(items) => items.iter_mut().for_each(without_prose),
        _ => {}
    }
}

#[test]
fn openapi_documents_change_only_in_their_prose() {
    let mut lines = String::new();
    for name in ["boxd", "broker"] {
        let text = std::fs::read_to_string(crate_dir().join(format!("../../openapi/{name}.json"))).unwrap();
        let mut document: Value = serde_json::from_str(&text).unwrap();
        without_prose(&mut document);
        // A digest is enough: the documents themselves are checked in and show the differences.
        writeln!(lines, "{}  {name}.json", hex::encode(Sha256::digest(document.to_string()))).unwrap();
    }
    check("openapi", &lines);
}

/// The head of the audit chain in that database, as its broker printed it.
const OLDER_HEAD: &str = "node_01m7r5ysb8wtna403rvtkwyrmw:15:394c9cada89175981c04ac0d0d388727bbf6203f437a6fee568a6b49763aa03e";

/// The database is a text dump from build 3a84617, whose broker was killed with one sandbox running.
#[tokio::test]
async fn a_database_of_an_older_build_is_read_completely() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("broker.db");
    sqlx::any::install_default_drivers();
    let mut older = AnyConnection::connect(&format!("sqlite://{}?mode=rwc", path.display())).await.unwrap();
    sqlx::raw_sql(include_str!("frozen/older_database.sql")).execute(&mut older).await.unwrap();
    older.close().await.unwrap();

    let store = sqlite::open(&path).await.expect("missing migrations are applied");
    assert_eq!(verify(&store, &[OLDER_HEAD.parse().unwrap()]).await, [], "the audit chain is intact");
    let session =
        store.session(&"ssn_01m7r5ysndrzq0k916f2e3rd4d".parse().unwrap()).await.unwrap().expect("the session of the older database");
    let id = session.session.id.clone();
    assert_eq!((session.session.scope().id.as_str(), session.sandbox.state), ("t", State::Active));
    assert_eq!(store.session_tags(&[&id]).await.unwrap()[id.as_str()].get("team").map(String::as_str), Some("blue"));
    assert_eq!(
        store.share_of(&id, "ann").await.unwrap().expect("the share of the older database").capabilities.iter().collect::<Vec<_>>(),
        [Capability::ShellObserve]
    );
    let keys = store.keys(&NEWEST).await.unwrap();
    assert_eq!(keys.iter().map(|key| key.principal.name.as_str()).collect::<BTreeSet<_>>(), BTreeSet::from(["agent", "ann", "operator"]));
    assert!(!store.events(&session.sandbox.id, &id, 0, 100).await.unwrap().events.is_empty());
}
