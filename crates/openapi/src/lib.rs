//! OpenAPI documents, made from tables of routes and the types that go over the wire, and held to the files that are checked in.
//!
//! For tests: no program that is shipped makes them.

#![forbid(unsafe_code)]

mod document;
mod operation;
mod schemas;

pub use document::{Document, assert_checked_in, assert_sound};
pub use operation::{Operation, Parameter};
pub use schemas::{Schemas, Shape, bytes, read, written};
