//! The routes for commands, processes and shells.

use cobox_protocol::{
    Capability::{Exec, Shell, ShellObserve},
    ErrorCode::*,
    exec::{ExecRequest, ExecResponse},
    frame::{ClientFrame, ExecReady, ExecStart, ServerFrame, ShellReady, ShellStart},
    process::{ProcessList, SignalRequest},
    shell::{ShellCreate, ShellInfo, ShellList, ShellRun, ShellRunResult},
};
use serde_json::json;

use cobox_openapi::{Operation, Parameter, Shape, read, written};

const EXEC_ABOUT: &str = "`command` is run by a shell, `argv` as it is. With `Accept: text/event-stream` (and nothing else) the output comes as \
events while the command runs; each event's id is where stdout and stderr go on, and is sent back as `Last-Event-ID` together with the same \
`command_id` to go on after a lost connection. `timeout` and `timeout_secs` are read as `timeout_seconds`.";

const SOCKET_ABOUT: &str = "Frames are JSON text, at most 1 MiB. Without an `Authorization` header the first frame is `auth`, within 5 s. Output \
is addressed by its offset in bytes; after a lost connection ask again from where it broke off. With `\"binary\": true` in `start` output comes \
in binary frames: one byte of kind (1 stdout, 2 stderr, 3 keyframe), the offset as a big-endian u64, the bytes. Close codes: 1001 going away \
(reconnect), 1007 an unreadable frame, 1009 too big, 1013 a limit is reached, 4401 not authenticated, 4403 a capability is missing, 4408 no \
`auth` in time, 4409 taken over by the same client's next connection, 4410 revoked or ended.";

pub fn routes() -> Vec<Operation> {
    let exec_events = || written::<ServerFrame<ExecReady>>();
    let process = || Parameter::path("id", "A command's `command_id`, or a shell's id.");
    let shell = || Parameter::path("shell", "A shell's name or its id.");
    vec![
        Operation::new("post", "/v1/exec", "exec", "Run a command to its end")
            .tag("exec")
            .about(EXEC_ABOUT)
            .needs(&[Exec])
            .with([Parameter::header("Last-Event-ID", "Of an event stream: the id of the last event that was read.")])
            .takes::<ExecRequest>()
            .gives::<ExecResponse>(200, "It has ended; whether it went well is in `exit_code`.")
            .gives_as(200, "", "text/event-stream", Shape::Plain(json!({ "type": "string" })))
            .events(["ready", "stdout", "stderr", "gap", "exit", "error"].map(|word| (word, exec_events())))
            .fails(&[CommandNotFound, CommandExpired, DiskFull]),
        Operation::new("get", "/v1/exec/ws", "execSocket", "Run a command with its input and output as frames")
            .tag("exec")
            .about(SOCKET_ABOUT)
            .needs(&[Exec])
            .websocket(read::<ClientFrame<ExecStart>>(), written::<ServerFrame<ExecReady>>()),
        Operation::new("get", "/v1/processes", "listProcesses", "What boxd has started and still knows, the oldest first")
            .tag("exec")
            .needs(&[Exec])
            .gives::<ProcessList>(200, "The commands and shells."),
        Operation::new("delete", "/v1/processes/{id}", "endProcess", "End a command or shell with all it started")
            .tag("exec")
            .about("It is asked to end, and killed after a moment. The answer comes when it has ended.")
            .needs(&[Exec])
            .with([process()])
            .gives_nothing(204, "It has ended.")
            .fails(&[CommandNotFound]),
        Operation::new("post", "/v1/processes/{id}/signal", "signalProcess", "Send a signal")
            .tag("exec")
            .about("To its process group, as from a terminal. `KILL` ends all it started.")
            .needs(&[Exec])
            .with([process()])
            .takes::<SignalRequest>()
            .gives_nothing(204, "It was sent.")
            .fails(&[CommandNotFound]),
        shell_socket("/v1/shell/ws", "shellSocket"),
        shell_socket("/v1/ws", "shellSocketShort"),
        Operation::new("get", "/v1/shells", "listShells", "The shells there are")
            .tag("shells")
            .needs(&[ShellObserve])
            .gives::<ShellList>(200, "Them."),
        Operation::new("post", "/v1/shells", "createShell", "Make a shell")
            .tag("shells")
            .needs(&[Shell])
            .takes::<ShellCreate>()
            .body_optional()
            .gives::<ShellInfo>(201, "It runs.")
            .fails(&[ShellExists]),
        Operation::new("get", "/v1/shells/{shell}", "getShell", "One shell")
            .tag("shells")
            .needs(&[ShellObserve])
            .with([shell()])
            .gives::<ShellInfo>(200, "It.")
            .fails(&[ShellNotFound]),
        Operation::new("delete", "/v1/shells/{shell}", "endShell", "Hang up")
            .tag("shells")
            .about("The answer comes when everything in it has ended.")
            .needs(&[Shell])
            .with([shell()])
            .gives_nothing(204, "It has ended.")
            .fails(&[ShellNotFound]),
        Operation::new("post", "/v1/shells/{shell}/run", "runInShell", "Run a command in a shell that people watch")
            .tag("shells")
            .about("It is typed at the prompt, so everybody who watches sees it. `SHELL_BUSY` where the shell is not at a prompt.")
            .needs(&[Exec, ShellObserve])
            .with([shell()])
            .takes::<ShellRun>()
            .gives::<ShellRunResult>(200, "What it printed; `exit_code` is `null` where it did not end in time.")
            .fails(&[ShellNotFound, ShellBusy]),
    ]
}

fn shell_socket(path: &'static str, id: &'static str) -> Operation {
    Operation::new("get", path, id, "Join a shell, and make it where there is none yet")
        .tag("shells")
        .about(SOCKET_ABOUT)
        .needs(&[ShellObserve])
        .websocket(read::<ClientFrame<ShellStart>>(), written::<ServerFrame<ShellReady>>())
}
