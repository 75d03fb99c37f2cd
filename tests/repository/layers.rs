//! The broker's domain: few folders that depend on each other without a cycle, and no type of HTTP, SQL or the layers above it.

use std::collections::{BTreeMap, BTreeSet};

use crate::{files, read};

const DOMAIN: &str = "crates/broker/src/domain";
/// As many as a reader keeps in mind.
const MAX_FOLDERS: usize = 8;
/// Crates and modules of HTTP, SQL and the layers above, whose types must not appear in the domain.
const LAYERS_ABOVE: [&str; 10] =
    ["axum", "cobox_gateway", "crate::dataplane", "crate::http", "crate::server", "http", "hyper", "reqwest", "sqlx", "tower"];

/// A folder, or a file beside the folders, with everything in the domain that it names.
type Graph = BTreeMap<String, BTreeSet<String>>;

/// Code without comments and strings.
fn code_of(text: &str) -> String {
    let without_comments = text.lines().map(|line| line.split("//").next().unwrap_or_default()).collect::<Vec<_>>().join("\n");
    without_comments.split('"').step_by(2).collect::<Vec<_>>().join("\"")
}

/// Every path in the code. `use` trees are expanded: `a::{b, c::d}` gives `a::b` and `a::c::d`.
fn paths(code: &str) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    let mut rest = code;
    while let Some(start) = rest.find(|c: char| c.is_alphabetic() || c == '_') {
        rest = read_path(&rest[start..], &[], &mut found);
    }
    found
}

/// Reads one path below `prefix`, or a group of them, and returns the code behind it.
fn read_path<'a>(code: &'a str, prefix: &[String], found: &mut Vec<Vec<String>>) -> &'a str {
    let mut path = prefix.to_vec();
    let mut rest = code;
    loop {
        let end = rest.find(|c: char| !(c.is_alphanumeric() || c == '_')).unwrap_or(rest.len());
        path.push(rest[..end].to_owned());
        rest = &rest[end..];
        let Some(below) = rest.strip_prefix("::") else { break };
        if let Some(group) = below.strip_prefix('{') {
            return read_group(group, &path, found);
        }
        if !below.starts_with(|c: char| c.is_alphabetic() || c == '_') {
            break;
        }
        rest = below;
    }
    found.push(path);
    rest
}

fn read_group<'a>(code: &'a str, prefix: &[String], found: &mut Vec<Vec<String>>) -> &'a str {
    let mut rest = code;
    while let Some(next) = rest.find(|c: char| c.is_alphabetic() || c == '_' || c == '}') {
        rest = &rest[next..];
        match rest.strip_prefix('}') {
            Some(behind) => return behind,
            None => rest = read_path(rest, prefix, found),
        }
    }
    rest
}

/// The folder of a source file, or the name of a file beside the folders.
fn unit_of(path: &str) -> String {
    let below = path.trim_start_matches(DOMAIN).trim_start_matches('/');
    below.split('/').next().unwrap_or(below).trim_end_matches(".rs").to_owned()
}

/// What a path in a file of the domain names there: `None` for anything outside.
fn named_unit(path: &[String], is_in_folder: bool, is_mod_file: bool) -> Option<&str> {
    let segments: Vec<&str> = path.iter().map(String::as_str).collect();
    match segments.as_slice() {
        ["crate", "domain", unit, ..] => Some(*unit),
        // `super` is the folder in its files, and the domain everywhere else.
        ["super", "super", unit, ..] if *unit != "super" => Some(*unit),
        ["super", unit, ..] if !is_in_folder || is_mod_file => Some(*unit),
        _ => None,
    }
}

fn graph() -> Graph {
    let sources = files(DOMAIN, &["rs"]);
    let mut graph: Graph = sources.iter().map(|path| (unit_of(path), BTreeSet::new())).collect();
    graph.remove("mod");
    let units: BTreeSet<String> = graph.keys().cloned().collect();
    for path in &sources {
        let (unit, code) = (unit_of(path), code_of(&read(path)));
        let is_in_folder = path.trim_start_matches(DOMAIN).matches('/').count() > 1;
        for named in paths(&code) {
            if let Some(other) = named_unit(&named, is_in_folder, path.ends_with("/mod.rs"))
                && other != unit
                && units.contains(other)
                && let Some(dependencies) = graph.get_mut(&unit)
            {
                dependencies.insert(other.to_owned());
            }
        }
    }
    graph
}

/// A way from a unit back to itself, if there is one.
fn cycle(graph: &Graph) -> Option<Vec<String>> {
    fn search(graph: &Graph, way: &mut Vec<String>, done: &mut BTreeSet<String>) -> Option<Vec<String>> {
        let unit = way.last()?.clone();
        for next in graph.get(&unit).into_iter().flatten() {
            if let Some(begin) = way.iter().position(|passed| passed == next) {
                return Some(way[begin..].iter().chain([next]).cloned().collect());
            }
            if !done.contains(next) {
                way.push(next.clone());
                if let Some(found) = search(graph, way, done) {
                    return Some(found);
                }
                way.pop();
            }
        }
        done.insert(unit);
        None
    }
    let mut done = BTreeSet::new();
    graph.keys().find_map(|unit| search(graph, &mut vec![unit.clone()], &mut done))
}

#[test]
fn the_domain_of_the_broker_has_few_folders() {
    let folders: BTreeSet<String> = files(DOMAIN, &["rs"])
        .iter()
        .filter(|path| path.ends_with("/mod.rs"))
        .map(|path| unit_of(path))
        .filter(|unit| unit != "mod")
        .collect();
    assert!(folders.len() <= MAX_FOLDERS, "{} folders: {folders:?}", folders.len());
}

#[test]
fn the_folders_of_the_domain_depend_on_each_other_without_a_cycle() {
    let graph = graph();
    if let Some(cycle) = cycle(&graph) {
        panic!("a cycle: {}\n{graph:#?}", cycle.join(" → "));
    }
}

#[test]
fn the_domain_names_no_type_of_http_sql_or_the_layers_above() {
    let mut named = Vec::new();
    for path in files(DOMAIN, &["rs"]) {
        for found in paths(&code_of(&read(&path))) {
            let found = found.join("::");
            if LAYERS_ABOVE.iter().any(|layer| found == *layer || found.starts_with(&format!("{layer}::"))) {
                named.push(format!("{path}: {found}"));
            }
        }
    }
    assert!(named.is_empty(), "{named:#?}");
}

#[test]
fn a_cycle_is_found_and_named_from_its_beginning_to_its_end() {
    let graph = |edges: &[(&str, &[&str])]| -> Graph {
        edges.iter().map(|(unit, on)| ((*unit).to_owned(), on.iter().map(|on| (*on).to_owned()).collect())).collect()
    };
    assert_eq!(cycle(&graph(&[("a", &["b", "c"]), ("b", &["c"]), ("c", &[])])), None);
    let found = cycle(&graph(&[("a", &["b"]), ("b", &["c"]), ("c", &["d", "b"]), ("d", &[])]));
    assert_eq!(found.unwrap_or_default(), ["b", "c", "b"]);
}

#[test]
fn paths_are_read_from_nested_imports_and_from_code() {
    let code = code_of("use crate::{domain::{a, b::{self, C}}, x}; // crate::domain::d\nlet y = super::e::f(\"super::g::h\");");
    let found: Vec<String> = paths(&code).into_iter().map(|path| path.join("::")).filter(|path| path.contains("::")).collect();
    assert_eq!(found, ["crate::domain::a", "crate::domain::b::self", "crate::domain::b::C", "crate::x", "super::e::f"]);
}
