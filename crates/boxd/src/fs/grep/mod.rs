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
    ignore_rules::{Rules, as_path},
    list::path_prefix,
    path_or,
    stop::Stop,
    walk::{Found, Visit, Walk},
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
const MAX_ANSWER_BYTES: u64 = 8 * 1024 * 1024;
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
    let path = path_or(server, request.path.as_deref(), request.path_b64.as_deref())?;
    let stop = Stop::after(request.timeout_seconds)?;
    let plan = Arc::new(Plan::new(&request, path, stop.clone())?);
    let _stopped_when_dropped = stop.when_dropped();
    let workers = server.files.workers();
    let mut slots = workers.long_slots(THREADS).await?;
    let first = slots.split(1).ok_or_else(operation_aborted)?;
    let opening = plan.clone();
    let begun = workers.run(move |root| opening.begin(root)).await??;
    let walk = match begun {
        Begun::File(file) => {
            drop(slots);
            let found = workers.run_long(first, move |_| plan.search_one(file)).await?.await.map_err(|_| operation_aborted())?;
            return Ok(found);
        }
        Begun::Directory(walk) => Arc::new(walk),
    };
    let take_part = |plan: Arc<Plan>, walk: Arc<Walk>| {
        move |_: &Root| {
            let mut worker = Worker::new(&plan);
            walk.take_part(&mut worker);
            worker.into_hits()
        }
    };
    let one = workers.run_long(first, take_part(plan.clone(), walk.clone())).await?;
    let two = workers.run_long(slots, take_part(plan.clone(), walk.clone())).await?;
    let mut hits = one.await.map_err(|_| operation_aborted())?;
    hits.append(&mut two.await.map_err(|_| operation_aborted())?);
    let too_deep = walk.is_too_deep().then_some(StoppedBy::Depth);
    Ok(GrepResponse { directories_unreadable: walk.unreadable(), ..plan.answer(hits, stop.reason().or(too_deep)) })
}

enum Begun {
    Directory(Walk),
    File(OwnedFd),
}

/// A compiled request, and the counters shared by its threads.
pub(crate) struct Plan {
    path: SandboxPath,
    base: Vec<u8>,
    matcher: RegexMatcher,
    searcher: SearcherBuilder,
    only: Option<Override>,
    output: GrepOutput,
    respect_ignore: bool,
    hidden: bool,
    max_matches: u64,
    max_line_bytes: usize,
    stop: Stop,
    /// Matching lines, or matching files if those are requested.
    matches: AtomicU64,
    answer_bytes: AtomicU64,
    files: AtomicU64,
    bytes: AtomicU64,
    binary: AtomicU64,
    unreadable: AtomicU64,
}

