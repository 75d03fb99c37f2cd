//! Screens and filtered views, each compared with the plain way to the same result: all bytes fed to one emulator, or
//! one filter over all output.
#![cfg(not(loom))]

use cobox_stream::{Keyframe, Limits, Log, Read, ScanResult, Scanner, Screen, SequenceKinds};
use proptest::prelude::*;

const COLS: u16 = 12;
const ROWS: u16 = 5;

fn piece() -> impl Strategy<Value = Vec<u8>> {
    let csi = "\x1b\\[[0-9]{0,2}(;[0-9]{1,2})?[ABCDEFGHJKLMPSTXdm@]";
    let bytes = |s: &'static str| Just(s.as_bytes().to_vec());
    prop_oneof![
        8 => "[ -~]{0,20}".prop_map(String::into_bytes),
        3 => "[äß€漢字🙂e\u{301}]{1,6}".prop_map(String::into_bytes),
        4 => bytes("\r\n"),
        2 => "[\r\n\t\x08]".prop_map(String::into_bytes),
        6 => csi.prop_map(String::into_bytes),
        1 => "\x1b\\[[1-5];[1-5]r".prop_map(String::into_bytes),
        1 => "\x1b\\[\\?(1|9|25|47|1000|1002|1003|1005|1006|1049|2004)[hl]".prop_map(String::into_bytes),
        1 => "\x1b[78=>Mc]".prop_map(String::into_bytes),
        1 => "\x1b\\](0|2|52|4|10|133|8);[a-z?;]{0,12}(\x07|\x1b\\\\)".prop_map(String::into_bytes),
        1 => "\x1bP[0-9]{0,2}[$+]?[qtm][a-z;]{0,8}\x1b\\\\".prop_map(String::into_bytes),
        1 => "\x1b\\[(6|5|c|>c|\\?6|14t|18t|\\?u)n?".prop_map(String::into_bytes),
        1 => prop::collection::vec(any::<u8>().prop_filter("no 8-bit controls in this test", |b| !(0x80..0xa0).contains(b) && ![0xc2, 0x1b].contains(b)), 0..3),
    ]
}

fn output() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(piece(), 0..60).prop_map(|pieces| pieces.concat())
}

fn chunks<'a>(bytes: &'a [u8], sizes: &'a [usize]) -> impl Iterator<Item = &'a [u8]> {
    let mut rest = bytes;
    let mut sizes = sizes.iter().cycle();
    std::iter::from_fn(move || {
        let size = (*sizes.next()?).clamp(1, rest.len().max(1)).min(rest.len());
        let (now, later) = rest.split_at(size);
        rest = later;
        (!now.is_empty()).then_some(now)
    })
}

fn shown(bytes: &[&[u8]]) -> vt100::Parser {
    let mut parser = vt100::Parser::new(ROWS, COLS, 0);
    bytes.iter().for_each(|b| parser.process(b));
    parser
}

fn text(bytes: Vec<u8>) -> String {
    String::from_utf8_lossy(&bytes).into_owned()
}

fn assert_same(a: &vt100::Parser, b: &vt100::Parser) -> Result<(), TestCaseError> {
    let (a, b) = (a.screen(), b.screen());
    prop_assert_eq!(a.contents(), b.contents());
    prop_assert_eq!(a.cursor_position(), b.cursor_position());
    prop_assert_eq!(text(a.attributes_formatted()), text(b.attributes_formatted()));
    prop_assert_eq!(text(a.contents_formatted()), text(b.contents_formatted()));
    prop_assert_eq!(a.input_mode_formatted(), b.input_mode_formatted());
    prop_assert_eq!(a.alternate_screen(), b.alternate_screen());
    Ok(())
}

