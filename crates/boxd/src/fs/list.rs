//! Lists a directory in pages: sorted, with a cursor that is a position in that order, in memory for one page.

use std::{cmp::Ordering, os::fd::OwnedFd};

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use cobox_protocol::{
    ApiError,
    fs::{FileEntry, ListRequest, ListResponse, SortBy, StoppedBy},
};
use rustix::{
    fs::{AtFlags, FileType, OFlags, Stat},
    io::Errno,
};

use super::{
    directory_names::{SmallestKeys, SortedNames, entry_type, for_each_name},
    metadata::file_entry,
    stop_signal::StopSignal,
};
use crate::files::{Root, SandboxPath, WriteLog, file_error, kind, open_beneath, refuse_kernel_files};

const DEFAULT_LIMIT: u32 = 1000;
/// About 3 MiB of response.
const MAX_LIMIT: u32 = 10_000;
/// Maximum depth of a recursive list. Each level holds one descriptor and a few hundred names.
const MAX_DEPTH: u32 = 128;

pub fn list(
    root: &Root,
    path: &SandboxPath,
    request: &ListRequest,
    writes: &WriteLog,
    stop: &StopSignal,
) -> Result<ListResponse, ApiError> {
    let limit = request.limit.unwrap_or(DEFAULT_LIMIT);
    if !(1..=MAX_LIMIT).contains(&limit) {
        return Err(ApiError::invalid(format!("limit: must be between 1 and {MAX_LIMIT}")));
    }
    if request.recursive && (request.sort != SortBy::Name || request.descending) {
        return Err(ApiError::invalid("sort: a recursive list can only be sorted by name, ascending"));
    }
    let position = request.cursor.as_deref().map(|c| decode_cursor(c, request)).transpose()?;
    let directory = root.open(path.bytes(), OFlags::RDONLY | OFlags::DIRECTORY).and_then(|fd| refuse_kernel_files(&fd).map(|()| fd));
    let page = Page { directory: directory.map_err(|e| file_error(e, path))?, base: path_prefix(path), limit: limit as usize, writes };
    let listed = if request.recursive {
        page.list_recursive(position.map(|p| p.name), request.max_depth.unwrap_or(MAX_DEPTH).min(MAX_DEPTH), stop)
    } else {
        page.list_flat(position, request)
    };
    let ListedPage { entries, next, is_too_deep } = listed.map_err(|e| file_error(e, path))?;
    let (shown, path_b64) = path.to_json();
    Ok(ListResponse {
        path: shown,
        path_b64,
        entries,
        next_cursor: next.map(|p| encode_cursor(&p, request)),
        stopped_by: is_too_deep.then_some(StoppedBy::Depth),
    })
}

/// The prefix of all entries' paths.
pub fn path_prefix(path: &SandboxPath) -> Vec<u8> {
    let mut base = path.bytes().to_vec();
    while base.last() == Some(&b'/') {
        base.pop();
    }
    base.push(b'/');
    base
}

/// A position in the order. In a recursive list the name is the path relative to the directory.
#[derive(Clone, PartialEq, Eq)]
struct ListPosition {
    /// For sorting by time or size: nanoseconds or bytes, negative if descending.
    rank: i128,
    name: Vec<u8>,
    is_descending: bool,
}

impl Ord for ListPosition {
    fn cmp(&self, other: &Self) -> Ordering {
        let by_name = self.name.cmp(&other.name);
        self.rank.cmp(&other.rank).then(if self.is_descending { by_name.reverse() } else { by_name })
    }
}
impl PartialOrd for ListPosition {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

fn order_tag(request: &ListRequest) -> u8 {
    let sort = match request.sort {
        SortBy::Name => 0,
        SortBy::Mtime => 1,
        SortBy::Size => 2,
    };
    sort | u8::from(request.descending) << 2 | u8::from(request.recursive) << 3
}

fn encode_cursor(position: &ListPosition, request: &ListRequest) -> String {
    let mut bytes = vec![order_tag(request)];
    bytes.extend_from_slice(&position.rank.to_be_bytes());
    bytes.extend_from_slice(&position.name);
    URL_SAFE_NO_PAD.encode(bytes)
}

fn decode_cursor(cursor: &str, request: &ListRequest) -> Result<ListPosition, ApiError> {
    let bytes = URL_SAFE_NO_PAD.decode(cursor).ok().filter(|b| b.first() == Some(&order_tag(request)));
    let position = bytes.as_deref().and_then(|b| {
        let (rank, name) = b[1..].split_first_chunk::<16>()?;
        // Each component of the path is a directory that is opened and kept open.
        let is_path =
            |name: &[u8]| name.split(|b| *b == b'/').enumerate().all(|(n, p)| n < MAX_DEPTH as usize && !matches!(p, b"" | b"." | b".."));
        if request.recursive && !is_path(name) {
            return None;
        }
        Some(ListPosition { rank: i128::from_be_bytes(*rank), name: name.to_vec(), is_descending: request.descending })
    });
    position.ok_or_else(|| ApiError::invalid("cursor: must be the next_cursor of a list with the same order"))
}

fn rank(stat: &Stat, request: &ListRequest) -> i128 {
    #[allow(clippy::unnecessary_cast, reason = "the fields are narrower on some machines")]
    let rank = match request.sort {
        SortBy::Name => 0,
        SortBy::Mtime => i128::from(stat.st_mtime as i64) * 1_000_000_000 + i128::from(stat.st_mtime_nsec as i64),
        SortBy::Size => i128::from(stat.st_size as i64),
    };
    if request.descending { -rank } else { rank }
}

#[derive(Default)]
struct ListedPage {
    entries: Vec<FileEntry>,
    next: Option<ListPosition>,
    /// Whether there were directories below the maximum depth.
    is_too_deep: bool,
}

struct Page<'a> {
    directory: OwnedFd,
    base: Vec<u8>,
    limit: usize,
    writes: &'a WriteLog,
}

