//! Status reports of a sync, as JSON and as text. Names from a sandbox are escaped before they reach a terminal.

use cobox_protocol::Timestamp;
use cobox_sync::{Conflict, Entry, Phase, Problem, RelPath, Status};
use serde_json::{Value, json};

use super::state_dir::SyncConfig;

/// Maximum number of conflicts and problems in text output; `--json` has all of them.
const MAX_SHOWN: usize = 20;

pub fn phase_name(phase: &Phase) -> &'static str {
    match phase {
        Phase::Connecting => "connecting",
        Phase::Scanning => "scanning",
        Phase::Syncing => "syncing",
        Phase::Watching => "watching",
        Phase::Paused => "paused",
        Phase::Halted(_) => "halted",
        Phase::Retrying(_) => "waiting",
        Phase::Ended => "ended",
    }
}

/// The reason why the sync has stopped or waits, if it has.
pub fn phase_reason(phase: &Phase) -> Option<String> {
    match phase {
        Phase::Halted(halt) => Some(halt.to_string()),
        Phase::Retrying(reason) => Some(reason.clone()),
        _ => None,
    }
}

/// What the user has to do, if the sync waits for that.
fn phase_advice(phase: &Phase) -> Option<&'static str> {
    match phase {
        Phase::Halted(halt) => Some(halt.advice()),
        _ => None,
    }
}

pub fn as_json(config: &SyncConfig, status: &Status) -> Value {
    let problems = |side: &'static str, problems: &std::collections::BTreeMap<RelPath, Problem>| -> Vec<Value> {
        problems
            .iter()
            .map(|(path, p)| json!({"side": side, "path": path.to_string(), "problem": p.as_str(), "message": p.to_string()}))
            .collect()
    };
    let all_problems = [problems("here", &status.local_problems), problems("sandbox", &status.sandbox_problems)].concat();
    let settled = status.synced_at.and_then(|at| at.duration_since(std::time::UNIX_EPOCH).ok());
    json!({
        "id": config.id,
        "folder": config.folder,
        "thread": config.thread,
        "sandbox": config.sandbox,
        "path": config.path,
        "mode": status.mode.as_str(),
        "phase": phase_name(&status.phase),
        "why": phase_reason(&status.phase),
        "advice": phase_advice(&status.phase),
        "files": {"here": status.local_files, "sandbox": status.sandbox_files, "agreed": status.synced_files},
        "conflicts": status.conflicts.iter().map(conflict).collect::<Vec<_>>(),
        "problems": all_problems,
        "held_back": status.held_back.iter().map(ToString::to_string).collect::<Vec<_>>(),
        "left_alone": status.unsynced_differences,
        "trash": {"bytes": status.trash.0, "limit_bytes": status.trash.1},
        "polling": {"here": status.is_polling[0], "sandbox": status.is_polling[1]},
        "settled_at": settled.map(|at| Timestamp::from_unix(i64::try_from(at.as_secs()).unwrap_or(0)).to_string()),
    })
}

fn conflict(conflict: &Conflict) -> Value {
    json!({"path": conflict.path.to_string(), "here": entry(conflict.local.as_ref()), "sandbox": entry(conflict.sandbox.as_ref())})
}

pub fn entry(entry: Option<&Entry>) -> Value {
    match entry {
        None => json!({"kind": "absent"}),
        Some(Entry::Dir) => json!({"kind": "folder"}),
        Some(Entry::File { digest, size, exec }) => json!({"kind": "file", "size": size, "executable": exec, "blake3": digest.to_string()}),
        Some(Entry::Link { target }) => json!({"kind": "link", "target": String::from_utf8_lossy(target)}),
    }
}

/// Text report; built from the JSON status, which may be the stored one of a sync that is no longer running.
pub fn as_text(status: &Value, is_running: bool) -> String {
    let text = |value: &Value| crate::printer::visible(value.as_str().unwrap_or("?"));
    let name = status["thread"].as_str().or(status["sandbox"].as_str()).unwrap_or("?");
    let mut lines = vec![format!("{}  <->  {}:{}", text(&status["folder"]), crate::printer::visible(name), text(&status["path"]))];
    let phase = if is_running { text(&status["phase"]) } else { "not running".to_owned() };
    lines.push(format!("{phase}, mode {}, {} files in sync", text(&status["mode"]), status["files"]["agreed"]));
    if let (Some(reason), true) = (status["why"].as_str(), is_running) {
        lines.push(crate::printer::visible(reason));
        if let Some(advice) = status["advice"].as_str() {
            lines.push(format!("  {advice}"));
        }
    }
    for (side, location) in [("here", "this folder"), ("sandbox", "the sandbox")] {
        if status["polling"][side] == true && is_running {
            lines.push(format!("changes in {location} may be delayed: the system's limit on watched folders is reached, so the folder is scanned every few seconds"));
        }
    }
    lines.extend(unsynced_files(status));
    lines.join("\n")
}

/// The files that are not in sync, one per line, with the reason and what to do about it.
pub fn unsynced_files(status: &Value) -> Vec<String> {
    let text = |value: &Value| crate::printer::visible(value.as_str().unwrap_or("?"));
    let mut lines = Vec::new();
    let mut list = |title: &str, items: &Value, line: &dyn Fn(&Value) -> String| {
        let items = items.as_array().map_or(&[][..], Vec::as_slice);
        if !items.is_empty() {
            lines.push(format!("{title} ({}):", items.len()));
            lines.extend(items.iter().take(MAX_SHOWN).map(|item| format!("  {}", line(item))));
            if items.len() > MAX_SHOWN {
                lines.push(format!("  and {} more", items.len() - MAX_SHOWN));
            }
        }
    };
    let side = |entry: &Value| match entry["kind"].as_str() {
        Some("file") => format!("{} bytes", entry["size"]),
        Some("link") => format!("link to {}", text(&entry["target"])),
        kind => kind.unwrap_or("?").to_owned(),
    };
    list("conflicts", &status["conflicts"], &|c| {
        format!("{}  (here: {}, sandbox: {})", text(&c["path"]), side(&c["here"]), side(&c["sandbox"]))
    });
    list("held back: this machine would run it automatically", &status["held_back"], &|p| text(p));
    list("not synced", &status["problems"], &|p| {
        let location = if p["side"] == "here" { "here" } else { "in the sandbox" };
        format!("{} {location}: {}", text(&p["path"]), text(&p["message"]))
    });
    if status["conflicts"].as_array().is_some_and(|c| !c.is_empty()) {
        lines.push(
            "show a conflict with `cobox sync diff PATH`; resolve it with `cobox sync resolve --keep here|sandbox|both PATH`".to_owned(),
        );
    }
    lines
}
