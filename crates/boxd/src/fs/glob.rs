//! Finds files by a pattern for their path.

use cobox_protocol::{
    ApiError,
    fs::{FileEntry, GlobRequest, GlobResponse, SortBy, StoppedBy},
};
use globset::{GlobBuilder, GlobMatcher};
use ignore::gitignore::Gitignore;
use rustix::fs::{AtFlags, FileType, OFlags};

use super::{
    directory_names::SmallestKeys,
    ignore_rules::{IgnoreRules, as_path},
    list::path_prefix,
    metadata::file_entry,
    path_or_work_dir,
    stop_signal::StopSignal,
    walk::{Walk, WalkEntry, WalkVisitor},
};
use crate::{
    files::{Root, SandboxPath, WriteLog, file_error, open_beneath, operation_aborted, refuse_kernel_files, split_parent},
    server::Server,
};

const DEFAULT_LIMIT: u32 = 1000;
/// About 3 MiB of response.
const MAX_LIMIT: u32 = 10_000;
/// Far longer than real patterns.
const MAX_PATTERN_BYTES: usize = 4096;

pub async fn glob(server: &Server, request: GlobRequest) -> Result<GlobResponse, ApiError> {
    let path = path_or_work_dir(server, request.path.as_deref(), request.path_b64.as_deref())?;
    let limit = request.limit.unwrap_or(DEFAULT_LIMIT);
    if !(1..=MAX_LIMIT).contains(&limit) {
        return Err(ApiError::invalid(format!("limit: must be between 1 and {MAX_LIMIT}")));
    }
    let plan = GlobPlan::new(&request, path)?;
    let stop = StopSignal::with_timeout(request.timeout_seconds)?;
    let _stopped_when_dropped = stop.stop_on_drop();
    let slot = server.files.workers().long_slots(1).await?;
    let writes = server.files.writes();
    let search = move |root: &Root| search(root, &plan, &request, limit as usize, stop, &writes);
    server.files.workers().run_long(slot, search).await?.await.map_err(|_| operation_aborted())?
}

/// A compiled pattern. The walk starts at its literal beginning.
pub(crate) struct GlobPlan {
    path: SandboxPath,
    matcher: GlobMatcher,
    ignore: Option<Gitignore>,
    only_directories: bool,
    /// Number of names in the longest path that can match; `None` if unlimited. Deeper directories need no search.
    max_depth: Option<usize>,
}

impl GlobPlan {
    pub(crate) fn new(request: &GlobRequest, path: SandboxPath) -> Result<Self, ApiError> {
        let pattern = request.pattern.as_str();
        if pattern.is_empty() || pattern.len() > MAX_PATTERN_BYTES || pattern.contains('\0') {
            return Err(ApiError::invalid(format!("pattern: must have between 1 and {MAX_PATTERN_BYTES} bytes, and no NUL")));
        }
        let only_directories = pattern.ends_with('/');
        let parts: Vec<&str> = pattern.split('/').filter(|p| !p.is_empty() && *p != ".").collect();
        if parts.contains(&"..") {
            return Err(ApiError::invalid("pattern: contains `..`; set `path` to the directory to search"));
        }
        let Some((_, parents)) = parts.split_last() else { return Err(ApiError::invalid("pattern: has no name in it")) };
        let is_plain = |p: &&&str| !request.case_insensitive && !p.contains(['*', '?', '[', ']', '{', '}', '\\']);
        let literal = parents.iter().take_while(is_plain).count();
        let mut start = if pattern.starts_with('/') { b"/".to_vec() } else { path_prefix(&path) };
        start.extend_from_slice(parts[..literal].join("/").as_bytes());
        let matcher = GlobBuilder::new(&parts[literal..].join("/"))
            .literal_separator(true)
            .case_insensitive(request.case_insensitive)
            .build()
            .map_err(|e| ApiError::invalid(format!("pattern: {e}")))?
            .compile_matcher();
        // A class such as `[!a]` also matches a slash and so adds a name.
        let rest = &parts[literal..];
        let classes = rest.iter().map(|part| part.matches('[').count()).sum::<usize>();
        let max_depth = (!rest.iter().any(|part| part.contains("**"))).then_some(rest.len() + classes);
        let ignore = request.ignore.as_ref().map(|patterns| IgnoreRules::from_patterns(patterns.as_slice())).transpose()?;
        Ok(Self { path: SandboxPath::new(start)?, matcher, ignore, only_directories, max_depth })
    }
}

