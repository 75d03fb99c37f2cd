//! The sandbox's end of a sync: answers requests and reports that something has changed. It makes no decisions and
//! stores no state.

use std::{
    collections::BTreeMap,
    io::{self, Read, Write},
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use parking_lot::Mutex;

use crate::{
    content::{BlockReader, MessageSource},
    delta::{MAX_BLOCKS, MAX_SUMS, Signature},
    error::SyncError,
    folder::{ContentRequest, Folder, Limits},
    hooks::Hooks,
    ignore_rules::IgnoreRules,
    message::{Fault, Message, MissingContent, Outcome, VERSION, entry_bytes, send_list},
    path::RelPath,
    problem::Problem,
    reconcile::Change,
};

/// Maximum number of changes or needed files in one request: more than the other end sends, and a memory limit against
/// a hostile one.
pub const MAX_BATCH: usize = 64 * 1024;
/// Block checksums per message.
const SUMS_PER_MESSAGE: usize = 8 * 1024;

/// Serves until the other end disconnects. Has to run on a thread of its own that may access the files.
pub fn serve(
    mut reader: impl Read,
    writer: impl Write + Send + 'static,
    root: OwnedFd,
    limits: Limits,
    hooks: Arc<dyn Hooks>,
) -> Result<(), SyncError> {
    let out = Output { writer: Arc::new(Mutex::new(Box::new(writer))), dirty_sent: Arc::new(AtomicBool::new(true)) };
    let result = Server::open(&mut reader, &out, root, limits, hooks).and_then(Server::run);
    match &result {
        // The other end has disconnected, which is the normal end.
        Err(SyncError::Lost(e)) if e.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
        Err(SyncError::Lost(_)) | Ok(()) => {}
        Err(error) => {
            // The other end may be gone already, so a failure to send is ignored.
            let _ = out.send(&Message::Fault { fault: error.fault(), reason: error.to_string() });
        }
    }
    result
}

/// The sending half, shared with the watch thread.
#[derive(Clone)]
struct Output {
    writer: Arc<Mutex<Box<dyn Write + Send>>>,
    /// A change is reported once until the next scan.
    dirty_sent: Arc<AtomicBool>,
}

impl Output {
    fn send(&self, message: &Message) -> io::Result<()> {
        let mut writer = self.writer.lock();
        writer.write_all(&message.encode())?;
        if !matches!(message, Message::Content { .. }) {
            writer.flush()?;
        }
        Ok(())
    }

    fn send_dirty(&self) {
        if !self.dirty_sent.swap(true, Ordering::AcqRel) {
            // If the connection is lost, the reading thread notices it.
            let _ = self.send(&Message::Dirty);
        }
    }
}

struct Server<'a, R> {
    reader: R,
    out: &'a Output,
    folder: Folder,
    read_only: bool,
    sent_problems: BTreeMap<RelPath, Problem>,
    sent_rules: IgnoreRules,
}

impl<R: Read> MessageSource for Server<'_, R> {
    fn next(&mut self) -> Result<Message, SyncError> {
        Message::read(&mut self.reader)
    }
}

struct ReaderSource<'a, R>(&'a mut R);

impl<R: Read> MessageSource for ReaderSource<'_, R> {
    fn next(&mut self) -> Result<Message, SyncError> {
        Message::read(self.0)
    }
}

impl<'a, R: Read> Server<'a, R> {
    fn open(mut reader: R, out: &'a Output, root: OwnedFd, limits: Limits, hooks: Arc<dyn Hooks>) -> Result<Self, SyncError> {
        let read_only = match Message::read(&mut reader)? {
            Message::Hello { version: VERSION, read_only } => read_only,
            Message::Hello { .. } => {
                let reason = format!("the sandbox speaks version {VERSION} of the sync protocol; update cobox, or create a new sandbox");
                return Err(SyncError::Sandbox { fault: Fault::Version, reason });
            }
            _ => return Err(SyncError::Protocol("the first message must be a hello")),
        };
        if !read_only && !hooks.may_write() {
            return Err(SyncError::NotAllowed);
        }
        let notifier = out.clone();
        let mut folder = Folder::open(root, limits, hooks, move || notifier.send_dirty())?;
        folder.set_digest_cache(folder.hooks.load_digests());
        out.send(&Message::Welcome { version: VERSION }).map_err(SyncError::Lost)?;
        Ok(Self { reader, out, folder, read_only, sent_problems: BTreeMap::new(), sent_rules: IgnoreRules::default() })
    }

    fn run(mut self) -> Result<(), SyncError> {
        let ended = loop {
            if let Err(ended) = self.handle_message() {
                break ended;
            }
        };
        self.folder.hooks.save_digests(self.folder.digest_cache());
        Err(ended)
    }

    fn handle_message(&mut self) -> Result<(), SyncError> {
        match self.next()? {
            Message::Scan { all } => self.scan(all),
            Message::Needs(needs) => self.handle_needs(needs),
            Message::NeedsEnd => self.receive_files(Vec::new()),
            Message::Changes(changes) => self.apply(changes),
            _ => Err(SyncError::Protocol("unexpected message")),
        }
    }

    fn send(&self, message: &Message) -> Result<(), SyncError> {
        self.out.send(message).map_err(SyncError::Lost)
    }

