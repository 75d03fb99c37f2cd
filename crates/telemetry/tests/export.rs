//! Spans as a collector receives them over a real connection.

use std::time::{Duration, SystemTime};

use axum::{Router, body::Bytes, extract::State, routing::post};
use cobox_broker::{RequestSpan, TraceContext, TraceSink};
use cobox_telemetry::Exporter;
use opentelemetry_proto::tonic::{collector::trace::v1::ExportTraceServiceRequest, trace::v1::Span};
use prost::Message;
use tokio::sync::mpsc;

/// Starts a collector that forwards the requests it receives.
async fn collector() -> (String, mpsc::Receiver<ExportTraceServiceRequest>) {
    let (sender, receiver) = mpsc::channel(16);
    let take = async |State(sender): State<mpsc::Sender<_>>, body: Bytes| {
        sender.send(ExportTraceServiceRequest::decode(body).unwrap()).await.unwrap();
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let app = Router::new().route("/v1/traces", post(take)).with_state(sender);
    tokio::spawn(async move { axum::serve(listener, app).await });
    (url, receiver)
}

fn spans(request: ExportTraceServiceRequest) -> Vec<Span> {
    request.resource_spans.into_iter().flat_map(|r| r.scope_spans).flat_map(|s| s.spans).collect()
}

fn attribute(span: &Span, name: &str) -> String {
    let found = span.attributes.iter().find(|a| a.key == name).unwrap_or_else(|| panic!("{name} in {span:?}"));
    format!("{:?}", found.value)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_becomes_a_span_in_its_callers_trace() {
    let (url, mut collected) = collector().await;
    let exporter = Exporter::start(&url).unwrap();
    let context = TraceContext { trace_id: [7; 16], parent_id: [3; 8], is_sampled: true };
    let (started, took) = (SystemTime::now(), Duration::from_millis(12));
    let request = RequestSpan {
        context: Some(context),
        started,
        took,
        method: "POST",
        route: Some("/v1/sandbox/sessions"),
        status: 503,
        error_code: Some("BACKEND_UNAVAILABLE"),
        request_id: "req-of-the-caller",
        session: None,
        sandbox: Some("sb_00000000000000000000000000"),
    };
    exporter.request(&request);
    // A span whose caller isn't traced is not sent; a span without a trace begins its own.
    exporter.request(&RequestSpan { context: Some(TraceContext { is_sampled: false, ..context }), ..request.clone() });
    exporter.request(&RequestSpan { context: None, status: 200, error_code: None, ..request.clone() });
    tokio::task::spawn_blocking(move || exporter.flush()).await.unwrap();

    let mut got = spans(collected.recv().await.unwrap());
    while got.len() < 2 {
        got.extend(spans(collected.recv().await.unwrap()));
    }
    let [failed, alone] = got.as_slice() else { panic!("{got:?}") };
    assert_eq!((failed.trace_id.as_slice(), failed.parent_span_id.as_slice()), ([7; 16].as_slice(), [3; 8].as_slice()));
    assert_eq!((failed.name.as_str(), failed.end_time_unix_nano - failed.start_time_unix_nano), ("POST /v1/sandbox/sessions", 12_000_000));
    assert!(attribute(failed, "error.type").contains("BACKEND_UNAVAILABLE"));
    assert!(attribute(failed, "cobox.request_id").contains("req-of-the-caller"));
    assert_eq!(failed.status.as_ref().unwrap().code, 2, "the status is an error");
    assert!(alone.parent_span_id.is_empty() && alone.trace_id != failed.trace_id);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unreachable_collector_does_not_delay_requests() {
    let exporter = Exporter::start("http://127.0.0.1:1").unwrap();
    let request = RequestSpan {
        context: None,
        started: SystemTime::now(),
        took: Duration::ZERO,
        method: "GET",
        route: None,
        status: 200,
        error_code: None,
        request_id: "x",
        session: None,
        sandbox: None,
    };
    // More than fit into the queue.
    for _ in 0..10_000 {
        exporter.request(&request);
    }
    tokio::task::spawn_blocking(move || drop(exporter)).await.unwrap();
}
