//! Runs the fuzz targets without a fuzzer: over the checked-in inputs and some thousand mutations of them, the same
//! ones each time.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// A small random number generator with a fixed seed, so that a failure is the same on every machine.
struct Random(u64);

impl Random {
    /// SplitMix64.
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }
}

/// Bytes with a special meaning in many formats.
const SPECIAL_BYTES: &[u8] = b"\0\x01\x07\x18\x1b\x7f\x80\x9b\xc2\xff\r\n\t \"'\\/.,:;-=+*?[]{}()<>%&#0179azAZ_";

fn mutate(input: &mut Vec<u8>, others: &[Vec<u8>], random: &mut Random) {
    let at = random.below(input.len() + 1);
    match random.below(8) {
        0 if at < input.len() => input[at] ^= 1 << random.below(8),
        1 if at < input.len() => input[at] = SPECIAL_BYTES[random.below(SPECIAL_BYTES.len())],
        2 => input.insert(at, SPECIAL_BYTES[random.below(SPECIAL_BYTES.len())]),
        3 if at < input.len() => {
            let end = (at + 1 + random.below(16)).min(input.len());
            input.drain(at..end);
        }
        4 => input.truncate(at),
        5 => {
            // Duplicates a part of the input.
            let end = (at + random.below(32)).min(input.len());
            let piece = input[at..end].to_vec();
            let to = random.below(input.len() + 1);
            input.splice(to..to, piece);
        }
        6 => {
            let other = &others[random.below(others.len())];
            let (from, to) = (random.below(other.len() + 1), random.below(other.len() + 1));
            input.splice(at..at, other[from.min(to)..from.max(to)].iter().copied());
        }
        _ => {
            if let Some(byte) = input.get_mut(at) {
                *byte = random.next() as u8;
            }
        }
    }
}

fn run_target(target: &str, run: fn(&[u8]), mutations: usize) {
    let seeds: Vec<Vec<u8>> = cobox_fuzz::corpus(target).iter().map(|file| std::fs::read(file).unwrap()).collect();
    assert!(!seeds.is_empty(), "corpus/{target} is empty");
    let one = |input: &[u8], number: usize| {
        if catch_unwind(AssertUnwindSafe(|| run(input))).is_err() {
            panic!("input {number} of {target} failed (see above): {:?}", input.escape_ascii().to_string());
        }
    };
    seeds.iter().for_each(|seed| one(seed, 0));
    let mut random = Random(target.len() as u64);
    for number in 1..=mutations {
        let mut input = seeds[random.below(seeds.len())].clone();
        for _ in 0..=random.below(6) {
            mutate(&mut input, &seeds, &mut random);
        }
        one(&input, number);
    }
}

macro_rules! targets {
    ($($name:ident $target:ident $mutations:literal;)*) => {$(
        #[test]
        fn $name() {
            run_target(stringify!($target), cobox_fuzz::$target::run, $mutations);
        }
    )*};
}

targets! {
    an_archive_never_leaves_its_directory archive 1500;
    a_deployments_stream_parses_the_same_for_any_chunks conversations 5000;
    any_cursor_is_rejected_or_valid cursors 3000;
    any_frame_is_accepted_or_rejected_with_a_short_error frames 20000;
    a_path_has_exactly_the_bytes_that_were_sent paths 20000;
    a_pattern_matches_only_existing_files patterns 1500;
    a_range_is_within_the_file ranges 20000;
    a_sync_message_is_decoded_exactly_or_rejected sync 20000;
    terminal_output_keeps_its_offsets_for_any_chunks terminal 1500;
    no_modified_token_is_accepted tokens 3000;
}
