//! Templates: named specs for sandboxes. Those in the operator's settings take precedence over a workspace's own.

use std::sync::Arc;

use cobox_protocol::{
    ApiError, ErrorCode,
    resources::{CreateTemplate, TemplateInfo},
};

use super::{
    records::{Template, TemplateSpec},
    sandbox_spec, sandboxes,
};
use crate::{
    domain::{
        access::{self, request_context::Asking},
        context::{Deployment, internal},
    },
    store::{AddedKind, ChangedKind, RemovedKind},
};

/// Templates per workspace: people read such a list.
pub const MAX_TEMPLATES: u32 = 200;

/// A template from the settings or of a workspace.
#[derive(Clone, Debug)]
pub struct Found {
    pub name: String,
    pub spec: TemplateSpec,
    /// Set for a workspace's template, `None` for one from the settings.
    pub own: Option<Template>,
}

pub async fn find(d: &Deployment, workspace: &str, name: &str) -> Result<Found, ApiError> {
    if let Some(spec) = d.config.templates.get(name) {
        return Ok(Found { name: name.to_owned(), spec: spec.clone(), own: None });
    }
    let found = d.store.template(workspace, name).await.map_err(internal)?;
    found.map(Found::from).ok_or_else(|| not_found(name))
}

impl From<Template> for Found {
    fn from(template: Template) -> Self {
        Self { name: template.name.clone(), spec: template.spec.clone(), own: Some(template) }
    }
}

impl Found {
    pub fn info(self) -> TemplateInfo {
        TemplateInfo {
            name: self.name,
            is_operators: self.own.is_none(),
            provider: self.spec.provider,
            // `rootfs` is left out: it would reveal a path on the host.
            image: self.spec.image,
            resources: self.spec.resources,
            env: self.spec.env,
            mounts: self.spec.mounts,
            created_at: self.own.as_ref().map(|t| t.created_at),
            owner: self.own.map(|t| t.owner),
        }
    }
}

pub struct Templates {
    pub deployment: Arc<Deployment>,
}

impl Templates {
    pub async fn create_template(&self, asking: &Asking<'_>, wish: CreateTemplate) -> Result<Found, ApiError> {
        let d = &self.deployment;
        let CreateTemplate { name, provider, image, resources, env, mounts } = wish;
        sandboxes::check_name(&name)?;
        let spec = TemplateSpec { provider, image, rootfs: None, resources, env, mounts };
        spec.check()?;
        let (policy, subject) = (d.policy(), asking.caller.subject());
        policy.check_template(&subject, &name)?;
        if policy.has_listed_templates(&subject) && !asking.caller.principal.is_operator() {
            return Err(ApiError::new(
                ErrorCode::Forbidden,
                "the policy lists the templates you may use; only operators make one of that name",
            ));
        }
        if let Some(other) = spec.provider.as_deref().filter(|p| *p != d.provider.name()) {
            return Err(ApiError::invalid(format!("provider: there is no `{other}` here; there is `{}`", d.provider.name())));
        }
        // Volumes may come and go; everything else is checked now.
        sandbox_spec::check_template(&*d.provider, &spec).map_err(|e| sandbox_spec::refused(&e))?;
        if d.config.templates.contains_key(&name) {
            return Err(taken(&name));
        }
        let (principal, now) = (&asking.caller.principal, d.now());
        let template = Template {
            workspace: principal.workspace.clone(),
            name,
            owner: principal.name.clone(),
            spec,
            created_at: now,
            updated_at: now,
        };
        let audit = asking.audit(self.deployment.now(), "template.created", &template.name);
        match d.store.add_template(&template, MAX_TEMPLATES, &audit).await.map_err(internal)? {
            AddedKind::Added => Ok(template.into()),
            AddedKind::NameTaken => Err(taken(&template.name)),
            AddedKind::TooMany | AddedKind::TooLarge => Err(ApiError::new(
                ErrorCode::QuotaExceeded,
                format!("the workspace has {MAX_TEMPLATES} templates, which is its limit; remove some first"),
            )),
        }
    }

    /// The operator's and the workspace's templates that the policy lets the caller use, by name.
    pub async fn templates(&self, asking: &Asking<'_>) -> Result<Vec<Found>, ApiError> {
        let d = &self.deployment;
        let (policy, subject) = (d.policy(), asking.caller.subject());
        let own = d.store.templates(&asking.caller.principal.workspace).await.map_err(internal)?;
        let operators = d.config.templates.iter().map(|(name, spec)| Found { name: name.clone(), spec: spec.clone(), own: None });
        let own = own.into_iter().filter(|t| !d.config.templates.contains_key(&t.name)).map(Found::from);
        let mut all: Vec<Found> = operators.chain(own).filter(|t| policy.check_template(&subject, &t.name).is_ok()).collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(all)
    }

    pub async fn template(&self, asking: &Asking<'_>, name: &str) -> Result<Found, ApiError> {
        let d = &self.deployment;
        d.policy().check_template(&asking.caller.subject(), name)?;
        find(d, &asking.caller.principal.workspace, name).await
    }

    pub async fn rename_template(&self, asking: &Asking<'_>, name: &str, to: &str) -> Result<Found, ApiError> {
        let d = &self.deployment;
        sandboxes::check_name(to)?;
        let template = self.own_template(asking, name).await?;
        d.policy().check_template(&asking.caller.subject(), to)?;
        if d.config.templates.contains_key(to) {
            return Err(taken(to));
        }
        let audit = asking.audit(self.deployment.now(), "template.renamed", &format!("{name} to {to}"));
        match d.store.rename_template(&template, to, d.now(), &audit).await.map_err(internal)? {
            ChangedKind::Changed => find(d, &template.workspace, to).await,
            ChangedKind::NameTaken => Err(taken(to)),
            ChangedKind::Gone => Err(not_found(name)),
        }
    }

    pub async fn delete_template(&self, asking: &Asking<'_>, name: &str) -> Result<(), ApiError> {
        let template = self.own_template(asking, name).await?;
        let audit = asking.audit(self.deployment.now(), "template.deleted", name);
        match self.deployment.store.remove_template(&template, &audit).await.map_err(internal)? {
            RemovedKind::Removed => Ok(()),
            RemovedKind::InUse(pools) => Err(ApiError::new(
                ErrorCode::InUse,
                format!("template {name} is used by the pools {}; delete them first", pools.join(", ")),
            )),
            RemovedKind::Gone => Err(not_found(name)),
        }
    }

    /// A template that the caller may change.
    async fn own_template(&self, asking: &Asking<'_>, name: &str) -> Result<Template, ApiError> {
        let found = find(&self.deployment, &asking.caller.principal.workspace, name).await?;
        let Some(template) = found.own else {
            return Err(ApiError::new(ErrorCode::Forbidden, format!("template {name} stands in the broker's settings; change it there")));
        };
        access::may_end(&asking.caller.principal, &template)?;
        Ok(template)
    }
}

fn not_found(name: &str) -> ApiError {
    let shown: String = name.chars().filter(|c| !c.is_control()).take(64).collect();
    ApiError::new(
        ErrorCode::TemplateNotFound,
        format!("template: there is no template `{shown}`; `GET /v1/templates` lists those there are"),
    )
}

fn taken(name: &str) -> ApiError {
    ApiError::new(ErrorCode::NameTaken, format!("name: there is a template {name} already"))
}
