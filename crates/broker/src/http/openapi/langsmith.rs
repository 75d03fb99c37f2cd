//! OpenAPI operations of the LangSmith sandbox API, under both of its prefixes.

use cobox_openapi::{Operation, Parameter, Shape};
use cobox_protocol::{
    ErrorCode::*,
    langsmith::boxes::{BoxInfo, BoxList, BoxStatus, CreateBox, DownloadUrl, DownloadUrlRequest, PatchBox},
};
use serde_json::json;

use super::{keyed, langsmith_resources, tags};
use crate::http::langsmith::error;

/// One operation under each prefix.
macro_rules! both {
    ($method:literal, $path:literal, $id:literal, $summary:expr) => {
        [
            keyed($method, concat!("/v2/sandboxes", $path), $id, $summary),
            keyed($method, concat!("/api/v2/sandboxes", $path), concat!($id, "ByApi"), $summary),
        ]
    };
}

pub(super) use both;

pub fn routes() -> Vec<Operation> {
    let which = || Parameter::path("name", "Its name, or its id.");
    let nothing = || Shape::Plain(json!({ "type": "object" }));
    let page = || {
        [
            Parameter::query("page_size", "Items of a page; all, where it is left out.")
                .of(json!({ "type": "integer", "minimum": 1, "maximum": 200 })),
            Parameter::query("cursor", "The `next_cursor` of the page before."),
            Parameter::query("status", "Only those that are so.")
                .of(json!({ "type": "string", "enum": ["provisioning", "ready", "failed", "stopped", "deleting"] })),
            Parameter::query("created_by", "Only those of this principal; `me` for your own."),
            Parameter::query("sort_by", "The one order there is.").of(json!({ "type": "string", "enum": ["created_at"] })),
            Parameter::query("sort_order", "The one order there is.").of(json!({ "type": "string", "enum": ["desc"] })),
        ]
    };
    let routes =
        [
            both!("post", "/boxes", "createBox", "Make a box: a sandbox that stays until it is deleted").map(|o| {
                o.about(
                "What can't be met is a 422 that names the field. One that doesn't run in time is deleted again, and answered with 408.",
            )
            .takes::<CreateBox>()
            .gives::<BoxInfo>(201, "It was made; `provisioning` only for who did not wait.")
            .fails(&[SandboxConflict, InUse, SandboxStarting, SandboxNotFound, TemplateNotFound, SnapshotNotFound, VolumeNotFound])
            }),
            both!("get", "/boxes", "listBoxes", "List the boxes you may use")
                .map(|o| o.with([tags()]).with(page()).gives::<BoxList>(200, "Newest first; of a page with a filter only those it fits.")),
            both!("get", "/boxes/{name}", "getBox", "Look at a box")
                .map(|o| o.with([which()]).gives::<BoxInfo>(200, "The box.").fails(&[SandboxNotFound])),
            both!("patch", "/boxes/{name}", "changeBox", "Change its name, and how long it is kept").map(|o| {
                o.with([which()])
                    .takes::<PatchBox>()
                    .gives::<BoxInfo>(200, "The box as it is now.")
                    .fails(&[SandboxNotFound, SandboxConflict])
            }),
            both!("delete", "/boxes/{name}", "deleteBox", "End it, and every session that uses it")
                .map(|o| o.with([which()]).gives_nothing(204, "It has ended.").fails(&[SandboxNotFound])),
            both!("get", "/boxes/{name}/status", "getBoxStatus", "How it is")
                .map(|o| o.with([which()]).gives::<BoxStatus>(200, "Its status.").fails(&[SandboxNotFound])),
            both!("post", "/boxes/{name}/start", "startBox", "Start a stopped box, as its next use would").map(|o| {
                o.with([which()])
                    .takes_as("application/json", nothing())
                    .body_optional()
                    .gives::<BoxInfo>(200, "It runs, or is about to.")
                    .fails(&[SandboxNotFound, SessionExpired, TooLarge])
            }),
            both!("post", "/boxes/{name}/stop", "stopBox", "End its programs and keep its files").map(|o| {
                o.with([which()])
                    .takes_as("application/json", nothing())
                    .body_optional()
                    .gives::<BoxInfo>(200, "It has stopped, or is about to.")
                    .fails(&[SandboxNotFound, SessionExpired, TooLarge])
            }),
            both!("post", "/boxes/{name}/download-url", "linkBoxFile", "A URL for one file of it").map(|o| {
                o.with([which()])
                    .takes::<DownloadUrlRequest>()
                    .gives::<DownloadUrl>(200, "Good for 15 minutes at most.")
                    .fails(&[SandboxNotFound, CapabilityDenied])
            }),
            both!("post", "/boxes/{name}/service-url", "makeBoxServiceUrl", "Answers that ports can't be reached from outside")
                .map(|o| o.with([which()]).fails(&[Unsupported])),
            both!("get", "/boxes/{name}/service-urls", "listBoxServiceUrls", "Answers that there are none")
                .map(|o| o.with([which()]).fails(&[Unsupported])),
            both!("delete", "/boxes/{name}/service-urls", "deleteBoxServiceUrls", "Answers that there are none")
                .map(|o| o.with([which()]).fails(&[Unsupported])),
        ];
    routes.into_iter().flatten().chain(langsmith_resources::routes()).map(in_its_dialect).collect()
}

/// Adds this API's error format to an operation.
pub fn in_its_dialect(operation: Operation) -> Operation {
    let detail = json!({
        "type": "object",
        "properties": { "error": { "type": "string" }, "message": { "type": "string" }, "error_id": { "type": "string" } },
        "required": ["error", "message", "error_id"],
    });
    let field = json!({
        "type": "object",
        "properties": {
            "loc": { "type": "array", "items": { "type": "string" } }, "msg": { "type": "string" }, "type": { "type": "string" },
        },
        "required": ["loc", "msg", "type"],
    });
    let is_pools = operation.path.contains("/pools");
    operation
        .tag("langsmith")
        .statuses(if is_pools { error::status_of_pools } else { error::status })
        .errors_look_like(
            "langsmith.",
            Shape::Plain(json!({ "type": "object", "properties": { "detail": detail }, "required": ["detail"] })),
        )
        .error_looks_like(
            422,
            Shape::Plain(
                json!({ "type": "object", "properties": { "detail": { "type": "array", "items": field } }, "required": ["detail"] }),
            ),
        )
}
