//! A terminal's output, cut anywhere: every view has every offset, what is hidden is hidden however it was cut, and the screen goes on.

use cobox_stream::{Kinds, Limits, Log, Read, Scanner, Screen};

use crate::choose;

/// A wide and a narrow row of any input's length fit.
const MAX_OUTPUT_BYTES: usize = 16 * 1024;
const RING_BYTES: usize = 1024;
/// The screens here are small, so their keyframes are.
const MAX_KEYFRAME_BYTES: usize = 256 * 1024;

/// The first four bytes: how it is cut, what is hidden, and the size.
pub fn run(data: &[u8]) {
    let ([cut, hides, cols, rows], output) = choose::<4>(data);
    let output = &output[..output.len().min(MAX_OUTPUT_BYTES)];
    let hides = [Kinds::QUERY, Kinds::CLIPBOARD, Kinds::TITLE, Kinds::MARK]
        .into_iter()
        .enumerate()
        .filter(|(i, _)| hides >> i & 1 == 1)
        .fold(Kinds::NONE, |all, (_, kind)| all.with(kind));
    let cut = usize::from(cut).max(1);
    let whole = view(output, output.len().max(1), hides);
    assert_eq!(whole.len(), output.len(), "every byte has its offset");
    assert!(whole.iter().zip(output).all(|(shown, printed)| shown == printed || *shown == 0), "hidden, or as it was printed");
    assert_eq!(view(output, cut, hides), whole, "however it was cut");
    draw(output, cut, hides, u16::from(cols % 40) + 1, u16::from(rows % 12) + 1);
    ring(output, cut, hides);
}

fn view(output: &[u8], cut: usize, hides: Kinds) -> Vec<u8> {
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
        assert!(!log.append_found(piece, &scanner.scan(piece)), "nobody waits");
        take(&mut reader);
    }
    log.finish();
    take(&mut reader);
    seen
}

fn draw(output: &[u8], cut: usize, hides: Kinds, cols: u16, rows: u16) {
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

/// A ring that is too small: what is missing is told, and what is not is exact.
fn ring(output: &[u8], cut: usize, hides: Kinds) {
    let log = Log::new(Limits { ring_bytes: RING_BYTES, writer_waits: false });
    let mut scanner = Scanner::default();
    let (mut late, mut next) = (log.reader(0), 0);
    late.set_hidden(hides);
    for (number, piece) in output.chunks(cut).enumerate() {
        assert!(!log.append_found(piece, &scanner.scan(piece)), "nobody waits");
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
