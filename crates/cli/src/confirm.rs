//! Asks a person before a command erases something. Without a terminal the command needs `--yes`.

use std::io::{self, BufRead as _, IsTerminal as _};

use cobox_client::{Client, ClientError};
use cobox_protocol::{
    ErrorCode,
    sandbox::{SandboxUsage, Uncounted},
};
use serde_json::{Value, json};

use crate::{context::Context, failure::Failure, span::rough};

/// Returns when the person agrees or has agreed already; a failure otherwise, and nothing is to be done.
pub fn confirm(context: &Context, question: &str, has_agreed: bool) -> Result<(), Failure> {
    if has_agreed {
        return Ok(());
    }
    if context.printer.is_json() || !io::stdin().is_terminal() || !io::stderr().is_terminal() {
        return Err(Failure::new(format!("this needs a confirmation: {question}")).advise("add --yes to do it without being asked"));
    }
    context.printer.err(format!("{question} [y/N] ").as_bytes());
    let mut answer = String::new();
    io::stdin().lock().read_line(&mut answer).map_err(|e| Failure::new(format!("the answer could not be read: {e}")))?;
    match answer.trim().to_ascii_lowercase().as_str() {
        "y" | "yes" => Ok(()),
        _ => Err(Failure::new("nothing was changed")),
    }
}

/// What deleting a sandbox would erase; `None` for a sandbox that the caller may not delete.
pub async fn usage(client: &Client, sandbox: &str) -> Result<Option<SandboxUsage>, ClientError> {
    match client.sandbox_usage(sandbox).await {
        Ok(usage) => Ok(Some(usage)),
        Err(e) if e.is(ErrorCode::Forbidden) => Ok(None),
        Err(e) => Err(e),
    }
}

/// "42 files, 1.2 MiB".
pub fn amount(usage: &SandboxUsage) -> String {
    let (Some(files), Some(bytes)) = (usage.files, usage.bytes) else {
        let why = match usage.uncounted {
            Some(Uncounted::OtherNode) => " (they are on another node, and only its broker can count them)",
            Some(Uncounted::Provider) => " (its provider could not count them)",
            Some(Uncounted::Unknown) | None => "",
        };
        return format!("an unknown number of files{why}");
    };
    let more = if usage.complete { "" } else { "more than " };
    let noun = if files == 1 { "file" } else { "files" };
    format!("{more}{files} {noun}, {}", indicatif::HumanBytes(bytes))
}

/// How it ends: at once, or after a time in which it can be restored.
pub fn way_back(usage: &SandboxUsage, sandbox: &str) -> String {
    match usage.restorable_seconds {
        0 => "they are erased at once and can't be restored".to_owned(),
        seconds => format!(
            "`cobox sandbox restore {sandbox}` brings them back within {}, or until you need the room for another sandbox",
            rough(seconds)
        ),
    }
}

/// Members of a command's JSON object that say what a deletion erased; `null` if it could not be counted.
pub fn erased(usage: &SandboxUsage) -> Value {
    let SandboxUsage { files, bytes, complete, restorable_seconds, .. } = usage;
    json!({ "files": files, "bytes": bytes, "complete": complete, "restorable_seconds": restorable_seconds })
}

/// As [`erased`], for a command that erased nothing.
pub fn nothing_erased() -> Value {
    json!({ "files": 0, "bytes": 0, "complete": true, "restorable_seconds": null })
}

/// A JSON object with the members of another one added.
pub fn with_members(mut object: Value, more: Value) -> Value {
    if let (Value::Object(object), Value::Object(more)) = (&mut object, more) {
        object.extend(more);
    }
    object
}
