//! Messages between the two ends. Long lists are split into several messages that each fit into a frame.

use std::io::{self, Read};

use crate::{
    codec::{Decoder, Encoder, Malformed},
    delta::BlockSum,
    entry::{Digest, Entry},
    error::SyncError,
    ignore_rules::{IGNORE_FILES, MAX_RULE_FILE_BYTES, RuleFile},
    path::RelPath,
    problem::Problem,
    reconcile::Change,
    tree::Update,
};

/// Version of the protocol. Any other version is rejected with a fault.
pub const VERSION: u8 = 1;
/// Maximum size of a frame, in bytes: a block of content or one part of a list, with some margin.
pub const MAX_FRAME_BYTES: usize = 320 * 1024;
/// Lists continue in another message beyond this size, in bytes.
const LIST_PART_BYTES: usize = 64 * 1024;
/// Maximum length of a fault's reason, in bytes.
const MAX_REASON_BYTES: usize = 1024;

/// Content that one side needs, and the path at which the other side has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingContent {
    pub path: RelPath,
    pub digest: Digest,
    pub size: u64,
}

/// Result of applying a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Done,
    /// The path has changed in the meantime and is scanned again.
    Changed,
    /// A directory that can't be removed because it contains files that are not synced.
    NotEmpty,
    /// The path could not be written.
    Failed,
    /// The content did not arrive, because it changed on the other side in the meantime.
    NoContent,
}

const OUTCOMES: [Outcome; 5] = [Outcome::Done, Outcome::Changed, Outcome::NotEmpty, Outcome::Failed, Outcome::NoContent];

/// Reason category for which one end gives up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    Version,
    RootGone,
    TooMany,
    Full,
    NotAllowed,
    Other,
}

const FAULTS: [Fault; 6] = [Fault::Version, Fault::RootGone, Fault::TooMany, Fault::Full, Fault::NotAllowed, Fault::Other];

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    Hello {
        version: u8,
        read_only: bool,
    },
    Welcome {
        version: u8,
    },
    /// Something has changed; a scan would show it.
    Dirty,
    Scan {
        all: bool,
    },
    Updates(Vec<Update>),
    Problems(Vec<(RelPath, Problem)>),
    Rules(Vec<RuleFile>),
    /// Ends the answer to a scan. With `has_rules` or `has_problems`, the rules or problems sent before it replace the
    /// known ones.
    Scanned {
        has_rules: bool,
        has_problems: bool,
        is_partial: bool,
    },
    Needs(Vec<MissingContent>),
    /// Ends the list of needs: the receiver prepares for the content, or sends it.
    NeedsEnd,
    /// Requests content, by index among the needs.
    Wants(Vec<u32>),
    /// Part of the signature of an old version of requested content.
    Sums {
        index: u32,
        block: u32,
        sums: Vec<BlockSum>,
    },
    WantsEnd,
    Content {
        raw: u32,
        is_packed: bool,
        bytes: Vec<u8>,
    },
    ContentEnd,
    Staged(Vec<u32>),
    StagedEnd,
    Changes(Vec<Change>),
    ChangesEnd,
    Outcomes(Vec<Outcome>),
    OutcomesEnd,
    Fault {
        fault: Fault,
        reason: String,
    },
}

