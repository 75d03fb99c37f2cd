//! Mounts filesystem images. All mounts of an image share one loop device: those of a sandbox, of a snapshot that copies its files at the
//! same time, and of all sandboxes that use a volume. A second loop device would be a second filesystem on the same image and corrupt it.

use std::{
    fs::{self, File},
    os::fd::{AsFd, OwnedFd},
    path::Path,
    time::Duration,
};

use anyhow::Context;
use cobox_kernel::attach_loop;
use rustix::{
    fs::{FlockOperation, flock},
    io::Errno,
    mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen},
};

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
                return mount_device(&path);
            }
            Err(Errno::WOULDBLOCK) => {}
            Err(e) => return Err(e.into()),
        }
        if let Some(device) = device_of(image)
            // While it is held open it can't be reassigned, so the second check is reliable.
            && let Ok(_held) = File::open(&device)
            && device_of(image).as_deref() == Some(device.as_str())
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

/// The loop device that uses the image, if any. The image's path is unique because it contains an ID.
fn device_of(image: &Path) -> Option<String> {
    let devices = fs::read_dir("/sys/block").ok()?.flatten().filter_map(|e| e.file_name().into_string().ok());
    devices.filter(|name| name.starts_with("loop")).find_map(|name| {
        let backing = fs::read(format!("/sys/block/{name}/loop/backing_file")).ok()?;
        (backing.strip_suffix(b"\n")? == image.as_os_str().as_encoded_bytes()).then(|| format!("/dev/{name}"))
    })
}