/// In origin mode no terminal's cursor leaves the region. The emulator's cursor does after a command that sets only the
/// row.
fn is_where_a_terminal_cursor_would_be(parts: &[&[u8]]) -> bool {
    let row = |more: &[u8]| shown(&[parts, &[more]].concat()).screen().cursor_position().0;
    (row(b"\x1b[H")..=row(b"\x1b[999;1H")).contains(&row(b""))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]
    #[test]
    fn a_keyframe_with_later_output_shows_the_same_as_all_output(
        before in output(), after in output(), sizes in prop::collection::vec(1usize..40, 1..8)
    ) {
        let (mut scanner, mut screen) = (Scanner::default(), Screen::new(COLS, ROWS));
        for chunk in chunks(&before, &sizes) {
            let found = scanner.scan(chunk);
            screen.feed(chunk, &found);
        }
        let Keyframe { offset, ansi, .. } = screen.keyframe(SequenceKinds::NONE);
        prop_assert!(offset as usize <= before.len());
        let rest = &before[offset as usize..];
        // Reached by moving up or down from a full row; such a cursor ends up one column to the left.
        let hangs = |parser: &vt100::Parser| {
            let (row, col) = parser.screen().cursor_position();
            col >= COLS && !parser.screen().cell(row, COLS - 1).is_some_and(|c| c.has_contents() || c.is_wide_continuation())
        };
        let whole = &before[..offset as usize];
        for probe in [b"".as_slice(), b"\x1b8", b"\x1b[?47l", b"\x1b[?47l\x1b8"] {
            prop_assume!(!hangs(&shown(&[whole, probe])));
            prop_assume!(is_where_a_terminal_cursor_would_be(&[whole, probe]));
        }
        // Compared now and after any further output: regions, saved cursors and the other screen become visible only
        // then.
        assert_same(&shown(&[&ansi, rest]), &shown(&[&before]))?;
        assert_same(&shown(&[&ansi, rest, &after]), &shown(&[&before, &after]))?;
    }

    #[test]
    fn an_overlay_that_is_removed_leaves_no_trace(
        before in output(), after in output(), row in 0..ROWS
    ) {
        let (mut scanner, mut screen) = (Scanner::default(), Screen::new(COLS, ROWS));
        screen.feed(&before, &scanner.scan(&before));
        prop_assume!(screen.is_between_sequences());
        let plain = shown(&[&before]);
        prop_assume!(is_where_a_terminal_cursor_would_be(&[&before]));
        // Reached by moving up or down from a full row; such a cursor ends up one column to the left.
        let (at, col) = plain.screen().cursor_position();
        prop_assume!(col < COLS || plain.screen().cell(at, COLS - 1).is_some_and(|c| c.has_contents() || c.is_wide_continuation()));
        // There the last cell is written again, so that the cursor comes to stand behind it.
        prop_assume!(col < COLS || at != row);
        let covered = shown(&[&before, &screen.draw_overlay(row, "cobox: hi")]);
        prop_assert_eq!(covered.screen().rows(0, COLS).nth(usize::from(row)).unwrap(), "cobox: hi");
        prop_assert_eq!(covered.screen().cursor_position().0, plain.screen().cursor_position().0);
        // A row that wraps is not restored as such if only a part of the screen scrolls.
        prop_assume!(!plain.screen().row_wrapped(row) || !before.contains(&b'r'));
        let uncovered = [screen.draw_overlay(row, "cobox: hi"), screen.restore_row(row)].concat();
        assert_same(&shown(&[&before, &uncovered]), &plain)?;
        assert_same(&shown(&[&before, &uncovered, &after]), &shown(&[&before, &after]))?;
        assert_same(&shown(&[&before, b"\x1b[2Jsomething else\x1b[31m", &screen.redraw()]), &plain)?;
    }

    #[test]
    fn a_filtered_view_is_the_same_for_any_chunk_sizes(
        bytes in prop::collection::vec(prop_oneof![4 => piece(), 1 => prop::collection::vec(any::<u8>(), 0..6)], 0..40),
        sizes in prop::collection::vec(1usize..20, 1..8), reads in prop::collection::vec(1usize..20, 1..8), hides in 0u8..32
    ) {
        let bytes = bytes.concat();
        let hides = [SequenceKinds::QUERY, SequenceKinds::CLIPBOARD, SequenceKinds::TITLE, SequenceKinds::MARK, SequenceKinds::HOST]
            .into_iter().enumerate().filter(|(i, _)| hides >> i & 1 == 1).fold(SequenceKinds::NONE, |all, (_, kind)| all.with(kind));
        let in_one = filtered(&bytes, &[bytes.len().max(1)], &[usize::MAX], hides);
        prop_assert_eq!(in_one.len(), bytes.len());
        let in_pieces = filtered(&bytes, &sizes, &reads, hides);
        prop_assert_eq!(&in_pieces, &in_one);
        // Every byte is either hidden or unchanged.
        for (a, b) in in_one.iter().zip(&bytes) {
            prop_assert!(a == b || *a == 0);
        }
    }

    #[test]
    fn the_screen_survives_any_output(bytes in prop::collection::vec(any::<u8>(), 0..2000), cols in 1u16..20, rows in 1u16..6) {
        let (mut scanner, mut screen) = (Scanner::default(), Screen::new(cols, rows));
        for chunk in bytes.chunks(97) {
            let found = scanner.scan(chunk);
            screen.feed(chunk, &found);
            screen.resize(rows, cols);
            prop_assert!(screen.keyframe(SequenceKinds::ALL).ansi.len() < 100_000);
        }
    }
}

