//! One name for one thing: no public type name twice within a crate, so that a name in an error or a search leads to one place.

use std::collections::BTreeMap;

use crate::{files, read};

/// Names that every module may have.
const EXCEPTED_NAMES: [&str; 3] = ["Config", "Error", "Result"];

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
