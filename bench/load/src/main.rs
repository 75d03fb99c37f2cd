//! The load generator of the dataplane benchmark. It reads a plan from standard input, measures all contenders in
//! turns, and writes the measured times. Its clients are blocking and hand-written, so that the server dominates the
//! measurement.

#![forbid(unsafe_code)]

mod connection;
mod contender;
mod echo;
mod exec;
mod files;
mod hold;
mod http;
mod observers;
mod rounds;
mod sshx;
mod stream;
mod ws;

use std::io::{self, Read, Write};

use anyhow::{Context, bail};

fn main() -> anyhow::Result<()> {
    let verb = std::env::args().nth(1).unwrap_or_default();
    match verb.as_str() {
        "measure" => {
            let mut text = String::new();
            io::stdin().read_to_string(&mut text)?;
            let plan: rounds::Plan = serde_json::from_str(&text).context("reading the plan")?;
            let measured = rounds::run(&plan);
            writeln!(io::stdout(), "{}", serde_json::to_string(&measured)?)?;
            Ok(())
        }
        "hold" => {
            let mut line = String::new();
            io::stdin().read_line(&mut line)?;
            hold::hold(&serde_json::from_str(&line).context("reading the specification of the shells")?)
        }
        _ => bail!("usage: cobox-bench measure|hold, with JSON on standard input"),
    }
}
