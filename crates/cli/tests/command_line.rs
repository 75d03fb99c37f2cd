//! Runs the built programs against a stub broker: their requests, the files they leave, and their exit codes.

mod stub;

use std::{
    fs,
    io::{BufRead, BufReader, Read, Seek, SeekFrom, Write},
    os::unix::fs::{FileTypeExt, PermissionsExt},
    path::Path,
    process::{Command, Output, Stdio},
    sync::atomic::{AtomicBool, Ordering},
};

use rustix::process::{Pid, Signal, kill_process};
use stub::Stub;

fn cobox(stub: &Stub) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cobox"));
    command.env_clear().env("COBOX_URL", &stub.url).env("COBOX_API_KEY", "cbx_key");
    command
}

fn run(command: &mut Command) -> (Option<i32>, String, String) {
    let Output { status, stdout, stderr } = command.output().unwrap();
    (status.code(), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
}

/// The example agent with its own home directory.
fn agent(home: &Path) -> Command {
    // A version manager's python3 may need the real home directory to start.
    let python = Command::new("python3").args(["-c", "import sys; print(sys.executable)"]).output().unwrap().stdout;
    let mut command = Command::new(String::from_utf8(python).unwrap().trim());
    command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/agent.py")).env_clear().env("HOME", home);
    command
}

#[test]
fn an_exec_that_took_too_long_ends_with_124_and_names_the_limit() {
    let stub = Stub::start();
    let (code, _, output) = run(cobox(&stub).args(["exec", "--timeout", "5m", "--", "slow"]));
    assert_eq!(code, Some(124));
    assert!(output.contains("limit of 300 s"), "{output}");
    assert_eq!(stub.requests("/exec/ws")[0].json()["timeout_seconds"], 300.0);
    run(cobox(&stub).args(["exec", "--", "quick"]));
    assert_eq!(stub.requests("/exec/ws")[1].json()["timeout_seconds"], 0.0, "there is no limit by default");
}

#[test]
fn parse_errors_are_json_with_the_json_flag() {
    let stub = Stub::start();
    let (code, out, output) = run(cobox(&stub).args(["exec", "--json", "--tread", "demo", "--", "ls"]));
    assert_eq!((code, out.as_str()), (Some(2), ""));
    let output: serde_json::Value = serde_json::from_str(&output).unwrap();
    assert_eq!(output["error"]["message"], "unexpected argument '--tread' found");
    let (code, _, output) = run(cobox(&stub).args(["exec", "--tread", "demo", "--", "ls", "--json"]));
    assert_eq!(code, Some(2));
    assert!(output.starts_with("error: unexpected argument '--tread' found"), "{output}");
    let (code, out, _) = run(cobox(&stub).args(["exec", "--json", "--help"]));
    assert!(code == Some(0) && out.contains("Usage: cobox exec"), "the help does not depend on the command");
}

#[test]
fn exec_as_json_returns_one_object() {
    let stub = Stub::start();
    let (code, output, _) = run(cobox(&stub).args(["--json", "exec", "--", "slow"]));
    assert_eq!(code, Some(124));
    let output: serde_json::Value = serde_json::from_str(&output).unwrap();
    assert_eq!((&output["timed_out"], &output["exit_code"]), (&true.into(), &137.into()));
}

#[test]
fn a_download_creates_no_sandbox() {
    let stub = Stub::start();
    let dir = tempfile::tempdir().unwrap();
    let (code, _, output) = run(cobox(&stub).args(["cp", "nobody:/workspace/a"]).arg(dir.path()));
    assert_eq!(code, Some(1));
    assert!(output.contains("thread `nobody` has no session"), "{output}");
    assert!(stub.requests("/sessions").iter().all(|request| request.json()["mode"] == "get"));
}

#[test]
fn an_invalid_upload_creates_no_sandbox() {
    let stub = Stub::start();
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("socket");
    let _listening = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let (code, _, output) = run(cobox(&stub).arg("cp").arg(&socket).arg("demo:/workspace/"));
    assert_eq!(code, Some(1));
    assert!(output.contains("neither a file nor a folder"), "{output}");
    let (_, _, output) = run(cobox(&stub).args(["sync", "--once", "nope", "demo:/workspace"]));
    assert!(output.contains("nope does not exist"), "{output}");
    assert!(stub.requests("/sessions").is_empty());
}

#[test]
fn several_files_are_copied_into_one_folder() {
    let stub = Stub::start();
    let dir = tempfile::tempdir().unwrap();
    let (one, two) = (dir.path().join("one"), dir.path().join("two"));
    fs::write(&one, "1").unwrap();
    fs::write(&two, "2").unwrap();
    let (code, output, error) = run(cobox(&stub).arg("cp").args([&one, &two]).arg("there:/workspace/new"));
    assert_eq!((code, output.as_str()), (Some(0), "copied 2 files, 2 B\n"), "{error}");
    let written = |name: &str| stub.requests(&format!("/files/workspace/new/{name}")).last().unwrap().body.clone();
    assert_eq!((written("one"), written("two")), (b"1".to_vec(), b"2".to_vec()));
}

#[test]
fn an_interrupted_download_leaves_nothing_behind() {
    let stub = Stub::start();
    let dir = tempfile::tempdir().unwrap();
    let mut command = cobox(&stub);
    command.args(["cp", "there:/workspace/endless"]).arg(dir.path().join("file")).stderr(Stdio::piped());
    let child = command.spawn().unwrap();
    let remaining_files = || fs::read_dir(dir.path()).unwrap().count();
    while remaining_files() == 0 {
        std::thread::yield_now();
    }
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    let Output { status, stderr, .. } = child.wait_with_output().unwrap();
    assert_eq!(status.code(), Some(130), "{}", String::from_utf8_lossy(&stderr));
    assert_eq!(remaining_files(), 0);
}

#[test]
fn a_download_onto_a_pipe_goes_into_it() {
    let stub = Stub::start();
    let dir = tempfile::tempdir().unwrap();
    let pipe = dir.path().join("pipe");
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR, 0).unwrap();
    // Opened for reading and writing, so that neither side waits for the other.
    let mut reader = fs::File::options().read(true).write(true).open(&pipe).unwrap();
    let (code, output, error) = run(cobox(&stub).args(["cp", "there:/workspace/small"]).arg(&pipe));
    assert_eq!((code, output.as_str()), (Some(0), "copied 1 file, 1 B\n"), "{error}");
    assert!(pipe.symlink_metadata().unwrap().file_type().is_fifo());
    let mut byte = [0];
    reader.read_exact(&mut byte).unwrap();
    assert_eq!(&byte, b"x");
}

