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
                .takes::<SnapshotRequest>()
                .gives::<SnapshotResponse>(201, "The snapshot, still being taken.")
                .fails(&[SandboxNotFound, SandboxStarting, NameTaken])
        }),
        both!("post", "/snapshots", "createSnapshot", "Create a snapshot from an image of the provider")
            .map(|o| o.takes::<SnapshotRequest>().gives::<SnapshotResponse>(201, "Created; boxes can start from it.").fails(&[NameTaken])),
        both!("get", "/snapshots", "listBoxSnapshots", "List the snapshots you may use")
            .map(|o| o.with(page()).gives::<SnapshotList>(200, "The snapshots, newest first.")),
        both!("get", "/snapshots/{reference}", "getBoxSnapshot", "Get a snapshot")
            .map(|o| o.with([reference()]).gives::<SnapshotResponse>(200, "The snapshot.").fails(&[SnapshotNotFound])),
        both!("delete", "/snapshots/{reference}", "deleteBoxSnapshot", "Delete a snapshot")
            .map(|o| o.with([reference()]).gives_nothing(204, "Accepted; the snapshot is being deleted.").fails(&[SnapshotNotFound])),
        both!("get", "/snapshots-by-name/{name}", "getSnapshotTags", "Get the tags of a snapshot name")
            .map(|o| o.with([which()]).gives::<SnapshotTags>(200, "The tags and their current snapshots.").fails(&[SnapshotNotFound])),
        both!("post", "/templates", "createBoxTemplate", "Create a template")
            .map(|o| o.takes::<TemplateParams>().gives::<TemplateResponse>(201, "Created.").fails(&[NameTaken])),
        both!("get", "/templates", "listBoxTemplates", "List the templates you may use")
            .map(|o| o.gives::<TemplateList>(200, "Sorted by name.")),
        both!("get", "/templates/{name}", "getBoxTemplate", "Get a template")
            .map(|o| o.with([which()]).gives::<TemplateResponse>(200, "The template.").fails(&[TemplateNotFound])),
        both!("patch", "/templates/{name}", "renameBoxTemplate", "Rename a template").map(|o| {
            o.with([which()]).takes::<Rename>().gives::<TemplateResponse>(200, "The changed object.").fails(&[TemplateNotFound, NameTaken])
        }),
        both!("delete", "/templates/{name}", "deleteBoxTemplate", "Delete a template")
            .map(|o| o.with([which()]).gives_nothing(204, "Deleted.").fails(&[TemplateNotFound, InUse])),
        both!("post", "/volumes", "createBoxVolume", "Create a volume")
            .map(|o| o.takes::<VolumeParams>().gives::<VolumeResponse>(201, "Created; it can be mounted.").fails(&[NameTaken])),
        both!("get", "/volumes", "listBoxVolumes", "List the volumes you may use").map(|o| o.gives::<VolumeList>(200, "Sorted by name.")),
        both!("get", "/volumes/{name}", "getBoxVolume", "Get a volume")
            .map(|o| o.with([which()]).gives::<VolumeResponse>(200, "The volume.").fails(&[VolumeNotFound])),
        both!("patch", "/volumes/{name}", "renameBoxVolume", "Rename a volume").map(|o| {
            o.with([which()])
                .takes::<VolumeChange>()
                .gives::<VolumeResponse>(200, "The changed object.")
                .fails(&[VolumeNotFound, NameTaken])
        }),
        both!("delete", "/volumes/{name}", "deleteBoxVolume", "Delete a volume and its files")
            .map(|o| o.with([which()]).gives_nothing(204, "Deleted.").fails(&[VolumeNotFound, InUse])),
        both!("post", "/pools", "createPool", "Create a pool of running boxes of a template").map(|o| {
            o.takes::<PoolRequest>()
                .gives::<PoolResponse>(201, "Created. All its boxes are running, unless the request did not wait for them.")
                .fails(&[TemplateNotFound, SnapshotNotFound, VolumeNotFound, NameTaken, SandboxStarting, InUse])
        }),
        both!("get", "/pools", "listPools", "List the pools of your workspace").map(|o| o.gives::<PoolList>(200, "Sorted by name.")),
        both!("get", "/pools/{name}", "getPool", "Get a pool")
            .map(|o| o.with([which()]).gives::<PoolResponse>(200, "The pool.").fails(&[PoolNotFound])),
        both!("patch", "/pools/{name}", "changePool", "Change a pool's name or size").map(|o| {
            o.with([which()]).takes::<PoolChange>().gives::<PoolResponse>(200, "The changed object.").fails(&[PoolNotFound, NameTaken])
        }),
        both!("delete", "/pools/{name}", "deletePool", "Delete a pool and its boxes")
            .map(|o| o.with([which()]).gives_nothing(204, "Deleted.").fails(&[PoolNotFound])),
        both!("get", "/registries", "listRegistries", none).map(|o| o.fails(&[Unsupported])),
        both!("post", "/registries", "createRegistry", none).map(|o| o.fails(&[Unsupported])),
        both!("get", "/registries/{id}", "getRegistry", none).map(|o| o.with([registry()]).fails(&[Unsupported])),
        both!("patch", "/registries/{id}", "changeRegistry", none).map(|o| o.with([registry()]).fails(&[Unsupported])),
        both!("delete", "/registries/{id}", "deleteRegistry", none).map(|o| o.with([registry()]).fails(&[Unsupported])),
    ];
    routes.into_iter().flatten().collect()
}
