//! Asks for confirmation before a command erases files. Without a terminal the command requires `--yes`.

use std::io::{self, BufRead as _, IsTerminal as _};

use cobox_client::{Client, ClientError};
use cobox_protocol::{
    ErrorCode,
    sandbox::{SandboxUsage, Uncounted},
};
use serde_json::{Value, json};

use crate::{context::Context, duration::approximate, failure::Failure};

/// Returns if the user agrees or `has_agreed`; otherwise fails, and the caller must not proceed.
pub fn confirm(context: &Context, question: &str, has_agreed: bool) -> Result<(), Failure> {
    if has_agreed {
        return Ok(());
    }
    if context.printer.is_json() || !io::stdin().is_terminal() || !io::stderr().is_terminal() {
        return Err(Failure::new(format!("confirmation required: {question}")).with_advice("pass --yes to skip the confirmation"));
    }
    context.printer.err(format!("{question} [y/N] ").as_bytes());
    let mut answer = String::new();
    io::stdin().lock().read_line(&mut answer).map_err(|e| Failure::new(format!("reading the answer: {e}")))?;
    match answer.trim().to_ascii_lowercase().as_str() {
        "y" | "yes" => Ok(()),
        _ => Err(Failure::new("cancelled; nothing was changed")),
    }
}

/// The files that deleting a sandbox would erase; `None` if the caller may not delete it.
pub async fn usage(client: &Client, sandbox: &str) -> Result<Option<SandboxUsage>, ClientError> {
    match client.sandbox_usage(sandbox).await {
        Ok(usage) => Ok(Some(usage)),
        Err(e) if e.is(ErrorCode::Forbidden) => Ok(None),
        Err(e) => Err(e),
    }
}

/// A size such as "42 files, 1.2 MiB".
pub fn format_usage(usage: &SandboxUsage) -> String {
    let (Some(files), Some(bytes)) = (usage.files, usage.bytes) else {
        let reason = match usage.uncounted {
            Some(Uncounted::OtherNode) => " (the sandbox is on another node, and only that node can count its files)",
            Some(Uncounted::Provider) => " (the provider could not count them)",
            Some(Uncounted::Unknown) | None => "",
        };
        return format!("an unknown number of files{reason}");
    };
    let prefix = if usage.complete { "" } else { "more than " };
    let noun = if files == 1 { "file" } else { "files" };
    format!("{prefix}{files} {noun}, {}", indicatif::HumanBytes(bytes))
}

/// Whether the files are erased immediately, or how they can be restored and for how long.
pub fn restore_hint(usage: &SandboxUsage, sandbox: &str) -> String {
    match usage.restorable_seconds {
        0 => "they are erased immediately and can't be restored".to_owned(),
        seconds => format!(
            "restore them with `cobox sandbox restore {sandbox}` within {}, or until one of your new sandboxes would exceed a limit",
            approximate(seconds)
        ),
    }
}

/// Members of a command's JSON object that report what a deletion erased; `null` if it could not be counted.
pub fn erased_json(usage: &SandboxUsage) -> Value {
    let SandboxUsage { files, bytes, complete, restorable_seconds, .. } = usage;
    json!({ "files": files, "bytes": bytes, "complete": complete, "restorable_seconds": restorable_seconds })
}

/// The members of [`erased_json`] for a command that erased nothing.
pub fn nothing_erased_json() -> Value {
    json!({ "files": 0, "bytes": 0, "complete": true, "restorable_seconds": null })
}

/// Adds the members of `members` to a JSON object.
pub fn merge_members(mut object: Value, members: Value) -> Value {
    if let (Value::Object(object), Value::Object(members)) = (&mut object, members) {
        object.extend(members);
    }
    object
}
