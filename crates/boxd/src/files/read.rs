//! Getting a file: whole or in part, in pieces read as the client takes them.

use std::{io, os::fd::OwnedFd, sync::Arc};

use axum::{
    body::Body,
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use cobox_protocol::{
    ApiError, ErrorCode,
    files::{FILE_KIND_HEADER, FILE_MODE_HEADER},
};
use futures_util::{Stream, stream};
use http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use rustix::{
    fs::{FileType, Stat},
    io::Errno,
};
use time::OffsetDateTime;

use super::{
    FileStore,
    etag::Conditions,
    path::SandboxPath,
    refusal::{kind_word, not_a_file, refusal},
    root::{Root, kind},
};
use crate::{auth::OpenStream, listen::ConnectionEnd};

/// Read at once: large enough that the hand-over to a worker doesn't show.
const PIECE_BYTES: u64 = 256 * 1024;

/// Answers GET or HEAD for a file.
pub async fn answer(
    store: &FileStore,
    method: &Method,
    headers: &HeaderMap,
    path: &SandboxPath,
    stream: OpenStream,
    connection: &ConnectionEnd,
) -> Result<Response, ApiError> {
    let open = {
        let (path, is_head) = (path.clone(), method == Method::HEAD);
        move |root: &Root| open(root, path.bytes(), is_head)
    };
    let (file, stat) = match store.workers.run(open).await? {
        Ok(Ok(found)) => found,
        Ok(Err(kind)) => {
            let mut response = crate::answer::Failure(not_a_file(kind, path)).into_response();
            set(response.headers_mut(), http::HeaderName::from_static(FILE_KIND_HEADER), kind_word(kind).to_owned());
            return Ok(response);
        }
        Err(errno) => return Err(refusal(errno, path)),
    };
    let (size, etag) = (u64::try_from(stat.st_size).unwrap_or(0), store.writes.etag(&stat));
    let is_unchanged = Conditions::of(headers)?.check_read(&etag, path)?;
    let mut response = StatusCode::OK.into_response();
    describe(response.headers_mut(), &stat, &etag);
    if is_unchanged {
        *response.status_mut() = StatusCode::NOT_MODIFIED;
        response.headers_mut().remove(header::CONTENT_TYPE);
        return Ok(response);
    }
    let (from, length) = match wanted(headers, size, &etag) {
        Wanted::Whole => (0, size),
        Wanted::Part { from, length } => {
            *response.status_mut() = StatusCode::PARTIAL_CONTENT;
            set(response.headers_mut(), header::CONTENT_RANGE, format!("bytes {from}-{}/{size}", from + length - 1));
            (from, length)
        }
        Wanted::Nothing => {
            let error = ApiError::new(ErrorCode::RangeNotSatisfiable, format!("{path} has {size} bytes; the range asked for is not in it"));
            let mut response = crate::answer::Failure(error).into_response();
            set(response.headers_mut(), header::CONTENT_RANGE, format!("bytes */{size}"));
            return Ok(response);
        }
    };
    set(response.headers_mut(), header::CONTENT_LENGTH, length.to_string());
    if let Some(file) = file {
        stream.ends_connection(connection);
        *response.body_mut() = Body::from_stream(pieces(store.clone(), file, from, length, stream));
    }
    Ok(response)
}

type Found = (Option<Arc<OwnedFd>>, Stat);

fn open(root: &Root, path: &[u8], is_head: bool) -> Result<Result<Found, FileType>, Errno> {
    if is_head {
        let stat = root.stat(path)?;
        return Ok(if kind(&stat) == FileType::RegularFile { Ok((None, stat)) } else { Err(kind(&stat)) });
    }
    Ok(root.regular(path)?.map(|(fd, stat)| (Some(Arc::new(fd)), stat)))
}

fn describe(headers: &mut HeaderMap, stat: &Stat, etag: &str) {
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    headers.insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    set(headers, header::ETAG, etag.to_owned());
    #[allow(clippy::unnecessary_cast, reason = "the field is narrower on some machines")]
    if let Some(date) = http_date(stat.st_mtime as i64) {
        set(headers, header::LAST_MODIFIED, date);
    }
    set(headers, http::HeaderName::from_static(FILE_MODE_HEADER), format!("{:03o}", stat.st_mode & 0o777));
}

fn set(headers: &mut HeaderMap, name: http::HeaderName, value: String) {
    // All of them are digits, letters and punctuation; a header that couldn't be is better left out than fatal.
    if let Ok(value) = HeaderValue::try_from(value) {
        headers.insert(name, value);
    }
}

/// The file's bytes, each piece read when the last has been taken. A file cut short meanwhile ends in an error, never in a short answer.
fn pieces(store: FileStore, file: Arc<OwnedFd>, from: u64, length: u64, open: OpenStream) -> impl Stream<Item = io::Result<Bytes>> {
    stream::try_unfold((store, file, from, length, open), async |(store, file, at, left, open)| {
        if left == 0 {
            return Ok(None);
        }
        let reading = file.clone();
        let read = store.workers.run(move |_| read_piece(&reading, at, left.min(PIECE_BYTES))).await.map_err(io::Error::other)??;
        if read.is_empty() {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the file became shorter while it was read"));
        }
        let n = read.len() as u64;
        Ok(Some((Bytes::from(read), (store, file, at + n, left - n, open))))
    })
}

fn read_piece(file: &OwnedFd, at: u64, length: u64) -> io::Result<Vec<u8>> {
    let mut piece = Vec::with_capacity(usize::try_from(length).map_err(io::Error::other)?);
    rustix::io::retry_on_intr(|| rustix::io::pread(file, rustix::buffer::spare_capacity(&mut piece), at))?;
    Ok(piece)
}

#[derive(Debug, PartialEq, Eq)]
enum Wanted {
    Whole,
    Part { from: u64, length: u64 },
    Nothing,
}

/// A single range; several, and units we don't know, are answered with the whole as the standard allows.
fn wanted(headers: &HeaderMap, size: u64, etag: &str) -> Wanted {
    let text = |name| headers.get(name).and_then(|v: &HeaderValue| v.to_str().ok());
    if text(header::IF_RANGE).is_some_and(|tag| tag != etag) {
        return Wanted::Whole;
    }
    let Some((first, last)) = text(header::RANGE).and_then(|r| r.strip_prefix("bytes=")?.split_once('-')) else { return Wanted::Whole };
    let number = |s: &str| s.bytes().all(|b| b.is_ascii_digit()).then(|| s.parse().unwrap_or(u64::MAX));
    let (from, end) = match (first.trim(), last.trim()) {
        ("", "") => return Wanted::Whole,
        ("", suffix) => match number(suffix) {
            Some(n) => (size.saturating_sub(n), size),
            None => return Wanted::Whole,
        },
        (first, last) => match (number(first), number(last)) {
            (Some(from), Some(_)) if last.is_empty() => (from, size),
            (Some(from), Some(last)) if last >= from => (from, last.saturating_add(1).min(size)),
            _ => return Wanted::Whole,
        },
    };
    if from >= end { Wanted::Nothing } else { Wanted::Part { from, length: end - from } }
}

/// RFC 9110's date, such as `Sun, 06 Nov 1994 08:49:37 GMT`.
fn http_date(unix: i64) -> Option<String> {
    const DAYS: [&str; 7] = ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"];
    const MONTHS: [&str; 12] = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let at = OffsetDateTime::from_unix_timestamp(unix).ok()?;
    let day = DAYS[usize::from(at.weekday().number_days_from_monday())];
    let month = MONTHS[usize::from(u8::from(at.month())) - 1];
    Some(format!("{day}, {:02} {month} {:04} {:02}:{:02}:{:02} GMT", at.day(), at.year(), at.hour(), at.minute(), at.second()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(value: &str, size: u64) -> Wanted {
        wanted(&HeaderMap::from_iter([(header::RANGE, value.parse().unwrap())]), size, "\"e\"")
    }

    #[test]
    fn a_range_is_cut_to_the_file_and_one_outside_is_refused() {
        assert_eq!(range("bytes=0-3", 10), Wanted::Part { from: 0, length: 4 });
        assert_eq!(range("bytes=4-", 10), Wanted::Part { from: 4, length: 6 });
        assert_eq!(range("bytes=-3", 10), Wanted::Part { from: 7, length: 3 });
        assert_eq!(range("bytes=-30", 10), Wanted::Part { from: 0, length: 10 });
        assert_eq!(range("bytes=5-99999999999999999999999", 10), Wanted::Part { from: 5, length: 5 });
        for nothing in ["bytes=10-", "bytes=99-100", "bytes=-0"] {
            assert_eq!(range(nothing, 10), Wanted::Nothing, "{nothing}");
        }
        assert_eq!(range("bytes=-5", 0), Wanted::Nothing);
        for whole in ["bytes=3-1", "bytes=0-1,4-5", "lines=1-2", "bytes=a-b", "bytes=-"] {
            assert_eq!(range(whole, 10), Wanted::Whole, "{whole}");
        }
    }

    #[test]
    fn a_range_of_another_version_gives_the_whole() {
        let headers = HeaderMap::from_iter([(header::RANGE, "bytes=0-1".parse().unwrap()), (header::IF_RANGE, "\"old\"".parse().unwrap())]);
        assert_eq!(wanted(&headers, 10, "\"new\""), Wanted::Whole);
        assert_eq!(wanted(&headers, 10, "\"old\""), Wanted::Part { from: 0, length: 2 });
    }

    #[test]
    fn dates_are_those_of_http() {
        assert_eq!(http_date(784_111_777).unwrap(), "Sun, 06 Nov 1994 08:49:37 GMT");
    }
}
