//! Control-plane client: sessions, sandboxes, keys and audit, authenticated with an API key.

use std::{sync::Once, time::Duration};

use cobox_protocol::{
    KeyId, SandboxId, Secret, SessionId, Timestamp,
    audit::{AuditEntry, AuditHeads, AuditLink},
    host::is_loopback,
    key::{CreateKey, CreatedKey, ExpireKey, KeyInfo, PrincipalInfo},
    sandbox::{CreateSandbox, PatchSandbox, RestoreResponse, RestoreSandbox, SandboxInfo, SandboxUsage},
    session::{HeartbeatResponse, NegotiateRequest, NegotiateResponse, Page, RefreshRequest, RefreshResponse, SessionInfo},
    token::{
        DelegateRequest, DelegateResponse, FileLinkRequest, FileLinkResponse, PrincipalAccess, RevokeRequest, RevokeResponse,
        RotateKeyRequest, RotateKeyResponse, ShareInfo, ShareRequest,
    },
};
use http::Method;
use serde::de::DeserializeOwned;

use crate::{
    ClientError, Dataplane, Session,
    call::{Call, Credential, Sender, read_json},
    error::innermost,
    path::encode_segment,
};

/// Timeout for opening a connection; a broker that does not accept within it is considered unreachable.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout of a control-plane response: more than twice the time that `ensure` waits for a sandbox before it returns 423.
const CONTROL_TIMEOUT: Duration = Duration::from_secs(60);
/// Default time to wait for a starting sandbox.
const START_DEADLINE: Duration = Duration::from_secs(120);
/// Keepalive interval; a peer that vanished without closing is detected after a few of them.
const TCP_KEEPALIVE: Duration = Duration::from_secs(30);
/// Maximum size of a control-plane response, in bytes: a full page of sessions is well below it.
const MAX_CONTROL_ANSWER: usize = 8 * 1024 * 1024;

/// Client of one broker, with an API key.
#[derive(Clone)]
pub struct Client {
    base: String,
    pub(crate) key: Credential,
    pub(crate) sender: Sender,
}

/// Filter of a session list.
#[derive(Clone, Debug, Default)]
pub struct SessionFilter {
    pub thread_id: Option<String>,
    /// Tags as `key:value`, or `key` for any value; a session must match all of them.
    pub tags: Vec<String>,
    pub limit: Option<u32>,
    pub cursor: Option<String>,
}

/// Filter of an audit list.
#[derive(Clone, Debug, Default)]
pub struct AuditFilter {
    /// Name or id of a sandbox.
    pub sandbox: Option<String>,
    /// Id of a token.
    pub token: Option<String>,
}

impl Client {
    pub fn new(url: &str, api_key: Secret) -> Result<Self, ClientError> {
        Self::with_roots(url, api_key, &[])
    }

    /// As [`Client::new`], and also trusts these certificate authorities (PEM) in addition to the system's.
    pub fn trusting(url: &str, api_key: Secret, authorities: &[u8]) -> Result<Self, ClientError> {
        let invalid = |cause: String| ClientError::InvalidAuthority { cause };
        let roots = reqwest::Certificate::from_pem_bundle(authorities).map_err(|e| invalid(innermost(&e).to_string()))?;
        if roots.is_empty() {
            return Err(invalid("it contains no PEM certificate".to_owned()));
        }
        Self::with_roots(url, api_key, &roots)
    }

