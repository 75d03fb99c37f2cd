//! The lower layer of sandboxes' roots: made once, read by all of them, written by none.

use std::{
    ffi::OsStr,
    fs::{self, DirBuilder, File},
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, chown, symlink},
    path::{Path, PathBuf},
};

use anyhow::{Context, bail};
use sha2::{Digest, Sha256};

use super::config::{LocalOptions, RootSource, WorkloadUser};

/// Programs and libraries. Links among them (`/bin` to `usr/bin`) are made again as links.
const PROGRAM_DIRS: [&str; 7] = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"];
/// What programs look up in /etc, as it is on the host: links to the chosen alternatives, trusted certificates.
const ETC_VIEW: [&str; 3] = ["/etc/alternatives", "/etc/ssl/certs", "/etc/terminfo"];
/// Copied, because they are small and the dynamic linker must find them where programs are of the host.
const ETC_COPIES: [&str; 9] = [
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
/// A file that is copied is at most this long; a longer one is not what its name says.
const MAX_COPY_BYTES: u64 = 4 << 20;

/// A lower layer and what of the host is shown on top of it.
#[derive(Clone, Debug)]
pub struct Base {
    pub lower: PathBuf,
    pub view: Vec<PathBuf>,
}

/// Makes the lower layer of a root, or finds it made.
pub fn prepare(dir: &Path, root: &RootSource, options: &LocalOptions, is_root: bool) -> anyhow::Result<Base> {
    DirBuilder::new().recursive(true).mode(0o755).create(dir)?;
    match root {
        RootSource::Host => host(dir, options, is_root),
        RootSource::Rootfs(path) => {
            let kind = fs::metadata(path).with_context(|| format!("the root filesystem {}", path.display()))?;
            let lower = if kind.is_dir() { path.clone() } else { unpack(dir, path, &kind, is_root)? };
            Ok(Base { lower, view: options.view.clone() })
        }
    }
}

fn host(dir: &Path, options: &LocalOptions, is_root: bool) -> anyhow::Result<Base> {
    let mut view = Vec::new();
    let mut links = Vec::new();
    for path in PROGRAM_DIRS.iter().map(Path::new) {
        match fs::symlink_metadata(path) {
            Ok(m) if m.is_symlink() => links.push((path.to_owned(), fs::read_link(path)?)),
            Ok(m) if m.is_dir() => view.push(path.to_owned()),
            _ => {}
        }
    }
    view.extend(ETC_VIEW.iter().map(PathBuf::from).filter(|p| p.is_dir()));
    view.extend(options.view.iter().cloned());

    let mut files: Vec<(PathBuf, Vec<u8>)> = etc_files(options.user);
    for path in ETC_COPIES.iter().map(Path::new) {
        // What the host lacks, the sandbox lacks too.
        if let Ok(m) = fs::metadata(path)
            && m.is_file()
            && m.len() <= MAX_COPY_BYTES
        {
            files.push((path.to_owned(), fs::read(path)?));
        }
    }
    // Named by content: a host that changed gets a new layer, and running sandboxes keep the one they have.
    let mut hash = Sha256::new();
    hash.update(format!("{view:?}{links:?}{:?}{is_root}", options.user));
    for (path, content) in &files {
        hash.update(format!("{}\0{}\0", path.display(), content.len()));
        hash.update(content);
    }
    let digest = hash.finalize();
    let lower = dir.join(format!("host-{}", hex(&digest[..8])));
    if !lower.exists() {
        build(dir, &lower, |root| skeleton(root, &view, &links, &files, options.user, is_root))?;
    }
    Ok(Base { lower, view })
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// Makes a directory under another name first, so that the final name is only ever a whole one.
fn build(dir: &Path, to: &Path, fill: impl FnOnce(&Path) -> anyhow::Result<()>) -> anyhow::Result<()> {
    let temporary = dir.join(format!(".{}-{}", to.file_name().and_then(OsStr::to_str).unwrap_or("base"), std::process::id()));
    if temporary.exists() {
        fs::remove_dir_all(&temporary)?;
    }
    DirBuilder::new().mode(0o755).create(&temporary)?;
    fill(&temporary)?;
    fs::rename(&temporary, to)?;
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

fn skeleton(
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

/// Unpacks a root filesystem once; another file, or a newer one, is unpacked again.
fn unpack(dir: &Path, tarball: &Path, kind: &fs::Metadata, is_root: bool) -> anyhow::Result<PathBuf> {
    let name = Sha256::digest(format!("{}\0{}\0{}\0{}", tarball.display(), kind.len(), kind.mtime(), kind.mtime_nsec()));
    let lower = dir.join(format!("rootfs-{}", hex(&name[..8])));
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
        archive.unpack(root).with_context(|| format!("unpacking {text}"))
    })?;
    Ok(lower)
}
