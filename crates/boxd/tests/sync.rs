//! Tests of `WS /v1/sync/ws`: required capabilities, confinement to the folder, and the end with the token.

mod support;

use std::fs;

use cobox_protocol::{Secret, control::Revocation};
use cobox_sync::{Change, Digest, Entry, Message, MissingContent, Outcome, RelPath};
use futures_util::{SinkExt, StreamExt};
use support::{SOON, TestBoxd};
use tokio::net::UnixStream;
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{self, Message as Frame, client::IntoClientRequest},
};

struct Client {
    socket: WebSocketStream<UnixStream>,
    bytes: Vec<u8>,
}

impl Client {
    async fn dial(boxd: &TestBoxd, token: &Secret, query: &str) -> Result<Self, u16> {
        let mut request = format!("ws://boxd/v1/sync/ws{query}").into_client_request().unwrap();
        request.headers_mut().insert("authorization", format!("Bearer {}", token.expose()).parse().unwrap());
        match tokio_tungstenite::client_async(request, boxd.dial("clients").await).await {
            Ok((socket, _)) => Ok(Self { socket, bytes: Vec::new() }),
            Err(tungstenite::Error::Http(answer)) => Err(answer.status().as_u16()),
            Err(e) => panic!("{e}"),
        }
    }

    async fn hello(boxd: &TestBoxd, token: &Secret, query: &str, read_only: bool) -> Self {
        let mut client = Self::dial(boxd, token, query).await.unwrap();
        client.send(&Message::Hello { version: 1, read_only }).await;
        assert!(matches!(client.receive().await, Ok(Message::Welcome { .. })));
        client
    }

    async fn send(&mut self, message: &Message) {
        self.socket.send(Frame::Binary(message.encode().into())).await.unwrap();
    }

    /// The next message except change notifications. An error is the close code.
    async fn receive(&mut self) -> Result<Message, u16> {
        loop {
            let mut rest = self.bytes.as_slice();
            if let Ok(message) = Message::read(&mut rest) {
                self.bytes = rest.to_vec();
                if message != Message::Dirty {
                    return Ok(message);
                }
                continue;
            }
            match tokio::time::timeout(SOON, self.socket.next()).await.expect("a message arrives in time") {
                Some(Ok(Frame::Binary(bytes))) => self.bytes.extend_from_slice(&bytes),
                Some(Ok(Frame::Close(frame))) => return Err(frame.map_or(0, |f| u16::from(f.code))),
                Some(Ok(_)) => {}
                other => panic!("{other:?}"),
            }
        }
    }

    /// The existing paths according to a scan.
    async fn scan(&mut self) -> Vec<String> {
        self.send(&Message::Scan { all: true }).await;
        let mut paths = Vec::new();
        loop {
            match self.receive().await.unwrap() {
                Message::Updates(updates) => paths.extend(updates.into_iter().map(|(path, _)| path.to_string())),
                Message::Scanned { .. } => return paths,
                Message::Problems(_) | Message::Rules(_) => {}
                other => panic!("{other:?}"),
            }
        }
    }

    async fn apply(&mut self, change: Change) -> Result<Outcome, u16> {
        self.send(&Message::Changes(vec![change])).await;
        self.send(&Message::ChangesEnd).await;
        match self.receive().await? {
            Message::Outcomes(outcomes) => {
                assert_eq!(self.receive().await?, Message::OutcomesEnd);
                Ok(outcomes[0])
            }
            Message::Fault { .. } => Err(self.receive().await.err().unwrap_or(0)),
            other => panic!("{other:?}"),
        }
    }
}

fn path(text: &str) -> RelPath {
    RelPath::new(text.as_bytes()).unwrap()
}

#[tokio::test]
async fn reading_requires_one_capability_and_writing_both() {
    let boxd = TestBoxd::start();
    for (scope, query, refused) in [
        ("fs_read", "", Some(403)),
        ("fs_read", "?pull=true", None),
        ("fs_write", "?pull=true", Some(403)),
        ("exec", "?pull=true", Some(403)),
        ("fs_read fs_write", "", None),
        ("fs_read fs_write", "?pull=perhaps", Some(400)),
    ] {
        assert_eq!(Client::dial(&boxd, &boxd.token(scope), query).await.err(), refused, "{scope} {query}");
    }
}

#[tokio::test]
async fn a_read_only_client_can_not_write() {
    let boxd = TestBoxd::start();
    fs::write(boxd.host("/workspace/x"), "1").unwrap();
    let mut client = Client::hello(&boxd, &boxd.token("fs_read fs_write"), "?pull=true", true).await;
    assert_eq!(client.scan().await, ["x"]);
    let change = Change { path: path("new"), old: None, new: Some(Entry::Dir) };
    assert!(client.apply(change).await.is_err());
    assert!(!boxd.host("/workspace/new").exists());
}

#[tokio::test]
async fn a_hostile_client_stays_within_the_folder() {
    let boxd = TestBoxd::start();
    fs::create_dir(boxd.host("/workspace/in")).unwrap();
    std::os::unix::fs::symlink("/tmp", boxd.host("/workspace/in/out")).unwrap();
    let mut client = Client::hello(&boxd, &boxd.token("fs_read fs_write"), "?path=/workspace/in", false).await;
    client.scan().await;
    for (text, entry) in [
        ("out/x", Entry::Dir),
        ("l", Entry::Link { target: b"/etc/passwd".as_slice().into() }),
        ("m", Entry::Link { target: b"../../..".as_slice().into() }),
    ] {
        let done = client.apply(Change { path: path(text), old: None, new: Some(entry) }).await;
        assert!(matches!(done, Ok(Outcome::Changed | Outcome::Failed)), "{text}: {done:?}");
    }
    assert!(!boxd.host("/tmp/x").exists() && !boxd.host("/workspace/in/l").exists());
    assert_eq!(client.apply(Change { path: path("good"), old: None, new: Some(Entry::Dir) }).await, Ok(Outcome::Done));
    let claimed = Change { path: path("good"), old: None, new: Some(Entry::Dir) };
    assert_eq!(client.apply(claimed).await, Ok(Outcome::Changed), "the content differs from the announced content");
    client.send(&Message::Needs(vec![MissingContent { path: path("big"), digest: Digest::of(b"x"), size: 1 }])).await;
    client.send(&Message::Scan { all: true }).await;
    assert!(matches!(client.receive().await, Ok(Message::Fault { .. })), "out of order");
}

#[tokio::test]
async fn a_revoked_token_ends_its_sync() {
    let mut boxd = TestBoxd::start();
    let claims = boxd.claims("fs_read fs_write");
    let token = boxd.token("fs_read fs_write");
    let mut client = Client::hello(&boxd, &token, "", false).await;
    client.scan().await;
    boxd.revoke(vec![Revocation::Principal(claims.sub)]).await;
    assert_eq!(client.receive().await, Err(4410));
    boxd.idle().await;
}
