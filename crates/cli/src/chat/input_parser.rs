//! Parses what a user types into a chat: a message, a slash command, or a decision on an action that the agent
//! proposes.

use cobox_langgraph::Decision;

/// A line that begins with a slash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SlashCommand {
    Help,
    /// Lists the threads, or continues the one with this id.
    Threads(Option<String>),
    New,
    Assistant(Option<String>),
    SandboxList,
    SandboxUse(String),
    SandboxNew(Option<String>),
    /// Opens a shell by name; creates a sandbox if the thread has none.
    Terminal(Option<String>),
    Files,
    Diff(Option<String>),
    Events,
    Sync,
    Cancel,
    Clear,
    Quit,
}

/// Every command with its arguments and its effect, in the order of the help.
pub const COMMANDS: [(&str, &str, &str); 15] = [
    ("/help", "", "show this help"),
    ("/new", "", "start a new thread"),
    ("/threads", "[id]", "list threads, or resume the one with this id"),
    ("/assistant", "[name]", "list assistants, or chat with this one"),
    ("/sandbox list", "", "list the sandboxes that you can use"),
    ("/sandbox use", "<name>", "bind this thread to an existing sandbox"),
    ("/sandbox new", "[name]", "create a sandbox for this thread"),
    ("/terminal", "[name]", "attach to the shared shell, or the named one"),
    ("/files", "", "show the sandbox's files"),
    ("/diff", "[path]", "show changes in a file since you joined"),
    ("/events", "", "show the sandbox's events"),
    ("/sync", "", "show the state of the sync"),
    ("/cancel", "", "cancel the current run"),
    ("/clear", "", "clear the screen; the thread keeps its messages"),
    ("/quit", "", "quit; the thread and sandbox keep running"),
];

impl SlashCommand {
    /// `None` for a message; an error for a command that can't be parsed. A line that begins with two slashes is a
    /// message.
    pub fn parse(line: &str) -> Option<Result<Self, String>> {
        let line = line.trim();
        if !line.starts_with('/') || line.starts_with("//") {
            return None;
        }
        let mut words = line.split_whitespace();
        let name = words.next().unwrap_or_default();
        let arguments: Vec<&str> = words.collect();
        let optional_argument = || match arguments[..] {
            [] => Ok(None),
            [argument] => Ok(Some(argument.to_owned())),
            _ => Err(format!("{name} takes at most one argument")),
        };
        Some(match name {
            "/help" | "/?" => Ok(SlashCommand::Help),
            "/threads" | "/thread" | "/resume" => optional_argument().map(SlashCommand::Threads),
            "/new" => Ok(SlashCommand::New),
            "/assistant" | "/assistants" => optional_argument().map(SlashCommand::Assistant),
            "/sandbox" => match arguments[..] {
                [] | ["list" | "ls"] => Ok(SlashCommand::SandboxList),
                ["use", name] => Ok(SlashCommand::SandboxUse(name.to_owned())),
                ["new"] => Ok(SlashCommand::SandboxNew(None)),
                ["new", name] => Ok(SlashCommand::SandboxNew(Some(name.to_owned()))),
                _ => Err("usage: /sandbox list, /sandbox use <name> or /sandbox new [name]".to_owned()),
            },
            "/terminal" | "/shell" => optional_argument().map(SlashCommand::Terminal),
            "/files" => Ok(SlashCommand::Files),
            "/diff" => optional_argument().map(SlashCommand::Diff),
            "/events" => Ok(SlashCommand::Events),
            "/sync" => Ok(SlashCommand::Sync),
            "/cancel" | "/stop" => Ok(SlashCommand::Cancel),
            "/clear" => Ok(SlashCommand::Clear),
            "/quit" | "/exit" | "/q" => Ok(SlashCommand::Quit),
            other => Err(format!("unknown command {other}; /help lists the commands")),
        })
    }
}

/// The message as it is sent: a leading `//` escapes a single slash.
pub fn message_text(line: &str) -> &str {
    let line = line.trim();
    if line.starts_with("//") { &line[1..] } else { line }
}

