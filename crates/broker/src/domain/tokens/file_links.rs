//! File links: URLs that let a browser without another credential fetch or put one file.

use std::sync::Arc;

use cobox_protocol::{ApiError, Capability, CapabilitySet, ErrorCode, Secret, SessionId, token::FileLinkResponse};
use cobox_token::LinkedFile;

use super::issue::{TokenIssuer, TokenParams};
use crate::domain::{
    access::{
        self,
        request_context::RequestContext,
        sandbox_lookup::find,
        session_access::{SessionEntry, find_entry, live_session},
    },
    context::BrokerContext,
    model::{Sandbox, Session},
};

/// Longest life of a link, in seconds: URLs end up in histories and logs.
const MAX_LINK_SECONDS: u32 = 900;
/// Longest path, in bytes: the kernel's own limit.
const MAX_PATH_BYTES: usize = 4096;
/// boxd's route for files, and the query parameter that holds the link.
const FILES: &str = "/files";
const LINK: &str = "link";

/// What a link allows to do with its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkMethod {
    Get,
    Put,
}

impl LinkMethod {
    pub const fn as_str(self) -> &'static str {
        match self {
            LinkMethod::Get => "GET",
            LinkMethod::Put => "PUT",
        }
    }
    pub fn parse(word: &str) -> Option<Self> {
        [LinkMethod::Get, LinkMethod::Put].into_iter().find(|m| m.as_str().eq_ignore_ascii_case(word))
    }
    const fn needs(self) -> Capability {
        match self {
            LinkMethod::Get => Capability::FsRead,
            LinkMethod::Put => Capability::FsWrite,
        }
    }
}

/// Parameters of a new link to one file.
#[derive(Clone, Copy, Debug)]
pub struct FileLinkParams<'a> {
    pub path: &'a str,
    pub method: LinkMethod,
    /// Lifetime of the link, in seconds.
    pub ttl: Option<u32>,
}

impl FileLinkParams<'_> {
    fn check(&self) -> Result<(), ApiError> {
        let path = self.path;
        if !path.starts_with('/') || path.len() > MAX_PATH_BYTES || path.contains('\0') || path.split('/').any(|s| matches!(s, "." | ".."))
        {
            return Err(ApiError::invalid("path: must be absolute, at most 4096 bytes, and have no `.` or `..` in it"));
        }
        if self.ttl == Some(0) {
            return Err(ApiError::invalid("ttl: must be at least 1 second"));
        }
        Ok(())
    }
}

/// A link, with the response that describes it.
pub struct IssuedFileLink {
    pub link: Secret,
    pub response: FileLinkResponse,
}

pub struct FileLinks {
    pub context: Arc<BrokerContext>,
    pub issuer: Arc<TokenIssuer>,
}

impl FileLinks {
    pub async fn of_session(
        &self,
        request: &RequestContext<'_>,
        id: &SessionId,
        params: FileLinkParams<'_>,
    ) -> Result<FileLinkResponse, ApiError> {
        params.check()?;
        let (bound, entry) = live_session(&self.context, request.caller, id).await?;
        Ok(self.link(request, &bound.sandbox, Some(&bound.session), entry, params).await?.response)
    }

    /// As [`FileLinks::of_session`], for a sandbox with or without a session.
    pub async fn of_sandbox(
        &self,
        request: &RequestContext<'_>,
        id_or_name: &str,
        params: FileLinkParams<'_>,
    ) -> Result<IssuedFileLink, ApiError> {
        params.check()?;
        let context = &self.context;
        let sandbox = find(context, request.caller, id_or_name).await?;
        let (session, entry) = find_entry(context, &request.caller.principal, &sandbox).await?;
        self.link(request, &sandbox, session.as_ref(), entry, params).await
    }

    async fn link(
        &self,
        request: &RequestContext<'_>,
        sandbox: &Sandbox,
        session: Option<&Session>,
        entry: SessionEntry,
        FileLinkParams { path, method, ttl }: FileLinkParams<'_>,
    ) -> Result<IssuedFileLink, ApiError> {
        let needed = method.needs();
        let granted = entry.limit(access::grant(&self.context.policy(), request.caller, None)?)?;
        if !granted.contains(needed) {
            let message = format!("method: {} needs the capability `{needed}`, which you don't have here", method.as_str());
            return Err(ApiError::new(ErrorCode::CapabilityDenied, message));
        }
        let ttl = ttl.unwrap_or(MAX_LINK_SECONDS).min(MAX_LINK_SECONDS);
        let params = TokenParams { ttl: Some(ttl), origin: entry.origin(), ..TokenParams::new(CapabilitySet::of(&[needed])) };
        let issued = self.issuer.issue_in(request, sandbox, session, params).await?;
        let encoded = encode(path);
        let file = LinkedFile { method: method.as_str().to_owned(), path: encoded.clone() };
        let link = self.context.tokens.link(sandbox, &issued.draft.claims, file);
        // Always the gateway's URL: a link is not a token, and no sandbox may see it.
        let base = self.context.gateway(sandbox).http_base_url;
        let response = FileLinkResponse {
            url: Secret::new(format!("{base}{FILES}{encoded}?{LINK}={}", link.expose())),
            expires_at: issued.draft.expires_at,
            path: path.to_owned(),
            method: method.as_str().to_owned(),
            jti: issued.draft.jti.to_string(),
        };
        Ok(IssuedFileLink { link, response })
    }
}

/// Percent-encodes a path for a URL.
fn encode(path: &str) -> String {
    let mut out = String::with_capacity(path.len());
    for byte in path.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte) {
            out.push(char::from(byte));
        } else {
            out += &format!("%{byte:02X}");
        }
    }
    out
}

/// Percent-decodes a URL's path; `None` if it is malformed.
pub fn decode(path: &str) -> Option<Vec<u8>> {
    let mut bytes = path.bytes();
    let mut out = Vec::with_capacity(path.len());
    while let Some(byte) = bytes.next() {
        out.push(match byte {
            b'%' => {
                let mut digit = || char::from(bytes.next()?).to_digit(16);
                u8::try_from(digit()? * 16 + digit()?).ok()?
            }
            plain => plain,
        });
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_survives_percent_encoding() {
        for path in ["/workspace/a b.txt", "/ü/%41?x#y", "/+&=;"] {
            assert!(encode(path).bytes().all(|b| b.is_ascii_graphic() && !b"?#".contains(&b)));
            assert_eq!(decode(&encode(path)).unwrap(), path.as_bytes());
        }
        for bad in ["%", "%4", "%zz", "%+1"] {
            assert_eq!(decode(bad), None, "{bad}");
        }
    }
}
