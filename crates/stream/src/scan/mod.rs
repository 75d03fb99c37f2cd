//! Finds, in one pass over a terminal's output, the sequences that some viewers must not get, and where a screen may be cut.
//!
//! A terminal reads more than one spelling of a sequence (`ESC [` and U+009B, leading zeros, control characters in between), so the
//! states here follow what terminals do, not what programs usually write. Where it can't be sure it hides: a viewer that misses
//! a colour is better off than one whose terminal types into the shell.
//!
//! The single bytes 0x80 to 0x9f are no controls here: in UTF-8, which is what terminals are sent, they are parts of characters or
//! errors. What would take a terminal out of UTF-8, and make controls of them, reaches nobody who doesn't allow it.

mod kinds;

use memchr::memchr3;

use crate::notes::{Kinds, Span};

/// A sequence's beginning that decides what it is. Colours with many parameters stay below it.
const MAX_HEADER_BYTES: usize = 256;
/// The same with all the controls that may stand within it. Nothing of a sequence is shown before it is known what it is.
const MAX_UNDECIDED_BYTES: u64 = 4 * MAX_HEADER_BYTES as u64;
/// `ESC k`, a title that few terminals know: its end is often missing in binary output, which must not hide the rest.
const MAX_OLD_TITLE_BYTES: u64 = 256;
/// Our own words are short.
const MAX_MARK_BYTES: usize = 128;
/// The number our own marks use among the operating system commands. No terminal gives it a meaning.
pub const MARK_NUMBER: u32 = 7717;

const BEL: u8 = 0x07;
const ENQ: u8 = 0x05;
const CAN: u8 = 0x18;
const SUB: u8 = 0x1a;
const ESC: u8 = 0x1b;
/// What U+0080 to U+009F begin with in UTF-8: controls of one character.
const C1_LEAD: u8 = 0xc2;

/// A word of the shell to us.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mark {
    /// Where it begins and where it ends.
    pub from: u64,
    pub to: u64,
    /// What stood in it: whoever can print could have written it.
    pub payload: Vec<u8>,
}

/// What a piece of output holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    pub spans: Vec<Span>,
    /// Where a sequence begins whose kind isn't known yet.
    pub undecided: Option<u64>,
    pub marks: Vec<Mark>,
    /// Stretches that are no text and no cursor movement.
    pub(crate) strings: Vec<(u64, u64)>,
    /// Up to here nothing is unfinished but perhaps a character.
    pub(crate) ground: u64,
    /// A string that is under way, since when, and whom it is hidden from.
    pub(crate) inside: Option<Inside>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Inside {
    pub from: u64,
    pub class: Class,
    pub kinds: Kinds,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    /// Ends with BEL too.
    Osc,
    /// DCS, APC, PM and SOS.
    Other,
    /// A control sequence too long to be one.
    Csi,
    OldTitle,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Ground,
    /// After ESC. What it would close if `\` follows.
    Escape {
        closes: Kinds,
    },
    EscapeIntermediate,
    Csi,
    OscNumber,
    /// A command that may ask for a colour.
    OscQuestion,
    OscMark,
    DcsHeader,
    ApcHeader,
    /// The control data of kitty's graphics, up to the first semicolon.
    Graphics,
    String {
        class: Class,
        kinds: Kinds,
    },
}

pub struct Scanner {
    /// Offset of the next byte.
    at: u64,
    state: State,
    /// Where the sequence under way begins.
    from: u64,
    header: Vec<u8>,
    /// The last byte may be the first half of a C1 control.
    after_lead: bool,
}

impl Default for Scanner {
    fn default() -> Self {
        Self { at: 0, state: State::Ground, from: 0, header: Vec::new(), after_lead: false }
    }
}

impl Scanner {
    pub fn scan(&mut self, bytes: &[u8]) -> Found {
        let mut found = Found::default();
        let mut rest = bytes;
        while !rest.is_empty() {
            let skip = if self.after_lead { 0 } else { self.boring(rest) };
            self.at += skip as u64;
            rest = &rest[skip..];
            if let Some((byte, after)) = rest.split_first() {
                self.step(*byte, &mut found);
                self.at += 1;
                rest = after;
            }
        }
        self.close_piece(&mut found);
        found
    }

    /// How many bytes change nothing in this state.
    fn boring(&self, rest: &[u8]) -> usize {
        match self.state {
            State::Ground => memchr3(ESC, ENQ, C1_LEAD, rest).unwrap_or(rest.len()),
            State::String { class: Class::Osc | Class::Other, .. } => {
                rest.iter().position(|b| matches!(*b, ESC | BEL | CAN | SUB | C1_LEAD)).unwrap_or(rest.len())
            }
            _ => 0,
        }
    }

