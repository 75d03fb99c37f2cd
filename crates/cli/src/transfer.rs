//! Uploads and downloads with a progress bar, shared by `cp` and `sync`.

use std::{
    io::{self, IsTerminal},
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::Context as _;
use bytes::Bytes;
use cobox_client::{ArchiveFormat, ArchiveLinks, Dataplane, RemoteFile, Upload};
use cobox_protocol::files::ArchiveUnpacked;
use cobox_stream::SequenceKinds;
use futures_util::{Stream, StreamExt, TryStreamExt, stream};
use indicatif::ProgressBar;
use parking_lot::Mutex;
use serde::Serialize;
use tokio::io::{AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio_util::{
    io::{ReaderStream, StreamReader, SyncIoBridge},
    sync::CancellationToken,
};

use crate::{
    context::Context,
    daemon::StopSignals,
    failure::{Failure, INTERRUPTED},
    output_filter::OutputFilter,
    pack::{self, IgnoreMode, PackReport},
    printer::visible,
    unpack::{UnpackReport, unpack},
};

/// Read size for local files, in bytes.
const READ_CHUNK: usize = 64 * 1024;
/// Bytes of an archive that wait to be sent: 1 MiB, so that packing and sending overlap.
const UNSENT_BYTES: usize = 1024 * 1024;

/// Totals of a transfer, as `--json` shows them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TransferTotals {
    pub files: u64,
    pub links: u64,
    /// Size of the files' contents before compression.
    pub bytes: u64,
    pub left_out: u64,
}

impl std::ops::AddAssign for TransferTotals {
    fn add_assign(&mut self, more: Self) {
        self.files += more.files;
        self.links += more.links;
        self.bytes += more.bytes;
        self.left_out += more.left_out;
    }
}

/// Aborts a transfer at Ctrl-C by dropping it, which also removes the partial file.
pub async fn interruptible<T>(transfer: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    let mut signals = StopSignals::new()?;
    tokio::select! {
        done = transfer => done,
        () = signals.recv() => Err(Failure::new("interrupted").with_exit_code(INTERRUPTED)),
    }
}

impl TransferTotals {
    pub fn summary(&self) -> String {
        let count = |n: u64, what: &str| format!("{n} {what}{}", if n == 1 { "" } else { "s" });
        let links = if self.links == 0 { String::new() } else { format!(", {}", count(self.links, "link")) };
        format!("{}{links}, {}", count(self.files, "file"), indicatif::HumanBytes(self.bytes))
    }
}

/// Uploads one local file, with its mode.
pub async fn send_file(context: &Context, dataplane: &Dataplane, from: &Path, to: &[u8]) -> Result<TransferTotals, Failure> {
    use std::os::unix::fs::PermissionsExt;
    let meta = tokio::fs::metadata(from).await.with_context(|| format!("reading {}", from.display()))?;
    if !meta.is_file() {
        return Err(Failure::new(format!("{} is neither a file nor a folder", from.display())));
    }
    let bar = context.printer.progress(Some(meta.len()), &from.display().to_string());
    let (path, progress) = (from.to_owned(), bar.clone());
    // Files in /proc and similar report a size of 0 although they have contents.
    let length = Some(meta.len()).filter(|length| *length > 0);
    let upload = Upload::from_stream(length, move || {
        let (path, bar) = (path.clone(), progress.clone());
        async move {
            bar.set_position(0);
            // At most the announced length, even if the file grows during the upload.
            let file = tokio::fs::File::open(&path).await?.take(length.unwrap_or(u64::MAX));
            Ok(ReaderStream::with_capacity(file, READ_CHUNK).inspect_ok(move |chunk| bar.inc(chunk.len() as u64)))
        }
    });
    let written = dataplane.write_file(to, Some(meta.permissions().mode() & 0o777), upload).await;
    bar.finish_and_clear();
    Ok(TransferTotals { files: 1, bytes: written?.size, ..TransferTotals::default() })
}

/// Uploads a local folder's contents into a folder of the sandbox.
pub async fn send_folder(
    context: &Context,
    dataplane: &Dataplane,
    from: &Path,
    to: &[u8],
    ignore_mode: IgnoreMode,
) -> Result<TransferTotals, Failure> {
    let root = from.to_owned();
    let total = {
        let root = root.clone();
        tokio::task::spawn_blocking(move || pack::total_bytes(&root, ignore_mode)).await.context("measuring the folder")?
    };
    let bar = context.printer.progress(Some(total), &from.display().to_string());
    let last_report: Arc<Mutex<PackReport>> = Arc::default();
    let upload = {
        let (bar, last_report) = (bar.clone(), last_report.clone());
        Upload::from_stream(None, move || {
            let (root, bar, last_report) = (root.clone(), bar.clone(), last_report.clone());
            async move {
                bar.set_position(0);
                Ok(stream_of_writes(move |out| {
                    let report = pack::pack(&root, ignore_mode, out, &|n| bar.inc(n))?;
                    *last_report.lock() = report;
                    Ok(())
                }))
            }
        })
    };
    let response: Result<ArchiveUnpacked, _> = dataplane.put_archive(to, ArchiveFormat::TarZstd, ArchiveLinks::Any, upload).await;
    bar.finish_and_clear();
    response?;
    let report = last_report.lock().clone();
    for notice in &report.notices {
        context.printer.note(notice);
    }
    if report.notices_left_out > 0 {
        context.printer.note(&format!("and {} more left out", report.notices_left_out));
    }
    Ok(TransferTotals {
        files: report.files,
        links: report.links,
        bytes: report.bytes,
        left_out: report.notices.len() as u64 + report.notices_left_out,
    })
}

/// Streams what `write` writes on a blocking thread. The stream ends in an error if `write` fails, so that a partial archive is never
/// taken for a complete one.
fn stream_of_writes(
    write: impl FnOnce(&mut dyn io::Write) -> io::Result<()> + Send + 'static,
) -> impl Stream<Item = io::Result<Bytes>> + Send + 'static {
    let (reader, writer) = tokio::io::duplex(UNSENT_BYTES);
    let mut writer = SyncIoBridge::new(writer);
    let writing = tokio::task::spawn_blocking(move || write(&mut writer));
    let failure = stream::once(writing).filter_map(|outcome| async { outcome.map_err(io::Error::other).flatten().err().map(Err) });
    ReaderStream::with_capacity(reader, READ_CHUNK).chain(failure)
}

