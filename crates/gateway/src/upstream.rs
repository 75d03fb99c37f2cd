//! One HTTP connection to a sandbox's boxd.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
};

use axum::body::Body;
use cobox_provider::BoxedStream;
use hyper::client::conn::http1::{Builder, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    task::AbortHandle,
};

/// Bounds a response's head and the read-ahead of its body; large enough to stream files at full speed.
const UPSTREAM_BUFFER_BYTES: usize = 512 * 1024;

/// A connection to boxd whose response can be read even if boxd closed its end before it had read the whole request: boxd may refuse an
/// upload early, and its response is still readable when writing fails.
struct EarlyResponseStream {
    stream: BoxedStream,
    is_closed: bool,
}

impl EarlyResponseStream {
    /// Discards bytes that can't be sent. The response follows, or reading fails with the reason.
    fn ignore_closed(&mut self, polled: Poll<io::Result<usize>>, length: usize) -> Poll<io::Result<usize>> {
        match polled {
            Poll::Ready(Err(error)) if matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset) => {
                self.is_closed = true;
                Poll::Ready(Ok(length))
            }
            polled => polled,
        }
    }
}

impl AsyncRead for EarlyResponseStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for EarlyResponseStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if self.is_closed {
            return Poll::Ready(Ok(bytes.len()));
        }
        let polled = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.ignore_closed(polled, bytes.len())
    }
    fn poll_write_vectored(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[io::IoSlice<'_>]) -> Poll<io::Result<usize>> {
        let length = bytes.iter().map(|slice| slice.len()).sum();
        if self.is_closed {
            return Poll::Ready(Ok(length));
        }
        let polled = Pin::new(&mut self.stream).poll_write_vectored(cx, bytes);
        self.ignore_closed(polled, length)
    }
    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.is_closed { Poll::Ready(Ok(())) } else { Pin::new(&mut self.stream).poll_flush(cx) }
    }
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.is_closed { Poll::Ready(Ok(())) } else { Pin::new(&mut self.stream).poll_shutdown(cx) }
    }
}

/// An HTTP connection to boxd, closed when dropped.
pub(crate) struct Upstream {
    pub sender: SendRequest<Body>,
    pub(crate) connection: AbortHandle,
}

impl Upstream {
    pub async fn new(stream: BoxedStream) -> Result<Self, hyper::Error> {
        let stream = TokioIo::new(EarlyResponseStream { stream, is_closed: false });
        let (sender, connection) = Builder::new().max_buf_size(UPSTREAM_BUFFER_BYTES).handshake::<_, Body>(stream).await?;
        let connection = tokio::spawn(async move {
            if let Err(error) = connection.with_upgrades().await {
                tracing::debug!(%error, "a connection to boxd ended");
            }
        });
        Ok(Self { sender, connection: connection.abort_handle() })
    }
}

impl Drop for Upstream {
    fn drop(&mut self) {
        self.connection.abort();
    }
}
