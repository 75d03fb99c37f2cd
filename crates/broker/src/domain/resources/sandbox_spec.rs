//! Resolves what a new sandbox is made of: combines template, snapshot and the request's own fields into one spec that is
//! stored with the sandbox.

use std::time::Duration;

use cobox_protocol::{
    ApiError, ErrorCode, SandboxId,
    resources::{Env, MountParams, Resources, SnapshotState, check_mounts},
    sandbox::CreateSandbox,
    session::{Access, State},
};
use cobox_provider::{Provider, ProviderError, SandboxSpec, VolumeMount};

use super::{
    pools,
    records::{Snapshot, TemplateSpec, VolumeState},
    snapshots, templates, volumes,
};
use crate::{
    domain::{
        access,
        context::BrokerContext,
        model::{Caller, Intent, Sandbox},
    },
    policy::Policy,
    store::PoolAssignment,
};

/// Requested parts of a sandbox. If empty, the provider's defaults.
#[derive(Clone, Debug, Default)]
pub struct SandboxSpecParams {
    pub template: Option<String>,
    /// An id, `name` or `name:tag`.
    pub snapshot: Option<String>,
    pub resources: Resources,
    pub env: Env,
    pub mounts: Vec<MountParams>,
}

impl From<&CreateSandbox> for SandboxSpecParams {
    fn from(params: &CreateSandbox) -> Self {
        Self {
            template: params.template.clone(),
            snapshot: params.snapshot.clone(),
            resources: params.resources.clone(),
            env: params.env.clone(),
            mounts: params.mounts.clone(),
        }
    }
}

/// The resolved spec, and where it can be created.
#[derive(Clone, Debug)]
pub struct ResolvedSpec {
    pub spec: SandboxSpec,
    pub template: Option<String>,
    /// The node that creates it: where its snapshot and its volumes are.
    pub node: String,
    /// Set if a standby sandbox of a pool can be taken instead.
    pub taking: Option<PoolAssignment>,
}

impl ResolvedSpec {
    /// The row of a new sandbox.
    pub fn into_sandbox(self, fresh: Sandbox) -> Sandbox {
        Sandbox { spec: self.spec, template: self.template, node: self.node, ..fresh }
    }
}

/// The row of a sandbox about to be created, with the provider's default spec.
pub fn new_sandbox(context: &BrokerContext, caller: &Caller, name: Option<String>, access: Access) -> Sandbox {
    let now = context.now();
    Sandbox {
        id: SandboxId::new(),
        workspace: caller.principal.workspace.clone(),
        name,
        owner: caller.principal.name.clone(),
        owner_kind: caller.principal.kind,
        access,
        provider: context.provider.name().to_owned(),
        node: context.node.clone(),
        generation: 1,
        old_keys: None,
        master_from: 1,
        state: State::Provisioning,
        intent: Some(Intent::Create),
        reason: None,
        is_kept: false,
        own_lease: None,
        own_keep: None,
        created_at: now,
        last_active_at: now,
        counted_until: None,
        active: Duration::ZERO,
        suspended_at: None,
        downtime: Duration::ZERO,
        ended_at: None,
        restore_until: None,
        spec: SandboxSpec::default(),
        template: None,
        pool: None,
    }
}

