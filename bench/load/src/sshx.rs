//! A viewer of an sshx session: CBOR over a WebSocket, with end-to-end encrypted terminal output.

use aes::cipher::{KeyIvInit, StreamCipher, StreamCipherSeek};
use anyhow::{Context, bail};
use argon2::{Algorithm, Argon2, Params, Version};
use ciborium::{Value, cbor};

use crate::{
    connection::Address,
    contender::Endpoint,
    echo::Terminal,
    ws::{Message, Socket},
};

type Cipher = ctr::Ctr64BE<aes::Aes128>;

/// sshx's salt: public, and the same for every session.
const SALT: &[u8] = b"This is a non-random salt for sshx.io, since we want to stretch the security of 83-bit keys!";
/// sshx's Argon2 parameters: memory in KiB, and passes.
const ARGON_KIB: u32 = 19 * 1024;
const ARGON_PASSES: u32 = 2;
/// Numbers of the encrypted streams: one for input, and one for each shell's output.
const INPUT_STREAM: u64 = 0x2_0000_0000;
const OUTPUT_STREAM: u64 = 0x1_0000_0000;

pub struct SshxTerminal {
    socket: Socket,
    key: [u8; 16],
    shell: u64,
    /// Number of bytes typed so far: the position in the input's key stream.
    typed: u64,
}

impl SshxTerminal {
    pub fn open(at: &Address, session: &str, secret: &str) -> anyhow::Result<Self> {
        let mut key = [0; 16];
        let params = Params::new(ARGON_KIB, ARGON_PASSES, 1, Some(key.len())).map_err(|e| anyhow::anyhow!("{e}"))?;
        Argon2::new(Algorithm::Argon2id, Version::V0x13, params)
            .hash_password_into(secret.as_bytes(), SALT, &mut key)
            .map_err(|e| anyhow::anyhow!("{e}"))?;
        let socket = Socket::open(&Endpoint { at: at.clone(), path: format!("/api/s/{session}"), token: None })?;
        let mut terminal = Self { socket, key, shell: 0, typed: 0 };
        let encrypted_zeros = terminal.crypt(0, 0, &[0; 16]);
        terminal.send(&cbor!({ "authenticate" => [Value::Bytes(encrypted_zeros), null] })?)?;
        terminal.send(&cbor!({ "create" => [0, 0] })?)?;
        while terminal.shell == 0 {
            let (kind, fields) = terminal.receive()?;
            if kind == "shells" {
                let first = fields.as_array().and_then(|shells| shells.first()).and_then(Value::as_array);
                terminal.shell = first.map_or(Ok(0), |shell| number(&shell[0]))?;
            }
        }
        terminal.send(&cbor!({ "subscribe" => [terminal.shell, 0] })?)?;
        Ok(terminal)
    }

    fn crypt(&self, stream: u64, offset: u64, bytes: &[u8]) -> Vec<u8> {
        let mut start = [0; 16];
        start[..8].copy_from_slice(&stream.to_be_bytes());
        let mut cipher = Cipher::new(&self.key.into(), &start.into());
        cipher.seek(offset);
        let mut bytes = bytes.to_vec();
        cipher.apply_keystream(&mut bytes);
        bytes
    }

    fn send(&mut self, message: &Value) -> anyhow::Result<()> {
        let mut bytes = Vec::new();
        ciborium::into_writer(message, &mut bytes)?;
        self.socket.send_binary(&bytes)
    }

    /// The kind and the content of the next message.
    fn receive(&mut self) -> anyhow::Result<(String, Value)> {
        match self.socket.next()? {
            Some(Message::Binary(bytes)) => {
                let message: Value = ciborium::from_reader(bytes)?;
                let (kind, fields) =
                    message.into_map().ok().and_then(|m| m.into_iter().next()).context("a message of an unknown format")?;
                Ok((kind.into_text().map_err(|_| anyhow::anyhow!("a message without a name"))?, fields))
            }
            Some(Message::Text(_)) => bail!("a text message, which sshx doesn't send"),
            None => bail!("sshx closed the connection"),
        }
    }
}

fn number(value: &Value) -> anyhow::Result<u64> {
    let number = value.as_integer().context("not a number")?;
    Ok(u64::try_from(number)?)
}

impl Terminal for SshxTerminal {
    fn write(&mut self, keys: &[u8]) -> anyhow::Result<()> {
        let (data, at) = (self.crypt(INPUT_STREAM, self.typed, keys), self.typed);
        self.typed += keys.len() as u64;
        self.send(&cbor!({ "data" => [self.shell, Value::Bytes(data), at] })?)
    }

    fn read(&mut self, output: &mut Vec<u8>) -> anyhow::Result<()> {
        let (kind, fields) = self.receive()?;
        match kind.as_str() {
            "chunks" => {
                let fields = fields.into_array().map_err(|_| anyhow::anyhow!("chunks of an unknown format"))?;
                let mut at = number(&fields[1])?;
                for chunk in fields[2].as_array().context("no chunks")? {
                    let bytes = chunk.as_bytes().context("a chunk without bytes")?;
                    output.extend(self.crypt(OUTPUT_STREAM | self.shell, at, bytes));
                    at += bytes.len() as u64;
                }
            }
            "error" | "invalidAuth" => bail!("sshx sent {kind}: {fields:?}"),
            _ => {}
        }
        Ok(())
    }
}
