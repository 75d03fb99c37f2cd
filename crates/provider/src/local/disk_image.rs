//! Mounts filesystem images. All mounts of an image share one loop device: those of a sandbox, of a snapshot that copies its files at the
//! same time, and of all sandboxes that use a volume. A second loop device would be a second filesystem on the same image and corrupt it.

use std::{
    collections::HashMap,
    fs::{self, File},
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::Context;
use cobox_kernel::attach_loop;
use rustix::{
    fs::{FlockOperation, flock},
    io::Errno,
    mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen},
};

use super::unwritten_limit;

/// File name of an image in the directory of a sandbox or a volume.
pub const IMAGE: &str = "disk.img";
/// Attempts, and the pause between them, while another process attaches the image or the kernel removes its device.
const ATTEMPTS: u32 = 500;
const PAUSE: Duration = Duration::from_millis(10);

/// Creates a detached mount of the image's filesystem. Blocks. The mount and the image's device are removed with their last user.
pub fn mount(image: &Path) -> anyhow::Result<OwnedFd> {
    let file = File::options().read(true).write(true).open(image)?;
    for _ in 0..ATTEMPTS {
        // The loop device keeps the file and so this lock: the process that gets the lock is the only one that attaches it.
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {
                let (_device, path) = attach_loop(&file)?;
                // Fails on kernels without the limit.
                let _ = unwritten_limit::remove(path.trim_start_matches("/dev/"));
                return mount_device(&path);
            }
            Err(Errno::WOULDBLOCK) => {}
            Err(e) => return Err(e.into()),
        }
        if let Some((_held, device)) = device_of(&file)?
            && let Ok(mounted) = mount_device(&device)
        {
            return Ok(mounted);
        }
        // Another process is attaching it, or the kernel is removing it.
        std::thread::sleep(PAUSE);
    }
    anyhow::bail!("{} is still in use", image.display())
}

fn mount_device(device: &str) -> anyhow::Result<OwnedFd> {
    let fs = fsopen("ext4", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(&fs, "source", device)?;
    // Blocks of deleted files return to the host's disk, if its filesystem can have holes in a file.
    fsconfig_set_flag(&fs, "discard")?;
    fsconfig_create(&fs).with_context(|| format!("mounting {device}"))?;
    Ok(fsmount(fs.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV)?)
}

/// Names of the loop devices of all mounted images one level below these directories.
pub fn devices_of_images(dirs: &[PathBuf]) -> Vec<String> {
    let mut devices: HashMap<(u64, u64), String> = attached_devices().map(|device| (device.image, device.name)).collect();
    if devices.is_empty() {
        return Vec::new();
    }
    images_in(dirs).filter_map(|image| fs::metadata(image).ok()).filter_map(|image| devices.remove(&(image.dev(), image.ino()))).collect()
}

/// Where the images of these directories' subdirectories are, if they have one.
pub fn images_in(dirs: &[PathBuf]) -> impl Iterator<Item = PathBuf> {
    let entries = dirs.iter().flat_map(|dir| fs::read_dir(dir).into_iter().flatten().flatten());
    entries.map(|entry| entry.path().join(IMAGE))
}

/// The loop device that uses the image, if any, and its path. While the device is held open it is assigned to no other image.
fn device_of(image: &File) -> io::Result<Option<(File, String)>> {
    let image = image.metadata()?;
    Ok(attached_devices().find(|d| d.image == (image.dev(), image.ino())).map(|d| (d.device, format!("/dev/{}", d.name))))
}

/// A loop device in use, held open.
struct AttachedDevice {
    name: String,
    device: File,
    /// Device number and inode of its image.
    image: (u64, u64),
}

/// The loop devices in use. Images are compared by inode: the kernel shows a path that starts at the root of the image's filesystem,
/// because the process that attached the device had its own mount namespace.
fn attached_devices() -> impl Iterator<Item = AttachedDevice> {
    let names = fs::read_dir("/sys/block").into_iter().flatten().flatten().filter_map(|e| e.file_name().into_string().ok());
    names.filter(|name| Path::new("/sys/block").join(name).join("loop").exists()).filter_map(|name| {
        let device = File::open(format!("/dev/{name}")).ok()?;
        let image = cobox_kernel::loop_backing_file(&device).ok()?;
        Some(AttachedDevice { name, device, image })
    })
}
