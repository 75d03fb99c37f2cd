//! WebSocket frames, as boxd reads them from clients and as clients read them from boxd.

use base64::{Engine, engine::general_purpose::STANDARD};
use boxd::fuzzing;
use cobox_protocol::frame::{
    BinaryFrame, ClientFrame, ExecReady, ExecStart, ServerFrame, ShellReady, ShellStart, data_or_b64, frame_bytes,
};

/// Maximum length of an error message. It names fields and frame types, and must not grow with the input.
const MAX_ERROR_BYTES: usize = 1024;

pub fn run(data: &[u8]) {
    binary(data);
    base64(data);
    let Ok(text) = std::str::from_utf8(data) else { return };
    client::<ExecStart>(text);
    client::<ShellStart>(text);
    // A client reads the frames of a boxd that may be newer or hostile.
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
            // A frame that was accepted is written and read again as the same frame.
            let once = serde_json::to_string(&frame).expect("a frame can be serialized");
            let again = fuzzing::frame::<S>(&once).expect("an encoded value can be decoded").expect("it is a known frame");
            assert_eq!(serde_json::to_string(&again).expect("a frame can be serialized"), once);
        }
        Err(error) => assert!(error.len() <= MAX_ERROR_BYTES, "{} bytes of error", error.len()),
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
    assert_eq!(frame_bytes(text.as_deref(), b64.as_deref()).expect("an encoded value can be decoded"), data);
    if let Ok(text) = std::str::from_utf8(data)
        && let Ok(bytes) = frame_bytes(None, Some(text))
    {
        // The encoding is unique, so bytes can't be smuggled past a comparison of texts.
        assert_eq!(STANDARD.encode(bytes), text);
    }
}
