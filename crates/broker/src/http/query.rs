//! Rejects parameters that a route doesn't document. A query parameter that `openapi/broker.json` doesn't list is
//! refused by name, and so is the body of a route that takes none. An ignored filter or restriction would look as if it
//! had been applied.

use std::{collections::HashMap, sync::LazyLock};

use axum::{
    body::HttpBody,
    extract::{MatchedPath, Request},
    middleware::Next,
    response::{IntoResponse, Response},
};
use cobox_protocol::{ApiError, json::unknown_parameter};
use http::{Method, Uri};
use serde::{Deserialize, de::IgnoredAny};

use super::{body::UnexpectedBody, error::Failure, langsmith, ops::OPENAPI};

/// Keyed by path and method, as spelled in the document.
type KnownOperations = HashMap<String, HashMap<String, AcceptedInput>>;

/// The input that an operation accepts.
struct AcceptedInput {
    query: Vec<String>,
    has_body: bool,
}

static KNOWN_OPERATIONS: LazyLock<KnownOperations> = LazyLock::new(|| {
    // The document is compiled in, and tests compare it with the router.
    let document: Document = serde_json::from_str(OPENAPI).unwrap_or_default();
    let accepted = |operation: Operation| AcceptedInput {
        query: operation.parameters.into_iter().filter(|p| p.place == "query").map(|p| p.name).collect(),
        has_body: operation.request_body.is_some(),
    };
    let methods = |methods: HashMap<String, Operation>| methods.into_iter().map(|(method, o)| (method, accepted(o))).collect();
    document.paths.into_iter().map(|(path, operations)| (path, methods(operations))).collect()
});

#[derive(Default, Deserialize)]
struct Document {
    paths: HashMap<String, HashMap<String, Operation>>,
}

#[derive(Deserialize)]
struct Operation {
    #[serde(default)]
    parameters: Vec<Parameter>,
    #[serde(rename = "requestBody")]
    request_body: Option<IgnoredAny>,
}

#[derive(Deserialize)]
struct Parameter {
    #[serde(rename = "in")]
    place: String,
    name: String,
}

/// Layer around every route of the control plane. The LangSmith routes accept anything, because their SDKs send more
/// than they document.
pub async fn refuse_unknown(mut request: Request, next: Next) -> Response {
    let route = request.extensions().get::<MatchedPath>().map(MatchedPath::as_str).filter(|route| !langsmith::is_langsmith_path(route));
    // The router refuses methods that this route doesn't have.
    let Some(accepted) = route.and_then(|route| accepted(route, request.method())) else { return next.run(request).await };
    if let Err(refused) = check_query(request.uri(), &accepted.query) {
        return Failure::from(refused).into_response();
    }
    if !accepted.has_body && !request.body().is_end_stream() {
        let body = std::mem::take(request.body_mut());
        request.extensions_mut().insert(UnexpectedBody::new(body));
    }
    next.run(request).await
}

fn accepted(route: &str, method: &Method) -> Option<&'static AcceptedInput> {
    // The router answers HEAD on every route with GET.
    let method = if *method == Method::HEAD { "get".to_owned() } else { method.as_str().to_ascii_lowercase() };
    KNOWN_OPERATIONS.get(route)?.get(&method)
}

fn check_query(uri: &Uri, known: &[String]) -> Result<(), ApiError> {
    let Some(query) = uri.query().filter(|query| !query.is_empty()) else { return Ok(()) };
    match form_urlencoded::parse(query.as_bytes()).find(|(name, _)| !known.iter().any(|k| k == name)) {
        Some((name, _)) => Err(unknown_parameter(&name, known)),
        None => Ok(()),
    }
}
