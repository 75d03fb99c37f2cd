//! What the other end of a sync says, which on a laptop is a hostile sandbox and in a sandbox a hostile client.

use cobox_sync::{MAX_FRAME_BYTES, Message};

pub fn run(data: &[u8]) {
    if let Ok(message) = Message::decode(data) {
        // One spelling only: what was understood is written as it came, and understood again.
        let written = message.encode();
        assert_eq!(Message::decode(&written[4..]).expect("what we write can be read"), message);
        assert!(matches!(message, Message::Fault { .. }) || written[4..] == *data, "read {message:?}");
    }
    // As a stream: a length comes first, and is never believed beyond its bound.
    let mut stream = data;
    while let Ok(message) = Message::read(&mut stream) {
        assert!(message.encode().len() <= MAX_FRAME_BYTES + 4);
    }
}
