//! SPECIFICATION.md names a test for each promise: every file, module and test that it names must exist.

use std::collections::HashSet;

use crate::{files, read, root};

/// The text between backticks.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.lines().flat_map(|line| line.split('`').skip(1).step_by(2))
}

/// Names of functions, modules and source files, which are what a test's path is made of.
fn known_names() -> HashSet<String> {
    let mut known = HashSet::new();
    for path in files("", &["rs"]) {
        known.extend(path.trim_end_matches(".rs").split('/').map(str::to_owned));
        for line in read(&path).lines() {
            // A test of the isolation suite, which a macro turns into one for each way to run a broker.
            known.extend(line.trim_start().split_once(" => async |").map(|(name, _)| name.to_owned()));
            let mut words = line.trim_start().split(|c: char| !(c.is_alphanumeric() || c == '_')).filter(|word| !word.is_empty());
            while let Some(word) = words.next() {
                if word == "fn" || word == "mod" {
                    known.extend(words.next().map(str::to_owned));
                }
            }
        }
    }
    known
}

#[test]
fn every_file_that_the_specification_names_exists() {
    let names: HashSet<String> =
        files("", &["rs", "py", "md", "json", "svg"]).iter().map(|path| path.rsplit('/').next().unwrap().to_owned()).collect();
    let text = read("SPECIFICATION.md");
    let missing: Vec<&str> = quoted(&text)
        .filter(|text| !text.contains([' ', '<', '{', '…']))
        .filter(|text| match (text.contains('/'), text.rsplit_once('.')) {
            // A route is no file.
            (true, _) => !text.starts_with('/') && !text.contains('*') && !root().join(text).exists(),
            (false, Some((_, "rs" | "py"))) => !names.contains(*text),
            _ => false,
        })
        .collect();
    assert!(missing.is_empty(), "SPECIFICATION.md names missing items: {missing:#?}");
}

#[test]
fn every_test_that_the_specification_names_exists() {
    let known = known_names();
    let text = read("SPECIFICATION.md");
    let missing: Vec<&str> = quoted(&text)
        .filter(|text| text.contains("::") && !text.contains(' '))
        .filter(|text| text.split("::").any(|part| !part.is_empty() && part != "…" && !known.contains(part)))
        .collect();
    assert!(missing.is_empty(), "SPECIFICATION.md names missing tests: {missing:#?}");
}
