//! Names the two ends of a sync.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The folder on the user's machine.
    Local,
    /// The folder in the sandbox.
    Sandbox,
}
