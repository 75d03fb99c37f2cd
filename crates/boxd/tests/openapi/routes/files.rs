//! The routes for single files, many files, and directories as archives.

use cobox_protocol::{
    Capability::{FsRead, FsWrite},
    ErrorCode::*,
    files::{ArchiveUnpacked, FileWritten, TAR, TAR_ZSTD},
    fs::UploadResponse,
};
use serde_json::json;

use cobox_openapi::{Operation, Parameter, Shape, bytes};

const ANY: &str = "application/octet-stream";
const PATH_ABOUT: &str = "Absolute in the sandbox, with its slashes: `/v1/files/workspace/a.txt` is `/workspace/a.txt`. Percent-encoded; any bytes \
but NUL, and no `..`.";
const FILE_HEADERS: [(&str, &str); 5] = [
    ("ETag", "The version: strong, changes with any write."),
    ("X-File-Mode", "Permission bits in octal, such as `644`."),
    ("Last-Modified", "When it was last written."),
    ("Repr-Digest", "The hashes that were asked for (RFC 9530)."),
    ("Accept-Ranges", "`bytes`."),
];

pub fn routes() -> Vec<Operation> {
    let path = || Parameter::path("path", PATH_ABOUT);
    let sync = || {
        Parameter::query("sync", "`false`: the answer doesn't wait for the disk.")
            .of(json!({ "type": "string", "enum": ["true", "false"], "default": "true" }))
    };
    let conditions = || {
        [
            Parameter::header("If-Match", "Only while the file is one of these versions; else `FILE_CHANGED`."),
            Parameter::header("If-None-Match", "Only while it is none of these; `*`: only where there is no file."),
        ]
    };
    let mode =
        || Parameter::header("X-File-Mode", "Permission bits in octal.").of(json!({ "type": "string", "pattern": "^0*[0-7]{1,3}$" }));
    vec![
        read("get", "/v1/files/{path}", "readFile", "Read a file").with([path()]),
        read("head", "/v1/files/{path}", "headFile", "Look at a file").with([path()]),
        Operation::new("put", "/v1/files/{path}", "writeFile", "Write a file")
            .tag("files")
            .about("The body is the file. Directories above it are made. Readers see the old file or the new one, never half of it.")
            .needs(&[FsWrite])
            .with([path(), mode(), sync(), follow()])
            .with(conditions())
            .takes_as(ANY, bytes())
            .body_optional()
            .gives::<FileWritten>(200, "It was replaced.")
            .gives::<FileWritten>(201, "It is new.")
            .response_headers(200, &FILE_HEADERS[..1])
            .response_headers(201, &FILE_HEADERS[..1])
            .fails(&[FileNotFound, Forbidden, FileChanged, TooLarge, DiskFull]),
        Operation::new("delete", "/v1/files/{path}", "deleteFile", "Delete a file, a link itself, or an empty directory")
            .tag("files")
            .needs(&[FsWrite])
            .with([path()])
            .with(conditions())
            .gives_nothing(204, "It is gone.")
            .fails(&[FileNotFound, Forbidden, FileChanged]),
        Operation::new("post", "/v1/files/upload", "uploadFiles", "Write many files")
            .tag("files")
            .about(
                "Each part is a file. Its path is its `X-File-Path` (percent-encoded), else its file name, else its name; relative ones start \
                 at `path`. A part's `X-File-Mode` is its permission bits.",
            )
            .needs(&[FsWrite])
            .with([Parameter::query("path", "Where relative paths start; the shared folder unless told."), sync()])
            .takes_as("multipart/form-data", Shape::Plain(json!({ "type": "object", "additionalProperties": { "type": "string", "format": "binary" } })))
            .gives::<UploadResponse>(200, "All were written.")
            .gives::<UploadResponse>(207, "Some were not; each says why.")
            .fails(&[TooLarge, DiskFull]),
        Operation::new("get", "/v1/files/download", "downloadFiles", "Read many files")
            .tag("files")
            .about(
                "A part for each `path` in its order, with `X-File-Path` (percent-encoded); one that can't be read has `X-File-Error` with the code \
                 and the error as its body. Without a `path` this is the file `/download`.",
            )
            .needs(&[FsRead])
            .with([Parameter::query("path", "Once for each file; relative ones start at the shared folder.")
                .of(json!({ "type": "array", "items": { "type": "string" }, "maxItems": 1000 }))])
            .gives_as(200, "The files.", "multipart/mixed", bytes())
            .fails(&[FileNotFound, Forbidden]),
        Operation::new("get", "/v1/archive", "packDirectory", "Read a directory, or a file, as a tar")
            .tag("files")
            .about(
                "Compressed with `Accept: application/x-tar+zstd`. Names are relative to `path`. In the place of what the sandbox's user may not \
                 read is a PAX global record `COBOX.skipped` with its name, percent-encoded.",
            )
            .needs(&[FsRead])
            .with([absolute()])
            .gives_as(200, "The archive.", TAR, bytes())
            .gives_as(200, "", TAR_ZSTD, bytes())
            .fails(&[FileNotFound, Forbidden]),
        Operation::new("put", "/v1/archive", "unpackArchive", "Unpack a tar beneath a directory")
            .tag("files")
            .about(
                "The directory is made where it isn't there. Files, directories and links are taken, hard ones too; an entry that would leave it \
                 is refused, and so is an archive without the blocks of zeros at its end. What was unpacked before an error stays.",
            )
            .needs(&[FsWrite])
            .with([
                absolute(),
                Parameter::query("links", "`any` takes symbolic links that are absolute or may lead out of the directory too; `inside` refuses them. None is followed.")
                    .of(json!({ "type": "string", "enum": ["inside", "any"], "default": "inside" })),
            ])
            .takes_as(TAR, bytes())
            .takes_as(TAR_ZSTD, bytes())
            .gives::<ArchiveUnpacked>(200, "All of it was unpacked.")
            .fails(&[FileNotFound, Forbidden, TooLarge, DiskFull]),
    ]
}

