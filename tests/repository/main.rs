//! The repository against its own documents and conventions: read as text, nothing is started.

mod documents;
mod layers;
mod names;
mod specification;

use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("this crate is a directory of the repository").to_owned()
}

/// The text of a file, named from the top of the repository.
fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// Files beneath a directory with one of these extensions, build output excluded, as paths from the top of the repository.
fn files(dir: &str, extensions: &[&str]) -> Vec<String> {
    let mut found = Vec::new();
    let mut directories = vec![root().join(dir)];
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(&directory).unwrap_or_else(|e| panic!("{}: {e}", directory.display())) {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if path.is_dir() {
                let is_generated = name == "target" || name == "node_modules" || name == "__pycache__" || name.starts_with('.');
                if !is_generated && !path.is_symlink() {
                    directories.push(path);
                }
            } else if path.extension().is_some_and(|e| extensions.iter().any(|wanted| e == *wanted)) {
                found.push(path.strip_prefix(root()).unwrap().to_string_lossy().into_owned());
            }
        }
    }
    found.sort();
    found
}
