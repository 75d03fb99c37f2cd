//! Finds, in one pass over a terminal's output, the sequences that some viewers must not get, and the offsets at which
//! a screen may be cut.
//!
//! A terminal accepts more than one spelling of a sequence (`ESC [` and U+009B, leading zeros, control characters in
//! between), so the states here follow what terminals do, not what programs usually write. In doubt a sequence is
//! hidden: a viewer that misses a color is better off than one whose terminal types into the shell.
//!
//! The single bytes 0x80 to 0x9f are not treated as controls: terminals get UTF-8, in which these are parts of
//! characters or errors. A sequence that would switch a terminal away from UTF-8, and so make them controls, is hidden
//! from every viewer that doesn't allow it.

mod classify;

use memchr::memchr3;

use crate::annotations::{SequenceKinds, Span};

/// Maximum size of the beginning of a sequence that decides its kind. Colors with many parameters stay below it.
const MAX_HEADER_BYTES: usize = 256;
/// The same limit including all controls that may occur within the sequence. Nothing of a sequence is shown before its
/// kind is known.
const MAX_UNDECIDED_BYTES: u64 = 4 * MAX_HEADER_BYTES as u64;
/// `ESC k`, a title that few terminals support. Its end is often missing in binary output, which must not hide the
/// rest.
const MAX_SCREEN_TITLE_BYTES: u64 = 256;
/// Maximum size of a shell mark; those of our shells are short.
const MAX_MARK_BYTES: usize = 128;
/// The OSC number of shell marks. Terminals don't use it.
pub const MARK_NUMBER: u32 = 7717;

const BEL: u8 = 0x07;
const ENQ: u8 = 0x05;
const CAN: u8 = 0x18;
const SUB: u8 = 0x1a;
const ESC: u8 = 0x1b;
/// First byte of U+0080 to U+009F in UTF-8, which are controls of one character.
const C1_LEAD: u8 = 0xc2;

/// A mark that the shell sends to boxd in its output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShellMark {
    /// Offsets of its beginning and its end.
    pub from: u64,
    pub to: u64,
    /// The mark's content. Untrusted: any program that can print can send it.
    pub payload: Vec<u8>,
}

