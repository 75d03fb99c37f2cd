//! One round of a sync: look at both sides, decide, carry it out batch by batch, remember.

use std::{
    borrow::Cow,
    collections::BTreeMap,
    io,
    time::{Duration, Instant},
};

use crate::{
    ancestor::Making,
    apply::{in_order, needs_content},
    content::{BlockReader, Source},
    engine::Engine,
    entry::Entry,
    error::SyncError,
    guard::{Guard, Trees, Verdict, deletes},
    halt::{Halt, Side},
    message::{Message, Need, Outcome, entry_bytes, send_list},
    path::RelPath,
    peer::Peer,
    problem::Problem,
    reconcile::{Change, Conflict, reconcile},
    risky::Risks,
    rules::{MAX_RULE_BYTES, MAX_RULE_FILES, Rules, is_out_of_bounds},
    serve::{read_wants, send_wants},
    status::{Event, Phase},
    trash::Trash,
    tree::{Tree, Update},
};

/// Changes of one batch, and bytes of content: what a cut connection costs at most, and what is made durable at once.
const BATCH_CHANGES: usize = 4096;
const BATCH_BYTES: u64 = 128 * 1024 * 1024;
/// Paths and link targets of one scan's answer, in bytes: twice what a tree may have, because all of it may change at once.
const MAX_SCAN_BYTES: usize = 512 * 1024 * 1024;

impl Engine {
    /// A halt means that nothing was done, and waits for somebody.
    pub(crate) fn round(&mut self, peer: &mut Peer, all: bool) -> Result<Option<Halt>, SyncError> {
        self.look(peer, all)?;
        self.find_made()?;
        let is_confirmed = std::mem::take(&mut self.is_confirmed);
        let mut guard = std::mem::replace(&mut self.guard, Guard::new(self.settings.directory_files));
        let mut git_paths = std::mem::take(&mut self.git_paths);
        let (base, here, there, forgotten) = self.views();
        let mut plan = reconcile(&base, &here, &there, self.settings.mode, &self.decided);
        let trees = Trees { base: &base, here: &here, there: &there };
        let verdict = match guard.judge(trees, &plan, is_confirmed, Instant::now()) {
            // Nobody waits to see more.
            Verdict::Hold if self.settings.once => {
                guard.release();
                Verdict::Go
            }
            verdict => verdict,
        };
        let mut held: Vec<Change> = Vec::new();
        if !self.settings.allow_risky && plan.here.iter().any(|c| c.new.is_some()) {
            let risks = Risks::new(&there, git_paths.refresh(&self.root, self.folder.tree())?);
            (held, plan.here) = plan.here.into_iter().partition(|c| c.new.is_some() && risks.holds(&c.path));
        }
        drop((base, here, there));
        (self.guard, self.git_paths) = (guard, git_paths);
        match verdict {
            Verdict::Halt(halt) => return Ok(Some(halt)),
            Verdict::Hold => [&mut plan.here, &mut plan.there].into_iter().for_each(|changes| changes.retain(|c| !deletes(c))),
            Verdict::Go => {}
        }
        if let Some(trash) = &mut self.folder.trash
            && let Some(full) = trash.room_for(&plan.here)?
        {
            return Ok(Some(Halt::TrashFull(full)));
        }
        let held: Vec<RelPath> = held.into_iter().map(|c| c.path).collect();
        let is_anything = !plan.here.is_empty() || !plan.there.is_empty();
        let is_news = is_anything || self.status.conflicts != plan.conflicts || self.status.held != held;
        self.status.conflicts = plan.conflicts;
        self.status.left_alone = plan.left_alone;
        self.status.held = held;
        if is_anything {
            self.set_phase(Phase::Syncing);
        }
        self.base.agree(plan.adopted.into_iter().chain(forgotten).collect())?;
        self.undone = Default::default();
        self.carry_out(peer, Side::Sandbox, plan.there)?;
        self.carry_out(peer, Side::Here, plan.here)?;
        if verdict == Verdict::Go {
            self.guard.is_over();
            self.decided.clear();
        }
        self.tell_status();
        if is_news {
            (self.listener)(Event::Round(&self.status));
        }
        Ok(None)
    }