fn filtered(bytes: &[u8], sizes: &[usize], reads: &[usize], hides: SequenceKinds) -> Vec<u8> {
    let log = Log::new(Limits { ring_bytes: 1 << 20, writer_waits: false });
    let mut scanner = Scanner::default();
    let mut reader = log.reader(0);
    reader.set_hidden(hides);
    let mut out = Vec::new();
    let mut reads = reads.iter().cycle();
    for chunk in chunks(bytes, sizes) {
        assert!(!log.append_scanned(chunk, &scanner.scan(chunk)), "no reader is waiting");
        if let Some(max) = reads.next()
            && let Read::Chunk(chunk) = reader.read(*max)
        {
            assert_eq!(chunk.offset, out.len() as u64);
            out.extend_from_slice(&chunk.bytes);
        }
    }
    log.finish();
    while let Read::Chunk(chunk) = reader.read(64) {
        out.extend_from_slice(&chunk.bytes);
    }
    out
}

fn kinds_of(sequence: &[u8]) -> SequenceKinds {
    let found = Scanner::default().scan(&[b"a", sequence, b"z"].concat());
    let ScanResult { spans, undecided, .. } = found;
    assert_eq!(undecided, None, "{:?}", String::from_utf8_lossy(sequence));
    match spans.as_slice() {
        [] => SequenceKinds::NONE,
        all => {
            assert_eq!((all[0].from, all[all.len() - 1].to), (1, 1 + sequence.len() as u64), "{:?}", String::from_utf8_lossy(sequence));
            all.iter().fold(SequenceKinds::NONE, |kinds, span| kinds.with(span.kinds))
        }
    }
}

#[test]
fn sequences_are_classified_by_their_kind() {
    for query in [
        "\x05",
        "\x1b[c",
        "\x1b[0c",
        "\x1b[>c",
        "\x1b[=c",
        "\x1b[5n",
        "\x1b[6n",
        "\x1b[?6n",
        "\x1b[?996n",
        "\x1b[?2026$p",
        "\x1b[4$p",
        "\x1b[>q",
        "\x1b[>0q",
        "\x1b[?u",
        "\x1b]10;?\x07",
        "\x1b]11;?\x1b\\",
        "\x1b]12;?\x07",
        "\x1b]4;1;?\x07",
        "\x1b]4;1;red;2;?\x07",
        "\x1bP$qm\x1b\\",
        "\x1bP+q544e\x1b\\",
        "\x1b[14t",
        "\x1b[16t",
        "\x1b[18t",
        "\x1b[19t",
        "\x1b[21t",
        "\x1bZ",
        "\x1b[x",
        "\x1b_Gi=1,a=q;AAAA\x1b\\",
        "\u{9b}6n",
        "\u{9d}11;?\u{9c}",
        "\x1b[\r6n",
        "\x1b]011;?\x07",
        "\x1b[?1$p",
        "\x1b[?4m",
    ] {
        assert_eq!(kinds_of(query.as_bytes()), SequenceKinds::QUERY, "{query:?}");
    }
    for clipboard in [
        "\x1b]52;c;aGk=\x07",
        "\x1b]52;c;?\x1b\\",
        "\x1b]052;c;x\x07",
        "\x1b]5\n2;c;x\x07",
        "\x1bPtmux;\x1b\\",
        "\u{9d}52;c;x\u{9c}",
        "\x1bP0;1|17/41\x1b\\",
        "\x1b]1337;Copy=:x\x07",
        "\x1b]52;c;x\x18",
        "\x1b%@",
        "\x1b%G",
        "\x1b%/H",
    ] {
        assert_eq!(kinds_of(clipboard.as_bytes()), SequenceKinds::CLIPBOARD, "{clipboard:?}");
    }
    for title in [
        "\x1b]0;t\x07",
        "\x1b]1;t\x07",
        "\x1b]2;tä\x1b\\",
        "\x1b]30;t\x07",
        "\x1b]32;icon\x07",
        "\x1bkname\x1b\\",
        "\x1b[22;0t",
        "\x1b[23t",
        "\x1b]lname\x07",
        "\x1b[8;50;100t",
    ] {
        assert_eq!(kinds_of(title.as_bytes()), SequenceKinds::TITLE, "{title:?}");
    }
    for host in [
        "\x1b[i",
        "\x1b[5i",
        "\x1b[?5i",
        "\x1b[?4i",
        "\u{9b}5i",
        "\x1b]9;hello\x07",
        "\x1b]09;hello\x1b\\",
        "\x1b]9;4;1;50\x07",
        "\x1b]99;i=1:d=0;hello\x1b\\",
        "\x1b]777;notify;title;body\x07",
        "\x1b]5113;ac=send;id=x\x1b\\",
        "\x1b]46;/tmp/log\x07",
        "\x1b]51;[\"call\",\"Tapi_x\",[]]\x07",
        "\x1bP1000p%begin 1 1 0\x1b\\",
        "\u{90}01000p%exit\u{9c}",
        "\x1bP1000;1p\x1b\\",
        "\x1bP0pS(E)\x1b\\",
    ] {
        assert_eq!(kinds_of(host.as_bytes()), SequenceKinds::HOST, "{host:?}");
    }
    for file in ["\x1b_Gi=1,t=f,f=100;L2V0Yy9wYXNzd2Q=\x1b\\", "\x1b_Gt=t;eA==\x1b\\", "\x1b_Ga=T,t=s\x1b\\", "\u{9f}Gt=\x01f;x\u{9c}"] {
        assert_eq!(kinds_of(file.as_bytes()), SequenceKinds::QUERY.with(SequenceKinds::HOST), "{file:?}");
    }
    for image in ["\x1b_Gi=1,t=d,f=100;AAAA\x1b\\", "\x1b_Ga=T,f=24,s=1,v=1;AAAA\x1b\\", "\x1b_Gm=1;AAAA\x1b\\"] {
        assert_eq!(kinds_of(image.as_bytes()), SequenceKinds::QUERY, "{image:?}");
    }
    for plain in [
        "text ä€",
        "\x1b[1;31m",
        "\x1b[2J",
        "\x1b[?1049h",
        "\x1b[>4;2m",
        "\x1b]8;;http://x\x07",
        "\x1b]133;A\x07",
        "\x1b]11;#fff\x07",
        "\x1b]104\x07",
        "\x1bPq#0~~\x1b\\",
        "\x1b(B",
        "\x1b#8",
        "\x1b $",
        "\x1b7",
        "\x1b[4 q",
        "\x1b[!p",
        "\x1b[>4n",
    ] {
        assert_eq!(kinds_of(plain.as_bytes()), SequenceKinds::NONE, "{plain:?}");
    }
    let found = Scanner::default().scan(b"ab\x1b]7717;nonce;A\x07$ ");
    assert_eq!((found.marks[0].from, found.marks[0].to, &found.marks[0].payload[..]), (2, 17, b"nonce;A".as_slice()));
}

