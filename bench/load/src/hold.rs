//! Many shells held open, so that somebody else can look at what they cost.

use std::io::{self, Read, Write};

use anyhow::bail;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::{
    contender::Door,
    http::find,
    ws::{Message, Socket},
};

#[derive(Debug, Deserialize)]
pub struct Held {
    #[serde(flatten)]
    door: Door,
    count: usize,
    /// What runs in each.
    command: String,
    /// The last words of what it prints.
    until: String,
}

/// Opens them all, says so, and keeps them until standard input ends.
pub fn hold(held: &Held) -> anyhow::Result<()> {
    let mut sockets = Vec::with_capacity(held.count);
    for number in 0..held.count {
        let mut socket = Socket::open(&held.door)?;
        socket.send_json(&json!({ "type": "start", "shell": format!("held-{number}"), "command": held.command, "binary": true }))?;
        let mut output = Vec::new();
        while find(&output, held.until.as_bytes()).is_none() {
            // The last words may come in two pieces.
            output.drain(..output.len().saturating_sub(held.until.len()));
            match socket.next()? {
                Some(Message::Binary(frame)) => output.extend_from_slice(frame),
                Some(Message::Text(text)) => {
                    let frame: Value = serde_json::from_slice(text)?;
                    match frame["type"].as_str() {
                        Some("stdout") => output.extend_from_slice(frame["data"].as_str().unwrap_or_default().as_bytes()),
                        Some("error" | "exit") => bail!("shell {number}: {frame}"),
                        _ => {}
                    }
                }
                None => bail!("shell {number} was closed"),
            }
        }
        sockets.push(socket.into_wire());
    }
    writeln!(io::stdout(), "held")?;
    io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}