    fn scan(&mut self, all: bool) -> Result<(), SyncError> {
        // Reset before the scan, so that changes during the scan are reported afterwards.
        self.out.dirty_sent.store(false, Ordering::Release);
        let updates = self.folder.scan(all)?;
        let out = self.out;
        let mut send = |message: &Message| out.send(message);
        send_list(updates, |(path, entry)| path.bytes().len() + entry_bytes(entry.as_ref()), Message::Updates, &mut send)
            .map_err(SyncError::Lost)?;
        let has_problems = *self.folder.problems() != self.sent_problems;
        if has_problems {
            self.sent_problems = self.folder.problems().clone();
            let problems = self.sent_problems.iter().map(|(path, problem)| (path.clone(), *problem));
            send_list(problems, |(path, _)| path.bytes().len() + 8, Message::Problems, &mut send).map_err(SyncError::Lost)?;
        }
        let has_rules = *self.folder.ignore_rules() != self.sent_rules;
        if has_rules {
            self.sent_rules = IgnoreRules::from_files(self.folder.ignore_rules().files().collect());
            for file in self.sent_rules.files() {
                self.send(&Message::Rules(vec![file]))?;
            }
        }
        self.send(&Message::Scanned { has_rules, has_problems, is_partial: self.folder.is_partly_watched() })?;
        // A change during the scan was not reported yet, because the flag was set at that time.
        if self.folder.has_changes() {
            self.out.send_dirty();
        }
        Ok(())
    }

    fn handle_needs(&mut self, mut needs: Vec<MissingContent>) -> Result<(), SyncError> {
        loop {
            match self.next()? {
                Message::Needs(more) if needs.len() + more.len() <= MAX_BATCH => needs.extend(more),
                Message::NeedsEnd => return self.receive_files(needs),
                // The other end requests this content for itself.
                Message::Wants(wants) => return self.send_files(&needs, wants),
                Message::WantsEnd => return self.send_wanted(&needs, &[]),
                _ => return Err(SyncError::Protocol("unexpected message")),
            }
        }
    }

    /// Receives content that the other end offers.
    fn receive_files(&mut self, needs: Vec<MissingContent>) -> Result<(), SyncError> {
        self.check_writable()?;
        let wants = self.folder.prepare(&needs)?;
        let out = self.out;
        send_wants(&wants, &mut |message| out.send(message)).map_err(SyncError::Lost)?;
        let failed = self
            .folder
            .receive_content(&needs, BlockReader::new(&mut ReaderSource(&mut self.reader), &mut |_| ()).map_err(SyncError::Lost)?)?;
        send_list(failed, |_| 4, Message::Staged, &mut |message| out.send(message)).map_err(SyncError::Lost)?;
        self.send(&Message::StagedEnd)
    }

    fn send_files(&mut self, needs: &[MissingContent], first: Vec<u32>) -> Result<(), SyncError> {
        let wants = read_wants(first, &mut ReaderSource(&mut self.reader))?;
        self.send_wanted(needs, &wants)
    }

    fn send_wanted(&mut self, needs: &[MissingContent], wants: &[ContentRequest]) -> Result<(), SyncError> {
        let out = self.out;
        self.folder.send_content(needs, wants, &mut |message| out.send(message))
    }

    fn apply(&mut self, mut changes: Vec<Change>) -> Result<(), SyncError> {
        loop {
            match self.next()? {
                Message::Changes(more) if changes.len() + more.len() <= MAX_BATCH => changes.extend(more),
                Message::ChangesEnd => break,
                _ => return Err(SyncError::Protocol("unexpected message")),
            }
        }
        self.check_writable()?;
        let outcomes: Vec<Outcome> = self.folder.apply(&changes)?;
        let out = self.out;
        send_list(outcomes, |_| 1, Message::Outcomes, &mut |message| out.send(message)).map_err(SyncError::Lost)?;
        self.send(&Message::OutcomesEnd)
    }

    fn check_writable(&self) -> Result<(), SyncError> {
        if self.read_only { Err(SyncError::NotAllowed) } else { Ok(()) }
    }
}

/// Sends requests for content, with signatures of old versions.
pub fn send_wants(wants: &[ContentRequest], send: &mut dyn FnMut(&Message) -> io::Result<()>) -> io::Result<()> {
    send_list(wants.iter().map(|w| w.index), |_| 4, Message::Wants, send)?;
    for want in wants {
        let Signature { block, sums } = &want.signature;
        for part in sums.chunks(SUMS_PER_MESSAGE) {
            send(&Message::Sums { index: want.index, block: *block, sums: part.to_vec() })?;
        }
    }
    send(&Message::WantsEnd)
}

/// Reads the rest of what [`send_wants`] sends, after its first message.
pub fn read_wants(first: Vec<u32>, from: &mut dyn MessageSource) -> Result<Vec<ContentRequest>, SyncError> {
    let mut wants: BTreeMap<u32, Signature> = first.into_iter().map(|index| (index, Signature::default())).collect();
    let mut total = 0;
    loop {
        match from.next()? {
            Message::Wants(more) if wants.len() + more.len() <= MAX_BATCH => {
                wants.extend(more.into_iter().map(|i| (i, Signature::default())))
            }
            Message::Sums { index, block, sums } => {
                let signature = wants.get_mut(&index).ok_or(SyncError::Protocol("checksums for content that was not requested"))?;
                total += sums.len();
                if signature.sums.len() + sums.len() > MAX_BLOCKS || total > MAX_SUMS {
                    return Err(SyncError::Protocol("too many block checksums"));
                }
                signature.block = block;
                signature.sums.extend(sums);
            }
            Message::WantsEnd => break,
            Message::Fault { fault, reason } => return Err(SyncError::Sandbox { fault, reason }),
            _ => return Err(SyncError::Protocol("unexpected message")),
        }
    }
    Ok(wants.into_iter().map(|(index, signature)| ContentRequest { index, signature }).collect())
}
