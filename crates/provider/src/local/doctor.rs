//! Checks which isolation mechanisms work on this machine, which are weaker than possible, and how to fix them (`cobox doctor`).

use std::{fs, path::Path};

use super::{cgroup::Cgroups, disk_limit};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckStatus {
    Enforced,
    Weaker,
    Missing,
}

#[derive(Clone, Debug)]
pub struct Check {
    pub name: String,
    pub status: CheckStatus,
    pub detail: String,
    pub fix: Option<String>,
}

/// Runs all checks. Their only side effect is an empty control group, which is created and removed.
pub fn doctor() -> Vec<Check> {
    let is_root = rustix::process::geteuid().is_root();
    let cgroups = Cgroups::find("doctor");
    let mut checks = vec![user_namespaces(), identity(is_root), proc_visible(), overlay()];
    for (controller, what, instead) in [
        (
            "memory",
            "memory",
            "each process has its own limit (RLIMIT_DATA), and when all together exceed the limit, the largest are ended (checked 5 times a second)",
        ),
        ("pids", "processes", "counted per user by RLIMIT_NPROC"),
        ("cpu", "processor time", "a sandbox can use every processor"),
    ] {
        checks.push(if controller == "memory" && cgroups.is_memory_v1() {
            check(
                "limit on memory",
                CheckStatus::Weaker,
                "enforced by a version 1 control group, which doesn't count the buffers of datagram sockets".to_owned(),
                Some("boot with control groups version 2 only (cgroup_no_v1=all)"),
            )
        } else if cgroups.has_controller(controller) {
            check(&format!("limit on {what}"), CheckStatus::Enforced, format!("enforced by the {controller} control group"), None)
        } else {
            check(
                &format!("limit on {what}"),
                CheckStatus::Weaker,
                format!("no usable {controller} control group: {instead}"),
                Some("run the broker as root, or under a delegated control group (systemd: Delegate=yes)"),
            )
        });
    }
    checks.push(match disk_limit::check_hard_limit_support(is_root) {
        Ok(()) => check("limit on disk", CheckStatus::Enforced, "hard: a filesystem image of that size per sandbox".to_owned(), None),
        Err(why) => check(
            "limit on disk",
            CheckStatus::Weaker,
            format!("soft: files are measured periodically, and programs that write are stopped above the limit ({why})"),
            Some("run the broker as root with e2fsprogs installed"),
        ),
    });
    cgroups.remove_empty_parents();
    checks
}

fn check(name: &str, status: CheckStatus, detail: String, fix: Option<&str>) -> Check {
    Check { name: name.to_owned(), status, detail, fix: fix.map(str::to_owned) }
}

fn number(path: &str) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

fn user_namespaces() -> Check {
    let name = "namespaces";
    if number("/proc/sys/user/max_user_namespaces") == Some(0) {
        return check(name, CheckStatus::Missing, "user namespaces are disabled".to_owned(), Some("sysctl user.max_user_namespaces=15000"));
    }
    if !rustix::process::geteuid().is_root() {
        if number("/proc/sys/kernel/unprivileged_userns_clone") == Some(0) {
            return check(
                name,
                CheckStatus::Missing,
                "only root may create user namespaces".to_owned(),
                Some("sysctl kernel.unprivileged_userns_clone=1"),
            );
        }
        if number("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == Some(1) {
            return check(
                name,
                CheckStatus::Missing,
                "AppArmor keeps ordinary users from using user namespaces".to_owned(),
                Some("sysctl kernel.apparmor_restrict_unprivileged_userns=0, or run the broker as root"),
            );
        }
    }
    check(name, CheckStatus::Enforced, "user, mount, pid, network, ipc, uts and cgroup namespaces can be created".to_owned(), None)
}

fn identity(is_root: bool) -> Check {
    if is_root {
        check(
            "identity",
            CheckStatus::Enforced,
            "each sandbox has 65536 uids of its own; its root user has no rights on this machine".to_owned(),
            None,
        )
    } else {
        check(
            "identity",
            CheckStatus::Weaker,
            "sandboxes run as you: for the kernel, their programs, boxd and you are one user, separated only by namespaces".to_owned(),
            Some("run the broker as root, which gives each sandbox uids of its own"),
        )
    }
}

fn proc_visible() -> Check {
    // The kernel lets a user namespace mount /proc only if no part of the visible /proc is covered by another mount.
    let covered = fs::read_to_string("/proc/self/mounts")
        .map(|m| m.lines().any(|l| l.split(' ').nth(1).is_some_and(|at| at.starts_with("/proc/") && at != "/proc/sys/fs/binfmt_misc")))
        .unwrap_or(true);
    if covered {
        check(
            "/proc",
            CheckStatus::Missing,
            "parts of /proc are covered by other mounts, so a sandbox can't have its own".to_owned(),
            Some("in a container, run it with an unmasked /proc (docker: --security-opt systempaths=unconfined)"),
        )
    } else {
        check("/proc", CheckStatus::Enforced, "a sandbox sees its own processes only".to_owned(), None)
    }
}

fn overlay() -> Check {
    let has = |name: &str| fs::read_to_string("/proc/filesystems").is_ok_and(|l| l.split_ascii_whitespace().any(|f| f == name));
    if has("overlay") || Path::new("/sys/module/overlay").exists() {
        check("overlay", CheckStatus::Enforced, "writes go to the sandbox's own layer".to_owned(), None)
    } else {
        check("overlay", CheckStatus::Missing, "this kernel has no overlay filesystem loaded".to_owned(), Some("modprobe overlay"))
    }
}
