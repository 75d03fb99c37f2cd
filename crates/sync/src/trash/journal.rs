//! The journal of a trash batch: one record for each path that is about to be deleted or replaced, durable before the
//! first rename.
//!
//! A record without a stored file means that the change was never made, or that the file was restored. Reading ends at
//! the first torn record, so a process that is killed while it appends only loses records whose renames had not begun.

use std::{
    fs::File,
    io::{Read, Write},
    os::fd::OwnedFd,
};

use rustix::{
    fs::{Mode, OFlags},
    io::Errno,
};

use crate::{
    codec::{Decoder, Encoder, Malformed},
    entry::Entry,
    path::RelPath,
};

const NAME: &str = "journal";
const NEW_NAME: &str = "journal.new";
const MAGIC: &[u8] = b"cobox trash 1\n";
const CHECKSUM_BYTES: usize = 8;
/// Maximum size of a journal, in bytes: a batch of a million paths of usual length.
const MAX_JOURNAL_BYTES: u64 = 256 * 1024 * 1024;

/// The state of one path before sync changed it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JournalRecord {
    /// Name of the stored file in the batch directory. Directories and mode changes have no file.
    pub number: u64,
    /// Time of the record, in milliseconds since 1970.
    pub at: u64,
    pub path: RelPath,
    pub old: Entry,
    /// Permission bits of the old version.
    pub mode: u32,
    /// The entry that replaced the old version, if any.
    pub new: Option<Entry>,
}

impl JournalRecord {
    /// Whether only permission bits change and the content stays in place.
    pub fn is_mode_change(&self) -> bool {
        let digest = |entry: &Entry| entry.content().map(|(digest, _)| digest);
        self.old.is_file() && self.new.as_ref().is_some_and(|new| digest(new) == digest(&self.old))
    }

    /// Whether the old version is stored as a file of the batch.
    pub fn is_stored(&self) -> bool {
        !self.old.is_dir() && !self.is_mode_change()
    }

    fn encode(&self) -> Vec<u8> {
        let mut out = Encoder::default();
        out.u64(self.number).u64(self.at).path(&self.path).entry(Some(&self.old)).u32(self.mode).entry(self.new.as_ref());
        let mut framed = Encoder::default();
        framed.bytes(&out.0).raw(&blake3::hash(&out.0).as_bytes()[..CHECKSUM_BYTES]);
        framed.0
    }

    fn decode(body: &[u8]) -> Result<Self, Malformed> {
        let mut input = Decoder(body);
        let (number, at, path) = (input.u64()?, input.u64()?, input.path()?);
        let old = input.entry()?.ok_or(Malformed)?;
        Ok(Self { number, at, path, old, mode: input.u32()?, new: input.entry()? })
    }
}

/// Appends records and makes them durable. After an error the journal is as before: records that follow a torn one could
/// not be read.
pub fn append(batch: &OwnedFd, records: &[JournalRecord]) -> Result<(), Errno> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::APPEND | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::openat(batch, NAME, flags, Mode::from_raw_mode(0o600))?;
    let length = u64::try_from(rustix::fs::fstat(&file)?.st_size).unwrap_or(0);
    let file = File::from(file);
    write(&file, length == 0, records).inspect_err(|_| {
        // If this fails too, the disk fails and not only its free space.
        let _ = file.set_len(length);
    })
}

/// Replaces the journal by these records.
pub fn rewrite(batch: &OwnedFd, records: &[JournalRecord]) -> Result<(), Errno> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::openat(batch, NEW_NAME, flags, Mode::from_raw_mode(0o600))?;
    write(&File::from(file), true, records)?;
    rustix::fs::renameat(batch, NEW_NAME, batch, NAME)
}

fn write(mut file: &File, is_new: bool, records: &[JournalRecord]) -> Result<(), Errno> {
    let mut bytes = if is_new { MAGIC.to_vec() } else { Vec::new() };
    records.iter().for_each(|record| bytes.extend_from_slice(&record.encode()));
    file.write_all(&bytes).and_then(|()| file.sync_data()).map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))
}