impl Message {
    /// Encodes a frame: its length, its tag and its fields.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Encoder(vec![0; 4]);
        match self {
            Message::Hello { version, read_only } => out.u8(1).u8(*version).u8((*read_only).into()),
            Message::Welcome { version } => out.u8(2).u8(*version),
            Message::Dirty => out.u8(3),
            Message::Scan { all } => out.u8(4).u8((*all).into()),
            Message::Updates(updates) => updates.iter().fold(out.u8(5), |out, (path, entry)| out.path(path).entry(entry.as_ref())),
            Message::Problems(problems) => problems.iter().fold(out.u8(6), |out, (path, problem)| out.path(path).u8(*problem as u8)),
            Message::Rules(files) => {
                files.iter().fold(out.u8(7), |out, f| out.bytes(f.folder.as_ref().map_or(&[], RelPath::bytes)).u8(f.which).bytes(&f.text))
            }
            Message::Scanned { has_rules, has_problems, is_partial } => {
                out.u8(8).u8((*has_rules).into()).u8((*has_problems).into()).u8((*is_partial).into())
            }
            Message::Needs(needs) => needs.iter().fold(out.u8(9), |out, n| out.path(&n.path).raw(&n.digest.0).u64(n.size)),
            Message::NeedsEnd => out.u8(10),
            Message::Wants(wants) => wants.iter().fold(out.u8(11), |out, w| out.u32(*w)),
            Message::Sums { index, block, sums } => {
                sums.iter().fold(out.u8(12).u32(*index).u32(*block), |out, s| out.u32(s.weak).raw(&s.strong))
            }
            Message::WantsEnd => out.u8(13),
            Message::Content { raw, is_packed, bytes } => out.u8(14).u32(*raw).u8((*is_packed).into()).raw(bytes),
            Message::ContentEnd => out.u8(15),
            Message::Staged(failed) => failed.iter().fold(out.u8(16), |out, f| out.u32(*f)),
            Message::StagedEnd => out.u8(17),
            Message::Changes(changes) => {
                changes.iter().fold(out.u8(18), |out, c| out.path(&c.path).entry(c.old.as_ref()).entry(c.new.as_ref()))
            }
            Message::ChangesEnd => out.u8(19),
            Message::Outcomes(outcomes) => outcomes.iter().fold(out.u8(20), |out, o| out.u8(*o as u8)),
            Message::OutcomesEnd => out.u8(21),
            Message::Fault { fault, reason } => {
                out.u8(22).u8(*fault as u8).raw(&reason.as_bytes()[..reason.floor_char_boundary(MAX_REASON_BYTES)])
            }
        };
        let length = u32::try_from(out.0.len() - 4).unwrap_or(u32::MAX);
        out.0[..4].copy_from_slice(&length.to_be_bytes());
        out.0
    }

    /// Decodes a frame without its length.
    pub fn decode(frame: &[u8]) -> Result<Self, Malformed> {
        let mut input = Decoder(frame);
        let kind = input.u8()?;
        let i = &mut input;
        let message = match kind {
            1 => Message::Hello { version: i.u8()?, read_only: i.bool()? },
            2 => Message::Welcome { version: i.u8()? },
            3 => Message::Dirty,
            4 => Message::Scan { all: i.bool()? },
            5 => Message::Updates(i.all(|i| Ok((i.path()?, i.entry()?)))?),
            6 => Message::Problems(i.all(|i| Ok((i.path()?, one_of(&Problem::ALL, i.u8()?)?)))?),
            7 => Message::Rules(i.all(read_rule_file)?),
            8 => Message::Scanned { has_rules: i.bool()?, has_problems: i.bool()?, is_partial: i.bool()? },
            9 => Message::Needs(i.all(|i| Ok(MissingContent { path: i.path()?, digest: Digest(i.array()?), size: i.u64()? }))?),
            10 => Message::NeedsEnd,
            11 => Message::Wants(i.all(Decoder::u32)?),
            12 => Message::Sums { index: i.u32()?, block: i.u32()?, sums: i.all(|i| Ok(BlockSum { weak: i.u32()?, strong: i.array()? }))? },
            13 => Message::WantsEnd,
            14 => {
                let (raw, is_packed) = (i.u32()?, i.bool()?);
                Message::Content { raw, is_packed, bytes: i.take(i.0.len())?.to_vec() }
            }
            15 => Message::ContentEnd,
            16 => Message::Staged(i.all(Decoder::u32)?),
            17 => Message::StagedEnd,
            18 => Message::Changes(i.all(|i| Ok(Change { path: i.path()?, old: i.entry()?, new: i.entry()? }))?),
            19 => Message::ChangesEnd,
            20 => Message::Outcomes(i.all(|i| one_of(&OUTCOMES, i.u8()?))?),
            21 => Message::OutcomesEnd,
            22 => {
                let fault = one_of(&FAULTS, i.u8()?)?;
                let reason = String::from_utf8_lossy(i.take(i.0.len().min(MAX_REASON_BYTES))?).into_owned();
                Message::Fault { fault, reason }
            }
            _ => return Err(Malformed),
        };
        if input.0.is_empty() { Ok(message) } else { Err(Malformed) }
    }

    /// Reads the next frame of a stream. The length is checked before memory is allocated.
    pub fn read(from: &mut impl Read) -> Result<Self, SyncError> {
        let mut length = [0; 4];
        from.read_exact(&mut length).map_err(SyncError::Lost)?;
        let length = u32::from_be_bytes(length) as usize;
        if length > MAX_FRAME_BYTES {
            return Err(SyncError::Protocol("a frame is too long"));
        }
        let mut frame = vec![0; length];
        from.read_exact(&mut frame).map_err(SyncError::Lost)?;
        Self::decode(&frame).map_err(|Malformed| SyncError::Protocol("invalid frame"))
    }
}

