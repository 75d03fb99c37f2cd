//! One connection with its terminal: input and output, each going on without waiting for the other.

use bytes::{Buf, BytesMut};
use cobox_protocol::{
    ApiError, Capability, ErrorCode, ShellId,
    frame::{ClientFrame, ServerFrame, ShellReady, ShellStart, frame_bytes},
};

use super::terminal::Terminal;
use crate::socket::{Conversation, End, Peer};

/// Typed or pasted and not yet taken by the program; beyond it the socket isn't read.
const MAX_PENDING_INPUT_BYTES: usize = 1024 * 1024;

pub struct Session;

impl Conversation for Session {
    type Start = ShellStart;
    const NEEDS: Capability = Capability::Shell;

    async fn hold(self, peer: &mut Peer<'_, ShellStart>) -> Result<(), End> {
        let mut input = BytesMut::new();
        let start = wait_for_start(peer, &mut input).await?;
        let _slot = peer.server.shells.slot()?;
        let mut terminal = Terminal::start(peer.server, start).await?;
        let ready = ShellReady {
            shell_id: ShellId::new(),
            epoch: String::new(),
            offset: 0,
            cols: terminal.cols,
            rows: terminal.rows,
            controller: None,
        };
        peer.out.send(&ServerFrame::Ready(ready)).await?;
        let out = peer.out.clone();
        let exit = tokio::select! {
            exit = terminal.output(&out) => exit?,
            end = take_input(peer, &terminal, input) => return Err(end),
        };
        terminal.has_ended();
        out.send(&ServerFrame::<()>::Exit { exit_code: exit.code, signal: exit.signal, timed_out: false }).await
    }
}

/// The `start` frame, or what a `stdin` in its place means: the defaults.
async fn wait_for_start(peer: &mut Peer<'_, ShellStart>, input: &mut BytesMut) -> Result<ShellStart, End> {
    let mut size = None;
    loop {
        match peer.next().await? {
            ClientFrame::Start(start) => return Ok(start),
            ClientFrame::Stdin { data, data_b64, .. } => {
                input.extend_from_slice(&frame_bytes(data.as_deref(), data_b64.as_deref()).map_err(ApiError::invalid)?);
                let (cols, rows) = size.unzip();
                return Ok(ShellStart { cols, rows, ..Default::default() });
            }
            // A client that tells its size first and then just types.
            ClientFrame::Resize { cols, rows } => size = Some((cols, rows)),
            _ => peer.out.complain(&ApiError::invalid("there is no shell yet; send `start`")).await?,
        }
    }
}

/// Takes frames for as long as there is room for what they carry, and meanwhile feeds the terminal as fast as it reads.
async fn take_input(peer: &mut Peer<'_, ShellStart>, terminal: &Terminal, mut pending: BytesMut) -> End {
    loop {
        tokio::select! {
            written = terminal.pty.write(&pending), if !pending.is_empty() => match written {
                Ok(n) => pending.advance(n),
                // Nobody reads the terminal any more; its end is told by the output.
                Err(_) => pending.clear(),
            },
            frame = peer.next(), if pending.len() < MAX_PENDING_INPUT_BYTES => {
                let done = match frame {
                    Ok(frame) => obey(frame, terminal, &mut pending),
                    Err(end) => return end,
                };
                if let Err(error) = done
                    && let Err(end) = peer.out.complain(&error).await
                {
                    return end;
                }
            }
        }
    }
}

fn obey(frame: ClientFrame<ShellStart>, terminal: &Terminal, pending: &mut BytesMut) -> Result<(), ApiError> {
    match frame {
        ClientFrame::Stdin { data, data_b64, .. } => {
            pending.extend_from_slice(&frame_bytes(data.as_deref(), data_b64.as_deref()).map_err(ApiError::invalid)?);
            Ok(())
        }
        ClientFrame::Resize { cols, rows } => terminal.resize(cols, rows),
        ClientFrame::Signal { signal } => terminal.signal(&signal),
        ClientFrame::Start(_) => Err(ApiError::invalid("this connection has its shell already; open another for a second one")),
        _ => Err(ApiError::new(ErrorCode::InvalidRequest, "that frame means nothing to a shell")),
    }
}
