//! A volume in two sandboxes, one of them hostile: its files give it no access to the other sandbox, and block nothing
//! there.

use std::time::Duration;

use cobox_client::{ArchiveFormat, ClientError, Session};
use cobox_protocol::{
    ErrorCode,
    fs::{ListRequest, StoppedBy},
    resources::{CreateVolume, MountParams},
    sandbox::CreateSandbox,
};
use cobox_testkit::{TestBroker, sh};
use futures_util::TryStreamExt;

use crate::resources::{create, create_snapshot, from_snapshot, output_of, storage_configurations};

/// Far longer than a listing takes: a request that waits for a fifo's writer would never end.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);

/// Run as the hostile sandbox's user. Perl is in every Debian system.
const CREATE_HOSTILE_FILES: &str = r#"
set -e
cd /data
cp /usr/bin/id set_id && chmod 6755 set_id
ln -s /etc/shadow shadow
ln -s /proc/1/environ environ
ln -s /proc/self/root proc_root
ln -s ../../../../../../../../.. up
ln -s loop loop
mkfifo fifo
perl -MIO::Socket::UNIX -e 'IO::Socket::UNIX->new(Local => "sock", Listen => 1) or die $!'
perl -e 'my $p = "deep"; for (1 .. 200) { mkdir $p; chdir $p; $p = "d" }'
perl -e 'open(F, ">", "\x1b]0;title\x07\xff\xfe") or die $!; open(F, ">", "a\nb") or die $!'
mknod device c 1 3 2>/dev/null && echo "a device was made" || true
"#;

async fn read(session: &Session, path: &str) -> Result<Vec<u8>, ClientError> {
    let file = tokio::time::timeout(REQUEST_TIMEOUT, session.dataplane().read_file(path.as_bytes())).await.expect("an answer comes")?;
    let pieces: Vec<_> = file.into_stream().try_collect().await?;
    Ok(pieces.concat())
}

#[tokio::test]
async fn a_shared_volume_gives_a_hostile_sandbox_no_access_to_another() {
    for options in storage_configurations() {
        let is_hard = options.config.is_empty() && options.uid.is_none();
        let broker = TestBroker::start_with(options).await;
        let client = broker.client();
        client.create_volume(&CreateVolume { name: "data".into(), size_bytes: 64 << 20, access: None }).await.unwrap();
        let mount = MountParams { volume: "data".into(), path: "/data".into(), read_only: false };
        let request = CreateSandbox { mounts: vec![mount], ..CreateSandbox::default() };
        let (_, hostile) = create(&client, request.clone()).await;
        let (victims_sandbox, victim) = create(&client, request).await;
        let (hostile, victim) = (&hostile, &victim);
        output_of(victim, "echo confidential > /workspace/secret").await;
        assert_eq!(output_of(hostile, CREATE_HOSTILE_FILES).await, "");

        // A program with set-id bits runs as its caller, in both sandboxes.
        let ids = output_of(victim, "id -u; id -g").await;
        assert_eq!(output_of(victim, "/data/set_id -u; /data/set_id -g").await, ids);
        assert_eq!(output_of(hostile, "/data/set_id -u; /data/set_id -g").await, output_of(hostile, "id -u; id -g").await);

        // Anything but a regular file is refused at once; a link is resolved within the sandbox that follows it.
        for path in ["/data/fifo", "/data/sock", "/data/loop", "/data/environ", "/data/shadow", "/data/proc_root/etc/shadow"] {
            let error = read(victim, path).await.expect_err(path);
            assert!(!error.is(ErrorCode::Internal) && !error.is(ErrorCode::ProviderUnavailable), "{path}: {error}");
        }
        assert_eq!(read(victim, "/data/up/workspace/secret").await.unwrap(), b"confidential\n");
        let missing = read(hostile, "/data/up/workspace/secret").await.expect_err("it is the victim's own file");
        assert!(missing.is(ErrorCode::FileNotFound), "{missing}");

        // Recursive requests end, regardless of the files there.
        let request = ListRequest { path: Some("/data".into()), recursive: true, ..ListRequest::default() };
        let listed =
            tokio::time::timeout(REQUEST_TIMEOUT, victim.dataplane().list_files(&request)).await.expect("an answer comes").expect("a list");
        assert_eq!(listed.stopped_by, Some(StoppedBy::Depth), "{} entries", listed.entries.len());
        let archive = victim.dataplane().get_archive(b"/data", ArchiveFormat::Tar).await.expect("an archive");
        let bytes: u64 = tokio::time::timeout(
            REQUEST_TIMEOUT,
            archive.into_stream().try_fold(0, |sum, piece| async move { Ok(sum + piece.len() as u64) }),
        )
        .await
        .expect("the archive ends")
        .expect("the archive is whole");
        assert!(bytes > 0);

        // A full volume is full in both sandboxes; their own disks are not.
        if is_hard {
            let full = sh(hostile.dataplane(), "dd if=/dev/zero of=/data/big bs=1M count=100 2>&1").await;
            assert!(full.stdout.contains("No space left"), "{full:?}");
            assert_ne!(sh(victim.dataplane(), "dd if=/dev/zero of=/data/more bs=1M count=2 2>/dev/null").await.exit_code, 0);
            output_of(victim, "dd if=/dev/zero of=/workspace/own bs=1M count=2 2>/dev/null; rm /workspace/own").await;
        }

        // A snapshot of the victim contains nothing of the volume.
        let taken = create_snapshot(&client, &victims_sandbox, "copy").await;
        let (_, copy) = create(&client, from_snapshot(&taken)).await;
        assert_eq!(output_of(&copy, "cat secret; ls -A /data 2>/dev/null | wc -l").await, "confidential\n0");
    }
}
