//! Binary encoding of numbers, paths and entries, for the wire and for state files. Decoding trusts nothing.

use crate::{
    entry::{Digest, Entry},
    path::RelPath,
};

/// Maximum length of a link target, in bytes, as in the kernel.
const MAX_TARGET_BYTES: usize = 4095;

/// The input is not a valid encoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid encoding")]
pub struct Malformed;

#[derive(Default)]
pub struct Encoder(pub Vec<u8>);

impl Encoder {
    pub fn u8(&mut self, value: u8) -> &mut Self {
        self.0.push(value);
        self
    }

    pub fn u32(&mut self, value: u32) -> &mut Self {
        self.0.extend_from_slice(&value.to_be_bytes());
        self
    }

    pub fn u64(&mut self, value: u64) -> &mut Self {
        self.0.extend_from_slice(&value.to_be_bytes());
        self
    }

    pub fn raw(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend_from_slice(bytes);
        self
    }

    /// Writes the length first. No value is longer than a frame.
    pub fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.u32(u32::try_from(bytes.len()).unwrap_or(u32::MAX)).raw(bytes)
    }

    pub fn path(&mut self, path: &RelPath) -> &mut Self {
        self.bytes(path.bytes())
    }

    pub fn entry(&mut self, entry: Option<&Entry>) -> &mut Self {
        match entry {
            None => self.u8(0),
            Some(Entry::Dir) => self.u8(1),
            Some(Entry::File { digest, size, exec }) => self.u8(if *exec { 3 } else { 2 }).raw(&digest.0).u64(*size),
            Some(Entry::Link { target }) => self.u8(4).bytes(target),
        }
    }
}

pub struct Decoder<'a>(pub &'a [u8]);

impl<'a> Decoder<'a> {
    pub fn take(&mut self, count: usize) -> Result<&'a [u8], Malformed> {
        let (taken, rest) = self.0.split_at_checked(count).ok_or(Malformed)?;
        self.0 = rest;
        Ok(taken)
    }

    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        self.take(N)?.try_into().map_err(|_| Malformed)
    }

    pub fn u8(&mut self) -> Result<u8, Malformed> {
        Ok(self.array::<1>()?[0])
    }

    pub fn bool(&mut self) -> Result<bool, Malformed> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(Malformed),
        }
    }

    pub fn u32(&mut self) -> Result<u32, Malformed> {
        Ok(u32::from_be_bytes(self.array()?))
    }

    pub fn u64(&mut self) -> Result<u64, Malformed> {
        Ok(u64::from_be_bytes(self.array()?))
    }

    pub fn bytes(&mut self) -> Result<&'a [u8], Malformed> {
        let length = self.u32()? as usize;
        self.take(length)
    }

    pub fn path(&mut self) -> Result<RelPath, Malformed> {
        RelPath::new(self.bytes()?).ok_or(Malformed)
    }

    pub fn entry(&mut self) -> Result<Option<Entry>, Malformed> {
        Ok(match self.u8()? {
            0 => None,
            1 => Some(Entry::Dir),
            kind @ (2 | 3) => Some(Entry::File { digest: Digest(self.array()?), size: self.u64()?, exec: kind == 3 }),
            4 => {
                let target = self.bytes()?;
                let is_target = !target.is_empty() && target.len() <= MAX_TARGET_BYTES && !target.contains(&0);
                Some(Entry::Link { target: is_target.then_some(target).ok_or(Malformed)?.into() })
            }
            _ => return Err(Malformed),
        })
    }

    /// Decodes items until the input is empty; a partial item is an error.
    pub fn all<T>(&mut self, mut read: impl FnMut(&mut Self) -> Result<T, Malformed>) -> Result<Vec<T>, Malformed> {
        let mut items = Vec::new();
        while !self.0.is_empty() {
            items.push(read(self)?);
        }
        Ok(items)
    }
}
