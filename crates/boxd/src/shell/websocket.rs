//! One client connection to a shell: joins it, sends the output, and executes or refuses the client's frames.

use std::sync::Arc;

use cobox_protocol::{
    ApiError, Capability, ErrorCode,
    frame::{ClientFrame, Controller, DEFAULT_SHELL_NAME, ServerFrame, ShellReady, ShellStart, TerminalPermission, close, frame_bytes},
    shell::ShellCreate,
};
use cobox_stream::SequenceKinds;
use http::StatusCode;

use super::{
    output_sender::{OutputSender, Progress},
    participants::JoinRequest,
    shared_shell::{Membership, Shell},
    terminal,
};
use crate::socket::{CloseReason, Peer, SocketHandler};

/// Maximum length of the client's own id.
const MAX_CLIENT_CHARS: usize = 64;

pub struct ShellSocket;

/// Input that was sent instead of a `start` frame.
type EarlyInput = Option<(Vec<u8>, Option<u64>)>;

impl SocketHandler for ShellSocket {
    type Frame = ClientFrame<ShellStart>;
    const REQUIRED_CAPABILITY: Capability = Capability::ShellObserve;

    async fn handle(self, peer: &mut Peer<'_, ClientFrame<ShellStart>>) -> Result<(), CloseReason> {
        let (start, early_input) = wait_for_start(peer).await?;
        let is_observer = start.observe || !peer.claims().scope.contains(Capability::Shell);
        if start.client.as_ref().is_some_and(|client| client.is_empty() || client.chars().count() > MAX_CLIENT_CHARS) {
            return Err(ApiError::invalid(format!("client must have 1 to {MAX_CLIENT_CHARS} characters")).into());
        }
        let size = match (start.cols, start.rows) {
            (None, None) => None,
            (cols, rows) => Some(terminal::size(cols, rows)?),
        };
        peer.record.set_target(start.shell.as_deref().unwrap_or(DEFAULT_SHELL_NAME));
        let (shell, is_new) = find_or_create(peer, &start, is_observer).await?;
        let claims = peer.claims();
        let identity = Controller { principal: claims.sub.clone(), actor: claims.act.kind };
        let membership = shell.join(JoinRequest { identity, client: start.client.clone(), may_control: !is_observer, size })?;
        peer.record.record_once(&peer.server.sandbox_claims, StatusCode::SWITCHING_PROTOCOLS.as_u16(), None);
        let output = start_output(peer, &membership, &start, is_new).await?;
        let progress = output.progress.clone();
        let server = peer.server.clone();
        let taken_over = membership.taken_over.clone();
        tokio::select! {
            sent = output.run(&server) => sent,
            end = handle_frames(peer, &membership, is_observer, early_input, &progress) => Err(end),
            () = taken_over.cancelled() => Err(CloseReason::with_code(close::TAKEN_OVER)),
        }
    }
}

/// Waits for the `start` frame. A `stdin` frame instead means the defaults.
async fn wait_for_start(peer: &mut Peer<'_, ClientFrame<ShellStart>>) -> Result<(ShellStart, EarlyInput), CloseReason> {
    let mut size = None;
    loop {
        match peer.next().await? {
            ClientFrame::Start(start) => return Ok((start, None)),
            ClientFrame::Stdin { data, data_b64, seq } => {
                let bytes = frame_bytes(data.as_deref(), data_b64.as_deref()).map_err(ApiError::invalid)?;
                let (cols, rows) = size.unzip();
                return Ok((ShellStart { cols, rows, ..Default::default() }, Some((bytes, seq))));
            }
            // For clients that send their size first and then just type.
            ClientFrame::Resize { cols, rows } => size = Some((cols, rows)),
            _ => peer.out.send_error(&ApiError::invalid("no shell on this connection; send `start` first")).await?,
        }
    }
}

async fn find_or_create(
    peer: &Peer<'_, ClientFrame<ShellStart>>,
    start: &ShellStart,
    is_observer: bool,
) -> Result<(Arc<Shell>, bool), ApiError> {
    let name = start.shell.clone().unwrap_or_else(|| DEFAULT_SHELL_NAME.to_owned());
    let shells = &peer.server.shells;
    // A client that resumes a shell which has ended in the meantime gets the rest of that output, not a new shell of
    // the same name.
    if let Some(shell) = start.epoch.as_deref().and_then(|epoch| shells.find_ended(epoch)) {
        return Ok((shell, false));
    }
    if let Ok(shell) = shells.find(&name) {
        return Ok((shell, false));
    }
    if is_observer || name.parse::<cobox_protocol::ShellId>().is_ok() {
        return shells.find(&name).map(|shell| (shell, false));
    }
    let ShellStart { command, cwd, env, cols, rows, .. } = start.clone();
    shells.find_or_create(peer.server, ShellCreate { name: Some(name), command, cwd, env, cols, rows }, &peer.claims()).await
}

