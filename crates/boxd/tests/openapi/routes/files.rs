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
const PATH_ABOUT: &str = "Absolute path in the sandbox, slashes included: `/v1/files/workspace/a.txt` is `/workspace/a.txt`. Percent-encoded; may contain any \
     bytes except NUL, and no `..`.";
const FILE_HEADERS: [(&str, &str); 5] = [
    ("ETag", "Version of the file: a strong entity tag that changes with every write."),
    ("X-File-Mode", "Permission bits in octal, such as `644`."),
    ("Last-Modified", "Time of the last write."),
    ("Repr-Digest", "The requested hashes (RFC 9530)."),
    ("Accept-Ranges", "`bytes`."),
];

pub fn routes() -> Vec<Operation> {
    let path = || Parameter::path("path", PATH_ABOUT);
    let sync = || {
        Parameter::query("sync", "`false`: respond before the file is synced to disk.")
            .of(json!({ "type": "string", "enum": ["true", "false"], "default": "true" }))
    };
    let conditions = || {
        [
            Parameter::header("If-Match", "Succeed only if the file has one of these versions; otherwise `FILE_CHANGED`."),
            Parameter::header(
                "If-None-Match",
                "Succeed only if the file has none of these versions; `*`: only if the file does not exist.",
            ),
        ]
    };
    let mode =
        || Parameter::header("X-File-Mode", "Permission bits in octal.").of(json!({ "type": "string", "pattern": "^0*[0-7]{1,3}$" }));
    vec![
        read("get", "/v1/files/{path}", "readFile", "Read a file").with([path()]),
        read("head", "/v1/files/{path}", "headFile", "Get a file's metadata").with([path()]),
        Operation::new("put", "/v1/files/{path}", "writeFile", "Write a file")
            .tag("files")
            .about("The body is the file's content. Missing parent directories are created. Readers see the complete old or new file, never a partial one.")
            .needs(&[FsWrite])
            .with([path(), mode(), sync(), follow()])
            .with(conditions())
            .request_body_as(ANY, bytes())
            .body_optional()
            .response::<FileWritten>(200, "The file was replaced.")
            .response::<FileWritten>(201, "The file was created.")
            .response_headers(200, &FILE_HEADERS[..1])
            .response_headers(201, &FILE_HEADERS[..1])
            .errors(&[FileNotFound, Forbidden, FileChanged, TooLarge, DiskFull]),
        Operation::new("delete", "/v1/files/{path}", "deleteFile", "Delete a file, a symbolic link (not its target), or an empty directory")
            .tag("files")
            .needs(&[FsWrite])
            .with([path()])
            .with(conditions())
            .empty_response(204, "The path was deleted.")
            .errors(&[FileNotFound, Forbidden, FileChanged]),
        Operation::new("post", "/v1/files/upload", "uploadFiles", "Write many files")
            .tag("files")
            .about(
                "Each part is a file. Its path is the header `X-File-Path` (percent-encoded), otherwise its file name, otherwise its name; relative \
                 paths start at `path`. `X-File-Mode` sets its permission bits.",
            )
            .needs(&[FsWrite])
            .with([Parameter::query("path", "Base of relative paths; the default is the shared folder."), sync()])
            .request_body_as("multipart/form-data", Shape::Plain(json!({ "type": "object", "additionalProperties": { "type": "string", "format": "binary" } })))
            .response::<UploadResponse>(200, "All files were written.")
            .response::<UploadResponse>(207, "Some files were not written; each has its error.")
            .errors(&[TooLarge, DiskFull]),
        Operation::new("get", "/v1/files/download", "downloadFiles", "Read many files")
            .tag("files")
            .about(
                "Returns a part for each `path`, in order, with `X-File-Path` (percent-encoded). A part for an unreadable file has `X-File-Error` with the \
                 error code, and the error as its body. Without `path`, the route reads the file `/download`.",
            )
            .needs(&[FsRead])
            .with([Parameter::query("path", "Path of a file; may be repeated. Relative paths start at the shared folder.")
                .of(json!({ "type": "array", "items": { "type": "string" }, "maxItems": 1000 }))])
            .response_as(200, "The files.", "multipart/mixed", bytes())
            .errors(&[FileNotFound, Forbidden]),
        Operation::new("get", "/v1/archive", "packDirectory", "Read a directory or a file as a tar archive")
            .tag("files")
            .about(
                "Compressed with `Accept: application/x-tar+zstd`. Names are relative to `path`. An entry that the sandbox's user may not read is \
                 replaced by a PAX global record `COBOX.skipped` with its percent-encoded name.",
            )
            .needs(&[FsRead])
            .with([absolute()])
            .response_as(200, "The archive.", TAR, bytes())
            .response_as(200, "", TAR_ZSTD, bytes())
            .errors(&[FileNotFound, Forbidden]),
        Operation::new("put", "/v1/archive", "unpackArchive", "Unpack a tar archive into a directory")
            .tag("files")
            .about(
                "The directory is created if missing. Files, directories, symbolic and hard links are unpacked. An entry that would leave the directory \
                 is refused, as is an archive without the blocks of zeros at its end. Entries unpacked before an error are kept.",
            )
            .needs(&[FsWrite])
            .with([
                absolute(),
                Parameter::query("links", "`any` also accepts symbolic links that are absolute or may lead out of the directory; `inside` refuses them. Links are never followed.")
                    .of(json!({ "type": "string", "enum": ["inside", "any"], "default": "inside" })),
            ])
            .request_body_as(TAR, bytes())
            .request_body_as(TAR_ZSTD, bytes())
            .response::<ArchiveUnpacked>(200, "The archive was unpacked.")
            .errors(&[FileNotFound, Forbidden, TooLarge, DiskFull]),
    ]
}

fn absolute() -> Parameter {
    Parameter::query("path", "Absolute path in the sandbox.").of(json!({ "type": "string", "pattern": "^/" })).required()
}

fn follow() -> Parameter {
    Parameter::header("X-File-Follow", "`false`: a path that contains a symbolic link fails with `FORBIDDEN`.")
        .of(json!({ "type": "string", "enum": ["true", "false"], "default": "true" }))
}

/// GET or HEAD of one file. The path may be in the URL or in the query.
pub fn read(method: &'static str, path: &'static str, id: &'static str, summary: &'static str) -> Operation {
    let is_head = method == "head";
    let with_body = |operation: Operation, status, about| match is_head {
        true => operation.empty_response(status, about),
        false => operation.response_as(status, about, ANY, bytes()),
    };
    let operation = Operation::new(method, path, id, summary)
        .tag("files")
        .needs(&[FsRead])
        .with([
            Parameter::header("Range", "A single range of bytes; for several ranges, the whole file is returned."),
            Parameter::header("If-Range", "Return the range only if the file has this version; otherwise the whole file."),
            Parameter::header("If-Match", "Succeed only if the file has one of these versions; otherwise `FILE_CHANGED`."),
            Parameter::header("If-None-Match", "Return 304 if the file has one of these versions."),
            follow(),
            Parameter::header("Want-Repr-Digest", "Requested hashes: `sha-256`, `blake3`."),
            Parameter::query("hash", "Requested hashes: `sha256`, `blake3`, or both separated by a comma."),
        ])
        .empty_response(304, "The file has a version of `If-None-Match`.")
        .errors(&[FileNotFound, Forbidden, FileChanged, RangeNotSatisfiable]);
    let operation = with_body(operation, 200, "The file.");
    with_body(operation, 206, "The range.").response_headers(200, &FILE_HEADERS).response_headers(206, &FILE_HEADERS)
}
