//! Filesystem images and their mounts. One image is one filesystem, however many mounts it has: of a sandbox, of whoever copies its
//! files meanwhile, of every sandbox that uses a volume. Two loop devices on one image would be two, and destroy it.

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
    mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_string, fsmount, fsopen},
};

/// How often to look again while another process is attaching the image, or the kernel is taking its device down.
const ATTEMPTS: u32 = 500;
const PAUSE: Duration = Duration::from_millis(10);

/// A new mount of the image's filesystem that is nowhere yet. Blocks; it and the image's device go when its last user does.
pub fn mount(image: &Path) -> anyhow::Result<OwnedFd> {
    let file = File::options().read(true).write(true).open(image)?;
    for _ in 0..ATTEMPTS {
        // Held by the loop device with the file: who gets it is alone.
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {
                let (_device, path) = attach_loop(&file)?;
                return mount_device(&path);
            }
            Err(Errno::WOULDBLOCK) => {}
            Err(e) => return Err(e.into()),
        }
        if let Some(device) = device_of(image)
            // Held open it stays what it is, so it is looked at once more.
            && let Ok(_held) = File::open(&device)
            && device_of(image).as_deref() == Some(device.as_str())
            && let Ok(mounted) = mount_device(&device)
        {
            return Ok(mounted);
        }
        // Being attached by another process, or taken down by the kernel.
        std::thread::sleep(PAUSE);
    }
    anyhow::bail!("{} is still in use", image.display())
}

fn mount_device(device: &str) -> anyhow::Result<OwnedFd> {
    let fs = fsopen("ext4", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(&fs, "source", device)?;
    fsconfig_create(&fs).with_context(|| format!("mounting {device}"))?;
    Ok(fsmount(fs.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV)?)
}

/// The loop device that has the image, if one does. Its path is unique: it has an id of ours in it.
fn device_of(image: &Path) -> Option<String> {
    let devices = fs::read_dir("/sys/block").ok()?.flatten().filter_map(|e| e.file_name().into_string().ok());
    devices.filter(|name| name.starts_with("loop")).find_map(|name| {
        let backing = fs::read(format!("/sys/block/{name}/loop/backing_file")).ok()?;
        (backing.strip_suffix(b"\n")? == image.as_os_str().as_encoded_bytes()).then(|| format!("/dev/{name}"))
    })
}
