//! Reads typed or piped input line by line and bounds the memory that one line can take.

use tokio::{
    io::{AsyncRead, AsyncReadExt},
    sync::mpsc,
};
use tokio_util::task::AbortOnDropHandle;

/// Longest message, in bytes: more than any model accepts at once.
const MAX_LINE_BYTES: usize = 1024 * 1024;
/// Lines read ahead; further input stays in the pipe.
const LINES_AHEAD: usize = 1;

#[derive(Debug, PartialEq, Eq)]
pub enum InputLine {
    Text(String),
    TooLong,
}

/// Returns the lines of an input and the task that reads them. A line that ends with a backslash continues on the
/// next.
pub fn read_lines(input: impl AsyncRead + Unpin + Send + 'static) -> (mpsc::Receiver<InputLine>, AbortOnDropHandle<()>) {
    let (sender, lines) = mpsc::channel(LINES_AHEAD);
    (lines, AbortOnDropHandle::new(tokio::spawn(read(input, sender))))
}

async fn read(mut input: impl AsyncRead + Unpin, lines: mpsc::Sender<InputLine>) {
    let (mut line, mut is_too_long) = (Vec::new(), false);
    let mut buffer = [0; 8 * 1024];
    // A read error ends the input.
    while let Ok(n @ 1..) = input.read(&mut buffer).await {
        for &byte in &buffer[..n] {
            match byte {
                b'\n' if line.last() == Some(&b'\\') => {
                    line.pop();
                    line.push(b'\n');
                }
                b'\n' => {
                    if lines.send(take_line(&mut line, &mut is_too_long)).await.is_err() {
                        return;
                    }
                }
                _ if line.len() >= MAX_LINE_BYTES => is_too_long = true,
                byte => line.push(byte),
            }
        }
    }
    if !line.is_empty() {
        // An error means that the receiver is gone.
        let _ = lines.send(take_line(&mut line, &mut is_too_long)).await;
    }
}

fn take_line(line: &mut Vec<u8>, is_too_long: &mut bool) -> InputLine {
    let line = std::mem::take(line);
    if std::mem::take(is_too_long) { InputLine::TooLong } else { InputLine::Text(String::from_utf8_lossy(&line).into_owned()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn lines_are_read_one_by_one_joined_if_continued_and_refused_if_too_long() {
        let mut input = b"one\ntwo\\\nmore\n\n".to_vec();
        input.extend(std::iter::repeat_n(b'x', MAX_LINE_BYTES + 10));
        input.extend(b"\nlast");
        let (mut lines, _reading) = read_lines(std::io::Cursor::new(input));
        let mut read = Vec::new();
        while let Some(line) = lines.recv().await {
            read.push(line);
        }
        let text = |t: &str| InputLine::Text(t.to_owned());
        assert_eq!(read, [text("one"), text("two\nmore"), text(""), InputLine::TooLong, text("last")]);
    }
}