    fn with_roots(url: &str, api_key: Secret, roots: &[reqwest::Certificate]) -> Result<Self, ClientError> {
        install_tls();
        let parsed = parse_url(url)?;
        let builder = || {
            let builder = reqwest::Client::builder()
                .connect_timeout(CONNECT_TIMEOUT)
                .tcp_keepalive(TCP_KEEPALIVE)
                // A redirect would send the API key to its target.
                .redirect(reqwest::redirect::Policy::none())
                .user_agent(concat!("cobox/", env!("CARGO_PKG_VERSION")));
            // A proxy cannot reach a broker on loopback, and must not see its key.
            if is_loopback(parsed.host_str()) { builder.no_proxy() } else { builder }
        };
        let builder_with_roots = || if roots.is_empty() { builder() } else { builder().tls_certs_merge(roots.iter().cloned()) };
        // A machine without certificate authorities, such as a bare container, can still use plain HTTP and the authorities given here.
        let built = |kept: usize| match builder_with_roots().pool_max_idle_per_host(kept).build() {
            Err(_) if parsed.scheme() == "http" || !roots.is_empty() => {
                builder().pool_max_idle_per_host(kept).tls_certs_only(roots.iter().cloned()).build()
            }
            other => other,
        };
        let invalid = |e: reqwest::Error| ClientError::InvalidUrl { url: url.to_owned(), cause: innermost(&e).to_string() };
        let (http, unpooled) = (built(usize::MAX).map_err(invalid)?, built(0).map_err(invalid)?);
        let base = url.trim_end_matches('/').to_owned();
        Ok(Self { base, key: Credential::ApiKey(api_key), sender: Sender { http, unpooled, start_deadline: START_DEADLINE } })
    }

    /// How long to wait for a starting sandbox before [`cobox_protocol::ErrorCode::SandboxStarting`] is returned.
    pub fn with_start_deadline(mut self, deadline: Duration) -> Self {
        self.sender.start_deadline = deadline;
        self
    }

    pub fn url(&self) -> &str {
        &self.base
    }

    /// Requests access to a thread's sandbox; waits while the sandbox starts.
    pub async fn negotiate(&self, request: &NegotiateRequest) -> Result<NegotiateResponse, ClientError> {
        self.json(self.post("/v1/sandbox/sessions").json(request)).await
    }

    /// Negotiates a session and keeps its token fresh for the lifetime of the handle.
    pub async fn open(&self, request: &NegotiateRequest) -> Result<Session, ClientError> {
        Ok(Session::new(self.clone(), self.negotiate(request).await?))
    }

    /// Returns a session by id, with a new token.
    pub async fn get_session(&self, id: &SessionId) -> Result<NegotiateResponse, ClientError> {
        self.json(self.get(&format!("/v1/sandbox/sessions/{id}"))).await
    }

    /// As [`Client::open`], for an existing session by id.
    pub async fn attach(&self, id: &SessionId) -> Result<Session, ClientError> {
        Ok(Session::new(self.clone(), self.get_session(id).await?))
    }

    pub async fn list_sessions(&self, filter: &SessionFilter) -> Result<Page<SessionInfo>, ClientError> {
        let mut query = Vec::new();
        if let Some(thread) = &filter.thread_id {
            query.push("scope_type=thread".to_owned());
            query.push(format!("scope_id={}", encode_segment(thread.as_bytes())));
        }
        query.extend(filter.tags.iter().map(|t| tag(t)));
        self.json(self.get(&paged("/v1/sandbox/sessions", query, filter.limit, filter.cursor.as_deref()))).await
    }

    /// Extends the lease of a session's sandbox. Does not refresh the token.
    pub async fn heartbeat(&self, id: &SessionId) -> Result<HeartbeatResponse, ClientError> {
        self.json(self.post(&format!("/v1/sandbox/sessions/{id}/heartbeat"))).await
    }

    pub async fn refresh(&self, id: &SessionId, request: &RefreshRequest) -> Result<RefreshResponse, ClientError> {
        self.json(self.post(&format!("/v1/sandbox/sessions/{id}/refresh")).json(request)).await
    }

    pub async fn release(&self, id: &SessionId) -> Result<(), ClientError> {
        self.no_content(self.delete(&format!("/v1/sandbox/sessions/{id}"))).await
    }

    /// Creates a narrower token from the caller's own grant, or from `parent_token`, with which it then ends.
    pub async fn delegate(&self, id: &SessionId, request: &DelegateRequest) -> Result<DelegateResponse, ClientError> {
        self.json(self.post(&format!("/v1/sandbox/sessions/{id}/delegate")).json(request)).await
    }

