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
    let which = || Parameter::path("name", "Name or id of the box.");
    let nothing = || Shape::Plain(json!({ "type": "object" }));
    let page = || {
        [
            Parameter::query("page_size", "Maximum number of items in the page; all by default.")
                .of(json!({ "type": "integer", "minimum": 1, "maximum": 200 })),
            Parameter::query("cursor", "The `next_cursor` of the previous page."),
            Parameter::query("status", "Only boxes with this status.")
                .of(json!({ "type": "string", "enum": ["provisioning", "ready", "failed", "stopped", "deleting"] })),
            Parameter::query("created_by", "Only boxes of this principal; `me` for your own."),
            Parameter::query("sort_by", "The only supported order.").of(json!({ "type": "string", "enum": ["created_at"] })),
            Parameter::query("sort_order", "The only supported order.").of(json!({ "type": "string", "enum": ["desc"] })),
        ]
    };
    let routes =
        [
            both!("post", "/boxes", "createBox", "Create a box: a sandbox that exists until it is deleted").map(|o| {
                o.about(
                "An unsupported value is refused with 422, which names the field. A box that doesn't start in time is deleted and refused \
                 with 408.",
            )
            .request_body::<CreateBox>()
            .response::<BoxInfo>(201, "Created; the status is `provisioning` only if the request did not wait.")
            .errors(&[SandboxConflict, InUse, SandboxStarting, SandboxNotFound, TemplateNotFound, SnapshotNotFound, VolumeNotFound])
            }),
            both!("get", "/boxes", "listBoxes", "List the boxes you may use").map(|o| {
                o.with([tags()]).with(page()).response::<BoxList>(200, "The boxes, newest first. A filter reduces the items of each page.")
            }),
            both!("get", "/boxes/{name}", "getBox", "Get a box")
                .map(|o| o.with([which()]).response::<BoxInfo>(200, "The box.").errors(&[SandboxNotFound])),
            both!("patch", "/boxes/{name}", "changeBox", "Change a box's name and lifetimes").map(|o| {
                o.with([which()])
                    .request_body::<PatchBox>()
                    .response::<BoxInfo>(200, "The changed box.")
                    .errors(&[SandboxNotFound, SandboxConflict])
            }),
            both!("delete", "/boxes/{name}", "deleteBox", "Delete a box and end the sessions that use it")
                .map(|o| o.with([which()]).empty_response(204, "Deleted.").errors(&[SandboxNotFound])),
            both!("get", "/boxes/{name}/status", "getBoxStatus", "Get the status of a box")
                .map(|o| o.with([which()]).response::<BoxStatus>(200, "The status.").errors(&[SandboxNotFound])),
            both!("post", "/boxes/{name}/start", "startBox", "Start a stopped box").map(|o| {
                o.with([which()])
                    .request_body_as("application/json", nothing())
                    .body_optional()
                    .response::<BoxInfo>(200, "The box, running or starting.")
                    .errors(&[SandboxNotFound, SessionExpired, TooLarge])
            }),
            both!("post", "/boxes/{name}/stop", "stopBox", "Stop a box: end its programs, keep its files").map(|o| {
                o.with([which()])
                    .request_body_as("application/json", nothing())
                    .body_optional()
                    .response::<BoxInfo>(200, "The box, stopped or stopping.")
                    .errors(&[SandboxNotFound, SessionExpired, TooLarge])
            }),
            both!("post", "/boxes/{name}/download-url", "linkBoxFile", "Create a download URL for one file of a box").map(|o| {
                o.with([which()])
                    .request_body::<DownloadUrlRequest>()
                    .response::<DownloadUrl>(200, "The URL, valid for at most 15 minutes.")
                    .errors(&[SandboxNotFound, CapabilityDenied])
            }),
            both!("post", "/boxes/{name}/service-url", "makeBoxServiceUrl", "Unsupported: ports can't be reached from outside")
                .map(|o| o.with([which()]).errors(&[Unsupported])),
            both!("get", "/boxes/{name}/service-urls", "listBoxServiceUrls", "Unsupported: there are no service URLs")
                .map(|o| o.with([which()]).errors(&[Unsupported])),
            both!("delete", "/boxes/{name}/service-urls", "deleteBoxServiceUrls", "Unsupported: there are no service URLs")
                .map(|o| o.with([which()]).errors(&[Unsupported])),
        ];
    routes.into_iter().flatten().chain(langsmith_resources::routes()).map(with_langsmith_errors).collect()
}

/// Adds this API's error format to an operation.
pub fn with_langsmith_errors(operation: Operation) -> Operation {
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
        .error_format("langsmith.", Shape::Plain(json!({ "type": "object", "properties": { "detail": detail }, "required": ["detail"] })))
        .error_format_of(
            422,
            Shape::Plain(
                json!({ "type": "object", "properties": { "detail": { "type": "array", "items": field } }, "required": ["detail"] }),
            ),
        )
}
