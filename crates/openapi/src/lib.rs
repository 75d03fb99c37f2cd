//! OpenAPI documents, generated from tables of routes and from the protocol's types, and compared with the checked-in
//! files.
//!
//! Only used by tests; no released program contains it.

#![forbid(unsafe_code)]

mod document;
mod operation;
mod schemas;

pub use document::{Document, assert_checked_in, assert_valid};
pub use operation::{Operation, Parameter};
pub use schemas::{Schemas, Shape, bytes, read, written};
