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
    plan::{MAX_TIMEOUT, Terms, subject, terminal_size},
    viewer::{Event, Form, Viewer, at},
};
use crate::{
    answer::{Failure, RequestRecord},
    server::Server,
    socket::{self, Conversation, End, Peer, encode},
    typists::Typist,
};

/// Short answers (acknowledgements, error frames) queued for a slow client; beyond it the client's frames aren't read.
const MAX_WAITING_ANSWERS: usize = 64;
/// Maximum length of the name a client gives itself; the same as for shells.
const MAX_CLIENT_CHARS: usize = 64;

pub async fn open(
    State(server): State<Arc<Server>>,
    Extension(record): Extension<Arc<RequestRecord>>,
    headers: HeaderMap,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, Failure> {
    socket::open(server, record, headers, upgrade, Session).await
}

pub struct Session;

impl Conversation for Session {
    type Frame = ClientFrame<ExecStart>;
    const NEEDS: Capability = Capability::Exec;

    async fn hold(self, peer: &mut Peer<'_, ClientFrame<ExecStart>>) -> Result<(), End> {
        let mut start = wait_for_start(peer).await?;
        let claims = peer.claims();
        peer.record.aims_at(&subject(start.command.as_deref(), start.argv.as_deref(), start.command_id.as_deref()));
        let is_binary = start.binary;
        if start.client.as_ref().is_some_and(|client| client.is_empty() || client.chars().count() > MAX_CLIENT_CHARS) {
            return Err(ApiError::invalid(format!("client must have 1 to {MAX_CLIENT_CHARS} characters")).into());
        }
        let client = start.client.take();
        let (stdout_from, stderr_from) = (start.stdout_from.unwrap_or(0), start.stderr_from.unwrap_or(0));
        let attached = Commands::start(peer.server, start, Terms::timeout(MAX_TIMEOUT), &claims).await?;
        let form = if is_binary { Form::Bytes } else { Form::Text };
        let mut viewer = Viewer::new(attached, stdout_from, stderr_from, form);
        let ready = ready(&viewer);
        peer.record.tell(&peer.server.audit, StatusCode::SWITCHING_PROTOCOLS.as_u16(), None);
        peer.out.send(&ServerFrame::Ready(ready)).await?;
        let (out, command) = (peer.out.clone(), viewer.command().clone());
        let typist = command.input.typist(&claims.sub, client.as_deref());
        let mut answers = VecDeque::new();
        let mut permit = None;
        let mut is_over = false;
        while !(is_over && answers.is_empty()) {
            let has_room = command.input.has_room();
            let may_take_frames = answers.len() < MAX_WAITING_ANSWERS && has_room;
            let stalls_at = viewer.stalls_at();
            if permit.is_some()
                && let Some(answer) = answers.pop_front()
            {
                out.send_with(&mut permit, answer);
                continue;
            }
            tokio::select! {
                frame = peer.next(), if may_take_frames => {
                    let answer = obey(frame?, &mut viewer, &typist, &peer.server.commands).await;
                    match answer {
                        Ok(None) => {}
                        Ok(Some(answer)) => answers.push_back(encode(&answer)),
                        Err(error) => answers.push_back(out.complaint(&error)),
                    }
                }
                free = out.permit(), if permit.is_none() => permit = Some(free?),
                event = viewer.next(), if permit.is_some() && !is_over => {
                    is_over = matches!(event, Event::Exit(_));
                    out.send_with(&mut permit, message(event, is_binary));
                }
                () = at(stalls_at) => viewer.let_go(),
                () = command.input.room(), if !has_room => {}
            }
        }
        Ok(())
    }
}

async fn wait_for_start(peer: &mut Peer<'_, ClientFrame<ExecStart>>) -> Result<ExecStart, End> {
    loop {
        match peer.next().await? {
            ClientFrame::Start(start) => return Ok(start),
            _ => peer.out.complain(&ApiError::invalid("there is no command yet; send `start`")).await?,
        }
    }
}

pub fn ready(viewer: &Viewer) -> ExecReady {
    let job = viewer.command().job();
    let (stdout_offset, stderr_offset) = viewer.positions();
    // A command that could not be started has no pid; its exit event gives the reason.
    ExecReady { command_id: job.id.clone(), pid: job.program.pid().unwrap_or(0), stdout_offset, stderr_offset }
}

fn message(event: Event, is_binary: bool) -> Message {
    match event {
        Event::Output(output) if is_binary => Message::Binary(output.frame.freeze()),
        other => encode(&frame(other)),
    }
}

/// The event as a JSON frame.
pub fn frame(event: Event) -> ServerFrame<ExecReady> {
    match event {
        Event::Output(output) => ServerFrame::output(output.stream, output.offset, output.bytes()),
        Event::Gap { stream, from, to } => ServerFrame::Gap { from, to, stream: Some(stream) },
        Event::Exit(ended) => ServerFrame::Exit { exit_code: ended.exit.code, signal: ended.exit.signal, timed_out: ended.timed_out },
    }
}

async fn obey(
    frame: ClientFrame<ExecStart>,
    viewer: &mut Viewer,
    typist: &Typist,
    commands: &Commands,
) -> Result<Option<ServerFrame<()>>, ApiError> {
    match frame {
        ClientFrame::Stdin { data, data_b64, seq } => {
            let command = viewer.command();
            if !command.has_input {
                return Err(ApiError::invalid("this command has no standard input; start it with `stdin: true`"));
            }
            let bytes = frame_bytes(data.as_deref(), data_b64.as_deref()).map_err(ApiError::invalid)?;
            let bytes = commands.memory(bytes.len())?.owned_by(bytes);
            if !command.input.push(seq.map(|seq| (typist, seq)), bytes) {
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
        ClientFrame::Start(_) => Err(ApiError::invalid("this connection has its command already; open another for a second one")),
        _ => Err(ApiError::invalid("that frame means nothing to a command")),
    }
}
