//! File links: URLs that let a browser without another credential fetch or put one file.

use std::sync::Arc;

use cobox_protocol::{ApiError, Capability, CapabilitySet, ErrorCode, Secret, SessionId, token::FileLinkResponse};
use cobox_token::LinkedFile;

use super::issue::{TokenIssuer, TokenWish};
use crate::domain::{
    access::{
        self,
        request_context::Asking,
        sandbox_lookup::find,
        session_access::{Entry, living, way_in},
    },
    context::Deployment,
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
    pub const fn word(self) -> &'static str {
        match self {
            LinkMethod::Get => "GET",
            LinkMethod::Put => "PUT",
        }
    }
    pub fn from_word(word: &str) -> Option<Self> {
        [LinkMethod::Get, LinkMethod::Put].into_iter().find(|m| m.word().eq_ignore_ascii_case(word))
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
pub struct LinkWish<'a> {
    pub path: &'a str,
    pub method: LinkMethod,
    /// In seconds.
    pub ttl: Option<u32>,
}

impl LinkWish<'_> {
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
pub struct MadeLink {
    pub link: Secret,
    pub told: FileLinkResponse,
}

pub struct FileLinks {
    pub deployment: Arc<Deployment>,
    pub issuer: Arc<TokenIssuer>,
}

impl FileLinks {
    pub async fn of_session(&self, asking: &Asking<'_>, id: &SessionId, wish: LinkWish<'_>) -> Result<FileLinkResponse, ApiError> {
        wish.check()?;
        let (bound, entry) = living(&self.deployment, asking.caller, id).await?;
        Ok(self.link(asking, &bound.sandbox, Some(&bound.session), entry, wish).await?.told)
    }

    /// As [`FileLinks::of_session`], for a sandbox with or without a session.
    pub async fn of_sandbox(&self, asking: &Asking<'_>, id_or_name: &str, wish: LinkWish<'_>) -> Result<MadeLink, ApiError> {
        wish.check()?;
        let d = &self.deployment;
        let sandbox = find(d, asking.caller, id_or_name).await?;
        let (session, entry) = way_in(d, &asking.caller.principal, &sandbox).await?;
        self.link(asking, &sandbox, session.as_ref(), entry, wish).await
    }

    async fn link(
        &self,
        asking: &Asking<'_>,
        sandbox: &Sandbox,
        session: Option<&Session>,
        entry: Entry,
        LinkWish { path, method, ttl }: LinkWish<'_>,
    ) -> Result<MadeLink, ApiError> {
        let needed = method.needs();
        let granted = entry.bound(access::grant(&self.deployment.policy(), asking.caller, None)?)?;
        if !granted.contains(needed) {
            let message = format!("method: {} needs the capability `{needed}`, which you don't have here", method.word());
            return Err(ApiError::new(ErrorCode::CapabilityDenied, message));
        }
        let ttl = ttl.unwrap_or(MAX_LINK_SECONDS).min(MAX_LINK_SECONDS);
        let wish = TokenWish { ttl: Some(ttl), lineage: entry.lineage(), ..TokenWish::new(CapabilitySet::of(&[needed])) };
        let issued = self.issuer.issue_in(asking, sandbox, session, wish).await?;
        let encoded = encode(path);
        let file = LinkedFile { method: method.word().to_owned(), path: encoded.clone() };
        let link = self.deployment.tokens.link(sandbox, &issued.draft.claims, file);
        // Always the gateway's URL: a link is not a token, and no sandbox may see it.
        let base = self.deployment.gateway(sandbox).http_base_url;
        let told = FileLinkResponse {
            url: Secret::new(format!("{base}{FILES}{encoded}?{LINK}={}", link.expose())),
            expires_at: issued.draft.expires_at,
            path: path.to_owned(),
            method: method.word().to_owned(),
            jti: issued.draft.jti.to_string(),
        };
        Ok(MadeLink { link, told })
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
    fn a_path_survives_its_way_through_a_url() {
        for path in ["/workspace/a b.txt", "/ü/%41?x#y", "/+&=;"] {
            assert!(encode(path).bytes().all(|b| b.is_ascii_graphic() && !b"?#".contains(&b)));
            assert_eq!(decode(&encode(path)).unwrap(), path.as_bytes());
        }
        for bad in ["%", "%4", "%zz", "%+1"] {
            assert_eq!(decode(bad), None, "{bad}");
        }
    }
}