impl Page<'_> {
    fn list_flat(&self, after: Option<ListPosition>, request: &ListRequest) -> Result<ListedPage, Errno> {
        let stat_name = |name: &[u8]| rustix::fs::statat(&self.directory, name, AtFlags::SYMLINK_NOFOLLOW);
        // One extra entry shows whether there is another page.
        let mut smallest = SmallestKeys::new(self.limit + 1);
        for_each_name(&self.directory, |name, _| {
            let rank = if request.sort == SortBy::Name { Some(0) } else { stat_name(name).ok().map(|s| rank(&s, request)) };
            if let Some(rank) = rank {
                let position = ListPosition { rank, name: name.to_vec(), is_descending: request.descending };
                if after.as_ref().is_none_or(|a| position > *a) {
                    smallest.push(position);
                }
            }
            true
        })?;
        let mut positions = smallest.into_sorted();
        let has_more = positions.len() > self.limit;
        positions.truncate(self.limit);
        let mut entries = Vec::with_capacity(positions.len());
        for position in &positions {
            // Deleted since it was listed.
            let Ok(stat) = stat_name(&position.name) else { continue };
            entries.push(file_entry(&self.directory, &position.name, [self.base.as_slice(), &position.name].concat(), &stat, self.writes));
        }
        Ok(ListedPage { entries, next: positions.pop().filter(|_| has_more), is_too_deep: false })
    }

    fn list_recursive(&self, after: Option<Vec<u8>>, max_depth: u32, stop: &StopSignal) -> Result<ListedPage, Errno> {
        let mut relative: Vec<u8> = Vec::new();
        let mut levels: Vec<(SortedNames, usize)> = Vec::new();
        let mut open = Some(open_beneath(&self.directory, b".", OFlags::RDONLY | OFlags::DIRECTORY)?);
        // Returns to the end of the last page: each directory on the path continues after the name that was reached.
        for part in after.iter().flat_map(|a| a.split(|b| *b == b'/')) {
            let Some(directory) = open.take() else { break };
            let child = open_child(&directory, part);
            levels.push((SortedNames::new(directory, Some(part.to_vec())), relative.len()));
            relative.extend_from_slice(part);
            relative.push(b'/');
            open = child.ok();
        }
        if let Some(directory) = open.filter(|_| (levels.len() as u32) < max_depth) {
            levels.push((SortedNames::new(directory, None), relative.len()));
        }
        let mut listed = ListedPage::default();
        let mut last = None;
        loop {
            let may_descend = (levels.len() as u32) < max_depth;
            let Some((names, prefix)) = levels.last_mut() else { break };
            if stop.is_stopped() {
                return Err(Errno::INTR);
            }
            relative.truncate(*prefix);
            let Some((name, listed_type)) = names.next()? else {
                levels.pop();
                continue;
            };
            if listed.entries.len() == self.limit {
                listed.next = last.map(|name| ListPosition { rank: 0, name, is_descending: false });
                return Ok(listed);
            }
            let Ok(stat) = rustix::fs::statat(&names.directory, &name, AtFlags::SYMLINK_NOFOLLOW) else { continue };
            relative.extend_from_slice(&name);
            listed.entries.push(file_entry(&names.directory, &name, [self.base.as_slice(), &relative].concat(), &stat, self.writes));
            last = Some(relative.clone());
            if entry_type(&names.directory, &name, listed_type) != FileType::Directory || kind(&stat) != FileType::Directory {
                continue;
            }
            if !may_descend {
                // Not reported if the client itself limited the depth.
                listed.is_too_deep |= max_depth == MAX_DEPTH;
                continue;
            }
            // An unreadable directory is listed but not entered.
            if let Ok(directory) = open_child(&names.directory, &name) {
                relative.push(b'/');
                levels.push((SortedNames::new(directory, None), relative.len()));
            }
        }
        Ok(listed)
    }
}

fn open_child(directory: &OwnedFd, name: &[u8]) -> Result<OwnedFd, Errno> {
    let child = open_beneath(directory, name, OFlags::RDONLY | OFlags::DIRECTORY)?;
    refuse_kernel_files(&child)?;
    Ok(child)
}
