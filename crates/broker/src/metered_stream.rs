//! A client connection that counts its bytes for the metrics.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    sync::{Arc, atomic::Ordering::Relaxed},
    task::{Context, Poll},
};

use cobox_kernel::{Peer, message_received, message_sent};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
};

use crate::metrics::Metrics;

pub struct MeteredStream {
    stream: TcpStream,
    metrics: Arc<Metrics>,
}

impl MeteredStream {
    pub fn new(stream: TcpStream, metrics: Arc<Metrics>) -> Self {
        metrics.connections.fetch_add(1, Relaxed);
        metrics.connections_open.fetch_add(1, Relaxed);
        Self { stream, metrics }
    }

    fn record_write(&self, polled: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if let Poll::Ready(Ok(count)) = &polled {
            message_sent(Peer::Client, *count);
            self.metrics.bytes_out.fetch_add(*count as u64, Relaxed);
        }
        polled
    }
}

impl Drop for MeteredStream {
    fn drop(&mut self) {
        self.metrics.connections_open.fetch_sub(1, Relaxed);
    }
}

impl AsyncRead for MeteredStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let polled = Pin::new(&mut self.stream).poll_read(cx, buffer);
        let count = buffer.filled().len() - before;
        if count > 0 {
            message_received(Peer::Client, count);
            self.metrics.bytes_in.fetch_add(count as u64, Relaxed);
        }
        polled
    }
}

impl AsyncWrite for MeteredStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.record_write(polled)
    }
    fn poll_write_vectored(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write_vectored(cx, bytes);
        self.record_write(polled)
    }
    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
