//! Messages from the other end of a sync: on a laptop from a hostile sandbox, in a sandbox from a hostile client.

use cobox_sync::{MAX_FRAME_BYTES, Message};

pub fn run(data: &[u8]) {
    if let Ok(message) = Message::decode(data) {
        // The encoding is unique: an accepted message is written as the same bytes, and read again as the same message.
        let written = message.encode();
        assert_eq!(Message::decode(&written[4..]).expect("an encoded value can be decoded"), message);
        assert!(matches!(message, Message::Fault { .. }) || written[4..] == *data, "read {message:?}");
    }
    // As a stream: a length comes first, and is never trusted beyond its limit.
    let mut stream = data;
    while let Ok(message) = Message::read(&mut stream) {
        assert!(message.encode().len() <= MAX_FRAME_BYTES + 4);
    }
}
