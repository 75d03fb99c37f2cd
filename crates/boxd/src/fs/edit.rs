//! Edits a file by exact replacement: applies all edits or none, each `old` must match once unless `replace_all` is
//! set, and the file's line endings are kept.

use std::{borrow::Cow, fs::File, io::Read};

use bytes::Bytes;
use cobox_protocol::{
    ApiError, ErrorCode,
    fs::{EditRequest, EditResponse, Replacement},
};

use crate::{
    body::too_large,
    files::{
        ChangeRecorder, Conditions, Root, SandboxPath, SymbolicLinks, WriteLog, WriteOptions, file_error, not_a_regular_file, write_file,
    },
};

/// The file is in memory twice during an edit. Text that people and agents edit is far smaller.
const MAX_FILE_BYTES: u64 = 32 * 1024 * 1024;
const MAX_EDITS: usize = 1000;
/// How often an edit without a version condition is attempted if the file is written concurrently.
const MAX_ATTEMPTS: usize = 5;

pub fn edit(
    root: &Root,
    path: &SandboxPath,
    request: EditRequest,
    writes: &WriteLog,
    recorder: &ChangeRecorder,
) -> Result<EditResponse, ApiError> {
    let if_match = request.if_match.clone();
    let edits = replacements(request)?;
    let mut attempts = 0;
    loop {
        attempts += 1;
        let (file, stat) =
            root.open_regular(path.bytes()).map_err(|e| file_error(e, path))?.map_err(|kind| not_a_regular_file(kind, path))?;
        let etag = writes.etag(&stat);
        Conditions::matching(if_match.as_deref()).check_change(Some(&etag), path)?;
        let mut text = Vec::new();
        let read = File::from(file).take(MAX_FILE_BYTES + 1).read_to_end(&mut text);
        read.map_err(|e| ApiError::new(ErrorCode::Internal, format!("{path}: {e}")))?;
        if text.len() as u64 > MAX_FILE_BYTES {
            return Err(too_large("the file to edit", MAX_FILE_BYTES));
        }
        let mut count = 0;
        for (number, edit) in edits.iter().enumerate() {
            let (edited, n) = replace(&text, edit).map_err(|e| e.into_api(path, number, edits.len()))?;
            text = edited;
            count += n;
            if text.len() as u64 > MAX_FILE_BYTES {
                return Err(too_large("the edited file", MAX_FILE_BYTES));
            }
        }
        // Conditional on the version that was read, so that no concurrent change is lost.
        let conditions = Conditions::matching(Some(&etag));
        let options = WriteOptions { conditions, mode: None, is_durable: true, recorder: recorder.clone(), links: SymbolicLinks::Follow };
        match write_file(root, path, options, &[Bytes::from(text)], writes) {
            Err(e) if e.code == ErrorCode::FileChanged && if_match.is_none() && attempts < MAX_ATTEMPTS => {}
            other => {
                let written = other?;
                let (shown, path_b64) = path.to_json();
                return Ok(EditResponse { path: shown, path_b64, size: written.size, etag: written.etag, replacements: count });
            }
        }
    }
}

fn replacements(request: EditRequest) -> Result<Vec<Replacement>, ApiError> {
    let edits = match (request.old, request.new, request.edits) {
        (Some(old), Some(new), None) => vec![Replacement { old, new, replace_all: request.replace_all }],
        (None, None, Some(edits)) if !edits.is_empty() => edits,
        _ => return Err(ApiError::invalid("old: send `old` and `new`, or a list of them in `edits`")),
    };
    if edits.len() > MAX_EDITS {
        return Err(ApiError::invalid(format!("edits: more than {MAX_EDITS} entries")));
    }
    if let Some(number) = edits.iter().position(|e| e.old.is_empty()) {
        return Err(ApiError::invalid(format!("edits[{number}].old: is empty; create files with PUT")));
    }
    Ok(edits)
}

#[derive(Debug, PartialEq, Eq)]
enum MatchError {
    Absent,
    Ambiguous { count: usize },
}

impl MatchError {
    fn into_api(self, path: &SandboxPath, number: usize, of: usize) -> ApiError {
        let field = if of == 1 { "old".to_owned() } else { format!("edits[{number}].old") };
        match self {
            MatchError::Absent => {
                ApiError::invalid(format!("{field}: not found in {path}; read the file again: the text must match exactly"))
                    .with_details(serde_json::json!({ "reason": "no_match", "edit": number, "count": 0 }))
            }
            MatchError::Ambiguous { count } => ApiError::invalid(format!(
                "{field}: found {count} times in {path}; include more of the surrounding text, or set `replace_all`"
            ))
            .with_details(serde_json::json!({ "reason": "not_unique", "edit": number, "count": count })),
        }
    }
}