    /// Grants another principal access to a session, with at most these capabilities.
    pub async fn share(&self, id: &SessionId, request: &ShareRequest) -> Result<ShareInfo, ClientError> {
        self.json(self.post(&format!("/v1/sandbox/sessions/{id}/share")).json(request)).await
    }

    pub async fn list_shares(&self, id: &SessionId) -> Result<Page<ShareInfo>, ClientError> {
        self.json(self.get(&format!("/v1/sandbox/sessions/{id}/share"))).await
    }

    /// Returns whether a principal can enter the session's sandbox, with its share and without it.
    pub async fn principal_access(&self, id: &SessionId, principal: &str) -> Result<PrincipalAccess, ClientError> {
        self.json(self.get(&format!("/v1/sandbox/sessions/{id}/share/{}", encode_segment(principal.as_bytes())))).await
    }

    /// Ends a share and every token derived from it.
    pub async fn unshare(&self, id: &SessionId, principal: &str) -> Result<(), ClientError> {
        self.no_content(self.delete(&format!("/v1/sandbox/sessions/{id}/share/{}", encode_segment(principal.as_bytes())))).await
    }

    /// Creates a URL for one file, usable by anyone who has it.
    pub async fn file_link(&self, id: &SessionId, request: &FileLinkRequest) -> Result<FileLinkResponse, ClientError> {
        self.json(self.post(&format!("/v1/sandbox/sessions/{id}/file-links")).json(request)).await
    }

    /// Revokes tokens by id, grant, session, principal or sandbox; for operators.
    pub async fn revoke_tokens(&self, request: &RevokeRequest) -> Result<RevokeResponse, ClientError> {
        self.json(self.post("/internal/tokens/revoke").json(request)).await
    }

    /// Rotates the signing key of a sandbox's tokens; for operators.
    pub async fn rotate_key(&self, id: &SandboxId, request: &RotateKeyRequest) -> Result<RotateKeyResponse, ClientError> {
        self.json(self.post(&format!("/internal/sandboxes/{id}/rotate-key")).json(request)).await
    }

    pub async fn create_sandbox(&self, request: &CreateSandbox) -> Result<SandboxInfo, ClientError> {
        self.json(self.post("/v1/sandboxes").json(request)).await
    }

    pub async fn list_sandboxes(&self, limit: Option<u32>, cursor: Option<&str>) -> Result<Page<SandboxInfo>, ClientError> {
        self.list_tagged_sandboxes(&[], limit, cursor).await
    }

    /// Sandboxes with all of these tags, each as `key:value`, or `key` for any value.
    pub async fn list_tagged_sandboxes(
        &self,
        tags: &[String],
        limit: Option<u32>,
        cursor: Option<&str>,
    ) -> Result<Page<SandboxInfo>, ClientError> {
        self.json(self.get(&paged("/v1/sandboxes", tags.iter().map(|t| tag(t)).collect(), limit, cursor))).await
    }

    pub async fn patch_sandbox(&self, id_or_name: &str, change: &PatchSandbox) -> Result<SandboxInfo, ClientError> {
        let path = format!("/v1/sandboxes/{}", encode_segment(id_or_name.as_bytes()));
        self.json(self.call(Method::PATCH, &path).json(change)).await
    }

    /// Returns a sandbox by id or name.
    pub async fn get_sandbox(&self, id_or_name: &str) -> Result<SandboxInfo, ClientError> {
        self.json(self.get(&format!("/v1/sandboxes/{}", encode_segment(id_or_name.as_bytes())))).await
    }

    /// Deletes a sandbox. It can be restored for a while if the policy allows it.
    pub async fn delete_sandbox(&self, id_or_name: &str) -> Result<(), ClientError> {
        self.no_content(self.delete(&format!("/v1/sandboxes/{}", encode_segment(id_or_name.as_bytes())))).await
    }

