//! Tokens as callers request them: issuing, delegating and revoking them, and links to single files.

pub mod delegation;
pub mod file_links;
pub mod issue;
pub mod revocation;
