//! The routes of the LangSmith sandbox SDK. Their shapes are defined by that SDK, so they are written here and not
//! derived from boxd's types.

use cobox_protocol::{
    Capability::{Exec, FsRead, FsWrite},
    ErrorCode::*,
    langsmith::{
        DOWNLOAD, EXECUTE, EXECUTE_RESUME, EXECUTE_START, EXECUTE_WS, GLOB, GREP, TUNNEL, UPLOAD,
        exec::{Execute, LangsmithClientFrame, LangsmithServerFrame, Resume},
    },
};
use serde_json::{Value, json};

use super::files::read;
use cobox_openapi::{Operation, Parameter, Shape, read as read_shape, written};

pub fn routes() -> Vec<Operation> {
    let path = || Parameter::query("path", "Relative paths start at the shared folder.").required();
    let routes = vec![
        Operation::new("post", EXECUTE, "langsmithExecute", "Run a command and wait for it")
            .needs(&[Exec])
            .request_body::<Execute>()
            .response_as(
                200,
                "The command has exited.",
                "application/json",
                object(json!({ "stdout": TEXT, "stderr": TEXT, "exit_code": { "type": "integer" } })),
            )
            .errors(&[CommandNotFound, CommandExpired]),
        Operation::new("get", EXECUTE_WS, "langsmithExecuteStream", "Run a command, or join a running one, over a WebSocket")
            .about(
                "The first frame is `execute` or `reconnect`; the server responds with `started`. Output is addressed by byte offset and never split \
                     within a character, and `data` has exactly as many bytes as the command printed.",
            )
            .needs(&[Exec])
            .websocket(read_shape::<LangsmithClientFrame>(), written::<LangsmithServerFrame>()),
        stream(EXECUTE_START, "langsmithExecuteEvents", "Run a command, or join a running one, as server-sent events")
            .request_body::<Execute>(),
        stream(EXECUTE_RESUME, "langsmithResumeEvents", "Resume the output of a command after a lost connection").request_body::<Resume>(),
        Operation::new("post", UPLOAD, "langsmithUpload", "Write a file")
            .needs(&[FsWrite])
            .with([path()])
            .request_body_as("multipart/form-data", object(json!({ "file": { "type": "string", "format": "binary" } })))
            .response_as(200, "The file was replaced.", "application/json", uploaded())
            .response_as(201, "The file was created.", "application/json", uploaded())
            .errors(&[FileNotFound, Forbidden, TooLarge, DiskFull]),
        read("get", DOWNLOAD, "langsmithDownload", "Read a file").with([path()]),
        read("head", DOWNLOAD, "langsmithHead", "Get a file's metadata").with([path()]),
        search(GLOB, "langsmithGlob", "Find paths by a glob pattern").response_as(
            200,
            "The matches.",
            "application/json",
            matches(json!({ "path": TEXT, "is_dir": { "type": "boolean" }, "size_bytes": { "type": "integer" }, "modified_at": TEXT })),
        ),
        search(GREP, "langsmithGrep", "Search the contents of files").response_as(
            200,
            "The matches.",
            "application/json",
            matches(json!({ "path": TEXT, "line": { "type": "integer" }, "text": TEXT })),
        ),
        Operation::new("get", TUNNEL, "langsmithTunnel", "Always fails: ports of a sandbox can't be reached from outside")
            .errors(&[Unsupported]),
    ];
    routes.into_iter().map(|route| route.tag("langsmith").error_format("langsmith.", refused())).collect()
}

/// Schemas as values for `json!`.
const TEXT: Kind = Kind("string", None);
const BASE64: Kind = Kind("string", Some("base64"));
const NUMBER: Kind = Kind("integer", None);
struct Kind(&'static str, Option<&'static str>);
impl serde::Serialize for Kind {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        match self.1 {
            None => json!({ "type": self.0 }).serialize(s),
            Some(encoding) => json!({ "type": self.0, "contentEncoding": encoding }).serialize(s),
        }
    }
}

fn stream(path: &'static str, id: &'static str, summary: &'static str) -> Operation {
    Operation::new("post", path, id, summary)
        .needs(&[Exec])
        .response_as(200, "Output and state changes as they occur.", "text/event-stream", Shape::Plain(json!({ "type": "string" })))
        .events([
            ("started", object(json!({ "command_id": TEXT, "pid": NUMBER }))),
            ("stdout", object(json!({ "offset": NUMBER, "data": BASE64 }))),
            ("stderr", object(json!({ "offset": NUMBER, "data": BASE64 }))),
            ("stream_end", object(json!({ "stream": TEXT, "offset": NUMBER }))),
            ("exit", object(json!({ "exit_code": NUMBER }))),
            ("ack_required", object(json!({ "stdout_offset": NUMBER, "stderr_offset": NUMBER }))),
            ("error", object(json!({ "error_type": TEXT, "error": TEXT }))),
        ])
        .errors(&[CommandNotFound, CommandExpired])
}

fn search(path: &'static str, id: &'static str, summary: &'static str) -> Operation {
    let request = json!({
        "type": "object",
        "properties": {
            "pattern": TEXT,
            "path": { "type": ["string", "null"] },
            "glob": { "type": ["string", "null"] },
            "limit": { "type": ["integer", "null"], "minimum": 0 },
        },
        "required": ["pattern"],
    });
    Operation::new("post", path, id, summary).needs(&[FsRead]).request_body_as("application/json", Shape::Plain(request)).errors(&[
        FileNotFound,
        Forbidden,
        TooLarge,
    ])
}

fn uploaded() -> Shape {
    object(json!({ "path": TEXT, "size": { "type": "integer" }, "etag": TEXT }))
}

fn matches(item: Value) -> Shape {
    let Shape::Plain(item) = object(item) else { unreachable!("the schema is an object") };
    object(json!({ "matches": { "type": "array", "items": item }, "truncated": { "type": "boolean" } }))
}

fn refused() -> Shape {
    let Shape::Plain(detail) = object(json!({ "error": TEXT, "message": TEXT, "error_id": TEXT })) else {
        unreachable!("the schema is an object")
    };
    object(json!({ "detail": detail }))
}

/// An object with only required fields.
fn object(properties: Value) -> Shape {
    let names: Vec<&String> = properties.as_object().into_iter().flat_map(|p| p.keys()).collect();
    Shape::Plain(json!({ "type": "object", "properties": properties, "required": names }))
}
