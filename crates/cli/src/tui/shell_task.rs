//! The task attached to a shared shell: its output goes to the state, and orders of the state go to it.

use std::time::Duration;

use cobox_client::{ClientError, Dataplane, Shell, ShellEvent};
use cobox_protocol::{
    ErrorCode,
    frame::{ControlAction, ShellStart},
};
use tokio::sync::mpsc;

use super::message::ShellNews;

/// Buffered orders: a user types fewer than this in the time a shell takes to answer.
pub const ORDERS: usize = 256;
/// Time limit for an orderly detach.
pub const FAREWELL: Duration = Duration::from_millis(500);

pub enum ShellOrder {
    Type(Vec<u8>),
    Resize(u16, u16),
    Control(ControlAction),
    Leave,
}

/// Runs until the shell ends, the connection is lost for good, or the user detaches.
pub async fn sit<F: Future<Output = bool>>(
    dataplane: Dataplane,
    start: ShellStart,
    mut orders: mpsc::Receiver<ShellOrder>,
    tell: impl Fn(ShellNews) -> F,
) {
    let mut shell = match dataplane.shell(start).await {
        Ok(shell) => shell,
        Err(e) => {
            tell(ShellNews::Failed(explained(&e))).await;
            return;
        }
    };
    loop {
        tokio::select! {
            event = shell.output.next() => {
                let (news, is_over) = match event {
                    Some(Ok(event)) => read(event),
                    Some(Err(e)) => (ShellNews::Failed(explained(&e)), true),
                    None => (ShellNews::Failed("the shell was left".to_owned()), true),
                };
                if !tell(news).await || is_over {
                    return;
                }
            }
            order = orders.recv() => {
                let done = match order {
                    Some(ShellOrder::Type(bytes)) => shell.input.stdin(&bytes).await,
                    Some(ShellOrder::Resize(cols, rows)) => shell.input.resize(cols, rows).await,
                    Some(ShellOrder::Control(action)) => shell.input.control(action).await,
                    Some(ShellOrder::Leave) | None => {
                        leave(shell).await;
                        return;
                    }
                };
                // The output half reports a broken connection.
                drop(done);
            }
        }
    }
}

/// Releases control, so that others need not wait for this client to return. If that fails, the sandbox detects the
/// closed connection.
async fn leave(mut shell: Shell) {
    let going = async {
        shell.input.control(ControlAction::Release).await?;
        shell.input.close().await?;
        while shell.output.next().await.is_some() {}
        Ok::<(), ClientError>(())
    };
    let _ = tokio::time::timeout(FAREWELL, going).await;
}

fn read(event: ShellEvent) -> (ShellNews, bool) {
    let news = match event {
        ShellEvent::Ready(ready) => {
            ShellNews::Ready { cols: ready.cols, rows: ready.rows, controller: ready.controller, yours: ready.yours }
        }
        ShellEvent::Output(bytes) => ShellNews::Output(bytes),
        ShellEvent::Keyframe { cols, rows, bytes } => ShellNews::Keyframe { cols, rows, bytes },
        ShellEvent::Resized { cols, rows } => ShellNews::Resized { cols, rows },
        ShellEvent::Control { controller, yours } => ShellNews::Control { controller, yours },
        ShellEvent::Gap { .. } => ShellNews::Said("some output was lost".to_owned()),
        ShellEvent::Reconnecting { .. } => ShellNews::Said("the connection is lost; trying again".to_owned()),
        ShellEvent::Reconnected => ShellNews::Said("connected again".to_owned()),
        ShellEvent::Refused(failure) if failure.is(ErrorCode::Forbidden) => {
            ShellNews::Said("control is elsewhere; Alt-t takes it".to_owned())
        }
        ShellEvent::Refused(failure) => ShellNews::Said(failure.message),
        ShellEvent::InputDropped { bytes } => ShellNews::Said(format!("{bytes} bytes typed while away were too old and were not sent")),
        ShellEvent::Exit { exit_code, .. } => return (ShellNews::Exited(exit_code), true),
    };
    (news, false)
}

fn explained(error: &ClientError) -> String {
    if error.is(ErrorCode::ShellNotFound) {
        return "there is no shell of that name, and you may only look".to_owned();
    }
    error.to_string()
}
