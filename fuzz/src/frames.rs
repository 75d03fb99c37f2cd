//! What clients send on WebSockets, and what they read from them.

use base64::{Engine, engine::general_purpose::STANDARD};
use boxd::fuzzing;
use cobox_protocol::frame::{
    BinaryFrame, ClientFrame, ExecReady, ExecStart, ServerFrame, ShellReady, ShellStart, data_or_b64, frame_bytes,
};

/// A complaint names the fields and the types of frames; nothing that was sent makes it longer than this.
const MAX_COMPLAINT_BYTES: usize = 1024;

pub fn run(data: &[u8]) {
    binary(data);
    base64(data);
    let Ok(text) = std::str::from_utf8(data) else { return };
    client::<ExecStart>(text);
    client::<ShellStart>(text);
    // A client reads frames of a boxd that may be newer or hostile.
    let _ = serde_json::from_str::<ServerFrame<ExecReady>>(text);
    let _ = serde_json::from_str::<ServerFrame<ShellReady>>(text);
}

fn client<S: serde::Serialize + serde::de::DeserializeOwned + Send>(text: &str) {
    match fuzzing::frame::<S>(text) {
        Ok(None) => {}
        Ok(Some(frame)) => {
            if let ClientFrame::Stdin { data, data_b64, .. } = &frame {
                let _ = frame_bytes(data.as_deref(), data_b64.as_deref());
            }
            // What was understood is understood again, the same.
            let once = serde_json::to_string(&frame).expect("a frame can be written");
            let again = fuzzing::frame::<S>(&once).expect("what we write can be read").expect("it is a frame");
            assert_eq!(serde_json::to_string(&again).expect("a frame can be written"), once);
        }
        Err(complaint) => assert!(complaint.len() <= MAX_COMPLAINT_BYTES, "{} bytes of complaint", complaint.len()),
    }
}

fn binary(data: &[u8]) {
    if let Some(frame) = BinaryFrame::parse(data) {
        let written = [BinaryFrame::head(frame.kind, frame.offset).as_slice(), frame.bytes].concat();
        assert_eq!(written, data);
    }
}

fn base64(data: &[u8]) {
    let (text, b64) = data_or_b64(data);
    assert_eq!(frame_bytes(text.as_deref(), b64.as_deref()).expect("what we write can be read"), data);
    if let Ok(text) = std::str::from_utf8(data)
        && let Ok(bytes) = frame_bytes(None, Some(text))
    {
        // One spelling only: bytes can't be smuggled past a comparison of texts.
        assert_eq!(STANDARD.encode(bytes), text);
    }
}