fn absolute() -> Parameter {
    Parameter::query("path", "Absolute in the sandbox.").of(json!({ "type": "string", "pattern": "^/" })).required()
}

fn follow() -> Parameter {
    Parameter::header("X-File-Follow", "`false`: a path that goes through a symbolic link is `FORBIDDEN`.")
        .of(json!({ "type": "string", "enum": ["true", "false"], "default": "true" }))
}

/// GET or HEAD of one file. The path may be in the URL or in the query.
pub fn read(method: &'static str, path: &'static str, id: &'static str, summary: &'static str) -> Operation {
    let is_head = method == "head";
    let with_body = |operation: Operation, status, about| match is_head {
        true => operation.gives_nothing(status, about),
        false => operation.gives_as(status, about, ANY, bytes()),
    };
    let operation = Operation::new(method, path, id, summary)
        .tag("files")
        .needs(&[FsRead])
        .with([
            Parameter::header("Range", "One range of bytes; several are answered with the whole file."),
            Parameter::header("If-Range", "The range only of this version; else the whole file."),
            Parameter::header("If-Match", "Only while the file is one of these versions; else `FILE_CHANGED`."),
            Parameter::header("If-None-Match", "304 while it is one of these."),
            follow(),
            Parameter::header("Want-Repr-Digest", "Hashes wanted: `sha-256`, `blake3`."),
            Parameter::query("hash", "The same as a query: `sha256`, `blake3`, or both with a comma."),
        ])
        .gives_nothing(304, "It is the version of `If-None-Match`.")
        .fails(&[FileNotFound, Forbidden, FileChanged, RangeNotSatisfiable]);
    let operation = with_body(operation, 200, "The file.");
    with_body(operation, 206, "The range.").response_headers(200, &FILE_HEADERS).response_headers(206, &FILE_HEADERS)
}
