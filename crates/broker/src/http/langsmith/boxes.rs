//! `/v2/sandboxes/boxes`: sandboxes in the shapes of the LangSmith API. An unsupported option is refused with its name.

use std::time::Duration;

use axum::{
    Json,
    extract::{Path, State},
};
use cobox_protocol::{
    ApiError, ErrorCode, SandboxId,
    langsmith::{
        boxes::{BoxInfo, BoxList, BoxState, BoxStatus, BoxVolume, CreateBox, DownloadUrl, DownloadUrlRequest, PatchBox},
        exec::RunConfig,
    },
    resources::{Cpus, Env, MountParams, Resources},
    sandbox::{CreateSandbox, PatchSandbox},
    session::State as LifeState,
    tags,
};
use http::StatusCode;
use serde::Deserialize;

use crate::{
    domain::{
        access::request_context::RequestContext,
        resources::langsmith_sandboxes::PolledSandbox,
        tokens::file_links::{FileLinkParams, LinkMethod},
    },
    http::{
        Api,
        auth::Authenticated,
        body::{JsonBody, MaybeJsonBody},
        error::Failure,
        paging::{PageQuery, Params, TagParams, page},
    },
};

/// Default time for a start, as in the SDKs.
const DEFAULT_WAIT: Duration = Duration::from_secs(30);
/// Longest time that a create request may wait on one connection.
const MAX_WAIT: Duration = Duration::from_secs(300);
/// Both durations of the SDKs are whole minutes.
const MINUTE: u64 = 60;

pub async fn create(
    State(api): State<Api>,
    auth: Authenticated,
    JsonBody(params): JsonBody<CreateBox>,
) -> Result<(StatusCode, Json<BoxInfo>), Failure> {
    let waits = params.wait_for_ready.unwrap_or(true);
    let wait = match waits {
        true => wait(params.timeout)?,
        false => Duration::ZERO,
    };
    let request = RequestContext { wait, ..auth.request_context() };
    let params = read_params(params)?;
    let made = match waits {
        true => api.services.langsmith_sandboxes.create_running(&request, params).await?,
        false => api.services.sandboxes.create(&request, params).await?,
    };
    Ok((StatusCode::CREATED, Json(to_response(made.into()))))
}

#[derive(Deserialize)]
pub struct ListBoxesQuery {
    page_size: Option<String>,
    limit: Option<String>,
    cursor: Option<String>,
    status: Option<BoxState>,
    /// `me`, or the name of the creator.
    created_by: Option<String>,
    label: Option<String>,
    sort_by: Option<String>,
    sort_order: Option<String>,
}

impl ListBoxesQuery {
    /// There is only one sort order, and labels are filtered as in the other lists.
    fn check(&self) -> Result<(), ApiError> {
        if self.label.is_some() {
            return Err(ApiError::invalid("label: is not supported here; use tag=key:value"));
        }
        if self.sort_by.as_deref().is_some_and(|by| by != "created_at") {
            return Err(ApiError::invalid("sort_by: must be created_at"));
        }
        if self.sort_order.as_deref().is_some_and(|order| order != "desc") {
            return Err(ApiError::invalid("sort_order: must be desc, the newest first"));
        }
        Ok(())
    }
}

pub async fn list(
    State(api): State<Api>,
    auth: Authenticated,
    Params(query): Params<ListBoxesQuery>,
    TagParams(tags): TagParams,
) -> Result<Json<BoxList>, Failure> {
    query.check()?;
    // The SDKs send no page size and read a single response, so it contains all boxes.
    let all = api.context.config.max_sandboxes_per_workspace;
    let maker = query.created_by.map(|by| if by == "me" { auth.caller.principal.name.clone() } else { by });
    let params = PageQuery { limit: query.page_size.or(query.limit), cursor: query.cursor }.page_params_or::<SandboxId>(all)?;
    let found =
        page(api.services.langsmith_sandboxes.list(&auth.request_context(), &tags, &params).await?, &params, |s| s.info.id.to_string());
    // A page may have fewer items than requested, and further pages may follow.
    let is_wanted = |b: &BoxInfo| query.status.is_none_or(|s| s == b.status) && maker.as_ref().is_none_or(|m| *m == b.created_by);
    let boxes: Vec<BoxInfo> = found.items.into_iter().map(to_response).filter(is_wanted).collect();
    Ok(Json(BoxList { sandboxes: boxes.clone(), items: boxes, next_cursor: found.next_cursor, offset: 0 }))
}

