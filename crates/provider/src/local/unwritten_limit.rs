//! Limits the unwritten data of mounted images while the host's disk has little space. A program can write gigabytes per second to memory,
//! faster than any check of the disk reacts; with a limit it writes as fast as the image grows, which the disk's free space shows.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

/// Unwritten data of one image, in bytes: a burst of small files still doesn't wait.
const MAX_UNWRITTEN: u64 = 64 << 20;
/// The kernel's default, in percent of the memory that may be unwritten.
const DEFAULT_RATIO: u64 = 100;

/// Sets or removes the limit for all mounted images beneath a directory. Blocks. Kernels before 6.2 have no such limit.
pub fn apply(dir: &Path, is_limited: bool) -> io::Result<()> {
    for device in fs::read_dir("/sys/block")?.flatten().map(|entry| entry.path()) {
        if uses_image_beneath(&device, dir) {
            match limit(&device.join("bdi"), is_limited) {
                // The image has just been unmounted, or the kernel has no limit.
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                done => done?,
            }
        }
    }
    Ok(())
}

fn uses_image_beneath(device: &Path, dir: &Path) -> bool {
    let backing = fs::read_to_string(device.join("loop/backing_file"));
    backing.is_ok_and(|path| PathBuf::from(path.trim_end()).starts_with(dir))
}

fn limit(settings: &Path, is_limited: bool) -> io::Result<()> {
    let write = |name: &str, value: u64| {
        let path = settings.join(name);
        // Not `fs::write`, which would create a missing file.
        let mut file = fs::File::options().write(true).open(&path)?;
        io::Write::write_all(&mut file, value.to_string().as_bytes())
    };
    write("strict_limit", u64::from(is_limited))?;
    if is_limited { write("max_bytes", MAX_UNWRITTEN) } else { write("max_ratio", DEFAULT_RATIO) }
}
