//! One round of a sync: scan both sides, decide, apply the changes in batches, and record the new state.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
    io,
    time::{Duration, Instant},
};

use crate::{
    apply::{needs_content, order_changes},
    base_version::PendingChange,
    content::{BlockReader, MessageSource},
    deletion_guard::{DeletionGuard, Trees, Verdict},
    engine::Engine,
    entry::Entry,
    error::SyncError,
    halt::Halt,
    ignore_rules::{IgnoreRules, MAX_RULE_BYTES, MAX_RULE_FILES, is_reserved},
    message::{Message, MissingContent, Outcome, entry_bytes, send_list},
    path::RelPath,
    peer::Peer,
    problem::Problem,
    reconcile::{Change, Conflict, reconcile},
    risky_paths::RiskFilter,
    serve::{read_wants, send_wants},
    side::Side,
    status::{Event, Phase},
    trash::Trash,
    tree::{Tree, Update},
};

/// Limits of a batch, in changes and in bytes of content: the most that a lost connection costs, and the amount that is
/// made durable at once.
const BATCH_CHANGES: usize = 4096;
const BATCH_BYTES: u64 = 128 * 1024 * 1024;
/// Maximum size of the paths and link targets in a scan's answer, in bytes: twice the limit of a tree, because every
/// path may change at once.
const MAX_SCAN_BYTES: usize = 512 * 1024 * 1024;

impl Engine {
    /// Runs one round. A halt means that nothing was changed and the user has to decide. `is_resumed`: the user has looked
    /// at the deletions that the sync halted for, and did not confirm them.
    pub(crate) fn synchronize(
        &mut self,
        peer: &mut Peer,
        full: bool,
        deletions_confirmed: bool,
        is_resumed: bool,
    ) -> Result<Option<Halt>, SyncError> {
        self.scan_both(peer, full)?;
        self.adopt_pending_changes()?;
        if is_resumed {
            self.keep_rejected_deletions()?;
        }
        let mut deletion_guard = std::mem::replace(&mut self.deletion_guard, DeletionGuard::new(self.settings.directory_deletion_limit));
        let mut git_paths = std::mem::take(&mut self.git_paths);
        let (base, local, sandbox, forgotten) = self.effective_trees();
        let mut plan = reconcile(&base, &local, &sandbox, self.settings.mode, &self.resolutions);
        // Held back files are not part of the plan: a directory that is moved to a risky name is gone here.
        let mut held_back: Vec<Change> = Vec::new();
        if !self.settings.allow_risky && plan.local.iter().any(|c| c.new.is_some()) {
            match git_paths.refresh(&self.root, self.folder.tree()) {
                Ok(executed) => {
                    let risks = RiskFilter::new(&sandbox, executed);
                    (held_back, plan.local) = plan.local.into_iter().partition(|c| c.new.is_some() && risks.is_risky(&c.path));
                }
                Err(e) => {
                    drop((base, local, sandbox));
                    (self.deletion_guard, self.git_paths) = (deletion_guard, git_paths);
                    return Err(e);
                }
            }
        }
        let new_and_held: BTreeSet<RelPath> = held_back.iter().filter(|c| c.old.is_none()).map(|c| c.path.clone()).collect();
        let trees = Trees { base: &base, local: &local, sandbox: &sandbox, held_back: &new_and_held };
        let verdict = match deletion_guard.judge(trees, &plan, deletions_confirmed, Instant::now()) {
            // A sync with `once` does not wait for further deletions.
            Verdict::HoldDeletions if self.settings.once => {
                deletion_guard.release_hold();
                Verdict::Proceed
            }
            verdict => verdict,
        };
        drop((base, local, sandbox));
        (self.deletion_guard, self.git_paths) = (deletion_guard, git_paths);
        match verdict {
            Verdict::Halt(halt) => return Ok(Some(halt)),
            Verdict::HoldDeletions => {
                plan.local.retain(|change| !self.deletion_guard.is_held(Side::Local, change));
                plan.sandbox.retain(|change| !self.deletion_guard.is_held(Side::Sandbox, change));
            }
            Verdict::Proceed => {}
        }
        if let Some(trash) = &mut self.folder.trash
            && let Some(full) = trash.check_capacity(&plan.local)?
        {
            return Ok(Some(Halt::TrashFull(full)));
        }
        let held_back: Vec<RelPath> = held_back.into_iter().map(|c| c.path).collect();
        let has_changes = !plan.local.is_empty() || !plan.sandbox.is_empty();
        let has_news = has_changes || self.status.conflicts != plan.conflicts || self.status.held_back != held_back;
        self.status.conflicts = plan.conflicts;
        self.status.unsynced_differences = plan.unsynced_differences;
        self.status.held_back = held_back;
        if has_changes {
            self.set_phase(Phase::Syncing);
        }
        self.base.commit(plan.adopted.into_iter().chain(forgotten).collect())?;
        self.failed_changes = Default::default();
        self.apply_side(peer, Side::Sandbox, plan.sandbox)?;
        self.apply_side(peer, Side::Local, plan.local)?;
        if verdict == Verdict::Proceed {
            self.deletion_guard.finish_plan();
            self.resolutions.clear();
        }
        self.update_status();
        if has_news {
            (self.listener)(Event::Round(&self.status));
        }
        Ok(None)
    }

