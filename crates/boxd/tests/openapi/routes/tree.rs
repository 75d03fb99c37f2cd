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

const WATCH_ABOUT: &str = "Server-sent events. The first is `ready`; each has an id to come back with as `Last-Event-ID` or `cursor`. `overflow` says \
that events were lost and the files must be looked at again. A line with only `:` every 15 s keeps the connection open.";

const SYNC_ABOUT: &str = "The sandbox's end of `cobox sync`. Binary frames carry one stream of bytes each way, cut anywhere: messages of a u32 length, \
big-endian and at most 320 KiB, one byte of kind, and the rest, as `crates/sync/src/message.rs` has them; the first is a hello with the version. Text \
frames are `auth`, `ping` and `close`, as on the other sockets, with the same close codes.";

pub fn routes() -> Vec<Operation> {
    vec![
        verb::<ListRequest, ListResponse>("/v1/fs/list", "list", "List a directory, page by page", FsRead),
        verb::<StatRequest, FileEntry>("/v1/fs/stat", "stat", "Describe one thing", FsRead),
        verb::<GlobRequest, GlobResponse>("/v1/fs/glob", "glob", "Find by a pattern of the path", FsRead),
        verb::<GrepRequest, GrepResponse>("/v1/fs/grep", "grep", "Search the text of files", FsRead),
        verb::<EditRequest, EditResponse>("/v1/fs/edit", "edit", "Replace text in a file, all of it or nothing", FsWrite)
            .needs(&[FsRead, FsWrite])
            .fails(&[FileChanged, DiskFull]),
        verb::<MkdirRequest, ChangeResponse>("/v1/fs/mkdir", "mkdir", "Make a directory", FsWrite).fails(&[FileExists, DiskFull]),
        verb::<TransferRequest, ChangeResponse>("/v1/fs/move", "move", "Rename or move", FsWrite).fails(&[FileExists, DiskFull]),
        verb::<TransferRequest, ChangeResponse>("/v1/fs/copy", "copy", "Copy", FsWrite)
            .needs(&[FsRead, FsWrite])
            .fails(&[FileExists, DiskFull]),
        verb::<RemoveRequest, ChangeResponse>("/v1/fs/remove", "remove", "Remove", FsWrite),
        Operation::new("get", "/v1/watch", "watch", "What happens to the files, as events")
            .tag("tree")
            .about(WATCH_ABOUT)
            .needs(&[FsRead])
            .with([
                Parameter::query("path", "The directory; the shared folder unless told."),
                Parameter::query("recursive", "Everything below it too.")
                    .of(json!({ "type": "string", "enum": ["true", "false"], "default": "true" })),
                Parameter::query("cursor", "Where to go on from, for those who can't send a header."),
                Parameter::header("Last-Event-ID", "Where to go on from."),
            ])
            .gives_as(200, "The events, for as long as the token lasts.", "text/event-stream", Shape::Plain(json!({ "type": "string" })))
            .events([("ready", written::<WatchReady>())])
            .events(["created", "modified", "removed", "renamed"].map(|word| (word, written::<WatchEvent>())))
            .events([("overflow", written::<WatchOverflow>()), ("error", written::<Envelope>())])
            .fails(&[FileNotFound, Forbidden]),
        Operation::new("get", "/v1/sync/ws", "syncSocket", "Keep a folder here and one elsewhere the same")
            .tag("tree")
            .about(SYNC_ABOUT)
            .needs(&[FsRead])
            .with([
                Parameter::query("path", "The folder here; the shared one unless told. Made where it isn't there, unless only read."),
                Parameter::query("pull", "Nothing will be written. Without it `fs_write` is needed too.")
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
        .takes::<Q>()
        .gives::<A>(200, "Done.")
        .fails(&[FileNotFound, Forbidden])
}