#[test]
fn a_growing_file_is_uploaded_at_its_initial_length() {
    let stub = Stub::start();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    let mut log = fs::File::create(&path).unwrap();
    let length = 4 * 1024 * 1024;
    log.set_len(length).unwrap();
    let is_over = AtomicBool::new(false);
    let (code, _, error) = std::thread::scope(|scope| {
        scope.spawn(|| {
            log.seek(SeekFrom::End(0)).unwrap();
            while !is_over.load(Ordering::Relaxed) {
                log.write_all(&[b'x'; 4096]).unwrap();
            }
        });
        let result = run(cobox(&stub).args(["cp"]).arg(&path).arg("there:/workspace/log"));
        is_over.store(true, Ordering::Relaxed);
        result
    });
    assert_eq!(code, Some(0), "{error}");
    assert!(stub.requests("/files/workspace/log").last().unwrap().body.len() as u64 >= length);
}

#[test]
fn cp_accepts_the_recursive_flag() {
    let stub = Stub::start();
    let dir = tempfile::tempdir().unwrap();
    for flag in ["-r", "-R", "--recursive"] {
        let (code, _, error) = run(cobox(&stub).args(["cp", flag, "there:/workspace/small"]).arg(dir.path()));
        assert_eq!(code, Some(0), "{error}");
    }
}

#[test]
fn one_file_can_be_copied_to_standard_output_and_nothing_else() {
    let stub = Stub::start();
    assert_eq!(run(cobox(&stub).args(["cp", "there:/workspace/small", "-"])), (Some(0), "x".to_owned(), String::new()));
    let refused = |args: &[&str]| {
        let (code, out, output) = run(cobox(&stub).arg("cp").args(args));
        assert_eq!((code, out.as_str()), (Some(1), ""), "{output}");
        output
    };
    assert!(refused(&["there:/workspace/small", "there:/workspace/small", "-"]).contains("one by one"));
    assert!(refused(&["--json", "there:/workspace/small", "-"]).contains("--json"));
    assert!(refused(&["-", "/etc/hostname", "there:/workspace/"]).contains("standard input"));
}

#[test]
fn an_error_never_shows_a_temporary_name() {
    let stub = Stub::start();
    let (_, _, output) = run(cobox(&stub).args(["cp", "there:/workspace/small", "/nonexistent/folder/file"]));
    assert_eq!(output, "error: /nonexistent/folder does not exist\n");
}

#[test]
fn a_refused_key_is_reported_with_its_file() {
    let stub = Stub::start();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("my-key");
    fs::write(&file, "cbx_wrong").unwrap();
    let (_, _, output) = run(cobox(&stub).arg("--api-key-file").arg(&file).args(["session", "get", "there"]));
    assert!(output.contains("my-key"), "{output}");
}