/// All complete records; none if there is no journal.
pub fn read(batch: &OwnedFd) -> Result<Vec<JournalRecord>, Errno> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = match rustix::fs::openat(batch, NAME, flags, Mode::empty()) {
        Ok(file) => File::from(file),
        Err(Errno::NOENT) => return Ok(Vec::new()),
        Err(e) => return Err(e),
    };
    let mut bytes = Vec::new();
    file.take(MAX_JOURNAL_BYTES).read_to_end(&mut bytes).map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))?;
    Ok(bytes.strip_prefix(MAGIC).map(whole_records).unwrap_or_default())
}

fn whole_records(bytes: &[u8]) -> Vec<JournalRecord> {
    let (mut input, mut records) = (Decoder(bytes), Vec::new());
    while let Ok(body) = input.bytes() {
        let is_whole = input.take(CHECKSUM_BYTES).is_ok_and(|check| blake3::hash(body).as_bytes()[..CHECKSUM_BYTES] == *check);
        match JournalRecord::decode(body) {
            Ok(record) if is_whole => records.push(record),
            _ => break,
        }
    }
    records
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::entry::Digest;

    fn record(number: u64) -> JournalRecord {
        JournalRecord {
            number,
            at: 17,
            path: RelPath::new(format!("src/{number}").as_bytes()).unwrap(),
            old: Entry::File { digest: Digest::of(b"old"), size: 3, exec: true },
            mode: 0o755,
            new: Some(Entry::Link { target: b"x".as_slice().into() }),
        }
    }

    #[test]
    fn records_after_a_failed_append_are_readable() {
        let dir = tempfile::tempdir().unwrap();
        let script = "mount -t tmpfs -o size=64k none \"$AT\" && exec \"$0\" --exact \"$TEST\" --ignored --nocapture";
        let ran = std::process::Command::new("unshare")
            .args(["--user", "--map-root-user", "--mount", "sh", "-c", script])
            .arg(std::env::current_exe().unwrap())
            .env("AT", dir.path())
            .env("TEST", "trash::journal::tests::child_on_a_small_disk")
            .output()
            .unwrap();
        assert!(ran.status.success(), "{}{}", String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    }

    #[test]
    #[ignore = "child process of the test above"]
    fn child_on_a_small_disk() {
        let Some(at) = std::env::var_os("AT").map(std::path::PathBuf::from) else { return };
        let batch = OwnedFd::from(File::open(&at).unwrap());
        append(&batch, &[record(0)]).unwrap();
        // Fills the disk as far as possible; the last page of the journal has room for some records.
        let _ = std::fs::write(at.join("filler"), vec![1; 1024 * 1024]);
        let many: Vec<JournalRecord> = (1..1000).map(record).collect();
        assert_eq!(append(&batch, &many), Err(Errno::NOSPC));
        std::fs::remove_file(at.join("filler")).unwrap();
        append(&batch, &[record(1000)]).unwrap();
        assert_eq!(read(&batch).unwrap(), [record(0), record(1000)]);
    }

    #[test]
    fn a_torn_journal_loses_only_its_last_record() {
        let dir = tempfile::tempdir().unwrap();
        let batch = OwnedFd::from(File::open(dir.path()).unwrap());
        append(&batch, &[record(0)]).unwrap();
        append(&batch, &[record(1), record(2)]).unwrap();
        assert_eq!(read(&batch).unwrap(), [record(0), record(1), record(2)]);
        let whole = std::fs::read(dir.path().join(NAME)).unwrap();
        for cut in 1..record(2).encode().len() {
            std::fs::write(dir.path().join(NAME), &whole[..whole.len() - cut]).unwrap();
            assert_eq!(read(&batch).unwrap(), [record(0), record(1)], "{cut}");
        }
        rewrite(&batch, &[record(7)]).unwrap();
        assert_eq!(read(&batch).unwrap(), [record(7)]);
    }
}
