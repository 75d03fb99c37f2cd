//! Serves the dataplane's routes for a provider whose sandboxes run no boxd: request formats and the checks that boxd would make.

use axum::{
    Json,
    body::Body,
    response::{IntoResponse, Response},
};
use cobox_protocol::{
    ApiError, CapabilitySet, ErrorCode,
    exec::ExecRequest,
    files::FILE_MODE_HEADER,
    fs::{FileKind, StatRequest},
    json::describe_parse_error,
    route::{self, FILE, Route},
};
use cobox_provider::{Adapter, AdapterError, FileContent};
use http::{HeaderMap, HeaderValue, Method, Request, StatusCode, header};
use serde::de::DeserializeOwned;
use serde_json::json;
use tokio_util::io::{ReaderStream, StreamReader};

use crate::{Admission, headers::filter_for_caller};

/// Maximum body of a JSON request, in bytes: a command with its input.
const MAX_JSON_BYTES: usize = 4 * 1024 * 1024;
/// Bytes read from a provider at a time.
const CHUNK_BYTES: usize = 64 * 1024;
/// Conditional headers, which no adapter supports. They are refused, because ignoring them would break their promise silently.
const CONDITIONS: [header::HeaderName; 5] =
    [header::IF_MATCH, header::IF_NONE_MATCH, header::IF_MODIFIED_SINCE, header::IF_UNMODIFIED_SINCE, header::IF_RANGE];

/// The dataplane of one request, served by an adapter.
pub(crate) struct AdapterDataplane<'a> {
    pub adapter: &'a dyn Adapter,
    pub provider: &'a str,
    pub admission: &'a Admission,
}

impl AdapterDataplane<'_> {
    /// Serves a request whose credential has been checked. Checks the token's capabilities before it calls the adapter.
    pub async fn handle(&self, request: Request<Body>) -> Result<Response, ApiError> {
        let (parts, body) = request.into_parts();
        let path = parts.uri.path();
        let not_found = || ApiError::new(ErrorCode::RouteNotFound, "there is nothing at this path");
        let route = route::find(parts.method.as_str(), path).ok_or_else(not_found)?;
        self.require_capabilities(route)?;
        route.check_query(parts.uri.query())?;
        let response = self.route(route, &parts.method, path, &parts.headers, body).await.map_err(|e| match e {
            AdapterError::Failed(error) => error,
            AdapterError::Unsupported => self.unsupported(route),
        })?;
        let (mut parts, body) = response.into_parts();
        parts.headers = filter_for_caller(parts.headers, false);
        Ok(Response::from_parts(parts, body))
    }

    async fn route(&self, route: &Route, method: &Method, path: &str, headers: &HeaderMap, body: Body) -> Result<Response, AdapterError> {
        let (adapter, id) = (self.adapter, &self.admission.sandbox);
        match (route.method, route.template) {
            ("GET", "/healthz" | "/v1/healthz") => Ok(Json(json!({ "status": "ok" })).into_response()),
            ("POST", "/v1/exec") => {
                let is_stream = headers.get(header::ACCEPT).is_some_and(|v| v.as_bytes().starts_with(b"text/event-stream"));
                if is_stream {
                    return Err(AdapterError::Unsupported);
                }
                let request: ExecRequest = read_json(body).await?;
                if request.command.is_some() == request.argv.is_some() {
                    return Err(ApiError::invalid("set either `command` or `argv`").into());
                }
                Ok(Json(adapter.exec(id, request).await?).into_response())
            }
            ("POST", "/v1/fs/list") => Ok(Json(adapter.list(id, read_json(body).await?).await?).into_response()),
            ("POST", "/v1/fs/stat") => {
                let request: StatRequest = read_json(body).await?;
                let path = request.path.filter(|_| request.path_b64.is_none() && !request.follow).ok_or(AdapterError::Unsupported)?;
                Ok(Json(adapter.stat(id, &path).await?).into_response())
            }
            (_, FILE) if CONDITIONS.iter().any(|c| headers.contains_key(c)) => Err(AdapterError::Unsupported),
            (_, FILE) => self.file(method, &file_path(path)?, headers, body).await,
            _ => Err(AdapterError::Unsupported),
        }
    }

    async fn file(&self, method: &Method, path: &str, headers: &HeaderMap, body: Body) -> Result<Response, AdapterError> {
        let (adapter, id) = (self.adapter, &self.admission.sandbox);
        match method.as_str() {
            "GET" => {
                let (size, content) = adapter.read(id, path).await?;
                Ok(file_response(size, Body::from_stream(ReaderStream::with_capacity(content, CHUNK_BYTES))))
            }
            "HEAD" => {
                let entry = adapter.stat(id, path).await?;
                if entry.kind != FileKind::File {
                    return Err(ApiError::invalid(format!("{path} is not a file")).into());
                }
                Ok(file_response(Some(entry.size), Body::empty()))
            }
            "PUT" if headers.contains_key(FILE_MODE_HEADER) => Err(AdapterError::Unsupported),
            "PUT" => {
                let reader = StreamReader::new(futures_util::TryStreamExt::map_err(body.into_data_stream(), std::io::Error::other));
                let content: FileContent = Box::pin(reader);
                let (written, is_new) = adapter.write(id, path, content).await?;
                let status = if is_new { StatusCode::CREATED } else { StatusCode::OK };
                Ok((status, Json(written)).into_response())
            }
            "DELETE" => {
                adapter.delete(id, path).await?;
                Ok(StatusCode::NO_CONTENT.into_response())
            }
            _ => Err(AdapterError::Unsupported),
        }
    }

    fn require_capabilities(&self, route: &Route) -> Result<(), ApiError> {
        let has = self.admission.caller.as_ref().map_or(CapabilitySet::EMPTY, |c| c.capabilities);
        let Some(missing) = route.needs.iter().find(|c| !has.contains(**c)) else { return Ok(()) };
        if self.admission.caller.is_none() {
            return Err(ApiError::new(ErrorCode::Unauthenticated, "send the sandbox's token as `Authorization: Bearer <token>`"));
        }
        let message = format!("this needs the capability `{missing}`, which the token doesn't have; ask the broker for a token with it");
        Err(ApiError::new(ErrorCode::CapabilityDenied, message).with_details(json!({ "capability": missing.as_str() })))
    }

    fn unsupported(&self, route: &Route) -> ApiError {
        let (provider, route) = (self.provider, format!("{} {}", route.method, route.template));
        let message =
            format!("sandboxes of the provider {provider} can't do this ({route}): they run no boxd; use another provider for it");
        ApiError::new(ErrorCode::RouteNotFound, message).with_details(json!({ "provider": provider, "route": route }))
    }
}

