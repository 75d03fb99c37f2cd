//! Benchmark of ensuring and refreshing a session, compared with the raw speed of the database, and with up to a
//! million sessions. Results are reported (`make bench-broker`), never asserted, because machines differ.

use std::{
    fmt::Write as _,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use axum::body::Bytes;
use cobox_broker::RateLimits;
use cobox_protocol::{RequestId, SandboxId, SessionId};
use cobox_testkit::TestDatabase;
use futures_util::future::join_all;
use http::{Method, Request};
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1::SendRequest;
use hyper_util::rt::TokioIo;
use serde_json::json;
use sqlx::{AnyConnection, Connection, Executor};
use tokio::net::TcpStream;

use crate::harness::{Client, TestBroker, World, session_path};

const CONNECTIONS: usize = 64;
/// Number of requests measured sequentially, and number per connection when measured concurrently.
const ALONE: usize = 400;
const EACH: usize = 60;
/// Rounds of the concurrent measurement, alternating with the raw database loop.
const TURNS: usize = 5;
const FEW: usize = 1_000;
const MANY: usize = 1_000_000;

/// A request that is sent repeatedly.
#[derive(Clone)]
struct Call {
    method: Method,
    path: String,
    body: String,
}

/// A persistent connection.
struct Line {
    sender: SendRequest<Full<Bytes>>,
    key: String,
}

impl Line {
    async fn open(client: &Client) -> Self {
        let stream = TcpStream::connect(client.addr).await.unwrap();
        stream.set_nodelay(true).unwrap();
        let (sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        Self { sender, key: format!("Bearer {}", client.key.as_ref().unwrap().expose()) }
    }

    async fn call(&mut self, call: &Call) -> Duration {
        let request =
            Request::builder().method(call.method.clone()).uri(&call.path).header("host", "broker").header("authorization", &self.key);
        let request = request.body(Full::new(Bytes::from(call.body.clone()))).unwrap();
        self.sender.ready().await.unwrap();
        let start = Instant::now();
        let answer = self.sender.send_request(request).await.unwrap();
        assert!(answer.status().is_success(), "{}", answer.status());
        answer.into_body().collect().await.unwrap();
        start.elapsed()
    }
}

struct Spread {
    p50: Duration,
    p99: Duration,
}

fn spread(mut times: Vec<Duration>) -> Spread {
    times.sort();
    Spread { p50: times[times.len() / 2], p99: times[times.len() * 99 / 100] }
}

/// Requests and commits of one client, interleaved so that other load on the machine affects all of them alike.
struct SingleClientTimes {
    healthz: Spread,
    commit: Spread,
    ensure: Spread,
    refresh: Spread,
}

async fn measure_single_client(client: &Client, db: &mut AnyConnection, ensure: &Call, refresh: &Call) -> SingleClientTimes {
    let healthz = Call { method: Method::GET, path: "/healthz".into(), body: String::new() };
    let mut line = Line::open(client).await;
    let mut times: [Vec<Duration>; 4] = Default::default();
    for n in 0..ALONE + ALONE / 10 {
        let took = [line.call(&healthz).await, commit(db).await, line.call(ensure).await, line.call(refresh).await];
        // The first ones are warm-up.
        if n >= ALONE / 10 {
            times.iter_mut().zip(took).for_each(|(times, took)| times.push(took));
        }
    }
    let [healthz, commit, ensure, refresh] = times.map(spread);
    SingleClientTimes { healthz, commit, ensure, refresh }
}

/// Requests per second over many connections, each with its own call.
async fn measure_throughput(client: &Client, calls: &[Call]) -> f64 {
    let mut lines = join_all(calls.iter().map(|_| Line::open(client))).await;
    let start = Instant::now();
    join_all(lines.iter_mut().zip(calls).map(|(line, call)| async move {
        for _ in 0..EACH {
            line.call(call).await;
        }
    }))
    .await;
    (calls.len() * EACH) as f64 / start.elapsed().as_secs_f64()
}

/// Commits a row with one short column: the lower bound for any response time.
async fn commit(db: &mut AnyConnection) -> Duration {
    let start = Instant::now();
    sqlx::query("INSERT INTO bare (at, words) VALUES (1, 'as long as the detail of an audit record usually is')")
        .execute(db)
        .await
        .unwrap();
    start.elapsed()
}

/// Measures the raw database without a broker: records per second when each of 64 callers waits for its own record and
/// they share commits. The records have the size of an issued token's and use the same table and indexes.
async fn bare_loop(mut db: AnyConnection, from: usize) -> (AnyConnection, f64) {
    const INSERT: &str =
        "INSERT INTO audit (at, workspace_id, action, request_id, principal, actor, thread, session_id, sandbox_id, jti, detail,
                                             writer, number, hash) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14)";
    let (rows, mut queue) = tokio::sync::mpsc::channel::<tokio::sync::oneshot::Sender<()>>(CONNECTIONS);
    let writing = tokio::spawn(async move {
        let (mut waiting, mut number) = (Vec::new(), from as i64);
        while queue.recv_many(&mut waiting, CONNECTIONS).await > 0 {
            let mut tx = db.begin().await.unwrap();
            for _ in &waiting {
                number += 1;
                let query = sqlx::query(INSERT).bind(1_800_000_000_i64).bind("measured").bind("token.issued");
                let query = query.bind(RequestId::new().to_string()).bind("ann").bind("human").bind("measured 1");
                let query = query.bind(SessionId::new().to_string()).bind(SandboxId::new().to_string()).bind(RequestId::new().to_string());
                let query = query.bind("exec fs_read fs_write shell shell_observe").bind("bare loop").bind(number).bind(&[7u8; 32][..]);
                query.execute(&mut *tx).await.unwrap();
            }
            tx.commit().await.unwrap();
            waiting.drain(..).for_each(|done| done.send(()).unwrap());
        }
        db
    });
    let start = Instant::now();
    join_all((0..CONNECTIONS).map(|_| async {
        for _ in 0..EACH {
            let (done, is_done) = tokio::sync::oneshot::channel();
            rows.send(done).await.unwrap();
            is_done.await.unwrap();
        }
    }))
    .await;
    let rate = (CONNECTIONS * EACH) as f64 / start.elapsed().as_secs_f64();
    drop(rows);
    (writing.await.unwrap(), rate)
}

