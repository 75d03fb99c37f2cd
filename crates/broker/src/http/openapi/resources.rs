//! OpenAPI operations of `/v1/templates`, `/v1/snapshots` and `/v1/volumes`.

use cobox_openapi::{Operation, Parameter};
use cobox_protocol::{
    ErrorCode::*,
    resources::{CreateTemplate, CreateVolume, SnapshotInfo, TakeSnapshot, TemplateInfo, VolumeInfo},
    session::Page,
};

use super::keyed;

pub fn routes() -> Vec<Operation> {
    let name = || Parameter::path("name", "The template's name.");
    let reference = || Parameter::path("reference", "The snapshot's id, `name` or `name:tag`.");
    let volume = || Parameter::path("name_or_id", "The volume's name or id.");
    let sandbox = Parameter::path("id_or_name", "The sandbox's id, or its name in your workspace.");
    let routes = vec![
        keyed("post", "/v1/templates", "createTemplate", "Create a template")
            .about("A template that this deployment can't create sandboxes from is refused.")
            .request_body::<CreateTemplate>()
            .response::<TemplateInfo>(201, "Created.")
            .errors(&[Forbidden, NameTaken, QuotaExceeded]),
        keyed("get", "/v1/templates", "listTemplates", "List the templates you may use")
            .response::<Page<TemplateInfo>>(200, "The operator's and your workspace's templates, sorted by name."),
        keyed("get", "/v1/templates/{name}", "getTemplate", "Get a template")
            .with([name()])
            .response::<TemplateInfo>(200, "The template.")
            .errors(&[Forbidden, TemplateNotFound]),
        keyed("delete", "/v1/templates/{name}", "deleteTemplate", "Delete a template")
            .about("Sandboxes created from it are not affected. For its owner and operators.")
            .with([name()])
            .empty_response(204, "Deleted.")
            .errors(&[Forbidden, TemplateNotFound, InUse]),
        keyed("post", "/v1/sandboxes/{id_or_name}/snapshots", "takeSnapshot", "Take a snapshot of a sandbox's files")
            .about(
                "Contains the sandbox's own files, whether it runs or not, but not its volumes and processes. A file that is written \
                 during the snapshot may be inconsistent: stop its writers first if that matters. For the owner, operators and principals \
                 with the `snapshot` capability, if they have access to the sandbox's files.",
            )
            .with([sandbox])
            .request_body::<TakeSnapshot>()
            .response::<SnapshotInfo>(202, "The snapshot, still being taken.")
            .errors(&[Forbidden, SandboxNotFound, SessionNotFound, SandboxStarting, NameTaken, QuotaExceeded, ProviderUnavailable]),
        keyed("get", "/v1/snapshots", "listSnapshots", "List the snapshots you may use")
            .with([Parameter::query("name", "Only snapshots with this name.")])
            .response::<Page<SnapshotInfo>>(200, "The snapshots, newest first."),
        keyed("get", "/v1/snapshots/{reference}", "getSnapshot", "Get a snapshot")
            .with([reference()])
            .response::<SnapshotInfo>(200, "The snapshot; for a name, the newest one that is ready.")
            .errors(&[Forbidden, SnapshotNotFound]),
        keyed("delete", "/v1/snapshots/{reference}", "deleteSnapshot", "Delete a snapshot")
            .about(
                "No sandbox can start from it any more; its files are removed when nothing depends on them. For its owner and operators.",
            )
            .with([reference()])
            .empty_response(204, "Accepted; the snapshot is being deleted.")
            .errors(&[Forbidden, SnapshotNotFound]),
        keyed("post", "/v1/volumes", "createVolume", "Create a volume")
            .request_body::<CreateVolume>()
            .response::<VolumeInfo>(201, "Created; it can be mounted.")
            .errors(&[Forbidden, NameTaken, QuotaExceeded, ProviderUnavailable]),
        keyed("get", "/v1/volumes", "listVolumes", "List the volumes you may use")
            .response::<Page<VolumeInfo>>(200, "The volumes, sorted by name."),
        keyed("get", "/v1/volumes/{name_or_id}", "getVolume", "Get a volume")
            .with([volume()])
            .response::<VolumeInfo>(200, "The volume.")
            .errors(&[Forbidden, VolumeNotFound]),
        keyed("delete", "/v1/volumes/{name_or_id}", "deleteVolume", "Delete a volume and its files")
            .about("Refused while a sandbox mounts it. For its owner and operators.")
            .with([volume()])
            .empty_response(204, "Deleted.")
            .errors(&[Forbidden, VolumeNotFound, InUse]),
    ];
    routes.into_iter().map(|route| route.tag("kinds")).collect()
}
