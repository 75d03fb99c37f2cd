//! Snapshots of every command's help, generated from the definitions so that no command is missed; also requires a
//! transcript of each command's output.

use std::{collections::BTreeSet, path::PathBuf};

use crate::help;

/// Terminal width in columns of the snapshots.
const WIDTH: usize = 100;

/// Commands without a transcript among the snapshots, and what tests them instead.
const NO_TRANSCRIPT: &[(&str, &str)] = &[
    ("up", "runs until stopped; tests/command_line.rs"),
    ("serve", "runs until stopped; every end-to-end test with a database"),
    ("shell", "needs a terminal; tests/e2e/terminals.rs"),
    ("session connect", "is `shell`; tests/e2e/cli_state.rs"),
    ("sandbox connect", "is `shell`; tests/e2e/cli_state.rs"),
    ("sandbox sync", "is `sync`; tests/e2e/cli_state.rs"),
    ("session events", "runs until the session ends; tests/e2e/events.rs"),
    ("sandbox restore", "needs a broker that keeps deleted sandboxes; tests/e2e/deleted_sandboxes.rs"),
    ("watch", "runs until stopped; tests/e2e/events.rs"),
    ("doctor", "depends on the machine; tests/e2e/isolation"),
    ("completions", "prints a shell script; tests/completions.rs"),
    ("man", "prints manual pages; tests/completions.rs"),
];

/// Every command except `help`, with its full name as typed.
pub fn commands() -> Vec<(String, clap::Command)> {
    let mut cli = help::command().term_width(WIDTH).disable_help_subcommand(true);
    cli.build();
    let mut found = Vec::new();
    let mut remaining = vec![(String::new(), cli)];
    while let Some((name, command)) = remaining.pop() {
        let named = |sub: &clap::Command| format!("{name} {}", sub.get_name()).trim().to_owned();
        remaining.extend(command.get_subcommands().filter(|sub| !sub.is_hide_set()).map(|sub| (named(sub), sub.clone())));
        found.push((name, command));
    }
    found.sort_by(|a, b| a.0.cmp(&b.0));
    found
}

fn snapshot_name(kind: &str, command: &str) -> String {
    let name = if command.is_empty() { "cobox" } else { command };
    format!("{kind}__{}", name.replace([' ', '-'], "_"))
}

fn snapshots(kind: &str) -> BTreeSet<String> {
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/snapshots");
    let names = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter_map(|name| name.strip_suffix(".snap").filter(|n| n.starts_with(kind)).map(str::to_owned)).collect()
}

#[test]
fn the_help_of_every_command_matches_its_snapshot() {
    let mut settings = insta::Settings::clone_current();
    settings.set_snapshot_path("../tests/snapshots");
    settings.set_prepend_module_to_snapshot(false);
    settings.set_omit_expression(true);
    let mut expected = BTreeSet::new();
    for (name, mut command) in commands() {
        let snapshot = snapshot_name("help", &name);
        let help = command.render_long_help().to_string();
        settings.bind(|| insta::assert_snapshot!(snapshot.clone(), help.trim_end()));
        expected.insert(snapshot);
    }
    let stale: Vec<_> = snapshots("help__").difference(&expected).cloned().collect();
    assert!(stale.is_empty(), "snapshots of commands that no longer exist; remove them: {stale:?}");
}

#[test]
fn every_command_has_a_transcript_or_a_documented_exception() {
    let transcripts = snapshots("output__");
    for (name, command) in commands() {
        // Some commands with subcommands also do something on their own.
        let is_leaf = command.get_subcommands().next().is_none() || !command.is_subcommand_required_set();
        if name.is_empty() || !is_leaf {
            continue;
        }
        let has_excuse = NO_TRANSCRIPT.iter().any(|(excused, _)| *excused == name);
        let has_transcript = transcripts.contains(&snapshot_name("output", &name));
        assert!(has_excuse || has_transcript, "`cobox {name}` has no transcript; add one to tests/output/main.rs");
        assert!(!(has_excuse && has_transcript), "`cobox {name}` has a transcript and an exception from it");
    }
}

#[test]
fn every_command_accepts_json_and_has_a_description() {
    for (name, command) in commands() {
        let has_json = command.get_arguments().any(|arg| arg.get_long() == Some("json"));
        assert!(has_json, "`cobox {name}` has no --json");
        assert!(name.is_empty() || command.get_about().is_some(), "`cobox {name}` has no description");
    }
}
