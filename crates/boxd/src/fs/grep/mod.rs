//! Searches the text of files with ripgrep's libraries, on a walk of boxd's own that an untrusted tree can't mislead.

mod sink;

use std::{
    fs::File,
    io::{self, Read},
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use cobox_protocol::{
    ApiError,
    exec::text_and_b64,
    fs::{GrepFile, GrepMatch, GrepOutput, GrepRequest, GrepResponse, OneOrMany, StoppedBy},
};
use grep_regex::{RegexMatcher, RegexMatcherBuilder};
use grep_searcher::{BinaryDetection, Searcher, SearcherBuilder};
use ignore::overrides::{Override, OverrideBuilder};
use rustix::fs::{FileType, OFlags};

use self::sink::{FileSink, Hit};
use super::{
    ignore_rules::{IgnoreRules, as_path},
    list::path_prefix,
    path_or_work_dir,
    stop_signal::StopSignal,
    walk::{Walk, WalkEntry, WalkVisitor},
};
use crate::{
    files::{Root, SandboxPath, file_error, kind, not_a_regular_file, operation_aborted, refuse_kernel_files},
    server::Server,
};

/// Matches the number of cores that most sandboxes have.
const THREADS: u32 = 2;
const DEFAULT_MATCHES: u32 = 1000;
const MAX_MATCHES: u32 = 100_000;
/// Maximum bytes of lines in one response.
const MAX_RESPONSE_BYTES: u64 = 8 * 1024 * 1024;
/// A line of a minified file is hardly readable; its beginning suffices to identify it.
const DEFAULT_LINE_BYTES: u32 = 2000;
const MAX_LINE_BYTES: u32 = 64 * 1024;
const MAX_CONTEXT_LINES: u32 = 100;
const MAX_PATTERN_BYTES: usize = 16 * 1024;
/// Maximum size of a compiled pattern, and of its lazy DFA: beyond any real pattern.
const MAX_REGEX_BYTES: usize = 16 * 1024 * 1024;
/// Maximum memory of one thread for a file: a line of this length, or a whole file for a multi-line search.
const MAX_HEAP_BYTES: usize = 32 * 1024 * 1024;

pub async fn grep(server: &Server, request: GrepRequest) -> Result<GrepResponse, ApiError> {
    let path = path_or_work_dir(server, request.path.as_deref(), request.path_b64.as_deref())?;
    let stop = StopSignal::with_timeout(request.timeout_seconds)?;
    let search = Arc::new(GrepSearch::new(&request, path, stop.clone())?);
    let _stopped_when_dropped = stop.stop_on_drop();
    let workers = server.files.workers();
    let mut slots = workers.long_slots(THREADS).await?;
    let first = slots.split(1).ok_or_else(operation_aborted)?;
    let opener = search.clone();
    let target = workers.run(move |root| opener.open_target(root)).await??;
    let walk = match target {
        SearchTarget::File(file) => {
            drop(slots);
            let found = workers.run_long(first, move |_| search.search_file(file)).await?.await.map_err(|_| operation_aborted())?;
            return Ok(found);
        }
        SearchTarget::Directory(walk) => Arc::new(walk),
    };
    let search_tree = |search: Arc<GrepSearch>, walk: Arc<Walk>| {
        move |_: &Root| {
            let mut worker = GrepWorker::new(&search);
            walk.run(&mut worker);
            worker.into_hits()
        }
    };
    let first_result = workers.run_long(first, search_tree(search.clone(), walk.clone())).await?;
    let second_result = workers.run_long(slots, search_tree(search.clone(), walk.clone())).await?;
    let mut hits = first_result.await.map_err(|_| operation_aborted())?;
    hits.append(&mut second_result.await.map_err(|_| operation_aborted())?);
    let too_deep = walk.is_too_deep().then_some(StoppedBy::Depth);
    Ok(GrepResponse { directories_unreadable: walk.unreadable(), ..search.respond(hits, stop.reason().or(too_deep)) })
}

enum SearchTarget {
    Directory(Walk),
    File(OwnedFd),
}

/// A compiled request, and the counters shared by its threads.
pub(crate) struct GrepSearch {
    path: SandboxPath,
    base: Vec<u8>,
    matcher: RegexMatcher,
    searcher: SearcherBuilder,
    glob_filter: Option<Override>,
    output: GrepOutput,
    respect_ignore: bool,
    hidden: bool,
    max_matches: u64,
    max_line_bytes: usize,
    stop: StopSignal,
    /// Matching lines, or matching files if those are requested.
    matches: AtomicU64,
    response_bytes: AtomicU64,
    files: AtomicU64,
    bytes: AtomicU64,
    binary: AtomicU64,
    unreadable: AtomicU64,
}

impl GrepSearch {
    pub(crate) fn new(request: &GrepRequest, path: SandboxPath, stop: StopSignal) -> Result<Self, ApiError> {
        let limited = |field: &str, given: Option<u32>, default: u32, max: u32| match given.unwrap_or(default) {
            n if n <= max => Ok(n),
            _ => Err(ApiError::invalid(format!("{field}: must be at most {max}"))),
        };
        let context = limited("context", request.context, 0, MAX_CONTEXT_LINES)?;
        let before = limited("before", request.before, context, MAX_CONTEXT_LINES)?;
        let after = limited("after", request.after, context, MAX_CONTEXT_LINES)?;
        let max_matches = limited("max_matches", request.max_matches, DEFAULT_MATCHES, MAX_MATCHES)?.max(1);
        let max_per_file = limited("max_per_file", request.max_per_file, MAX_MATCHES, MAX_MATCHES)?.max(1);
        let max_line_bytes = limited("max_line_bytes", request.max_line_bytes, DEFAULT_LINE_BYTES, MAX_LINE_BYTES)?;
        let is_content = request.output == GrepOutput::Content;
        let mut searcher = SearcherBuilder::new();
        searcher
            .line_number(is_content)
            .multi_line(request.multiline)
            .before_context(if is_content { before as usize } else { 0 })
            .after_context(if is_content { after as usize } else { 0 })
            .max_matches(Some(if request.output == GrepOutput::Files { 1 } else { max_per_file.into() }))
            .binary_detection(BinaryDetection::quit(0))
            // Files are read, not mapped: if a program truncated a mapped file, boxd would crash.
            .memory_map(grep_searcher::MmapChoice::never())
            .heap_limit(Some(MAX_HEAP_BYTES));
        Ok(Self {
            base: path_prefix(&path),
            path,
            matcher: matcher(request)?,
            searcher,
            glob_filter: glob_filter(request.glob.as_ref())?,
            output: request.output,
            respect_ignore: request.respect_ignore,
            hidden: request.hidden.unwrap_or(!request.respect_ignore),
            max_matches: max_matches.into(),
            max_line_bytes: max_line_bytes as usize,
            stop,
            matches: AtomicU64::new(0),
            response_bytes: AtomicU64::new(0),
            files: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            binary: AtomicU64::new(0),
            unreadable: AtomicU64::new(0),
        })
    }

    fn open_target(&self, root: &Root) -> Result<SearchTarget, ApiError> {
        let to_api_error = |e| file_error(e, &self.path);
        if kind(&root.stat(self.path.bytes()).map_err(to_api_error)?) != FileType::Directory {
            let (file, _) =
                root.open_regular(self.path.bytes()).map_err(to_api_error)?.map_err(|kind| not_a_regular_file(kind, &self.path))?;
            return Ok(SearchTarget::File(file));
        }
        let directory = root.open(self.path.bytes(), OFlags::RDONLY | OFlags::DIRECTORY).map_err(to_api_error)?;
        refuse_kernel_files(&directory).map_err(to_api_error)?;
        let rules = self.respect_ignore.then(|| IgnoreRules::at_walk_start(root, &self.path));
        Ok(SearchTarget::Directory(Walk::new(directory, rules, self.hidden, self.stop.clone())))
    }

    /// Searches a single file.
    pub(crate) fn search_file(&self, file: OwnedFd) -> GrepResponse {
        let mut worker = GrepWorker::new(self);
        worker.search(file, Vec::new());
        let mut hits = worker.into_hits();
        for hit in &mut hits {
            hit.path = self.path.bytes().to_vec();
        }
        self.respond(hits, self.stop.reason())
    }

    /// Counts a match. False if it exceeds the limit.
    fn count_match(&self) -> bool {
        let is_within = self.matches.fetch_add(1, Ordering::Relaxed) < self.max_matches;
        if !is_within {
            self.stop.stop(StoppedBy::MaxMatches);
        }
        is_within
    }

    fn count_bytes(&self, bytes: usize) -> bool {
        let is_within = self.response_bytes.fetch_add(bytes as u64, Ordering::Relaxed) + bytes as u64 <= MAX_RESPONSE_BYTES;
        if !is_within {
            self.stop.stop(StoppedBy::MaxBytes);
        }
        is_within
    }

    /// Whether this much more from one file exceeds what the response can take.
    fn exceeds_limits(&self, matches: usize, bytes: usize) -> bool {
        self.matches.load(Ordering::Relaxed) + matches as u64 > self.max_matches
            || self.response_bytes.load(Ordering::Relaxed) + bytes as u64 > MAX_RESPONSE_BYTES
    }

    fn respond(&self, mut hits: Vec<FileMatches>, stopped_by: Option<StoppedBy>) -> GrepResponse {
        hits.sort_by(|a, b| a.path.cmp(&b.path));
        let count = |c: &AtomicU64| c.load(Ordering::Relaxed);
        let mut response = GrepResponse {
            truncated: stopped_by.is_some(),
            stopped_by,
            files_searched: count(&self.files),
            bytes_searched: count(&self.bytes),
            files_binary: count(&self.binary),
            files_unreadable: count(&self.unreadable),
            ..GrepResponse::default()
        };
        let files = |hits: Vec<FileMatches>| {
            let file = |hit: FileMatches| {
                let (path, path_b64) = text_and_b64(hit.path);
                GrepFile { path, path_b64, count: hit.count }
            };
            hits.into_iter().map(file).collect()
        };
        match self.output {
            GrepOutput::Content => response.matches = Some(hits.into_iter().flat_map(FileMatches::into_matches).collect()),
            GrepOutput::Files => response.files = Some(files(hits)),
            GrepOutput::Count => response.counts = Some(files(hits)),
        }
        response
    }
}

fn matcher(request: &GrepRequest) -> Result<RegexMatcher, ApiError> {
    if request.pattern.is_empty() || request.pattern.len() > MAX_PATTERN_BYTES {
        return Err(ApiError::invalid(format!("pattern: must have between 1 and {MAX_PATTERN_BYTES} bytes")));
    }
    let mut builder = RegexMatcherBuilder::new();
    builder
        .multi_line(true)
        .case_insensitive(request.case_insensitive)
        .fixed_strings(request.literal)
        .word(request.word)
        .size_limit(MAX_REGEX_BYTES)
        .dfa_size_limit(MAX_REGEX_BYTES);
    if !request.multiline {
        builder.line_terminator(Some(b'\n'));
    }
    let hint = if !request.multiline && (request.pattern.contains('\n') || request.pattern.contains("\\n")) {
        "; set `multiline` to search across lines"
    } else if !request.literal {
        "; set `literal` to search for the text itself"
    } else {
        ""
    };
    builder.build(&request.pattern).map_err(|e| ApiError::invalid(format!("pattern: {e}{hint}")))
}

fn glob_filter(globs: Option<&OneOrMany>) -> Result<Option<Override>, ApiError> {
    let Some(globs) = globs else { return Ok(None) };
    let mut builder = OverrideBuilder::new("");
    for glob in globs.as_slice() {
        builder.add(glob).map_err(|e| ApiError::invalid(format!("glob: {e}")))?;
    }
    builder.build().map(Some).map_err(|e| ApiError::invalid(format!("glob: {e}")))
}

/// The matches of one file.
struct FileMatches {
    path: Vec<u8>,
    count: u64,
    hits: Vec<Hit>,
}

impl FileMatches {
    fn into_matches(self) -> impl Iterator<Item = GrepMatch> {
        let (path, path_b64) = text_and_b64(self.path);
        self.hits.into_iter().map(move |hit| GrepMatch {
            path: path.clone(),
            path_b64: path_b64.clone(),
            line: hit.line,
            before: hit.before,
            after: hit.after,
        })
    }
}

/// One thread of a search.
struct GrepWorker<'a> {
    search: &'a GrepSearch,
    searcher: Searcher,
    hits: Vec<FileMatches>,
}

