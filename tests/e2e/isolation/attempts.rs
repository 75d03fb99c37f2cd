//! Attempts to reach the host's files, processes, network and kernel and boxd from inside a sandbox.

use std::{fs, net::TcpListener, os::unix::net::UnixListener};

use cobox_protocol::ErrorCode;
use cobox_testkit::{ensure, eventually, sh};

use super::{BrokerAs, InsideAs, TestSandbox, in_every_configuration};

/// Raw system calls by number, for those that no common program makes.
const SYSCALL: &str = r#"
import ctypes, errno, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *args):
    r = libc.syscall(number, *args)
    return r, ctypes.get_errno()
"#;

/// Searches every other process, visible or not: a standby process still has the memory of the process that forked it.
const WAITING: &str = r#"
class iov(ctypes.Structure): _fields_ = [('b', ctypes.c_void_p), ('l', ctypes.c_size_t)]
buf = ctypes.create_string_buffer(8)
ours = (os.getpid(), os.getppid())
for pid in range(2, 200):
    if pid in ours: continue
    try: os.open(f'/proc/{pid}/mem', os.O_RDONLY); print('REACHED mem', pid)
    except OSError: pass
    try: print('REACHED', os.listdir(f'/proc/{pid}/fd'), pid)
    except OSError: pass
    if libc.ptrace(16, pid, 0, 0) == 0: print('REACHED ptrace attach', pid)
    if libc.ptrace(0x4206, pid, 0, 0) == 0: print('REACHED ptrace seize', pid)
    local, remote = iov(ctypes.addressof(buf), 8), iov(0x400000, 8)
    if libc.process_vm_readv(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0) > 0: print('REACHED memory', pid)
    pidfd, _ = call(434, pid, 0)
    if pidfd >= 0:
        for n in range(16):
            if call(438, pidfd, n, 0)[0] >= 0: print('REACHED descriptor', n, 'of', pid)
        os.close(pidfd)
"#;

async fn python(broker: BrokerAs, inside: InsideAs, text: &str) {
    let program = format!("python3 - <<'EOF'\n{SYSCALL}\n{text}\nprint('TRIED')\nEOF\n");
    TestSandbox::new(broker, inside, "").await.attempt(&program).await;
}

