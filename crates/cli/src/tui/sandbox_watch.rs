//! Tasks that follow a sandbox: its events, and its files with their contents at first sight.

use cobox_client::{Dataplane, EventStream, FileWatchEvent};
use cobox_protocol::{
    ErrorCode,
    fs::{FileEntry, FileKind, ListRequest},
};
use futures_util::StreamExt;

use super::{
    app_state::WORKSPACE,
    file_tree::{Contents, MAX_FILE_BYTES, is_in_generated_directory},
    message::{ThreadUpdate, UserResult},
    tasks::{UpdateSender, error_text},
};

/// Maximum number of listed entries, and the maximum depth.
const MAX_LISTED: u32 = 5000;
const MAX_DEPTH: u32 = 8;
/// Files whose contents are read at first sight, and their total bytes: enough for a project's sources, and fast over
/// a slow connection.
const MAX_READ_FILES: usize = 300;
const MAX_READ_BYTES: u64 = 4 * 1024 * 1024;

pub async fn follow_events(mut events: EventStream, updates: UpdateSender) {
    loop {
        let update = match events.next().await {
            Ok(Some(event)) => ThreadUpdate::SandboxEvent(Box::new(event)),
            Ok(None) => ThreadUpdate::FeedEnded("the session ended".to_owned()),
            Err(e) => ThreadUpdate::FeedEnded(format!("no more events: {}", error_text(&e))),
        };
        let has_ended = matches!(update, ThreadUpdate::FeedEnded(_));
        if !updates.send(update).await || has_ended {
            return;
        }
    }
}

/// Starts the watch before the listing, so that no change between the two is missed.
pub async fn follow_files(dataplane: Dataplane, updates: UpdateSender) {
    let mut watch = dataplane.watch_files(WORKSPACE.as_bytes());
    loop {
        match watch.next().await {
            Ok(Some(FileWatchEvent::Watching)) => {
                if !send_listing(&dataplane, &updates).await {
                    return;
                }
            }
            Ok(Some(update)) => {
                if !updates.send(ThreadUpdate::FileChanged(update)).await {
                    return;
                }
            }
            Ok(None) => return,
            Err(e) => {
                updates.send(ThreadUpdate::FilesListed(Err(error_text(&e)))).await;
                return;
            }
        }
    }
}

/// Lists all files and reads the contents of small ones.
async fn send_listing(dataplane: &Dataplane, updates: &UpdateSender) -> bool {
    let listed = list_files(dataplane).await;
    let small: Vec<String> = listed.as_deref().map(|entries| small_files(entries).collect()).unwrap_or_default();
    if !updates.send(ThreadUpdate::FilesListed(listed)).await {
        return false;
    }
    for path in small {
        let contents = read_file(dataplane, &path).await;
        if !updates.send(ThreadUpdate::FirstContents { path, contents }).await {
            return false;
        }
    }
    true
}

fn small_files(entries: &[FileEntry]) -> impl Iterator<Item = String> + '_ {
    let mut bytes = 0;
    let is_small = |e: &&FileEntry| {
        e.kind == FileKind::File && e.size <= MAX_FILE_BYTES && e.path_b64.is_none() && !is_in_generated_directory(&e.path)
    };
    let fits = move |e: &&FileEntry| {
        bytes += e.size;
        bytes <= MAX_READ_BYTES
    };
    entries.iter().filter(is_small).take(MAX_READ_FILES).take_while(fits).map(|e| e.path.clone())
}

pub async fn list_files(dataplane: &Dataplane) -> UserResult<Vec<FileEntry>> {
    let request = ListRequest {
        path: Some(WORKSPACE.to_owned()),
        limit: Some(MAX_LISTED),
        recursive: true,
        max_depth: Some(MAX_DEPTH),
        ..ListRequest::default()
    };
    match dataplane.list_files(&request).await {
        Ok(listed) => Ok(listed.entries),
        Err(e) if e.is(ErrorCode::FileNotFound) => Ok(Vec::new()),
        Err(e) => Err(error_text(&e)),
    }
}

pub async fn read_file(dataplane: &Dataplane, path: &str) -> Contents {
    let file = match dataplane.read_file(path.as_bytes()).await {
        Ok(file) if file.size.is_some_and(|size| size > MAX_FILE_BYTES) => return Contents::Unavailable,
        Ok(file) => file,
        Err(e) if e.is(ErrorCode::FileNotFound) => return Contents::Missing,
        Err(_) => return Contents::Unavailable,
    };
    let mut bytes = Vec::new();
    let mut stream = std::pin::pin!(file.into_stream());
    while let Some(chunk) = stream.next().await {
        let Ok(chunk) = chunk else { return Contents::Unavailable };
        bytes.extend_from_slice(&chunk);
        if bytes.len() as u64 > MAX_FILE_BYTES {
            return Contents::Unavailable;
        }
    }
    match String::from_utf8(bytes) {
        Ok(text) if !text.contains('\0') => Contents::Text(text),
        _ => Contents::Unavailable,
    }
}