pub async fn show(State(api): State<Api>, auth: Authenticated, Path(name): Path<String>) -> Result<Json<BoxInfo>, Failure> {
    Ok(Json(to_response(api.services.langsmith_sandboxes.get(&auth.request_context(), &name).await?)))
}

pub async fn status(State(api): State<Api>, auth: Authenticated, Path(name): Path<String>) -> Result<Json<BoxStatus>, Failure> {
    let BoxInfo { status, status_message, .. } = to_response(api.services.langsmith_sandboxes.get(&auth.request_context(), &name).await?);
    Ok(Json(BoxStatus { status, status_message }))
}

pub async fn change(
    State(api): State<Api>,
    auth: Authenticated,
    Path(name): Path<String>,
    JsonBody(params): JsonBody<PatchBox>,
) -> Result<Json<BoxInfo>, Failure> {
    if is_something(params.proxy_config.as_ref()) {
        return Err(not_here("proxy_config", "a sandbox has no network to send through a proxy").into());
    }
    if let Some(RunConfig { user, work_dir, env_vars }) = params.run_config {
        must_be_plain(user.as_deref(), work_dir.as_deref())?;
        if env_vars.is_some_and(|env| !env.is_empty()) {
            return Err(not_here("run_config.env_vars", "the variables of a box can't change; set them for each command").into());
        }
    }
    // 0 resets the setting.
    let span = |field, params: Option<u64>| params.map(|seconds| minutes(field, Some(seconds))).transpose();
    let params = PatchSandbox {
        name: params.name.map(Some),
        lease_seconds: span("idle_ttl_seconds", params.idle_ttl_seconds)?,
        keep_suspended_seconds: span("delete_after_stop_seconds", params.delete_after_stop_seconds)?,
        ..Default::default()
    };
    Ok(Json(to_response(api.services.sandboxes.patch(&auth.request_context(), &name, params).await?.into())))
}

