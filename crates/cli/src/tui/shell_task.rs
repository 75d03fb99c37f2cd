//! The task attached to a shared shell: its output goes to the state, and commands of the state go to it.

use std::time::Duration;

use cobox_client::{ClientError, Dataplane, Shell, ShellEvent};
use cobox_protocol::{
    ErrorCode,
    frame::{ControlAction, ShellStart},
};
use tokio::sync::mpsc;

use super::message::ShellUpdate;

/// Buffered commands: a user types fewer than this in the time a shell takes to answer.
pub const QUEUED_COMMANDS: usize = 256;
/// Time limit for an orderly detach.
pub const DETACH_TIMEOUT: Duration = Duration::from_millis(500);

pub enum ShellCommand {
    Type(Vec<u8>),
    Resize(u16, u16),
    Control(ControlAction),
    Detach,
}

/// Runs until the shell ends, the connection is lost for good, or the user detaches.
pub async fn run_shell<F: Future<Output = bool>>(
    dataplane: Dataplane,
    start: ShellStart,
    mut commands: mpsc::Receiver<ShellCommand>,
    send: impl Fn(ShellUpdate) -> F,
) {
    let mut shell = match dataplane.shell(start).await {
        Ok(shell) => shell,
        Err(e) => {
            send(ShellUpdate::Failed(error_text(&e))).await;
            return;
        }
    };
    loop {
        tokio::select! {
            event = shell.output.next() => {
                let (update, has_ended) = match event {
                    Some(Ok(event)) => translate(event),
                    Some(Err(e)) => (ShellUpdate::Failed(error_text(&e)), true),
                    None => (ShellUpdate::Failed("detached from the shell".to_owned()), true),
                };
                if !send(update).await || has_ended {
                    return;
                }
            }
            command = commands.recv() => {
                let result = match command {
                    Some(ShellCommand::Type(bytes)) => shell.input.stdin(&bytes).await,
                    Some(ShellCommand::Resize(cols, rows)) => shell.input.resize(cols, rows).await,
                    Some(ShellCommand::Control(action)) => shell.input.control(action).await,
                    Some(ShellCommand::Detach) | None => {
                        detach(shell).await;
                        return;
                    }
                };
                // The output half reports a broken connection.
                drop(result);
            }
        }
    }
}

/// Releases control, so that others need not wait for this client to return. If that fails, the sandbox detects the
/// closed connection.
async fn detach(mut shell: Shell) {
    let closing = async {
        shell.input.control(ControlAction::Release).await?;
        shell.input.close().await?;
        while shell.output.next().await.is_some() {}
        Ok::<(), ClientError>(())
    };
    let _ = tokio::time::timeout(DETACH_TIMEOUT, closing).await;
}

fn translate(event: ShellEvent) -> (ShellUpdate, bool) {
    let update = match event {
        ShellEvent::Ready(ready) => {
            ShellUpdate::Ready { cols: ready.cols, rows: ready.rows, controller: ready.controller, yours: ready.yours }
        }
        ShellEvent::Output(bytes) => ShellUpdate::Output(bytes),
        ShellEvent::Keyframe { cols, rows, bytes } => ShellUpdate::Keyframe { cols, rows, bytes },
        ShellEvent::Resized { cols, rows } => ShellUpdate::Resized { cols, rows },
        ShellEvent::Control { controller, yours } => ShellUpdate::Control { controller, yours },
        ShellEvent::Gap { .. } => ShellUpdate::Message("some output was lost".to_owned()),
        ShellEvent::Reconnecting { .. } => ShellUpdate::Message("connection lost; reconnecting".to_owned()),
        ShellEvent::Reconnected => ShellUpdate::Message("reconnected".to_owned()),
        ShellEvent::Refused(failure) if failure.is(ErrorCode::Forbidden) => {
            ShellUpdate::Message("another participant has control; Alt-t takes it".to_owned())
        }
        ShellEvent::Refused(failure) => ShellUpdate::Message(failure.message),
        ShellEvent::InputDropped { bytes } => {
            ShellUpdate::Message(format!("{bytes} bytes typed while disconnected were too old and were not sent"))
        }
        ShellEvent::Exit { exit_code, .. } => return (ShellUpdate::Exited(exit_code), true),
    };
    (update, false)
}

fn error_text(error: &ClientError) -> String {
    if error.is(ErrorCode::ShellNotFound) {
        return "no shell has that name, and you have no permission to start one".to_owned();
    }
    error.to_string()
}
