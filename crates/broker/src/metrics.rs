//! The broker's metrics in Prometheus' text format. Labels are route templates, methods, statuses and states, never
//! values that a caller chose, so that the number of time series is limited.

use std::{
    collections::{BTreeMap, HashMap},
    fmt::{self, Write},
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

use cobox_protocol::ErrorCode;
use http::{Method, StatusCode};
use parking_lot::Mutex;

use crate::store::WorkspaceTotals;

/// Upper bounds of a histogram's buckets, in microseconds: from a cached read to a request that its client has long
/// given up.
const BUCKETS_US: [u64; 14] =
    [100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 1_000_000, 5_000_000, 30_000_000];

/// A histogram of durations.
#[derive(Default)]
pub struct Histogram {
    buckets: [AtomicU64; BUCKETS_US.len()],
    count: AtomicU64,
    sum_us: AtomicU64,
}

impl Histogram {
    pub fn add(&self, took: Duration) {
        let us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        if let Some(bucket) = BUCKETS_US.iter().position(|end| us <= *end) {
            self.buckets[bucket].fetch_add(1, Relaxed);
        }
        self.count.fetch_add(1, Relaxed);
        self.sum_us.fetch_add(us, Relaxed);
    }

    fn write(&self, out: &mut String, name: &str, labels: &str) -> fmt::Result {
        let comma = if labels.is_empty() { "" } else { "," };
        let mut below = 0;
        for (end, bucket) in BUCKETS_US.iter().zip(&self.buckets) {
            below += bucket.load(Relaxed);
            writeln!(out, "{name}_bucket{{{labels}{comma}le=\"{}\"}} {below}", seconds(*end))?;
        }
        // At least the sum of the buckets, because the counters are not read atomically.
        let count = self.count.load(Relaxed).max(below);
        writeln!(out, "{name}_bucket{{{labels}{comma}le=\"+Inf\"}} {count}")?;
        let braces = if labels.is_empty() { String::new() } else { format!("{{{labels}}}") };
        writeln!(out, "{name}_sum{braces} {}", seconds(self.sum_us.load(Relaxed)))?;
        writeln!(out, "{name}_count{braces} {count}")
    }
}

fn seconds(us: u64) -> f64 {
    us as f64 / 1e6
}

/// Metrics of one route.
#[derive(Default)]
struct Route {
    counts: BTreeMap<(&'static str, u16), u64>,
    took: Histogram,
}

impl Route {
    fn add(&mut self, answered: &AnsweredRequest<'_>) {
        *self.counts.entry((method_word(answered.method), status_word(answered.status))).or_default() += 1;
        self.took.add(answered.took);
    }
}

/// Metrics of one kind of sandbox start.
#[derive(Default)]
pub struct StartMetrics {
    pub took: Histogram,
    pub failed: AtomicU64,
}

#[derive(Default)]
pub struct Metrics {
    routes: Mutex<HashMap<String, Route>>,
    /// Requests that the gateway forwarded, by kind of operation.
    operations: Mutex<BTreeMap<&'static str, Route>>,
    errors: Mutex<BTreeMap<&'static str, u64>>,
    pub created: StartMetrics,
    pub resumed: StartMetrics,
    pub connections: AtomicU64,
    pub connections_open: AtomicU64,
    pub bytes_in: AtomicU64,
    pub bytes_out: AtomicU64,
    pub handshakes_failed: AtomicU64,
    pub rate_limited: AtomicU64,
}

/// Values that are looked up at scrape time rather than counted.
#[derive(Default)]
pub struct Gauges<'a> {
    pub tokens_issued: u64,
    pub commits: Option<&'a Histogram>,
    /// True if the store currently accepts changes.
    pub is_store_up: bool,
    /// Number of audit records that could not be written.
    pub audit_lost: u64,
    /// Sandboxes of this node that have no record.
    pub quarantined: crate::domain::lifecycle::quarantine::QuarantinedCounts,
    pub peers: crate::domain::cluster::nodes::PeerCounts,
    pub clock_skew: Duration,
    /// How long requests waited for a database connection.
    pub store_waits: Option<&'a Histogram>,
    /// Space on the filesystem of the data directory.
    pub disk: Option<DiskSpace>,
    pub workspace_limits: WorkspaceTotals,
    /// Start of the process, in Unix seconds.
    pub started_at: i64,
    /// `None` if the store could not be queried.
    pub counts: Option<crate::store::Counts>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskSpace {
    pub total_bytes: u64,
    pub available_bytes: u64,
}

/// One answered request, for the counters.
pub struct AnsweredRequest<'a> {
    /// A template of the router, which limits the number of values.
    pub route: Option<&'a str>,
    pub method: &'a Method,
    pub status: StatusCode,
    pub error: Option<ErrorCode>,
    /// The template of the sandbox's own route, if the request went to a sandbox.
    pub dataplane: Option<&'static str>,
    pub took: Duration,
}

/// Set by `make build`. Not read by a build script: a build must be possible without git and give the same result again.
const COMMIT: &str = match option_env!("COBOX_COMMIT") {
    Some(commit) if !commit.is_empty() => commit,
    _ => "unknown",
};

/// Label of requests without a matching route.
const NO_ROUTE: &str = "none";

impl Metrics {
    pub fn request(&self, answered: &AnsweredRequest<'_>) {
        let route = answered.route.unwrap_or(NO_ROUTE);
        {
            let mut routes = self.routes.lock();
            if !routes.contains_key(route) {
                routes.insert(route.to_owned(), Route::default());
            }
            if let Some(entry) = routes.get_mut(route) {
                entry.add(answered);
            }
        }
        if let Some(template) = answered.dataplane {
            let mut operations = self.operations.lock();
            operations.entry(operation(template)).or_default().add(answered);
        }
        if let Some(code) = answered.error {
            *self.errors.lock().entry(code.as_str()).or_default() += 1;
        }
    }

    pub fn text(&self, gauges: &Gauges) -> String {
        let mut out = String::with_capacity(16 * 1024);
        // Writing to a string doesn't fail.
        let _ = self.write(&mut out, gauges);
        out
    }

    fn write(&self, out: &mut String, gauges: &Gauges) -> fmt::Result {
        let routes = self.routes.lock();
        let sorted: BTreeMap<_, _> = routes.iter().collect();
        head(out, "cobox_requests_total", "counter", "Requests answered.")?;
        for (route, entry) in &sorted {
            for ((method, status), count) in &entry.counts {
                writeln!(out, "cobox_requests_total{{route=\"{route}\",method=\"{method}\",status=\"{status}\"}} {count}")?;
            }
        }
        head(out, "cobox_request_duration_seconds", "histogram", "Time until the head of the response; streams continue after it.")?;
        for (route, entry) in &sorted {
            entry.took.write(out, "cobox_request_duration_seconds", &format!("route=\"{route}\""))?;
        }
        drop(sorted);
        drop(routes);
        self.write_operations(out)?;
        for (name, about, value) in [
            ("cobox_connections_total", "Client connections accepted.", &self.connections),
            ("cobox_tls_handshakes_failed_total", "Connections whose TLS handshake failed.", &self.handshakes_failed),
            ("cobox_rate_limited_total", "Requests refused by a rate limit.", &self.rate_limited),
        ] {
            head(out, name, "counter", about)?;
            writeln!(out, "{name} {}", value.load(Relaxed))?;
        }
        head(out, "cobox_connections_open", "gauge", "Open client connections, including WebSockets.")?;
        writeln!(out, "cobox_connections_open {}", self.connections_open.load(Relaxed))?;
        head(out, "cobox_connection_bytes_total", "counter", "Bytes from and to clients, including the gateway's traffic.")?;
        for (direction, bytes) in [("in", &self.bytes_in), ("out", &self.bytes_out)] {
            writeln!(out, "cobox_connection_bytes_total{{direction=\"{direction}\"}} {}", bytes.load(Relaxed))?;
        }
        head(out, "cobox_tokens_issued_total", "counter", "Tokens issued by this broker.")?;
        writeln!(out, "cobox_tokens_issued_total {}", gauges.tokens_issued)?;
        if let Some(commits) = gauges.commits {
            head(out, "cobox_store_commit_duration_seconds", "histogram", "Duration of database commits.")?;
            commits.write(out, "cobox_store_commit_duration_seconds", "")?;
        }
        let quarantined = gauges.quarantined;
        for (name, about, count) in [
            ("cobox_quarantined_sandboxes", "Sandboxes of this broker without a record in its database.", quarantined.sandboxes),
            ("cobox_quarantined_snapshots", "Snapshots of this broker without a record in its database.", quarantined.snapshots),
            ("cobox_quarantined_volumes", "Volumes of this broker without a record in its database.", quarantined.volumes),
        ] {
            head(out, name, "gauge", about)?;
            writeln!(out, "{name} {count}")?;
        }
        head(out, "cobox_audit_records_lost_total", "counter", "Audit records that could not be written.")?;
        writeln!(out, "cobox_audit_records_lost_total {}", gauges.audit_lost)?;
        head(out, "cobox_store_up", "gauge", "Whether the database answers and accepts changes.")?;
        writeln!(out, "cobox_store_up {}", u8::from(gauges.is_store_up))?;
        if let Some(waits) = gauges.store_waits {
            head(out, "cobox_store_wait_duration_seconds", "histogram", "Time spent waiting for a database connection.")?;
            waits.write(out, "cobox_store_wait_duration_seconds", "")?;
        }
        self.write_node(out, gauges)?;
        head(out, "cobox_peers", "gauge", "Other brokers on the same database, by whether they send heartbeats.")?;
        for (state, count) in [("alive", gauges.peers.alive), ("dead", gauges.peers.dead)] {
            writeln!(out, "cobox_peers{{state=\"{state}\"}} {count}")?;
        }
        head(out, "cobox_clock_skew_seconds", "gauge", "Largest difference between this broker's clock and another broker's.")?;
        writeln!(out, "cobox_clock_skew_seconds {}", gauges.clock_skew.as_secs_f64())?;
        if let Some(counts) = &gauges.counts {
            head(out, "cobox_sandboxes", "gauge", "Sandboxes of the deployment that have not ended, by state.")?;
            for (state, count) in &counts.sandboxes {
                writeln!(out, "cobox_sandboxes{{state=\"{}\"}} {count}", state.as_str())?;
            }
            head(out, "cobox_sessions", "gauge", "Sessions of the deployment that have not ended.")?;
            writeln!(out, "cobox_sessions {}", counts.sessions)?;
            head(out, "cobox_revocations", "gauge", "Revocations in effect.")?;
            writeln!(out, "cobox_revocations {}", counts.revocations)?;
            for (name, about, most) in [
                ("cobox_workspace_sandboxes_max", "Sandboxes of the workspace that has the most.", counts.fullest.sandboxes),
                ("cobox_workspace_snapshots_max", "Snapshots of the workspace that has the most.", counts.fullest.snapshots),
                ("cobox_workspace_volumes_max", "Volumes of the workspace that has the most.", counts.fullest.volumes),
                ("cobox_workspace_stored_bytes_max", "Stored bytes of the workspace that has the most.", counts.fullest.stored_bytes),
                ("cobox_workspace_templates_max", "Templates of the workspace that has the most.", counts.fullest.templates),
                ("cobox_workspace_pools_max", "Pools of the workspace that has the most.", counts.fullest.pools),
            ] {
                head(out, name, "gauge", about)?;
                writeln!(out, "{name} {most}")?;
            }
            head(out, "cobox_database_size_bytes", "gauge", "Size of the database on disk.")?;
            writeln!(out, "cobox_database_size_bytes {}", counts.database_bytes)?;
        }
        Ok(())
    }

    /// Writes the errors and the requests that the gateway forwarded.
    fn write_operations(&self, out: &mut String) -> fmt::Result {
        head(out, "cobox_errors_total", "counter", "Requests that the broker answered with an error, by its code.")?;
        for (code, count) in self.errors.lock().iter() {
            writeln!(out, "cobox_errors_total{{code=\"{code}\"}} {count}")?;
        }
        let operations = self.operations.lock();
        head(out, "cobox_dataplane_requests_total", "counter", "Requests forwarded to sandboxes, by kind of operation.")?;
        for (operation, entry) in operations.iter() {
            let mut by_status = BTreeMap::<u16, u64>::new();
            entry.counts.iter().for_each(|((_, status), count)| *by_status.entry(*status).or_default() += count);
            for (status, count) in by_status {
                writeln!(out, "cobox_dataplane_requests_total{{operation=\"{operation}\",status=\"{status}\"}} {count}")?;
            }
        }
        let name = "cobox_dataplane_request_duration_seconds";
        head(out, name, "histogram", "Time until the head of the response to a forwarded request, by kind of operation.")?;
        for (operation, entry) in operations.iter() {
            entry.took.write(out, name, &format!("operation=\"{operation}\""))?;
        }
        Ok(())
    }

    /// Writes the metrics of this process, its disk, and the sandboxes it started.
    fn write_node(&self, out: &mut String, gauges: &Gauges) -> fmt::Result {
        head(out, "cobox_build_info", "gauge", "Always 1; the version of this broker, and the commit that it was built from.")?;
        writeln!(out, "cobox_build_info{{version=\"{}\",commit=\"{COMMIT}\"}} 1", env!("CARGO_PKG_VERSION"))?;
        head(out, "cobox_process_start_time_seconds", "gauge", "When this broker started, in seconds since 1970.")?;
        writeln!(out, "cobox_process_start_time_seconds {}", gauges.started_at)?;
        let starts = [("create", &self.created), ("resume", &self.resumed)];
        head(out, "cobox_sandbox_start_duration_seconds", "histogram", "Starts of sandboxes on this node that succeeded.")?;
        for (kind, starts) in starts {
            starts.took.write(out, "cobox_sandbox_start_duration_seconds", &format!("kind=\"{kind}\""))?;
        }
        head(out, "cobox_sandbox_starts_failed_total", "counter", "Starts of sandboxes on this node that failed.")?;
        for (kind, starts) in starts {
            writeln!(out, "cobox_sandbox_starts_failed_total{{kind=\"{kind}\"}} {}", starts.failed.load(Relaxed))?;
        }
        let limits = &gauges.workspace_limits;
        for (name, about, limit) in [
            ("cobox_sandbox_limit", "Sandboxes that one workspace may have, as configured.", limits.sandboxes),
            ("cobox_snapshot_limit", "Snapshots that one workspace may have, as configured.", limits.snapshots),
            ("cobox_volume_limit", "Volumes that one workspace may have, as configured.", limits.volumes),
            ("cobox_stored_bytes_limit", "Bytes of snapshots and volumes that one workspace may have, as configured.", limits.stored_bytes),
            ("cobox_template_limit", "Templates that one workspace may have.", limits.templates),
            ("cobox_pool_limit", "Pools that one workspace may have.", limits.pools),
        ] {
            head(out, name, "gauge", about)?;
            writeln!(out, "{name} {limit}")?;
        }
        if let Some(disk) = gauges.disk {
            head(out, "cobox_data_disk_bytes", "gauge", "Size and free space of the filesystem with the data directory.")?;
            for (kind, bytes) in [("total", disk.total_bytes), ("available", disk.available_bytes)] {
                writeln!(out, "cobox_data_disk_bytes{{kind=\"{kind}\"}} {bytes}")?;
            }
        }
        Ok(())
    }
}

fn head(out: &mut String, name: &str, kind: &str, about: &str) -> fmt::Result {
    writeln!(out, "# HELP {name} {about}\n# TYPE {name} {kind}")
}

/// The kind of a sandbox's route. Commands and files have different durations, so they are counted separately.
fn operation(template: &str) -> &'static str {
    const KINDS: [(&str, &[&str]); 5] = [
        ("exec", &["/exec", "/processes"]),
        ("shell", &["/shell", "/ws"]),
        ("files", &["/files", "/fs/", "/archive", "/upload", "/download", "/glob", "/grep"]),
        ("watch", &["/watch"]),
        ("sync", &["/sync"]),
    ];
    let rest = template.strip_prefix("/v1").unwrap_or(template);
    KINDS.into_iter().find(|(_, starts)| starts.iter().any(|start| rest.starts_with(start))).map_or("other", |(kind, _)| kind)
}

