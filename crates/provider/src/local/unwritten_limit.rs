//! Limits the unwritten data of mounted images while the host's disk has little space. A program can write gigabytes per second to memory,
//! faster than any check of the disk reacts; with a limit it writes as fast as the image grows, which the disk's free space shows.
//!
//! The limit belongs to the loop device and outlives the image that was attached to it, so it is removed when a device gets an image.

use std::{
    collections::HashSet,
    fs, io,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use super::disk_image;

/// Unwritten data of one image, in bytes: a burst of small files still doesn't wait.
const MAX_UNWRITTEN: u64 = 64 << 20;
/// The kernel's default, in percent of the memory that may be unwritten.
const DEFAULT_RATIO: u64 = 100;
/// Time between two searches for images that were mounted since, and between two attempts after an error.
const UPDATE_INTERVAL: Duration = Duration::from_millis(250);

/// The limit of this node's images. Kernels before 6.2 have no such limit.
#[derive(Default)]
pub struct UnwrittenLimit {
    /// The last update: when it was, and whether images were to be limited. `None` before the first one: an earlier broker may have
    /// left limits.
    last: Option<(Instant, bool)>,
    has_failed: bool,
    has_warned: bool,
    /// Names of the devices with a limit.
    limited: HashSet<String>,
}

impl UnwrittenLimit {
    pub fn is_due(&self, is_limited: bool) -> bool {
        self.last
            .is_none_or(|(at, was_limited)| was_limited != is_limited || (is_limited || self.has_failed) && at.elapsed() >= UPDATE_INTERVAL)
    }

    /// Sets or removes the limit of all mounted images one level below these directories. Blocks.
    pub fn update(&mut self, dirs: &[PathBuf], is_limited: bool) {
        let mut result = Ok(());
        let mut before = std::mem::take(&mut self.limited);
        for device in disk_image::devices_of_images(dirs) {
            before.remove(&device);
            match set(&device, is_limited) {
                // The kernel has no limit.
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => result = Err(io::Error::new(e.kind(), format!("{device}: {e}"))),
                Ok(()) if is_limited => drop(self.limited.insert(device)),
                Ok(()) => {}
            }
        }
        for detached in before {
            // The next image attached here would lose the limit too, but another program's would not.
            let _ = set(&detached, false);
        }
        self.last = Some((Instant::now(), is_limited));
        self.has_failed = result.is_err();
        if let Err(error) = result
            && !std::mem::replace(&mut self.has_warned, true)
        {
            tracing::warn!(%error, "unwritten data of sandboxes can't be limited here; set the reserve to several seconds of writing");
        }
    }
}

/// Removes the limit that a device has from an earlier image.
pub fn remove(device: &str) -> io::Result<()> {
    let settings = settings(device);
    write(&settings, "max_ratio", DEFAULT_RATIO)?;
    // Last, because it marks a device with a limit.
    write(&settings, "strict_limit", 0)
}

fn set(device: &str, is_limited: bool) -> io::Result<()> {
    let settings = settings(device);
    let was_limited = fs::read_to_string(settings.join("strict_limit"))?.trim() == "1";
    match (was_limited, is_limited) {
        (true, false) => remove(device),
        (false, true) => match write(&settings, "max_bytes", MAX_UNWRITTEN) {
            // All of this machine's unwritten data together is limited to less than that.
            Err(e) if e.kind() == io::ErrorKind::InvalidInput => Ok(()),
            done => done.and_then(|()| write(&settings, "strict_limit", 1)),
        },
        _ => Ok(()),
    }
}

fn settings(device: &str) -> PathBuf {
    Path::new("/sys/block").join(device).join("bdi")
}

fn write(settings: &Path, name: &str, value: u64) -> io::Result<()> {
    // Not `fs::write`, which would create a missing file.
    let mut file = fs::File::options().write(true).open(settings.join(name))?;
    io::Write::write_all(&mut file, value.to_string().as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::local::disk_limit;

    fn strict_limit(device: &str) -> Option<String> {
        Some(fs::read_to_string(settings(device).join("strict_limit")).ok()?.trim().to_owned())
    }

    #[test]
    fn a_limit_is_removed_with_the_image_and_before_a_device_gets_another_one() {
        let dir = tempfile::tempdir().unwrap();
        if disk_limit::check_hard_limit_support(true).is_err() {
            return;
        }
        fs::create_dir(dir.path().join("sandbox")).unwrap();
        let image = dir.path().join("sandbox").join("disk.img");
        fs::rename(disk_limit::template(dir.path(), 16 << 20).unwrap(), &image).unwrap();
        let dirs = [dir.path().to_owned()];
        let device = || disk_image::devices_of_images(&dirs).pop();
        let mut limit = UnwrittenLimit::default();
        assert!(limit.is_due(false), "an earlier process may have left a limit");

        let mounted = disk_image::mount(&image).unwrap();
        let first = device().unwrap();
        if strict_limit(&first).is_none() {
            return;
        }
        limit.update(&dirs, true);
        assert_eq!(strict_limit(&first).unwrap(), "1");
        limit.update(&dirs, false);
        assert_eq!(strict_limit(&first).unwrap(), "0");
        limit.update(&dirs, true);
        drop(mounted);
        while device().is_some() {
            std::thread::yield_now();
        }
        limit.update(&dirs, true);
        assert_eq!(strict_limit(&first).unwrap(), "0");

        // Other tests may take the device in between; then the image gets another one.
        let has_reused_device = std::iter::repeat_with(|| {
            let mounted = disk_image::mount(&image).unwrap();
            let left = device().unwrap();
            set(&left, true).unwrap();
            drop(mounted);
            while device().is_some() {
                std::thread::yield_now();
            }
            let _mounted = disk_image::mount(&image).unwrap();
            let next = device().unwrap();
            assert_eq!(strict_limit(&next).unwrap(), "0");
            next == left || remove(&left).is_err()
        });
        assert!(has_reused_device.take(100).any(|is_same| is_same));
    }
}
