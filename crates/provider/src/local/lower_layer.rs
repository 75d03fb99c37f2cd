//! Builds the lower overlay layers of sandboxes' root filesystems, which all sandboxes share read-only.

use std::{
    ffi::OsStr,
    fs::{self, DirBuilder, File},
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, chown, symlink},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use anyhow::{Context, bail};
use sha2::{Digest, Sha256};

use super::{
    config::{LocalOptions, RootSource, WorkloadUser},
    untrusted_tree,
};
use crate::private_dir::private_dir;

/// Host directories with programs and libraries. Links among them (`/bin` to `usr/bin`) are copied as links.
const PROGRAM_DIRS: [&str; 7] = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"];
/// Directories of the host's /etc that programs need: links to the selected alternatives, trusted certificates.
const ETC_VIEW: [&str; 3] = ["/etc/alternatives", "/etc/ssl/certs", "/etc/terminfo"];
/// Host files that are copied: they are small, and the dynamic linker needs some of them to run the host's programs.
const ETC_COPIED: [&str; 9] = [
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/localtime",
    "/etc/services",
    "/etc/protocols",
    "/etc/mime.types",
    "/etc/shells",
    "/etc/ssl/openssl.cnf",
    "/etc/debian_version",
];
/// Maximum size of a copied file, in bytes. A larger one can't be the expected configuration file.
const MAX_COPY_BYTES: u64 = 4 << 20;

/// Stored in the spec of a sandbox whose root is the host's programs. They change with the host, for all sandboxes.
pub const HOST_ROOT: &str = "host";
/// Prefix of the name of an unpacked root filesystem; a digest follows.
const UNPACKED_PREFIX: &str = "rootfs-";
/// Part of the host layer's name. Layers of version 1 could be changed by other local users and are not reused.
const LAYER_VERSION: &str = "2";
/// An empty file beside the layers that marks that no layer has a set-id bit any more. Layers unpacked later never have one.
const SET_ID_CLEARED: &str = "set-id-cleared";
/// Prefix of the name of an incomplete layer.
const UNFINISHED_PREFIX: char = '.';

/// A lower layer and the host paths that are mounted on top of it.
#[derive(Clone, Debug)]
pub struct LowerLayer {
    pub lower: PathBuf,
    pub view: Vec<PathBuf>,
}

/// The name that identifies a root's current content in a spec: the name of its layer, which changes with the archive, or the path of its
/// directory.
pub fn pinned_name(root: &RootSource) -> anyhow::Result<String> {
    let RootSource::Rootfs(path) = root else { return Ok(HOST_ROOT.to_owned()) };
    let kind = fs::metadata(path)?;
    match kind.is_dir() {
        true => Ok(path.to_str().context("its path is not UTF-8")?.to_owned()),
        false => Ok(unpacked_name(path, &kind)),
    }
}

/// Whether a name has the form of an unpacked root filesystem's name.
pub fn is_unpacked_name(name: &str) -> bool {
    name.strip_prefix(UNPACKED_PREFIX).is_some_and(|digest| !digest.is_empty() && digest.bytes().all(|b| b.is_ascii_hexdigit()))
}

/// The host paths that a sandbox with this root sees, each at the same path.
pub fn host_paths(root: &RootSource, options: &LocalOptions) -> Vec<PathBuf> {
    let mut view = Vec::new();
    if *root == RootSource::Host {
        let is_real_dir = |path: &PathBuf| fs::symlink_metadata(path).is_ok_and(|m| m.is_dir());
        view.extend(PROGRAM_DIRS.iter().map(PathBuf::from).filter(is_real_dir));
        view.extend(ETC_VIEW.iter().map(PathBuf::from).filter(|p| p.is_dir()));
    }
    view.extend(options.view.iter().cloned());
    view
}

/// Removes incomplete layers of an earlier process.
pub fn remove_unfinished(dir: &Path) -> io::Result<()> {
    let left = match fs::read_dir(dir) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    for entry in left.flatten().filter(|e| e.file_name().to_string_lossy().starts_with(UNFINISHED_PREFIX)) {
        untrusted_tree::remove(&entry.path())?;
    }
    Ok(())
}

