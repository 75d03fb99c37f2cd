//! The LangSmith sandbox SDK's routes. Their shapes are that SDK's, so they are written down here and not taken from our types.

use cobox_protocol::{
    Capability::{Exec, FsRead, FsWrite},
    ErrorCode::*,
    langsmith::{DOWNLOAD, EXECUTE, GLOB, GREP, UPLOAD},
};
use serde_json::{Value, json};

use super::files::read;
use cobox_openapi::{Operation, Parameter, Shape};

pub fn routes() -> Vec<Operation> {
    let path = || Parameter::query("path", "Relative ones start at the shared folder.").required();
    let routes = vec![
        Operation::new("post", EXECUTE, "langsmithExecute", "Run a command to its end")
            .needs(&[Exec])
            .takes_as("application/json", Shape::Plain(execute()))
            .gives_as(
                200,
                "It has ended.",
                "application/json",
                object(json!({ "stdout": TEXT, "stderr": TEXT, "exit_code": { "type": "integer" } })),
            )
            .fails(&[TooLarge]),
        Operation::new("post", UPLOAD, "langsmithUpload", "Write a file")
            .needs(&[FsWrite])
            .with([path()])
            .takes_as("multipart/form-data", object(json!({ "file": { "type": "string", "format": "binary" } })))
            .gives_as(200, "It was replaced.", "application/json", uploaded())
            .gives_as(201, "It is new.", "application/json", uploaded())
            .fails(&[FileNotFound, Forbidden, TooLarge, DiskFull]),
        read("get", DOWNLOAD, "langsmithDownload", "Read a file").with([path()]),
        read("head", DOWNLOAD, "langsmithHead", "Look at a file").with([path()]),
        search(GLOB, "langsmithGlob", "Find by a pattern of the path").gives_as(
            200,
            "What was found.",
            "application/json",
            matches(json!({ "path": TEXT, "is_dir": { "type": "boolean" }, "size_bytes": { "type": "integer" }, "modified_at": TEXT })),
        ),
        search(GREP, "langsmithGrep", "Search the text of files").gives_as(
            200,
            "What was found.",
            "application/json",
            matches(json!({ "path": TEXT, "line": { "type": "integer" }, "text": TEXT })),
        ),
    ];
    routes.into_iter().map(|route| route.tag("langsmith").errors_look_like("langsmith.", refused())).collect()
}

/// A string's schema, as a value that `json!` can take.
const TEXT: Text = Text;
struct Text;
impl serde::Serialize for Text {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        json!({ "type": "string" }).serialize(s)
    }
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
    Operation::new("post", path, id, summary).needs(&[FsRead]).takes_as("application/json", Shape::Plain(request)).fails(&[
        FileNotFound,
        Forbidden,
        TooLarge,
    ])
}

fn execute() -> Value {
    json!({
        "type": "object",
        "properties": {
            "command": TEXT,
            "timeout": { "type": ["number", "null"] },
            "shell": { "type": ["string", "null"] },
            "env": { "type": ["object", "null"], "additionalProperties": TEXT },
            "cwd": { "type": ["string", "null"] },
        },
        "required": ["command"],
    })
}

fn uploaded() -> Shape {
    object(json!({ "path": TEXT, "size": { "type": "integer" }, "etag": TEXT }))
}

fn matches(item: Value) -> Shape {
    let Shape::Plain(item) = object(item) else { unreachable!("an object is written down") };
    object(json!({ "matches": { "type": "array", "items": item }, "truncated": { "type": "boolean" } }))
}

fn refused() -> Shape {
    let Shape::Plain(detail) = object(json!({ "error": TEXT, "message": TEXT, "error_id": TEXT })) else {
        unreachable!("an object is written down")
    };
    object(json!({ "detail": detail }))
}

/// An object whose fields are all there.
fn object(properties: Value) -> Shape {
    let names: Vec<&String> = properties.as_object().into_iter().flat_map(|p| p.keys()).collect();
    Shape::Plain(json!({ "type": "object", "properties": properties, "required": names }))
}
