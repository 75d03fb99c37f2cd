//! Tasks that follow a sandbox: its events, and its files with their contents at first sight.

use cobox_client::{Dataplane, EventStream, FileWatchEvent};
use cobox_protocol::{
    ErrorCode,
    fs::{FileEntry, FileKind, ListRequest},
};
use futures_util::StreamExt;

use super::{
    app::WORKSPACE,
    files::{Contents, MAX_FILE_BYTES, is_closed},
    message::{News, Told},
    tasks::{Teller, explained},
};

/// Maximum number of listed entries, and the maximum depth.
const LISTED: u32 = 5000;
const DEPTH: u32 = 8;
/// Files whose contents are read at first sight, and their total bytes: enough for a project's sources, and fast over
/// a slow connection.
const READ_FILES: usize = 300;
const READ_BYTES: u64 = 4 * 1024 * 1024;

pub async fn feed(mut events: EventStream, teller: Teller) {
    loop {
        let news = match events.next().await {
            Ok(Some(event)) => News::Happened(Box::new(event)),
            Ok(None) => News::FeedOver("the session is over".to_owned()),
            Err(e) => News::FeedOver(format!("no more events: {}", explained(&e))),
        };
        let is_over = matches!(news, News::FeedOver(_));
        if !teller.tell(news).await || is_over {
            return;
        }
    }
}

/// Starts the watch before the listing, so that no change between the two is missed.
pub async fn files(dataplane: Dataplane, teller: Teller) {
    let mut watch = dataplane.watch_files(WORKSPACE.as_bytes());
    loop {
        match watch.next().await {
            Ok(Some(FileWatchEvent::Watching)) => {
                if !look(&dataplane, &teller).await {
                    return;
                }
            }
            Ok(Some(news)) => {
                if !teller.tell(News::File(news)).await {
                    return;
                }
            }
            Ok(None) => return,
            Err(e) => {
                teller.tell(News::Listed(Err(explained(&e)))).await;
                return;
            }
        }
    }
}

/// Lists all files and reads the contents of small ones.
async fn look(dataplane: &Dataplane, teller: &Teller) -> bool {
    let listed = list(dataplane).await;
    let small: Vec<String> = listed.as_deref().map(|entries| worth_reading(entries).collect()).unwrap_or_default();
    if !teller.tell(News::Listed(listed)).await {
        return false;
    }
    for path in small {
        let contents = read(dataplane, &path).await;
        if !teller.tell(News::Seen { path, contents }).await {
            return false;
        }
    }
    true
}

fn worth_reading(entries: &[FileEntry]) -> impl Iterator<Item = String> + '_ {
    let mut bytes = 0;
    let is_small = |e: &&FileEntry| e.kind == FileKind::File && e.size <= MAX_FILE_BYTES && e.path_b64.is_none() && !is_closed(&e.path);
    let fits = move |e: &&FileEntry| {
        bytes += e.size;
        bytes <= READ_BYTES
    };
    entries.iter().filter(is_small).take(READ_FILES).take_while(fits).map(|e| e.path.clone())
}

pub async fn list(dataplane: &Dataplane) -> Told<Vec<FileEntry>> {
    let request = ListRequest {
        path: Some(WORKSPACE.to_owned()),
        limit: Some(LISTED),
        recursive: true,
        max_depth: Some(DEPTH),
        ..ListRequest::default()
    };
    match dataplane.list_files(&request).await {
        Ok(listed) => Ok(listed.entries),
        Err(e) if e.is(ErrorCode::FileNotFound) => Ok(Vec::new()),
        Err(e) => Err(explained(&e)),
    }
}

pub async fn read(dataplane: &Dataplane, path: &str) -> Contents {
    let file = match dataplane.read_file(path.as_bytes()).await {
        Ok(file) if file.size.is_some_and(|size| size > MAX_FILE_BYTES) => return Contents::Unkept,
        Ok(file) => file,
        Err(e) if e.is(ErrorCode::FileNotFound) => return Contents::Missing,
        Err(_) => return Contents::Unkept,
    };
    let mut bytes = Vec::new();
    let mut stream = std::pin::pin!(file.into_stream());
    while let Some(chunk) = stream.next().await {
        let Ok(chunk) = chunk else { return Contents::Unkept };
        bytes.extend_from_slice(&chunk);
        if bytes.len() as u64 > MAX_FILE_BYTES {
            return Contents::Unkept;
        }
    }
    match String::from_utf8(bytes) {
        Ok(text) if !text.contains('\0') => Contents::Text(text),
        _ => Contents::Unkept,
    }
}
