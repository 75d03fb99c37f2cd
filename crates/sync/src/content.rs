//! File content on the wire: one stream of files, cut into blocks that are compressed where that helps. Memory use does
//! not depend on the amount of content.

use std::{
    fs::File,
    io::{self, Read, Seek, SeekFrom, Write},
    time::SystemTime,
};

use crate::{
    beneath,
    delta::{DeltaOp, MAX_BLOCK_BYTES, MAX_BLOCKS, Signature, compute_delta},
    error::SyncError,
    file_stamp::Stamp,
    folder::{ContentRequest, Folder},
    message::{Message, MissingContent},
    staging::Incoming,
};

/// Size of a block before compression, in bytes.
const BLOCK_BYTES: usize = 256 * 1024;
/// Fast enough not to slow down a local transfer; source code still shrinks to a third.
const ZSTD_LEVEL: i32 = 1;
/// Blocks sent uncompressed after one that did not shrink: already compressed content mostly continues that way.
const SKIP_BLOCKS: u32 = 15;

const OP_LITERAL: u8 = 1;
const OP_COPY: u8 = 2;
const OP_DONE: u8 = 3;
const OP_ABANDONED: u8 = 4;

/// Supplies the next message.
pub trait MessageSource {
    fn next(&mut self) -> Result<Message, SyncError>;
}

/// Cuts a stream into messages.
pub struct BlockWriter<'a> {
    send: &'a mut dyn FnMut(&Message) -> io::Result<()>,
    block: Vec<u8>,
    zstd: zstd::bulk::Compressor<'static>,
    skip: u32,
}

impl<'a> BlockWriter<'a> {
    pub fn new(send: &'a mut dyn FnMut(&Message) -> io::Result<()>) -> io::Result<Self> {
        Ok(Self { send, block: Vec::with_capacity(BLOCK_BYTES), zstd: zstd::bulk::Compressor::new(ZSTD_LEVEL)?, skip: 0 })
    }

    pub fn finish(mut self) -> io::Result<()> {
        self.flush()?;
        (self.send)(&Message::ContentEnd)
    }
}

impl Write for BlockWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = bytes.len().min(BLOCK_BYTES - self.block.len());
        self.block.extend_from_slice(&bytes[..n]);
        if self.block.len() == BLOCK_BYTES {
            self.flush()?;
        }
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.block.is_empty() {
            return Ok(());
        }
        let block = std::mem::replace(&mut self.block, Vec::with_capacity(BLOCK_BYTES));
        let raw = block.len() as u32;
        let packed = if self.skip == 0 { Some(self.zstd.compress(&block)?) } else { None };
        self.skip = self.skip.saturating_sub(1);
        let message = match packed {
            Some(packed) if packed.len() < block.len() - block.len() / 16 => Message::Content { raw, is_packed: true, bytes: packed },
            Some(_) => {
                self.skip = SKIP_BLOCKS;
                Message::Content { raw, is_packed: false, bytes: block }
            }
            None => Message::Content { raw, is_packed: false, bytes: block },
        };
        (self.send)(&message)
    }
}

/// Reassembles a stream from its messages.
pub struct BlockReader<'a> {
    source: &'a mut dyn MessageSource,
    block: Vec<u8>,
    at: usize,
    zstd: zstd::bulk::Decompressor<'static>,
    is_at_end: bool,
    /// Called with the number of bytes of each block that arrives.
    progress: &'a mut dyn FnMut(u64),
    failure: Option<SyncError>,
}

impl<'a> BlockReader<'a> {
    pub fn new(source: &'a mut dyn MessageSource, progress: &'a mut dyn FnMut(u64)) -> io::Result<Self> {
        let zstd = zstd::bulk::Decompressor::new()?;
        Ok(Self { source, block: Vec::new(), at: 0, zstd, is_at_end: false, progress, failure: None })
    }