/// Approximate size of an entry in a message, in bytes.
pub fn entry_bytes(entry: Option<&Entry>) -> usize {
    match entry {
        Some(Entry::Link { target }) => 64 + target.len(),
        _ => 64,
    }
}

/// Sends a list in as many messages as needed; an empty list in none.
pub fn send_list<T>(
    items: impl IntoIterator<Item = T>,
    size_of: impl Fn(&T) -> usize,
    message: impl Fn(Vec<T>) -> Message,
    send: &mut dyn FnMut(&Message) -> io::Result<()>,
) -> io::Result<()> {
    let (mut part, mut bytes) = (Vec::new(), 0);
    for item in items {
        bytes += size_of(&item);
        part.push(item);
        if bytes >= LIST_PART_BYTES {
            send(&message(std::mem::take(&mut part)))?;
            bytes = 0;
        }
    }
    if part.is_empty() { Ok(()) } else { send(&message(part)) }
}

fn one_of<T: Copy>(all: &[T], number: u8) -> Result<T, Malformed> {
    all.get(usize::from(number)).copied().ok_or(Malformed)
}

fn read_rule_file(i: &mut Decoder) -> Result<RuleFile, Malformed> {
    let folder = match i.bytes()? {
        [] => None,
        path => Some(RelPath::new(path).ok_or(Malformed)?),
    };
    let which = Some(i.u8()?).filter(|w| usize::from(*w) < IGNORE_FILES.len()).ok_or(Malformed)?;
    let text = Some(i.bytes()?).filter(|t| t.len() <= MAX_RULE_FILE_BYTES).ok_or(Malformed)?;
    Ok(RuleFile { folder, which, text: text.to_vec() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_message_round_trips_and_truncated_frames_are_not_accepted() {
        let path = RelPath::new(b"a/b").unwrap();
        let file = Entry::File { digest: Digest::of(b"x"), size: 1, exec: true };
        let link = Entry::Link { target: b"b".as_slice().into() };
        let messages = [
            Message::Hello { version: 1, read_only: true },
            Message::Welcome { version: 1 },
            Message::Dirty,
            Message::Scan { all: true },
            Message::Updates(vec![(path.clone(), Some(file.clone())), (path.clone(), None), (path.clone(), Some(Entry::Dir))]),
            Message::Problems(vec![(path.clone(), Problem::Unwritable)]),
            Message::Rules(vec![RuleFile { folder: None, which: 1, text: b"x".to_vec() }]),
            Message::Scanned { has_rules: true, has_problems: true, is_partial: false },
            Message::Needs(vec![MissingContent { path: path.clone(), digest: Digest::of(b"x"), size: 1 }]),
            Message::NeedsEnd,
            Message::Wants(vec![0, 7]),
            Message::Sums { index: 1, block: 1024, sums: vec![BlockSum { weak: 1, strong: [2; 16] }] },
            Message::WantsEnd,
            Message::Content { raw: 3, is_packed: false, bytes: b"abc".to_vec() },
            Message::ContentEnd,
            Message::Staged(vec![3]),
            Message::StagedEnd,
            Message::Changes(vec![Change { path, old: Some(file), new: Some(link) }]),
            Message::ChangesEnd,
            Message::Outcomes(OUTCOMES.to_vec()),
            Message::OutcomesEnd,
            Message::Fault { fault: Fault::Full, reason: "no room".into() },
        ];
        for message in messages {
            let frame = message.encode();
            assert_eq!(Message::read(&mut frame.as_slice()).unwrap(), message);
            assert_eq!(u32::from_be_bytes(frame[..4].try_into().unwrap()) as usize, frame.len() - 4);
            for cut in 0..frame.len() - 4 {
                // A truncated list or text may decode, but never to the complete message.
                if let Ok(shorter) = Message::decode(&frame[4..4 + cut]) {
                    assert_ne!(shorter, message);
                }
            }
        }
        assert_eq!(Message::decode(b"\xff"), Err(Malformed));
        assert!(Message::read(&mut u32::MAX.to_be_bytes().as_slice()).is_err());
    }
}
