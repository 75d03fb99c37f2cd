//! `WS /v1/exec/ws`: a command whose input and output are frames; after a lost connection the client resumes at its
//! offsets.

use std::{collections::VecDeque, sync::Arc};

use axum::{
    Extension,
    extract::{State, WebSocketUpgrade, ws::Message, ws::rejection::WebSocketUpgradeRejection},
    response::Response,
};
use cobox_protocol::{
    ApiError, Capability,
    frame::{ClientFrame, ExecReady, ExecStart, OutputStream, ServerFrame, frame_bytes},
};
use http::{HeaderMap, StatusCode};

use super::{
    Commands,
    run_spec::{LifetimePolicy, MAX_TIMEOUT, describe_command, terminal_size},
    viewer::{OutputEncoding, OutputEvent, Viewer, sleep_until_some},
};
use crate::{
    input_dedup::InputSource,
    request_layer::{ErrorResponse, RequestRecord},
    server::Server,
    socket::{self, CloseReason, Peer, SocketHandler, encode},
};

/// Short answers (acknowledgements, error frames) queued for a slow client; beyond it the client's frames aren't read.
const MAX_QUEUED_ANSWERS: usize = 64;
/// Maximum length of the name a client gives itself; the same as for shells.
const MAX_CLIENT_CHARS: usize = 64;

