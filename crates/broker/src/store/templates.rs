//! Templates of workspaces. Sandboxes store their own resolved spec, so a template can be removed while they live.

use cobox_protocol::Timestamp;
use sqlx::{AnyConnection, Row, any::AnyRow};

use super::{asked, audit_records, lock, resources, rows};
use crate::{
    domain::{model::AuditRecord, resources::records::Template},
    store::{AddedResource, ChangedResource, RemovedResource, Store, StoreError, Stored},
};

pub async fn add(tx: &mut AnyConnection, template: &Template, most: u32, audit: &AuditRecord) -> Stored<AddedResource> {
    lock::workspace(tx, &template.workspace).await?;
    if get(tx, &template.workspace, &template.name).await?.is_some() {
        return Ok(AddedResource::NameTaken);
    }
    if resources::count(tx, "SELECT count(*) AS n FROM templates WHERE workspace_id = $1", &template.workspace).await? >= u64::from(most) {
        return Ok(AddedResource::TooMany);
    }
    let spec = serde_json::to_string(&template.spec).map_err(|e| StoreError::Failed(e.to_string()))?;
    sqlx::query("INSERT INTO templates (workspace_id, name, owner, spec, created_at, updated_at) VALUES ($1, $2, $3, $4, $5, $6)")
        .bind(&template.workspace)
        .bind(&template.name)
        .bind(&template.owner)
        .bind(spec)
        .bind(template.created_at.unix())
        .bind(template.updated_at.unix())
        .execute(&mut *tx)
        .await?;
    audit_records::add(tx, audit).await?;
    Ok(AddedResource::Added)
}

pub async fn get(db: &mut AnyConnection, workspace: &str, name: &str) -> Stored<Option<Template>> {
    let row =
        sqlx::query("SELECT * FROM templates WHERE workspace_id = $1 AND name = $2").bind(workspace).bind(name).fetch_optional(db).await?;
    row.as_ref().map(template).transpose()
}

pub async fn list(db: &mut AnyConnection, workspace: &str) -> Stored<Vec<Template>> {
    let found = sqlx::query("SELECT * FROM templates WHERE workspace_id = $1 ORDER BY name").bind(workspace).fetch_all(db).await?;
    found.iter().map(template).collect()
}

pub async fn rename(tx: &mut AnyConnection, old: &Template, name: &str, now: Timestamp, audit: &AuditRecord) -> Stored<ChangedResource> {
    lock::workspace(tx, &old.workspace).await?;
    if get(tx, &old.workspace, &old.name).await?.is_none() {
        return Ok(ChangedResource::Gone);
    }
    if name != old.name && get(tx, &old.workspace, name).await?.is_some() {
        return Ok(ChangedResource::NameTaken);
    }
    sqlx::query("UPDATE templates SET name = $3, updated_at = $4 WHERE workspace_id = $1 AND name = $2")
        .bind(&old.workspace)
        .bind(&old.name)
        .bind(name)
        .bind(now.unix())
        .execute(&mut *tx)
        .await?;
    sqlx::query("UPDATE pools SET template = $3 WHERE workspace_id = $1 AND template = $2")
        .bind(&old.workspace)
        .bind(&old.name)
        .bind(name)
        .execute(&mut *tx)
        .await?;
    audit_records::add(tx, audit).await?;
    Ok(ChangedResource::Changed)
}

pub async fn remove(tx: &mut AnyConnection, template: &Template, audit: &AuditRecord) -> Stored<RemovedResource> {
    lock::workspace(tx, &template.workspace).await?;
    let pools = sqlx::query("SELECT name FROM pools WHERE workspace_id = $1 AND template = $2 ORDER BY name")
        .bind(&template.workspace)
        .bind(&template.name)
        .fetch_all(&mut *tx)
        .await?;
    if !pools.is_empty() {
        return Ok(RemovedResource::InUse(pools.iter().map(|row| row.try_get("name")).collect::<Result<_, _>>()?));
    }
    let done = sqlx::query("DELETE FROM templates WHERE workspace_id = $1 AND name = $2")
        .bind(&template.workspace)
        .bind(&template.name)
        .execute(&mut *tx)
        .await?;
    if done.rows_affected() == 0 {
        return Ok(RemovedResource::Gone);
    }
    audit_records::add(tx, audit).await?;
    Ok(RemovedResource::Removed)
}

fn template(row: &AnyRow) -> Stored<Template> {
    let spec: &str = row.try_get("spec")?;
    Ok(Template {
        workspace: row.try_get("workspace_id")?,
        name: row.try_get("name")?,
        owner: row.try_get("owner")?,
        // Without the text: it may contain secrets.
        spec: serde_json::from_str(spec).map_err(|e| rows::corrupt("spec", &format!("…: {e}")))?,
        created_at: rows::time(row, "created_at")?,
        updated_at: rows::time(row, "updated_at")?,
    })
}

impl Store {
    pub async fn add_template(&self, template: &Template, most: u32, audit: &AuditRecord) -> Stored<AddedResource> {
        let mut tx = self.base.begin().await?;
        let added = add(&mut tx, template, most, audit).await?;
        self.base.commit(tx).await?;
        Ok(added)
    }

    pub async fn template(&self, workspace: &str, name: &str) -> Stored<Option<Template>> {
        asked!(self, db => get(db, workspace, name))
    }

    /// Ordered by name.
    pub async fn templates(&self, workspace: &str) -> Stored<Vec<Template>> {
        asked!(self, db => list(db, workspace))
    }

    /// Renames it; its pools follow.
    pub async fn rename_template(&self, template: &Template, name: &str, now: Timestamp, audit: &AuditRecord) -> Stored<ChangedResource> {
        let mut tx = self.base.begin().await?;
        let changed = rename(&mut tx, template, name, now, audit).await?;
        self.base.commit(tx).await?;
        Ok(changed)
    }

    /// Sandboxes created from it keep running; a pool of it prevents the removal.
    pub async fn remove_template(&self, template: &Template, audit: &AuditRecord) -> Stored<RemovedResource> {
        let mut tx = self.base.begin().await?;
        let removed = remove(&mut tx, template, audit).await?;
        self.base.commit(tx).await?;
        Ok(removed)
    }
}