fn file_response(size: Option<u64>, body: Body) -> Response {
    let mut response = Response::new(body);
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    if let Some(size) = size {
        response.headers_mut().insert(header::CONTENT_LENGTH, HeaderValue::from(size));
    }
    response
}

async fn read_json<T: DeserializeOwned>(body: Body) -> Result<T, ApiError> {
    let too_large = |_| ApiError::new(ErrorCode::TooLarge, format!("the body is larger than {MAX_JSON_BYTES} bytes, or ended early"));
    let bytes = axum::body::to_bytes(body, MAX_JSON_BYTES).await.map_err(too_large)?;
    serde_json::from_slice(&bytes).map_err(|e| ApiError::invalid(describe_parse_error("the body", &e.to_string())))
}

/// Decodes the sandbox path in the URL of a file route.
fn file_path(path: &str) -> Result<String, ApiError> {
    let encoded = path.strip_prefix("/v1/files").unwrap_or_default();
    let mut bytes = Vec::with_capacity(encoded.len());
    let mut rest = encoded.bytes();
    while let Some(byte) = rest.next() {
        let digit = |b: Option<u8>| b.and_then(|b| char::from(b).to_digit(16));
        bytes.push(match byte {
            b'%' => match (digit(rest.next()), digit(rest.next())) {
                // Two digits of four bits fit into a byte.
                (Some(high), Some(low)) => (high * 16 + low) as u8,
                _ => return Err(ApiError::invalid("the path contains a `%` that is not followed by two hexadecimal digits")),
            },
            other => other,
        });
    }
    let path = String::from_utf8(bytes).map_err(|_| ApiError::invalid("the path is not UTF-8, which this sandbox's provider requires"))?;
    if path.len() < 2 || path.contains('\0') {
        return Err(ApiError::invalid("the path doesn't name a file"));
    }
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percent_encoding_in_a_path_is_decoded_once() {
        assert_eq!(file_path("/v1/files/workspace/a%20b%252F").unwrap(), "/workspace/a b%2F");
        for bad in ["/v1/files/a%2", "/v1/files/a%zz", "/v1/files/%ff", "/v1/files/a%00", "/v1/files/", "/v1/files"] {
            assert_eq!(file_path(bad).unwrap_err().code, ErrorCode::InvalidRequest, "{bad}");
        }
    }
}
