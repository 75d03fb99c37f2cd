//! Parses what a user types into a chat: a message, a slash command, or a decision on an action that the agent
//! proposes.

use cobox_langgraph::Decision;

/// A line that begins with a slash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Slash {
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
    ("/help", "", "this list"),
    ("/new", "", "a new thread"),
    ("/threads", "[id]", "threads there are; with an id, go on with it"),
    ("/assistant", "[name]", "who there is; with a name, talk to that one"),
    ("/sandbox list", "", "sandboxes you may use"),
    ("/sandbox use", "<name>", "bind this thread to a sandbox that exists"),
    ("/sandbox new", "[name]", "make this thread a sandbox now"),
    ("/terminal", "[name]", "the shared shell, or another of that name"),
    ("/files", "", "the sandbox's files"),
    ("/diff", "[path]", "what changed in a file since you came"),
    ("/events", "", "what happens in the sandbox"),
    ("/sync", "", "the state of sync"),
    ("/cancel", "", "end the run under way"),
    ("/clear", "", "empty the screen; the thread keeps all"),
    ("/quit", "", "leave; thread and sandbox live on"),
];

impl Slash {
    /// `None` for a message; an error for a command that can't be parsed. A line that begins with two slashes is a
    /// message.
    pub fn read(line: &str) -> Option<Result<Self, String>> {
        let line = line.trim();
        if !line.starts_with('/') || line.starts_with("//") {
            return None;
        }
        let mut words = line.split_whitespace();
        let word = words.next().unwrap_or_default();
        let rest: Vec<&str> = words.collect();
        let one = || match rest[..] {
            [] => Ok(None),
            [only] => Ok(Some(only.to_owned())),
            _ => Err(format!("{word} takes one word")),
        };
        Some(match word {
            "/help" | "/?" => Ok(Slash::Help),
            "/threads" | "/thread" | "/resume" => one().map(Slash::Threads),
            "/new" => Ok(Slash::New),
            "/assistant" | "/assistants" => one().map(Slash::Assistant),
            "/sandbox" => match rest[..] {
                [] | ["list" | "ls"] => Ok(Slash::SandboxList),
                ["use", name] => Ok(Slash::SandboxUse(name.to_owned())),
                ["new"] => Ok(Slash::SandboxNew(None)),
                ["new", name] => Ok(Slash::SandboxNew(Some(name.to_owned()))),
                _ => Err("/sandbox list, /sandbox use <name> or /sandbox new [name]".to_owned()),
            },
            "/terminal" | "/shell" => one().map(Slash::Terminal),
            "/files" => Ok(Slash::Files),
            "/diff" => one().map(Slash::Diff),
            "/events" => Ok(Slash::Events),
            "/sync" => Ok(Slash::Sync),
            "/cancel" | "/stop" => Ok(Slash::Cancel),
            "/clear" => Ok(Slash::Clear),
            "/quit" | "/exit" | "/q" => Ok(Slash::Quit),
            other => Err(format!("there is no {other}; /help lists what there is")),
        })
    }
}

/// The message as it is sent: a leading `//` escapes a single slash.
pub fn message(line: &str) -> &str {
    let line = line.trim();
    if line.starts_with("//") { &line[1..] } else { line }
}

/// Completes the line to the longest prefix that all matching commands share.
pub fn complete(line: &str) -> Option<String> {
    let fitting: Vec<&str> =
        COMMANDS.iter().map(|(name, ..)| *name).filter(|name| line.starts_with('/') && name.starts_with(line)).collect();
    let first = fitting.first()?;
    // Length of the common prefix of all matches.
    let shared =
        fitting.iter().fold(first.len(), |end, name| first.bytes().zip(name.bytes()).take(end).take_while(|(a, b)| a == b).count());
    let mut done = first[..shared].to_owned();
    if fitting.len() == 1 {
        done.push(' ');
    }
    (done.len() > line.len()).then_some(done)
}

/// Parses a decision on an action. `None` if the line is none of the offered answers.
pub fn decision(line: &str) -> Option<Result<Decision, String>> {
    let line = line.trim();
    let (word, rest) = line.split_once(char::is_whitespace).map_or((line, ""), |(word, rest)| (word, rest.trim()));
    Some(match word.trim_end_matches([',', '.', '!', ':']).to_lowercase().as_str() {
        "y" | "yes" | "approve" | "ok" => Ok(Decision::Approve),
        "n" | "no" | "reject" => Ok(Decision::Reject(rest.to_owned())),
        "edit" => serde_json::from_str(rest).map(Decision::Edit).map_err(|e| format!("these arguments are no JSON: {e}")),
        "say" | "respond" if !rest.is_empty() => Ok(Decision::Respond(rest.to_owned())),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn slash_commands_are_read_and_everything_else_is_a_message() {
        assert_eq!(Slash::read("hello /help"), None);
        assert_eq!((Slash::read("//etc/passwd"), message("//etc/passwd"), message(" hi ")), (None, "/etc/passwd", "hi"));
        assert_eq!(Slash::read("/sandbox list"), Some(Ok(Slash::SandboxList)));
        assert_eq!(Slash::read("/sandbox use dev"), Some(Ok(Slash::SandboxUse("dev".into()))));
        assert_eq!(Slash::read("/terminal build"), Some(Ok(Slash::Terminal(Some("build".into())))));
        assert_eq!(Slash::read("/quit"), Some(Ok(Slash::Quit)));
        assert!(matches!(Slash::read("/nonsense"), Some(Err(_))));
        assert!(matches!(Slash::read("/threads a b"), Some(Err(_))));
        for (name, ..) in COMMANDS {
            let line = if name == "/sandbox use" { "/sandbox use x" } else { name };
            assert!(matches!(Slash::read(line), Some(Ok(_))), "{name}");
        }
    }

    #[test]
    fn a_command_is_completed_as_far_as_it_is_the_only_one() {
        assert_eq!(complete("/he").as_deref(), Some("/help "));
        assert_eq!(complete("/sa").as_deref(), Some("/sandbox "));
        assert_eq!(complete("/sandbox l").as_deref(), Some("/sandbox list "));
        assert_eq!((complete("/x"), complete("he"), complete("/")), (None, None, None));
    }

    #[test]
    fn decisions_are_words() {
        assert_eq!(decision("Yes"), Some(Ok(Decision::Approve)));
        assert_eq!(decision("No, rather not"), Some(Ok(Decision::Reject("rather not".into()))));
        assert_eq!(decision("no rather not"), Some(Ok(Decision::Reject("rather not".into()))));
        assert_eq!(decision("edit {\"command\": \"ls\"}"), Some(Ok(Decision::Edit(json!({"command": "ls"})))));
        assert!(matches!(decision("edit ls"), Some(Err(_))));
        assert_eq!(decision("maybe"), None);
    }
}