pub async fn open(
    State(server): State<Arc<Server>>,
    Extension(record): Extension<Arc<RequestRecord>>,
    headers: HeaderMap,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, ErrorResponse> {
    socket::open(server, record, headers, upgrade, ExecSocket).await
}

pub struct ExecSocket;

impl SocketHandler for ExecSocket {
    type Frame = ClientFrame<ExecStart>;
    const REQUIRED_CAPABILITY: Capability = Capability::Exec;

    async fn handle(self, peer: &mut Peer<'_, ClientFrame<ExecStart>>) -> Result<(), CloseReason> {
        let mut start = wait_for_start(peer).await?;
        let claims = peer.claims();
        peer.record.set_target(&describe_command(start.command.as_deref(), start.argv.as_deref(), start.command_id.as_deref()));
        let is_binary = start.binary;
        if start.client.as_ref().is_some_and(|client| client.is_empty() || client.chars().count() > MAX_CLIENT_CHARS) {
            return Err(ApiError::invalid(format!("client must have 1 to {MAX_CLIENT_CHARS} characters")).into());
        }
        let client = start.client.take();
        let (stdout_from, stderr_from) = (start.stdout_from.unwrap_or(0), start.stderr_from.unwrap_or(0));
        let attachment = Commands::start(peer.server, start, LifetimePolicy::with_timeout(MAX_TIMEOUT), &claims).await?;
        let encoding = if is_binary { OutputEncoding::Bytes } else { OutputEncoding::Text };
        let mut viewer = Viewer::new(attachment, stdout_from, stderr_from, encoding);
        let ready = ready(&viewer);
        peer.record.record_once(&peer.server.sandbox_claims, StatusCode::SWITCHING_PROTOCOLS.as_u16(), None);
        peer.out.send(&ServerFrame::Ready(ready)).await?;
        let (out, command) = (peer.out.clone(), viewer.command().clone());
        let source = command.input.register_source(&claims.sub, client.as_deref());
        let mut answers = VecDeque::new();
        let mut permit = None;
        let mut has_exited = false;
        while !(has_exited && answers.is_empty()) {
            let has_room = command.input.has_room();
            let can_read_frames = answers.len() < MAX_QUEUED_ANSWERS && has_room;
            let stalls_at = viewer.stalls_at();
            if permit.is_some()
                && let Some(answer) = answers.pop_front()
            {
                out.send_with(&mut permit, answer);
                continue;
            }
            tokio::select! {
                frame = peer.next(), if can_read_frames => {
                    let answer = handle_frame(frame?, &mut viewer, &source, &peer.server.commands).await;
                    match answer {
                        Ok(None) => {}
                        Ok(Some(answer)) => answers.push_back(encode(&answer)),
                        Err(error) => answers.push_back(out.error_message(&error)),
                    }
                }
                reserved = out.permit(), if permit.is_none() => permit = Some(reserved?),
                event = viewer.next(), if permit.is_some() && !has_exited => {
                    has_exited = matches!(event, OutputEvent::Exit(_));
                    out.send_with(&mut permit, event_message(event, is_binary));
                }
                () = sleep_until_some(stalls_at) => viewer.release_backpressure(),
                () = command.input.wait_for_room(), if !has_room => {}
            }
        }
        Ok(())
    }
}

async fn wait_for_start(peer: &mut Peer<'_, ClientFrame<ExecStart>>) -> Result<ExecStart, CloseReason> {
    loop {
        match peer.next().await? {
            ClientFrame::Start(start) => return Ok(start),
            _ => peer.out.send_error(&ApiError::invalid("no command on this connection; send `start` first")).await?,
        }
    }
}

pub fn ready(viewer: &Viewer) -> ExecReady {
    let job = viewer.command().job();
    let (stdout_offset, stderr_offset) = viewer.positions();
    // A command that could not be started has no pid; its exit event gives the reason.
    ExecReady { command_id: job.id.clone(), pid: job.program.pid().unwrap_or(0), stdout_offset, stderr_offset }
}

fn event_message(event: OutputEvent, is_binary: bool) -> Message {
    match event {
        OutputEvent::Output(output) if is_binary => Message::Binary(output.frame.freeze()),
        other => encode(&event_frame(other)),
    }
}

/// The event as a JSON frame.
pub fn event_frame(event: OutputEvent) -> ServerFrame<ExecReady> {
    match event {
        OutputEvent::Output(output) => ServerFrame::output(output.stream, output.offset, output.bytes()),
        OutputEvent::Gap { stream, from, to } => ServerFrame::Gap { from, to, stream: Some(stream) },
        OutputEvent::Exit(ended) => ServerFrame::Exit { exit_code: ended.exit.code, signal: ended.exit.signal, timed_out: ended.timed_out },
    }
}

async fn handle_frame(
    frame: ClientFrame<ExecStart>,
    viewer: &mut Viewer,
    source: &InputSource,
    commands: &Commands,
) -> Result<Option<ServerFrame<()>>, ApiError> {
    match frame {
        ClientFrame::Stdin { data, data_b64, seq } => {
            let command = viewer.command();
            if !command.has_input {
                return Err(ApiError::invalid("this command has no standard input; start it with `stdin: true`"));
            }
            let bytes = frame_bytes(data.as_deref(), data_b64.as_deref()).map_err(ApiError::invalid)?;
            let bytes = commands.reserve_memory(bytes.len())?.attach_to(bytes);
            if !command.input.push(seq.map(|seq| (source, seq)), bytes) {
                return Err(ApiError::invalid("the command's standard input is closed"));
            }
            Ok(seq.map(|seq| ServerFrame::StdinAck { seq }))
        }
        ClientFrame::CloseStdin => {
            viewer.command().input.close();
            Ok(None)
        }
        ClientFrame::Resize { cols, rows } => {
            let (cols, rows) = terminal_size(cols, rows)?;
            viewer.command().resize(cols, rows).map(|()| None)
        }
        ClientFrame::Signal { signal } => {
            let number = signal.number().map_err(ApiError::invalid)?;
            viewer.command().job().signal(number).await;
            Ok(None)
        }
        ClientFrame::Ack { offset, stream } => {
            viewer.acknowledge(stream.unwrap_or(OutputStream::Stdout), offset);
            Ok(None)
        }
        ClientFrame::Start(_) => Err(ApiError::invalid("this connection already has a command; open another connection for a second one")),
        _ => Err(ApiError::invalid("this frame type is not valid for a command")),
    }
}