#[test]
fn up_creates_an_agent_key_and_shows_how_to_use_it() {
    let home = tempfile::tempdir().unwrap();
    let elsewhere = home.path().join("elsewhere");
    let default = home.path().join(".local/share/cobox");
    for (dir, line) in [(&default, "agent.py --thread demo\n"), (&elsewhere, "agent.py --thread demo --data-dir ")] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cobox"));
        // No sandbox is created here, so any program can serve as boxd.
        command.env_clear().env("HOME", home.path()).env("COBOX_BOXD", env!("CARGO_BIN_EXE_cobox"));
        command.args(["up", "--listen", "0"]).stdout(Stdio::piped()).stderr(Stdio::null());
        if *dir == elsewhere {
            command.arg("--data-dir").arg(dir);
        }
        let mut child = command.spawn().unwrap();
        let mut stdout = String::new();
        let mut lines = BufReader::new(child.stdout.take().unwrap());
        while !stdout.contains("Ctrl-C") && lines.read_line(&mut stdout).unwrap() > 0 {}
        let note: serde_json::Value = serde_json::from_slice(&fs::read(dir.join("broker.json")).unwrap()).unwrap();
        kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
        assert!(child.wait().unwrap().success());
        assert!(stdout.contains(line), "{stdout}");
        let file = Path::new(note["agent_key_file"].as_str().unwrap());
        assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        assert!(fs::read_to_string(file).unwrap().starts_with("cbx_"));
    }
}

#[test]
fn the_example_agent_finds_the_users_broker_and_agent_key() {
    let stub = Stub::start();
    let home = tempfile::tempdir().unwrap();
    let data = home.path().join(".local/share/cobox");
    fs::create_dir_all(&data).unwrap();
    fs::write(data.join("agent_key"), "cbx_key\n").unwrap();
    let note = serde_json::json!({"url": stub.url, "pid": 1, "api_key_file": "/nonexistent", "agent_key_file": data.join("agent_key")});
    fs::write(data.join("broker.json"), note.to_string()).unwrap();
    for command in [&mut agent(home.path()), agent(Path::new("/nonexistent")).arg("--data-dir").arg(&data)] {
        let (code, output, error) = run(command.args(["--thread", "there"]));
        assert_eq!(code, Some(0), "{error}");
        assert!(output.contains("in sandbox sb_"), "{output}");
    }
}

#[test]
fn the_example_agent_reports_errors_in_one_line() {
    let home = tempfile::tempdir().unwrap();
    fs::write(home.path().join("broker.json"), "no json").unwrap();
    let nowhere = |url: &str| agent(home.path()).env("COBOX_URL", url).env("COBOX_API_KEY", "cbx_key").output().unwrap();
    for output in [
        agent(home.path()).output().unwrap(),
        agent(home.path()).arg("--data-dir").arg(home.path()).output().unwrap(),
        agent(home.path()).args(["--data-dir", "/nonexistent"]).output().unwrap(),
        nowhere("nonsense"),
        nowhere("http://["),
        nowhere("http://127.0.0.1:99999"),
        nowhere("http://127.0.0.1:1"),
    ] {
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), stderr.lines().count()), (Some(1), 1), "{stderr}");
        assert!(stderr.starts_with("agent: "), "{stderr}");
    }
}

#[test]
fn a_policy_is_checked_and_explained_without_a_broker() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("policy.toml");
    let policy = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cobox"));
        run(command.env_clear().arg("policy").args(args))
    };
    let path = file.to_str().unwrap();
    fs::write(&file, "[agent]\ncapabilites = []\n").unwrap();
    let (code, output, _) = policy(&["check", path]);
    assert_eq!((code, output), (Some(1), format!("{path}:2: `capabilites` is not known; did you mean `capabilities`?\n")));
    assert_eq!(policy(&["explain", "--policy", path, "--principal", "bot", "--kind", "agent"]).0, Some(1));
    fs::write(&file, "[agent]\ncapabilities = [\"fs_read\"]\n").unwrap();
    assert_eq!(policy(&["check", path]), (Some(0), format!("{path} is valid\n"), String::new()));
    let (code, output, error) =
        policy(&["explain", "--policy", path, "--principal", "bot", "--kind", "agent", "--capabilities", "exec,fs:ro"]);
    assert_eq!(code, Some(0), "{error}");
    assert!(output.contains("exec") && output.contains("dropped") && output.contains("not allowed by [agent], line 2"), "{output}");
    let (_, output, _) = policy(&["explain", "--policy", path, "--principal", "bot", "--kind", "agent", "--json"]);
    let output: serde_json::Value = serde_json::from_str(&output).unwrap();
    assert_eq!(output["capabilities"][0]["outcome"], "granted");
    let (code, _, output) = policy(&["explain", "--policy", path, "--principal", "bot", "--kind", "agent", "--capabilities", "root"]);
    assert_eq!(code, Some(1));
    assert!(output.contains("`root` is not a capability"), "{output}");
}
