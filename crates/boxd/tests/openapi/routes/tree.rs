//! The routes for the file tree: inspecting, searching, changing, watching.

use cobox_protocol::{
    Capability::{self, FsRead, FsWrite},
    Envelope,
    ErrorCode::*,
    fs::{
        ChangeResponse, EditRequest, EditResponse, FileEntry, GlobRequest, GlobResponse, GrepRequest, GrepResponse, ListRequest,
        ListResponse, MkdirRequest, RemoveRequest, StatRequest, TransferRequest,
    },
    watch::{WatchEvent, WatchOverflow, WatchReady},
};
use schemars::JsonSchema;
use serde_json::json;

use cobox_openapi::{Operation, Parameter, Shape, written};

const WATCH_ABOUT: &str = "Server-sent events. The first is `ready`. Each has an ID; send it as `Last-Event-ID` or `cursor` to resume. `overflow` means that events \
     were lost and the files must be listed again. A line with only `:` is sent every 15 s to keep the connection open.";

const SYNC_ABOUT: &str = "The sandbox's side of `cobox sync`. Binary frames carry a byte stream in each direction, split at any position: messages with a \
     big-endian u32 length of at most 320 KiB, one byte of kind, and a payload, as defined in `crates/sync/src/message.rs`; the first is a hello with the \
     version. Text frames are `auth`, `ping` and `close`, with the same close codes as on the other sockets.";

pub fn routes() -> Vec<Operation> {
    vec![
        verb::<ListRequest, ListResponse>("/v1/fs/list", "list", "List a directory, with paging", FsRead),
        verb::<StatRequest, FileEntry>("/v1/fs/stat", "stat", "Get metadata of a path", FsRead),
        verb::<GlobRequest, GlobResponse>("/v1/fs/glob", "glob", "Find paths by a glob pattern", FsRead),
        verb::<GrepRequest, GrepResponse>("/v1/fs/grep", "grep", "Search the contents of files", FsRead),
        verb::<EditRequest, EditResponse>("/v1/fs/edit", "edit", "Replace text in a file atomically", FsWrite)
            .needs(&[FsRead, FsWrite])
            .errors(&[FileChanged, DiskFull]),
        verb::<MkdirRequest, ChangeResponse>("/v1/fs/mkdir", "mkdir", "Make a directory", FsWrite).errors(&[FileExists, DiskFull]),
        verb::<TransferRequest, ChangeResponse>("/v1/fs/move", "move", "Rename or move", FsWrite).errors(&[FileExists, DiskFull]),
        verb::<TransferRequest, ChangeResponse>("/v1/fs/copy", "copy", "Copy", FsWrite)
            .needs(&[FsRead, FsWrite])
            .errors(&[FileExists, DiskFull]),
        verb::<RemoveRequest, ChangeResponse>("/v1/fs/remove", "remove", "Remove", FsWrite),
        Operation::new("get", "/v1/watch", "watch", "Stream file changes as events")
            .tag("tree")
            .about(WATCH_ABOUT)
            .needs(&[FsRead])
            .with([
                Parameter::query("path", "The directory; the default is the shared folder."),
                Parameter::query("recursive", "Include all descendants.")
                    .of(json!({ "type": "string", "enum": ["true", "false"], "default": "true" })),
                Parameter::query("cursor", "Event ID to resume after, for clients that can't send the header."),
                Parameter::header("Last-Event-ID", "Event ID to resume after."),
            ])
            .response_as(
                200,
                "The event stream; it ends when the token expires.",
                "text/event-stream",
                Shape::Plain(json!({ "type": "string" })),
            )
            .events([("ready", written::<WatchReady>())])
            .events(["created", "modified", "removed", "renamed"].map(|word| (word, written::<WatchEvent>())))
            .events([("overflow", written::<WatchOverflow>()), ("error", written::<Envelope>())])
            .errors(&[FileNotFound, Forbidden]),
        Operation::new("get", "/v1/sync/ws", "syncSocket", "Sync a folder of the sandbox with one of the client")
            .tag("tree")
            .about(SYNC_ABOUT)
            .needs(&[FsRead])
            .with([
                Parameter::query(
                    "path",
                    "The folder in the sandbox; the default is the shared folder. Created if missing, except when read-only.",
                ),
                Parameter::query("pull", "Read-only: nothing is written. Without it, `fs_write` is required, too.")
                    .of(json!({ "type": "string", "enum": ["true", "false"], "default": "false" })),
            ])
            .websocket(bytes(), bytes()),
    ]
}

fn bytes() -> Shape {
    Shape::Plain(json!({ "type": "string", "format": "binary" }))
}

fn verb<Q: JsonSchema, A: JsonSchema>(path: &'static str, id: &'static str, summary: &'static str, needs: Capability) -> Operation {
    Operation::new("post", path, id, summary)
        .tag("tree")
        .needs(&[needs])
        .request_body::<Q>()
        .response::<A>(200, "Done.")
        .errors(&[FileNotFound, Forbidden])
}