impl<'a> GrepWorker<'a> {
    fn new(search: &'a GrepSearch) -> Self {
        Self { search, searcher: search.searcher.build(), hits: Vec::new() }
    }

    fn into_hits(self) -> Vec<FileMatches> {
        self.hits
    }

    fn search(&mut self, file: OwnedFd, path: Vec<u8>) {
        let search = self.search;
        let mut sink = FileSink::new(search);
        let reader = StoppableFile { file: File::from(file), search };
        let searched = self.searcher.search_reader(&search.matcher, reader, &mut sink);
        search.files.fetch_add(1, Ordering::Relaxed);
        if sink.is_binary {
            search.binary.fetch_add(1, Ordering::Relaxed);
            return;
        }
        if searched.is_err() && !search.stop.is_stopped() {
            search.unreadable.fetch_add(1, Ordering::Relaxed);
        }
        let is_cut_short = sink.is_cut_short;
        let (mut count, mut hits) = sink.finish();
        if search.output == GrepOutput::Content {
            // Counted only now, so that matches in a binary file before its first NUL don't use up the limits.
            let count_within_limits = hits.iter().take_while(|hit| search.count_match() && search.count_bytes(hit.bytes())).count();
            hits.truncate(count_within_limits);
            count = count_within_limits as u64;
            if is_cut_short {
                // The limit was reached by context lines alone, not by an extra match.
                search.stop.stop(StoppedBy::MaxBytes);
            }
        } else if count > 0 && !search.count_match() {
            return;
        }
        if count == 0 {
            return;
        }
        self.hits.push(FileMatches { path, count, hits });
    }
}

impl WalkVisitor for GrepWorker<'_> {
    fn should_enter(&mut self, directory: &WalkEntry<'_>) -> bool {
        !self.search.glob_filter.as_ref().is_some_and(|glob_filter| glob_filter.matched(as_path(directory.path), true).is_ignore())
    }

    fn visit(&mut self, found: &WalkEntry<'_>) {
        if found.kind != FileType::RegularFile {
            return;
        }
        if self.search.glob_filter.as_ref().is_some_and(|glob_filter| glob_filter.matched(as_path(found.path), false).is_ignore()) {
            return;
        }
        match found.open() {
            Ok((file, _)) => self.search(file, [self.search.base.as_slice(), found.path].concat()),
            Err(_) => {
                self.search.unreadable.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

/// A file that ends when the search is stopped.
struct StoppableFile<'a> {
    file: File,
    search: &'a GrepSearch,
}

impl Read for StoppableFile<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        if self.search.stop.is_stopped() {
            return Ok(0);
        }
        let n = self.file.read(buf)?;
        self.search.bytes.fetch_add(n as u64, Ordering::Relaxed);
        Ok(n)
    }
}