/// Closes the directory of lower layers to other users, and clears the set-id bits that older versions kept: once, whatever mode the
/// directory had.
pub fn restrict_dir(dir: &Path) -> anyhow::Result<()> {
    let was_open = private_dir(dir)?;
    let mark = dir.join(SET_ID_CLEARED);
    let is_cleared = mark.exists();
    if !was_open && is_cleared {
        return Ok(());
    }
    let mut all_cleared = true;
    for entry in fs::read_dir(dir)?.flatten().filter(|e| is_unpacked_name(&e.file_name().to_string_lossy())) {
        // A failure is not fatal: no other user can reach the file now. The next start tries again.
        if let Err(error) = untrusted_tree::clear_set_id(&entry.path()) {
            all_cleared = false;
            tracing::warn!(layer = %entry.path().display(), %error, "clearing the set-id bits of an unpacked root filesystem failed");
        }
        if was_open {
            tracing::warn!(
                layer = %entry.path().display(),
                "an unpacked root filesystem was in a directory that other local users could enter; if this machine has users you do not trust, remove it: it is unpacked again from its archive"
            );
        }
    }
    if all_cleared && !is_cleared {
        File::create(&mark).and_then(|mark| mark.sync_all()).with_context(|| mark.display().to_string())?;
    }
    Ok(())
}

/// Returns the lower layer of a root. Builds it if it doesn't exist.
pub fn prepare(dir: &Path, root: &RootSource, options: &LocalOptions, is_root: bool) -> anyhow::Result<LowerLayer> {
    private_dir(dir)?;
    match root {
        RootSource::Host => prepare_host(dir, options, is_root),
        RootSource::Rootfs(path) => {
            let kind = fs::metadata(path).with_context(|| format!("the root filesystem {}", path.display()))?;
            let lower = if kind.is_dir() { path.clone() } else { unpack(dir, path, &kind, is_root)? };
            Ok(LowerLayer { lower, view: host_paths(root, options) })
        }
    }
}

fn prepare_host(dir: &Path, options: &LocalOptions, is_root: bool) -> anyhow::Result<LowerLayer> {
    let view = host_paths(&RootSource::Host, options);
    let mut links = Vec::new();
    for path in PROGRAM_DIRS.iter().map(Path::new) {
        if fs::symlink_metadata(path).is_ok_and(|m| m.is_symlink()) {
            links.push((path.to_owned(), fs::read_link(path)?));
        }
    }

    let mut files: Vec<(PathBuf, Vec<u8>)> = etc_files(options.user);
    for path in ETC_COPIED.iter().map(Path::new) {
        // A file that is missing on the host is also missing in the sandbox.
        if let Ok(m) = fs::metadata(path)
            && m.is_file()
            && m.len() <= MAX_COPY_BYTES
        {
            files.push((path.to_owned(), fs::read(path)?));
        }
    }
    // Named by content: if the host changes, a new layer is built, and running sandboxes keep theirs.
    let mut hash = Sha256::new();
    hash.update(LAYER_VERSION);
    hash.update(format!("{view:?}{links:?}{:?}{is_root}", options.user));
    for (path, content) in &files {
        hash.update(format!("{}\0{}\0", path.display(), content.len()));
        hash.update(content);
    }
    let digest = hash.finalize();
    let lower = dir.join(format!("host-{}", hex::encode(&digest[..8])));
    if !lower.exists() {
        build(dir, &lower, |root| create_skeleton(root, &view, &links, &files, options.user, is_root))?;
    }
    Ok(LowerLayer { lower, view })
}

/// Builds a directory under a temporary name and renames it, so that the final name always refers to a complete one. Several threads or
/// processes may build the same layer: the first rename wins, and the results of the others are identical and discarded.
fn build(dir: &Path, to: &Path, fill: impl FnOnce(&Path) -> anyhow::Result<()>) -> anyhow::Result<()> {
    static BUILT: AtomicU64 = AtomicU64::new(0);
    let (name, number) = (to.file_name().and_then(OsStr::to_str).unwrap_or("base"), BUILT.fetch_add(1, Ordering::Relaxed));
    let temporary = dir.join(format!("{UNFINISHED_PREFIX}{name}-{}-{number}", std::process::id()));
    DirBuilder::new().mode(0o755).create(&temporary)?;
    let built = fill(&temporary).and_then(|()| {
        super::snapshot_copy::sync_filesystem(&temporary)?;
        match fs::rename(&temporary, to) {
            Err(_) if to.is_dir() => Ok(false),
            other => Ok(other.map(|()| true)?),
        }
    });
    if !matches!(built, Ok(true)) {
        untrusted_tree::remove(&temporary)?;
    }
    built?;
    Ok(File::open(dir)?.sync_all()?)
}

