//! One function for each thing of Cobox that reads a stranger's bytes: given any input it returns, or panics because a promise was broken.

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

/// A moment all tokens here are good at.
const NOW: i64 = 1_800_000_000;

fn sandbox() -> SandboxId {
    "sb_00000000000000000000000001".parse().expect("it is written as an id is")
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

/// A directory that goes away, in memory where the machine has such a place.
fn temporary() -> TempDir {
    let memory = Path::new("/dev/shm");
    let place = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
    tempfile::tempdir_in(place).expect("a temporary directory can be made")
}

fn open(directory: &Path) -> OwnedFd {
    std::fs::File::open(directory).expect("it was just made").into()
}

/// Splits off the input's first bytes, which choose among the variants of a target.
fn choose<const N: usize>(data: &[u8]) -> ([u8; N], &[u8]) {
    match data.split_first_chunk::<N>() {
        Some((choice, rest)) => (*choice, rest),
        None => ([0; N], data),
    }
}

/// The inputs of a target that are kept with the code.
pub fn corpus(target: &str) -> Vec<PathBuf> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target);
    let entries = std::fs::read_dir(&directory).into_iter().flatten();
    let mut files: Vec<PathBuf> = entries.filter_map(|entry| entry.ok().map(|e| e.path())).collect();
    files.sort();
    files
}