in_every_configuration! {
    host_files_outside_the_sandbox => async |b, i| {
        let test = TestSandbox::new(b, i, "").await;
        let secret = tempfile::NamedTempFile::new().unwrap();
        fs::write(&secret, "REACHED").unwrap();
        let elsewhere = secret.path().display();
        test.attempt(&format!(
            "cat {elsewhere} /proc/self/root{elsewhere} /proc/1/root{elsewhere} /../..{elsewhere} 2>&1
             for f in /etc/shadow /etc/gshadow /etc/sudoers /root/.bashrc /root/.profile /root/.ssh /etc/hostname; do
               [ -r $f ] && [ \"$(stat -c %u $f)\" != \"$(id -u)\" ] && echo REACHED $f; done
             [ \"$(ls -A /home)\" = user ] || echo REACHED $(ls -A /home)
             for d in /mnt /srv /opt /media /boot /sys /run /var/lib /var/log; do [ -n \"$(ls -A $d 2>/dev/null)\" ] && echo REACHED $d; done
             echo TRIED"
        )).await;
    };
    other_sandboxes_files_and_the_brokers_data => async |b, i| {
        let test = TestSandbox::new(b, i, "").await;
        let other = ensure(&test.broker.client(), "victim").await;
        sh(other.dataplane(), "echo REACHED > secret").await;
        let data = test.broker.data_dir();
        test.attempt(&format!(
            "cat /workspace/secret; ls -d {0} && echo REACHED; cat {0}/broker.db {0}/master.key {0}/api_key 2>&1 | grep -q . && [ -e {0} ] && echo REACHED
             find / -xdev -name secret -o -xdev -name broker.db -o -xdev -name master.key 2>/dev/null | grep . && echo REACHED
             echo TRIED", data.display()
        )).await;
    };
    the_brokers_sockets => async |b, i| {
        let test = TestSandbox::new(b, i, "").await;
        let host = tempfile::tempdir().unwrap();
        let _listener = UnixListener::bind(host.path().join("s")).unwrap();
        let sockets = fs::read_to_string("/proc/net/unix").unwrap();
        let mut paths: Vec<String> = sockets.lines().filter_map(|l| l.rsplit(' ').next()).filter(|p| p.starts_with('/') || p.starts_with('@')).map(str::to_owned).collect();
        paths.push(host.path().join("s").display().to_string());
        let list = serde_json::to_string(&paths).unwrap();
        test.attempt(&format!("python3 - <<'EOF'
import socket
for p in {list}:
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
        try:
            socket.socket(socket.AF_UNIX, kind).connect('\\0' + p[1:] if p[0] == '@' else p)
            print('REACHED', p)
        except OSError: pass
seen = open('/proc/net/unix').read()
if '/sb_' in seen: print('REACHED', seen)
print('TRIED')
EOF")).await;
    };
    host_processes => async |b, i| {
        let test = TestSandbox::new(b, i, "").await;
        let (broker, runner) = (test.broker.pid(), std::process::id());
        test.attempt(&format!(
            "for p in {broker} {runner}; do grep -qE 'cobox|e2e' /proc/$p/cmdline 2>/dev/null && echo REACHED; kill -0 $p 2>/dev/null && ! [ -d /proc/$p ] && echo REACHED; done
             [ $(ls /proc | grep -cE '^[0-9]+$') -lt 12 ] || echo REACHED $(ls /proc)
             tr '\\0' ' ' < /proc/1/cmdline | grep -q cobox && echo REACHED; echo TRIED"
        )).await;
    };
    any_network_address => async |b, i| {
        let test = TestSandbox::new(b, i, "").await;
        let listener = TcpListener::bind("0.0.0.0:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let broker_port = test.broker.url().rsplit(':').next().unwrap().to_owned();
        // The machine's own addresses only: even from a broken sandbox, no packet leaves the machine.
        let own: Vec<String> = fs::read_to_string("/proc/net/fib_trie").unwrap().lines().filter_map(|l| l.trim().strip_prefix("|-- ")).filter(|a| !a.ends_with(".0") && !a.ends_with(".255")).map(str::to_owned).collect();
        let list = serde_json::to_string(&own).unwrap();
        test.attempt(&format!("python3 - <<'EOF'
import socket, os
for host in {list} + ['127.0.0.1', '::1', '::ffff:127.0.0.1']:
    for port in ({port}, {broker_port}, 22, 53):
        for family in (socket.AF_INET, socket.AF_INET6):
            s = socket.socket(family); s.settimeout(2)
            try:
                s.connect((host, port)); print('REACHED', host, port)
            except OSError: pass
if [i[1] for i in socket.if_nameindex()] != ['lo']: print('REACHED', socket.if_nameindex())
print('TRIED')
EOF")).await;
        // The sandbox's own loopback works.
        let own = test.run("python3 -c \"
import socket
l = socket.create_server(('127.0.0.1', 8080)); c = socket.create_connection(('127.0.0.1', 8080)); print('loopback works')\"").await;
        assert!(own.contains("loopback works"), "{own}");
    };
    vsock_packet_and_other_socket_families => async |b, i| python(b, i, "
import socket
for family in range(0, 46):
    for kind in (1, 2, 3, 5):
        try:
            s = socket.socket(family, kind)
            if family not in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK): print('REACHED family', family)
            if kind == 3 and family in (socket.AF_INET, socket.AF_INET6): print('REACHED raw socket', family)
        except OSError: pass
").await;
    mounting => async |b, i| python(b, i, "
for args in ((b'none', b'/mnt', b'tmpfs', 0, None), (b'/usr', b'/mnt', None, 4096, None), (b'none', b'/usr', None, 32|4096, None), (b'proc', b'/mnt', b'proc', 0, None), (b'overlay', b'/mnt', b'overlay', 0, b'lowerdir=/usr:/etc')):
    if libc.mount(*args) == 0: print('REACHED mount', args)
for target in (b'/proc', b'/proc/sys', b'/usr', b'/dev', b'/'):
    for flags in (0, 2, 8):
        if libc.umount2(target, flags) == 0: print('REACHED umount', target)
for number in (155, 161, 428, 429, 430, 431, 432, 433, 442):
    r, e = call(number, b'/', b'/', 0, 0, 0)
    if r >= 0 or e not in (1, 38): print('REACHED syscall', number, r, e)
").await;
    device_nodes => async |b, i| python(b, i, "
import stat
for kind, dev in ((stat.S_IFBLK, os.makedev(254, 0)), (stat.S_IFBLK, os.makedev(8, 0)), (stat.S_IFCHR, os.makedev(1, 1)), (stat.S_IFCHR, os.makedev(10, 237))):
    for d in ('/tmp', '/dev', '/dev/shm', '/workspace'):
        p = d + '/node'
        try:
            os.mknod(p, kind | 0o666, dev)
            open(p, 'rb').read(1); print('REACHED', p)
        except OSError: pass
        if os.path.lexists(p): os.unlink(p)
allowed = {'null', 'zero', 'full', 'random', 'urandom', 'tty', 'pts', 'shm', 'ptmx', 'fd', 'stdin', 'stdout', 'stderr'}
if set(os.listdir('/dev')) - allowed: print('REACHED', os.listdir('/dev'))
").await;
    kernel_settings => async |b, i| python(b, i, "
for p in ('/proc/sys/kernel/hostname', '/proc/sys/kernel/core_pattern', '/proc/sys/net/ipv4/ip_forward', '/proc/sys/net/ipv4/ping_group_range', '/proc/sys/vm/drop_caches', '/proc/sys/user/max_user_namespaces', '/proc/sysrq-trigger', '/proc/sys/kernel/random/boot_id', '/proc/irq/default_smp_affinity', '/proc/sys/fs/mqueue/queues_max'):
    try:
        fd = os.open(p, os.O_WRONLY); os.write(fd, b'1'); print('REACHED', p)
    except OSError: pass
for p in ('/proc/kcore', '/proc/kmsg', '/proc/kallsyms', '/proc/keys', '/proc/timer_list', '/proc/vmallocinfo', '/sys/kernel', '/dev/mem', '/dev/kmsg'):
    try:
        if open(p, 'rb').read(16): print('REACHED', p)
    except OSError: pass
if libc.sethostname(b'x', 1) == 0: print('REACHED hostname')
").await;
    dangerous_system_calls => async |b, i| python(b, i, "
names = {'bpf': 321, 'perf_event_open': 298, 'userfaultfd': 323, 'io_uring_setup': 425, 'fanotify_init': 300, 'add_key': 248, 'keyctl': 250, 'request_key': 249, 'kexec_load': 246, 'init_module': 175, 'finit_module': 313, 'delete_module': 176, 'reboot': 169, 'swapon': 167, 'syslog': 103, 'settimeofday': 164, 'clock_settime': 227, 'iopl': 172, 'ioperm': 173, 'open_by_handle_at': 304, 'setns': 308, 'unshare': 272, 'chroot': 161, 'pivot_root': 155, 'acct': 163, 'quotactl': 179, 'modify_ldt': 154}
if os.uname().machine == 'x86_64':
    for name, number in names.items():
        r, e = call(number, 0, 0, 0, 0, 0)
        if r >= 0 or e not in (errno.EPERM, errno.ENOSYS): print('REACHED', name, r, e)
    for number in (0x40000000 + 165, 0x40000000 + 272, 463, 600):
        r, e = call(number, 0, 0, 0, 0, 0)
        if r >= 0 or e != errno.ENOSYS: print('REACHED', hex(number), r, e)
").await;
    nested_user_namespaces => async |b, i| python(b, i, "
for flag in (0x10000000, 0x00020000, 0x20000000, 0x40000000, 0x08000000, 0x04000000, 0x02000000, 0x80):
    if libc.unshare(flag) == 0: print('REACHED unshare', hex(flag))
    r, e = call(56, flag | 17, 0, 0, 0, 0)
    if r == 0: os._exit(0)
    if r > 0: print('REACHED clone', hex(flag))
args = (ctypes.c_uint64 * 11)(0x10000000, 0, 0, 0, 17)
r, e = call(435, args, 88)
if r == 0: os._exit(0)
if r > 0 or e != errno.ENOSYS: print('REACHED clone3', r, e)
").await;
    setuid_and_capability_gain => async |b, i| python(b, i, "
import shutil, subprocess
status = dict(l.split(':', 1) for l in open('/proc/self/status') if ':' in l)
for field in ('CapInh', 'CapPrm', 'CapEff', 'CapBnd', 'CapAmb'):
    if int(status[field], 16): print('REACHED', field)
if status['NoNewPrivs'].strip() != '1': print('REACHED NoNewPrivs')
me = os.getuid()
for target in (0, 1, 1000, 65534, 65535):
    if target != me:
        for change in (os.setuid, lambda u: os.setresuid(u, u, u), os.setgid, lambda u: os.setgroups([u])):
            try: change(target); print('REACHED uid', target)
            except OSError: pass
shutil.copy('/bin/sh', '/tmp/s'); os.chmod('/tmp/s', 0o6755)
out = subprocess.run(['/tmp/s', '-p', '-c', 'id -u; grep CapEff /proc/self/status'], capture_output=True, text=True).stdout.split()
if out[0] != str(me) or int(out[-1], 16): print('REACHED', out)
for su in ('/bin/su', '/usr/bin/sudo', '/usr/bin/passwd', '/usr/bin/newgrp'):
    if os.path.exists(su):
        r = subprocess.run([su, '--version'], capture_output=True)
        r = subprocess.run(['/bin/su', '-c', 'echo REA''CHED su'], capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if 'REACHED' in r.stdout and me != 0: print(r.stdout)
try: os.setxattr('/tmp/s', 'security.capability', bytes.fromhex('0100000200200000000000000000000000000000')); print('REACHED file capabilities')
except OSError: pass
").await;
    boxds_memory_and_descriptors => async |b, i| python(b, i, "
import signal
for p in ('/proc/1/mem', '/proc/1/environ', '/proc/1/maps', '/proc/1/auxv', '/proc/1/io'):
    try: open(p, 'rb').read(1); print('REACHED', p)
    except OSError: pass
for p in ('/proc/1/fd', '/proc/1/fdinfo', '/proc/1/map_files'):
    try: os.listdir(p); print('REACHED', p)
    except OSError: pass
for p in ('/proc/1/root', '/proc/1/cwd', '/proc/1/exe', '/proc/1/ns/mnt', '/proc/1/ns/user'):
    try: os.readlink(p); print('REACHED', p)
    except OSError: pass
try: os.open('/proc/1/exe', os.O_RDWR); print('REACHED exe')
except OSError: pass
if libc.ptrace(16, 1, 0, 0) == 0: print('REACHED ptrace attach')
if libc.ptrace(0x4206, 1, 0, 0) == 0: print('REACHED ptrace seize')
buf = ctypes.create_string_buffer(8)
class iov(ctypes.Structure): _fields_ = [('b', ctypes.c_void_p), ('l', ctypes.c_size_t)]
local, remote = iov(ctypes.addressof(buf), 8), iov(0x400000, 8)
if libc.process_vm_readv(1, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0) > 0: print('REACHED process_vm_readv')
pidfd, _ = call(434, 1, 0)
if pidfd >= 0:
    for n in range(16):
        r, e = call(438, pidfd, n, 0)
        if r >= 0: print('REACHED pidfd_getfd', n)
for s in (signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV):
    try: os.kill(1, s)
    except OSError: pass
for pid in os.listdir('/proc'):
    if pid.isdigit() and open(f'/proc/{pid}/cmdline', 'rb').read().startswith(b'boxd'): print('REACHED', pid)
").await;
    standby_processes => async |b, i| {
        let test = TestSandbox::new(b, i, "").await;
        let look = format!("python3 - <<'EOF'\n{SYSCALL}\n{WAITING}\nprint('TRIED')\nEOF\n");
        test.attempt(&look).await;
        // As many times as there are standby processes: programs still start after any of these is killed or stopped.
        for signal in ["KILL", "STOP", "TERM", "KILL", "STOP"] {
            test.run(&format!("kill -{signal} -1 2>/dev/null")).await;
            // A process with a pending signal may still be assigned the next program.
            eventually("programs to begin", || async { (test.run("echo begun").await == "begun\n").then_some(()) }).await;
        }
    };
    boxd_through_the_files_api => async |b, i| {
        let test = TestSandbox::new(b, i, "").await;
        let d = test.session.dataplane();
        sh(d, "ln -s /proc/self/mem mem; ln -s /proc/1/environ env; ln -s /proc proc; mkfifo pipe; ln -s /dev/zero zero; ln -s ../../../../../../etc/shadow up").await;
        for path in [
            "/proc/self/mem", "/proc/self/environ", "/proc/1/mem", "/proc/1/maps", "/proc/thread-self/mem", "/proc/self/fd/3", "/proc/self/root/etc/passwd",
            "/proc/mounts", "/proc/self/cmdline", "/sys/kernel/notes", "/dev/zero", "/dev/null", "/dev/pts/ptmx", "/workspace/mem", "/workspace/env",
            "/workspace/proc/self/mem", "/workspace/pipe", "/workspace/zero", "/workspace/up",
        ] {
            let answer = d.read_file(path.as_bytes()).await;
            let e = answer.err().unwrap_or_else(|| panic!("{path} was read"));
            assert!(e.is(ErrorCode::FileNotFound) || e.is(ErrorCode::InvalidRequest) || e.is(ErrorCode::Forbidden), "{path}: {e}");
        }
        for path in ["/proc/sys/kernel/hostname", "/proc/self/oom_score_adj", "/dev/null", "/workspace/zero", "/workspace/pipe", "/usr/bin/evil", "/usr/evil"] {
            let answer = d.write_file(path.as_bytes(), None, cobox_client::Upload::from_bytes("1")).await;
            // A link or pipe of the workspace may be replaced by a file; the target of the link is never written.
            if !path.starts_with("/workspace/") {
                assert!(answer.is_err(), "{path} was written");
            }
        }
        assert_eq!(sh(d, "echo still here").await.stdout, "still here\n");
    };
    changes_to_the_hosts_programs => async |b, i| {
        let test = TestSandbox::new(b, i, "").await;
        let before = fs::metadata("/usr/bin/env").unwrap().modified().unwrap();
        test.attempt("for f in /usr/bin/env /bin/sh /usr/lib/os-release /etc/alternatives/awk /etc/ssl/certs; do
            { echo x >> $f; chmod 777 $f; touch $f; rm -f $f; mv $f $f.x; ln -sf /tmp/x $f; } 2>/dev/null && [ $f != /etc/ssl/certs ] && echo REACHED $f; done
            touch /usr/x /usr/local/bin/x /lib/x 2>/dev/null && echo REACHED; echo TRIED").await;
        assert_eq!(fs::metadata("/usr/bin/env").unwrap().modified().unwrap(), before);
    };
    typing_into_another_terminal => async |b, i| python(b, i, "
import fcntl, termios, pty
master, slave = pty.openpty()
try:
    fcntl.ioctl(slave, termios.TIOCSTI, b'x'); print('REACHED TIOCSTI')
except OSError: pass
").await;
    processes_after_a_release => async |b, i| {
        let test = TestSandbox::new(b, i, "").await;
        let mark = format!("{}", 100_000 + std::process::id());
        test.run(&format!("for n in 1 2 3; do setsid nohup sh -c 'trap \"\" TERM HUP INT; (sleep {mark} &) ; exec sleep {mark}' >/dev/null 2>&1 & done; (setsid sleep {mark} >/dev/null 2>&1 &)")).await;
        let alive = || fs::read_dir("/proc").unwrap().flatten().any(|e| fs::read(e.path().join("cmdline")).is_ok_and(|c| c == format!("sleep\0{mark}\0").into_bytes()));
        eventually("the attempt to be under way", || async { alive().then_some(()) }).await;
        test.broker.client().release(&test.session.info().session_id).await.unwrap();
        assert!(!alive(), "it lives on");
    };
}