/// Uploads standard input to a path in the sandbox.
pub async fn send_stdin(context: &Context, dataplane: &Dataplane, to: &[u8]) -> Result<TransferTotals, Failure> {
    let bar = context.printer.progress(None, "standard input");
    let (progress, unread_stdin) = (bar.clone(), Mutex::new(Some(tokio::io::stdin())));
    let upload = Upload::from_stream(None, move || {
        let (bar, stdin) = (progress.clone(), unread_stdin.lock().take());
        async move {
            let stdin = stdin.ok_or_else(|| io::Error::other("standard input can't be read again; put it into a file and copy that"))?;
            Ok(ReaderStream::with_capacity(stdin, READ_CHUNK).inspect_ok(move |chunk| bar.inc(chunk.len() as u64)))
        }
    });
    let written = dataplane.write_file(to, None, upload).await;
    bar.finish_and_clear();
    Ok(TransferTotals { files: 1, bytes: written?.size, ..TransferTotals::default() })
}

/// Downloads a file into a local one, which is replaced atomically. A target that is not a regular file, such as a pipe
/// or a terminal, is written to directly. A terminal gets every escape sequence only with `is_raw`.
pub async fn receive_file(context: &Context, file: RemoteFile, to: &Path, is_raw: bool) -> Result<TransferTotals, Failure> {
    use std::os::unix::fs::PermissionsExt;
    // Writes through a symlink, as cp does, instead of replacing it.
    let to: PathBuf = to.canonicalize().unwrap_or_else(|_| to.to_owned());
    let name = to.display().to_string();
    if to.metadata().is_ok_and(|meta| !meta.is_file()) {
        let out = std::fs::File::options().write(true).open(&to).with_context(|| format!("writing {name}"))?;
        let (bar, filter) = bar_and_filter(context, &file, &name, out.is_terminal(), is_raw);
        let bytes = copy_bytes(file, &mut tokio::fs::File::from_std(out), filter, &bar, &name).await?;
        return Ok(TransferTotals { files: 1, bytes, ..TransferTotals::default() });
    }
    let bar = context.printer.progress(file.size, &name);
    let folder = match to.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    // These errors would name the temporary file, which the user doesn't know.
    let write_error = |e: io::Error| match e.kind() {
        io::ErrorKind::NotFound => Failure::new(format!("{} does not exist", folder.display())),
        kind => Failure::new(format!("can't write in {}: {kind}", folder.display())),
    };
    let temporary = tempfile::NamedTempFile::new_in(folder).map_err(write_error)?;
    let mut out = tokio::fs::File::from_std(temporary.reopen().map_err(write_error)?);
    let mode = file.mode.unwrap_or(0o644) & 0o777;
    let bytes = copy_bytes(file, &mut out, OutputFilter::new(false, SequenceKinds::ALL), &bar, &name).await?;
    temporary.as_file().set_permissions(std::fs::Permissions::from_mode(mode))?;
    temporary.persist(&to).map_err(|e| e.error).with_context(|| format!("writing {name}"))?;
    Ok(TransferTotals { files: 1, bytes, ..TransferTotals::default() })
}

