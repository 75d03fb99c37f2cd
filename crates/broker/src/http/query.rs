//! Query parameters: a route takes those that `openapi/broker.json` lists for it, and refuses others by name. A filter or restriction
//! that is ignored would look as if it had been applied.

use std::{collections::HashMap, sync::LazyLock};

use axum::{
    extract::{MatchedPath, Request},
    middleware::Next,
    response::{IntoResponse, Response},
};
use cobox_protocol::{ApiError, json::unknown_parameter};
use http::{Method, Uri};
use serde::Deserialize;

use super::{error::Failure, langsmith, ops::OPENAPI};

/// By path and method, as the document spells them.
type Known = HashMap<String, HashMap<String, Vec<String>>>;

static KNOWN: LazyLock<Known> = LazyLock::new(|| {
    // Compiled in, and compared with the router by tests.
    let document: Document = serde_json::from_str(OPENAPI).unwrap_or_default();
    let names = |operation: Operation| operation.parameters.into_iter().filter(|p| p.place == "query").map(|p| p.name).collect();
    let methods = |methods: HashMap<String, Operation>| methods.into_iter().map(|(method, o)| (method, names(o))).collect();
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
}

#[derive(Deserialize)]
struct Parameter {
    #[serde(rename = "in")]
    place: String,
    name: String,
}

/// A layer around every route of the control plane. The LangSmith routes take any parameter, because those SDKs send more than they
/// document.
pub async fn refuse_unknown(request: Request, next: Next) -> Response {
    let route = request.extensions().get::<MatchedPath>().map(MatchedPath::as_str);
    let checked = match route {
        Some(route) if !langsmith::is_asked(route) => check(route, request.method(), request.uri()),
        _ => Ok(()),
    };
    match checked {
        Ok(()) => next.run(request).await,
        Err(refused) => Failure::from(refused).into_response(),
    }
}

fn check(route: &str, method: &Method, uri: &Uri) -> Result<(), ApiError> {
    let Some(query) = uri.query().filter(|query| !query.is_empty()) else { return Ok(()) };
    // A router answers HEAD wherever there is a GET.
    let method = if *method == Method::HEAD { "get".to_owned() } else { method.as_str().to_ascii_lowercase() };
    // A method that this route doesn't have is refused by the router.
    let Some(known) = KNOWN.get(route).and_then(|methods| methods.get(&method)) else { return Ok(()) };
    match form_urlencoded::parse(query.as_bytes()).find(|(name, _)| !known.iter().any(|k| k == name)) {
        Some((name, _)) => Err(unknown_parameter(&name, known)),
        None => Ok(()),
    }
}