fn etc_files(user: WorkloadUser) -> Vec<(PathBuf, Vec<u8>)> {
    let shell = if Path::new("/bin/bash").exists() { "/bin/bash" } else { "/bin/sh" };
    let mut passwd = format!("root:x:0:0:root:/root:{shell}\n");
    let mut group = "root:x:0:\n".to_owned();
    if user == WorkloadUser::User {
        passwd += &format!("user:x:1000:1000:user:/home/user:{shell}\n");
        group += "user:x:1000:\n";
    }
    passwd += "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n";
    group += "nogroup:x:65534:\n";
    let file = |path: &str, text: &str| (PathBuf::from(path), text.as_bytes().to_vec());
    vec![
        file("/etc/passwd", &passwd),
        file("/etc/group", &group),
        file("/etc/hosts", "127.0.0.1 localhost\n::1 localhost\n127.0.0.1 sandbox\n"),
        file("/etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files dns\n"),
        file("/etc/resolv.conf", ""),
        file("/etc/profile", "PS1='\\u@\\h:\\w\\$ '\nexport PS1\n"),
        file("/etc/bash.bashrc", "PS1='\\u@\\h:\\w\\$ '\n"),
    ]
}

fn create_skeleton(
    root: &Path,
    view: &[PathBuf],
    links: &[(PathBuf, PathBuf)],
    files: &[(PathBuf, Vec<u8>)],
    user: WorkloadUser,
    is_root: bool,
) -> anyhow::Result<()> {
    let inside = |path: &Path| root.join(path.strip_prefix("/").unwrap_or(path));
    let make_dir = |path: &Path, mode: u32| -> io::Result<()> {
        DirBuilder::new().recursive(true).mode(0o755).create(path)?;
        fs::set_permissions(path, fs::Permissions::from_mode(mode))
    };
    for dir in ["dev", "proc", "sys", "run", "mnt", "opt", "srv", "home", "var/lib", "var/cache", "var/log", "etc"] {
        make_dir(&root.join(dir), 0o755)?;
    }
    for dir in ["tmp", "var/tmp"] {
        make_dir(&root.join(dir), 0o1777)?;
    }
    make_dir(&root.join("root"), 0o700)?;
    for path in view {
        if fs::metadata(path).with_context(|| format!("local.view: {}", path.display()))?.is_dir() {
            make_dir(&inside(path), 0o755)?;
        } else {
            if let Some(parent) = inside(path).parent() {
                make_dir(parent, 0o755)?;
            }
            File::create(inside(path))?;
        }
    }
    for (path, to) in links {
        symlink(to, inside(path))?;
    }
    for (path, content) in files {
        let at = inside(path);
        if let Some(parent) = at.parent() {
            make_dir(parent, 0o755)?;
        }
        let mut file = File::create(&at)?;
        file.write_all(content)?;
        file.set_permissions(fs::Permissions::from_mode(0o644))?;
    }
    for dir in ["workspace", "home/user"] {
        make_dir(&root.join(dir), 0o755)?;
        if is_root {
            chown(root.join(dir), Some(user.id()), Some(user.id()))?;
        }
    }
    Ok(())
}

fn unpacked_name(tarball: &Path, kind: &fs::Metadata) -> String {
    let name = Sha256::digest(format!("{}\0{}\0{}\0{}", tarball.display(), kind.len(), kind.mtime(), kind.mtime_nsec()));
    format!("{UNPACKED_PREFIX}{}", hex::encode(&name[..8]))
}