    /// What an earlier round was about to make when it broke off and is there now is this sync's own doing, and no edit.
    fn find_made(&mut self) -> Result<(), SyncError> {
        let is_made = |side: Side, path: &RelPath, entry: &Option<Entry>| match side {
            Side::Here => self.folder.tree().get(path) == entry.as_ref(),
            Side::Sandbox => self.there.get(path) == entry.as_ref(),
        };
        let made: Vec<Making> = self.base.making().iter().filter(|(side, (path, entry))| is_made(*side, path, entry)).cloned().collect();
        for (side, (path, entry)) in &made {
            self.guard.note(*side, path, entry.as_ref(), Instant::now());
        }
        self.base.agree(made.into_iter().map(|(_, update)| update).collect())
    }

    fn look(&mut self, peer: &mut Peer, all: bool) -> Result<(), SyncError> {
        let asks_again = std::mem::take(&mut self.asks_there_again);
        let asks_there = all || asks_again || self.inbox.there_is_dirty || !self.there_is_known;
        if all {
            self.set_phase(Phase::Scanning);
        }
        // Both look at the same time.
        if asks_there {
            self.inbox.there_is_dirty = false;
            peer.send(&Message::Scan { all })?;
        }
        self.inbox.here_is_dirty = false;
        self.folder.scan(all)?;
        let is_changing = |problems: &BTreeMap<RelPath, Problem>| problems.values().any(|p| *p == Problem::Changing);
        if asks_there {
            self.read_scan()?;
        }
        self.asks_there_again |= is_changing(&self.there_problems);
        self.is_restless |= is_changing(&self.there_problems) || is_changing(self.folder.problems());
        Ok(())
    }

    fn read_scan(&mut self) -> Result<(), SyncError> {
        let (mut problems, mut rules, mut rule_bytes): (BTreeMap<RelPath, Problem>, Vec<_>, usize) = Default::default();
        let (mut updates, mut update_bytes): (Vec<Update>, usize) = Default::default();
        let most = self.settings.limits.entries;
        loop {
            match self.inbox.next()? {
                Message::Updates(more) if updates.len() + more.len() <= most.saturating_mul(2) => {
                    if more.iter().any(|(path, _)| is_out_of_bounds(path)) {
                        return Err(SyncError::Protocol("it has something where nothing is ever synced"));
                    }
                    update_bytes += more.iter().map(update_size).sum::<usize>();
                    if update_bytes > MAX_SCAN_BYTES {
                        return Err(SyncError::Protocol("what it says is there is longer than any folder"));
                    }
                    updates.extend(more);
                }
                Message::Problems(more) if problems.len() + more.len() <= crate::scan::MAX_PROBLEMS => problems.extend(more),
                Message::Rules(more) if rules.len() + more.len() <= MAX_RULE_FILES && rule_bytes <= MAX_RULE_BYTES => {
                    rule_bytes += more.iter().map(|file| file.text.len()).sum::<usize>();
                    rules.extend(more);
                }
                Message::Scanned { has_rules, has_problems, is_partial } => {
                    if has_rules {
                        self.there_rules = Rules::from_files(rules);
                    }
                    if has_problems {
                        self.there_problems = problems;
                    }
                    self.there_is_partial = is_partial;
                    break;
                }
                _ => return Err(SyncError::Protocol("a scan was answered with something else")),
            }
        }
        self.there.update(updates, most).map_err(|_| SyncError::Protocol("what it says is there is no tree"))?;
        self.there_is_known = true;
        Ok(())
    }

    /// The three trees without what either side leaves out, and with what can't be looked at as if it had not changed; and what is to be
    /// forgotten because it is left out now.
    fn views(&self) -> (Cow<'_, Tree>, Cow<'_, Tree>, Cow<'_, Tree>, Vec<Update>) {
        let (mut base, mut here, mut there) =
            (Cow::Borrowed(self.base.tree()), Cow::Borrowed(self.folder.tree()), Cow::Borrowed(&self.there));
        let mut forgotten = Vec::new();
        if *self.folder.rules() != self.there_rules || self.folder.rules().has_above() {
            leave_out(&mut here, &self.there_rules);
            leave_out(&mut there, self.folder.rules());
            for rules in [self.folder.rules(), &self.there_rules] {
                forgotten.extend(leave_out(&mut base, rules).into_iter().map(|path| (path, None)));
            }
        }
        let problems = self.folder.problems().iter().chain(&self.there_problems);
        for (path, _) in problems.filter(|(_, problem)| problem.holds()) {
            let has_any = |tree: &Tree| tree.get(path).is_some() || tree.beneath(path).next().is_some();
            if has_any(&base) || has_any(&here) || has_any(&there) {
                hold(here.to_mut(), &base, path);
                hold(there.to_mut(), &base, path);
            }
        }
        (base, here, there, forgotten)
    }

