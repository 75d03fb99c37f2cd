//! Header filters for both directions: credentials and headers that only concern one side are removed.

use cobox_protocol::{RequestId, Secret, secret::has_api_key};
use http::{
    HeaderMap, HeaderName, HeaderValue, Method,
    header::{self, AUTHORIZATION, CONNECTION, CONTENT_DISPOSITION, CONTENT_LENGTH, CONTENT_TYPE, HOST, TRANSFER_ENCODING, UPGRADE},
};

pub(crate) const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Headers that apply to a single connection and are never forwarded.
const HOP_BY_HOP: [&str; 10] = [
    "connection",
    "keep-alive",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "http2-settings",
    "expect",
    "proxy-authenticate",
];

/// Credentials for the broker, and headers with which a caller could impersonate another client.
const NEVER_SENT_TO_SANDBOX: [&str; 5] = ["authorization", "x-api-key", "cookie", "forwarded", "x-real-ip"];

/// Any header with this suffix is removed: `x-thread-authorization`, for example, is a credential for another service.
const CREDENTIAL_SUFFIX: &str = "-authorization";

/// Headers that would let a sandbox control a browser on the gateway's origin.
const NEVER_SENT_TO_CALLER: [&str; 12] = [
    "set-cookie",
    "set-cookie2",
    "server",
    "www-authenticate",
    "clear-site-data",
    "strict-transport-security",
    "service-worker-allowed",
    "alt-svc",
    "refresh",
    "nel",
    "report-to",
    "reporting-endpoints",
];

/// Whether this is a WebSocket handshake, the only upgrade that is forwarded: `h2c` would smuggle requests past the gateway.
pub(crate) fn is_websocket(method: &Method, headers: &HeaderMap) -> bool {
    let is_upgrade = tokens(headers, &CONNECTION).any(|t| t.eq_ignore_ascii_case("upgrade"));
    let is_websocket = headers.get(UPGRADE).is_some_and(|v| v.as_bytes().eq_ignore_ascii_case(b"websocket"));
    method == Method::GET && is_upgrade && is_websocket
}

/// Returns the request headers that are sent to boxd.
pub(crate) fn filter_for_sandbox(mut headers: HeaderMap, token: Option<&Secret>, request_id: &RequestId, is_websocket: bool) -> HeaderMap {
    strip_hop_by_hop(&mut headers);
    remove_where(&mut headers, |name| {
        NEVER_SENT_TO_SANDBOX.contains(&name)
            || name.ends_with(CREDENTIAL_SUFFIX)
            || name.starts_with("proxy-")
            || name.starts_with("x-forwarded-")
            || name == "x-request-id"
    });
    // An API key must never reach a sandbox, in any header.
    let with_key: Vec<HeaderName> =
        headers.iter().filter(|(_, value)| has_api_key(&String::from_utf8_lossy(value.as_bytes()))).map(|(name, _)| name.clone()).collect();
    with_key.iter().for_each(|name| drop(headers.remove(name)));
    // hyper sets it again from the body itself, so that both sides agree where a request ends (request smuggling).
    headers.remove(CONTENT_LENGTH);
    headers.insert(HOST, HeaderValue::from_static("boxd"));
    if let Ok(id) = HeaderValue::from_str(request_id.as_str()) {
        headers.insert(X_REQUEST_ID, id);
    }
    if let Some(Ok(mut value)) = token.map(|t| HeaderValue::from_str(&format!("Bearer {}", t.expose()))) {
        value.set_sensitive(true);
        headers.insert(AUTHORIZATION, value);
    }
    if is_websocket {
        set_websocket_headers(&mut headers);
    }
    headers
}

/// Returns the response headers that are sent to the caller.
pub(crate) fn filter_for_caller(mut headers: HeaderMap, is_websocket: bool) -> HeaderMap {
    if headers.contains_key(TRANSFER_ENCODING) {
        headers.remove(CONTENT_LENGTH);
    }
    strip_hop_by_hop(&mut headers);
    remove_where(&mut headers, |name| {
        NEVER_SENT_TO_CALLER.contains(&name) || name.starts_with("proxy-") || name.starts_with("access-control-")
    });
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static("sandbox"));
    // A file's URL may contain a link, which must not leak to the sites that the file refers to.
    headers.insert(header::REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    if can_carry_scripts(&headers) && !is_attachment(&headers) {
        headers.insert(CONTENT_DISPOSITION, HeaderValue::from_static("attachment"));
    }
    if is_websocket {
        set_websocket_headers(&mut headers);
    }
    headers
}

