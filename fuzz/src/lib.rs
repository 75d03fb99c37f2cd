//! One fuzz target for each part of Cobox that parses untrusted bytes. For any input it returns, or it panics because a
//! guarantee was broken.

#![forbid(unsafe_code)]

pub mod archive;
pub mod conversations;
pub mod cursors;
pub mod frames;
pub mod paths;
pub mod patterns;
pub mod ranges;
pub mod sync;
pub mod terminal;
pub mod tokens;

use std::{
    os::fd::OwnedFd,
    path::{Path, PathBuf},
};

use cobox_protocol::{CapabilitySet, SandboxId, key::PrincipalKind};
use cobox_token::{Actor, Claims};
use tempfile::TempDir;

/// A time at which all tokens here are valid.
const NOW: i64 = 1_800_000_000;

fn sandbox() -> SandboxId {
    "sb_00000000000000000000000001".parse().expect("the id is valid")
}

fn claims() -> Claims {
    Claims {
        iss: "cobox".into(),
        sub: "ada".into(),
        aud: sandbox(),
        sid: Some("ssn_1".into()),
        thread_id: None,
        scope: CapabilitySet::HUMAN_DEFAULT,
        iat: NOW,
        nbf: NOW,
        exp: NOW + 900,
        jti: "tok_1".into(),
        act: Actor { kind: PrincipalKind::Human, id: "ada".into() },
        generation: 1,
        grant: "grant-1".into(),
        parent: None,
        via: Vec::new(),
        file: None,
    }
}

/// A temporary directory, in memory if the machine has `/dev/shm`.
fn temporary() -> TempDir {
    let memory = Path::new("/dev/shm");
    let parent = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
    tempfile::tempdir_in(parent).expect("creating a temporary directory succeeds")
}

fn open(directory: &Path) -> OwnedFd {
    std::fs::File::open(directory).expect("the directory exists").into()
}

/// Splits off the input's first bytes, which choose among the variants of a target.
fn choose<const N: usize>(data: &[u8]) -> ([u8; N], &[u8]) {
    match data.split_first_chunk::<N>() {
        Some((choice, rest)) => (*choice, rest),
        None => ([0; N], data),
    }
}

/// The checked-in inputs of a target.
pub fn corpus(target: &str) -> Vec<PathBuf> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target);
    let entries = std::fs::read_dir(&directory).into_iter().flatten();
    let mut files: Vec<PathBuf> = entries.filter_map(|entry| entry.ok().map(|e| e.path())).collect();
    files.sort();
    files
}
