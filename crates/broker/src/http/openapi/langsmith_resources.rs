//! OpenAPI operations of the LangSmith API's snapshots, templates, volumes and pools.

use cobox_openapi::{Operation, Parameter};
use cobox_protocol::ErrorCode::*;
use serde_json::json;

use super::{keyed, langsmith::both};
use crate::http::langsmith::{
    pools::{PoolChange, PoolList, PoolRequest, PoolResponse},
    snapshots::{SnapshotList, SnapshotRequest, SnapshotResponse, SnapshotTags},
    templates::{Rename, TemplateList, TemplateParams, TemplateResponse},
    volumes::{VolumeChange, VolumeList, VolumeParams, VolumeResponse},
};

pub fn routes() -> Vec<Operation> {
    let which = || Parameter::path("name", "The name.");
    let reference = || Parameter::path("reference", "The snapshot's id, `name` or `name:tag`.");
    let registry = || Parameter::path("id", "The registry's id.");
    let page = || {
        let number = |least: u32, most: u32, usual: u32| json!({ "type": "integer", "minimum": least, "maximum": most, "default": usual });
        [
            Parameter::query("name_contains", "Only items whose name contains this."),
            Parameter::query("limit", "Maximum number of items in the page.").of(number(1, 500, 50)),
            Parameter::query("offset", "Number of items to skip.").of(number(0, u32::MAX, 0)),
        ]
    };
    let none = "Unsupported: there are no registries";
    let routes = [
        both!("post", "/boxes/{name}/snapshot", "captureSnapshot", "Take a snapshot of a box's files").map(|o| {
            o.with([Parameter::path("name", "Name or id of the box.")])
                .request_body::<SnapshotRequest>()
                .response::<SnapshotResponse>(201, "The snapshot, still being taken.")
                .errors(&[SandboxNotFound, SandboxStarting, NameTaken])
        }),
        both!("post", "/snapshots", "createSnapshot", "Create a snapshot from an image of the provider").map(|o| {
            o.request_body::<SnapshotRequest>().response::<SnapshotResponse>(201, "Created; boxes can start from it.").errors(&[NameTaken])
        }),
        both!("get", "/snapshots", "listBoxSnapshots", "List the snapshots you may use")
            .map(|o| o.with(page()).response::<SnapshotList>(200, "The snapshots, newest first.")),
        both!("get", "/snapshots/{reference}", "getBoxSnapshot", "Get a snapshot")
            .map(|o| o.with([reference()]).response::<SnapshotResponse>(200, "The snapshot.").errors(&[SnapshotNotFound])),
        both!("delete", "/snapshots/{reference}", "deleteBoxSnapshot", "Delete a snapshot")
            .map(|o| o.with([reference()]).empty_response(204, "Accepted; the snapshot is being deleted.").errors(&[SnapshotNotFound])),
        both!("get", "/snapshots-by-name/{name}", "getSnapshotTags", "Get the tags of a snapshot name")
            .map(|o| o.with([which()]).response::<SnapshotTags>(200, "The tags and their current snapshots.").errors(&[SnapshotNotFound])),
        both!("post", "/templates", "createBoxTemplate", "Create a template")
            .map(|o| o.request_body::<TemplateParams>().response::<TemplateResponse>(201, "Created.").errors(&[NameTaken])),
        both!("get", "/templates", "listBoxTemplates", "List the templates you may use")
            .map(|o| o.response::<TemplateList>(200, "Sorted by name.")),
        both!("get", "/templates/{name}", "getBoxTemplate", "Get a template")
            .map(|o| o.with([which()]).response::<TemplateResponse>(200, "The template.").errors(&[TemplateNotFound])),
        both!("patch", "/templates/{name}", "renameBoxTemplate", "Rename a template").map(|o| {
            o.with([which()])
                .request_body::<Rename>()
                .response::<TemplateResponse>(200, "The changed object.")
                .errors(&[TemplateNotFound, NameTaken])
        }),
        both!("delete", "/templates/{name}", "deleteBoxTemplate", "Delete a template")
            .map(|o| o.with([which()]).empty_response(204, "Deleted.").errors(&[TemplateNotFound, InUse])),
        both!("post", "/volumes", "createBoxVolume", "Create a volume")
            .map(|o| o.request_body::<VolumeParams>().response::<VolumeResponse>(201, "Created; it can be mounted.").errors(&[NameTaken])),
        both!("get", "/volumes", "listBoxVolumes", "List the volumes you may use")
            .map(|o| o.response::<VolumeList>(200, "Sorted by name.")),
        both!("get", "/volumes/{name}", "getBoxVolume", "Get a volume")
            .map(|o| o.with([which()]).response::<VolumeResponse>(200, "The volume.").errors(&[VolumeNotFound])),
        both!("patch", "/volumes/{name}", "renameBoxVolume", "Rename a volume").map(|o| {
            o.with([which()])
                .request_body::<VolumeChange>()
                .response::<VolumeResponse>(200, "The changed object.")
                .errors(&[VolumeNotFound, NameTaken])
        }),
        both!("delete", "/volumes/{name}", "deleteBoxVolume", "Delete a volume and its files")
            .map(|o| o.with([which()]).empty_response(204, "Deleted.").errors(&[VolumeNotFound, InUse])),
        both!("post", "/pools", "createPool", "Create a pool of running boxes of a template").map(|o| {
            o.request_body::<PoolRequest>()
                .response::<PoolResponse>(201, "Created. All its boxes are running, unless the request did not wait for them.")
                .errors(&[TemplateNotFound, SnapshotNotFound, VolumeNotFound, NameTaken, SandboxStarting, InUse])
        }),
        both!("get", "/pools", "listPools", "List the pools of your workspace").map(|o| o.response::<PoolList>(200, "Sorted by name.")),
        both!("get", "/pools/{name}", "getPool", "Get a pool")
            .map(|o| o.with([which()]).response::<PoolResponse>(200, "The pool.").errors(&[PoolNotFound])),
        both!("patch", "/pools/{name}", "changePool", "Change a pool's name or size").map(|o| {
            o.with([which()])
                .request_body::<PoolChange>()
                .response::<PoolResponse>(200, "The changed object.")
                .errors(&[PoolNotFound, NameTaken])
        }),
        both!("delete", "/pools/{name}", "deletePool", "Delete a pool and its boxes")
            .map(|o| o.with([which()]).empty_response(204, "Deleted.").errors(&[PoolNotFound])),
        both!("get", "/registries", "listRegistries", none).map(|o| o.errors(&[Unsupported])),
        both!("post", "/registries", "createRegistry", none).map(|o| o.errors(&[Unsupported])),
        both!("get", "/registries/{id}", "getRegistry", none).map(|o| o.with([registry()]).errors(&[Unsupported])),
        both!("patch", "/registries/{id}", "changeRegistry", none).map(|o| o.with([registry()]).errors(&[Unsupported])),
        both!("delete", "/registries/{id}", "deleteRegistry", none).map(|o| o.with([registry()]).errors(&[Unsupported])),
    ];
    routes.into_iter().flatten().collect()
}
