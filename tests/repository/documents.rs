//! The forms that documents keep: short decisions, a short glossary, and a picture of the crates that is true.

use crate::{files, read};

/// Words of one decision, its reason included.
const DECISION_WORDS: usize = 40;
/// Terms of the glossary: more would not be read.
const GLOSSARY_TERMS: usize = 60;

fn words(text: &str) -> usize {
    text.split_whitespace().filter(|word| word.contains(char::is_alphanumeric)).count()
}

#[test]
fn every_decision_is_short() {
    let mut long = Vec::new();
    for path in files("docs/decisions", &["md"]) {
        let text = read(&path);
        // An entry ends where the next begins, or with its paragraph.
        for entry in text.split("\n- **").skip(1) {
            let entry = entry.split("\n\n").next().unwrap_or_default();
            if words(entry) > DECISION_WORDS {
                long.push(format!("{path}: {} words: {}", words(entry), entry.lines().next().unwrap_or_default()));
            }
        }
    }
    assert!(long.is_empty(), "{long:#?}");
}

#[test]
fn the_glossary_is_short_sorted_and_has_one_line_for_each_term() {
    let text = read("docs/glossary.md");
    let terms: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("| ")?.split(" | ").next()).filter(|t| *t != "term").collect();
    assert!(terms.len() <= GLOSSARY_TERMS, "{} terms", terms.len());
    // As a reader sorts them: without case.
    let keys: Vec<String> = terms.iter().map(|term| term.to_lowercase()).collect();
    assert!(keys.is_sorted_by(|a, b| a < b), "{keys:?}");
}