#[test]
fn a_clipboard_write_of_any_length_is_hidden_as_it_streams() {
    let log = Log::new(Limits { ring_bytes: 4096, writer_waits: false });
    let mut scanner = Scanner::default();
    let mut reader = log.reader(0);
    reader.set_hidden(SequenceKinds::CLIPBOARD);
    let mut seen = 0u64;
    for chunk in [b"\x1b]52;c;".to_vec()].into_iter().chain((0..1000).map(|_| vec![b'A'; 100])) {
        assert!(!log.append_scanned(&chunk, &scanner.scan(&chunk)), "no reader is waiting");
        match reader.read(1000) {
            Read::Chunk(got) => {
                assert!(got.bytes.iter().all(|b| *b == 0));
                seen += got.bytes.len() as u64;
            }
            other => panic!("{other:?}: no bytes should be held back"),
        }
    }
    assert_eq!(seen, log.head());
    assert!(!log.append_scanned(b"\x07visible", &scanner.scan(b"\x07visible")), "no reader is waiting");
    assert!(matches!(reader.read(100), Read::Chunk(c) if &c.bytes[..] == b"\0visible"));
}

#[test]
fn a_keyframe_within_a_string_longer_than_the_ring_marks_where_text_begins() {
    let (mut scanner, mut screen) = (Scanner::default(), Screen::new(COLS, ROWS));
    let mut say = |bytes: &[u8]| {
        let found = scanner.scan(bytes);
        screen.feed(bytes, &found);
        (screen.keyframe(SequenceKinds::NONE), screen.keyframe(SequenceKinds::CLIPBOARD))
    };
    say(b"hello");
    say(b"\x1b]52;c;");
    let (sees, does_not) = say(&vec![b'A'; 100_000]);
    assert_eq!(sees.offset, 100_012);
    // One viewer gets the rest of the string and its end, the other NULs.
    assert_eq!(shown(&[&sees.ansi, b"AAA\x07", b" world"]).screen().contents(), "hello world");
    assert_eq!(shown(&[&does_not.ansi, b"\0\0\0\0", b" world"]).screen().contents(), "hello world");
    let (end, _) = say(b"AAA\x07 world");
    assert_eq!(shown(&[&end.ansi]).screen().contents(), "hello world");
}

