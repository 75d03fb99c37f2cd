//! Keeps many shells open, so that another program can measure their cost.

use std::io::{self, Read, Write};

use anyhow::bail;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::{
    contender::Endpoint,
    http::find,
    ws::{Message, Socket},
};

#[derive(Debug, Deserialize)]
pub struct HoldSpec {
    #[serde(flatten)]
    endpoint: Endpoint,
    count: usize,
    /// The command that runs in each shell.
    command: String,
    /// The end of the command's output.
    until: String,
}

/// Opens all shells, prints `held`, and keeps them open until standard input ends.
pub fn hold(spec: &HoldSpec) -> anyhow::Result<()> {
    let mut sockets = Vec::with_capacity(spec.count);
    for number in 0..spec.count {
        let mut socket = Socket::open(&spec.endpoint)?;
        socket.send_json(&json!({ "type": "start", "shell": format!("held-{number}"), "command": spec.command, "binary": true }))?;
        let mut output = Vec::new();
        while find(&output, spec.until.as_bytes()).is_none() {
            // The expected text may arrive in two pieces.
            output.drain(..output.len().saturating_sub(spec.until.len()));
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
                None => bail!("the connection of shell {number} was closed"),
            }
        }
        sockets.push(socket.into_wire());
    }
    writeln!(io::stdout(), "held")?;
    io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}
