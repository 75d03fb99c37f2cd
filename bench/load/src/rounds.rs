//! Measures all contenders in every round, in a changing order, so that disturbances of the machine affect all of them.

use std::{collections::BTreeMap, thread, time::Duration};

use serde::{Deserialize, Serialize};

use crate::contender::{Contender, ContenderSpec};

#[derive(Debug, Deserialize)]
pub struct Plan {
    pub rounds: usize,
    /// Number of measurements of each contender in a round.
    pub each: usize,
    /// Number of measurements of each contender before the first round, which are discarded.
    pub warm_up: usize,
    /// Milliseconds between two measurements.
    #[serde(default)]
    pub pause_ms: u64,
    /// Whether everything is written to disk before each measurement, so that no contender is delayed by the writes of
    /// another.
    #[serde(default)]
    pub settle: bool,
    pub contenders: Vec<NamedContender>,
}

#[derive(Debug, Deserialize)]
pub struct NamedContender {
    pub name: String,
    #[serde(flatten)]
    pub spec: ContenderSpec,
}

#[derive(Debug, Default, Serialize)]
pub struct Measurements {
    /// Milliseconds, in the order of measurement.
    pub times: BTreeMap<String, Vec<f64>>,
    /// Contenders that could not be measured, with the reason.
    pub failed: BTreeMap<String, String>,
}

pub fn run(plan: &Plan) -> Measurements {
    let mut measured = Measurements::default();
    let mut running: Vec<(String, Box<dyn Contender>)> = Vec::new();
    for named in &plan.contenders {
        match named.spec.prepare().and_then(|mut contender| {
            for _ in 0..plan.warm_up {
                contender.once()?;
            }
            Ok(contender)
        }) {
            Ok(contender) => running.push((named.name.clone(), contender)),
            Err(why) => _ = measured.failed.insert(named.name.clone(), format!("{why:#}")),
        }
    }
    for round in 0..plan.rounds {
        // Each round begins with another contender, and every second round is reversed, so that each contender follows
        // every other one.
        let turn = round % running.len().max(1);
        running.rotate_left(usize::from(turn > 0));
        if round % 2 == 1 {
            running.reverse();
        }
        running.retain_mut(|(name, contender)| match take(plan, contender.as_mut()) {
            Ok(times) => {
                measured.times.entry(name.clone()).or_default().extend(times);
                true
            }
            Err(why) => {
                measured.times.remove(name);
                measured.failed.insert(name.clone(), format!("{why:#}"));
                false
            }
        });
    }
    measured
}

fn take(plan: &Plan, contender: &mut dyn Contender) -> anyhow::Result<Vec<f64>> {
    (0..plan.each)
        .map(|_| {
            if plan.settle {
                rustix::fs::sync();
            }
            if plan.pause_ms > 0 {
                thread::sleep(Duration::from_millis(plan.pause_ms));
            }
            contender.once().map(|taken| taken.as_secs_f64() * 1e3)
        })
        .collect()
}