/// Replaces one text. A file with CRLF is searched as if it had LF, unless `old` itself contains CR, and inserted text
/// gets the file's line endings.
fn replace(text: &[u8], edit: &Replacement) -> Result<(Vec<u8>, u64), MatchError> {
    let (old, new) = (edit.old.as_bytes(), edit.new.as_bytes());
    let has_crlf = find(text, b"\r\n").is_some();
    let spans: Vec<(usize, usize)> = if has_crlf && old.contains(&b'\n') && !old.contains(&b'\r') {
        let lf_text = LfText::from_crlf(text);
        matches(&lf_text.text, old).map(|at| (lf_text.original_position(at), lf_text.original_position(at + old.len()))).collect()
    } else {
        matches(text, old).map(|at| (at, at + old.len())).collect()
    };
    match spans.len() {
        0 => return Err(MatchError::Absent),
        1 => {}
        _ if edit.replace_all => {}
        count => return Err(MatchError::Ambiguous { count }),
    }
    let is_mostly_crlf = has_crlf && {
        let all = text.iter().filter(|b| **b == b'\n').count();
        matches(text, b"\r\n").count() * 2 > all
    };
    let mut out = Vec::with_capacity(text.len());
    let mut done = 0;
    for (from, to) in &spans {
        out.extend_from_slice(&text[done..*from]);
        let replaced = &text[*from..*to];
        // The line ending of the replaced lines; if none is replaced, the file's.
        let wants_crlf = if replaced.contains(&b'\n') { find(replaced, b"\r\n").is_some() } else { is_mostly_crlf };
        let is_exact = old.contains(&b'\r');
        out.extend_from_slice(&if wants_crlf && !is_exact { with_crlf(new) } else { Cow::Borrowed(new) });
        done = *to;
    }
    out.extend_from_slice(&text[done..]);
    Ok((out, spans.len() as u64))
}

fn with_crlf(text: &[u8]) -> Cow<'_, [u8]> {
    if !text.contains(&b'\n') {
        return Cow::Borrowed(text);
    }
    let mut out = Vec::with_capacity(text.len() + text.len() / 16);
    for (i, b) in text.iter().enumerate() {
        if *b == b'\n' && (i == 0 || text[i - 1] != b'\r') {
            out.push(b'\r');
        }
        out.push(*b);
    }
    Cow::Owned(out)
}

/// A text without the CR of its CRLFs, and where they were.
struct LfText {
    text: Vec<u8>,
    /// Ascending positions in `text` before which a CR was removed.
    removed_crs: Vec<usize>,
}

impl LfText {
    fn from_crlf(text: &[u8]) -> Self {
        let mut lf_text = Self { text: Vec::with_capacity(text.len()), removed_crs: Vec::new() };
        for (i, b) in text.iter().enumerate() {
            if *b == b'\r' && text.get(i + 1) == Some(&b'\n') {
                lf_text.removed_crs.push(lf_text.text.len());
            } else {
                lf_text.text.push(*b);
            }
        }
        lf_text
    }

    /// The position in the original for one in the plain text. At a line's end this is before the CR.
    fn original_position(&self, at: usize) -> usize {
        at + self.removed_crs.partition_point(|cr| *cr < at)
    }
}

fn find(text: &[u8], what: &[u8]) -> Option<usize> {
    matches(text, what).next()
}

/// All positions without overlaps.
fn matches<'a>(text: &'a [u8], what: &'a [u8]) -> impl Iterator<Item = usize> + 'a {
    memchr::memmem::find_iter(text, what)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(text: &str, old: &str, new: &str, replace_all: bool) -> Result<(String, u64), MatchError> {
        let edit = Replacement { old: old.into(), new: new.into(), replace_all };
        replace(text.as_bytes(), &edit).map(|(out, n)| (String::from_utf8(out).unwrap(), n))
    }

    #[test]
    fn old_must_match_exactly_once_unless_replace_all_is_set() {
        assert_eq!(run("a b c", "b", "x", false).unwrap(), ("a x c".into(), 1));
        assert_eq!(run("a b b", "b", "x", false), Err(MatchError::Ambiguous { count: 2 }));
        assert_eq!(run("a b b", "b", "x", true).unwrap(), ("a x x".into(), 2));
        assert_eq!(run("a", "b", "x", true), Err(MatchError::Absent));
        assert_eq!(run("aaa", "aa", "b", true).unwrap(), ("ba".into(), 1));
    }

    #[test]
    fn line_endings_of_the_file_are_kept() {
        assert_eq!(run("a\r\nb\r\nc\r\n", "a\nb\n", "x\ny\nz\n", false).unwrap().0, "x\r\ny\r\nz\r\nc\r\n");
        assert_eq!(run("a\r\nb\r\n", "b", "b\nc", false).unwrap().0, "a\r\nb\r\nc\r\n");
        assert_eq!(run("a\r\nb\r\n", "a\r\nb", "x\ny", false).unwrap().0, "x\ny\r\n", "exact where `old` is");
        assert_eq!(run("a\nb\n", "a\nb", "x\r\ny", false).unwrap().0, "x\r\ny\n");
        assert_eq!(run("a\r\nb\r\n", "\n", " ", true).unwrap().0, "a b ");
        assert_eq!(
            run("a\r\nb\nc\n", "b\nc", "x\ny", false).unwrap().0,
            "a\r\nx\ny\n",
            "in a mixed file, line endings are those of the replaced lines"
        );
        assert_eq!(run("a\r\nb\nc\n", "a\nb", "x\ny", false).unwrap().0, "x\r\ny\nc\n");
        assert_eq!(run("a\r\n", "a\n", "b\r\nc\n", false).unwrap().0, "b\r\nc\r\n");
        assert_eq!(run("a\rb\r\n", "a\rb", "x", false).unwrap().0, "x\r\n");
    }
}
