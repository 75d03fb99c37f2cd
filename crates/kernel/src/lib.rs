//! System calls for namespaces, mounts and process starts that rustix doesn't cover, each behind a small function.
//!
//! The unsafe code of Cobox that does real work is in this crate, so that it can be reviewed as a whole. Unsafe code
//! elsewhere only makes the promises that these functions ask for: "this process has one thread", "no other code owns
//! this descriptor".

mod async_fd;
mod busy_poll;
mod children;
mod clone;
mod exec;
mod exec_order;
mod file_send;
mod identity;
mod local_socket;
mod loop_device;
mod mount;
mod network;
mod process_mark;
mod raw_syscall;
mod resource_limit;
mod signals;
mod standby_process;
mod terminal;

pub use async_fd::register_fd;
pub use busy_poll::{Peer, keep_polling, message_received, message_sent};
pub use children::{EndedChild, ended_child, is_stopped, reap};
pub use clone::{Cloned, clone_process, exit_now, fork};
pub use exec::{ExecArgs, adopt, close_from, exec_fd, keep_only};
pub use exec_order::{MAX_EXEC_ARGS_BYTES, Program, STRING_OVERHEAD_BYTES};
pub use file_send::{FileSender, MAX_PLACEHOLDER_BYTES};
pub use identity::{drop_all_capabilities, drop_bounding_set, keep_capabilities, own_working_directory, set_fs_ids};
pub use local_socket::LocalSocketStream;
pub use loop_device::{attach_loop, loop_backing_file};
pub use mount::{MountFlags, idmap, set_mount_flags};
pub use network::raise_loopback;
pub use process_mark::mark_of;
pub use resource_limit::{LimitSecret, set_soft_limit};
pub use signals::{child_events, reset_signals};
pub use standby_process::{ChildMemory, Credentials, FIRST_SOCKET, MAX_INLINE_BYTES, StartStep};
pub use terminal::interrupt_foreground;

use std::io;

/// Turns the return value of a system call into a result.
fn check(answer: libc::c_long) -> io::Result<libc::c_long> {
    if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(answer) }
}
