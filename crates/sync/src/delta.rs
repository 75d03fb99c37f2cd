//! Delta transfer for large files: the receiver sends checksums of its old version's blocks, and the sender sends only
//! the data that they don't cover.
//!
//! Memory is bounded by the number of blocks. Beyond a limit larger files have larger blocks instead of more of them.

use std::{
    collections::HashMap,
    io::{self, Read},
};

/// Smaller files are sent whole: requesting checksums would cost as much.
pub const MIN_DELTA_BYTES: u64 = 64 * 1024;
/// Maximum number of blocks of one file.
pub const MAX_BLOCKS: usize = 64 * 1024;
/// Maximum number of blocks of all files in one transfer.
pub const MAX_SUMS: usize = 4 * MAX_BLOCKS;
const MIN_BLOCK_BYTES: u64 = 1024;
/// Maximum block size of ordinary files, in bytes. It grows only where the maximum number of blocks would not cover the
/// file.
const USUAL_BLOCK_BYTES: u64 = 64 * 1024;
/// Maximum block size, in bytes; with the maximum number of blocks it covers a file of 256 GiB.
pub const MAX_BLOCK_BYTES: u32 = 4 * 1024 * 1024;
/// Maximum size of one piece of unmatched data, in bytes.
const LITERAL_BYTES: usize = 128 * 1024;
/// Bytes per read.
const READ_BYTES: usize = 256 * 1024;
/// Blocks whose weak checksum matches and whose strong one does not, in addition to one per block: checksums crafted to
/// collide would keep this side busy.
const MAX_FALSE_MATCHES: u64 = 10_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSum {
    pub weak: u32,
    pub strong: [u8; 16],
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Signature {
    pub block: u32,
    pub sums: Vec<BlockSum>,
}

/// One step in rebuilding a new version.
#[derive(Debug, PartialEq, Eq)]
pub enum DeltaOp<'a> {
    Data(&'a [u8]),
    /// Copies bytes of the old version.
    Copy {
        offset: u64,
        length: u64,
    },
}

pub fn block_size(length: u64) -> u32 {
    let usual = length.saturating_mul(24).isqrt().clamp(MIN_BLOCK_BYTES, USUAL_BLOCK_BYTES);
    let needed = length.div_ceil(MAX_BLOCKS as u64).max(usual).next_multiple_of(MIN_BLOCK_BYTES);
    u32::try_from(needed).unwrap_or(MAX_BLOCK_BYTES).min(MAX_BLOCK_BYTES)
}

/// Checksums of a file's complete blocks; a partial block at the end has none.
pub fn compute_signature(file: &mut impl Read, length: u64) -> io::Result<Signature> {
    let block = block_size(length);
    let mut bytes = vec![0; block as usize];
    let mut sums = Vec::new();
    while sums.len() < MAX_BLOCKS && fill(file, &mut bytes)? == bytes.len() {
        sums.push(BlockSum { weak: Rolling::of(&bytes).value(), strong: strong(&bytes) });
    }
    Ok(Signature { block, sums })
}

/// Reads a new version and emits the steps that rebuild it from the old version with this signature.
pub fn compute_delta(signature: &Signature, source: &mut impl Read, mut emit: impl FnMut(DeltaOp) -> io::Result<()>) -> io::Result<()> {
    let block = signature.block as usize;
    let index = Index::new(signature);
    let mut buffer: Vec<u8> = Vec::with_capacity(READ_BYTES + block + LITERAL_BYTES);
    let (mut literal, mut at, mut is_at_end) = (0, 0, block == 0 || signature.sums.is_empty());
    let mut rolling: Option<Rolling> = None;
    let mut false_matches_left = MAX_FALSE_MATCHES + signature.sums.len() as u64;
    let mut copy: Option<(u64, u64)> = None;
    if is_at_end {
        return emit_rest(source, emit);
    }
    loop {
        while buffer.len() - at < block && !is_at_end {
            // Everything before `at` was emitted, so the rest moves to the front.
            flush(&mut copy, &buffer[literal..at], &mut emit)?;
            buffer.drain(..at);
            (literal, at) = (0, 0);
            let had = buffer.len();
            buffer.resize(had + READ_BYTES, 0);
            let n = fill(source, &mut buffer[had..])?;
            buffer.truncate(had + n);
            is_at_end = n < READ_BYTES;
        }
        if buffer.len() - at < block || false_matches_left == 0 {
            break;
        }
        let window = &buffer[at..at + block];
        let sum = rolling.get_or_insert_with(|| Rolling::of(window)).value();
        let matched = match index.find(sum, window) {
            BlockMatch::Block(number) => Some(number),
            BlockMatch::FalseMatch => {
                false_matches_left -= 1;
                None
            }
            BlockMatch::NoMatch => None,
        };
        if let Some(number) = matched {
            if literal < at {
                flush(&mut copy, &buffer[literal..at], &mut emit)?;
            }
            let offset = number as u64 * block as u64;
            copy = match copy {
                Some((from, length)) if from + length == offset => Some((from, length + block as u64)),
                other => {
                    if let Some((offset, length)) = other {
                        emit(DeltaOp::Copy { offset, length })?;
                    }
                    Some((offset, block as u64))
                }
            };
            at += block;
            literal = at;
            rolling = None;
            continue;
        }
        if let (Some(rolling), Some(next)) = (&mut rolling, buffer.get(at + block)) {
            rolling.roll(buffer[at], *next, block);
        } else {
            rolling = None;
        }
        at += 1;
        if at - literal >= LITERAL_BYTES {
            flush(&mut copy, &buffer[literal..at], &mut emit)?;
            literal = at;
        }
    }
    flush(&mut copy, &buffer[literal..], &mut emit)?;
    if let Some((offset, length)) = copy {
        emit(DeltaOp::Copy { offset, length })?;
    }
    if is_at_end { Ok(()) } else { emit_rest(source, emit) }
}

/// Emits the rest of the source as data.
fn emit_rest(source: &mut impl Read, mut emit: impl FnMut(DeltaOp) -> io::Result<()>) -> io::Result<()> {
    let mut buffer = vec![0; LITERAL_BYTES];
    loop {
        match fill(source, &mut buffer)? {
            0 => return Ok(()),
            n => emit(DeltaOp::Data(&buffer[..n]))?,
        }
    }
}

/// Emits a pending copy, then the data after it.
fn flush(copy: &mut Option<(u64, u64)>, literal: &[u8], emit: &mut impl FnMut(DeltaOp) -> io::Result<()>) -> io::Result<()> {
    if literal.is_empty() {
        return Ok(());
    }
    if let Some((offset, length)) = copy.take() {
        emit(DeltaOp::Copy { offset, length })?;
    }
    literal.chunks(LITERAL_BYTES).try_for_each(|buffer| emit(DeltaOp::Data(buffer)))
}

fn fill(from: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut got = 0;
    while got < buffer.len() {
        match from.read(&mut buffer[got..]) {
            Ok(0) => break,
            Ok(n) => got += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(got)
}

fn strong(block: &[u8]) -> [u8; 16] {
    let mut short = [0; 16];
    short.copy_from_slice(&blake3::hash(block).as_bytes()[..16]);
    short
}

/// Bits of the filter in front of the table. Most positions match nothing and are rejected by one read of cached
/// memory.
const FILTER_BITS: u32 = 20;

struct Index {
    filter: Vec<u64>,
    blocks: HashMap<u32, Vec<(usize, [u8; 16])>>,
}

enum BlockMatch {
    Block(usize),
    FalseMatch,
    NoMatch,
}

/// Maximum number of blocks compared per weak checksum: a file of zeros has many equal blocks.
const MAX_CANDIDATES: usize = 8;

impl Index {
    fn new(signature: &Signature) -> Self {
        let mut index = Self { filter: vec![0; 1 << (FILTER_BITS - 6)], blocks: HashMap::new() };
        for (number, sum) in signature.sums.iter().enumerate() {
            let candidates = index.blocks.entry(sum.weak).or_default();
            if candidates.len() < MAX_CANDIDATES && !candidates.iter().any(|(_, strong)| *strong == sum.strong) {
                candidates.push((number, sum.strong));
            }
            let bit = filter_bit(sum.weak);
            index.filter[bit / 64] |= 1 << (bit % 64);
        }
        index
    }

    fn find(&self, sum: u32, window: &[u8]) -> BlockMatch {
        let bit = filter_bit(sum);
        if self.filter[bit / 64] & (1 << (bit % 64)) == 0 {
            return BlockMatch::NoMatch;
        }
        let Some(candidates) = self.blocks.get(&sum) else { return BlockMatch::NoMatch };
        let strong = strong(window);
        candidates.iter().find(|(_, s)| *s == strong).map_or(BlockMatch::FalseMatch, |(number, _)| BlockMatch::Block(*number))
    }
}

fn filter_bit(sum: u32) -> usize {
    (sum.wrapping_mul(0x9e37_79b1) >> (32 - FILTER_BITS)) as usize
}

/// The rolling checksum of Adler-32 over a sliding window.
struct Rolling {
    a: u32,
    b: u32,
}

impl Rolling {
    fn of(window: &[u8]) -> Self {
        let (mut a, mut b) = (0u32, 0u32);
        for byte in window {
            a = a.wrapping_add(u32::from(*byte));
            b = b.wrapping_add(a);
        }
        Self { a, b }
    }

    fn roll(&mut self, out: u8, next: u8, block: usize) {
        self.a = self.a.wrapping_sub(u32::from(out)).wrapping_add(u32::from(next));
        self.b = self.b.wrapping_sub(u32::from(out).wrapping_mul(block as u32)).wrapping_add(self.a);
    }

    fn value(&self) -> u32 {
        (self.a & 0xffff) | (self.b << 16)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn rebuilt(old: &[u8], new: &[u8]) -> (Vec<u8>, usize) {
        let signature = compute_signature(&mut &old[..], old.len() as u64).unwrap();
        let (mut out, mut sent) = (Vec::new(), 0);
        compute_delta(&signature, &mut &new[..], |op| {
            match op {
                DeltaOp::Data(bytes) => {
                    assert!(bytes.len() <= LITERAL_BYTES);
                    sent += bytes.len();
                    out.extend_from_slice(bytes);
                }
                DeltaOp::Copy { offset, length } => out.extend_from_slice(&old[offset as usize..(offset + length) as usize]),
            }
            Ok(())
        })
        .unwrap();
        (out, sent)
    }

    fn noise(length: usize, seed: u64) -> Vec<u8> {
        let mut bytes = vec![0; length];
        blake3::Hasher::new().update(&seed.to_be_bytes()).finalize_xof().fill(&mut bytes);
        bytes
    }

    #[test]
    fn a_small_edit_of_a_large_file_sends_little_data() {
        let old = noise(3 << 20, 1);
        let mut new = old.clone();
        new.splice(1_000_000..1_000_010, noise(77, 2));
        new.extend_from_slice(b"more");
        let (out, sent) = rebuilt(&old, &new);
        assert!(out == new && sent < 100_000, "{sent}");
        let zeros = vec![0; 5 << 20];
        let (out, sent) = rebuilt(&zeros[..4 << 20], &zeros);
        assert!(out == zeros && sent < 20_000, "{sent}");
    }

    #[test]
    fn the_number_of_blocks_is_bounded_for_any_file_size() {
        for length in [1, 70_000, 1 << 30, 5 << 30, 200 << 30] {
            let block = u64::from(block_size(length));
            assert!(length / block <= MAX_BLOCKS as u64, "{length}");
        }
    }

    #[test]
    fn colliding_weak_sums_end_the_search_without_losing_data() {
        let window = vec![0; 1024];
        let signature = Signature { block: 1024, sums: vec![BlockSum { weak: Rolling::of(&window).value(), strong: [9; 16] }] };
        let new = vec![0; 200_000];
        let mut out = Vec::new();
        compute_delta(&signature, &mut &new[..], |op| {
            if let DeltaOp::Data(bytes) = op {
                out.extend_from_slice(bytes);
            }
            Ok(())
        })
        .unwrap();
        assert!(out == new);
    }

    proptest! {
        #[test]
        fn applying_a_delta_reproduces_the_new_version(old in 0usize..200_000, cuts in prop::collection::vec((any::<u32>(), any::<u32>(), 0usize..5000), 0..6)) {
            let old = noise(old, 3);
            let mut new = old.clone();
            for (at, length, more) in cuts {
                let at = at as usize % (new.len() + 1);
                let end = (at + length as usize % 40_000).min(new.len());
                new.splice(at..end, noise(more, 4));
            }
            prop_assert_eq!(rebuilt(&old, &new).0, new);
        }
    }
}