/// Looks up everything named, and asks the provider whether a sandbox can be created from it. Creates nothing yet:
/// snapshots and volumes are checked again in the transaction that writes the sandbox's row.
pub async fn resolve(
    context: &BrokerContext,
    policy: &Policy,
    caller: &Caller,
    params: &SandboxSpecParams,
) -> Result<ResolvedSpec, ApiError> {
    let subject = caller.subject();
    if let Some(name) = &params.template {
        // Permission is checked first, so that a caller without it doesn't learn whether the template exists.
        policy.check_template(&subject, name)?;
    }
    let is_plain = params.snapshot.is_none() && params.resources.is_default() && params.mounts.is_empty();
    if !is_plain && policy.has_listed_templates(&subject) {
        let message = "snapshot, resources, mounts: the policy allows only listed templates; leave these fields out";
        return Err(ApiError::new(ErrorCode::Forbidden, message));
    }
    params.env.check()?;
    let template = match &params.template {
        Some(name) => templates::find(context, &caller.principal.workspace, name).await?.spec,
        None => TemplateSpec::default(),
    };
    if let Some(other) = template.provider.as_deref().filter(|p| *p != context.provider.name()) {
        let message = format!("template: its provider `{other}` is not available here; this broker has `{}`", context.provider.name());
        return Err(ApiError::invalid(message));
    }
    let mut node = None;
    let mut spec = SandboxSpec { root: template.root(), resources: params.resources.or(&template.resources), ..SandboxSpec::default() };
    if let Some(named) = &params.snapshot {
        let snapshot = snapshots::find(context, caller, named).await?;
        if snapshot.state != SnapshotState::Ready {
            return Err(not_ready(&snapshot));
        }
        node = (!snapshot.spec.layers.is_empty()).then(|| (snapshot.node.clone(), format!("snapshot {}", snapshot.id)));
        (spec.root, spec.base) = (snapshot.spec.root, snapshot.spec.base);
        (spec.layers, spec.env) = (snapshot.spec.layers, snapshot.spec.env);
        // Same disk size as the snapshot's source, unless requested otherwise.
        spec.resources = spec.resources.or(&snapshot.spec.resources);
    }
    let snapshot_env = std::mem::take(&mut spec.env);
    spec.env = Env(template.env.0.into_iter().chain(snapshot_env.0).chain(params.env.0.clone()).collect());
    spec.env.check()?;
    let mounts: Vec<MountParams> = template.mounts.iter().chain(&params.mounts).cloned().collect();
    check_mounts(&mounts)?;
    for mount in mounts {
        let volume = volumes::find(context, caller, &mount.volume).await?;
        access::may_use(&caller.principal, &volume)?;
        if volume.state != VolumeState::Ready {
            return Err(ApiError::new(ErrorCode::SandboxStarting, format!("volume {} is still being created; ask again", volume.name)));
        }
        match &node {
            Some((other, what)) if *other != volume.node => {
                return Err(ApiError::invalid(format!("mounts: volume {} is on another node than {what}", volume.name)));
            }
            _ => node = Some((volume.node, format!("volume {}", volume.name))),
        }
        spec.mounts.push(VolumeMount { volume: volume.id, path: mount.path, read_only: mount.read_only });
    }
    let node = node.map_or_else(|| context.node.clone(), |(node, _)| node);
    // Only the other node can resolve the names of its images.
    if node == context.node {
        spec = context.provider.pin_root(spec).map_err(|e| refused(&e))?;
    }
    check(context, &spec, &node)?;
    let taking = match &params.template {
        Some(name) if is_plain && params.env.is_empty() => pools::pool_to_take_from(context, &caller.principal.workspace, name).await?,
        _ => None,
    };
    Ok(ResolvedSpec { spec, template: params.template.clone(), node, taking })
}

/// Checks a spec. For another node, only what is the same on all nodes: that node has to check whether its files exist.
pub fn check(context: &BrokerContext, spec: &SandboxSpec, node: &str) -> Result<(), ApiError> {
    let checked = match node == context.node {
        true => context.provider.check_spec(spec),
        false => {
            let root = spec.root.clone().filter(|_| spec.base.is_none());
            let node_independent = SandboxSpec { root, base: None, layers: Vec::new(), mounts: Vec::new(), ..spec.clone() };
            context
                .provider
                .check_spec(&node_independent)
                .and_then(|()| context.provider.check_mount_paths(&node_independent, &mount_paths(spec.mounts.iter().map(|m| &m.path))))
        }
    };
    checked.map_err(|e| refused(&e))
}

/// Whether sandboxes of a template can be created, independent of the volumes that will exist.
pub fn check_template(provider: &dyn Provider, spec: &TemplateSpec) -> Result<(), ProviderError> {
    let sandbox_spec = SandboxSpec { root: spec.root(), resources: spec.resources.clone(), ..SandboxSpec::default() };
    provider.check_spec(&sandbox_spec)?;
    provider.check_mount_paths(&sandbox_spec, &mount_paths(spec.mounts.iter().map(|m| &m.path)))
}

fn mount_paths<'a>(paths: impl Iterator<Item = &'a String>) -> Vec<&'a str> {
    paths.map(String::as_str).collect()
}

pub fn refused(error: &ProviderError) -> ApiError {
    ApiError::new(error.code(), error.to_string())
}

fn not_ready(snapshot: &Snapshot) -> ApiError {
    let (name, id) = (&snapshot.name, &snapshot.id);
    match snapshot.state {
        SnapshotState::Building => {
            ApiError::new(ErrorCode::SandboxStarting, format!("snapshot {name} ({id}) is still being taken; ask again"))
        }
        SnapshotState::Failed => {
            let why = snapshot.reason.as_deref().unwrap_or("it was interrupted");
            ApiError::invalid(format!("snapshot: {name} ({id}) failed: {why}; take a new snapshot"))
        }
        SnapshotState::Ready | SnapshotState::Deleting => {
            ApiError::new(ErrorCode::SnapshotNotFound, format!("snapshot {name} ({id}) is being deleted"))
        }
    }
}

/// Error: the workspace's snapshots and volumes have reached their storage limit.
pub fn too_large(context: &BrokerContext) -> ApiError {
    let most = context.config.max_stored_bytes_per_workspace;
    ApiError::new(
        ErrorCode::QuotaExceeded,
        format!("the workspace's snapshots and volumes have reached its storage limit of {most} bytes; delete some first"),
    )
}

/// Error: a part of the new sandbox was removed before its row was written.
pub fn gone(what: &str) -> ApiError {
    ApiError::new(ErrorCode::InUse, format!("{what}, which the request depends on, was deleted during the request"))
}
