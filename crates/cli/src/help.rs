//! The command-line definition with help texts that fit any terminal width: prose is reflowed, examples keep their
//! layout.

use clap::{Command, CommandFactory};

use crate::Cli;

/// The definition used for parsing, help, completions and manual pages.
pub fn command() -> Command {
    reflow_help(Cli::command())
}

fn reflow_help(command: Command) -> Command {
    let command = match command.get_after_help().map(|text| reflow(&text.to_string())) {
        Some(text) => command.after_help(text),
        None => command,
    };
    command.mut_subcommands(reflow_help)
}

/// Joins the lines of a sentence, so that only the terminal's width breaks it. Examples and key lists are laid out by
/// hand; they are recognized by their double or leading spaces.
fn reflow(text: &str) -> String {
    let is_prose = |line: &str| !line.is_empty() && !line.contains("  ") && !line.starts_with(' ');
    let mut lines: Vec<String> = Vec::new();
    for line in text.lines() {
        match lines.last_mut() {
            Some(before) if is_prose(line) && is_prose(before) && !before.ends_with(['.', ':']) => {
                before.push(' ');
                before.push_str(line);
            }
            _ => lines.push(line.to_owned()),
        }
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prose_is_reflowed_and_examples_are_not() {
        let text = "One sentence that\ngoes on.\nAnother.\n\nExamples:\n  cobox up\n  cobox exec\nKeys:  ~. leave   ~? help\nEnd";
        let reflowed = "One sentence that goes on.\nAnother.\n\nExamples:\n  cobox up\n  cobox exec\nKeys:  ~. leave   ~? help\nEnd";
        assert_eq!(reflow(text), reflowed);
    }

    #[test]
    fn no_example_is_broken_by_a_terminal_of_80_columns() {
        let mut remaining = vec![command()];
        while let Some(command) = remaining.pop() {
            let text = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            let too_long: Vec<&str> = text.lines().filter(|line| line.starts_with(' ') && line.chars().count() > 80).collect();
            assert!(too_long.is_empty(), "in the help of {}: {too_long:#?}", command.get_name());
            remaining.extend(command.get_subcommands().cloned());
        }
    }
}