    /// What is known at the end of a piece about a sequence that isn't over.
    fn close_piece(&self, found: &mut Found) {
        let lead = self.after_lead.then(|| self.at - 1);
        // What may be the first half of a control is not the string's yet: that control would end it.
        let known = lead.unwrap_or(self.at);
        found.ground = self.at;
        match self.state {
            State::Ground => {}
            State::String { class, kinds } => {
                self.span(self.from, known, kinds, found);
                found.strings.push((self.from, known));
                found.ground = self.from;
                found.inside = Some(Inside { from: self.from, class, kinds });
            }
            State::OscMark => {
                self.span(self.from, known, Kinds::MARK, found);
                found.strings.push((self.from, known));
                found.ground = self.from;
                found.inside = Some(Inside { from: self.from, class: Class::Osc, kinds: Kinds::MARK });
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

    fn step(&mut self, byte: u8, found: &mut Found) {
        if std::mem::take(&mut self.after_lead) && (0x80..=0x9f).contains(&byte) {
            self.c1(byte, found);
            return;
        }
        self.after_lead = byte == C1_LEAD;
        if self.at - self.from >= MAX_UNDECIDED_BYTES {
            self.decide();
        }
        match self.state {
            State::Ground => match byte {
                ESC => self.begin(self.at, State::Escape { closes: Kinds::NONE }),
                ENQ => self.span(self.at, self.at + 1, Kinds::QUERY, found),
                _ => {}
            },
            State::Escape { closes } => self.escape(byte, closes, found),
            State::EscapeIntermediate => match byte {
                0x30..=0x7e => self.ends(kinds::of_escape(&self.header), found),
                CAN | SUB => self.state = State::Ground,
                ESC => self.begin(self.at, State::Escape { closes: Kinds::NONE }),
                _ => {}
            },
            State::Csi => self.csi(byte, found),
            State::OscNumber | State::OscQuestion | State::OscMark => self.osc(byte, found),
            State::DcsHeader => self.dcs(byte),
            State::ApcHeader if byte == b'G' => self.state = State::Graphics,
            State::ApcHeader => {
                self.state = State::String { class: Class::Other, kinds: Kinds::NONE };
                self.string(byte, Class::Other, Kinds::NONE, found);
            }
            State::Graphics => self.graphics(byte, found),
            State::String { class, kinds } => self.string(byte, class, kinds, found),
        }
    }

    /// Controls within a sequence don't end it, so there could be any number of them, and nobody would be shown anything meanwhile.
    /// One that long is no sequence anybody means: it is taken for one that must not be shown.
    fn decide(&mut self) {
        let class = match self.state {
            State::Escape { .. } | State::EscapeIntermediate | State::Csi => Class::Csi,
            State::OscNumber | State::OscQuestion => Class::Osc,
            State::DcsHeader | State::ApcHeader | State::Graphics => Class::Other,
            State::Ground | State::OscMark | State::String { .. } => return,
        };
        self.state = State::String { class, kinds: Kinds::ALL };
    }

    fn begin(&mut self, from: u64, state: State) {
        self.from = from;
        self.state = state;
        self.header.clear();
    }

    fn escape(&mut self, byte: u8, closes: Kinds, found: &mut Found) {
        match byte {
            b'[' => self.state = State::Csi,
            b']' => self.state = State::OscNumber,
            b'P' => self.state = State::DcsHeader,
            b'_' => self.state = State::ApcHeader,
            b'X' | b'^' => self.state = State::String { class: Class::Other, kinds: Kinds::NONE },
            b'k' => self.state = State::String { class: Class::OldTitle, kinds: Kinds::TITLE },
            // Asks for the terminal's identity.
            b'Z' => self.ends(Kinds::QUERY, found),
            b'\\' => self.ends(closes, found),
            0x20..=0x2f => {
                self.header.push(byte);
                self.state = State::EscapeIntermediate;
            }
            0x30..=0x7e | CAN | SUB => self.state = State::Ground,
            ESC => self.begin(self.at, State::Escape { closes: Kinds::NONE }),
            _ => {}
        }
    }

    /// A control of one character, wherever it comes: it ends what was under way, and may begin something.
    fn c1(&mut self, byte: u8, found: &mut Found) {
        let lead = self.at - 1;
        let kinds = self.string_ends(lead, found);
        match byte {
            0x9c => {
                self.span(lead, self.at + 1, kinds, found);
                self.state = State::Ground;
            }
            0x90 => self.begin(lead, State::DcsHeader),
            0x98 | 0x9e => self.begin(lead, State::String { class: Class::Other, kinds: Kinds::NONE }),
            0x9a => {
                self.span(lead, self.at + 1, Kinds::QUERY, found);
                self.state = State::Ground;
            }
            0x9b => self.begin(lead, State::Csi),
            0x9d => self.begin(lead, State::OscNumber),
            0x9f => self.begin(lead, State::ApcHeader),
            _ => self.state = State::Ground,
        }
    }

    fn csi(&mut self, byte: u8, found: &mut Found) {
        match byte {
            0x40..=0x7e => self.ends(kinds::of_csi(&self.header, byte), found),
            0x20..=0x3f if self.header.len() < MAX_HEADER_BYTES => self.header.push(byte),
            0x20..=0x3f => self.state = State::String { class: Class::Csi, kinds: Kinds::QUERY.with(Kinds::TITLE) },
            CAN | SUB => self.state = State::Ground,
            ESC => self.begin(self.at, State::Escape { closes: Kinds::NONE }),
            _ => {}
        }
    }

    fn osc(&mut self, byte: u8, found: &mut Found) {
        match byte {
            BEL | CAN | SUB => {
                self.string_ends(self.at + 1, found);
                self.state = State::Ground;
            }
            ESC => {
                let closes = self.string_ends(self.at, found);
                self.begin(self.at, State::Escape { closes });
            }
            // Terminals skip these inside of a command.
            0x00..=0x1f | 0x7f => {}
            b';' if self.state == State::OscNumber => {
                let number = kinds::number(&self.header);
                self.header.clear();
                self.state = match number {
                    Some(MARK_NUMBER) => State::OscMark,
                    number if kinds::may_ask(number) => State::OscQuestion,
                    number => State::String { class: Class::Osc, kinds: kinds::of_osc(number) },
                };
            }
            b'0'..=b'9' if self.state == State::OscNumber && self.header.len() < MAX_HEADER_BYTES => self.header.push(byte),
            _ if self.state == State::OscNumber => {
                // An old spelling of titles, or no number at all.
                let kinds = match byte {
                    b'l' | b'L' | b'I' => Kinds::TITLE,
                    b'0'..=b'9' => Kinds::ALL,
                    _ => Kinds::NONE,
                };
                self.state = State::String { class: Class::Osc, kinds };
            }
            _ if self.state == State::OscMark => {
                if self.header.len() < MAX_MARK_BYTES {
                    self.header.push(byte);
                }
            }
            _ if self.header.len() < MAX_HEADER_BYTES => self.header.push(byte),
            _ => self.state = State::String { class: Class::Osc, kinds: Kinds::QUERY },
        }
    }

    fn dcs(&mut self, byte: u8) {
        match byte {
            0x40..=0x7e => self.state = State::String { class: Class::Other, kinds: kinds::of_dcs(&self.header, byte) },
            0x20..=0x3f if self.header.len() < MAX_HEADER_BYTES => self.header.push(byte),
            0x20..=0x3f => self.state = State::String { class: Class::Other, kinds: Kinds::ALL },
            CAN | SUB => self.state = State::Ground,
            ESC => self.begin(self.at, State::Escape { closes: Kinds::NONE }),
            _ => {}
        }
    }

    fn graphics(&mut self, byte: u8, found: &mut Found) {
        match byte {
            b';' => self.state = State::String { class: Class::Other, kinds: kinds::of_graphics(&self.header) },
            CAN | SUB => {
                self.string_ends(self.at + 1, found);
                self.state = State::Ground;
            }
            ESC => {
                let closes = self.string_ends(self.at, found);
                self.begin(self.at, State::Escape { closes });
            }
            _ if self.header.len() < MAX_HEADER_BYTES => self.header.push(byte),
            _ => self.state = State::String { class: Class::Other, kinds: Kinds::ALL },
        }
    }

    fn string(&mut self, byte: u8, class: Class, kinds: Kinds, found: &mut Found) {
        let is_over = match class {
            Class::Osc => matches!(byte, BEL | CAN | SUB),
            Class::Other => matches!(byte, CAN | SUB),
            Class::Csi => matches!(byte, 0x40..=0x7e | CAN | SUB),
            Class::OldTitle => matches!(byte, 0x00..=0x1a | 0x1c..=0x1f) || self.at - self.from > MAX_OLD_TITLE_BYTES,
        };
        if byte == ESC {
            let closes = self.string_ends(self.at, found);
            self.begin(self.at, State::Escape { closes });
        } else if is_over {
            // What ended a title early is a control of its own, which everybody gets.
            let to = if class == Class::OldTitle { self.at } else { self.at + 1 };
            self.span(self.from, to, kinds, found);
            found.strings.push((self.from, to));
            self.state = State::Ground;
            if byte == ENQ {
                self.span(self.at, self.at + 1, Kinds::QUERY, found);
            }
        }
    }

    /// A string, where there is one under way, ends before `to`. Says whom it was hidden from.
    fn string_ends(&mut self, to: u64, found: &mut Found) -> Kinds {
        let kinds = match self.state {
            State::String { kinds, .. } => kinds,
            State::Graphics => kinds::of_graphics(&self.header),
            State::OscQuestion if kinds::asks(&self.header) => Kinds::QUERY,
            State::OscQuestion | State::OscNumber => Kinds::NONE,
            State::OscMark => {
                found.marks.push(Mark { from: self.from, to, payload: self.header.clone() });
                Kinds::MARK
            }
            _ => return Kinds::NONE,
        };
        self.span(self.from, to, kinds, found);
        found.strings.push((self.from, to));
        kinds
    }

    fn ends(&mut self, kinds: Kinds, found: &mut Found) {
        self.span(self.from, self.at + 1, kinds, found);
        self.state = State::Ground;
    }

    fn span(&self, from: u64, to: u64, kinds: Kinds, found: &mut Found) {
        if !kinds.is_empty() && from < to {
            found.spans.push(Span { from, to, kinds });
        }
    }
}
