//! What the engine knows about the sandbox's folder from its scans.

use std::collections::BTreeMap;

use crate::{ignore_rules::IgnoreRules, path::RelPath, problem::Problem, tree::Tree};

#[derive(Default)]
pub struct SandboxView {
    pub tree: Tree,
    pub problems: BTreeMap<RelPath, Problem>,
    pub rules: IgnoreRules,
    /// Whether the current connection has completed a scan.
    pub is_known: bool,
    /// Whether some changes are only found by full scans.
    pub is_partial: bool,
    /// The next round has to scan even if the sandbox reports no change.
    pub must_rescan: bool,
}

impl SandboxView {
    /// Forgets what a previous connection has reported.
    pub fn reset(&mut self) {
        *self = Self { is_partial: self.is_partial, must_rescan: self.must_rescan, ..Self::default() };
    }
}
