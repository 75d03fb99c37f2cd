//! Exports a span for each request of the broker to an OpenTelemetry collector, over OTLP/HTTP. It is a separate crate
//! behind `cobox`'s feature `otel`, so that a broker without it has none of these dependencies.

#![forbid(unsafe_code)]

use std::{fmt, time::Duration};

use async_trait::async_trait;
use bytes::Bytes;
use cobox_broker::{RequestSpan, TraceContext, TraceSink};
use http::{Request, Response};
use opentelemetry::{
    Context, KeyValue,
    trace::{Span, SpanBuilder, SpanContext, SpanId, SpanKind, Status, TraceContextExt, TraceFlags, TraceId, TraceState, TracerProvider},
};
use opentelemetry_http::{HttpClient, HttpError};
use opentelemetry_otlp::{SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::{
    Resource,
    trace::{SdkTracer, SdkTracerProvider},
};
use tokio::runtime::Handle;

/// Timeout for sending one batch of spans. Further spans wait in a bounded queue and are dropped when it is full.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of bytes read of a collector's response, which says whether it accepted the spans.
const MAX_RESPONSE_BYTES: usize = 64 * 1024;
/// How long to wait for the last spans when the broker ends.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);
const SERVICE: &str = "cobox";

#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    #[error("the OpenTelemetry endpoint {0} is not usable: {1}")]
    Endpoint(String, String),
    #[error("creating the HTTP client for OpenTelemetry failed: {0}")]
    Client(#[from] reqwest::Error),
}

/// The exporter of spans. Dropping it sends the remaining ones.
pub struct Exporter {
    provider: SdkTracerProvider,
    tracer: SdkTracer,
}

impl Exporter {
    /// Starts an exporter to a collector's base URL, such as `http://127.0.0.1:4318`. It must be called within a
    /// runtime, on which spans are then sent.
    pub fn start(endpoint: &str) -> Result<Self, TelemetryError> {
        // Ignored: it fails only if another part of the process has installed the same provider.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = reqwest::Client::builder().redirect(reqwest::redirect::Policy::none()).timeout(EXPORT_TIMEOUT).build()?;
        let url = format!("{}/v1/traces", endpoint.trim_end_matches('/'));
        let exporter = SpanExporter::builder()
            .with_http()
            .with_http_client(RuntimeHttpClient { client, runtime: Handle::current() })
            .with_endpoint(&url)
            .with_timeout(EXPORT_TIMEOUT)
            .build()
            .map_err(|e| TelemetryError::Endpoint(url, e.to_string()))?;
        let resource =
            Resource::builder().with_service_name(SERVICE).with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")));
        let provider = SdkTracerProvider::builder().with_batch_exporter(exporter).with_resource(resource.build()).build();
        let tracer = provider.tracer(SERVICE);
        Ok(Self { provider, tracer })
    }

    /// Blocks until all spans so far were sent or have failed.
    pub fn flush(&self) {
        if let Err(error) = self.provider.force_flush() {
            tracing::warn!(%error, "sending spans to the OpenTelemetry collector failed");
        }
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        if let Err(error) = self.provider.shutdown_with_timeout(SHUTDOWN_TIMEOUT) {
            tracing::warn!(%error, "sending the last spans to the OpenTelemetry collector failed");
        }
    }
}

impl TraceSink for Exporter {
    fn request(&self, span: &RequestSpan<'_>) {
        let RequestSpan { context, started, took, method, route, status, error_code, request_id, session, sandbox } = span;
        let route_name = route.unwrap_or("unknown route");
        let mut attributes = vec![
            KeyValue::new("http.request.method", (*method).to_owned()),
            KeyValue::new("http.response.status_code", i64::from(*status)),
            KeyValue::new("cobox.request_id", (*request_id).to_owned()),
        ];
        let optional = [("http.route", *route), ("error.type", *error_code), ("cobox.session", *session), ("cobox.sandbox", *sandbox)];
        attributes.extend(optional.into_iter().filter_map(|(name, value)| Some(KeyValue::new(name, value?.to_owned()))));
        let mut exported = SpanBuilder::from_name(format!("{method} {route_name}"))
            .with_kind(SpanKind::Server)
            .with_start_time(*started)
            .with_attributes(attributes)
            .start_with_context(&self.tracer, &context.as_ref().map_or_else(Context::new, parent));
        if *status >= 500 {
            exported.set_status(Status::error(error_code.unwrap_or_default().to_owned()));
        }
        exported.end_with_timestamp(*started + *took);
    }
}

fn parent(context: &TraceContext) -> Context {
    let flags = if context.is_sampled { TraceFlags::SAMPLED } else { TraceFlags::default() };
    let (trace, span) = (TraceId::from_bytes(context.trace_id), SpanId::from_bytes(context.parent_id));
    Context::new().with_remote_span_context(SpanContext::new(trace, span, flags, true, TraceState::default()))
}

/// Sends on the broker's runtime, because the exporter's own thread has none.
struct RuntimeHttpClient {
    client: reqwest::Client,
    runtime: Handle,
}

impl fmt::Debug for RuntimeHttpClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RuntimeHttpClient")
    }
}

#[async_trait]
impl HttpClient for RuntimeHttpClient {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let client = self.client.clone();
        self.runtime.spawn(send(client, request)).await?
    }
}

async fn send(client: reqwest::Client, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
    let (parts, body) = request.into_parts();
    let sent = client.request(parts.method, parts.uri.to_string()).headers(parts.headers).body(body).send().await;
    let mut answer = sent?;
    let mut body = Vec::new();
    while let Some(piece) = answer.chunk().await? {
        let left = MAX_RESPONSE_BYTES - body.len();
        body.extend_from_slice(&piece[..piece.len().min(left)]);
        if body.len() == MAX_RESPONSE_BYTES {
            break;
        }
    }
    Ok(Response::builder().status(answer.status()).body(body.into())?)
}
