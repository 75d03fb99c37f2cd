//! Attaches a disk image to a loop device, which is how a sandbox's disk gets a hard limit.

use std::{
    fs::File,
    io,
    os::fd::{AsFd, AsRawFd},
    time::{Duration, Instant},
};

use crate::check;

/// How long to retry while other processes take each free device first. Of all processes that race for one device, one
/// gets it within microseconds, so even hundreds of processes have their devices long before this.
const FREE_DEVICE_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause between two attempts, in which the process that got the device can configure it.
const RETRY_PAUSE: Duration = Duration::from_millis(1);
/// How long the node of a new device may take to appear in /dev.
const DEVICE_NODE_TIMEOUT: Duration = Duration::from_secs(1);
const LOOP_CONFIGURE: libc::c_ulong = 0x4C0A;
const LOOP_GET_STATUS64: libc::c_ulong = 0x4C05;
const LOOP_CTL_GET_FREE: libc::c_ulong = 0x4C82;
const LO_FLAGS_AUTOCLEAR: u32 = 4;
const LO_FLAGS_DIRECT_IO: u32 = 16;
/// Offset of `lo_flags` in `struct loop_info64`.
const LO_FLAGS_OFFSET: usize = 52;
const LOOP_INFO64_BYTES: usize = 232;

#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    info: [u8; LOOP_INFO64_BYTES],
    reserved: [u64; 8],
}

/// Attaches an image to a free loop device, which is detached automatically when its last user closes it. The image is
/// read with direct I/O where its file system supports that, so that nothing is cached twice.
pub fn attach_loop(image: impl AsFd) -> io::Result<(File, String)> {
    let control = File::options().read(true).write(true).open("/dev/loop-control")?;
    let started = Instant::now();
    while started.elapsed() < FREE_DEVICE_TIMEOUT {
        // SAFETY: LOOP_CTL_GET_FREE takes no argument and returns a number.
        let number = check(unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE as _) }.into())?;
        let path = format!("/dev/loop{number}");
        let device = match File::options().read(true).write(true).open(&path) {
            Ok(d) => d,
            Err(e) if e.kind() == io::ErrorKind::NotFound && started.elapsed() < DEVICE_NODE_TIMEOUT => {
                std::thread::sleep(RETRY_PAUSE);
                continue;
            }
            Err(e) => return Err(io::Error::new(e.kind(), format!("{path}: {e}"))),
        };
        for flags in [LO_FLAGS_AUTOCLEAR | LO_FLAGS_DIRECT_IO, LO_FLAGS_AUTOCLEAR] {
            let mut config =
                LoopConfig { fd: image.as_fd().as_raw_fd() as u32, block_size: 4096, info: [0; LOOP_INFO64_BYTES], reserved: [0; 8] };
            config.info[LO_FLAGS_OFFSET..LO_FLAGS_OFFSET + 4].copy_from_slice(&flags.to_ne_bytes());
            // SAFETY: the structure has the kernel's layout and outlives the call.
            match check(unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE as _, &raw const config) }.into()) {
                Ok(_) => return Ok((device, path)),
                Err(e) if e.raw_os_error() == Some(libc::EBUSY) => break,
                Err(e) if e.raw_os_error() == Some(libc::EINVAL) && flags & LO_FLAGS_DIRECT_IO != 0 => {}
                Err(e) => return Err(e),
            }
        }
        std::thread::sleep(RETRY_PAUSE);
    }
    Err(io::Error::new(io::ErrorKind::ResourceBusy, format!("found no free loop device within {} s", FREE_DEVICE_TIMEOUT.as_secs())))
}

/// The file behind an attached loop device: the device number of its file system, and its inode. Its path would be no
/// proof, because the kernel shows the path as it was in the mount namespace that attached the device.
pub fn loop_backing_file(device: impl AsFd) -> io::Result<(u64, u64)> {
    let mut info = [0u8; LOOP_INFO64_BYTES];
    // SAFETY: the kernel writes a `struct loop_info64`, which has the buffer's size, and the buffer outlives the call.
    check(unsafe { libc::ioctl(device.as_fd().as_raw_fd(), LOOP_GET_STATUS64 as _, info.as_mut_ptr()) }.into())?;
    let field = |offset: usize| {
        let mut bytes = [0u8; 8];
        bytes.copy_from_slice(&info[offset..offset + 8]);
        u64::from_ne_bytes(bytes)
    };
    Ok((field(0), field(8)))
}
