//! What sandboxes are made of: templates, snapshots and volumes, asked for with an API key.

use cobox_protocol::{
    resources::{CreateTemplate, CreateVolume, SnapshotInfo, TakeSnapshot, TemplateInfo, VolumeInfo},
    session::Page,
};

use crate::{Client, ClientError, path::encode_segment};

impl Client {
    pub async fn create_template(&self, wish: &CreateTemplate) -> Result<TemplateInfo, ClientError> {
        self.json(self.post("/v1/templates").json(wish)).await
    }

    /// Those a sandbox of yours can be made by.
    pub async fn list_templates(&self) -> Result<Page<TemplateInfo>, ClientError> {
        self.json(self.get("/v1/templates")).await
    }

    /// Answers while the sandbox's files are being copied.
    pub async fn take_snapshot(&self, sandbox: &str, wish: &TakeSnapshot) -> Result<SnapshotInfo, ClientError> {
        self.json(self.post(&format!("/v1/sandboxes/{}/snapshots", encode_segment(sandbox.as_bytes()))).json(wish)).await
    }

    /// By its id, `name` or `name:tag`.
    pub async fn get_snapshot(&self, reference: &str) -> Result<SnapshotInfo, ClientError> {
        self.json(self.get(&format!("/v1/snapshots/{}", encode_segment(reference.as_bytes())))).await
    }

    pub async fn delete_snapshot(&self, reference: &str) -> Result<(), ClientError> {
        self.nothing(self.delete(&format!("/v1/snapshots/{}", encode_segment(reference.as_bytes())))).await
    }

    pub async fn create_volume(&self, wish: &CreateVolume) -> Result<VolumeInfo, ClientError> {
        self.json(self.post("/v1/volumes").json(wish)).await
    }

    pub async fn delete_volume(&self, name_or_id: &str) -> Result<(), ClientError> {
        self.nothing(self.delete(&format!("/v1/volumes/{}", encode_segment(name_or_id.as_bytes())))).await
    }
}
