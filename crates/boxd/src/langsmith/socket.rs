//! `WS /execute/ws`: a command in the LangSmith SDKs' own frames; after a lost connection the client resumes at its
//! offsets.

use std::sync::Arc;

use axum::{
    Extension,
    extract::{
        State, WebSocketUpgrade,
        ws::{Message, Utf8Bytes, rejection::WebSocketUpgradeRejection},
    },
    response::Response,
};
use cobox_protocol::{
    ApiError, Capability, ErrorCode, RequestId,
    frame::{ExecStart, OutputStream, close},
    langsmith::{
        self,
        exec::{CLIENT_FRAME_TYPES, LangsmithClientFrame, LangsmithServerFrame},
    },
};
use http::{HeaderMap, StatusCode};

use super::{
    COMMAND_TIMEOUT, TIMEOUT_MESSAGE,
    command::{AvailableShells, stream_start},
    events::resume_start,
    text::TextConverter,
};
use crate::{
    exec::{
        Commands, LifetimePolicy, MAX_TIMEOUT, OutputEncoding, OutputEvent, Viewer, describe_command, ready, sleep_until_some,
        terminal_size,
    },
    request_layer::{ErrorResponse, RequestRecord},
    server::Server,
    socket::{self, CloseReason, FrameProtocol, Peer, ReceivedFrame, SocketHandler},
};

pub async fn open(
    State(server): State<Arc<Server>>,
    Extension(record): Extension<Arc<RequestRecord>>,
    headers: HeaderMap,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, ErrorResponse> {
    socket::open(server, record, headers, upgrade, LangsmithSocket).await
}

impl FrameProtocol for LangsmithClientFrame {
    const TYPES: &'static [&'static str] = &CLIENT_FRAME_TYPES;

    fn classify(self) -> ReceivedFrame<Self> {
        match self {
            LangsmithClientFrame::Auth { token } => ReceivedFrame::Auth(token),
            frame => ReceivedFrame::Frame(frame),
        }
    }

    fn error(error: &ApiError, request_id: &RequestId) -> Message {
        let error_type = langsmith::error_type(error.code, "CommandError").to_owned();
        encode(&LangsmithServerFrame::Error { error_type, error: format!("{} (error_id={request_id})", error.message) })
    }

    /// Conditions that the client resolves by reconnecting are not sent as errors: the API key's next token, a sandbox
    /// that resumes, a daemon that restarts.
    fn close_message(end: &CloseReason, request_id: &RequestId) -> (Option<Message>, u16) {
        match &end.error {
            Some(error) if matches!(error.code, ErrorCode::TokenExpired | ErrorCode::ProviderUnavailable) => (None, close::GOING_AWAY),
            Some(error) => (Some(Self::error(error, request_id)), end.code),
            None => (None, end.code),
        }
    }
}

struct LangsmithSocket;

impl SocketHandler for LangsmithSocket {
    type Frame = LangsmithClientFrame;
    const REQUIRED_CAPABILITY: Capability = Capability::Exec;

    async fn handle(self, peer: &mut Peer<'_, LangsmithClientFrame>) -> Result<(), CloseReason> {
        let shells = AvailableShells::find(peer.server).await?;
        let (start, policy) = match peer.next().await? {
            LangsmithClientFrame::Execute(request) => stream_start(*request, peer.server, shells)?,
            LangsmithClientFrame::Reconnect(request) => (resume_start(request), LifetimePolicy::with_timeout(MAX_TIMEOUT)),
            _ => return Err(ApiError::invalid("no command on this connection; send `execute` or `reconnect` first").into()),
        };
        peer.record.set_target(&describe_command(start.command.as_deref(), start.argv.as_deref(), start.command_id.as_deref()));
        run(peer, start, policy).await
    }
}