    /// Deletes a sandbox, or an already deleted one, and removes its files immediately.
    pub async fn delete_sandbox_permanently(&self, id_or_name: &str) -> Result<(), ClientError> {
        self.no_content(self.delete(&format!("/v1/sandboxes/{}?permanent=true", encode_segment(id_or_name.as_bytes())))).await
    }

    /// Lists deleted sandboxes that can be restored.
    pub async fn list_deleted_sandboxes(&self, limit: Option<u32>, cursor: Option<&str>) -> Result<Page<SandboxInfo>, ClientError> {
        self.json(self.get(&paged("/v1/sandboxes", vec!["deleted=true".to_owned()], limit, cursor))).await
    }

    pub async fn restore_sandbox(&self, id_or_name: &str, request: &RestoreSandbox) -> Result<RestoreResponse, ClientError> {
        let path = format!("/v1/sandboxes/{}/restore", encode_segment(id_or_name.as_bytes()));
        self.json(self.call(Method::POST, &path).json(request)).await
    }

    /// Returns the amount of data that a deletion would erase.
    pub async fn sandbox_usage(&self, id_or_name: &str) -> Result<SandboxUsage, ClientError> {
        self.json(self.get(&format!("/v1/sandboxes/{}/usage", encode_segment(id_or_name.as_bytes())))).await
    }

    /// Counts the files of a deleted sandbox, which a permanent deletion would erase.
    pub async fn deleted_sandbox_usage(&self, id_or_name: &str) -> Result<SandboxUsage, ClientError> {
        self.json(self.get(&format!("/v1/sandboxes/{}/usage?deleted=true", encode_segment(id_or_name.as_bytes())))).await
    }

    /// Lists the workspace's audit, newest first; for operators.
    pub async fn list_audit(
        &self,
        filter: &AuditFilter,
        limit: Option<u32>,
        cursor: Option<&str>,
    ) -> Result<Page<AuditEntry>, ClientError> {
        let named = [("sandbox", &filter.sandbox), ("token", &filter.token)];
        let query = named.iter().filter_map(|(name, v)| Some(format!("{name}={}", encode_segment(v.as_ref()?.as_bytes())))).collect();
        self.json(self.get(&paged("/v1/audit", query, limit, cursor))).await
    }

    /// Returns the end of each broker's audit chain; for operators.
    pub async fn audit_heads(&self) -> Result<AuditHeads, ClientError> {
        self.json(self.get("/v1/audit/heads")).await
    }

    /// Returns links of an audit chain after a number, oldest first; empty at the end of the chain.
    pub async fn audit_links(&self, writer: &str, after: u64, limit: u32) -> Result<Vec<AuditLink>, ClientError> {
        let path = format!("/v1/audit/links?writer={}&after={after}&limit={limit}", encode_segment(writer.as_bytes()));
        Ok(self.json::<Page<AuditLink>>(self.get(&path)).await?.items)
    }

    pub async fn list_keys(&self, limit: Option<u32>, cursor: Option<&str>) -> Result<Page<KeyInfo>, ClientError> {
        self.json(self.get(&paged("/v1/keys", Vec::new(), limit, cursor))).await
    }

    pub async fn create_key(&self, request: &CreateKey) -> Result<CreatedKey, ClientError> {
        self.json(self.post("/v1/keys").json(request)).await
    }

    pub async fn revoke_key(&self, id: &KeyId) -> Result<(), ClientError> {
        self.no_content(self.delete(&format!("/v1/keys/{id}"))).await
    }

    /// Sets the expiry of a key.
    pub async fn expire_key(&self, id: &KeyId, expires_at: Timestamp) -> Result<KeyInfo, ClientError> {
        self.json(self.call(Method::PATCH, &format!("/v1/keys/{id}")).json(&ExpireKey { expires_at })).await
    }

    /// Lists the principals of a workspace, the caller's own by default; for operators.
    pub async fn list_principals(&self, workspace: Option<&str>, cursor: Option<&str>) -> Result<Page<PrincipalInfo>, ClientError> {
        self.json(self.get(&paged("/v1/principals", within(workspace), None, cursor))).await
    }

