//! The seccomp filters of workloads. They allow every system call known when this was written, except those listed
//! here, which have been ways to escape, to attack the kernel, or to affect what the whole machine shares. Newer calls,
//! and calls that another ABI numbers differently, are rejected by number.

use std::collections::BTreeMap;

use cobox_kernel::LimitSecret;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule, TargetArch, apply_filter,
    sock_filter,
};

/// Highest call number known when this was written (`mseal`). Later calls return ENOSYS until they have been reviewed.
const LAST_KNOWN_CALL: i64 = 462;

/// Rejected with EPERM, which programs treat as "not allowed here".
const DENIED: &[i64] = &[
    // Mounts and namespaces. `clone` is filtered by its flags below; `clone3` is not, because its flags are in memory.
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_move_mount,
    libc::SYS_open_tree,
    libc::SYS_mount_setattr,
    libc::SYS_setns,
    libc::SYS_unshare,
    // Opens files by handle, which bypasses the permissions of directories.
    libc::SYS_open_by_handle_at,
    // Large kernel attack surfaces that workloads don't need.
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_fanotify_init,
    libc::SYS_fanotify_mark,
    // Its requests count against a limit of the whole machine.
    libc::SYS_io_setup,
    // Keyrings are not namespaced.
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    // Control of the machine itself.
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_acct,
    libc::SYS_quotactl,
    libc::SYS_quotactl_fd,
    libc::SYS_syslog,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_clock_adjtime,
    libc::SYS_adjtimex,
    libc::SYS_vhangup,
    libc::SYS_nfsservctl,
    libc::SYS_lookup_dcookie,
    libc::SYS_move_pages,
    libc::SYS_migrate_pages,
    libc::SYS_mbind,
    libc::SYS_set_mempolicy,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_iopl,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_ioperm,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_modify_ldt,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_uselib,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_ustat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_sysfs,
];

const NAMESPACE_FLAGS: [libc::c_int; 8] = [
    libc::CLONE_NEWNS,
    libc::CLONE_NEWUSER,
    libc::CLONE_NEWPID,
    libc::CLONE_NEWNET,
    libc::CLONE_NEWIPC,
    libc::CLONE_NEWUTS,
    libc::CLONE_NEWCGROUP,
    0x80, // CLONE_NEWTIME
];

/// Socket families that a workload may use. Excluded are vsock, which no network namespace confines and which reaches
/// the machine's hypervisor, and packet, alg, tipc and others that workloads don't need.
const SOCKET_FAMILIES: [libc::c_int; 4] = [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK];

/// Confines this process and all its descendants.
pub fn confine() -> Result<(), String> {
    let arch: TargetArch = std::env::consts::ARCH.try_into().map_err(|e| format!("no filter for this architecture: {e}"))?;
    // `clone3` and unknown calls return ENOSYS, upon which C libraries fall back to older calls.
    install(&allow_filter())?;
    install(&deny_filter(arch).map_err(|e| e.to_string())?)
}

/// Forbids this process and all its descendants to change the limits that boxd sets. A caller with the secret may.
pub fn confine_limits(secret: LimitSecret) -> Result<(), String> {
    let arch: TargetArch = std::env::consts::ARCH.try_into().map_err(|e| format!("no filter for this architecture: {e}"))?;
    install(&limits_filter(arch, secret).map_err(|e| e.to_string())?)
}

fn install(filter: &BpfProgram) -> Result<(), String> {
    apply_filter(filter).map_err(|e| e.to_string())
}

/// Allows known numbers and returns ENOSYS for all others. Written by hand, because a list of every number would be 300
/// times as long, and the kernel would walk it for each call.
fn allow_filter() -> BpfProgram {
    // Offsets in struct seccomp_data.
    const NUMBER: u32 = 0;
    const ARCH: u32 = 4;
    let statement = |code: u32, k: u32| sock_filter { code: code as u16, jt: 0, jf: 0, k };
    let jump = |code: u32, k: u32, jt: u8, jf: u8| sock_filter { code: (libc::BPF_JMP | code | libc::BPF_K) as u16, jt, jf, k };
    let load = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    let answer = libc::BPF_RET | libc::BPF_K;
    vec![
        statement(load, ARCH),
        jump(libc::BPF_JEQ, AUDIT_ARCH, 1, 0),
        statement(answer, libc::SECCOMP_RET_KILL_PROCESS),
        statement(load, NUMBER),
        jump(libc::BPF_JGT, LAST_KNOWN_CALL as u32, 2, 0),
        jump(libc::BPF_JEQ, libc::SYS_clone3 as u32, 1, 0),
        statement(answer, libc::SECCOMP_RET_ALLOW),
        statement(answer, libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32),
    ]
}