/// Downloads a file to standard output. A closed standard output is not an error. A terminal gets every escape sequence
/// only with `is_raw`.
pub async fn receive_to_stdout(context: &Context, file: RemoteFile, is_raw: bool) -> Result<(), Failure> {
    let (bar, filter) = bar_and_filter(context, &file, "standard output", io::stdout().is_terminal(), is_raw);
    match copy_bytes(file, &mut tokio::io::stdout(), filter, &bar, "standard output").await {
        Err(DownloadError::Write(e)) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => Ok(other.map(drop)?),
    }
}

/// Progress bar and filter for a destination that may be a terminal, where a bar would overwrite the file's lines.
fn bar_and_filter(context: &Context, file: &RemoteFile, to: &str, is_terminal: bool, is_raw: bool) -> (ProgressBar, OutputFilter) {
    let bar = if is_terminal { ProgressBar::hidden() } else { context.printer.progress(file.size, to) };
    (bar, OutputFilter::new(is_terminal && !is_raw, SequenceKinds::ALL))
}

/// Copies the file's bytes, and checks that they are as many as announced.
async fn copy_bytes(
    file: RemoteFile,
    out: &mut (impl AsyncWrite + Unpin),
    mut filter: OutputFilter,
    bar: &ProgressBar,
    to: &str,
) -> Result<u64, DownloadError> {
    let size = file.size;
    let mut bytes = 0;
    let mut chunks = std::pin::pin!(file.into_stream());
    let write_error = |e: io::Error| DownloadError::Write(io::Error::new(e.kind(), format!("writing {to}: {e}")));
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.map_err(|e| DownloadError::Failed(e.into()))?;
        bytes += chunk.len() as u64;
        bar.inc(chunk.len() as u64);
        out.write_all(&filter.apply(chunk)).await.map_err(write_error)?;
    }
    out.write_all(filter.finish()).await.map_err(write_error)?;
    out.flush().await.map_err(write_error)?;
    bar.finish_and_clear();
    match size {
        Some(size) if size != bytes => {
            Err(DownloadError::Failed(Failure::new(format!("{to} came short: {bytes} bytes")).with_advice("try again")))
        }
        _ => Ok(bytes),
    }
}

/// Why a download is incomplete.
enum DownloadError {
    Write(io::Error),
    Failed(Failure),
}

impl From<DownloadError> for Failure {
    fn from(error: DownloadError) -> Self {
        match error {
            DownloadError::Write(e) => e.into(),
            DownloadError::Failed(failure) => failure,
        }
    }
}

/// Downloads a folder of the sandbox into a local one.
pub async fn receive_folder(context: &Context, archive: RemoteFile, to: &Path) -> Result<TransferTotals, Failure> {
    let bar = context.printer.progress(None, &to.display().to_string());
    // If this future is dropped, the stream ends, and with it the blocking thread.
    let dropped = CancellationToken::new();
    let chunks = count_progress(archive, bar.clone()).map_err(io::Error::other).take_until(dropped.clone().cancelled_owned());
    let _guard = dropped.drop_guard();
    let reader = SyncIoBridge::new(StreamReader::new(Box::pin(chunks)));
    let into = to.to_owned();
    let unpacking = tokio::task::spawn_blocking(move || unpack(reader, &into)).await;
    bar.finish_and_clear();
    let report: io::Result<UnpackReport> = unpacking.context("unpacking")?;
    let report = report.with_context(|| format!("unpacking into {}", to.display()))?;
    let UnpackReport { files, links, bytes, left_out, unreadable, unreadable_count } = report;
    for name in &unreadable {
        context.printer.note(&format!("left out {}: the sandbox's user may not read it", visible(name)));
    }
    if unreadable_count > unreadable.len() as u64 {
        context.printer.note(&format!("and {} more left out", unreadable_count - unreadable.len() as u64));
    }
    if left_out > 0 {
        context.printer.note(&format!("left out {left_out} entries: devices, pipes, or paths outside the folder"));
    }
    Ok(TransferTotals { files, links, bytes, left_out: left_out + unreadable_count })
}

fn count_progress(archive: RemoteFile, bar: ProgressBar) -> impl Stream<Item = Result<Bytes, cobox_client::ClientError>> + Send {
    archive.into_stream().inspect_ok(move |chunk| bar.inc(chunk.len() as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_stream_of_writes_is_complete_or_ends_in_an_error() {
        let streamed = |outcome: io::Result<()>| async move {
            let chunks = stream_of_writes(move |out| out.write_all(&[7; 3 * READ_CHUNK + 1]).and(outcome));
            let chunks: Vec<_> = chunks.collect().await;
            let ends_in_error = chunks.last().is_some_and(Result::is_err);
            (chunks.into_iter().flatten().map(|chunk| chunk.len()).sum::<usize>(), ends_in_error)
        };
        assert_eq!(streamed(Ok(())).await, (3 * READ_CHUNK + 1, false));
        assert_eq!(streamed(Err(io::ErrorKind::Other.into())).await, (3 * READ_CHUNK + 1, true));
    }
}