    /// Revokes every key, identity and token of a principal.
    pub async fn disable_principal(&self, workspace: Option<&str>, name: &str) -> Result<(), ClientError> {
        let path = format!("/v1/principals/{}/disable", encode_segment(name.as_bytes()));
        self.no_content(self.post(&paged(&path, within(workspace), None, None))).await
    }

    /// Enables a principal again; it needs new keys.
    pub async fn enable_principal(&self, workspace: Option<&str>, name: &str) -> Result<(), ClientError> {
        let path = format!("/v1/principals/{}/enable", encode_segment(name.as_bytes()));
        self.no_content(self.post(&paged(&path, within(workspace), None, None))).await
    }

    /// Dataplane of a sandbox without a session, at the address that the broker returned. The gateway replaces the API key by a token on each
    /// call.
    pub fn sandbox_at(&self, info: &SandboxInfo) -> Dataplane {
        Dataplane::new(self.sender.clone(), info.http_base_url.clone(), self.key.clone())
    }

    /// As [`Client::sandbox_at`], by id alone, for a broker that serves its sandboxes under its own address.
    pub fn sandbox(&self, id: &SandboxId) -> Dataplane {
        Dataplane::new(self.sender.clone(), format!("{}/dp/{id}/v1", self.base), self.key.clone())
    }

    pub(crate) fn get(&self, path: &str) -> Call {
        self.call(Method::GET, path)
    }
    pub(crate) fn post(&self, path: &str) -> Call {
        self.call(Method::POST, path)
    }
    pub(crate) fn delete(&self, path: &str) -> Call {
        self.call(Method::DELETE, path)
    }
    fn call(&self, method: Method, path: &str) -> Call {
        Call::new(method, format!("{}{path}", self.base)).timeout(CONTROL_TIMEOUT)
    }

    pub(crate) async fn json<T: DeserializeOwned>(&self, call: Call) -> Result<T, ClientError> {
        let response = self.sender.send(&call, &self.key).await?;
        read_json(&call.url, response, MAX_CONTROL_ANSWER).await
    }

    pub(crate) async fn no_content(&self, call: Call) -> Result<(), ClientError> {
        self.sender.send(&call, &self.key).await.map(drop)
    }
}

/// Checks a broker URL without creating a client.
pub fn check_url(url: &str) -> Result<(), ClientError> {
    parse_url(url).map(drop)
}

fn parse_url(url: &str) -> Result<reqwest::Url, ClientError> {
    let invalid = |cause: String| ClientError::InvalidUrl { url: url.to_owned(), cause };
    let parsed = reqwest::Url::parse(url).map_err(|e| invalid(e.to_string()))?;
    if !matches!(parsed.scheme(), "http" | "https") {
        return Err(invalid(format!("`{}` is neither http nor https", parsed.scheme())));
    }
    if !parsed.username().is_empty() || parsed.password().is_some() {
        return Err(invalid("a URL must not carry credentials".to_owned()));
    }
    Ok(parsed)
}

fn paged(path: &str, mut query: Vec<String>, limit: Option<u32>, cursor: Option<&str>) -> String {
    query.extend(limit.map(|n| format!("limit={n}")));
    query.extend(cursor.map(|c| format!("cursor={}", encode_segment(c.as_bytes()))));
    if query.is_empty() { path.to_owned() } else { format!("{path}?{}", query.join("&")) }
}

fn within(workspace: Option<&str>) -> Vec<String> {
    workspace.map(|w| format!("workspace={}", encode_segment(w.as_bytes()))).into_iter().collect()
}

fn tag(filter: &str) -> String {
    format!("tag={}", encode_segment(filter.as_bytes()))
}

/// rustls requires a process-wide crypto provider to be installed once.
fn install_tls() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // Fails only if the program has already installed one, which is used then.
        let _ = rustls::crypto::ring::default_provider().install_default();
    });
}