    /// Changes that an earlier round had started when it was interrupted, and that are complete now, are this sync's
    /// own and not user edits.
    fn adopt_pending_changes(&mut self) -> Result<(), SyncError> {
        let is_applied = |side: Side, path: &RelPath, entry: &Option<Entry>| match side {
            Side::Local => self.folder.tree().get(path) == entry.as_ref(),
            Side::Sandbox => self.sandbox.tree.get(path) == entry.as_ref(),
        };
        let applied: Vec<PendingChange> =
            self.base.pending_changes().iter().filter(|(side, (path, entry))| is_applied(*side, path, entry)).cloned().collect();
        for (side, (path, entry)) in &applied {
            self.deletion_guard.record(*side, path, entry.as_ref(), Instant::now());
        }
        self.base.commit(applied.into_iter().map(|(_, update)| update).collect())
    }

    /// If the user has undone some of the deletions that the sync halted for, the others are not made either: their files
    /// are treated as new here, so they are copied back to the sandbox.
    fn keep_rejected_deletions(&mut self) -> Result<(), SyncError> {
        let (base, local, sandbox, _) = self.effective_trees();
        if !self.deletion_guard.is_rejected(Trees { base: &base, local: &local, sandbox: &sandbox, held_back: &BTreeSet::new() }) {
            return Ok(());
        }
        let plan = reconcile(&base, &local, &sandbox, self.settings.mode, &self.resolutions);
        let is_file_deletion = |change: &Change| change.new.is_none() && !change.old.as_ref().is_some_and(Entry::is_dir);
        let kept: Vec<Update> = plan.local.into_iter().filter(is_file_deletion).map(|change| (change.path, None)).collect();
        drop((base, local, sandbox));
        self.base.commit(kept)
    }

    fn scan_both(&mut self, peer: &mut Peer, full: bool) -> Result<(), SyncError> {
        let must_rescan = std::mem::take(&mut self.sandbox.must_rescan);
        let scans_sandbox = full || must_rescan || self.inbox.sandbox_is_dirty || !self.sandbox.is_known;
        if full {
            self.set_phase(Phase::Scanning);
        }
        // Both sides scan at the same time.
        if scans_sandbox {
            self.inbox.sandbox_is_dirty = false;
            peer.send(&Message::Scan { all: full })?;
        }
        self.inbox.local_is_dirty = false;
        self.folder.scan(full)?;
        let is_changing = |problems: &BTreeMap<RelPath, Problem>| problems.values().any(|p| *p == Problem::Changing);
        if scans_sandbox {
            self.read_scan()?;
        }
        self.sandbox.must_rescan |= is_changing(&self.sandbox.problems);
        self.is_unstable |= is_changing(&self.sandbox.problems) || is_changing(self.folder.problems());
        Ok(())
    }

