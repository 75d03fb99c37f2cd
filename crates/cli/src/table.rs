//! Tables for people: aligned columns, no wider than the terminal.

use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

use crate::printer::visible;

/// Separator of two columns.
const COLUMN_GAP: &str = "  ";
/// A column is not cut below this many cells: a shorter one has no use.
const MIN_COLUMN_WIDTH: usize = 8;
/// Characters of a cobox id after its prefix.
const ID_CHARS: usize = 26;

/// The lines of a table, its header first; empty without rows. Without `width`, the columns have their natural width.
pub fn lines(header: &[&str], rows: &[Vec<String>], width: Option<usize>) -> Vec<String> {
    if rows.is_empty() {
        return Vec::new();
    }
    let rows: Vec<Vec<String>> = rows.iter().map(|row| row.iter().map(|cell| visible(cell)).collect()).collect();
    let column = |i: usize| rows.iter().filter_map(move |row| row.get(i));
    let natural = |i: usize| column(i).map(|cell| cell.width()).chain([header[i].width()]).max().unwrap_or(0);
    let mut widths: Vec<usize> = (0..header.len()).map(natural).collect();
    if let Some(width) = width {
        let has_ids: Vec<bool> = (0..header.len()).map(|i| column(i).any(|cell| is_id(cell))).collect();
        shrink_columns(&mut widths, &has_ids, width);
    }
    let line = |cells: Vec<&str>| {
        let padded: Vec<String> = cells.iter().zip(&widths).map(|(cell, width)| pad_or_cut(cell, *width)).collect();
        padded.join(COLUMN_GAP).trim_end().to_owned()
    };
    let mut lines = vec![line(header.to_vec())];
    lines.extend(rows.iter().map(|row| line(row.iter().map(String::as_str).collect())));
    lines
}

/// Shrinks the widest column, one cell at a time. Columns with ids come last: a cut id is useless.
fn shrink_columns(widths: &mut [usize], has_ids: &[bool], to: usize) {
    let gaps = COLUMN_GAP.len() * widths.len().saturating_sub(1);
    for may_cut_ids in [false, true] {
        while widths.iter().sum::<usize>() + gaps > to {
            let candidates = (0..widths.len()).filter(|i| widths[*i] > MIN_COLUMN_WIDTH && (may_cut_ids || !has_ids[*i]));
            let Some(widest) = candidates.max_by_key(|i| widths[*i]) else { break };
            widths[widest] -= 1;
        }
    }
}

/// Pads text to the width, or cuts it with an ellipsis.
fn pad_or_cut(text: &str, width: usize) -> String {
    let is_cut = text.width() > width;
    let available = if is_cut { width.saturating_sub(1) } else { width };
    let (mut out, mut used) = (String::new(), 0);
    for c in text.chars() {
        let wide = c.width().unwrap_or(0);
        if used + wide > available {
            break;
        }
        out.push(c);
        used += wide;
    }
    if is_cut {
        out.push('…');
        used += 1;
    }
    out.extend(std::iter::repeat_n(' ', width.saturating_sub(used)));
    out
}

fn is_id(cell: &str) -> bool {
    cell.rsplit_once('_').is_some_and(|(_, tail)| tail.len() == ID_CHARS && tail.bytes().all(|b| b.is_ascii_alphanumeric()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "sb_01j8xq6x0ye8rf2zt9n5b3c7dm";

    fn rows(cells: &[&[&str]]) -> Vec<Vec<String>> {
        cells.iter().map(|row| row.iter().map(|c| (*c).to_owned()).collect()).collect()
    }

    #[test]
    fn a_table_is_aligned_and_a_hostile_name_cannot_repaint_the_screen() {
        let lines = lines(&["ID", "NAME"], &rows(&[&["a", "x\x1b[2Jy"], &["long-id", "z"]]), None);
        assert_eq!(lines, ["ID       NAME", "a        x\\u{1b}[2Jy", "long-id  z"]);
        assert!(super::lines(&["ID"], &[], None).is_empty());
    }

    #[test]
    fn the_widest_column_without_ids_is_cut_first() {
        let wide = "w".repeat(60);
        let table = rows(&[&[ID, &wide, "ann"]]);
        let rendered = lines(&["SANDBOX", "NAME", "OWNER"], &table, Some(60));
        assert!(rendered.iter().all(|line| line.width() <= 60), "{rendered:?}");
        assert!(rendered[1].starts_with(ID) && rendered[1].contains("w…") && rendered[1].ends_with("ann"), "{rendered:?}");
    }

    #[test]
    fn ids_are_cut_last() {
        let rendered = lines(&["A", "B"], &rows(&[&[ID, ID]]), Some(40));
        assert!(rendered.iter().all(|line| line.width() <= 40), "{rendered:?}");
        let rendered = lines(&["A", "B"], &rows(&[&["short", "short"]]), Some(3));
        assert_eq!(rendered[1], "short  short", "a terminal of width 0 wraps");
    }

    #[test]
    fn wide_characters_take_two_cells() {
        let rendered = lines(&["A", "B"], &rows(&[&["漢字", "x"], &["abcd", "y"]]), None);
        assert_eq!(rendered[1..], ["漢字  x", "abcd  y"]);
        assert_eq!(pad_or_cut("漢字漢字", 6), "漢字… ");
    }
}
