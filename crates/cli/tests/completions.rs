//! Tests shell completions and manual pages with the programs that read them.

use std::{fs, process::Command};

fn cobox(args: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_cobox")).env_clear().args(args).output().expect("cobox runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

/// The completions that bash would offer for this line.
fn bash_completions(script: &str, words: &[&str]) -> Vec<String> {
    let line = words.iter().map(|w| format!("'{w}'")).collect::<Vec<_>>().join(" ");
    let last = words.len() - 1;
    let (current, before) = (words[last], words[last - 1]);
    let test = format!("COMP_WORDS=({line}); COMP_CWORD={last}; _cobox cobox '{current}' '{before}'; printf '%s\\n' \"${{COMPREPLY[@]}}\"");
    let dir = tempfile::tempdir().expect("a directory");
    fs::write(dir.path().join("cobox"), script).expect("a file");
    let output =
        Command::new("bash").current_dir(&dir).args(["--norc", "-euc", &format!(". ./cobox\n{test}")]).output().expect("bash runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text").lines().map(str::to_owned).collect()
}

#[test]
fn bash_completes_commands_subcommands_and_options() {
    let script = cobox(&["completions", "bash"]);
    assert_eq!(bash_completions(&script, &["cobox", "sess"]), ["session"]);
    assert_eq!(bash_completions(&script, &["cobox", "session", "ens"]), ["ensure"]);
    assert_eq!(bash_completions(&script, &["cobox", "watch", "--hist"]), ["--history"]);
    assert_eq!(bash_completions(&script, &["cobox", "completions", "z"]), ["zsh"]);
}

#[test]
fn zsh_and_fish_have_completions() {
    assert!(cobox(&["completions", "zsh"]).starts_with("#compdef cobox"));
    assert!(cobox(&["completions", "fish"]).contains("complete -c cobox"));
    let output: serde_json::Value = serde_json::from_str(&cobox(&["--json", "completions", "fish"])).unwrap();
    assert_eq!(output["shell"], "fish");
}

#[test]
fn there_is_a_manual_page_for_cobox_and_for_each_of_its_commands() {
    let page = cobox(&["man"]);
    assert!(page.contains(".TH cobox 1") && page.contains("One sandbox, shared"), "{page}");
    let dir = tempfile::tempdir().unwrap();
    let output = cobox(&["man", "--dir", dir.path().join("man1").to_str().unwrap()]);
    assert!(output.starts_with("wrote "), "{output}");
    for page in ["cobox.1", "cobox-session.1", "cobox-session-ensure.1", "cobox-watch.1"] {
        let text = fs::read_to_string(dir.path().join("man1").join(page)).unwrap();
        assert!(text.contains(".SH NAME"), "{page}");
    }
    assert!(!dir.path().join("man1/cobox-help.1").exists());
}