    fn read_scan(&mut self) -> Result<(), SyncError> {
        let (mut problems, mut ignore_rules, mut rule_bytes): (BTreeMap<RelPath, Problem>, Vec<_>, usize) = Default::default();
        let (mut updates, mut update_bytes): (Vec<Update>, usize) = Default::default();
        let most = self.settings.limits.entries;
        loop {
            match self.inbox.next()? {
                Message::Updates(more) if updates.len() + more.len() <= most.saturating_mul(2) => {
                    if more.iter().any(|(path, _)| is_reserved(path)) {
                        return Err(SyncError::Protocol("it reported an entry at a reserved path"));
                    }
                    update_bytes += more.iter().map(update_size).sum::<usize>();
                    if update_bytes > MAX_SCAN_BYTES {
                        return Err(SyncError::Protocol("the scan is larger than the limit"));
                    }
                    updates.extend(more);
                }
                Message::Problems(more) if problems.len() + more.len() <= crate::scan::MAX_PROBLEMS => problems.extend(more),
                Message::Rules(more) if ignore_rules.len() + more.len() <= MAX_RULE_FILES && rule_bytes <= MAX_RULE_BYTES => {
                    rule_bytes += more.iter().map(|file| file.text.len()).sum::<usize>();
                    ignore_rules.extend(more);
                }
                Message::Scanned { has_rules, has_problems, is_partial } => {
                    if has_rules {
                        self.sandbox.rules = IgnoreRules::from_files(ignore_rules);
                    }
                    if has_problems {
                        self.sandbox.problems = problems;
                    }
                    self.sandbox.is_partial = is_partial;
                    break;
                }
                _ => return Err(SyncError::Protocol("unexpected message in the response to a scan")),
            }
        }
        self.sandbox.tree.update(updates, most).map_err(|_| SyncError::Protocol("the scan is not a valid tree"))?;
        self.sandbox.is_known = true;
        Ok(())
    }

    /// Returns the base, local and sandbox trees without the paths that either side ignores, and with unreadable paths
    /// as if unchanged; and the updates that remove newly ignored paths from the stored state.
    fn effective_trees(&self) -> (Cow<'_, Tree>, Cow<'_, Tree>, Cow<'_, Tree>, Vec<Update>) {
        let (mut base, mut local, mut sandbox) =
            (Cow::Borrowed(self.base.tree()), Cow::Borrowed(self.folder.tree()), Cow::Borrowed(&self.sandbox.tree));
        let mut forgotten = Vec::new();
        if *self.folder.ignore_rules() != self.sandbox.rules || self.folder.ignore_rules().has_parent_rules() {
            remove_ignored(&mut local, &self.sandbox.rules);
            remove_ignored(&mut sandbox, self.folder.ignore_rules());
            for ignore_rules in [self.folder.ignore_rules(), &self.sandbox.rules] {
                forgotten.extend(remove_ignored(&mut base, ignore_rules).into_iter().map(|path| (path, None)));
            }
        }
        let problems = self.folder.problems().iter().chain(&self.sandbox.problems);
        for (path, _) in problems.filter(|(_, problem)| problem.freezes_path()) {
            let has_any = |tree: &Tree| tree.get(path).is_some() || tree.beneath(path).next().is_some();
            if has_any(&base) || has_any(&local) || has_any(&sandbox) {
                freeze(local.to_mut(), &base, path);
                freeze(sandbox.to_mut(), &base, path);
            }
        }
        (base, local, sandbox, forgotten)
    }

    fn apply_side(&mut self, peer: &mut Peer, side: Side, changes: Vec<Change>) -> Result<(), SyncError> {
        // The sandbox reports the sizes, so the sum may overflow.
        let total = changes.iter().filter(|c| needs_content(c)).map(content_bytes).fold(0, u64::saturating_add);
        let mut batch: Vec<Change> = Vec::new();
        let (mut done, mut bytes) = (0u64, 0u64);
        let mut changes = order_changes(changes).into_iter().peekable();
        while let Some(change) = changes.next() {
            bytes = bytes.saturating_add(if needs_content(&change) { content_bytes(&change) } else { 0 });
            batch.push(change);
            if batch.len() >= BATCH_CHANGES || bytes >= BATCH_BYTES || changes.peek().is_none() {
                self.base.begin_changes(side, batch.iter().map(|c| (c.path.clone(), c.new.clone())).collect())?;
                let outcomes = match side {
                    Side::Sandbox => self.push(peer, &batch, done, total)?,
                    Side::Local => self.pull(peer, &batch, done, total)?,
                };
                done = done.saturating_add(bytes);
                self.record_outcomes(side, std::mem::take(&mut batch), &outcomes)?;
                bytes = 0;
            }
        }
        Ok(())
    }