fn set_websocket_headers(headers: &mut HeaderMap) {
    // An extension would change the frames that the relay has to read.
    headers.remove(header::SEC_WEBSOCKET_EXTENSIONS);
    headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
}

/// Whether a browser might run scripts from it: HTML, SVG and any other XML.
fn can_carry_scripts(headers: &HeaderMap) -> bool {
    headers.get_all(CONTENT_TYPE).iter().any(|v| {
        let kind = String::from_utf8_lossy(v.as_bytes()).to_ascii_lowercase();
        kind.contains("html") || kind.contains("xml")
    })
}

fn is_attachment(headers: &HeaderMap) -> bool {
    headers.get(CONTENT_DISPOSITION).is_some_and(|v| v.as_bytes().to_ascii_lowercase().starts_with(b"attachment"))
}

fn strip_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<String> = tokens(headers, &CONNECTION).map(str::to_ascii_lowercase).collect();
    remove_where(headers, |name| HOP_BY_HOP.contains(&name) || named.iter().any(|n| n == name));
}

fn tokens<'a>(headers: &'a HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'a str> {
    headers.get_all(name).iter().filter_map(|v| v.to_str().ok()).flat_map(|v| v.split(',')).map(str::trim)
}

fn remove_where(headers: &mut HeaderMap, is_unwanted: impl Fn(&str) -> bool) {
    let unwanted: Vec<HeaderName> = headers.keys().filter(|n| is_unwanted(n.as_str())).cloned().collect();
    for name in unwanted {
        headers.remove(name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(pairs: &[(&str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(HeaderName::try_from(*name).unwrap(), value.parse().unwrap());
        }
        headers
    }

    #[test]
    fn credentials_and_hop_by_hop_headers_are_not_forwarded() {
        let sent = map(&[
            ("authorization", "Bearer cbx_key"),
            ("x-api-key", "cbx_key"),
            ("cookie", "a=b"),
            ("proxy-authorization", "x"),
            ("x-forwarded-for", "10.0.0.1"),
            ("forwarded", "for=1"),
            ("connection", "close, X-Secret-Hop"),
            ("x-secret-hop", "1"),
            ("upgrade", "h2c"),
            ("http2-settings", "AAA"),
            ("transfer-encoding", "chunked"),
            ("content-length", "4"),
            ("x-request-id", "forged"),
            ("content-type", "text/plain"),
            ("if-match", "\"1\""),
            ("x-auth", "cbx_01j8xq6x0ye8rf2zt9n5b3c7dm_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"),
            ("sec-websocket-protocol", "bearer, cbx_01j8xq6x0ye8rf2zt9n5b3c7dm_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"),
            ("sec-websocket-protocol", "chat"),
        ]);
        let id = RequestId::new();
        let got = filter_for_sandbox(sent, Some(&Secret::new("a.b.c")), &id, false);
        let mut names: Vec<_> = got.keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        assert_eq!(names, ["authorization", "content-type", "host", "if-match", "x-request-id"]);
        assert_eq!(got["authorization"], "Bearer a.b.c");
        assert_eq!(got["x-request-id"], id.as_str());
    }

    #[test]
    fn a_sandbox_cannot_set_cookies_and_its_pages_are_served_as_downloads() {
        let got = filter_for_caller(
            map(&[
                ("set-cookie", "a=b"),
                ("server", "evil"),
                ("access-control-allow-origin", "*"),
                ("content-type", "image/svg+xml"),
                ("content-disposition", "inline"),
                ("content-security-policy", "default-src *"),
                ("etag", "\"1\""),
            ]),
            false,
        );
        for gone in ["set-cookie", "server", "access-control-allow-origin"] {
            assert!(!got.contains_key(gone), "{gone}");
        }
        assert_eq!(got["content-disposition"], "attachment");
        assert_eq!(got["content-security-policy"], "sandbox");
        assert_eq!(got["x-content-type-options"], "nosniff");
        assert_eq!(got["etag"], "\"1\"");
        let named = filter_for_caller(map(&[("content-type", "text/html"), ("content-disposition", "attachment; filename=a.html")]), false);
        assert_eq!(named["content-disposition"], "attachment; filename=a.html");
    }

    #[test]
    fn only_websocket_upgrades_are_accepted() {
        let websocket = map(&[("connection", "keep-alive, Upgrade"), ("upgrade", "WebSocket")]);
        assert!(is_websocket(&Method::GET, &websocket));
        assert!(!is_websocket(&Method::POST, &websocket));
        assert!(!is_websocket(&Method::GET, &map(&[("connection", "upgrade"), ("upgrade", "h2c")])));
        assert!(!is_websocket(&Method::GET, &map(&[("upgrade", "websocket")])));
    }
}
