//! The system calls of namespaces, mounts and process starts that rustix doesn't cover, each behind a small function.
//!
//! The `unsafe` of Cobox that makes something is here, so that one sitting is enough to review it; elsewhere are only the
//! promises these functions ask for: "one thread", "nobody else owns this number".

mod awake;
mod block;
mod children;
mod clone;
mod exec;
mod identity;
mod limit;
mod loop_device;
mod mark;
mod mount;
mod network;
mod outgoing;
mod quiet_stream;
mod raw;
mod signals;
mod spare;
mod terminal;
mod watch;

pub use awake::{Peer, heard, said, stay_awake};
pub use block::{MAX_IMAGE_BYTES, Program, STRING_BYTES};
pub use children::{EndedChild, ended_child, is_stopped, let_go};
pub use clone::{Cloned, clone_process, exit_now, fork};
pub use exec::{Image, adopt, close_from, exec_fd, keep_only};
pub use identity::{drop_all_capabilities, drop_bounding_set, keep_capabilities, own_working_directory, set_fs_ids};
pub use limit::{Word, set_soft_limit};
pub use loop_device::{attach_loop, loop_backing_file};
pub use mark::mark_of;
pub use mount::{MountFlags, idmap, set_mount_flags};
pub use network::raise_loopback;
pub use outgoing::{MAX_STAND_IN_BYTES, Outgoing};
pub use quiet_stream::QuietStream;
pub use signals::{child_events, settle_signals};
pub use spare::{Dress, FIRST_SOCKET, MAX_INLINE_BYTES, Pad, Step};
pub use terminal::interrupt_foreground;
pub use watch::watch;

use std::io;

/// Turns a raw system call's answer into a result.
fn check(answer: libc::c_long) -> io::Result<libc::c_long> {
    if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(answer) }
}
