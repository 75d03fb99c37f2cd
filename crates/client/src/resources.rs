//! Control-plane calls for templates, snapshots and volumes.

use cobox_protocol::{
    resources::{CreateTemplate, CreateVolume, SnapshotInfo, TakeSnapshot, TemplateInfo, VolumeInfo},
    session::Page,
};

use crate::{Client, ClientError, path::encode_segment};

impl Client {
    pub async fn create_template(&self, request: &CreateTemplate) -> Result<TemplateInfo, ClientError> {
        self.json(self.post("/v1/templates").json(request)).await
    }

    /// Templates that the caller can use for a sandbox.
    pub async fn list_templates(&self) -> Result<Page<TemplateInfo>, ClientError> {
        self.json(self.get("/v1/templates")).await
    }

    /// Returns while the sandbox's files are still being copied.
    pub async fn take_snapshot(&self, sandbox: &str, request: &TakeSnapshot) -> Result<SnapshotInfo, ClientError> {
        self.json(self.post(&format!("/v1/sandboxes/{}/snapshots", encode_segment(sandbox.as_bytes()))).json(request)).await
    }

    /// `reference` is an id, `name` or `name:tag`.
    pub async fn get_snapshot(&self, reference: &str) -> Result<SnapshotInfo, ClientError> {
        self.json(self.get(&format!("/v1/snapshots/{}", encode_segment(reference.as_bytes())))).await
    }

    pub async fn delete_snapshot(&self, reference: &str) -> Result<(), ClientError> {
        self.no_content(self.delete(&format!("/v1/snapshots/{}", encode_segment(reference.as_bytes())))).await
    }

    pub async fn create_volume(&self, request: &CreateVolume) -> Result<VolumeInfo, ClientError> {
        self.json(self.post("/v1/volumes").json(request)).await
    }

    pub async fn delete_volume(&self, name_or_id: &str) -> Result<(), ClientError> {
        self.no_content(self.delete(&format!("/v1/volumes/{}", encode_segment(name_or_id.as_bytes())))).await
    }
}
