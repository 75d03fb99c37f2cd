//! Reads the credential of a request: an API key, which the gateway exchanges for a token, a token, or a file link.

use cobox_protocol::{
    ApiError, ErrorCode, Secret,
    key::{API_KEY_PREFIX, OPAQUE_TOKEN_PREFIX},
    secret::decodings,
};
use http::{HeaderMap, HeaderName, Method, header::AUTHORIZATION, uri::PathAndQuery};

/// Prefix of boxd's file routes.
const FILES_PREFIX: &str = "/v1/files";

/// Query parameter that contains a file link.
const LINK_PARAMETER: &str = "link";

pub(crate) const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Credential {
    ApiKey(Secret),
    /// A JWT, or an opaque token that the directory resolves.
    Token(Secret),
    /// From the URL: valid for one file.
    Link(FileLink),
}

/// A file link with the request that uses it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileLink {
    pub link: Secret,
    pub method: Method,
    /// The path after `/v1/files`, still percent-encoded.
    pub path: String,
}

impl FileLink {
    /// The link in a request for a file, if it has one.
    pub(crate) fn from_request(method: &Method, rest: &PathAndQuery) -> Option<Self> {
        let path = rest.path().strip_prefix(FILES_PREFIX)?;
        let link = rest.query()?.split('&').find_map(link_value)?;
        Some(Self { link: Secret::new(link), method: method.clone(), path: path.to_owned() })
    }

    /// Path and query without the link, as the sandbox may see them.
    pub(crate) fn strip(rest: &PathAndQuery) -> String {
        let others: Vec<&str> = rest.query().unwrap_or_default().split('&').filter(|pair| link_value(pair).is_none()).collect();
        let others = if others == [""] { Vec::new() } else { others };
        if others.is_empty() { rest.path().to_owned() } else { format!("{}?{}", rest.path(), others.join("&")) }
    }
}

/// The link in one `name=value` pair of a query. Also matches names that only the sandbox would decode to `link`.
fn link_value(pair: &str) -> Option<&str> {
    let (name, link) = pair.split_once('=')?;
    decodings(name).any(|name| name == LINK_PARAMETER).then_some(link)
}

impl Credential {
    /// Parses the value of `Authorization: Bearer` or of an `auth` frame.
    pub fn parse(secret: &str) -> Result<Self, ApiError> {
        if is_token(secret) { Ok(Credential::Token(Secret::new(secret))) } else { parse_api_key(secret) }
    }

    /// Reads `Authorization: Bearer` or `X-Api-Key`; the former takes precedence.
    pub fn from_headers(headers: &HeaderMap) -> Result<Option<Self>, ApiError> {
        let unreadable =
            |name: &str, hint: &str| ApiError::new(ErrorCode::Unauthenticated, format!("the {name} header is malformed; {hint}"));
        if let Some(value) = headers.get(AUTHORIZATION) {
            let text = value.to_str().map_err(|_| unreadable("Authorization", "send `Bearer <key or token>`"))?;
            let secret = match text.split_once(' ') {
                Some((scheme, rest)) if scheme.eq_ignore_ascii_case("bearer") => rest.trim(),
                _ => return Err(unreadable("Authorization", "send `Bearer <key or token>`")),
            };
            return Self::parse(secret).map(Some);
        }
        match headers.get(X_API_KEY) {
            Some(value) => {
                let key = value.to_str().map_err(|_| unreadable("X-Api-Key", "send the key as it was given to you"))?;
                // Some clients can only set this header, so it may contain a token too.
                Self::parse(key.trim()).map(Some)
            }
            None => Ok(None),
        }
    }
}

fn parse_api_key(secret: &str) -> Result<Credential, ApiError> {
    if secret.starts_with(API_KEY_PREFIX) {
        return Ok(Credential::ApiKey(Secret::new(secret)));
    }
    Err(ApiError::new(ErrorCode::Unauthenticated, format!("the credential is not an API key: API keys start with {API_KEY_PREFIX}")))
}

/// Whether it has the form of a token: opaque, or a JWT with three parts separated by dots. Doesn't verify it.
fn is_token(secret: &str) -> bool {
    secret.starts_with(OPAQUE_TOKEN_PREFIX) || !secret.starts_with(API_KEY_PREFIX) && secret.split('.').count() == 3
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pairs: &[(&str, &str)]) -> Result<Option<Credential>, ApiError> {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.insert(HeaderName::try_from(*name).unwrap(), value.parse().unwrap());
        }
        Credential::from_headers(&headers)
    }

    #[test]
    fn either_header_may_contain_a_key_or_a_token() {
        let key = Some(Credential::ApiKey(Secret::new("cbx_1")));
        assert_eq!(read(&[("authorization", "Bearer cbx_1")]).unwrap(), key);
        assert_eq!(read(&[("x-api-key", "cbx_1")]).unwrap(), key);
        assert_eq!(
            read(&[("authorization", "bearer a.b.c"), ("x-api-key", "cbx_1")]).unwrap(),
            Some(Credential::Token(Secret::new("a.b.c")))
        );
        assert_eq!(read(&[("x-api-key", "a.b.c")]).unwrap(), Some(Credential::Token(Secret::new("a.b.c"))));
        assert_eq!(read(&[]).unwrap(), None);
    }

    #[test]
    fn an_unknown_credential_is_refused_with_the_prefix_of_api_keys() {
        for (name, value) in [("authorization", "Bearer sk-1"), ("x-api-key", "sk-1"), ("authorization", "Bearer ")] {
            let refused = read(&[(name, value)]).unwrap_err();
            assert_eq!(refused.message, "the credential is not an API key: API keys start with cbx_", "{name}: {value}");
        }
    }

    #[test]
    fn a_link_is_removed_and_other_parameters_stay() {
        let stripped = |rest: &str| FileLink::strip(&rest.parse().unwrap());
        assert_eq!(stripped("/v1/files/a%20b?x=%2F&link=s&y&link=t"), "/v1/files/a%20b?x=%2F&y");
        assert_eq!(stripped("/v1/files/a?link=s"), "/v1/files/a");
        assert_eq!(stripped("/v1/files/a?l%69nk=s&%256Cink=t&links=u&x"), "/v1/files/a?links=u&x");
    }

    #[test]
    fn another_authorization_scheme_is_refused_rather_than_ignored() {
        assert_eq!(read(&[("authorization", "Basic Zm9v")]).unwrap_err().code, ErrorCode::Unauthenticated);
    }
}
