//! The brokers of one deployment, as this one sees them.

pub mod clock_skew;
pub mod nodes;
