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
    let which = || Parameter::path("name", "Its name.");
    let reference = || Parameter::path("reference", "Its id, `name` or `name:tag`.");
    let registry = || Parameter::path("id", "Its id.");
    let page = || {
        let number = |least: u32, most: u32, usual: u32| json!({ "type": "integer", "minimum": least, "maximum": most, "default": usual });
        [
            Parameter::query("name_contains", "Only those with this in their name."),
            Parameter::query("limit", "Items of a page.").of(number(1, 500, 50)),
            Parameter::query("offset", "How many to pass over.").of(number(0, u32::MAX, 0)),
        ]
    };
    let none = "Answers that there are none";
    let routes = [
        both!("post", "/boxes/{name}/snapshot", "captureSnapshot", "Keep a box's files for others to start from").map(|o| {
            o.with([Parameter::path("name", "The box's name, or its id.")])
                .takes::<SnapshotRequest>()
                .gives::<SnapshotResponse>(201, "It is being taken.")
                .fails(&[SandboxNotFound, SandboxStarting, NameTaken])
        }),
        both!("post", "/snapshots", "createSnapshot", "Name an image that the provider has")
            .map(|o| o.takes::<SnapshotRequest>().gives::<SnapshotResponse>(201, "It can be started from.").fails(&[NameTaken])),
        both!("get", "/snapshots", "listBoxSnapshots", "List the snapshots you may use")
            .map(|o| o.with(page()).gives::<SnapshotList>(200, "Newest first.")),
        both!("get", "/snapshots/{reference}", "getBoxSnapshot", "Look at a snapshot")
            .map(|o| o.with([reference()]).gives::<SnapshotResponse>(200, "The snapshot.").fails(&[SnapshotNotFound])),
        both!("delete", "/snapshots/{reference}", "deleteBoxSnapshot", "Remove a snapshot")
            .map(|o| o.with([reference()]).gives_nothing(204, "It is being removed.").fails(&[SnapshotNotFound])),
        both!("get", "/snapshots-by-name/{name}", "getSnapshotTags", "The tags of a name")
            .map(|o| o.with([which()]).gives::<SnapshotTags>(200, "What each means now.").fails(&[SnapshotNotFound])),
        both!("post", "/templates", "createBoxTemplate", "Say what boxes of a name are made of")
            .map(|o| o.takes::<TemplateParams>().gives::<TemplateResponse>(201, "It was made.").fails(&[NameTaken])),
        both!("get", "/templates", "listBoxTemplates", "List the templates you may use").map(|o| o.gives::<TemplateList>(200, "By name.")),
        both!("get", "/templates/{name}", "getBoxTemplate", "Look at a template")
            .map(|o| o.with([which()]).gives::<TemplateResponse>(200, "The template.").fails(&[TemplateNotFound])),
        both!("patch", "/templates/{name}", "renameBoxTemplate", "Give it another name").map(|o| {
            o.with([which()]).takes::<Rename>().gives::<TemplateResponse>(200, "As it is now.").fails(&[TemplateNotFound, NameTaken])
        }),
        both!("delete", "/templates/{name}", "deleteBoxTemplate", "Remove a template")
            .map(|o| o.with([which()]).gives_nothing(204, "It is gone.").fails(&[TemplateNotFound, InUse])),
        both!("post", "/volumes", "createBoxVolume", "Make a volume")
            .map(|o| o.takes::<VolumeParams>().gives::<VolumeResponse>(201, "It can be mounted.").fails(&[NameTaken])),
        both!("get", "/volumes", "listBoxVolumes", "List the volumes you may use").map(|o| o.gives::<VolumeList>(200, "By name.")),
        both!("get", "/volumes/{name}", "getBoxVolume", "Look at a volume")
            .map(|o| o.with([which()]).gives::<VolumeResponse>(200, "The volume.").fails(&[VolumeNotFound])),
        both!("patch", "/volumes/{name}", "renameBoxVolume", "Give it another name").map(|o| {
            o.with([which()]).takes::<VolumeChange>().gives::<VolumeResponse>(200, "As it is now.").fails(&[VolumeNotFound, NameTaken])
        }),
        both!("delete", "/volumes/{name}", "deleteBoxVolume", "Remove a volume and its files")
            .map(|o| o.with([which()]).gives_nothing(204, "It is gone.").fails(&[VolumeNotFound, InUse])),
        both!("post", "/pools", "createPool", "Keep boxes of a template waiting").map(|o| {
            o.takes::<PoolRequest>()
                .gives::<PoolResponse>(201, "It was made; all of them wait, unless told not to wait for that.")
                .fails(&[TemplateNotFound, SnapshotNotFound, VolumeNotFound, NameTaken, SandboxStarting, InUse])
        }),
        both!("get", "/pools", "listPools", "List the pools of your workspace").map(|o| o.gives::<PoolList>(200, "By name.")),
        both!("get", "/pools/{name}", "getPool", "Look at a pool")
            .map(|o| o.with([which()]).gives::<PoolResponse>(200, "The pool.").fails(&[PoolNotFound])),
        both!("patch", "/pools/{name}", "changePool", "Change its name or how many wait")
            .map(|o| o.with([which()]).takes::<PoolChange>().gives::<PoolResponse>(200, "As it is now.").fails(&[PoolNotFound, NameTaken])),
        both!("delete", "/pools/{name}", "deletePool", "Remove a pool and what waits in it")
            .map(|o| o.with([which()]).gives_nothing(204, "It is gone.").fails(&[PoolNotFound])),
        both!("get", "/registries", "listRegistries", none).map(|o| o.fails(&[Unsupported])),
        both!("post", "/registries", "createRegistry", none).map(|o| o.fails(&[Unsupported])),
        both!("get", "/registries/{id}", "getRegistry", none).map(|o| o.with([registry()]).fails(&[Unsupported])),
        both!("patch", "/registries/{id}", "changeRegistry", none).map(|o| o.with([registry()]).fails(&[Unsupported])),
        both!("delete", "/registries/{id}", "deleteRegistry", none).map(|o| o.with([registry()]).fails(&[Unsupported])),
    ];
    routes.into_iter().flatten().collect()
}
