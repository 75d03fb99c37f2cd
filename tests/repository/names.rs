//! One name for one thing: no public type name twice within a crate, so that a name in an error or a search leads to one place, and no
//! name that was replaced.

use std::collections::BTreeMap;

use crate::{files, read};

/// Names that every module may have.
const EXCEPTED_NAMES: [&str; 3] = ["Config", "Error", "Result"];

/// Identifiers that were replaced by the terms of docs/glossary.md.
const OLD_VOCABULARY: [&str; 20] = [
    "happenings",
    "telling",
    "hearing",
    "Told",
    "Place",
    "keeper",
    "Kinds",
    "Making",
    "MakingWish",
    "Asking",
    "from_word",
    "way_in",
    "typist",
    "typists",
    "Foreseen",
    "take_off",
    "Dress",
    "sitting",
    "lanes",
    "Door",
];
/// Lines that may contain an old name: a route that older brokers call, and the frozen names of schemas.
const FROZEN_NAMES: [&str; 3] = ["/control/happenings", "\"happenings\"", "schemars(rename ="];
/// Contains the list above.
const THIS_FILE: &str = "tests/repository/names.rs";

/// The name of the public type that a line declares.
fn declared_type(line: &str) -> Option<&str> {
    let rest = line.trim_start().strip_prefix("pub")?;
    let rest = match rest.strip_prefix('(') {
        Some(scope) => scope.split_once(')')?.1,
        None => rest,
    };
    let mut words = rest.split_whitespace();
    let is_type = matches!(words.next()?, "struct" | "enum" | "trait" | "type" | "union");
    let name = words.next()?.split(|c: char| !(c.is_alphanumeric() || c == '_')).next()?;
    is_type.then_some(name)
}

#[test]
fn no_public_type_has_the_name_of_another_in_its_crate() {
    let mut places: BTreeMap<(String, String), Vec<String>> = BTreeMap::new();
    for path in files("crates", &["rs"]) {
        let Some((name, _)) = path.trim_start_matches("crates/").split_once("/src/") else { continue };
        for (number, line) in read(&path).lines().enumerate() {
            if let Some(declared) = declared_type(line).filter(|declared| !EXCEPTED_NAMES.contains(declared)) {
                places.entry((name.to_owned(), declared.to_owned())).or_default().push(format!("{path}:{}", number + 1));
            }
        }
    }
    let doubled: Vec<_> = places.into_iter().filter(|(_, places)| places.len() > 1).collect();
    assert!(doubled.is_empty(), "{doubled:#?}");
}

/// The old names in a line of code, comments excluded.
fn old_names<'a>(line: &'a str, comment: &str) -> Vec<&'a str> {
    if FROZEN_NAMES.iter().any(|frozen| line.contains(frozen)) {
        return Vec::new();
    }
    let code = line.split(comment).next().unwrap_or_default();
    code.split(|c: char| !(c.is_alphanumeric() || c == '_')).filter(|word| OLD_VOCABULARY.contains(word)).collect()
}

#[test]
fn no_name_of_the_old_vocabulary_is_left() {
    let mut found = Vec::new();
    for directory in ["crates", "tests", "sdk/python"] {
        for path in files(directory, &["rs", "py"]).iter().filter(|path| *path != THIS_FILE) {
            let comment = if path.ends_with(".rs") { "//" } else { "#" };
            for (number, line) in read(path).lines().enumerate() {
                found.extend(old_names(line, comment).iter().map(|name| format!("{path}:{}: {name}", number + 1)));
            }
        }
    }
    assert!(found.is_empty(), "{found:#?}");
}

#[test]
fn old_names_are_found_as_whole_words_outside_comments_and_frozen_names() {
    assert_eq!(old_names("fn take_off(lanes: &Lanes) {} // the typist", "//"), ["take_off", "lanes"]);
    assert!(old_names("let replace = placement;", "//").is_empty());
    assert!(old_names("    (\"/control/happenings\", get),", "//").is_empty());
}
