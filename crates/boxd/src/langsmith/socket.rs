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
    COMMAND_TIMEOUT, TOOK_TOO_LONG,
    command::{Shells, plan},
    events::joining,
    text::Characters,
};
use crate::{
    answer::{Failure, RequestRecord},
    exec::{
        Commands, LifetimePolicy, MAX_TIMEOUT, OutputEncoding, OutputEvent, Viewer, describe_command, ready, sleep_until_some,
        terminal_size,
    },
    server::Server,
    socket::{self, Conversation, Dialect, End, Peer, Received},
};

pub async fn open(
    State(server): State<Arc<Server>>,
    Extension(record): Extension<Arc<RequestRecord>>,
    headers: HeaderMap,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, Failure> {
    socket::open(server, record, headers, upgrade, Session).await
}

impl Dialect for LangsmithClientFrame {
    const TYPES: &'static [&'static str] = &CLIENT_FRAME_TYPES;

    fn sorted(self) -> Received<Self> {
        match self {
            LangsmithClientFrame::Auth { token } => Received::Auth(token),
            frame => Received::Frame(frame),
        }
    }

    fn error(error: &ApiError, request_id: &RequestId) -> Message {
        let error_type = langsmith::error_type(error.code, "CommandError").to_owned();
        encode(&LangsmithServerFrame::Error { error_type, error: format!("{} (error_id={request_id})", error.message) })
    }

    /// Conditions that the client resolves by reconnecting are not sent as errors: the API key's next token, a sandbox
    /// that resumes, a daemon that restarts.
    fn farewell(end: &End, request_id: &RequestId) -> (Option<Message>, u16) {
        match &end.error {
            Some(error) if matches!(error.code, ErrorCode::TokenExpired | ErrorCode::ProviderUnavailable) => (None, close::GOING_AWAY),
            Some(error) => (Some(Self::error(error, request_id)), end.code),
            None => (None, end.code),
        }
    }
}

struct Session;

impl Conversation for Session {
    type Frame = LangsmithClientFrame;
    const NEEDS: Capability = Capability::Exec;

    async fn hold(self, peer: &mut Peer<'_, LangsmithClientFrame>) -> Result<(), End> {
        let shells = Shells::of(peer.server).await?;
        let (start, policy) = match peer.next().await? {
            LangsmithClientFrame::Execute(asked) => plan(*asked, peer.server, shells)?,
            LangsmithClientFrame::Reconnect(asked) => (joining(asked), LifetimePolicy::with_timeout(MAX_TIMEOUT)),
            _ => return Err(ApiError::invalid("there is no command yet; send `execute` or `reconnect`").into()),
        };
        peer.record.aims_at(&describe_command(start.command.as_deref(), start.argv.as_deref(), start.command_id.as_deref()));
        run(peer, start, policy).await
    }
}

async fn run(peer: &mut Peer<'_, LangsmithClientFrame>, start: ExecStart, policy: LifetimePolicy) -> Result<(), End> {
    let (stdout_from, stderr_from) = (start.stdout_from.unwrap_or(0), start.stderr_from.unwrap_or(0));
    let attachment = Commands::start(peer.server, start, policy, &peer.claims()).await?;
    let mut viewer = Viewer::new(attachment, stdout_from, stderr_from, OutputEncoding::Text);
    let began = ready(&viewer);
    peer.record.tell(&peer.server.audit, StatusCode::SWITCHING_PROTOCOLS.as_u16(), None);
    let (out, command) = (peer.out.clone(), viewer.command().clone());
    out.message(encode(&LangsmithServerFrame::Started { command_id: began.command_id, pid: began.pid })).await?;
    let mut shown = Shown::default();
    let mut permit = None;
    loop {
        let has_room = command.input.has_room();
        let stalls_at = viewer.stalls_at();
        tokio::select! {
            frame = peer.next(), if has_room => obey(frame?, &viewer, &peer.server.commands).await?,
            free = out.permit(), if permit.is_none() => permit = Some(free?),
            event = viewer.next(), if permit.is_some() => match event {
                OutputEvent::Exit(ended) => {
                    // The last frames need the slot that this permit holds.
                    drop(permit.take());
                    for message in shown.rest() {
                        out.message(message).await?;
                    }
                    let last = match ended.timed_out {
                        true => LangsmithServerFrame::Error { error_type: COMMAND_TIMEOUT.to_owned(), error: TOOK_TOO_LONG.to_owned() },
                        false => LangsmithServerFrame::Exit { exit_code: ended.exit.code },
                    };
                    return out.message(encode(&last)).await;
                }
                event => {
                    if let Some(message) = shown.take(event) {
                        out.send_with(&mut permit, message);
                    }
                }
            },
            () = sleep_until_some(stalls_at) => viewer.release_backpressure(),
            () = command.input.wait_for_room(), if !has_room => {}
        }
    }
}

async fn obey(frame: LangsmithClientFrame, viewer: &Viewer, commands: &Commands) -> Result<(), ApiError> {
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
            Err(ApiError::invalid("this connection has its command already; open another for a second one"))
        }
    }
}

/// Both streams converted to text.
#[derive(Default)]
struct Shown {
    stdout: Characters,
    stderr: Characters,
}

impl Shown {
    fn take(&mut self, event: OutputEvent) -> Option<Message> {
        match event {
            OutputEvent::Output(output) => {
                let shown = self.of(output.stream).take(output.offset, output.bytes());
                shown.map(|(offset, data)| text(output.stream, offset, data))
            }
            // The SDK has no frame for a gap: the next offset is higher than the client expects, and it continues from
            // there.
            OutputEvent::Gap { stream, .. } => self.of(stream).end().map(|(offset, data)| text(stream, offset, data)),
            OutputEvent::Exit(_) => None,
        }
    }

    fn rest(&mut self) -> impl Iterator<Item = Message> {
        let rest = [OutputStream::Stdout, OutputStream::Stderr]
            .map(|stream| self.of(stream).end().map(|(offset, data)| text(stream, offset, data)));
        rest.into_iter().flatten()
    }

    fn of(&mut self, stream: OutputStream) -> &mut Characters {
        match stream {
            OutputStream::Stdout => &mut self.stdout,
            OutputStream::Stderr => &mut self.stderr,
        }
    }
}

fn text(stream: OutputStream, offset: u64, data: String) -> Message {
    encode(&match stream {
        OutputStream::Stdout => LangsmithServerFrame::Stdout { data, offset },
        OutputStream::Stderr => LangsmithServerFrame::Stderr { data, offset },
    })
}

fn encode(frame: &LangsmithServerFrame) -> Message {
    // Strings and numbers always serialise.
    Message::Text(Utf8Bytes::from(serde_json::to_string(frame).unwrap_or_default()))
}