    fn carry_out(&mut self, peer: &mut Peer, side: Side, changes: Vec<Change>) -> Result<(), SyncError> {
        // Sizes are what the other side says.
        let total = changes.iter().filter(|c| needs_content(c)).map(content_bytes).fold(0, u64::saturating_add);
        let mut batch: Vec<Change> = Vec::new();
        let (mut done, mut bytes) = (0u64, 0u64);
        let mut changes = in_order(changes).into_iter().peekable();
        while let Some(change) = changes.next() {
            bytes = bytes.saturating_add(if needs_content(&change) { content_bytes(&change) } else { 0 });
            batch.push(change);
            if batch.len() >= BATCH_CHANGES || bytes >= BATCH_BYTES || changes.peek().is_none() {
                self.base.make(side, batch.iter().map(|c| (c.path.clone(), c.new.clone())).collect())?;
                let outcomes = match side {
                    Side::Sandbox => self.push(peer, &batch, done, total)?,
                    Side::Here => self.pull(peer, &batch, done, total)?,
                };
                done = done.saturating_add(bytes);
                self.take_outcomes(side, std::mem::take(&mut batch), &outcomes)?;
                bytes = 0;
            }
        }
        Ok(())
    }

    fn take_outcomes(&mut self, side: Side, batch: Vec<Change>, outcomes: &[Outcome]) -> Result<(), SyncError> {
        let mut agreed: Vec<Update> = Vec::new();
        for (change, outcome) in batch.into_iter().zip(outcomes) {
            let undone = &mut self.undone[side as usize];
            match outcome {
                Outcome::Done => {
                    if side == Side::Sandbox {
                        self.there.set(change.path.clone(), change.new.clone());
                    }
                    self.guard.note(side, &change.path, change.new.as_ref(), Instant::now());
                    let batch = self.folder.trash.as_ref().and_then(Trash::batch).filter(|_| side == Side::Here && change.old.is_some());
                    (self.listener)(Event::Changed { side, change: &change, batch: batch.as_deref() });
                    agreed.push((change.path, change.new));
                }
                Outcome::Changed | Outcome::NoContent => {
                    self.folder.again.insert(change.path.clone());
                    self.asks_there_again = true;
                    self.is_restless = true;
                    // Told as long as it stays so.
                    undone.insert(change.path, Problem::Changing);
                }
                Outcome::NotEmpty => drop(undone.insert(change.path, Problem::NotEmpty)),
                Outcome::Failed => drop(undone.insert(change.path, Problem::Unwritable)),
            }
        }
        self.base.agree(agreed)
    }

    /// To the sandbox.
    fn push(&mut self, peer: &mut Peer, batch: &[Change], before: u64, total: u64) -> Result<Vec<Outcome>, SyncError> {
        let needs = needs(batch);
        if !needs.is_empty() {
            send_list(needs.iter().cloned(), need_bytes, Message::Needs, &mut |m| peer.write(m)).map_err(SyncError::Lost)?;
            peer.send(&Message::NeedsEnd)?;
            let wants = match self.inbox.next()? {
                Message::Wants(first) => read_wants(first, &mut self.inbox)?,
                Message::WantsEnd => Vec::new(),
                _ => return Err(SyncError::Protocol("it did not say what it wants")),
            };
            let (mut sent, listener, inbox, mut stop) = (before, &mut self.listener, &mut self.inbox, None);
            let told = self.folder.send_content(&needs, &wants, &mut |message| {
                if let Message::Content { raw, .. } = message {
                    sent = sent.saturating_add(u64::from(*raw)).min(total);
                    listener(Event::Progress { to: Side::Sandbox, done: sent, total });
                }
                // A side that can't go on says so in the middle of it.
                stop = inbox.interruption(Duration::ZERO);
                if stop.is_some() { Err(io::Error::other("it has given up")) } else { peer.write(message) }
            });
            match stop {
                Some(stop) => return Err(stop),
                None => told?,
            }
            let mut staged = 0;
            loop {
                match self.inbox.next()? {
                    // What each of these comes to is told when it is to be placed. Each is named at most once, so the list ends.
                    Message::Staged(failed) if staged + failed.len() <= needs.len() && !failed.is_empty() => staged += failed.len(),
                    Message::StagedEnd => break,
                    _ => return Err(SyncError::Protocol("it did not say what arrived")),
                }
            }
        }
        let about = |c: &Change| c.path.bytes().len() + entry_bytes(c.old.as_ref()) + entry_bytes(c.new.as_ref());
        send_list(batch.iter().cloned(), about, Message::Changes, &mut |m| peer.write(m)).map_err(SyncError::Lost)?;
        peer.send(&Message::ChangesEnd)?;
        let mut outcomes = Vec::with_capacity(batch.len());
        loop {
            match self.inbox.next()? {
                Message::Outcomes(more) if outcomes.len() + more.len() <= batch.len() => outcomes.extend(more),
                Message::OutcomesEnd if outcomes.len() == batch.len() => return Ok(outcomes),
                _ => return Err(SyncError::Protocol("it did not say what became of the changes")),
            }
        }
    }