pub async fn remove(State(api): State<Api>, auth: Authenticated, Path(name): Path<String>) -> Result<StatusCode, Failure> {
    api.services.sandboxes.delete(&auth.caller, &name, false, &auth.request_id).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Body of a start request, which has no options.
#[derive(Deserialize)]
pub struct NoOptions {}

pub async fn start(
    State(api): State<Api>,
    auth: Authenticated,
    Path(name): Path<String>,
    MaybeJsonBody(NoOptions {}): MaybeJsonBody<NoOptions>,
) -> Result<Json<BoxInfo>, Failure> {
    Ok(Json(to_response(api.services.langsmith_sandboxes.start(&auth.request_context(), &name).await?)))
}

pub async fn stop(
    State(api): State<Api>,
    auth: Authenticated,
    Path(name): Path<String>,
    MaybeJsonBody(NoOptions {}): MaybeJsonBody<NoOptions>,
) -> Result<Json<BoxInfo>, Failure> {
    Ok(Json(to_response(api.services.langsmith_sandboxes.stop(&auth.request_context(), &name).await?)))
}

pub async fn download_url(
    State(api): State<Api>,
    auth: Authenticated,
    Path(name): Path<String>,
    JsonBody(params): JsonBody<DownloadUrlRequest>,
) -> Result<Json<DownloadUrl>, Failure> {
    for (field, value) in [("content_type", &params.content_type), ("content_disposition", &params.content_disposition)] {
        if value.is_some() {
            return Err(not_here(field, "files are served as plain bytes").into());
        }
    }
    if params.expires_in_seconds == Some(0) {
        return Err(ApiError::invalid("expires_in_seconds: must be at least 1").into());
    }
    // A longer lifetime is reduced, and the response contains the actual one.
    let ttl = params.expires_in_seconds.map(|seconds| u32::try_from(seconds).unwrap_or(u32::MAX));
    let link = FileLinkParams { path: &params.path, method: LinkMethod::Get, ttl };
    let made = api.services.file_links.of_sandbox(&auth.request_context(), &name, link).await?;
    Ok(Json(DownloadUrl { download_url: made.response.url, token: made.link, expires_at: made.response.expires_at }))
}

pub async fn no_service_urls(_: Authenticated) -> Failure {
    let message = "ports of a sandbox can't be reached from outside, so it has no service URLs; use download-url for its files";
    ApiError::new(ErrorCode::Unsupported, message).into()
}

fn wait(seconds: Option<f64>) -> Result<Duration, ApiError> {
    match seconds {
        None => Ok(DEFAULT_WAIT),
        Some(s) if s.is_finite() && s >= 0.0 => Ok(Duration::from_secs_f64(s.min(MAX_WAIT.as_secs_f64()))),
        Some(_) => Err(ApiError::invalid("timeout: must be a number of seconds, 0 or more")),
    }
}

/// Converts to whole minutes; 0 means unset.
fn minutes(field: &str, seconds: Option<u64>) -> Result<Option<u64>, ApiError> {
    match seconds {
        Some(s) if s % MINUTE != 0 => Err(ApiError::invalid(format!("{field}: must be 0 or a multiple of {MINUTE} seconds"))),
        other => Ok(other.filter(|s| *s > 0)),
    }
}

/// True if a value is set. These clients leave out a field, or send null or an empty object.
fn is_something(value: Option<&serde_json::Value>) -> bool {
    value.is_some_and(|v| !v.is_null() && v.as_object().is_none_or(|o| !o.is_empty()))
}

fn not_here(field: &str, why: &str) -> ApiError {
    ApiError::invalid(format!("{field}: is not supported here: {why}; leave it out"))
}

/// Translates a request to create a box to the broker's own request.
fn read_params(params: CreateBox) -> Result<CreateSandbox, ApiError> {
    for (field, is_langsmith_path, why) in [
        ("mount_config", is_something(params.mount_config.as_ref()), "buckets can't be mounted"),
        ("proxy_config", is_something(params.proxy_config.as_ref()), "a sandbox has no network to send through a proxy"),
        ("access_delegation", is_something(params.access_delegation.as_ref()), "a sandbox never receives its creator's credentials"),
        ("persistent", params.persistent == Some(false), "files always survive a stop"),
        ("preserve_memory_on_stop", params.preserve_memory_on_stop == Some(true), "a stop ends every program"),
        ("restore_memory", params.restore_memory == Some(true), "a stop ends every program"),
        ("tag_value_ids", params.tag_value_ids.as_ref().is_some_and(|ids| !ids.is_empty()), "use labels"),
        ("ttl_seconds", params.ttl_seconds.is_some_and(|ttl| ttl > 0), "use idle_ttl_seconds and delete_after_stop_seconds"),
    ] {
        if is_langsmith_path {
            return Err(not_here(field, why));
        }
    }
    if let Some(RunConfig { user, work_dir, .. }) = &params.run_config {
        must_be_plain(user.as_deref(), work_dir.as_deref())?;
    }
    let labels = params.labels.unwrap_or_default();
    tags::check(&labels).map_err(|e| ApiError::invalid(format!("labels: {}", e.message)))?;
    // Variables of the box take precedence over those of its run_config.
    let mut env = params.run_config.and_then(|config| config.env_vars).unwrap_or_default();
    env.extend(params.env_vars.unwrap_or_default());
    let mounted = |v: BoxVolume| MountParams { volume: v.volume, path: v.mount_path, read_only: v.read_only.unwrap_or_default() };
    Ok(CreateSandbox {
        name: params.name,
        // The client that creates a box deletes it; it outlives sessions.
        keep: Some(true),
        tags: labels,
        lease_seconds: minutes("idle_ttl_seconds", params.idle_ttl_seconds)?,
        keep_suspended_seconds: minutes("delete_after_stop_seconds", params.delete_after_stop_seconds)?,
        template: non_empty(params.template_name),
        snapshot: one_snapshot([
            ("snapshot_id", params.snapshot_id),
            ("snapshot", params.snapshot),
            ("snapshot_name", params.snapshot_name),
        ])?,
        resources: Resources {
            cpus: cpus(params.vcpus, params.cpu_millicores)?,
            memory_bytes: params.mem_bytes,
            disk_bytes: params.fs_capacity_bytes,
            processes: None,
        },
        env: Env(env),
        mounts: params.volumes.unwrap_or_default().into_iter().map(mounted).collect(),
        ..Default::default()
    })
}

/// These clients send an empty string for an unset field.
fn non_empty(text: Option<String>) -> Option<String> {
    text.filter(|t| !t.is_empty())
}

/// The snapshot, which may be given under any of three field names.
fn one_snapshot(named: [(&str, Option<String>); 3]) -> Result<Option<String>, ApiError> {
    let mut each = named.into_iter().filter_map(|(field, value)| non_empty(value).map(|value| (field, value)));
    match (each.next(), each.next()) {
        (first, None) => Ok(first.map(|(_, value)| value)),
        (Some((_, first)), Some((_, other))) if first == other => Ok(Some(first)),
        (_, Some((field, _))) => Err(ApiError::invalid(format!("{field}: names a second snapshot; send only one"))),
    }
}

fn cpus(count: Option<f64>, millis: Option<u32>) -> Result<Option<Cpus>, ApiError> {
    let (field, count) = match (count, millis) {
        (Some(count), None) => ("vcpus", count),
        (None, Some(millis)) => ("cpu_millicores", f64::from(millis) / 1000.0),
        (None, None) => return Ok(None),
        (Some(_), Some(_)) => return Err(ApiError::invalid("cpu_millicores: sets the same limit as vcpus; send one of them")),
    };
    let refused = || ApiError::invalid(format!("{field}: must be from 0.001 to 1024 processors"));
    Cpus::from_count(count).map(Some).ok_or_else(refused)
}

fn must_be_plain(user: Option<&str>, work_dir: Option<&str>) -> Result<(), ApiError> {
    let is_said = |text: Option<&str>| text.is_some_and(|t| !t.is_empty());
    if is_said(user) {
        return Err(not_here("run_config.user", "programs run as the sandbox's only user"));
    }
    if is_said(work_dir) {
        return Err(not_here("run_config.work_dir", "set it for each command"));
    }
    Ok(())
}

/// Converts a sandbox to the shape that these clients read.
fn to_response(boxed: PolledSandbox) -> BoxInfo {
    let sandbox = boxed.info;
    let status = match sandbox.state {
        LifeState::Suspended if boxed.is_resuming => BoxState::Provisioning,
        LifeState::Suspended if boxed.could_not_resume => BoxState::Failed,
        LifeState::Provisioning => BoxState::Provisioning,
        LifeState::Active | LifeState::Idle => BoxState::Ready,
        LifeState::Suspended => BoxState::Stopped,
        LifeState::Terminated => BoxState::Deleting,
        LifeState::Failed => BoxState::Failed,
    };
    // The client appends its own paths, and the broker's URL ends in the version.
    let dataplane_url = sandbox.http_base_url.strip_suffix("/v1").unwrap_or(&sandbox.http_base_url).to_owned();
    BoxInfo {
        name: sandbox.name.unwrap_or_else(|| sandbox.id.to_string()),
        id: sandbox.id,
        status,
        status_message: sandbox.reason,
        dataplane_url,
        created_at: sandbox.created_at,
        updated_at: sandbox.last_active_at,
        stopped_at: sandbox.suspended_at,
        created_by: sandbox.owner,
        idle_ttl_seconds: sandbox.lease_seconds,
        delete_after_stop_seconds: sandbox.keep_suspended_seconds,
        template_name: sandbox.template,
        snapshot_id: sandbox.snapshot_id.map(|id| id.to_string()),
        vcpus: sandbox.resources.cpus.map(Cpus::count),
        mem_bytes: sandbox.resources.memory_bytes,
        fs_capacity_bytes: sandbox.resources.disk_bytes,
        labels: sandbox.tags,
        persistent: true,
    }
}
