//! The targets without a fuzzer: over what is kept of inputs, and over some thousand changes of them, the same each time.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// A small generator of our own, so that a failure is the same on every machine.
struct Dice(u64);

impl Dice {
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

/// Bytes that parsers tend to have opinions about.
const TELLING: &[u8] = b"\0\x01\x07\x18\x1b\x7f\x80\x9b\xc2\xff\r\n\t \"'\\/.,:;-=+*?[]{}()<>%&#0179azAZ_";

fn change(input: &mut Vec<u8>, others: &[Vec<u8>], dice: &mut Dice) {
    let at = dice.below(input.len() + 1);
    match dice.below(8) {
        0 if at < input.len() => input[at] ^= 1 << dice.below(8),
        1 if at < input.len() => input[at] = TELLING[dice.below(TELLING.len())],
        2 => input.insert(at, TELLING[dice.below(TELLING.len())]),
        3 if at < input.len() => {
            let end = (at + 1 + dice.below(16)).min(input.len());
            input.drain(at..end);
        }
        4 => input.truncate(at),
        5 => {
            // A piece of it again.
            let end = (at + dice.below(32)).min(input.len());
            let piece = input[at..end].to_vec();
            let to = dice.below(input.len() + 1);
            input.splice(to..to, piece);
        }
        6 => {
            let other = &others[dice.below(others.len())];
            let (from, to) = (dice.below(other.len() + 1), dice.below(other.len() + 1));
            input.splice(at..at, other[from.min(to)..from.max(to)].iter().copied());
        }
        _ => {
            if let Some(byte) = input.get_mut(at) {
                *byte = dice.next() as u8;
            }
        }
    }
}

fn hold(target: &str, run: fn(&[u8]), changes: usize) {
    let seeds: Vec<Vec<u8>> = cobox_fuzz::corpus(target).iter().map(|file| std::fs::read(file).unwrap()).collect();
    assert!(!seeds.is_empty(), "corpus/{target} is empty");
    let one = |input: &[u8], number: usize| {
        if catch_unwind(AssertUnwindSafe(|| run(input))).is_err() {
            panic!("input {number} of {target} broke a promise (see above): {:?}", input.escape_ascii().to_string());
        }
    };
    seeds.iter().for_each(|seed| one(seed, 0));
    let mut dice = Dice(target.len() as u64);
    for number in 1..=changes {
        let mut input = seeds[dice.below(seeds.len())].clone();
        for _ in 0..=dice.below(6) {
            change(&mut input, &seeds, &mut dice);
        }
        one(&input, number);
    }
}

macro_rules! targets {
    ($($name:ident $target:ident $changes:literal;)*) => {$(
        #[test]
        fn $name() {
            hold(stringify!($target), cobox_fuzz::$target::run, $changes);
        }
    )*};
}

targets! {
    an_archive_never_leaves_its_directory archive 1500;
    a_deployments_stream_is_read_the_same_however_it_is_cut conversations 5000;
    a_cursor_of_anybodys_making_is_refused_or_good cursors 3000;
    a_frame_is_understood_or_refused_in_few_words frames 20000;
    a_path_is_exactly_the_bytes_that_were_sent paths 20000;
    a_pattern_finds_only_what_is_there patterns 1500;
    a_range_is_within_the_file ranges 20000;
    what_the_other_end_of_a_sync_says_is_understood_exactly_or_not_at_all sync 20000;
    terminal_output_keeps_its_offsets_however_it_is_cut terminal 1500;
    no_changed_token_is_accepted tokens 3000;
}