/// Unpacks a root filesystem unless this version of the file is unpacked already.
fn unpack(dir: &Path, tarball: &Path, kind: &fs::Metadata, is_root: bool) -> anyhow::Result<PathBuf> {
    let lower = dir.join(unpacked_name(tarball, kind));
    if lower.exists() {
        return Ok(lower);
    }
    let text = tarball.to_string_lossy();
    let file = File::open(tarball)?;
    let reader: Box<dyn io::Read> = if text.ends_with(".tar") {
        Box::new(file)
    } else if text.ends_with(".tar.zst") || text.ends_with(".tzst") {
        Box::new(zstd::Decoder::new(file)?)
    } else {
        bail!("the root filesystem {text} is neither a directory nor a .tar or .tar.zst file");
    };
    build(dir, &lower, |root| {
        let mut archive = tar::Archive::new(reader);
        archive.set_preserve_permissions(true);
        archive.set_preserve_ownerships(is_root);
        archive.set_overwrite(true);
        // The files belong to users of the host, so a set-id program would run as one of them.
        archive.set_mask(untrusted_tree::SET_ID_BITS);
        archive.unpack(root).with_context(|| format!("unpacking {text}"))
    })?;
    Ok(lower)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn archive(dir: &Path, files: usize) -> PathBuf {
        let path = dir.join("root.tar");
        let mut tar = tar::Builder::new(File::create(&path).unwrap());
        for n in 0..files {
            let mut header = tar::Header::new_gnu();
            header.set_size(4);
            header.set_mode(0o6755);
            tar.append_data(&mut header, format!("d/f{n}"), &b"text"[..]).unwrap();
        }
        tar.finish().unwrap();
        path
    }

    #[test]
    fn a_root_filesystem_unpacked_concurrently_is_complete_for_each() {
        let dir = tempfile::tempdir().unwrap();
        let source = RootSource::Rootfs(archive(dir.path(), 200));
        let bases = dir.path().join("base");
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let made = prepare(&bases, &source, &LocalOptions::default(), false).unwrap();
                    assert_eq!(fs::read_dir(made.lower.join("d")).unwrap().count(), 200);
                });
            }
        });
        let left: Vec<_> = fs::read_dir(&bases).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        assert_eq!(left, [pinned_name(&source).unwrap()]);
    }

    #[test]
    fn layers_keep_no_set_id_bits_and_are_closed_to_other_users() {
        let dir = tempfile::tempdir().unwrap();
        let source = RootSource::Rootfs(archive(dir.path(), 1));
        let bases = dir.path().join("base");
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o7777;
        let made = prepare(&bases, &source, &LocalOptions::default(), false).unwrap();
        assert_eq!((mode(&made.lower.join("d/f0")), mode(&bases)), (0o755, 0o700));
        // The state that an older version left behind.
        fs::set_permissions(made.lower.join("d/f0"), fs::Permissions::from_mode(0o4755)).unwrap();
        fs::set_permissions(made.lower.join("d"), fs::Permissions::from_mode(0o1777)).unwrap();
        symlink("/bin/su", made.lower.join("link")).unwrap();
        fs::set_permissions(&bases, fs::Permissions::from_mode(0o755)).unwrap();
        restrict_dir(&bases).unwrap();
        assert_eq!(["d/f0", "d"].map(|name| mode(&made.lower.join(name))), [0o755, 0o1777]);
        assert_eq!(mode(&bases), 0o700);
        restrict_dir(&dir.path().join("none")).unwrap();
    }

    #[test]
    fn set_id_bits_of_old_layers_are_cleared_once_whatever_mode_their_directory_had() {
        let dir = tempfile::tempdir().unwrap();
        let source = RootSource::Rootfs(archive(dir.path(), 1));
        for mode_before in [0o700, 0o755] {
            let bases = dir.path().join(format!("base-{mode_before:o}"));
            let file = prepare(&bases, &source, &LocalOptions::default(), false).unwrap().lower.join("d/f0");
            let set_id = || fs::set_permissions(&file, fs::Permissions::from_mode(0o6755)).unwrap();
            let mode = || fs::metadata(&file).unwrap().mode() & 0o7777;
            set_id();
            fs::set_permissions(&bases, fs::Permissions::from_mode(mode_before)).unwrap();
            restrict_dir(&bases).unwrap();
            assert_eq!(mode(), 0o755, "{mode_before:o}");
            // Later starts don't look at every file again.
            set_id();
            restrict_dir(&bases).unwrap();
            assert_eq!(mode(), 0o6755, "{mode_before:o}");
        }
    }

    #[test]
    fn failed_and_incomplete_layers_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let (broken, bases) = (dir.path().join("broken.tar"), dir.path().join("base"));
        fs::write(&broken, [1; 2000]).unwrap();
        assert!(prepare(&bases, &RootSource::Rootfs(broken), &LocalOptions::default(), false).is_err());
        assert_eq!(fs::read_dir(&bases).unwrap().count(), 0);
        fs::create_dir_all(bases.join(".rootfs-0-1-2/d")).unwrap();
        fs::create_dir_all(bases.join("rootfs-0")).unwrap();
        remove_unfinished(&bases).unwrap();
        assert_eq!(fs::read_dir(&bases).unwrap().map(|e| e.unwrap().file_name()).collect::<Vec<_>>(), ["rootfs-0"]);
        remove_unfinished(&dir.path().join("none")).unwrap();
    }
}
