//! Wraps text into lines of a given width, between words where possible.

use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// A tab, expanded.
const TAB: &str = "    ";

/// At least one line; none is wider than `width` columns, unless a single character is.
pub fn wrap(text: &str, width: usize) -> Vec<String> {
    let width = width.max(1);
    let mut lines = Vec::new();
    for line in text.replace('\t', TAB).split('\n') {
        wrap_line(line, width, &mut lines);
    }
    lines
}

fn wrap_line(line: &str, width: usize, lines: &mut Vec<String>) {
    let mut current = String::new();
    let mut used_columns = 0;
    for word in line.split_inclusive(' ') {
        let columns = word.trim_end_matches(' ').width();
        if used_columns + columns > width && used_columns > 0 {
            lines.push(std::mem::take(&mut current).trim_end().to_owned());
            used_columns = 0;
        }
        if columns <= width - used_columns {
            current.push_str(word);
            used_columns += word.width();
            continue;
        }
        // The word is longer than a whole line.
        for c in word.chars() {
            let columns = c.width().unwrap_or(0);
            if used_columns + columns > width && used_columns > 0 {
                lines.push(std::mem::take(&mut current));
                used_columns = 0;
            }
            current.push(c);
            used_columns += columns;
        }
    }
    lines.push(current.trim_end().to_owned());
}

/// Cuts text to `width` columns.
pub fn cut(text: &str, width: usize) -> String {
    if text.width() <= width {
        return text.to_owned();
    }
    let mut used_columns = 0;
    let mut short: String = text
        .chars()
        .take_while(|c| {
            used_columns += c.width().unwrap_or(0);
            used_columns < width
        })
        .collect();
    short.push('…');
    short
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn lines_break_between_words_and_long_words_anywhere() {
        assert_eq!(wrap("one two three", 8), ["one two", "three"]);
        assert_eq!(wrap("one\n\ntwo", 8), ["one", "", "two"]);
        assert_eq!(wrap("abcdefghij", 4), ["abcd", "efgh", "ij"]);
        assert_eq!(wrap("a abcdefgh", 4), ["a", "abcd", "efgh"]);
        assert_eq!(wrap("字字字", 4), ["字字", "字"]);
        assert_eq!((cut("abcdef", 4), cut("ab", 4)), ("abc…".into(), "ab".into()));
    }

    proptest! {
        #[test]
        fn no_line_is_too_wide_and_no_word_is_lost(text in "[a-z字é \n]{0,80}", width in 2usize..20) {
            let lines = wrap(&text, width);
            prop_assert!(lines.iter().all(|line| line.width() <= width));
            let letters = |s: &str| s.chars().filter(|c| !c.is_whitespace()).collect::<String>();
            prop_assert_eq!(letters(&lines.concat()), letters(&text));
        }
    }
}
