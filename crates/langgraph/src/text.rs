//! Makes untrusted text safe for a terminal: limited in size, and without anything that moves the cursor, redraws or
//! changes the direction of text.

/// At most `max_bytes` of the text. Newlines and tabs are kept, escape sequences and other controls are removed.
pub fn clean(text: &str, max_bytes: usize) -> String {
    let mut out = String::with_capacity(text.len().min(max_bytes));
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '\u{1b}' => skip_sequence(&mut chars),
            '\n' | '\t' => out.push(c),
            c if c.is_control() || is_invisible(c) => continue,
            c => out.push(c),
        }
        if out.len() > max_bytes {
            out.truncate(out.floor_char_boundary(max_bytes));
            out.push('…');
            break;
        }
    }
    out
}

/// Like [`clean`], on one line.
pub(crate) fn clean_line(text: &str, max_bytes: usize) -> String {
    clean(text, max_bytes).replace(['\n', '\t'], " ")
}

/// Skips what follows an escape: colors and movements end with a letter, titles with a control, everything else is one
/// character.
fn skip_sequence(chars: &mut std::iter::Peekable<std::str::Chars>) {
    match chars.next_if(|c| !c.is_control()) {
        Some('[') => while chars.next_if(|c| !c.is_control()).is_some_and(|c| !('\u{40}'..='\u{7e}').contains(&c)) {},
        Some(']' | 'P' | '_' | '^' | 'X') => while chars.next_if(|c| !c.is_control()).is_some() {},
        _ => {}
    }
}

/// Characters that make a text look different from what it is: they change its direction or are invisible. Joiners are
/// not included, because whole languages are written with them.
pub fn is_invisible(c: char) -> bool {
    matches!(c,
        '\u{200e}' | '\u{200f}' | '\u{61c}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{206f}' | '\u{2028}' | '\u{2029}'
        | '\u{ad}' | '\u{200b}' | '\u{2060}'..='\u{2064}' | '\u{feff}' | '\u{180e}' | '\u{115f}' | '\u{1160}' | '\u{3164}' | '\u{ffa0}'
        | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e0fff}')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn escape_sequences_and_invisible_characters_are_removed() {
        for (text, shown) in [
            ("plain\n\ttext", "plain\n\ttext"),
            ("\u{1b}[1;31mred\u{1b}[0m", "red"),
            ("\u{1b}]0;title\u{7}after", "after"),
            ("\u{1b}]8;;http://x\u{1b}\\link\u{1b}]8;;\u{1b}\\", "link"),
            ("a\r\nb\u{8}", "a\nb"),
            ("abc\u{202e}fed", "abcfed"),
            ("a\u{200b}b\u{e0041}c\u{3164}", "abc"),
            ("\u{9b}31mx", "31mx"),
            ("end\u{1b}", "end"),
        ] {
            assert_eq!(clean(text, 100), shown, "{text:?}");
        }
        assert_eq!(clean("äöü", 3), "ä…");
        assert_eq!(clean_line("a\nb", 10), "a b");
    }

    proptest! {
        #[test]
        fn cleaned_text_contains_no_controls(text in any::<String>(), max in 0usize..64) {
            let shown = clean(&text, max);
            prop_assert!(shown.len() <= max + '…'.len_utf8());
            prop_assert!(shown.chars().all(|c| !is_invisible(c) && !c.is_control() || c == '\n' || c == '\t'));
        }
    }
}
