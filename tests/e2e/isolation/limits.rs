//! Attempts to exceed a sandbox's memory, process and disk limits: refused, and boxd keeps answering.

use std::path::PathBuf;

use cobox_protocol::{ErrorCode, exec::ExecRequest, session::State};
use cobox_testkit::{eventually, sh};

use super::{BrokerAs, TestSandbox, in_every_configuration};

const MIB: u64 = 1 << 20;

in_every_configuration! {
    memory_of_one_process => async |b, i| {
        let test = TestSandbox::new(b, i, &format!("memory_bytes = {}\n", 128 * MIB)).await;
        let output = test.run("python3 -c \"x = bytearray(600 << 20); print('REACHED')\"; echo TRIED $?").await;
        assert!(output.contains("TRIED") && !output.contains("REACHED"), "{output}");
        assert_eq!(sh(test.session.dataplane(), "echo still here").await.stdout, "still here\n");
    };
    memory_of_many_processes => async |b, i| {
        let test = TestSandbox::new(b, i, &format!("memory_bytes = {}\n", 128 * MIB)).await;
        // Eight times 60 MiB in 128 MiB: at most two survive, whether a cgroup or init's monitoring kills the others.
        let one = "python3 -c \"import time; x = bytearray(60 << 20); time.sleep(2); open('/tmp/survived', 'a').write('x')\"";
        let output = test.run(&format!("touch /tmp/survived; for n in 1 2 3 4 5 6 7 8; do {one} & done; wait; wc -c < /tmp/survived; echo TRIED")).await;
        let survived: u64 = output.lines().find_map(|l| l.trim().parse().ok()).unwrap_or(u64::MAX);
        assert!(output.contains("TRIED") && survived <= 2, "{output}");
        assert_eq!(sh(test.session.dataplane(), "echo still here").await.stdout, "still here\n");
    };
    memory_of_boxd => async |b, i| {
        let test = TestSandbox::new(b, i, &format!("memory_bytes = {}\n", 600 * MIB)).await;
        let pid = test.broker.sandbox_pids()[0].1;
        let limits = std::fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
        let data = limits.lines().find(|line| line.starts_with("Max data size")).unwrap();
        assert_eq!(data.split_whitespace().skip(3).take(2).collect::<Vec<_>>(), ["1073741824"; 2], "{data}");
        // Programs have their own limit, in KiB, if no cgroup accounts their memory.
        let of_programs = if b == BrokerAs::Root { "unlimited" } else { "614400" };
        assert_eq!(test.run("ulimit -d").await.trim(), of_programs);
        // boxd with the page cache of its file transfers has the same limit as the programs.
        let groups = cobox_testkit::cgroups(&test.broker.data_dir());
        let limit = |group: &PathBuf| ["memory.max", "memory.limit_in_bytes"].iter().find_map(|name| std::fs::read_to_string(group.join(name)).ok());
        for group in groups.iter().filter(|group| group.ends_with("boxd")) {
            assert!(limit(group).is_none_or(|limit| limit.trim() == (600 * MIB).to_string()), "{group:?}");
        }
        assert!(b == BrokerAs::OrdinaryUser || groups.iter().any(|group| group.ends_with("boxd") && limit(group).is_some()), "{groups:?}");
    };
    processes => async |b, i| {
        let test = TestSandbox::new(b, i, "processes = 40\n").await;
        let request = ExecRequest {
            command: Some("python3 -c \"
import os, time
n = 0
try:
    while n < 200:
        if os.fork() == 0: time.sleep(1000)
        n += 1
except OSError: pass
print('REACHED' if n >= 60 else 'TRIED', n)\"".into()),
            timeout_seconds: Some(30.0),
            ..Default::default()
        };
        let answer = test.session.dataplane().exec(&request).await.unwrap();
        assert!(answer.stdout.contains("TRIED"), "{answer:?}");
    };
    a_fork_bomb => async |b, i| {
        let test = TestSandbox::new(b, i, "processes = 60\n").await;
        let bomb = ExecRequest { command: Some("f() { f | f & }; f; sleep 2".into()), timeout_seconds: Some(3.0), ..Default::default() };
        test.session.dataplane().exec(&bomb).await.unwrap();
        // boxd doesn't count as one of the sandbox's processes: it answers, and serves files.
        test.session.dataplane().write_file(b"/workspace/x", None, cobox_client::Upload::from_bytes("x")).await.unwrap();
        test.broker.client().release(&test.session.info().session_id).await.unwrap();
    };
    disk => async |b, i| {
        let test = TestSandbox::new(b, i, &format!("disk_bytes = {}\n", 64 * MIB)).await;
        let d = test.session.dataplane();
        // 2 GiB, in chunks, as fast as possible.
        let script = "i=0; while [ $i -lt 256 ]; do head -c 8388608 /dev/zero > fill$i 2>/dev/null || break; i=$((i+1)); done; [ $i -ge 256 ] && echo REACHED; echo TRIED";
        let output = test.run(script).await;
        assert!(output.contains("TRIED"), "{output}");
        if b == BrokerAs::Root {
            assert!(!output.contains("REACHED"), "{output}");
        }
        // A hard limit applies at once, a soft one after the next measurement; then the files API refuses writes as
        // well.
        eventually("writes to be refused", || async {
            let big = vec![0u8; 16 << 20];
            d.write_file(b"/workspace/more", None, cobox_client::Upload::from_bytes(big)).await.err().filter(|e| e.is(ErrorCode::DiskFull))
        })
        .await;
        // With a measured limit, a sandbox that keeps growing is suspended in mid-write; the next request resumes it.
        let command = |text: &str| ExecRequest { command: Some(text.to_owned()), ..ExecRequest::default() };
        let growing = d.exec(&command("head -c 33554432 /dev/zero > more2 && echo REACHED; echo TRIED")).await;
        assert!(growing.as_ref().map_or(b == BrokerAs::OrdinaryUser, |output| !output.stdout.contains("REACHED")), "{growing:?}");
        // Deleting files ends the refusal.
        let delete = command("rm -f fill* more*; echo ok");
        eventually("the files to be deleted", || async { d.exec(&delete).await.ok().filter(|output| output.stdout == "ok\n") }).await;
        eventually("writes to work again", || async { d.write_file(b"/workspace/after", None, cobox_client::Upload::from_bytes("x")).await.ok() }).await;
        eventually("programs to write again", || async { sh(d, "head -c 1000 /dev/zero > after2 && echo ok").await.stdout.contains("ok").then_some(()) }).await;
    };
    open_files_and_core_dumps => async |b, i| {
        let test = TestSandbox::new(b, i, "open_files = 128\n").await;
        test.attempt("[ $(ulimit -n) -le 128 ] && [ $(ulimit -Hn) -le 128 ] && [ $(ulimit -Hc) -le 1 ] || echo REACHED; ulimit -n 4096 2>/dev/null && echo REACHED; echo TRIED").await;
    };
    memory_that_belongs_to_no_process => async |b, i| {
        let test = TestSandbox::new(b, i, &format!("memory_bytes = {}\n", 128 * MIB)).await;
        // Never mapped, so it counts neither as resident nor as data of any process.
        let output = test.run("python3 -c \"
import os, time
fd = os.memfd_create('x')
for n in range(600): os.write(fd, bytes(1 << 20))
time.sleep(1); print('REACHED')\"; echo TRIED").await;
        assert!(output.contains("TRIED") && !output.contains("REACHED"), "{output}");
        // Segments without an attached process: there is no process to kill for them.
        let output = test.run("python3 -c \"
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
n = 0
while n < 600:
    id = libc.shmget(0, 8 << 20, 0o1600)
    if id < 0: break
    at = ctypes.c_void_p(libc.shmat(id, None, 0))
    ctypes.memset(at, 1, 8 << 20)
    libc.shmdt(at); n += 8
print('REACHED' if n > 128 else 'fine', n)\"; echo TRIED; ipcs -m | awk 'NR > 3 && $2 { print $2 }' | xargs -rn1 ipcrm -m").await;
        assert!(output.contains("TRIED") && !output.contains("REACHED"), "{output}");
        // Shared pages are counted once: a parent with idle forks is no attack.
        let output = test.run("python3 -c \"
import os, time
x = bytearray(60 << 20)
for n in range(6):
    if os.fork() == 0: time.sleep(1); os._exit(0)
time.sleep(1); print('fine')\"").await;
        assert!(output.contains("fine"), "{output}");
    };
    machine_wide_resources => async |b, i| {
        let test = TestSandbox::new(b, i, "").await;
        test.attempt(r#"python3 - <<'EOF'
import ctypes, os, socket, errno
libc = ctypes.CDLL(None, use_errno=True)
ctx = ctypes.c_ulong()
if libc.syscall(206, 65536, ctypes.byref(ctx)) == 0: print('REACHED aio')
for proto in range(1, 23):
    try: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, proto); print('REACHED netlink', proto)
    except OSError: pass
n = 0
try:
    while n < 1000: os.open('/dev/ptmx', os.O_RDWR | os.O_NOCTTY); n += 1
except OSError: pass
if n > 300: print('REACHED terminals', n)
n = 0
while n < 1000 and libc.inotify_init() >= 0: n += 1
if n > 64: print('REACHED inotify', n)
lim = (ctypes.c_ulong * 2)(1, 1)
if libc.prlimit(1, 7, lim, None) == 0: print('REACHED limits of init')
lim = (ctypes.c_ulong * 2)(2**64 - 1, 2**64 - 1)
if libc.setrlimit(1, lim) == 0 or libc.prlimit(0, 1, lim, None) == 0: print('REACHED file size limit')
print('TRIED')
EOF"#).await;
        // The host's root still has its own inotify instances.
        let ours = std::process::Command::new("python3").args(["-c", "import ctypes; assert ctypes.CDLL(None).inotify_init() >= 0"]).status().unwrap();
        assert!(ours.success());
    };
    a_tree_too_deep_to_walk => async |b, i| {
        let test = TestSandbox::new(b, i, "disk = \"soft\"\n").await;
        test.run("python3 -c \"
import os
for n in range(3000): os.mkdir('d'); os.chdir('d')\"; mkdir -p closed/inner; chmod 0 closed").await;
        let client = test.broker.client();
        client.release(&test.session.info().session_id).await.unwrap();
        eventually("its files to be gone", || async { std::fs::read_dir(test.broker.data_dir().join("trash")).unwrap().next().is_none().then_some(()) }).await;
        assert!(client.list_sandboxes(None, None).await.is_ok(), "the broker lives");
    };
    a_disk_filled_by_preallocation => async |b, i| {
        let test = TestSandbox::new(b, i, &format!("disk = \"soft\"\ndisk_bytes = {}\n", 64 * MIB)).await;
        let id = test.session.info().sandbox.id.to_string();
        // Allocates blocks without extending the file, so that no file size limit applies.
        test.run("python3 - >/dev/null 2>&1 <<'EOF' &
import ctypes, os, time
libc = ctypes.CDLL(None, use_errno=True)
n = 0
while n < 200:
    fd = os.open(f'f{n}', os.O_CREAT | os.O_RDWR)
    libc.fallocate(fd, 1, ctypes.c_long(0), ctypes.c_long(32 << 20))
    os.close(fd); n += 1; time.sleep(0.2)
EOF
").await;
        let client = test.broker.client();
        eventually("its suspension", || async { (client.get_sandbox(&id).await.unwrap().state == State::Suspended).then_some(()) }).await;
        assert!(test.broker.sandbox_pids().is_empty());
        // The files can still be read and deleted.
        assert_eq!(sh(test.session.dataplane(), "rm -f f*; echo ok").await.stdout, "ok\n");
    };
}
