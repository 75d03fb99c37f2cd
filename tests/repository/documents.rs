//! Checks the documents: decisions and the glossary are short, and ARCHITECTURE.md shows the files and dependencies that exist.

use std::path::{Path, PathBuf};

use crate::{files, read, root};

/// Words of one decision, its reason included.
const DECISION_WORDS: usize = 40;
/// Terms of the glossary: more would not be read.
const GLOSSARY_TERMS: usize = 60;
/// Entry points in ARCHITECTURE.md: as many as fit on one screen.
const ENTRY_POINTS: usize = 15;

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

/// The names of the project's crates that a manifest depends on, development dependencies excluded.
fn dependencies(manifest: &str) -> Vec<String> {
    let section = manifest.split("\n[dependencies]\n").nth(1).unwrap_or_default().split("\n[").next().unwrap_or_default();
    let mut names: Vec<String> = section
        .lines()
        .filter_map(|line| line.strip_prefix("cobox-"))
        .map(|rest| rest.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default().to_owned())
        .collect();
    names.sort();
    names
}

#[test]
fn the_architecture_shows_the_dependencies_of_the_manifests() {
    let text = read("ARCHITECTURE.md");
    for path in files("crates", &["toml"]).iter().filter(|path| path.ends_with("/Cargo.toml")) {
        let name = path.split('/').nth(1).unwrap();
        let real = dependencies(&read(path));
        let line = text.lines().find(|line| line.split('→').next().is_some_and(|from| line.contains('→') && from.trim() == name));
        let shown: Vec<String> =
            line.and_then(|line| line.split('→').nth(1)).unwrap_or_default().split_whitespace().map(str::to_owned).collect();
        assert_eq!(shown, real, "dependencies of {name} in ARCHITECTURE.md");
    }
}

/// The paths of a row of the entry points that don't exist. A path is relative to the root, or to an ancestor of an earlier path of its row,
/// up to the crate.
fn missing_paths(row: &str) -> Vec<String> {
    let answer = row.split(" | ").nth(1).unwrap_or_default();
    let (mut missing, mut bases) = (Vec::new(), vec![PathBuf::new()]);
    for path in answer.split('`').skip(1).step_by(2) {
        let found = bases.iter().map(|base| base.join(path)).find(|found| root().join(found).exists());
        let Some(found) = found else {
            missing.push(path.to_owned());
            continue;
        };
        bases.extend(found.ancestors().filter(|ancestor| ancestor.components().count() >= 2).map(Path::to_owned));
    }
    missing
}

#[test]
fn the_architecture_has_few_entry_points_and_their_paths_exist() {
    let text = read("ARCHITECTURE.md");
    let section = text.split("\n## Entry points\n").nth(1).unwrap_or_default().split("\n## ").next().unwrap_or_default();
    let rows: Vec<&str> = section.lines().filter(|line| line.starts_with("| ")).skip(1).collect();
    assert!(!rows.is_empty() && rows.len() <= ENTRY_POINTS, "{} entry points", rows.len());
    let missing: Vec<_> = rows.iter().map(|row| (*row, missing_paths(row))).filter(|(_, missing)| !missing.is_empty()).collect();
    assert!(missing.is_empty(), "ARCHITECTURE.md names missing files: {missing:#?}");
}
