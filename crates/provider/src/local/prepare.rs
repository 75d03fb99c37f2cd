//! Validates a sandbox's spec, prepares everything on disk that a start needs, and assembles the launcher's input.

use std::{
    fs::{self, DirBuilder},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt, chown},
    path::PathBuf,
};

use anyhow::Context;
use cobox_protocol::{
    SandboxId,
    control::{BoxdConfig, ControlState, Workload, WorkloadLimits},
};

use super::{
    LocalProvider,
    config::MIN_DISK_BYTES,
    disk_image, disk_limit, fsck,
    launch_spec::{LaunchSpec, UID_RANGE, VolumeFiles, VolumeSpec},
};
use crate::{BoxdSocket, SandboxSpec};

const WORK_DIR: &str = "/workspace";
const HOSTNAME: &str = "sandbox";
/// Maximum number of snapshots below one sandbox: the kernel searches each of them when it looks up a file.
const MAX_LAYERS: usize = 16;

impl LocalProvider {
    /// Checks whether a sandbox with this spec could be created on this node.
    pub(super) fn validate_spec(&self, spec: &SandboxSpec) -> Result<(), String> {
        self.config.options.check_resources(&spec.resources)?;
        self.check_root(spec)?;
        if spec.layers.len() > MAX_LAYERS {
            return Err(format!(
                "it is based on a chain of {} snapshots, each taken of a sandbox that started from the next; the maximum is {MAX_LAYERS}",
                spec.layers.len()
            ));
        }
        if let Some(missing) = spec.layers.iter().find(|id| !self.snapshots.has(id)) {
            return Err(format!("snapshot {missing} is not on this node"));
        }
        for mount in &spec.mounts {
            self.volumes.files(&mount.volume).map_err(|_| format!("volume {} is not on this node", mount.volume))?;
        }
        self.validate_mount_paths(spec, &spec.mounts.iter().map(|m| m.path.as_str()).collect::<Vec<_>>())
    }

    pub(super) fn check_volume_size(&self, size: u64) -> Result<(), String> {
        let max = self.config.options.max_resources.volume_bytes;
        match size {
            _ if size < MIN_DISK_BYTES => Err(format!("size: {size} bytes are too few; the minimum is {MIN_DISK_BYTES}")),
            _ if size > max => Err(format!("size: {size} bytes are too many; the maximum is {max} here")),
            _ => Ok(()),
        }
    }

    /// Creates everything on disk that a start needs. Idempotent: existing files are left unchanged.
    pub(super) async fn prepare(&self, id: &SandboxId, spec: &SandboxSpec, state: &ControlState) -> anyhow::Result<LaunchSpec> {
        let lower_layer = self.lower_layer(spec).await?;
        let options = self.config.options.with_resources(&spec.resources);
        let dir = self.dir(id);
        if !dir.exists() {
            self.ensure_disk_space()?;
        }
        DirBuilder::new().recursive(true).mode(0o700).create(&dir)?;
        let uid_base = self.uid_base(id)?;
        let disk_image = self.disk_image(dir.clone(), options.disk_bytes).await.context("creating the disk image")?;
        if let Some(image) = &disk_image {
            fsck::repair(image).await.context("checking its disk image")?;
        }
        if disk_image.is_none() {
            let data = dir.join("data");
            for dir in [data.clone(), data.join("upper"), data.join("work")] {
                match DirBuilder::new().mode(0o755).create(&dir) {
                    Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                    other => other?,
                }
                if let Some(base) = uid_base
                    && fs::metadata(&dir)?.uid() != base
                {
                    chown(&dir, Some(base), Some(base))?;
                }
            }
        }
        let layers = spec.layers.iter().map(|layer| {
            anyhow::ensure!(self.snapshots.has(layer), "snapshot {layer}, which it started from, is not on this node");
            Ok(self.snapshots.layer(layer))
        });
        let layers = layers.collect::<anyhow::Result<Vec<PathBuf>>>()?;
        let mut volumes = Vec::new();
        for mount in &spec.mounts {
            let files = self.volumes.files(&mount.volume)?;
            if let VolumeFiles::Image(image) = &files {
                fsck::repair(image).await.with_context(|| format!("checking volume {}", mount.volume))?;
            }
            volumes.push(VolumeSpec { files, path: PathBuf::from(&mount.path), read_only: mount.read_only });
        }
        let cgroups = self.cgroups.create(id.as_str(), &options).context("creating the control groups")?;
        let user = options.user;
        let config = BoxdConfig {
            sandbox_id: id.clone(),
            groups: cgroups.boxd.len() as u32,
            state: state.clone(),
            workload: Workload {
                uid: user.id(),
                gid: user.id(),
                user: user.name().to_owned(),
                home: user.home().to_owned(),
                work_dir: WORK_DIR.to_owned(),
                uid_count: if self.is_root { UID_RANGE } else { 1 },
                env: spec.env.clone(),
            },
            limits: WorkloadLimits {
                processes: options.processes,
                memory_bytes: (!self.cgroups.has_controller("memory")).then_some(options.memory_bytes),
                open_files: options.open_files,
            },
            dataplane: options.dataplane.clone(),
        };
        Ok(LaunchSpec {
            client_socket: self.socket_path(id, BoxdSocket::Client),
            control_socket: self.socket_path(id, BoxdSocket::Control),
            boxd: fs::canonicalize(&self.config.boxd)?,
            base: lower_layer.lower,
            view: lower_layer.view,
            layers,
            volumes,
            uid_base,
            disk_image,
            hostname: HOSTNAME.to_owned(),
            cgroups,
            config,
            dir,
        })
    }

    /// Fails if free space is below the reserve, where a new sandbox could not write anything.
    fn ensure_disk_space(&self) -> anyhow::Result<()> {
        let disk = self.measure_host_disk()?;
        let (writable, reserve) = (disk.writable(), disk.reserve);
        anyhow::ensure!(
            writable >= reserve,
            "the machine's disk is nearly full: {writable} bytes are free and {reserve} must stay free (local.reserve_bytes); remove files, snapshots or sandboxes"
        );
        Ok(())
    }

    /// The image that contains a sandbox's files. Creates an empty one of this size for a new sandbox where disk limits are hard; `None`
    /// where they are soft.
    async fn disk_image(&self, dir: PathBuf, bytes: u64) -> anyhow::Result<Option<PathBuf>> {
        let image = dir.join(disk_image::IMAGE);
        if image.exists() {
            return Ok(Some(image));
        }
        // A sandbox that was created under soft limits keeps its files in a directory.
        if !self.is_disk_hard || dir.join("data").exists() {
            return Ok(None);
        }
        let layers_dir = self.layers_dir.clone();
        // The operator's size is not rounded: its template was created at the start.
        let size = if bytes == self.config.options.disk_bytes { bytes } else { disk_limit::round_up_image_size(bytes) };
        if layers_dir.join(disk_limit::template_name(size)).exists() {
            disk_limit::copy_sparse(&layers_dir.join(disk_limit::template_name(size)), &image)?;
            return Ok(Some(image));
        }
        tokio::task::spawn_blocking(move || {
            disk_limit::copy_sparse(&disk_limit::template(&layers_dir, size)?, &image)?;
            Ok(Some(image))
        })
        .await?
    }
}
