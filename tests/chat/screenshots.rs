//! Draws `docs/images/*.svg` from the real TUI with a user and an agent at work; by default, only checks that the
//! existing images are still up to date.

use std::{collections::BTreeMap, fmt::Write as _, path::PathBuf, sync::LazyLock};

use cobox_testkit::{TestBroker, eventually};
use regex::Regex;
use vt100::{Color, Screen};

use crate::{
    deployment::Example,
    tui::{alt, start_chat},
};

/// Columns and rows.
const SIZE: (u16, u16) = (130, 36);
/// Size of a cell in pixels; the margin surrounds all cells.
const CELL: (f32, f32) = (8.4, 18.0);
const MARGIN: f32 = 12.0;
const INK: &str = "#d8dee9";
const PAPER: &str = "#1b1f27";
/// The sixteen base colours for a dark background.
const PALETTE: [&str; 16] = [
    "#3b4252", "#e06c75", "#98c379", "#e5c07b", "#61afef", "#c678dd", "#56b6c2", "#d8dee9", "#6b7383", "#e06c75", "#98c379", "#e5c07b",
    "#61afef", "#c678dd", "#56b6c2", "#ffffff",
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a LangGraph server: scripts/check-langgraph; scripts/screenshots redraws them"]
async fn the_screenshots_in_the_documentation_are_up_to_date() {
    let is_drawing = std::env::var_os("COBOX_SCREENSHOTS").is_some();
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../docs/images");
    let broker = TestBroker::start().await;
    let example = Example::start(&broker).await;
    let mut ann = start_chat(&broker, &example, SIZE, &["--sandbox=demo"]);
    let save = |name: &str, ann: &cobox_testkit::TestTerminal| {
        let picture = ann.look(svg);
        if is_drawing {
            std::fs::write(folder.join(name), picture).expect("the picture is written");
            return;
        }
        let there = std::fs::read_to_string(folder.join(name)).unwrap_or_default();
        assert_eq!(comparable_parts(&there), comparable_parts(&picture), "docs/images/{name} is outdated: run scripts/screenshots");
    };
    ann.wait_for("user@").await;
    ann.press("fix the leap years\r");
    eventually("the end of the story", || {
        let shown = ann.screen_text();
        async move { (shown.contains("OK") && !shown.contains("is working")).then_some(()) }
    })
    .await;
    ann.press(&alt('2'));
    ann.wait_for("┏ terminal").await;
    ann.press("ls; python3 test_leap.py\r");
    // The conversation to the left contains the same text.
    let is_right_of_it = |words: &str| ann.screen_text().lines().any(|line| line.chars().skip(66).collect::<String>().contains(words));
    let prompts = || ann.screen_text().lines().filter(|line| line.chars().skip(66).collect::<String>().contains("user@")).count();
    let all = || std::future::ready((is_right_of_it("OK") && is_right_of_it("→ exit 0") && prompts() == 2).then_some(()));
    eventually("the test in the terminal, the next prompt, and the agent's run among the events", all).await;
    save("chat.svg", &ann);

    ann.press(&alt('4'));
    ann.wait_for("leap.py (agent)").await;
    ann.press(&alt('1'));
    ann.press("/diff leap.py\r");
    ann.wait_for("+ def leap(year):").await;
    save("difference.svg", &ann);

    ann.press(&alt('1'));
    ann.press("delete /workspace/leap.py\r");
    ann.wait_for("allow the agent to use delete?").await;
    save("question.svg", &ann);
}

/// The parts of an image that are the same in every run: the rows with borders and titles in order, and the halves of
/// all other rows in any order, because simultaneous events may be reported in any order.
fn comparable_parts(svg: &str) -> (Vec<String>, Vec<String>) {
    static VARIES: LazyLock<Regex> =
        LazyLock::new(|| Regex::new(r"thread \S+ |\d\d:\d\d:\d\d|in \d+\.\d+s|\(\+\d+ lines\)").expect("a pattern"));
    let same = |text: &[char]| VARIES.replace_all(text.iter().collect::<String>().trim_end(), "…").into_owned();
    let rows = rows_of(svg);
    let is_frame = |row: &[char]| row.iter().any(|c| "┌┏└┗".contains(*c));
    let (first, last) = (rows.keys().next(), rows.keys().last());
    let (frames, others): (Vec<_>, Vec<_>) = rows.iter().partition(|(y, row)| [first, last].contains(&Some(y)) || is_frame(row));
    let mut halves: Vec<String> = others.iter().flat_map(|(_, row)| [same(&row[..row.len() / 2]), same(&row[row.len() / 2..])]).collect();
    halves.sort();
    (frames.iter().map(|(_, row)| same(row)).collect(), halves)
}

/// The text of an image, keyed by the vertical position of each row.
fn rows_of(svg: &str) -> BTreeMap<u32, Vec<char>> {
    static TEXT: LazyLock<Regex> = LazyLock::new(|| Regex::new(r#"<text x="([^"]*)" y="(\d+)"[^>]*>([^<]*)</text>"#).expect("a pattern"));
    let mut rows: BTreeMap<u32, Vec<char>> = BTreeMap::new();
    for found in TEXT.captures_iter(svg) {
        let x: f32 = found[1].parse().expect("a number");
        let col = ((x - MARGIN) / CELL.0).round() as usize;
        let row = rows.entry(found[2].parse().expect("a number")).or_insert_with(|| vec![' '; usize::from(SIZE.0)]);
        let text = found[3].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&");
        row.iter_mut().skip(col).zip(text.chars()).for_each(|(cell, c)| *cell = c);
    }
    rows
}

/// Renders a screen as SVG: one text row per screen row, adjacent cells of the same style combined.
fn svg(screen: &Screen) -> String {
    let (rows, cols) = screen.size();
    let (width, height) = (f32::from(cols) * CELL.0 + 2.0 * MARGIN, f32::from(rows) * CELL.1 + 2.0 * MARGIN);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" width=\"{width:.0}\" height=\"{height:.0}\">\n\
         <rect width=\"100%\" height=\"100%\" rx=\"8\" fill=\"{PAPER}\"/>\n\
         <g font-family=\"ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace\" font-size=\"14\" fill=\"{INK}\" xml:space=\"preserve\">\n"
    );
    for row in 0..rows {
        let y = MARGIN + f32::from(row) * CELL.1;
        let mut col = 0;
        while col < cols {
            let style = style_of(screen, row, col);
            let from = col;
            let mut text = String::new();
            while col < cols && style_of(screen, row, col) == style {
                let cell = screen.cell(row, col).map(|c| c.contents().to_owned()).unwrap_or_default();
                text.push_str(if cell.is_empty() { " " } else { &cell });
                col += if screen.cell(row, col).is_some_and(|c| c.is_wide()) { 2 } else { 1 };
            }
            let x = MARGIN + f32::from(from) * CELL.0;
            let length = f32::from(col - from) * CELL.0;
            if let Some(paper) = &style.paper {
                let _ = writeln!(out, "<rect x=\"{x:.1}\" y=\"{y:.0}\" width=\"{length:.1}\" height=\"{}\" fill=\"{paper}\"/>", CELL.1);
            }
            if text.trim().is_empty() {
                continue;
            }
            let ink = style.ink.map(|ink| format!(" fill=\"{ink}\"")).unwrap_or_default();
            let bold = if style.is_bold { " font-weight=\"bold\"" } else { "" };
            let escaped = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
            let _ = writeln!(out, "<text x=\"{x:.1}\" y=\"{:.0}\" textLength=\"{length:.1}\"{ink}{bold}>{escaped}</text>", y + 13.5);
        }
    }
    out.push_str("</g>\n</svg>\n");
    out
}

#[derive(PartialEq)]
struct Style {
    ink: Option<String>,
    paper: Option<String>,
    is_bold: bool,
}

fn style_of(screen: &Screen, row: u16, col: u16) -> Style {
    let Some(cell) = screen.cell(row, col) else { return Style { ink: None, paper: None, is_bold: false } };
    let (mut ink, mut paper) = (colour(cell.fgcolor()), colour(cell.bgcolor()));
    if cell.inverse() {
        (ink, paper) = (Some(paper.unwrap_or_else(|| PAPER.to_owned())), Some(ink.unwrap_or_else(|| INK.to_owned())));
    }
    Style { ink, paper, is_bold: cell.bold() }
}

fn colour(colour: Color) -> Option<String> {
    match colour {
        Color::Default => None,
        Color::Idx(n @ 0..16) => Some(PALETTE[usize::from(n)].to_owned()),
        Color::Idx(n @ 16..232) => {
            let level = |v: u8| if v == 0 { 0 } else { 55 + 40 * v };
            let n = n - 16;
            Some(format!("#{:02x}{:02x}{:02x}", level(n / 36), level(n / 6 % 6), level(n % 6)))
        }
        Color::Idx(n) => Some(format!("#{0:02x}{0:02x}{0:02x}", 8 + 10 * (n - 232))),
        Color::Rgb(r, g, b) => Some(format!("#{r:02x}{g:02x}{b:02x}")),
    }
}
