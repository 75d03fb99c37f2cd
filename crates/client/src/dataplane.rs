//! Dataplane client of one sandbox: commands, files and archives. Bodies of any size are streamed.

use bytes::Bytes;
use cobox_protocol::{
    ErrorCode,
    exec::{ExecRequest, ExecResponse},
    files::{ArchiveUnpacked, FILE_MODE_HEADER, FileWritten, TAR, TAR_ZSTD},
};
use futures_util::{Stream, TryStreamExt};
use http::{HeaderName, HeaderValue, Method, header};

use crate::{
    ClientError, Reconnect, Upload,
    call::{Call, Credential, Sender, read_json},
    path::{encode_path, encode_segment},
};

/// Maximum response of an exec, in bytes: the server's maximum for both outputs, escaped as JSON, and again in base64.
const MAX_EXEC_ANSWER: usize = 256 * 1024 * 1024;
/// Maximum response to an upload, in bytes.
const MAX_FILE_ANSWER: usize = 1024 * 1024;

/// A sandbox's address with a credential.
#[derive(Clone)]
pub struct Dataplane {
    pub(crate) sender: Sender,
    pub(crate) base: String,
    pub(crate) credential: Credential,
    pub(crate) reconnect: Reconnect,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArchiveFormat {
    Tar,
    TarZstd,
}

impl ArchiveFormat {
    const fn media_type(self) -> &'static str {
        match self {
            ArchiveFormat::Tar => TAR,
            ArchiveFormat::TarZstd => TAR_ZSTD,
        }
    }
}

/// Which symbolic links of an archive are unpacked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArchiveLinks {
    /// An archive with a link that leads out of the directory is refused.
    Inside,
    /// All links are unpacked unchanged, for a complete copy of a tree.
    Any,
}

/// A file being read: its metadata and its bytes.
pub struct RemoteFile {
    pub size: Option<u64>,
    /// Permission bits.
    pub mode: Option<u32>,
    pub etag: Option<String>,
    url: String,
    response: reqwest::Response,
}

impl RemoteFile {
    pub fn into_stream(self) -> impl Stream<Item = Result<Bytes, ClientError>> + Send {
        let url = self.url;
        self.response.bytes_stream().map_err(move |e| ClientError::transport(&url, &e))
    }
}

/// Type of a path in a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathKind {
    File,
    Directory,
    Missing,
}

impl Dataplane {
    pub(crate) fn new(sender: Sender, base: String, credential: Credential) -> Self {
        Self { sender, base: base.trim_end_matches('/').to_owned(), credential, reconnect: Reconnect::default() }
    }

    /// Sets the reconnect policy of its streams.
    pub fn with_reconnect(mut self, reconnect: Reconnect) -> Self {
        self.reconnect = reconnect;
        self
    }

    pub(crate) fn url(&self, route: &str) -> String {
        format!("{}{route}", self.base)
    }

    /// Runs a command to its end.
    pub async fn exec(&self, request: &ExecRequest) -> Result<ExecResponse, ClientError> {
        let call = Call::new(Method::POST, format!("{}/exec", self.base)).json(request);
        let response = self.sender.send(&call, &self.credential).await?;
        read_json(&call.url, response, MAX_EXEC_ANSWER).await
    }

    pub async fn read_file(&self, path: &[u8]) -> Result<RemoteFile, ClientError> {
        let call = Call::new(Method::GET, self.file_url(path)?);
        let response = self.sender.send(&call, &self.credential).await?;
        Ok(remote_file(call.url, response))
    }

    /// Determines the type of a path by reading its first byte. If that is refused, a path that can be archived is a directory.
    pub async fn kind(&self, path: &[u8]) -> Result<PathKind, ClientError> {
        let call = Call::new(Method::GET, self.file_url(path)?).header(header::RANGE, HeaderValue::from_static("bytes=0-0"));
        match self.sender.send(&call, &self.credential).await {
            Ok(_) => Ok(PathKind::File),
            // An empty file has no first byte.
            Err(e) if e.is(ErrorCode::RangeNotSatisfiable) => Ok(PathKind::File),
            Err(e) if e.is(ErrorCode::FileNotFound) => Ok(PathKind::Missing),
            Err(e) if e.is(ErrorCode::InvalidRequest) => match self.get_archive(path, ArchiveFormat::Tar).await {
                Ok(_) => Ok(PathKind::Directory),
                Err(_) => Err(e),
            },
            Err(e) => Err(e),
        }
    }

    /// Writes a whole file and creates its parents; `mode` sets its permission bits.
    pub async fn write_file(&self, path: &[u8], mode: Option<u32>, upload: Upload) -> Result<FileWritten, ClientError> {
        let mut call = Call::new(Method::PUT, self.file_url(path)?).upload(upload);
        if let Some(mode) = mode {
            let octal = HeaderValue::from_str(&format!("{:o}", mode & 0o7777)).expect("octal digits are a header value");
            call = call.header(HeaderName::from_static(FILE_MODE_HEADER), octal);
        }
        let response = self.sender.send(&call, &self.credential).await?;
        read_json(&call.url, response, MAX_FILE_ANSWER).await
    }

    pub async fn delete_file(&self, path: &[u8]) -> Result<(), ClientError> {
        let call = Call::new(Method::DELETE, self.file_url(path)?);
        self.sender.send(&call, &self.credential).await.map(drop)
    }

    /// Downloads a directory's contents as an archive.
    pub async fn get_archive(&self, path: &[u8], format: ArchiveFormat) -> Result<RemoteFile, ClientError> {
        let call = Call::new(Method::GET, self.archive_url(path)?).header(header::ACCEPT, HeaderValue::from_static(format.media_type()));
        let response = self.sender.send(&call, &self.credential).await?;
        Ok(remote_file(call.url, response))
    }

    /// Unpacks an archive into a directory, which is created if it is missing.
    pub async fn put_archive(
        &self,
        path: &[u8],
        format: ArchiveFormat,
        links: ArchiveLinks,
        upload: Upload,
    ) -> Result<ArchiveUnpacked, ClientError> {
        let links_query = match links {
            ArchiveLinks::Inside => "",
            ArchiveLinks::Any => "&links=any",
        };
        let call = Call::new(Method::PUT, self.archive_url(path)? + links_query)
            .upload(upload)
            .header(header::CONTENT_TYPE, HeaderValue::from_static(format.media_type()));
        let response = self.sender.send(&call, &self.credential).await?;
        read_json(&call.url, response, MAX_FILE_ANSWER).await
    }

    fn file_url(&self, path: &[u8]) -> Result<String, ClientError> {
        Ok(format!("{}/files{}", self.base, encode_path(path)?))
    }

    fn archive_url(&self, path: &[u8]) -> Result<String, ClientError> {
        // Checked by the same rules as a file's path, although a query could contain any bytes.
        encode_path(path)?;
        Ok(format!("{}/archive?path={}", self.base, encode_segment(path)))
    }
}

fn remote_file(url: String, response: reqwest::Response) -> RemoteFile {
    let text = |name: &str| response.headers().get(name).and_then(|v| v.to_str().ok());
    RemoteFile {
        size: response.content_length(),
        mode: text(FILE_MODE_HEADER).and_then(|m| u32::from_str_radix(m, 8).ok()),
        etag: text("etag").map(str::to_owned),
        url,
        response,
    }
}