/// Decides where the output starts for this participant: at the beginning if it created the shell, at the last offset
/// if that is still kept, otherwise with a keyframe.
async fn start_output(
    peer: &Peer<'_, ClientFrame<ShellStart>>,
    membership: &Membership,
    start: &ShellStart,
    is_new: bool,
) -> Result<OutputSender, CloseReason> {
    let shell = &membership.shell;
    let epoch = shell.id.to_string();
    let kept_range = shell.log.range();
    let resumed = start.from.filter(|from| start.epoch.as_deref() == Some(&epoch) && (kept_range.start..=kept_range.end).contains(from));
    let allowed = start.allow.iter().fold(SequenceKinds::NONE, |kinds, allowed| {
        kinds.with(match allowed {
            TerminalPermission::Clipboard => SequenceKinds::CLIPBOARD,
            TerminalPermission::Title => SequenceKinds::TITLE,
        })
    });
    let (from, keyframe) = match (is_new, resumed) {
        (true, _) => (0, None),
        (false, Some(from)) => (from, None),
        (false, None) => {
            let keyframe = shell.keyframe(OutputSender::hidden(shell.is_controlled_by(membership.id), allowed));
            (keyframe.offset, Some(keyframe))
        }
    };
    let reader = shell.log.reader(from);
    let (cols, rows) = match &keyframe {
        Some(keyframe) => (keyframe.cols, keyframe.rows),
        None => shell.log.size_at(from).map_or_else(|| shell.size(), |size| (size.cols, size.rows)),
    };
    let mut controllers = shell.controller.subscribe();
    let controller = controllers.borrow_and_update().clone();
    let is_controller = shell.is_controlled_by(membership.id);
    let last_controller = (controller.clone(), is_controller);
    let ready = ShellReady { shell_id: shell.id.clone(), epoch, offset: from, cols, rows, controller, yours: Some(is_controller) };
    peer.out.send(&ServerFrame::Ready(ready)).await?;
    Ok(OutputSender::new(
        shell.clone(),
        membership.id,
        reader,
        keyframe,
        controllers,
        peer.out.clone(),
        start.binary,
        allowed,
        last_controller,
    ))
}

/// Handles frames until the client disconnects.
async fn handle_frames(
    peer: &mut Peer<'_, ClientFrame<ShellStart>>,
    membership: &Membership,
    is_observer: bool,
    early_input: EarlyInput,
    progress: &Progress,
) -> CloseReason {
    let mut frame = early_input.map(|(bytes, seq)| ClientFrame::stdin(&bytes, seq));
    loop {
        let next = match frame.take() {
            Some(frame) => Ok(frame),
            None => peer.next().await,
        };
        let outcome = match next {
            Ok(frame) => handle_frame(peer, membership, is_observer, frame, progress).await,
            Err(end) => return end,
        };
        let replied = match outcome {
            Ok(Some(seq)) => peer.out.send(&ServerFrame::<()>::StdinAck { seq }).await,
            Ok(None) => Ok(()),
            Err(error) => peer.out.send_error(&error).await,
        };
        if let Err(end) = replied {
            return end;
        }
    }
}

/// Executes a frame. Returns the number of numbered input, for its acknowledgement.
async fn handle_frame(
    peer: &Peer<'_, ClientFrame<ShellStart>>,
    membership: &Membership,
    is_observer: bool,
    frame: ClientFrame<ShellStart>,
    progress: &Progress,
) -> Result<Option<u64>, ApiError> {
    let Membership { shell, id, .. } = membership;
    if let ClientFrame::Ack { offset, .. } = frame {
        progress.acknowledge(offset);
        shell.consumed(*id, offset);
        return Ok(None);
    }
    let may_control = !is_observer && peer.claims().scope.contains(Capability::Shell);
    if !may_control {
        shell.with_participants(|participants, _| participants.revoke_control(*id));
        let message =
            "this connection is an observer; to send input, connect without `observe` and with a token that has the capability `shell`";
        return Err(ApiError::new(ErrorCode::CapabilityDenied, message).with_details(serde_json::json!({ "capability": "shell" })));
    }
    match frame {
        ClientFrame::Stdin { data, data_b64, seq } => {
            let bytes = frame_bytes(data.as_deref(), data_b64.as_deref()).map_err(ApiError::invalid)?;
            while !shell.participant_input(*id, seq, &bytes)? {
                shell.wait_for_input_room().await;
            }
            Ok(seq)
        }
        ClientFrame::Resize { cols, rows } => shell.participant_resized(*id, terminal::size(Some(cols), Some(rows))?).map(|()| None),
        ClientFrame::Signal { signal } => {
            let number = signal.number().map_err(ApiError::invalid)?;
            shell.participant_signal(*id, number).map(|()| None)
        }
        ClientFrame::Control { action } => {
            shell.with_participants(|participants, now| participants.handle_control(*id, action, now)).map(|()| None)
        }
        ClientFrame::Start(_) => Err(ApiError::invalid("this connection already has a shell; open another connection for a second one")),
        _ => Err(ApiError::invalid("this frame type is not valid for a shell")),
    }
}