/// The result of scanning a chunk of output.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScanResult {
    pub spans: Vec<Span>,
    /// Offset of a sequence whose kind isn't known yet.
    pub undecided: Option<u64>,
    pub marks: Vec<ShellMark>,
    /// Ranges that are neither text nor cursor movement.
    pub(crate) strings: Vec<(u64, u64)>,
    /// Up to this offset nothing is unfinished, except perhaps a character.
    pub(crate) ground: u64,
    /// An unfinished string, where it begins, and which viewers don't get it.
    pub(crate) open_string: Option<OpenString>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OpenString {
    pub from: u64,
    pub class: StringClass,
    pub kinds: SequenceKinds,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StringClass {
    /// Also ends with BEL.
    Osc,
    /// DCS, APC, PM and SOS.
    Other,
    /// A control sequence that is too long to be a real one.
    Csi,
    ScreenTitle,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Ground,
    /// After ESC. Contains the kinds of the string that a following `\` would close.
    Escape {
        closes: SequenceKinds,
    },
    EscapeIntermediate,
    Csi,
    OscNumber,
    /// A command that may query a color.
    OscQuestion,
    OscMark,
    DcsHeader,
    ApcHeader,
    /// The control data of kitty's graphics, up to the first semicolon.
    Graphics,
    String {
        class: StringClass,
        kinds: SequenceKinds,
    },
}

pub struct Scanner {
    /// Offset of the next byte.
    at: u64,
    state: State,
    /// Offset of the unfinished sequence.
    from: u64,
    header: Vec<u8>,
    /// Whether the last byte may be the first half of a C1 control.
    is_after_c1_lead: bool,
}

impl Default for Scanner {
    fn default() -> Self {
        Self { at: 0, state: State::Ground, from: 0, header: Vec::new(), is_after_c1_lead: false }
    }
}

impl Scanner {
    pub fn scan(&mut self, bytes: &[u8]) -> ScanResult {
        let mut found = ScanResult::default();
        let mut rest = bytes;
        while !rest.is_empty() {
            let skip = if self.is_after_c1_lead { 0 } else { self.skippable(rest) };
            self.at += skip as u64;
            rest = &rest[skip..];
            if let Some((byte, after)) = rest.split_first() {
                self.step(*byte, &mut found);
                self.at += 1;
                rest = after;
            }
        }
        self.end_chunk(&mut found);
        found
    }

    /// Whether the output so far ends within a string sequence that a viewer without these kinds is shown. A terminal treats all
    /// further output as part of that string until a string terminator (`ESC \`).
    pub fn shows_open_string(&self, hides: SequenceKinds) -> bool {
        match self.state {
            State::String { kinds, .. } => !kinds.intersects(hides),
            State::OscMark => !SequenceKinds::MARK.intersects(hides),
            _ => false,
        }
    }

    /// Number of bytes that change nothing in this state.
    fn skippable(&self, rest: &[u8]) -> usize {
        match self.state {
            State::Ground => memchr3(ESC, ENQ, C1_LEAD, rest).unwrap_or(rest.len()),
            State::String { class: StringClass::Osc | StringClass::Other, .. } => {
                rest.iter().position(|b| matches!(*b, ESC | BEL | CAN | SUB | C1_LEAD)).unwrap_or(rest.len())
            }
            _ => 0,
        }
    }

    /// Records, at the end of a chunk, what is known about an unfinished sequence.
    fn end_chunk(&self, found: &mut ScanResult) {
        let lead = self.is_after_c1_lead.then(|| self.at - 1);
        // A byte that may be the first half of a control doesn't belong to the string yet: that control would end the
        // string.
        let known = lead.unwrap_or(self.at);
        found.ground = self.at;
        match self.state {
            State::Ground => {}
            State::String { class, kinds } => {
                self.add_span(self.from, known, kinds, found);
                found.strings.push((self.from, known));
                found.ground = self.from;
                found.open_string = Some(OpenString { from: self.from, class, kinds });
            }
            State::OscMark => {
                self.add_span(self.from, known, SequenceKinds::MARK, found);
                found.strings.push((self.from, known));
                found.ground = self.from;
                found.open_string = Some(OpenString { from: self.from, class: StringClass::Osc, kinds: SequenceKinds::MARK });
            }
            _ => {
                found.undecided = Some(self.from);
                found.ground = self.from;
            }
        }
        if let Some(lead) = lead {
            found.undecided = Some(found.undecided.map_or(lead, |other| other.min(lead)));
            found.ground = found.ground.min(lead);
        }
    }

    fn step(&mut self, byte: u8, found: &mut ScanResult) {
        if std::mem::take(&mut self.is_after_c1_lead) && (0x80..=0x9f).contains(&byte) {
            self.c1(byte, found);
            return;
        }
        self.is_after_c1_lead = byte == C1_LEAD;
        if self.at - self.from >= MAX_UNDECIDED_BYTES {
            self.treat_as_hidden();
        }
        match self.state {
            State::Ground => match byte {
                ESC => self.begin(self.at, State::Escape { closes: SequenceKinds::NONE }),
                ENQ => self.add_span(self.at, self.at + 1, SequenceKinds::QUERY, found),
                _ => {}
            },
            State::Escape { closes } => self.escape(byte, closes, found),
            State::EscapeIntermediate => match byte {
                0x30..=0x7e => self.end_sequence(classify::escape(&self.header), found),
                CAN | SUB => self.state = State::Ground,
                ESC => self.begin(self.at, State::Escape { closes: SequenceKinds::NONE }),
                _ => {}
            },
            State::Csi => self.csi(byte, found),
            State::OscNumber | State::OscQuestion | State::OscMark => self.osc(byte, found),
            State::DcsHeader => self.dcs(byte),
            State::ApcHeader if byte == b'G' => self.state = State::Graphics,
            State::ApcHeader => {
                self.state = State::String { class: StringClass::Other, kinds: SequenceKinds::NONE };
                self.string(byte, StringClass::Other, SequenceKinds::NONE, found);
            }
            State::Graphics => self.graphics(byte, found),
            State::String { class, kinds } => self.string(byte, class, kinds, found),
        }
    }

    /// Controls within a sequence don't end it, so there could be any number of them, and viewers would wait for all of
    /// them. No program uses a sequence of this length: it is treated as one that must be hidden.
    fn treat_as_hidden(&mut self) {
        let class = match self.state {
            State::Escape { .. } | State::EscapeIntermediate | State::Csi => StringClass::Csi,
            State::OscNumber | State::OscQuestion => StringClass::Osc,
            State::DcsHeader | State::ApcHeader | State::Graphics => StringClass::Other,
            State::Ground | State::OscMark | State::String { .. } => return,
        };
        self.state = State::String { class, kinds: SequenceKinds::ALL };
    }

    fn begin(&mut self, from: u64, state: State) {
        self.from = from;
        self.state = state;
        self.header.clear();
    }

    fn escape(&mut self, byte: u8, closes: SequenceKinds, found: &mut ScanResult) {
        match byte {
            b'[' => self.state = State::Csi,
            b']' => self.state = State::OscNumber,
            b'P' => self.state = State::DcsHeader,
            b'_' => self.state = State::ApcHeader,
            b'X' | b'^' => self.state = State::String { class: StringClass::Other, kinds: SequenceKinds::NONE },
            b'k' => self.state = State::String { class: StringClass::ScreenTitle, kinds: SequenceKinds::TITLE },
            // Queries the terminal's identity.
            b'Z' => self.end_sequence(SequenceKinds::QUERY, found),
            b'\\' => self.end_sequence(closes, found),
            0x20..=0x2f => {
                self.header.push(byte);
                self.state = State::EscapeIntermediate;
            }
            0x30..=0x7e | CAN | SUB => self.state = State::Ground,
            ESC => self.begin(self.at, State::Escape { closes: SequenceKinds::NONE }),
            _ => {}
        }
    }

    /// A control of one character, in any state: it ends the unfinished sequence and may begin another.
    fn c1(&mut self, byte: u8, found: &mut ScanResult) {
        let lead = self.at - 1;
        let kinds = self.end_string(lead, found);
        match byte {
            0x9c => {
                self.add_span(lead, self.at + 1, kinds, found);
                self.state = State::Ground;
            }
            0x90 => self.begin(lead, State::DcsHeader),
            0x98 | 0x9e => self.begin(lead, State::String { class: StringClass::Other, kinds: SequenceKinds::NONE }),
            0x9a => {
                self.add_span(lead, self.at + 1, SequenceKinds::QUERY, found);
                self.state = State::Ground;
            }
            0x9b => self.begin(lead, State::Csi),
            0x9d => self.begin(lead, State::OscNumber),
            0x9f => self.begin(lead, State::ApcHeader),
            _ => self.state = State::Ground,
        }
    }

    fn csi(&mut self, byte: u8, found: &mut ScanResult) {
        match byte {
            0x40..=0x7e => self.end_sequence(classify::csi(&self.header, byte), found),
            0x20..=0x3f if self.header.len() < MAX_HEADER_BYTES => self.header.push(byte),
            0x20..=0x3f => self.state = State::String { class: StringClass::Csi, kinds: SequenceKinds::QUERY.with(SequenceKinds::TITLE) },
            CAN | SUB => self.state = State::Ground,
            ESC => self.begin(self.at, State::Escape { closes: SequenceKinds::NONE }),
            _ => {}
        }
    }

    fn osc(&mut self, byte: u8, found: &mut ScanResult) {
        match byte {
            BEL | CAN | SUB => {
                self.end_string(self.at + 1, found);
                self.state = State::Ground;
            }
            ESC => {
                let closes = self.end_string(self.at, found);
                self.begin(self.at, State::Escape { closes });
            }
            // Terminals ignore these within a command.
            0x00..=0x1f | 0x7f => {}
            b';' if self.state == State::OscNumber => {
                let number = classify::number(&self.header);
                self.header.clear();
                self.state = match number {
                    Some(MARK_NUMBER) => State::OscMark,
                    number if classify::may_query(number) => State::OscQuestion,
                    number => State::String { class: StringClass::Osc, kinds: classify::osc(number) },
                };
            }
            b'0'..=b'9' if self.state == State::OscNumber && self.header.len() < MAX_HEADER_BYTES => self.header.push(byte),
            _ if self.state == State::OscNumber => {
                // An old spelling of titles, or no number at all.
                let kinds = match byte {
                    b'l' | b'L' | b'I' => SequenceKinds::TITLE,
                    b'0'..=b'9' => SequenceKinds::ALL,
                    _ => SequenceKinds::NONE,
                };
                self.state = State::String { class: StringClass::Osc, kinds };
            }
            _ if self.state == State::OscMark => {
                if self.header.len() < MAX_MARK_BYTES {
                    self.header.push(byte);
                }
            }
            _ if self.header.len() < MAX_HEADER_BYTES => self.header.push(byte),
            _ => self.state = State::String { class: StringClass::Osc, kinds: SequenceKinds::QUERY },
        }
    }

    fn dcs(&mut self, byte: u8) {
        match byte {
            0x40..=0x7e => self.state = State::String { class: StringClass::Other, kinds: classify::dcs(&self.header, byte) },
            0x20..=0x3f if self.header.len() < MAX_HEADER_BYTES => self.header.push(byte),
            0x20..=0x3f => self.state = State::String { class: StringClass::Other, kinds: SequenceKinds::ALL },
            CAN | SUB => self.state = State::Ground,
            ESC => self.begin(self.at, State::Escape { closes: SequenceKinds::NONE }),
            _ => {}
        }
    }

    fn graphics(&mut self, byte: u8, found: &mut ScanResult) {
        match byte {
            b';' => self.state = State::String { class: StringClass::Other, kinds: classify::graphics(&self.header) },
            CAN | SUB => {
                self.end_string(self.at + 1, found);
                self.state = State::Ground;
            }
            ESC => {
                let closes = self.end_string(self.at, found);
                self.begin(self.at, State::Escape { closes });
            }
            _ if self.header.len() < MAX_HEADER_BYTES => self.header.push(byte),
            _ => self.state = State::String { class: StringClass::Other, kinds: SequenceKinds::ALL },
        }
    }

    fn string(&mut self, byte: u8, class: StringClass, kinds: SequenceKinds, found: &mut ScanResult) {
        let is_over = match class {
            StringClass::Osc => matches!(byte, BEL | CAN | SUB),
            StringClass::Other => matches!(byte, CAN | SUB),
            StringClass::Csi => matches!(byte, 0x40..=0x7e | CAN | SUB),
            StringClass::ScreenTitle => matches!(byte, 0x00..=0x1a | 0x1c..=0x1f) || self.at - self.from > MAX_SCREEN_TITLE_BYTES,
        };
        if byte == ESC {
            let closes = self.end_string(self.at, found);
            self.begin(self.at, State::Escape { closes });
        } else if is_over {
            // The byte that ended a title early is a control of its own, which all viewers get.
            let to = if class == StringClass::ScreenTitle { self.at } else { self.at + 1 };
            self.add_span(self.from, to, kinds, found);
            found.strings.push((self.from, to));
            self.state = State::Ground;
            if byte == ENQ {
                self.add_span(self.at, self.at + 1, SequenceKinds::QUERY, found);
            }
        }
    }

    /// Ends a string, if there is one, before `to`. Returns the kinds that it was hidden for.
    fn end_string(&mut self, to: u64, found: &mut ScanResult) -> SequenceKinds {
        let kinds = match self.state {
            State::String { kinds, .. } => kinds,
            State::Graphics => classify::graphics(&self.header),
            State::OscQuestion if classify::is_query(&self.header) => SequenceKinds::QUERY,
            State::OscQuestion | State::OscNumber => SequenceKinds::NONE,
            State::OscMark => {
                found.marks.push(ShellMark { from: self.from, to, payload: self.header.clone() });
                SequenceKinds::MARK
            }
            _ => return SequenceKinds::NONE,
        };
        self.add_span(self.from, to, kinds, found);
        found.strings.push((self.from, to));
        kinds
    }

    fn end_sequence(&mut self, kinds: SequenceKinds, found: &mut ScanResult) {
        self.add_span(self.from, self.at + 1, kinds, found);
        self.state = State::Ground;
    }

    fn add_span(&self, from: u64, to: u64, kinds: SequenceKinds, found: &mut ScanResult) {
        if !kinds.is_empty() && from < to {
            found.spans.push(Span { from, to, kinds });
        }
    }
}
