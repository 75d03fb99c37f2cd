//! Turns: everybody is measured in every round, in an order that changes, because what disturbs a machine must disturb all.

use std::{collections::BTreeMap, thread, time::Duration};

use serde::{Deserialize, Serialize};

use crate::contender::{Contender, Spec};

#[derive(Debug, Deserialize)]
pub struct Plan {
    pub rounds: usize,
    /// Measurements of each contender in a round.
    pub each: usize,
    /// Measurements of each before the first round, which count for nothing.
    pub warm_up: usize,
    /// Between two measurements.
    #[serde(default)]
    pub pause_ms: u64,
    /// Whether everything written is on disk before each measurement, so that nobody pays for what another wrote.
    #[serde(default)]
    pub settle: bool,
    pub contenders: Vec<Named>,
}

#[derive(Debug, Deserialize)]
pub struct Named {
    pub name: String,
    #[serde(flatten)]
    pub spec: Spec,
}

#[derive(Debug, Default, Serialize)]
pub struct Measured {
    /// Milliseconds, in the order they were taken.
    pub times: BTreeMap<String, Vec<f64>>,
    /// Who could not be measured, and why.
    pub failed: BTreeMap<String, String>,
}

pub fn run(plan: &Plan) -> Measured {
    let mut measured = Measured::default();
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
        // Another one begins each time, and every second round goes backwards: everybody has everybody else before it.
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