/// Limits the label values: a client may invent methods.
fn method_word(method: &Method) -> &'static str {
    const KNOWN: [&str; 8] = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"];
    KNOWN.into_iter().find(|known| *known == method.as_str()).unwrap_or("other")
}

/// Limits the label values: a sandbox may invent statuses.
fn status_word(status: StatusCode) -> u16 {
    if status.canonical_reason().is_some() { status.as_u16() } else { status.as_u16() / 100 * 100 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_methods_and_routes_add_only_a_few_labels() {
        let metrics = Metrics::default();
        for n in 100..1000 {
            let method = Method::from_bytes(format!("M{n}").as_bytes()).unwrap();
            metrics.request(&AnsweredRequest {
                route: Some("/dp/{*rest}"),
                method: &method,
                status: StatusCode::from_u16(n).unwrap(),
                error: None,
                dataplane: Some("/v1/exec"),
                took: Duration::from_millis(n.into()),
            });
        }
        let text = metrics.text(&Gauges::default());
        assert!(text.lines().filter(|l| l.starts_with("cobox_requests_total{")).count() < 80);
        assert!(text.contains("le=\"+Inf\"} 900\n"), "{text}");
        assert!(text.contains("le=\"0.25\"} 151\n"), "{text}");
    }

    #[test]
    fn every_route_of_a_sandbox_has_a_kind() {
        for route in cobox_protocol::route::ROUTES {
            let is_plain = ["/healthz", "/v1/healthz", cobox_protocol::langsmith::TUNNEL].contains(&route.template);
            assert_eq!(operation(route.template) == "other", is_plain, "{}", route.template);
        }
        assert_eq!((operation("/v1/exec"), operation("/v1/files/{path}"), operation("/execute")), ("exec", "files", "exec"));
    }
}
