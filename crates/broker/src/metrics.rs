//! What is counted for whoever runs the broker, in Prometheus' text. Labels are route templates, methods, statuses and states: never
//! anything a caller chose, so that their number has a bound.

use std::{
    collections::{BTreeMap, HashMap},
    fmt::{self, Write},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use http::{Method, StatusCode};

/// Upper ends of a histogram's buckets, in microseconds: from a remembered read to what a client has long given up on.
const BUCKETS_US: [u64; 14] =
    [100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 1_000_000, 5_000_000, 30_000_000];

/// How long something takes.
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
        // Not below what was counted so far, although all of them are read one after the other.
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

/// One route's requests.
#[derive(Default)]
struct Route {
    counts: BTreeMap<(&'static str, u16), u64>,
    took: Histogram,
}

#[derive(Default)]
pub struct Metrics {
    routes: Mutex<HashMap<String, Route>>,
    pub connections: AtomicU64,
    pub connections_open: AtomicU64,
    pub bytes_in: AtomicU64,
    pub bytes_out: AtomicU64,
    pub handshakes_failed: AtomicU64,
    pub rate_limited: AtomicU64,
}

/// What is looked up when somebody asks, rather than counted.
#[derive(Default)]
pub struct Gauges<'a> {
    pub tokens_issued: u64,
    pub commits: Option<&'a Histogram>,
    /// Whether the store took a change just now.
    pub is_store_up: bool,
    /// Records that could not be written.
    pub audit_lost: u64,
    /// Sandboxes of this broker's node that no record knows.
    pub quarantined: usize,
    pub peers: crate::domain::nodes::PeerCounts,
    pub clock_skew: Duration,
    /// `None` when the store could not be asked.
    pub counts: Option<crate::store::Counts>,
}

/// A route of what no route was found for.
const NO_ROUTE: &str = "none";

impl Metrics {
    /// `route` is a template of the router's, so there are as many as it has.
    pub fn request(&self, route: Option<&str>, method: &Method, status: StatusCode, took: Duration) {
        let route = route.unwrap_or(NO_ROUTE);
        let mut routes = self.routes.lock().unwrap_or_else(PoisonError::into_inner);
        if !routes.contains_key(route) {
            routes.insert(route.to_owned(), Route::default());
        }
        let Some(entry) = routes.get_mut(route) else { return };
        *entry.counts.entry((method_word(method), status_word(status))).or_default() += 1;
        entry.took.add(took);
    }

    pub fn text(&self, gauges: &Gauges) -> String {
        let mut out = String::with_capacity(16 * 1024);
        // Writing to a string doesn't fail.
        let _ = self.write(&mut out, gauges);
        out
    }

    fn write(&self, out: &mut String, gauges: &Gauges) -> fmt::Result {
        let routes = self.routes.lock().unwrap_or_else(PoisonError::into_inner);
        let sorted: BTreeMap<_, _> = routes.iter().collect();
        head(out, "cobox_requests_total", "counter", "Requests answered.")?;
        for (route, entry) in &sorted {
            for ((method, status), count) in &entry.counts {
                writeln!(out, "cobox_requests_total{{route=\"{route}\",method=\"{method}\",status=\"{status}\"}} {count}")?;
            }
        }
        head(out, "cobox_request_duration_seconds", "histogram", "Until the head of the answer; streams go on after it.")?;
        for (route, entry) in &sorted {
            entry.took.write(out, "cobox_request_duration_seconds", &format!("route=\"{route}\""))?;
        }
        drop(sorted);
        drop(routes);
        for (name, about, value) in [
            ("cobox_connections_total", "Connections of clients accepted.", &self.connections),
            ("cobox_tls_handshakes_failed_total", "Connections that did not become TLS ones.", &self.handshakes_failed),
            ("cobox_rate_limited_total", "Requests refused because of how many came before.", &self.rate_limited),
        ] {
            head(out, name, "counter", about)?;
            writeln!(out, "{name} {}", value.load(Relaxed))?;
        }
        head(out, "cobox_connections_open", "gauge", "Connections of clients, WebSockets among them.")?;
        writeln!(out, "cobox_connections_open {}", self.connections_open.load(Relaxed))?;
        head(out, "cobox_connection_bytes_total", "counter", "Bytes from and to clients, the gateway's traffic among them.")?;
        for (direction, bytes) in [("in", &self.bytes_in), ("out", &self.bytes_out)] {
            writeln!(out, "cobox_connection_bytes_total{{direction=\"{direction}\"}} {}", bytes.load(Relaxed))?;
        }
        head(out, "cobox_tokens_issued_total", "counter", "Tokens made by this broker.")?;
        writeln!(out, "cobox_tokens_issued_total {}", gauges.tokens_issued)?;
        if let Some(commits) = gauges.commits {
            head(out, "cobox_store_commit_duration_seconds", "histogram", "Commits of the database.")?;
            commits.write(out, "cobox_store_commit_duration_seconds", "")?;
        }
        head(out, "cobox_quarantined_sandboxes", "gauge", "Sandboxes of this broker that its database does not know.")?;
        writeln!(out, "cobox_quarantined_sandboxes {}", gauges.quarantined)?;
        head(out, "cobox_audit_records_lost_total", "counter", "Audit records that could not be written.")?;
        writeln!(out, "cobox_audit_records_lost_total {}", gauges.audit_lost)?;
        head(out, "cobox_store_up", "gauge", "Whether the database took a change just now.")?;
        writeln!(out, "cobox_store_up {}", u8::from(gauges.is_store_up))?;
        head(out, "cobox_peers", "gauge", "Other brokers on the same database, by whether they beat.")?;
        for (state, count) in [("alive", gauges.peers.alive), ("dead", gauges.peers.dead)] {
            writeln!(out, "cobox_peers{{state=\"{state}\"}} {count}")?;
        }
        head(out, "cobox_clock_skew_seconds", "gauge", "Largest difference between this broker's clock and another one's.")?;
        writeln!(out, "cobox_clock_skew_seconds {}", gauges.clock_skew.as_secs_f64())?;
        if let Some(counts) = &gauges.counts {
            head(out, "cobox_sandboxes", "gauge", "Sandboxes of the deployment that have not ended, by state.")?;
            for (state, count) in &counts.sandboxes {
                writeln!(out, "cobox_sandboxes{{state=\"{}\"}} {count}", state.word())?;
            }
            head(out, "cobox_sessions", "gauge", "Sessions of the deployment that have not ended.")?;
            writeln!(out, "cobox_sessions {}", counts.sessions)?;
            head(out, "cobox_revocations", "gauge", "Revocations that still count.")?;
            writeln!(out, "cobox_revocations {}", counts.revocations)?;
        }
        Ok(())
    }
}

fn head(out: &mut String, name: &str, kind: &str, about: &str) -> fmt::Result {
    writeln!(out, "# HELP {name} {about}\n# TYPE {name} {kind}")
}

/// A client may make methods up.
fn method_word(method: &Method) -> &'static str {
    const KNOWN: [&str; 8] = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"];
    KNOWN.into_iter().find(|known| *known == method.as_str()).unwrap_or("other")
}

/// A sandbox may make statuses up.
fn status_word(status: StatusCode) -> u16 {
    if status.canonical_reason().is_some() { status.as_u16() } else { status.as_u16() / 100 * 100 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_strangers_make_up_adds_no_more_than_a_few_labels() {
        let metrics = Metrics::default();
        for n in 100..1000 {
            let method = Method::from_bytes(format!("M{n}").as_bytes()).unwrap();
            metrics.request(Some("/dp/{*rest}"), &method, StatusCode::from_u16(n).unwrap(), Duration::from_millis(n.into()));
        }
        let text = metrics.text(&Gauges::default());
        assert!(text.lines().filter(|l| l.starts_with("cobox_requests_total{")).count() < 80);
        assert!(text.contains("le=\"+Inf\"} 900\n"), "{text}");
        assert!(text.contains("le=\"0.25\"} 151\n"), "{text}");
    }
}