fn median(mut rates: Vec<f64>) -> f64 {
    rates.sort_by(f64::total_cmp);
    rates[rates.len() / 2]
}

struct Measured {
    sessions: usize,
    alone: SingleClientTimes,
    /// Requests per second with many connections.
    ensures: f64,
    refreshes: f64,
    bare: f64,
    round: Duration,
}

async fn measure(
    sessions: usize,
    broker: &TestBroker,
    client: &Client,
    mut db: AnyConnection,
    ensures: &[Call],
    refreshes: &[Call],
) -> (AnyConnection, Measured) {
    let mut round = Duration::ZERO;
    for _ in 0..3 {
        let start = Instant::now();
        broker.tick().await;
        round = round.max(start.elapsed());
    }
    let alone = measure_single_client(client, &mut db, &ensures[0], &refreshes[0]).await;
    let mut rates: [Vec<f64>; 3] = Default::default();
    for turn in 0..TURNS {
        rates[0].push(measure_throughput(client, ensures).await);
        rates[1].push(measure_throughput(client, refreshes).await);
        let bare;
        (db, bare) = bare_loop(db, sessions + turn * CONNECTIONS * EACH).await;
        rates[2].push(bare);
    }
    let [ensures, refreshes, bare] = rates.map(median);
    (db, Measured { sessions, alone, ensures, refreshes, bare, round })
}

/// Inserts suspended sandboxes of this node, each with a session and a record, spread over a thousand workspaces.
fn filling(is_sqlite: bool, node: &str, now: i64, from: usize, to: usize) -> Vec<String> {
    let (numbers, padded) = if is_sqlite {
        (format!("WITH RECURSIVE n(i) AS (SELECT {from} UNION ALL SELECT i + 1 FROM n WHERE i < {}) ", to - 1), "printf('%026d', i)")
    } else {
        (format!("WITH n(i) AS (SELECT generate_series({from}, {})) ", to - 1), "lpad(i::text, 26, '0')")
    };
    let insert = |table: &str, columns: &str, values: &str| {
        let rows = format!("SELECT {} FROM n", values.replace("{id}", padded).replace("{now}", &now.to_string()).replace("{node}", node));
        if is_sqlite {
            format!("INSERT INTO {table} ({columns}) {numbers}{rows}")
        } else {
            format!("{numbers}INSERT INTO {table} ({columns}) {rows}")
        }
    };
    let mut filling = vec![
        insert(
            "sandboxes",
            "id, workspace_id, owner, access, provider, node_id, generation, state, created_at, last_active_at, suspended_at",
            "'sb_' || {id}, 'w' || (i % 1000), 'ann', 'workspace', 'fake', '{node}', 1, 'suspended', {now}, {now}, {now}",
        ),
        insert(
            "sessions",
            "id, workspace_id, scope_type, scope_id, sandbox_id, owner, access, created_at",
            "'ssn_' || {id}, 'w' || (i % 1000), 'thread', 'thread ' || i, 'sb_' || {id}, 'ann', 'workspace', {now}",
        ),
        insert(
            "audit",
            "at, workspace_id, action, session_id, sandbox_id",
            "{now}, 'w' || (i % 1000), 'session.created', 'ssn_' || {id}, 'sb_' || {id}",
        ),
    ];
    if from == 0 {
        // The first thousand rows get one workspace each.
        filling.insert(0, insert("workspaces", "id, created_at", "'w' || i, {now}"));
    }
    filling
}

