//! OpenAPI operations of `/v1/templates`, `/v1/snapshots` and `/v1/volumes`.

use cobox_openapi::{Operation, Parameter};
use cobox_protocol::{
    ErrorCode::*,
    resources::{CreateTemplate, CreateVolume, SnapshotInfo, TakeSnapshot, TemplateInfo, VolumeInfo},
    session::Page,
};

use super::keyed;

pub fn routes() -> Vec<Operation> {
    let name = || Parameter::path("name", "Its name.");
    let reference = || Parameter::path("reference", "Its id, `name` or `name:tag`.");
    let volume = || Parameter::path("name_or_id", "Its name, or its id.");
    let sandbox = Parameter::path("id_or_name", "The sandbox's id, or its name in your workspace.");
    let routes = vec![
        keyed("post", "/v1/templates", "createTemplate", "Say what sandboxes of a name are made of")
            .about("What no sandbox could be made of here is refused now, not when one is made.")
            .takes::<CreateTemplate>()
            .gives::<TemplateInfo>(201, "It was made.")
            .fails(&[Forbidden, NameTaken, QuotaExceeded]),
        keyed("get", "/v1/templates", "listTemplates", "List the templates you may use")
            .gives::<Page<TemplateInfo>>(200, "The operator's and your workspace's, by name."),
        keyed("get", "/v1/templates/{name}", "getTemplate", "Look at a template")
            .with([name()])
            .gives::<TemplateInfo>(200, "The template.")
            .fails(&[Forbidden, TemplateNotFound]),
        keyed("delete", "/v1/templates/{name}", "deleteTemplate", "Remove a template")
            .about("Sandboxes made by it go on. For its owner and operators.")
            .with([name()])
            .gives_nothing(204, "It is gone.")
            .fails(&[Forbidden, TemplateNotFound, InUse]),
        keyed("post", "/v1/sandboxes/{id_or_name}/snapshots", "takeSnapshot", "Keep a sandbox's files for others to start from")
            .about(
                "Its own files, running or not; not its volumes, and no processes. A file that is written meanwhile is kept as it is found: \
                 stop what writes first where that matters. For its owner and operators, and for who is allowed `snapshot`; whoever it is \
                 must get into the sandbox as for its files.",
            )
            .with([sandbox])
            .takes::<TakeSnapshot>()
            .gives::<SnapshotInfo>(202, "It is being taken.")
            .fails(&[Forbidden, SandboxNotFound, SessionNotFound, SandboxStarting, NameTaken, QuotaExceeded, ProviderUnavailable]),
        keyed("get", "/v1/snapshots", "listSnapshots", "List the snapshots you may use")
            .with([Parameter::query("name", "Only those with this name.")])
            .gives::<Page<SnapshotInfo>>(200, "Newest first."),
        keyed("get", "/v1/snapshots/{reference}", "getSnapshot", "Look at a snapshot")
            .with([reference()])
            .gives::<SnapshotInfo>(200, "The snapshot; by its name, the newest that is ready.")
            .fails(&[Forbidden, SnapshotNotFound]),
        keyed("delete", "/v1/snapshots/{reference}", "deleteSnapshot", "Remove a snapshot")
            .about("Nothing can start from it any more; its files go when nothing stands on them. For its owner and operators.")
            .with([reference()])
            .gives_nothing(204, "It is being removed.")
            .fails(&[Forbidden, SnapshotNotFound]),
        keyed("post", "/v1/volumes", "createVolume", "Make a volume")
            .takes::<CreateVolume>()
            .gives::<VolumeInfo>(201, "It can be mounted.")
            .fails(&[Forbidden, NameTaken, QuotaExceeded, ProviderUnavailable]),
        keyed("get", "/v1/volumes", "listVolumes", "List the volumes you may use").gives::<Page<VolumeInfo>>(200, "By name."),
        keyed("get", "/v1/volumes/{name_or_id}", "getVolume", "Look at a volume")
            .with([volume()])
            .gives::<VolumeInfo>(200, "The volume.")
            .fails(&[Forbidden, VolumeNotFound]),
        keyed("delete", "/v1/volumes/{name_or_id}", "deleteVolume", "Remove a volume and its files")
            .about("Refused while a sandbox has it. For its owner and operators.")
            .with([volume()])
            .gives_nothing(204, "It is gone.")
            .fails(&[Forbidden, VolumeNotFound, InUse]),
    ];
    routes.into_iter().map(|route| route.tag("kinds")).collect()
}