    /// From the sandbox.
    fn pull(&mut self, peer: &mut Peer, batch: &[Change], before: u64, total: u64) -> Result<Vec<Outcome>, SyncError> {
        let needs = needs(batch);
        let wants = self.folder.prepare(&needs)?;
        if !wants.is_empty() {
            send_list(needs.iter().cloned(), need_bytes, Message::Needs, &mut |m| peer.write(m)).map_err(SyncError::Lost)?;
            send_wants(&wants, &mut |m| peer.write(m)).map_err(SyncError::Lost)?;
            let (mut came, listener) = (before, &mut self.listener);
            let mut progress = |bytes: u64| {
                came = came.saturating_add(bytes).min(total);
                listener(Event::Progress { to: Side::Here, done: came, total });
            };
            let blocks = BlockReader::new(&mut self.inbox, &mut progress).map_err(SyncError::Lost)?;
            self.folder.receive_content(&needs, blocks).inspect_err(|e| {
                // What came so far would keep the disk full.
                if matches!(e, SyncError::Full) {
                    self.folder.staging.clear();
                }
            })?;
        }
        self.folder.apply(batch)
    }

    fn tell_status(&mut self) {
        self.status.here_files = self.folder.tree().files();
        self.status.there_files = self.there.files();
        let base = self.base.tree();
        let in_conflict =
            |c: &Conflict| base.get(&c.path).into_iter().chain(base.beneath(&c.path).map(|(_, e)| e)).filter(|e| e.is_file()).count();
        self.status.agreed_files = base.files() - self.status.conflicts.iter().map(in_conflict).sum::<usize>();
        self.status.here_problems = self.folder.problems().clone();
        self.status.here_problems.extend(self.undone[Side::Here as usize].clone());
        self.status.there_problems = self.there_problems.clone();
        self.status.there_problems.extend(self.undone[Side::Sandbox as usize].clone());
        self.status.is_polling = [self.folder.is_partly_watched(), self.there_is_partial];
        if let Some(trash) = &self.folder.trash {
            self.status.trash = trash.fill();
        }
        self.status.rounds += 1;
        self.publish();
    }
}

fn needs(batch: &[Change]) -> Vec<Need> {
    let need = |c: &Change| c.new.as_ref().and_then(Entry::content).map(|(digest, size)| Need { path: c.path.clone(), digest, size });
    batch.iter().filter(|c| needs_content(c)).filter_map(need).collect()
}

/// What an update holds in memory beside its fixed part, in bytes.
fn update_size((path, entry): &Update) -> usize {
    let target = match entry {
        Some(Entry::Link { target }) => target.len(),
        _ => 0,
    };
    path.bytes().len() + target
}

fn need_bytes(need: &Need) -> usize {
    need.path.bytes().len() + 48
}

fn content_bytes(change: &Change) -> u64 {
    change.new.as_ref().and_then(Entry::content).map_or(0, |(_, size)| size)
}

/// Takes out what the rules leave out, and says what it was.
fn leave_out(tree: &mut Cow<Tree>, rules: &Rules) -> Vec<RelPath> {
    let mut out: Vec<RelPath> = Vec::new();
    for (path, entry) in tree.iter() {
        let is_covered = out.last().is_some_and(|top| path.is_within(top));
        if !is_covered && rules.leaves_out(path, entry.is_dir()) {
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

/// Makes a path what it was, with what is beneath it and the folders it is in.
fn hold(tree: &mut Tree, base: &Tree, path: &RelPath) {
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
    fn the_target_of_a_link_counts_for_the_size_of_a_scan() {
        let path = RelPath::new(b"link").unwrap();
        let target = vec![b'x'; 4095];
        assert_eq!(update_size(&(path.clone(), Some(Entry::Link { target: target[..].into() }))), 4 + 4095);
        assert_eq!(update_size(&(path, None)), 4);
    }
}