async fn bench(name: &str, mut world: World, url: String) {
    // A single principal sends requests as fast as it can.
    world.config.rate_limits = RateLimits { requests_per_second: 0, upkeep_per_second: 0, ..RateLimits::default() };
    let is_sqlite = url.starts_with("sqlite");
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let is_done = Arc::new(AtomicBool::new(false));
    let ticking = tokio::spawn({
        let (clock, is_done) = (world.clock.clone(), is_done.clone());
        async move {
            while !is_done.load(Ordering::SeqCst) {
                tokio::time::sleep(Duration::from_secs(1)).await;
                clock.advance(1);
            }
        }
    });
    let (mut ensures, mut refreshes) = (Vec::new(), Vec::new());
    for n in 0..CONNECTIONS {
        let thread = format!("measured {n}");
        let made = ann.ensure(&thread).await;
        let body = json!({ "thread_id": thread, "mode": "ensure" }).to_string();
        ensures.push(Call { method: Method::POST, path: "/v1/sandbox/sessions".into(), body });
        refreshes.push(Call { method: Method::POST, path: format!("{}/refresh", session_path(&made)), body: "{}".into() });
    }
    sqlx::any::install_default_drivers();
    let mut db = AnyConnection::connect(&url).await.unwrap();
    if is_sqlite {
        db.execute("PRAGMA busy_timeout = 60000; PRAGMA synchronous = FULL").await.unwrap();
    }
    db.execute("CREATE TABLE bare (at BIGINT, words TEXT)").await.unwrap();
    let node = std::fs::read_to_string(world.config.data_dir.join("node.id")).unwrap();
    let now = cobox_protocol::Timestamp::now().unix();
    let (mut results, mut from) = (Vec::new(), 0);
    for size in [FEW, MANY] {
        for sql in filling(is_sqlite, node.trim(), now, from, size) {
            db.execute(sqlx::AssertSqlSafe(sql)).await.unwrap();
        }
        if !is_sqlite {
            db.execute("VACUUM ANALYZE").await.unwrap();
        }
        from = size;
        let result;
        (db, result) = measure(size, &broker, &ann, db, &ensures, &refreshes).await;
        results.push(result);
    }
    is_done.store(true, Ordering::SeqCst);
    ticking.await.unwrap();
    report(name, &results);
}

fn report(name: &str, results: &[Measured]) {
    let ms = |d: Duration| format!("{:.2} ms", d.as_secs_f64() * 1e3);
    let mut text = format!(
        "\n## {name}\nOne caller: `healthz`, a commit of one short row, `ensure` and `refresh` in turns. 64 callers: in turns with a bare loop in which 64 share commits of the same records.\n\n"
    );
    text += "| sessions | `healthz` p50 | commit p50 | `ensure` p50 | p99 | `refresh` p50 | p99 | 64 callers: `ensure` | `refresh` | bare loop | a round of the reaper |\n|---|---|---|---|---|---|---|---|---|---|---|\n";
    for r in results {
        let a = &r.alone;
        let times = [a.healthz.p50, a.commit.p50, a.ensure.p50, a.ensure.p99, a.refresh.p50, a.refresh.p99].map(ms).join(" | ");
        writeln!(text, "| {} | {times} | {:.0}/s | {:.0}/s | {:.0}/s | {} |", r.sessions, r.ensures, r.refreshes, r.bare, ms(r.round))
            .unwrap();
    }
    let (few, many) = (&results[0], &results[1]);
    let times = |d: Duration, by: Duration| d.as_secs_f64() / by.as_secs_f64();
    text += "\n| promise | number | measured |\n|---|---|---|\n";
    let mut promise = |what: &str, number: &str, measured: String, is_kept: bool| {
        writeln!(text, "| {what} | {number} | {measured}{} |", if is_kept { "" } else { ", **missed**" }).unwrap();
    };
    for (name, of, rate) in [
        ("ensure", (|a| a.ensure.p50) as fn(&SingleClientTimes) -> Duration, few.ensures / few.bare),
        ("refresh", |a| a.refresh.p50, few.refreshes / few.bare),
    ] {
        let (took, allowed) = (of(&few.alone), few.alone.healthz.p50 + 2 * few.alone.commit.p50);
        promise(&format!("`{name}` p50, one connection"), &format!("≤ `healthz` + 2 commits = {}", ms(allowed)), ms(took), took <= allowed);
        promise(&format!("`{name}`, 64 connections"), "≥ 0.5 × the bare loop", format!("{rate:.2} ×"), rate >= 0.5);
        let grown = times(of(&many.alone), took);
        promise(&format!("`{name}` p50 at a million sessions"), "≤ 1.5 × at a thousand", format!("{grown:.2} ×"), grown <= 1.5);
    }
    promise("a round of the reaper at a million", "< 1 s", ms(many.round), many.round < Duration::from_secs(1));
    #[allow(clippy::print_stdout, reason = "a benchmark prints its results")]
    {
        println!("{text}");
    }
    if let Some(path) = std::env::var_os("COBOX_BENCH_RESULTS") {
        use std::io::Write;
        std::fs::File::options().create(true).append(true).open(path).unwrap().write_all(text.as_bytes()).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "minutes; run by make bench-broker"]
async fn bench_sessions_on_sqlite() {
    let world = World::new();
    let url = format!("sqlite://{}", world.config.data_dir.join("broker.db").display());
    bench("SQLite", world, url).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "minutes; run by make bench-broker"]
async fn bench_sessions_on_postgres() {
    let database = TestDatabase::new().await;
    bench("PostgreSQL", World::cluster(&database, 1).remove(0), database.url()).await;
}