    fn record_outcomes(&mut self, side: Side, batch: Vec<Change>, outcomes: &[Outcome]) -> Result<(), SyncError> {
        let mut agreed: Vec<Update> = Vec::new();
        for (change, outcome) in batch.into_iter().zip(outcomes) {
            let failed = &mut self.failed_changes[side as usize];
            match outcome {
                Outcome::Done => {
                    if side == Side::Sandbox {
                        self.sandbox.tree.set(change.path.clone(), change.new.clone());
                    }
                    self.deletion_guard.record(side, &change.path, change.new.as_ref(), Instant::now());
                    let batch = self.folder.trash.as_ref().and_then(Trash::batch).filter(|_| side == Side::Local && change.old.is_some());
                    (self.listener)(Event::Changed { side, change: &change, batch: batch.as_deref() });
                    agreed.push((change.path, change.new));
                }
                Outcome::Changed | Outcome::NoContent => {
                    self.folder.rescan.insert(change.path.clone());
                    self.sandbox.must_rescan = true;
                    self.is_unstable = true;
                    // Reported until a later round succeeds.
                    failed.insert(change.path, Problem::Changing);
                }
                Outcome::NotEmpty => drop(failed.insert(change.path, Problem::NotEmpty)),
                Outcome::Failed => drop(failed.insert(change.path, Problem::Unwritable)),
            }
        }
        self.base.commit(agreed)
    }

    /// Sends a batch of changes to the sandbox.
    fn push(&mut self, peer: &mut Peer, batch: &[Change], before: u64, total: u64) -> Result<Vec<Outcome>, SyncError> {
        let needs = needs(batch);
        if !needs.is_empty() {
            send_list(needs.iter().cloned(), need_bytes, Message::Needs, &mut |m| peer.write(m)).map_err(SyncError::Lost)?;
            peer.send(&Message::NeedsEnd)?;
            let wants = match self.inbox.next()? {
                Message::Wants(first) => read_wants(first, &mut self.inbox)?,
                Message::WantsEnd => Vec::new(),
                _ => return Err(SyncError::Protocol("expected the requested content")),
            };
            let (mut sent, listener, inbox, mut stop) = (before, &mut self.listener, &mut self.inbox, None);
            let sending = self.folder.send_content(&needs, &wants, &mut |message| {
                if let Message::Content { raw, .. } = message {
                    sent = sent.saturating_add(u64::from(*raw)).min(total);
                    listener(Event::Progress { to: Side::Sandbox, done: sent, total });
                }
                // A side that can't continue reports it in the middle of a transfer.
                stop = inbox.interruption(Duration::ZERO);
                if stop.is_some() { Err(io::Error::other("the sandbox has stopped the transfer")) } else { peer.write(message) }
            });
            match stop {
                Some(stop) => return Err(stop),
                None => sending?,
            }
            let mut reported = 0;
            loop {
                match self.inbox.next()? {
                    // These failures appear again in the outcomes of the changes. Each file is listed at most once, so
                    // the list is bounded.
                    Message::Staged(failed) if reported + failed.len() <= needs.len() && !failed.is_empty() => reported += failed.len(),
                    Message::StagedEnd => break,
                    _ => return Err(SyncError::Protocol("expected the list of failed transfers")),
                }
            }
        }
        let size_of = |c: &Change| c.path.bytes().len() + entry_bytes(c.old.as_ref()) + entry_bytes(c.new.as_ref());
        send_list(batch.iter().cloned(), size_of, Message::Changes, &mut |m| peer.write(m)).map_err(SyncError::Lost)?;
        peer.send(&Message::ChangesEnd)?;
        let mut outcomes = Vec::with_capacity(batch.len());
        loop {
            match self.inbox.next()? {
                Message::Outcomes(more) if outcomes.len() + more.len() <= batch.len() => outcomes.extend(more),
                Message::OutcomesEnd if outcomes.len() == batch.len() => return Ok(outcomes),
                _ => return Err(SyncError::Protocol("expected the outcomes of the changes")),
            }
        }
    }