#[test]
fn a_keyframe_of_the_alternate_screen_contains_the_primary_one() {
    let (mut scanner, mut screen) = (Scanner::default(), Screen::new(COLS, ROWS));
    let bytes = b"$ vi\r\n\x1b[?1049h\x1b[?1h\x1b[2;4r\x1b[Htext";
    screen.feed(bytes, &scanner.scan(bytes));
    let keyframe = screen.keyframe(SequenceKinds::NONE);
    let viewer = shown(&[&keyframe.ansi]);
    assert!(viewer.screen().alternate_screen() && viewer.screen().application_cursor());
    assert_eq!(viewer.screen().contents(), "text");
    assert_eq!(shown(&[&keyframe.ansi, b"\x1b[?1049l"]).screen().contents(), "$ vi");
}

#[test]
fn a_screen_too_large_to_draw_is_empty_until_it_shrinks() {
    let (mut scanner, mut screen) = (Scanner::default(), Screen::new(1000, 1000));
    screen.feed(b"unseen", &scanner.scan(b"unseen"));
    assert!(!screen.keyframe(SequenceKinds::NONE).ansi.windows(6).any(|w| w == b"unseen"));
    screen.resize(COLS, ROWS);
    screen.feed(b"seen", &scanner.scan(b"seen"));
    let Keyframe { offset, cols, ansi, .. } = screen.keyframe(SequenceKinds::NONE);
    assert_eq!((offset, cols, shown(&[&ansi]).screen().contents().as_str()), (10, COLS, "seen"));
}

#[test]
fn text_between_any_number_of_hidden_sequences_is_visible() {
    let one = b"\x1b]0;title\x07text ";
    let all: Vec<u8> = one.repeat(5000);
    let shown = filtered(&all, &[64], &[4096], SequenceKinds::TITLE);
    assert_eq!(shown.len(), all.len(), "every offset is unchanged");
    let text: Vec<u8> = shown.into_iter().filter(|b| *b != 0).collect();
    assert_eq!(text, b"text ".repeat(5000));
}

#[test]
fn a_sequence_that_never_ends_does_not_hide_later_output() {
    for begin in ["\x1b", "\x1b(", "\x1b[", "\x1b[1;", "\x1bP", "\x1b]", "\x1b]4;", "\u{9b}"] {
        let (mut scanner, mut screen) = (Scanner::default(), Screen::new(COLS, ROWS));
        let mut feed = |bytes: &[u8]| {
            let found = scanner.scan(bytes);
            screen.feed(bytes, &found);
            found
        };
        feed(begin.as_bytes());
        let found = feed(&[b'\n'; 10_000]);
        assert_eq!(found.undecided, None, "{begin:?}");
        // CAN cancels every sequence.
        feed(b"\x18hello");
        assert!(String::from_utf8_lossy(&screen.keyframe(SequenceKinds::ALL).ansi).contains("hello"), "{begin:?}");
    }
}

#[test]
fn a_string_that_is_shown_and_has_not_ended_is_known_as_such() {
    for (output, hides, is_open) in [
        ("a\x1bXb", SequenceKinds::ALL, true),
        ("a\u{98}b", SequenceKinds::ALL, true),
        ("a\x1b^b", SequenceKinds::ALL, true),
        ("a\x1bXb\x1b\\", SequenceKinds::ALL, false),
        ("a\x1bXb\x1b[m", SequenceKinds::ALL, false),
        ("a\x1b]8;;http://x", SequenceKinds::ALL, true),
        ("a\x1b]8;;http://x\x07", SequenceKinds::ALL, false),
        ("a\x1b]0;title", SequenceKinds::ALL, false),
        ("a\x1b]0;title", SequenceKinds::NONE, true),
        ("a\x1bP1000p%begin", SequenceKinds::ALL, false),
        ("text", SequenceKinds::ALL, false),
        // Not shown before it is known what it is.
        ("a\x1b[1;3", SequenceKinds::ALL, false),
        ("a\x1b]11;", SequenceKinds::ALL, false),
    ] {
        for size in 1..=output.len() {
            let mut scanner = Scanner::default();
            output.as_bytes().chunks(size).for_each(|chunk| drop(scanner.scan(chunk)));
            assert_eq!(scanner.shows_open_string(hides), is_open, "{output:?} without {hides:?} in pieces of {size}");
        }
    }
}
