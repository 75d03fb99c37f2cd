//! Uploads that a real boxd refuses while their clients still send: each gets its real status.

use std::time::Duration;

use cobox_client::Client;
use cobox_protocol::{Secret, session::Mode, token::DelegateRequest};
use cobox_testkit::{TestBroker, negotiate};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

const MIB: usize = 1 << 20;

struct Upload<'a> {
    url: &'a str,
    token: &'a Secret,
    is_chunked: bool,
    pieces: usize,
    piece_bytes: usize,
    pause: Option<Duration>,
}

impl Upload<'_> {
    /// Writes all of it before it reads the answer's status.
    async fn status(&self) -> String {
        let (address, path) = self.url.strip_prefix("http://").and_then(|rest| rest.split_once('/')).expect("a URL with a path");
        let mut stream = TcpStream::connect(address).await.expect("the broker listens");
        let length = match self.is_chunked {
            true => "transfer-encoding: chunked".to_owned(),
            false => format!("content-length: {}", self.pieces * self.piece_bytes),
        };
        let head = format!("PUT /{path} HTTP/1.1\r\nhost: {address}\r\nauthorization: Bearer {}\r\n{length}\r\n\r\n", self.token.expose());
        stream.write_all(head.as_bytes()).await.expect("the head is taken");
        let content = vec![b'x'; self.piece_bytes];
        let piece = if self.is_chunked { [format!("{:x}\r\n", self.piece_bytes).as_bytes(), &content, b"\r\n"].concat() } else { content };
        for _ in 0..self.pieces {
            stream.write_all(&piece).await.expect("the body is read to its end");
            if let Some(pause) = self.pause {
                tokio::time::sleep(pause).await;
            }
        }
        if self.is_chunked {
            stream.write_all(b"0\r\n\r\n").await.expect("the end is taken");
        }
        let mut status = [0; 12];
        stream.read_exact(&mut status).await.expect("an answer, not a reset");
        String::from_utf8_lossy(&status).into_owned()
    }
}

/// A token that may not write files, and where an upload would go: to the sandbox and by way of its session.
async fn refused(client: &Client, broker: &TestBroker) -> (Secret, [String; 2]) {
    let made = client.negotiate(&negotiate("t", Mode::Ensure)).await.unwrap();
    let narrow = DelegateRequest { capabilities: Some(vec!["exec".to_owned()]), ..Default::default() };
    let token = client.delegate(&made.session_id, &narrow).await.unwrap().token;
    let urls = [
        format!("{}/files/workspace/a", made.sandbox.http_base_url),
        format!("{}/v1/sandbox/relay/{}/v1/files/workspace/a", broker.url(), made.session_id),
    ];
    (token, urls)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_large_upload_that_boxd_refuses_gets_its_status() {
    let broker = TestBroker::start().await;
    let (token, urls) = refused(&broker.client(), &broker).await;
    for url in &urls {
        for is_chunked in [false, true] {
            let upload = Upload { url, token: &token, is_chunked, pieces: 70, piece_bytes: MIB, pause: None };
            assert_eq!(upload.status().await, "HTTP/1.1 403", "{url}, chunked: {is_chunked}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "half a minute; run by make soak"]
async fn soak_a_slow_upload_that_boxd_refuses_gets_its_status() {
    let broker = TestBroker::start().await;
    let (token, urls) = refused(&broker.client(), &broker).await;
    let (url, token) = (urls[0].as_str(), &token);
    let slow = |is_chunked| Upload { url, token, is_chunked, pieces: 60, piece_bytes: 20_000, pause: Some(Duration::from_millis(500)) };
    let (plain, chunked) = (slow(false), slow(true));
    let statuses = tokio::join!(plain.status(), chunked.status());
    assert_eq!(statuses, ("HTTP/1.1 403".to_owned(), "HTTP/1.1 403".to_owned()));
}