async fn run(peer: &mut Peer<'_, LangsmithClientFrame>, start: ExecStart, policy: LifetimePolicy) -> Result<(), CloseReason> {
    let (stdout_from, stderr_from) = (start.stdout_from.unwrap_or(0), start.stderr_from.unwrap_or(0));
    let attachment = Commands::start(peer.server, start, policy, &peer.claims()).await?;
    let mut viewer = Viewer::new(attachment, stdout_from, stderr_from, OutputEncoding::Text);
    let ready_frame = ready(&viewer);
    peer.record.record_once(&peer.server.sandbox_claims, StatusCode::SWITCHING_PROTOCOLS.as_u16(), None);
    let (out, command) = (peer.out.clone(), viewer.command().clone());
    out.message(encode(&LangsmithServerFrame::Started { command_id: ready_frame.command_id, pid: ready_frame.pid })).await?;
    let mut text_output = SdkText::default();
    let mut permit = None;
    loop {
        let has_room = command.input.has_room();
        let stalls_at = viewer.stalls_at();
        tokio::select! {
            frame = peer.next(), if has_room => handle_frame(frame?, &viewer, &peer.server.commands).await?,
            reserved = out.permit(), if permit.is_none() => permit = Some(reserved?),
            event = viewer.next(), if permit.is_some() => match event {
                OutputEvent::Exit(ended) => {
                    // The last frames need the slot that this permit holds.
                    drop(permit.take());
                    for message in text_output.flush() {
                        out.message(message).await?;
                    }
                    let last = match ended.timed_out {
                        true => LangsmithServerFrame::Error { error_type: COMMAND_TIMEOUT.to_owned(), error: TIMEOUT_MESSAGE.to_owned() },
                        false => LangsmithServerFrame::Exit { exit_code: ended.exit.code },
                    };
                    return out.message(encode(&last)).await;
                }
                event => {
                    if let Some(message) = text_output.convert(event) {
                        out.send_with(&mut permit, message);
                    }
                }
            },
            () = sleep_until_some(stalls_at) => viewer.release_backpressure(),
            () = command.input.wait_for_room(), if !has_room => {}
        }
    }
}

async fn handle_frame(frame: LangsmithClientFrame, viewer: &Viewer, commands: &Commands) -> Result<(), ApiError> {
    let command = viewer.command();
    match frame {
        LangsmithClientFrame::Input { data } => {
            if !command.has_input {
                return Err(ApiError::invalid("this command has no standard input; run it without `close_stdin`"));
            }
            let bytes = data.into_bytes();
            let bytes = commands.reserve_memory(bytes.len())?.attach_to(bytes);
            // A closed input is not an error: the command has closed it or has just ended, and its exit is reported
            // separately.
            let _ = command.input.push(None, bytes);
            Ok(())
        }
        LangsmithClientFrame::CloseStdin => {
            command.input.close();
            Ok(())
        }
        LangsmithClientFrame::Kill => {
            command.job().program.kill_tree().await;
            Ok(())
        }
        LangsmithClientFrame::Resize { cols, rows } => {
            let (cols, rows) = terminal_size(cols, rows)?;
            // A command that has just ended has no terminal to resize.
            if command.job().ended().is_none() { command.resize(cols, rows) } else { Ok(()) }
        }
        LangsmithClientFrame::Execute(_) | LangsmithClientFrame::Reconnect(_) | LangsmithClientFrame::Auth { .. } => {
            Err(ApiError::invalid("this connection already has a command; open another connection for a second one"))
        }
    }
}

/// Both streams converted to text.
#[derive(Default)]
struct SdkText {
    stdout: TextConverter,
    stderr: TextConverter,
}

impl SdkText {
    fn convert(&mut self, event: OutputEvent) -> Option<Message> {
        match event {
            OutputEvent::Output(output) => {
                let text = self.stream_text(output.stream).convert(output.offset, output.bytes());
                text.map(|(offset, data)| text_frame(output.stream, offset, data))
            }
            // The SDK has no frame for a gap: the next offset is higher than the client expects, and it continues from
            // there.
            OutputEvent::Gap { stream, .. } => self.stream_text(stream).finish().map(|(offset, data)| text_frame(stream, offset, data)),
            OutputEvent::Exit(_) => None,
        }
    }

    fn flush(&mut self) -> impl Iterator<Item = Message> {
        let rest = [OutputStream::Stdout, OutputStream::Stderr]
            .map(|stream| self.stream_text(stream).finish().map(|(offset, data)| text_frame(stream, offset, data)));
        rest.into_iter().flatten()
    }

    fn stream_text(&mut self, stream: OutputStream) -> &mut TextConverter {
        match stream {
            OutputStream::Stdout => &mut self.stdout,
            OutputStream::Stderr => &mut self.stderr,
        }
    }
}

fn text_frame(stream: OutputStream, offset: u64, data: String) -> Message {
    encode(&match stream {
        OutputStream::Stdout => LangsmithServerFrame::Stdout { data, offset },
        OutputStream::Stderr => LangsmithServerFrame::Stderr { data, offset },
    })
}

fn encode(frame: &LangsmithServerFrame) -> Message {
    // Strings and numbers always serialise.
    Message::Text(Utf8Bytes::from(serde_json::to_string(frame).unwrap_or_default()))
}