/// AUDIT_ARCH_* of this machine: its ELF machine number with the flags for 64 bits and little endian.
#[cfg(target_arch = "x86_64")]
const AUDIT_ARCH: u32 = 0xC000_0000 | libc::EM_X86_64 as u32;
#[cfg(target_arch = "aarch64")]
const AUDIT_ARCH: u32 = 0xC000_0000 | libc::EM_AARCH64 as u32;

/// Rejects the listed calls with EPERM. The kernel runs both filters and applies the stricter result.
fn deny_filter(arch: TargetArch) -> Result<BpfProgram, seccompiler::BackendError> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = DENIED.iter().map(|n| (*n, Vec::new())).collect();
    let clone_rules = NAMESPACE_FLAGS
        .iter()
        .map(|flag| {
            let flag = *flag as u64;
            SeccompRule::new(vec![SeccompCondition::new(0, SeccompCmpArgLen::Qword, SeccompCmpOp::MaskedEq(flag), flag)?])
        })
        .collect::<Result<Vec<_>, _>>()?;
    rules.insert(libc::SYS_clone, clone_rules);
    let other_families = SOCKET_FAMILIES
        .iter()
        .map(|f| SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Ne, *f as u64))
        .collect::<Result<Vec<_>, _>>()?;
    // Of netlink only routing, for programs that list interfaces. Other protocols queue messages in memory that is
    // charged to no process.
    let other_netlink = vec![
        SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, libc::AF_NETLINK as u64)?,
        SeccompCondition::new(2, SeccompCmpArgLen::Dword, SeccompCmpOp::Ne, libc::NETLINK_ROUTE as u64)?,
    ];
    for call in [libc::SYS_socket, libc::SYS_socketpair] {
        rules.insert(call, vec![SeccompRule::new(other_families.clone())?, SeccompRule::new(other_netlink.clone())?]);
    }
    // Requests that inject input into another terminal, directly or through the console's selection.
    let ioctls = [libc::TIOCSTI, 0x541C /* TIOCLINUX */]
        .iter()
        .map(|request| SeccompRule::new(vec![SeccompCondition::new(1, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, *request)?]))
        .collect::<Result<Vec<_>, _>>()?;
    rules.insert(libc::SYS_ioctl, ioctls);
    SeccompFilter::new(rules, SeccompAction::Allow, SeccompAction::Errno(libc::EPERM as u32), arch)?.try_into()
}

/// Protects three limits: the file size limit, with which writers are stopped; the file lock limit, which holds the
/// mark of a process tree (see protected_limits.rs); and init's own limits. Installed once in init and once in the spawner, from
/// which every program inherits it without a system call of its own.
fn limits_filter(arch: TargetArch, secret: LimitSecret) -> Result<BpfProgram, seccompiler::BackendError> {
    let is_set_call = SeccompCondition::new(2, SeccompCmpArgLen::Qword, SeccompCmpOp::Ne, 0)?;
    let is_resource = |arg, resource: u32| SeccompCondition::new(arg, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, resource.into());
    let targets_init = SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, 1)?;
    // The call has four arguments. The secret is in the registers of a fifth and a sixth.
    let mismatch = |arg: u8, part: u64| SeccompCondition::new(arg, SeccompCmpArgLen::Qword, SeccompCmpOp::Ne, part);
    let mut prlimit = Vec::new();
    for target in [is_resource(1, libc::RLIMIT_FSIZE)?, is_resource(1, libc::RLIMIT_LOCKS)?, targets_init] {
        for mismatch in [mismatch(4, secret.0[0])?, mismatch(5, secret.0[1])?] {
            prlimit.push(SeccompRule::new(vec![target.clone(), is_set_call.clone(), mismatch])?);
        }
    }
    let setrlimit = [libc::RLIMIT_FSIZE, libc::RLIMIT_LOCKS]
        .iter()
        .map(|resource| SeccompRule::new(vec![is_resource(0, *resource)?]))
        .collect::<Result<Vec<_>, _>>()?;
    let rules = BTreeMap::from([(libc::SYS_prlimit64, prlimit), (libc::SYS_setrlimit, setrlimit)]);
    SeccompFilter::new(rules, SeccompAction::Allow, SeccompAction::Errno(libc::EPERM as u32), arch)?.try_into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_filter_is_within_the_kernels_size_limit() {
        let arch = std::env::consts::ARCH.try_into().unwrap();
        for filter in [allow_filter(), deny_filter(arch).unwrap(), limits_filter(arch, LimitSecret([1, 2])).unwrap()] {
            assert!(filter.len() < 4096, "{} instructions", filter.len());
        }
    }
}