pub(crate) fn search(
    root: &Root,
    plan: &GlobPlan,
    request: &GlobRequest,
    limit: usize,
    stop: StopSignal,
    writes: &WriteLog,
) -> Result<GlobResponse, ApiError> {
    let to_api_error = |e| file_error(e, &plan.path);
    let directory = match root.open(plan.path.bytes(), OFlags::RDONLY | OFlags::DIRECTORY) {
        // The directory named in the pattern doesn't exist, so nothing matches. If `path` itself doesn't exist, that is
        // an error.
        Err(rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR) if request.pattern.contains('/') && base_exists(root, request) => {
            return Ok(GlobResponse { matches: Vec::new(), truncated: false, stopped_by: None, directories_unreadable: 0 });
        }
        other => other.map_err(to_api_error)?,
    };
    refuse_kernel_files(&directory).map_err(to_api_error)?;
    let walk_root = directory.try_clone().map_err(|_| to_api_error(rustix::io::Errno::MFILE))?;
    let rules = request.respect_ignore.then(|| IgnoreRules::at_walk_start(root, &plan.path));
    let hidden = request.hidden.unwrap_or(!request.respect_ignore);
    let walk = Walk::new(walk_root, rules, hidden, stop.clone());
    let mut visitor = GlobVisitor { plan, sort: request.sort, best: SmallestKeys::new(limit), seen: 0 };
    walk.run(&mut visitor);
    let stopped_by =
        stop.reason().or((visitor.seen > limit as u64).then_some(StoppedBy::MaxMatches)).or(walk.is_too_deep().then_some(StoppedBy::Depth));
    let base = path_prefix(&plan.path);
    let found = visitor.best.into_sorted();
    let matches = found.into_iter().filter_map(|(_, path)| describe(&directory, &base, &path, writes)).collect();
    Ok(GlobResponse { matches, truncated: stopped_by.is_some(), stopped_by, directories_unreadable: walk.unreadable() })
}

fn base_exists(root: &Root, request: &GlobRequest) -> bool {
    SandboxPath::from_json("path", request.path.as_deref(), request.path_b64.as_deref())
        .is_ok_and(|p| p.is_none_or(|p| root.open_directory(p.bytes()).is_ok()))
}

fn describe(top: &std::os::fd::OwnedFd, base: &[u8], path: &[u8], writes: &WriteLog) -> Option<FileEntry> {
    let (parents, name) = split_parent(path)?;
    let parent = open_beneath(top, parents, OFlags::PATH | OFlags::DIRECTORY).ok()?;
    let stat = rustix::fs::statat(&parent, name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
    Some(file_entry(&parent, name, [base, path].concat(), &stat, writes))
}

struct GlobVisitor<'a> {
    plan: &'a GlobPlan,
    sort: SortBy,
    best: SmallestKeys<(i128, Vec<u8>)>,
    seen: u64,
}

impl WalkVisitor for GlobVisitor<'_> {
    fn should_enter(&mut self, directory: &WalkEntry<'_>) -> bool {
        let depth = directory.path.iter().filter(|b| **b == b'/').count() + 1;
        self.plan.max_depth.is_none_or(|max| depth < max) && !self.is_excluded(directory)
    }

    fn visit(&mut self, entry: &WalkEntry<'_>) {
        if self.plan.only_directories && entry.kind != FileType::Directory {
            return;
        }
        if !self.plan.matcher.is_match(as_path(entry.path)) || self.is_excluded(entry) {
            return;
        }
        let rank = match self.sort {
            SortBy::Name => Some(0),
            SortBy::Mtime | SortBy::Size => rustix::fs::statat(entry.directory, entry.name, AtFlags::SYMLINK_NOFOLLOW).ok().map(|s| {
                #[allow(clippy::unnecessary_cast, reason = "the fields are narrower on some machines")]
                match self.sort {
                    SortBy::Size => -i128::from(s.st_size as i64),
                    _ => -(i128::from(s.st_mtime as i64) * 1_000_000_000 + i128::from(s.st_mtime_nsec as i64)),
                }
            }),
        };
        if let Some(rank) = rank {
            self.seen += 1;
            self.best.push((rank, entry.path.to_vec()));
        }
    }
}

impl GlobVisitor<'_> {
    fn is_excluded(&self, entry: &WalkEntry<'_>) -> bool {
        let is_directory = entry.kind == FileType::Directory;
        self.plan.ignore.as_ref().is_some_and(|i| i.matched(as_path(entry.path), is_directory).is_ignore())
    }
}