    fn refill(&mut self) -> Result<(), SyncError> {
        while self.at == self.block.len() && !self.is_at_end {
            match self.source.next()? {
                Message::Content { raw, is_packed, bytes } => {
                    let raw = raw as usize;
                    if raw > BLOCK_BYTES {
                        return Err(SyncError::Protocol("a block is too long"));
                    }
                    let block = match is_packed {
                        true => self.zstd.decompress(&bytes, raw).map_err(|_| SyncError::Protocol("a block can't be decompressed"))?,
                        false => bytes,
                    };
                    if block.len() != raw {
                        return Err(SyncError::Protocol("a block does not have the announced length"));
                    }
                    (self.progress)(raw as u64);
                    (self.block, self.at) = (block, 0);
                }
                Message::ContentEnd => self.is_at_end = true,
                _ => return Err(SyncError::Protocol("unexpected message within content")),
            }
        }
        Ok(())
    }

    fn read_array<const N: usize>(&mut self) -> Result<[u8; N], SyncError> {
        let mut bytes = [0; N];
        self.read_exact(&mut bytes).map_err(|e| self.classify_error(e))?;
        Ok(bytes)
    }

    fn classify_error(&mut self, e: io::Error) -> SyncError {
        self.failure.take().unwrap_or_else(|| match e.kind() {
            io::ErrorKind::UnexpectedEof => SyncError::Protocol("content ended early"),
            _ => SyncError::Lost(e),
        })
    }
}

impl Read for BlockReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if let Err(failure) = self.refill() {
            self.failure = Some(failure);
            return Err(io::Error::other("receiving content failed"));
        }
        let n = buffer.len().min(self.block.len() - self.at);
        buffer[..n].copy_from_slice(&self.block[self.at..self.at + n]);
        self.at += n;
        Ok(n)
    }
}

impl Folder {
    /// Sends the requested content. A file that has changed since the last scan is marked as abandoned.
    pub(crate) fn send_content(
        &self,
        needs: &[MissingContent],
        wants: &[ContentRequest],
        send: &mut dyn FnMut(&Message) -> io::Result<()>,
    ) -> Result<(), SyncError> {
        let mut out = BlockWriter::new(send).map_err(SyncError::Lost)?;
        for want in wants {
            let Some(need) = needs.get(want.index as usize) else {
                return Err(SyncError::Protocol("it requested content that is not needed"));
            };
            out.write_all(&want.index.to_be_bytes()).map_err(SyncError::Lost)?;
            let is_whole = match self.open_content(need) {
                Some((file, stamp)) => send_file(file, stamp, &want.signature, &mut out)?,
                None => false,
            };
            out.write_all(&[if is_whole { OP_DONE } else { OP_ABANDONED }]).map_err(SyncError::Lost)?;
        }
        out.finish().map_err(SyncError::Lost)
    }

    /// Stages the content that the other side sends. Returns the indexes of the files that did not arrive completely.
    pub(crate) fn receive_content(&mut self, needs: &[MissingContent], mut from: BlockReader) -> Result<Vec<u32>, SyncError> {
        let mut failed = Vec::new();
        // A file that is sent repeatedly would keep the sync busy and fill the disk.
        let mut was_sent = vec![false; needs.len()];
        loop {
            from.refill()?;
            if from.is_at_end {
                return Ok(failed);
            }
            let index = u32::from_be_bytes(from.read_array()?);
            let need = needs.get(index as usize).ok_or(SyncError::Protocol("it sent content that was not requested"))?;
            if std::mem::replace(&mut was_sent[index as usize], true) {
                return Err(SyncError::Protocol("it sent a file twice"));
            }
            if self.hooks.is_full() {
                return Err(SyncError::Full);
            }
            let mut incoming = self.staging.begin().map_err(|e| SyncError::writing("store incoming content", e))?;
            let received = self.receive_file(need, &mut incoming, &mut from);
            let is_whole = match received {
                Ok(is_whole) => is_whole,
                Err(e) => {
                    self.staging.abandon(incoming);
                    return Err(e);
                }
            };
            if !is_whole {
                self.staging.abandon(incoming);
                failed.push(index);
            } else if !self.staging.finish(incoming, need.digest, need.size) {
                failed.push(index);
            }
        }
    }

