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

const EXEC_ABOUT: &str = "`command` runs in a shell, `argv` without one. With `Accept: text/event-stream` (and no other type) the output is streamed as events while \
     the command runs. Each event's ID contains the offsets in stdout and stderr at which to resume: after a lost connection, send it as `Last-Event-ID` with \
     the same `command_id`. `timeout` and `timeout_secs` are aliases of `timeout_seconds`.";

const SOCKET_ABOUT: &str = "Frames are JSON text of at most 1 MiB. Without an `Authorization` header, the first frame must be `auth`, within 5 s. Output is addressed by \
     its byte offset; after a lost connection, resume at the offset of the first missing byte. With `\"binary\": true` in `start`, output is sent in binary frames: one \
     byte of kind (1 stdout, 2 stderr, 3 keyframe), the offset as a big-endian u64, the bytes. Close codes: 1001 going away (reconnect), 1007 invalid frame, \
     1009 frame too large, 1013 limit reached, 4401 not authenticated, 4403 missing capability, 4408 no `auth` in time, 4409 replaced by a newer \
     connection of the same client, 4410 revoked or ended.";

pub fn routes() -> Vec<Operation> {
    let exec_events = || written::<ServerFrame<ExecReady>>();
    let process = || Parameter::path("id", "A command's `command_id`, or a shell's ID.");
    let shell = || Parameter::path("shell", "A shell's name or ID.");
    vec![
        Operation::new("post", "/v1/exec", "exec", "Run a command and wait for it")
            .tag("exec")
            .about(EXEC_ABOUT)
            .needs(&[Exec])
            .with([Parameter::header("Last-Event-ID", "For an event stream: the ID of the last received event.")])
            .request_body::<ExecRequest>()
            .response::<ExecResponse>(200, "The command has exited; `exit_code` shows whether it succeeded.")
            .response_as(200, "", "text/event-stream", Shape::Plain(json!({ "type": "string" })))
            .events(["ready", "stdout", "stderr", "gap", "exit", "error"].map(|word| (word, exec_events())))
            .errors(&[CommandNotFound, CommandExpired, DiskFull]),
        Operation::new("get", "/v1/exec/ws", "execSocket", "Run a command over a WebSocket")
            .tag("exec")
            .about(SOCKET_ABOUT)
            .needs(&[Exec])
            .websocket(read::<ClientFrame<ExecStart>>(), written::<ServerFrame<ExecReady>>()),
        Operation::new("get", "/v1/processes", "listProcesses", "List commands and shells, oldest first")
            .tag("exec")
            .needs(&[Exec])
            .response::<ProcessList>(200, "The commands and shells."),
        Operation::new("delete", "/v1/processes/{id}", "endProcess", "Kill the process tree of a command or shell")
            .tag("exec")
            .about("Asks it to end, kills it after a short time, and responds when it has ended.")
            .needs(&[Exec])
            .with([process()])
            .empty_response(204, "The process tree has ended.")
            .errors(&[CommandNotFound]),
        Operation::new("post", "/v1/processes/{id}/signal", "signalProcess", "Send a signal")
            .tag("exec")
            .about("Sent to its process group, as by a terminal. `KILL` kills its process tree.")
            .needs(&[Exec])
            .with([process()])
            .request_body::<SignalRequest>()
            .empty_response(204, "The signal was sent.")
            .errors(&[CommandNotFound]),
        shell_socket("/v1/shell/ws", "shellSocket"),
        shell_socket("/v1/ws", "shellSocketShort"),
        Operation::new("get", "/v1/shells", "listShells", "List shells")
            .tag("shells")
            .needs(&[ShellObserve])
            .response::<ShellList>(200, "Them."),
        Operation::new("post", "/v1/shells", "createShell", "Make a shell")
            .tag("shells")
            .needs(&[Shell])
            .request_body::<ShellCreate>()
            .body_optional()
            .response::<ShellInfo>(201, "It runs.")
            .errors(&[ShellExists]),
        Operation::new("get", "/v1/shells/{shell}", "getShell", "One shell")
            .tag("shells")
            .needs(&[ShellObserve])
            .with([shell()])
            .response::<ShellInfo>(200, "It.")
            .errors(&[ShellNotFound]),
        Operation::new("delete", "/v1/shells/{shell}", "endShell", "Hang up")
            .tag("shells")
            .about("Responds when the shell's process tree has ended.")
            .needs(&[Shell])
            .with([shell()])
            .empty_response(204, "The process tree has ended.")
            .errors(&[ShellNotFound]),
        Operation::new("post", "/v1/shells/{shell}/run", "runInShell", "Run a command in a shared shell")
            .tag("shells")
            .about(
                "The command is typed at the prompt, so all participants see it. Fails with `SHELL_BUSY` if the shell is not at a prompt.",
            )
            .needs(&[Exec, ShellObserve])
            .with([shell()])
            .request_body::<ShellRun>()
            .response::<ShellRunResult>(200, "The command's output; `exit_code` is `null` if it did not exit in time.")
            .errors(&[ShellNotFound, ShellBusy]),
    ]
}

fn shell_socket(path: &'static str, id: &'static str) -> Operation {
    Operation::new("get", path, id, "Connect to a shell, which is created if missing")
        .tag("shells")
        .about(SOCKET_ABOUT)
        .needs(&[ShellObserve])
        .websocket(read::<ClientFrame<ShellStart>>(), written::<ServerFrame<ShellReady>>())
}
