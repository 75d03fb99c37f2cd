//! A terminal's output in chunks of any size: every view keeps all offsets, hides the same bytes for any chunks, and
//! the screen survives.

use cobox_stream::{Limits, Log, Read, Scanner, Screen, SequenceKinds};

use crate::choose;

/// Enough for any input to contain both wide and narrow rows.
const MAX_OUTPUT_BYTES: usize = 16 * 1024;
const RING_BYTES: usize = 1024;
/// The screens here are small, and so are their keyframes.
const MAX_KEYFRAME_BYTES: usize = 256 * 1024;

/// The first four bytes are the chunk size, the hidden kinds and the screen size.
pub fn run(data: &[u8]) {
    let ([cut, hides, cols, rows], output) = choose::<4>(data);
    let output = &output[..output.len().min(MAX_OUTPUT_BYTES)];
    let hides = [SequenceKinds::QUERY, SequenceKinds::CLIPBOARD, SequenceKinds::TITLE, SequenceKinds::MARK]
        .into_iter()
        .enumerate()
        .filter(|(i, _)| hides >> i & 1 == 1)
        .fold(SequenceKinds::NONE, |all, (_, kind)| all.with(kind));
    let cut = usize::from(cut).max(1);
    let whole = view(output, output.len().max(1), hides);
    assert_eq!(whole.len(), output.len(), "every byte has its offset");
    assert!(whole.iter().zip(output).all(|(shown, printed)| shown == printed || *shown == 0), "every byte is hidden or unchanged");
    assert_eq!(view(output, cut, hides), whole, "the view must not depend on the chunk size");
    draw(output, cut, hides, u16::from(cols % 40) + 1, u16::from(rows % 12) + 1);
    ring(output, cut, hides);
}

fn view(output: &[u8], cut: usize, hides: SequenceKinds) -> Vec<u8> {
    let log = Log::new(Limits { ring_bytes: MAX_OUTPUT_BYTES, writer_waits: false });
    let (mut scanner, mut reader, mut seen) = (Scanner::default(), log.reader(0), Vec::new());
    reader.set_hidden(hides);
    let mut take = |reader: &mut cobox_stream::Reader| {
        while let Read::Chunk(chunk) = reader.read(cut + 3) {
            assert_eq!(chunk.offset, seen.len() as u64);
            seen.extend_from_slice(&chunk.bytes);
        }
    };
    for piece in output.chunks(cut) {
        assert!(!log.append_scanned(piece, &scanner.scan(piece)), "no reader is waiting");
        take(&mut reader);
    }
    log.finish();
    take(&mut reader);
    seen
}

fn draw(output: &[u8], cut: usize, hides: SequenceKinds, cols: u16, rows: u16) {
    let (mut scanner, mut screen, mut at) = (Scanner::default(), Screen::new(cols, rows), 0);
    for (number, piece) in output.chunks(cut).enumerate() {
        let found = scanner.scan(piece);
        at += piece.len() as u64;
        for span in &found.spans {
            assert!(span.from < span.to && span.to <= at, "{span:?} at {at}");
        }
        assert!(found.undecided.is_none_or(|from| from <= at));
        screen.feed(piece, &found);
        if number % 16 == 0 {
            screen.resize(rows + number as u16 % 3, cols);
            let keyframe = screen.keyframe(hides);
            assert!(keyframe.offset <= at && keyframe.ansi.len() <= MAX_KEYFRAME_BYTES, "{} at {at}", keyframe.offset);
        }
    }
    assert!(screen.keyframe(hides).offset <= at);
}

/// A ring that is too small: gaps are reported, and the rest is exact.
fn ring(output: &[u8], cut: usize, hides: SequenceKinds) {
    let log = Log::new(Limits { ring_bytes: RING_BYTES, writer_waits: false });
    let mut scanner = Scanner::default();
    let (mut late, mut next) = (log.reader(0), 0);
    late.set_hidden(hides);
    for (number, piece) in output.chunks(cut).enumerate() {
        assert!(!log.append_scanned(piece, &scanner.scan(piece)), "no reader is waiting");
        log.resize(80, 24 + number as u16 % 4);
        if number % 64 == 63 {
            follow(&mut late, &mut next, output);
        }
    }
    log.finish();
    follow(&mut late, &mut next, output);
    assert_eq!(next, output.len() as u64);
}

fn follow(reader: &mut cobox_stream::Reader, next: &mut u64, output: &[u8]) {
    loop {
        while reader.next_size().is_some() {}
        match reader.read(100) {
            Read::Chunk(chunk) => {
                assert_eq!(chunk.offset, *next);
                let printed = &output[*next as usize..][..chunk.bytes.len()];
                assert!(chunk.bytes.iter().zip(printed).all(|(shown, printed)| shown == printed || *shown == 0));
                *next += chunk.bytes.len() as u64;
            }
            Read::Gap { from, to } => {
                assert!(from == *next && to > from);
                *next = to;
            }
            Read::End | Read::Pending => return,
        }
    }
}
