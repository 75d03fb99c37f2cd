//! The command line's definition with its help as a terminal of any width shows it well: prose flows, examples stay as they are.

use clap::{Command, CommandFactory};

use crate::Cli;

/// What is parsed, shown as help, completed, and written as pages for `man`.
pub fn command() -> Command {
    flowing(Cli::command())
}

fn flowing(command: Command) -> Command {
    let command = match command.get_after_help().map(|text| flow(&text.to_string())) {
        Some(text) => command.after_help(text),
        None => command,
    };
    command.mut_subcommands(flowing)
}

/// Joins the lines of a sentence, so that it is broken where the terminal ends and nowhere else. Examples and lists of keys are
/// laid out by hand, which their spaces tell.
fn flow(text: &str) -> String {
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
    fn sentences_flow_and_examples_stay() {
        let text = "One sentence that\ngoes on.\nAnother.\n\nExamples:\n  cobox up\n  cobox exec\nKeys:  ~. leave   ~? help\nEnd";
        let flown = "One sentence that goes on.\nAnother.\n\nExamples:\n  cobox up\n  cobox exec\nKeys:  ~. leave   ~? help\nEnd";
        assert_eq!(flow(text), flown);
    }

    #[test]
    fn no_example_is_broken_by_a_terminal_of_80_columns() {
        let mut left = vec![command()];
        while let Some(command) = left.pop() {
            let text = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            let long: Vec<&str> = text.lines().filter(|line| line.starts_with(' ') && line.chars().count() > 80).collect();
            assert!(long.is_empty(), "in the help of {}: {long:#?}", command.get_name());
            left.extend(command.get_subcommands().cloned());
        }
    }
}