    /// Fetches a batch of changes from the sandbox.
    fn pull(&mut self, peer: &mut Peer, batch: &[Change], before: u64, total: u64) -> Result<Vec<Outcome>, SyncError> {
        let needs = needs(batch);
        let wants = self.folder.prepare(&needs)?;
        if !wants.is_empty() {
            send_list(needs.iter().cloned(), need_bytes, Message::Needs, &mut |m| peer.write(m)).map_err(SyncError::Lost)?;
            send_wants(&wants, &mut |m| peer.write(m)).map_err(SyncError::Lost)?;
            let (mut received, listener) = (before, &mut self.listener);
            let mut progress = |bytes: u64| {
                received = received.saturating_add(bytes).min(total);
                listener(Event::Progress { to: Side::Local, done: received, total });
            };
            let blocks = BlockReader::new(&mut self.inbox, &mut progress).map_err(SyncError::Lost)?;
            self.folder.receive_content(&needs, blocks).inspect_err(|e| {
                // Partial content would keep the disk full.
                if matches!(e, SyncError::Full) {
                    self.folder.staging.clear();
                }
            })?;
        }
        self.folder.apply(batch)
    }

    fn update_status(&mut self) {
        self.status.local_files = self.folder.tree().files();
        self.status.sandbox_files = self.sandbox.tree.files();
        let base = self.base.tree();
        let files_in_conflict =
            |c: &Conflict| base.get(&c.path).into_iter().chain(base.beneath(&c.path).map(|(_, e)| e)).filter(|e| e.is_file()).count();
        self.status.synced_files = base.files() - self.status.conflicts.iter().map(files_in_conflict).sum::<usize>();
        self.status.local_problems = self.folder.problems().clone();
        self.status.local_problems.extend(self.failed_changes[Side::Local as usize].clone());
        self.status.sandbox_problems = self.sandbox.problems.clone();
        self.status.sandbox_problems.extend(self.failed_changes[Side::Sandbox as usize].clone());
        self.status.is_polling = [self.folder.is_partly_watched(), self.sandbox.is_partial];
        if let Some(trash) = &self.folder.trash {
            self.status.trash = trash.usage();
        }
        self.status.rounds += 1;
        self.publish();
    }
}

fn needs(batch: &[Change]) -> Vec<MissingContent> {
    let need =
        |c: &Change| c.new.as_ref().and_then(Entry::content).map(|(digest, size)| MissingContent { path: c.path.clone(), digest, size });
    batch.iter().filter(|c| needs_content(c)).filter_map(need).collect()
}

/// Memory for an update's path and link target, in bytes.
fn update_size((path, entry): &Update) -> usize {
    let target = match entry {
        Some(Entry::Link { target }) => target.len(),
        _ => 0,
    };
    path.bytes().len() + target
}

fn need_bytes(need: &MissingContent) -> usize {
    need.path.bytes().len() + 48
}

fn content_bytes(change: &Change) -> u64 {
    change.new.as_ref().and_then(Entry::content).map_or(0, |(_, size)| size)
}

/// Removes ignored paths from a tree and returns them.
fn remove_ignored(tree: &mut Cow<Tree>, ignore_rules: &IgnoreRules) -> Vec<RelPath> {
    let mut out: Vec<RelPath> = Vec::new();
    for (path, entry) in tree.iter() {
        let is_covered = out.last().is_some_and(|top| path.is_within(top));
        if !is_covered && ignore_rules.is_ignored(path, entry.is_dir()) {
            out.push(path.clone());
        }
    }
    let mut all = Vec::new();
    for top in out {
        all.extend(tree.beneath(&top).map(|(path, _)| path.clone()));
        tree.to_mut().prune(&top);
        all.push(top);
    }
    all
}

/// Restores a path's base version in a tree, with everything beneath it and the directories that contain it.
fn freeze(tree: &mut Tree, base: &Tree, path: &RelPath) {
    tree.prune(path);
    let Some(entry) = base.get(path) else { return };
    for folder in path.ancestors() {
        if !tree.get(&folder).is_some_and(Entry::is_dir) {
            tree.prune(&folder);
            tree.set(folder, Some(Entry::Dir));
        }
    }
    tree.set(path.clone(), Some(entry.clone()));
    for (path, entry) in base.beneath(path) {
        tree.set(path.clone(), Some(entry.clone()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn link_targets_count_towards_the_size_of_a_scan() {
        let path = RelPath::new(b"link").unwrap();
        let target = vec![b'x'; 4095];
        assert_eq!(update_size(&(path.clone(), Some(Entry::Link { target: target[..].into() }))), 4 + 4095);
        assert_eq!(update_size(&(path, None)), 4);
    }
}