/// Completes the line to the longest prefix that all matching commands share.
pub fn complete_command(line: &str) -> Option<String> {
    let matching: Vec<&str> =
        COMMANDS.iter().map(|(name, ..)| *name).filter(|name| line.starts_with('/') && name.starts_with(line)).collect();
    let first = matching.first()?;
    // Length of the common prefix of all matches.
    let shared_length =
        matching.iter().fold(first.len(), |end, name| first.bytes().zip(name.bytes()).take(end).take_while(|(a, b)| a == b).count());
    let mut completed = first[..shared_length].to_owned();
    if matching.len() == 1 {
        completed.push(' ');
    }
    (completed.len() > line.len()).then_some(completed)
}

/// Parses a decision on an action. `None` if the line is none of the offered answers.
pub fn parse_decision(line: &str) -> Option<Result<Decision, String>> {
    let line = line.trim();
    let (verb, text) = line.split_once(char::is_whitespace).map_or((line, ""), |(verb, text)| (verb, text.trim()));
    Some(match verb.trim_end_matches([',', '.', '!', ':']).to_lowercase().as_str() {
        "y" | "yes" | "approve" | "ok" => Ok(Decision::Approve),
        "n" | "no" | "reject" => Ok(Decision::Reject(text.to_owned())),
        "edit" => serde_json::from_str(text).map(Decision::Edit).map_err(|e| format!("the arguments are not valid JSON: {e}")),
        "say" | "respond" if !text.is_empty() => Ok(Decision::Respond(text.to_owned())),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn slash_commands_are_parsed_and_other_lines_are_messages() {
        assert_eq!(SlashCommand::parse("hello /help"), None);
        assert_eq!((SlashCommand::parse("//etc/passwd"), message_text("//etc/passwd"), message_text(" hi ")), (None, "/etc/passwd", "hi"));
        assert_eq!(SlashCommand::parse("/sandbox list"), Some(Ok(SlashCommand::SandboxList)));
        assert_eq!(SlashCommand::parse("/sandbox use dev"), Some(Ok(SlashCommand::SandboxUse("dev".into()))));
        assert_eq!(SlashCommand::parse("/terminal build"), Some(Ok(SlashCommand::Terminal(Some("build".into())))));
        assert_eq!(SlashCommand::parse("/quit"), Some(Ok(SlashCommand::Quit)));
        assert!(matches!(SlashCommand::parse("/nonsense"), Some(Err(_))));
        assert!(matches!(SlashCommand::parse("/threads a b"), Some(Err(_))));
        for (name, ..) in COMMANDS {
            let line = if name == "/sandbox use" { "/sandbox use x" } else { name };
            assert!(matches!(SlashCommand::parse(line), Some(Ok(_))), "{name}");
        }
    }

    #[test]
    fn a_command_is_completed_to_the_common_prefix() {
        assert_eq!(complete_command("/he").as_deref(), Some("/help "));
        assert_eq!(complete_command("/sa").as_deref(), Some("/sandbox "));
        assert_eq!(complete_command("/sandbox l").as_deref(), Some("/sandbox list "));
        assert_eq!((complete_command("/x"), complete_command("he"), complete_command("/")), (None, None, None));
    }

    #[test]
    fn decisions_are_parsed_from_words() {
        assert_eq!(parse_decision("Yes"), Some(Ok(Decision::Approve)));
        assert_eq!(parse_decision("No, rather not"), Some(Ok(Decision::Reject("rather not".into()))));
        assert_eq!(parse_decision("no rather not"), Some(Ok(Decision::Reject("rather not".into()))));
        assert_eq!(parse_decision("edit {\"command\": \"ls\"}"), Some(Ok(Decision::Edit(json!({"command": "ls"})))));
        assert!(matches!(parse_decision("edit ls"), Some(Err(_))));
        assert_eq!(parse_decision("maybe"), None);
    }
}
