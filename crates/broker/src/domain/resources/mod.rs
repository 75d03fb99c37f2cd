//! Sandboxes as callers see them, and what they are made of: templates, snapshots, volumes and pools.

pub mod deleted_sandboxes;
pub mod langsmith_sandboxes;
pub mod pools;
pub mod reconciler;
pub mod records;
mod running_operations;
pub mod sandbox_spec;
pub mod sandboxes;
pub mod snapshots;
pub mod templates;
pub mod volumes;
