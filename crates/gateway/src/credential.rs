//! What a caller shows: an API key, which is swapped here, or a token, which passes.

use cobox_protocol::{
    ApiError, ErrorCode, Secret,
    key::{API_KEY_PREFIX, OPAQUE_TOKEN_PREFIX},
    secret::readings,
};
use http::{HeaderMap, HeaderName, Method, header::AUTHORIZATION, uri::PathAndQuery};

/// Where boxd has files.
const FILES: &str = "/v1/files";

/// What a link is called in a query.
const LINK: &str = "link";

pub(crate) const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Credential {
    ApiKey(Secret),
    /// A JWT, or an opaque one that the directory knows.
    Token(Secret),
    /// In the URL: good for one file.
    Link(FileLink),
}

/// A file link, and what it is used for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileLink {
    pub link: Secret,
    pub method: Method,
    /// After `/v1/files`, as it was sent.
    pub path: String,
}

impl FileLink {
    /// The link in a request for a file, where it has one.
    pub(crate) fn from_request(method: &Method, rest: &PathAndQuery) -> Option<Self> {
        let path = rest.path().strip_prefix(FILES)?;
        let link = rest.query()?.split('&').find_map(link_in)?;
        Some(Self { link: Secret::new(link), method: method.clone(), path: path.to_owned() })
    }

    /// What a sandbox may see of a request that has a link: the rest of its query.
    pub(crate) fn removed(rest: &PathAndQuery) -> String {
        let others: Vec<&str> = rest.query().unwrap_or_default().split('&').filter(|pair| link_in(pair).is_none()).collect();
        let others = if others == [""] { Vec::new() } else { others };
        if others.is_empty() { rest.path().to_owned() } else { format!("{}?{}", rest.path(), others.join("&")) }
    }
}

/// The link in one pair of a query, also where its name is written as the sandbox would read it and not as we do.
fn link_in(pair: &str) -> Option<&str> {
    let (name, link) = pair.split_once('=')?;
    readings(name).any(|name| name == LINK).then_some(link)
}

impl Credential {
    /// As it stands in `Authorization: Bearer`, and in an `auth` frame.
    pub fn read(secret: &str) -> Result<Self, ApiError> {
        if is_token(secret) { Ok(Credential::Token(Secret::new(secret))) } else { api_key(secret) }
    }

    /// Reads `Authorization: Bearer` or `X-Api-Key`; the first decides when both are there.
    pub fn from_headers(headers: &HeaderMap) -> Result<Option<Self>, ApiError> {
        let unreadable =
            |name: &str, hint: &str| ApiError::new(ErrorCode::Unauthenticated, format!("the {name} header can't be read; {hint}"));
        if let Some(value) = headers.get(AUTHORIZATION) {
            let text = value.to_str().map_err(|_| unreadable("Authorization", "send `Bearer <key or token>`"))?;
            let secret = match text.split_once(' ') {
                Some((scheme, rest)) if scheme.eq_ignore_ascii_case("bearer") => rest.trim(),
                _ => return Err(unreadable("Authorization", "send `Bearer <key or token>`")),
            };
            return Self::read(secret).map(Some);
        }
        match headers.get(X_API_KEY) {
            Some(value) => {
                let key = value.to_str().map_err(|_| unreadable("X-Api-Key", "send the key as it was given to you"))?;
                // A token too: there are clients that know no other header.
                Self::read(key.trim()).map(Some)
            }
            None => Ok(None),
        }
    }
}

fn api_key(secret: &str) -> Result<Credential, ApiError> {
    if secret.starts_with(API_KEY_PREFIX) {
        return Ok(Credential::ApiKey(Secret::new(secret)));
    }
    Err(ApiError::new(ErrorCode::Unauthenticated, format!("that is not an API key: they start with {API_KEY_PREFIX}")))
}

/// Three parts and dots between them, as every JWT, or an opaque one; whether it is a good one is for others to say.
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
    fn a_key_is_a_key_in_either_header_and_what_has_three_parts_is_a_token() {
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
    fn what_is_neither_is_told_how_keys_start() {
        for (name, value) in [("authorization", "Bearer sk-1"), ("x-api-key", "sk-1"), ("authorization", "Bearer ")] {
            let refused = read(&[(name, value)]).unwrap_err();
            assert_eq!(refused.message, "that is not an API key: they start with cbx_", "{name}: {value}");
        }
    }

    #[test]
    fn a_link_is_removed_and_what_else_was_asked_for_stays() {
        let removed = |rest: &str| FileLink::removed(&rest.parse().unwrap());
        assert_eq!(removed("/v1/files/a%20b?x=%2F&link=s&y&link=t"), "/v1/files/a%20b?x=%2F&y");
        assert_eq!(removed("/v1/files/a?link=s"), "/v1/files/a");
        assert_eq!(removed("/v1/files/a?l%69nk=s&%256Cink=t&links=u&x"), "/v1/files/a?links=u&x");
    }

    #[test]
    fn another_scheme_is_refused_rather_than_ignored() {
        assert_eq!(read(&[("authorization", "Basic Zm9v")]).unwrap_err().code, ErrorCode::Unauthenticated);
    }
}