    fn receive_file(&self, need: &MissingContent, incoming: &mut Incoming, from: &mut BlockReader) -> Result<bool, SyncError> {
        let mut old: Option<File> = None;
        let mut remaining = need.size;
        let mut charge = |length: u64| match remaining.checked_sub(length) {
            Some(rest) => {
                remaining = rest;
                Ok(())
            }
            None => Err(SyncError::Protocol("a file is longer than announced")),
        };
        loop {
            let [op] = from.read_array()?;
            match op {
                OP_LITERAL => {
                    let length = u32::from_be_bytes(from.read_array()?);
                    charge(u64::from(length))?;
                    copy_literal(from, u64::from(length), incoming)?;
                }
                OP_COPY => {
                    let (offset, length) = (u64::from_be_bytes(from.read_array()?), u64::from_be_bytes(from.read_array()?));
                    charge(length)?;
                    // The kernel rejects such an offset, which would look like a failure of this disk.
                    if offset > i64::MAX as u64 || length == 0 {
                        return Err(SyncError::Protocol("a copy is outside of any file"));
                    }
                    let file = match &mut old {
                        Some(file) => file,
                        None => match beneath::open_file(self.root(), need.path.bytes()) {
                            Ok(file) => old.insert(File::from(file)),
                            // The result will not have the expected digest, so the file is sent whole the next time.
                            Err(_) => continue,
                        },
                    };
                    let copied = file.seek(SeekFrom::Start(offset)).and_then(|_| io::copy(&mut Read::take(&mut *file, length), incoming));
                    copied.map_err(|e| SyncError::writing_io("store incoming content", e))?;
                }
                OP_DONE => return Ok(true),
                OP_ABANDONED => return Ok(false),
                _ => return Err(SyncError::Protocol("invalid operation within content")),
            }
        }
    }
}

fn copy_literal(from: &mut BlockReader, mut length: u64, to: &mut Incoming) -> Result<(), SyncError> {
    while length > 0 {
        from.refill()?;
        let available = &from.block[from.at..];
        let n = available.len().min(usize::try_from(length).unwrap_or(usize::MAX));
        if n == 0 {
            return Err(SyncError::Protocol("content ended early"));
        }
        to.write_all(&available[..n]).map_err(|e| SyncError::writing_io("store incoming content", e))?;
        from.at += n;
        length -= n as u64;
    }
    Ok(())
}

/// Returns whether the file was sent exactly as announced.
fn send_file(mut file: File, stamp: Stamp, signature: &Signature, out: &mut BlockWriter) -> Result<bool, SyncError> {
    let is_usable = signature.block <= MAX_BLOCK_BYTES && signature.sums.len() <= MAX_BLOCKS;
    if !is_usable {
        return Err(SyncError::Protocol("too many block checksums"));
    }
    let (mut sent, mut send_error) = (0, None);
    let result = compute_delta(signature, &mut file, |op| {
        let written = match op {
            DeltaOp::Data(bytes) => {
                sent += bytes.len() as u64;
                let head = [&[OP_LITERAL][..], &(bytes.len() as u32).to_be_bytes()].concat();
                out.write_all(&head).and_then(|()| out.write_all(bytes))
            }
            DeltaOp::Copy { offset, length } => {
                sent += length;
                out.write_all(&[&[OP_COPY][..], &offset.to_be_bytes(), &length.to_be_bytes()].concat())
            }
        };
        // A failing connection must not be mistaken for a failing file.
        written.inspect_err(|e| send_error = Some(e.kind()))?;
        // A growing file is abandoned before it exceeds its announced size.
        if sent > stamp.size() { Err(io::Error::other("the file has grown")) } else { Ok(()) }
    });
    if let Some(kind) = send_error {
        return Err(SyncError::Lost(kind.into()));
    }
    let now = rustix::fs::fstat(&file).map(|stat| Stamp::of(&stat, SystemTime::now()));
    Ok(result.is_ok() && sent == stamp.size() && now.is_ok_and(|now| stamp.matches(&now)))
}
