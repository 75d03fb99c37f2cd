//! Detects and repairs failed filesystem images. When the host's disk is full or defective, the kernel aborts the journal of an image's
//! filesystem and accepts no more writes until the image has been checked and mounted again.

use std::{
    collections::HashSet,
    fs::{self, File},
    io,
    os::unix::fs::{FileExt, MetadataExt},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, bail};
use rustix::{
    fs::{FlockOperation, flock},
    io::Errno,
};
use tokio::process::Command;

use super::disk_image::images_in;

/// Where ext4's superblock begins, in bytes.
const SUPERBLOCK: u64 = 1024;
const MAGIC_OFFSET: usize = 0x38;
const MAGIC: u16 = 0xEF53;
const STATE_OFFSET: usize = 0x3A;
/// Flag in the state: an error was found while the filesystem was mounted.
const HAS_ERRORS: u16 = 2;
/// Mount options of a filesystem that accepts no more writes: `ro` up to Linux 6.14, the others since.
const FAILED_OPTIONS: [&str; 3] = ["ro", "emergency_ro", "shutdown"];
/// Time limit of e2fsck, which needs less than a minute for a full image of 64 GiB.
const CHECK_TIMEOUT: Duration = Duration::from_secs(300);
/// Time for the kernel to release an image after its last unmount.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(5);
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Maximum length of e2fsck's report in the log, in characters.
const MAX_REPORT: usize = 2000;

/// Finds mounted images, named `disk.img` and one level below these directories, whose filesystem accepts no more writes.
pub fn failed_images(dirs: &[PathBuf]) -> Vec<PathBuf> {
    let devices = fs::read_dir("/proc/fs/ext4").into_iter().flatten().flatten().filter_map(|e| e.file_name().into_string().ok());
    let failed = devices.filter(|name| name.starts_with("loop")).filter_map(|name| {
        let options = fs::read_to_string(format!("/proc/fs/ext4/{name}/options")).ok()?;
        options.lines().any(|option| FAILED_OPTIONS.contains(&option)).then_some(())?;
        cobox_kernel::loop_backing_file(File::open(format!("/dev/{name}")).ok()?).ok()
    });
    let failed: HashSet<(u64, u64)> = failed.collect();
    if failed.is_empty() {
        return Vec::new();
    }
    images_in(dirs).filter(|image| fs::metadata(image).is_ok_and(|m| failed.contains(&(m.dev(), m.ino())))).collect()
}

/// Checks and repairs an image whose filesystem failed when it was last mounted. Does nothing for a healthy one.
pub async fn repair(image: &Path) -> anyhow::Result<()> {
    let file = File::options().read(true).write(true).open(image)?;
    if !has_errors(&file)? {
        return Ok(());
    }
    wait_until_free(&file, image).await?;
    // A concurrent start may have repaired it in the meantime.
    if !has_errors(&file)? {
        return Ok(());
    }
    tracing::warn!(image = %image.display(), "the filesystem of an image has errors; running e2fsck");
    // First only safe repairs, then all repairs: an image that can't be mounted is useless anyway.
    for options in [&["-p"][..], &["-f", "-y"]] {
        let checking = Command::new(e2fsck()?).args(options).arg(image).env("LC_ALL", "C").kill_on_drop(true).output();
        let output = tokio::time::timeout(CHECK_TIMEOUT, checking)
            .await
            .with_context(|| format!("e2fsck did not finish within {} s", CHECK_TIMEOUT.as_secs()))?
            .context("running e2fsck")?;
        let report = String::from_utf8_lossy(&output.stdout).chars().take(MAX_REPORT).collect::<String>();
        // 1: errors were corrected.
        if let Some(code @ (0 | 1)) = output.status.code() {
            tracing::warn!(image = %image.display(), code, report = report.trim(), "the filesystem of an image was repaired");
            return Ok(());
        }
        tracing::error!(image = %image.display(), status = %output.status, report = report.trim(), "e2fsck left errors");
    }
    bail!("its filesystem is damaged and e2fsck could not repair it; the image is kept, and the broker's log has e2fsck's report")
}

/// Waits for the image's lock, which its loop device holds while it is mounted anywhere.
async fn wait_until_free(file: &File, image: &Path) -> anyhow::Result<()> {
    let deadline = tokio::time::Instant::now() + RELEASE_TIMEOUT;
    loop {
        match flock(file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(()),
            Err(Errno::WOULDBLOCK) if tokio::time::Instant::now() < deadline => tokio::time::sleep(POLL_INTERVAL).await,
            Err(Errno::WOULDBLOCK) => bail!("the filesystem of {} failed, and it is still in use", image.display()),
            Err(e) => return Err(e.into()),
        }
    }
}

/// Whether the kernel recorded errors in the superblock.
fn has_errors(image: &File) -> io::Result<bool> {
    let mut block = [0u8; 64];
    image.read_exact_at(&mut block, SUPERBLOCK)?;
    let field = |offset: usize| u16::from_le_bytes([block[offset], block[offset + 1]]);
    Ok(field(MAGIC_OFFSET) == MAGIC && field(STATE_OFFSET) & HAS_ERRORS != 0)
}

fn e2fsck() -> anyhow::Result<PathBuf> {
    let found = ["/usr/sbin/e2fsck", "/sbin/e2fsck", "/usr/bin/e2fsck"].into_iter().map(PathBuf::from).find(|p| p.exists());
    found.context("e2fsck is not installed (package e2fsprogs)")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::local::disk_limit;

    #[tokio::test]
    async fn an_image_with_errors_is_repaired_and_a_healthy_one_is_left_unchanged() {
        let dir = tempfile::tempdir().unwrap();
        if disk_limit::check_hard_limit_support(true).is_err() {
            return;
        }
        let image = disk_limit::template(dir.path(), 16 << 20).unwrap();
        let file = File::options().read(true).write(true).open(&image).unwrap();
        assert!(!has_errors(&file).unwrap());
        repair(&image).await.unwrap();
        // Sets the same state as the kernel would, with the right checksum.
        let marked =
            std::process::Command::new("/usr/sbin/debugfs").args(["-w", "-R", "set_super_value state 3"]).arg(&image).output().unwrap();
        assert!(marked.status.success(), "{marked:?}");
        assert!(has_errors(&file).unwrap());
        repair(&image).await.unwrap();
        assert!(!has_errors(&file).unwrap());
    }
}
