//! Disk limits: a filesystem image of fixed size per sandbox where loop devices and ext4 are available, otherwise measurements.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, bail};
use rustix::fs::{SeekFrom, seek};

use super::snapshot_copy;
use crate::HostDisk;

/// Checks whether filesystem images can be created and mounted on this machine; the error is the reason why not.
pub fn check_hard_limit_support(is_root: bool) -> Result<(), String> {
    if !is_root {
        return Err("only root can mount a filesystem image".to_owned());
    }
    File::options().read(true).write(true).open("/dev/loop-control").map_err(|e| format!("/dev/loop-control: {e}"))?;
    match fs::read_to_string("/proc/filesystems") {
        Ok(list) if list.split_ascii_whitespace().any(|f| f == "ext4") => {}
        _ => return Err("this kernel has no ext4".to_owned()),
    }
    mkfs().map(drop).ok_or_else(|| "mkfs.ext4 is not installed (package e2fsprogs)".to_owned())
}

fn mkfs() -> Option<PathBuf> {
    ["/usr/sbin/mkfs.ext4", "/sbin/mkfs.ext4", "/usr/bin/mkfs.ext4"].into_iter().map(PathBuf::from).find(|p| p.exists())
}

/// Free space that snapshots and volumes must leave on their disk, in bytes: sandboxes and the broker's database use it too.
const MIN_FREE: u64 = 1 << 30;

/// The bytes that can be written beneath a directory, at most `max`.
pub fn writable_bytes(dir: &Path, max: u64) -> anyhow::Result<u64> {
    let stat = rustix::fs::statvfs(dir)?;
    within(stat.f_bavail.saturating_mul(stat.f_frsize), max)
}

fn within(available: u64, max: u64) -> anyhow::Result<u64> {
    match available.saturating_sub(MIN_FREE) {
        0 => bail!("the machine's disk is nearly full"),
        writable => Ok(writable.min(max)),
    }
}

/// The default reserve is this fraction of the disk,
const RESERVE_DIVISOR: u64 = 20;
/// but at most so many bytes: half a second of writing to a fast disk,
const MAX_RESERVE: u64 = 1 << 30;
/// and at least so many, because a small disk is not slower,
const MIN_RESERVE: u64 = 256 << 20;
/// unless that were more than this fraction of the disk.
const SMALL_DISK_DIVISOR: u64 = 4;

/// The fuller one of the disks that hold sandboxes and the other files of the data directory, which may be the same. `unwritten` bytes are
/// not on either disk yet.
pub fn host_disk(sandboxes: &Path, data_dir: &Path, unwritten: u64, reserve: Option<u64>) -> io::Result<HostDisk> {
    let measure = |dir: &Path, reserve: &dyn Fn(u64) -> u64| {
        let stat = rustix::fs::statvfs(dir)?;
        let bytes = |blocks: u64| blocks.saturating_mul(stat.f_frsize);
        let reserve = reserve(bytes(stat.f_blocks));
        io::Result::Ok(HostDisk { available: bytes(stat.f_bavail), unwritten, reserve, holds_sandboxes: dir == sandboxes })
    };
    let disk = measure(sandboxes, &|size| reserve.unwrap_or_else(|| default_reserve(size)))?;
    if fs::metadata(sandboxes)?.dev() == fs::metadata(data_dir)?.dev() {
        return Ok(disk);
    }
    // The setting may be larger than this disk.
    let other = measure(data_dir, &|size| reserve.unwrap_or(u64::MAX).min(default_reserve(size)))?;
    Ok(fuller(disk, other))
}

/// The disk with the smaller part of its reserve.
fn fuller(one: HostDisk, other: HostDisk) -> HostDisk {
    let product = |a: u64, b: u64| u128::from(a) * u128::from(b);
    if product(other.writable(), one.reserve) < product(one.writable(), other.reserve) { other } else { one }
}

fn default_reserve(disk: u64) -> u64 {
    let least = MIN_RESERVE.min(disk / SMALL_DISK_DIVISOR);
    (disk / RESERVE_DIVISOR).clamp(least, MAX_RESERVE)
}

pub fn template_name(bytes: u64) -> String {
    format!("disk-{bytes}.img")
}

/// Creates an empty filesystem image of the given size, which is copied for each sandbox. Reuses an existing one.
pub fn template(dir: &Path, bytes: u64) -> anyhow::Result<PathBuf> {
    let path = dir.join(template_name(bytes));
    if path.exists() {
        return Ok(path);
    }
    let Some(mkfs) = mkfs() else { bail!("mkfs.ext4 is not installed (package e2fsprogs)") };
    let temporary = dir.join(format!(".disk-{bytes}-{}-{:?}.img", std::process::id(), std::thread::current().id()));
    File::create(&temporary)?.set_len(bytes)?;
    let output = Command::new(mkfs)
        // No blocks reserved for resizing: they would be most of the copied data.
        .args(["-q", "-F", "-m", "0", "-b", "4096", "-O", "^resize_inode", "-J", "size=4"])
        .args(["-E", "lazy_itable_init=1,lazy_journal_init=1,nodiscard"])
        .arg(&temporary)
        .output()
        .context("running mkfs.ext4")?;
    if !output.status.success() {
        bail!("mkfs.ext4 failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    fs::rename(&temporary, &path)?;
    Ok(path)
}

/// Rounds a size up, so that few different empty images have to be kept for copying.
pub fn round_up_image_size(bytes: u64) -> u64 {
    let step = if bytes <= 1 << 30 { 64 << 20 } else { 1 << 30 };
    bytes.div_ceil(step).saturating_mul(step)
}

/// Copies an image without its holes: a few hundred kilobytes for an image of any size.
pub fn copy_sparse(from: &Path, to: &Path) -> io::Result<()> {
    let temporary = to.with_extension("new");
    let (source, target) = (File::open(from)?, File::create(&temporary)?);
    let len = source.metadata()?.len();
    target.set_len(len)?;
    let mut at = 0;
    while at < len {
        let start = match seek(&source, SeekFrom::Data(at)) {
            Ok(start) => start,
            // There is no data after this offset.
            Err(rustix::io::Errno::NXIO) => break,
            Err(e) => return Err(e.into()),
        };
        let end = seek(&source, SeekFrom::Hole(start))?;
        snapshot_copy::copy_range(&source, &target, start, end)?;
        at = end;
    }
    fs::rename(temporary, to)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_reserve_is_a_twentieth_of_the_disk_within_limits() {
        const GIB: u64 = 1 << 30;
        assert_eq!(default_reserve(10 * GIB), GIB / 2);
        assert_eq!(default_reserve(1000 * GIB), GIB);
        assert_eq!(default_reserve(2 * GIB), GIB / 4);
        assert_eq!(default_reserve(GIB / 2), GIB / 8);
    }

    #[test]
    fn the_fuller_disk_has_the_smaller_part_of_its_reserve() {
        let disk = |available, reserve| HostDisk { available, unwritten: 10, reserve, holds_sandboxes: true };
        let (roomy, tight) = (disk(1010, 100), disk(2010, 1000));
        assert_eq!((fuller(roomy, tight), fuller(tight, roomy)), (tight, tight));
        assert_eq!(fuller(tight, disk(0, 0)), tight, "no reserve is set there");
    }

    #[test]
    fn snapshots_and_volumes_leave_free_space_on_the_disk() {
        assert_eq!(within(MIN_FREE + 10, 100).unwrap(), 10);
        assert_eq!(within(u64::MAX, 100).unwrap(), 100);
        assert!(within(MIN_FREE, 100).is_err() && within(0, 100).is_err());
    }
}