impl Plan {
    pub(crate) fn new(request: &GrepRequest, path: SandboxPath, stop: Stop) -> Result<Self, ApiError> {
        let within = |field: &str, given: Option<u32>, default: u32, max: u32| match given.unwrap_or(default) {
            n if n <= max => Ok(n),
            _ => Err(ApiError::invalid(format!("{field}: must be at most {max}"))),
        };
        let around = within("context", request.context, 0, MAX_CONTEXT_LINES)?;
        let before = within("before", request.before, around, MAX_CONTEXT_LINES)?;
        let after = within("after", request.after, around, MAX_CONTEXT_LINES)?;
        let max_matches = within("max_matches", request.max_matches, DEFAULT_MATCHES, MAX_MATCHES)?.max(1);
        let max_per_file = within("max_per_file", request.max_per_file, MAX_MATCHES, MAX_MATCHES)?.max(1);
        let max_line_bytes = within("max_line_bytes", request.max_line_bytes, DEFAULT_LINE_BYTES, MAX_LINE_BYTES)?;
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
            only: only(request.glob.as_ref())?,
            output: request.output,
            respect_ignore: request.respect_ignore,
            hidden: request.hidden.unwrap_or(!request.respect_ignore),
            max_matches: max_matches.into(),
            max_line_bytes: max_line_bytes as usize,
            stop,
            matches: AtomicU64::new(0),
            answer_bytes: AtomicU64::new(0),
            files: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            binary: AtomicU64::new(0),
            unreadable: AtomicU64::new(0),
        })
    }

    fn begin(&self, root: &Root) -> Result<Begun, ApiError> {
        let to_api_error = |e| file_error(e, &self.path);
        if kind(&root.stat(self.path.bytes()).map_err(to_api_error)?) != FileType::Directory {
            let (file, _) =
                root.open_regular(self.path.bytes()).map_err(to_api_error)?.map_err(|kind| not_a_regular_file(kind, &self.path))?;
            return Ok(Begun::File(file));
        }
        let directory = root.open(self.path.bytes(), OFlags::RDONLY | OFlags::DIRECTORY).map_err(to_api_error)?;
        refuse_kernel_files(&directory).map_err(to_api_error)?;
        let rules = self.respect_ignore.then(|| Rules::above(root, &self.path));
        Ok(Begun::Directory(Walk::new(directory, rules, self.hidden, self.stop.clone())))
    }

    /// Searches a single file.
    pub(crate) fn search_one(&self, file: OwnedFd) -> GrepResponse {
        let mut worker = Worker::new(self);
        worker.search(file, Vec::new());
        let mut hits = worker.into_hits();
        for hit in &mut hits {
            hit.path = self.path.bytes().to_vec();
        }
        self.answer(hits, self.stop.reason())
    }

    /// Counts a match. False if it exceeds the limit.
    fn take_one(&self) -> bool {
        let is_within = self.matches.fetch_add(1, Ordering::Relaxed) < self.max_matches;
        if !is_within {
            self.stop.stop(StoppedBy::MaxMatches);
        }
        is_within
    }

    fn take_bytes(&self, bytes: usize) -> bool {
        let is_within = self.answer_bytes.fetch_add(bytes as u64, Ordering::Relaxed) + bytes as u64 <= MAX_ANSWER_BYTES;
        if !is_within {
            self.stop.stop(StoppedBy::MaxBytes);
        }
        is_within
    }

    /// Whether this much more from one file exceeds what the response can take.
    fn is_beyond(&self, matches: usize, bytes: usize) -> bool {
        self.matches.load(Ordering::Relaxed) + matches as u64 > self.max_matches
            || self.answer_bytes.load(Ordering::Relaxed) + bytes as u64 > MAX_ANSWER_BYTES
    }

    fn answer(&self, mut hits: Vec<FileHits>, stopped_by: Option<StoppedBy>) -> GrepResponse {
        hits.sort_by(|a, b| a.path.cmp(&b.path));
        let count = |c: &AtomicU64| c.load(Ordering::Relaxed);
        let mut told = GrepResponse {
            truncated: stopped_by.is_some(),
            stopped_by,
            files_searched: count(&self.files),
            bytes_searched: count(&self.bytes),
            files_binary: count(&self.binary),
            files_unreadable: count(&self.unreadable),
            ..GrepResponse::default()
        };
        let files = |hits: Vec<FileHits>| {
            let file = |hit: FileHits| {
                let (path, path_b64) = text_and_b64(hit.path);
                GrepFile { path, path_b64, count: hit.count }
            };
            hits.into_iter().map(file).collect()
        };
        match self.output {
            GrepOutput::Content => told.matches = Some(hits.into_iter().flat_map(FileHits::into_matches).collect()),
            GrepOutput::Files => told.files = Some(files(hits)),
            GrepOutput::Count => told.counts = Some(files(hits)),
        }
        told
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

fn only(globs: Option<&OneOrMany>) -> Result<Option<Override>, ApiError> {
    let Some(globs) = globs else { return Ok(None) };
    let mut builder = OverrideBuilder::new("");
    for glob in globs.as_slice() {
        builder.add(glob).map_err(|e| ApiError::invalid(format!("glob: {e}")))?;
    }
    builder.build().map(Some).map_err(|e| ApiError::invalid(format!("glob: {e}")))
}

/// The matches of one file.
struct FileHits {
    path: Vec<u8>,
    count: u64,
    hits: Vec<Hit>,
}

impl FileHits {
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
struct Worker<'a> {
    plan: &'a Plan,
    searcher: Searcher,
    hits: Vec<FileHits>,
}

impl<'a> Worker<'a> {
    fn new(plan: &'a Plan) -> Self {
        Self { plan, searcher: plan.searcher.build(), hits: Vec::new() }
    }

    fn into_hits(self) -> Vec<FileHits> {
        self.hits
    }

    fn search(&mut self, file: OwnedFd, path: Vec<u8>) {
        let plan = self.plan;
        let mut sink = FileSink::new(plan);
        let reader = Stoppable { file: File::from(file), plan };
        let searched = self.searcher.search_reader(&plan.matcher, reader, &mut sink);
        plan.files.fetch_add(1, Ordering::Relaxed);
        if sink.is_binary {
            plan.binary.fetch_add(1, Ordering::Relaxed);
            return;
        }
        if searched.is_err() && !plan.stop.is_stopped() {
            plan.unreadable.fetch_add(1, Ordering::Relaxed);
        }
        let is_cut_short = sink.is_cut_short;
        let (mut count, mut hits) = sink.finish();
        if plan.output == GrepOutput::Content {
            // Counted only now, so that matches in a binary file before its first NUL don't use up the limits.
            let room = hits.iter().take_while(|hit| plan.take_one() && plan.take_bytes(hit.bytes())).count();
            hits.truncate(room);
            count = room as u64;
            if is_cut_short {
                // The limit was reached by context lines alone, not by an extra match.
                plan.stop.stop(StoppedBy::MaxBytes);
            }
        } else if count > 0 && !plan.take_one() {
            return;
        }
        if count == 0 {
            return;
        }
        self.hits.push(FileHits { path, count, hits });
    }
}

impl Visit for Worker<'_> {
    fn enter(&mut self, directory: &Found<'_>) -> bool {
        !self.plan.only.as_ref().is_some_and(|only| only.matched(as_path(directory.path), true).is_ignore())
    }

    fn see(&mut self, found: &Found<'_>) {
        if found.kind != FileType::RegularFile {
            return;
        }
        if self.plan.only.as_ref().is_some_and(|only| only.matched(as_path(found.path), false).is_ignore()) {
            return;
        }
        match found.open() {
            Ok((file, _)) => self.search(file, [self.plan.base.as_slice(), found.path].concat()),
            Err(_) => {
                self.plan.unreadable.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

/// A file that ends when the search is stopped.
struct Stoppable<'a> {
    file: File,
    plan: &'a Plan,
}

impl Read for Stoppable<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        if self.plan.stop.is_stopped() {
            return Ok(0);
        }
        let n = self.file.read(buf)?;
        self.plan.bytes.fetch_add(n as u64, Ordering::Relaxed);
        Ok(n)
    }
}
