//! Templates: named specs for sandboxes. Those in the operator's settings take precedence over a workspace's own.

use std::sync::Arc;

use cobox_protocol::{
    ApiError, ErrorCode,
    resources::{CreateTemplate, TemplateInfo},
    text::{MAX_SHOWN_CHARS, printable},
};

use super::{
    records::{Template, TemplateSpec},
    sandbox_spec, sandboxes,
};
use crate::{
    domain::{
        access::{self, request_context::RequestContext},
        context::{BrokerContext, store_error},
    },
    store::{AddedResource, ChangedResource, RemovedResource},
};

/// Templates per workspace: people read such a list.
pub const MAX_TEMPLATES: u32 = 200;

/// A template from the settings or of a workspace.
#[derive(Clone, Debug)]
pub struct ResolvedTemplate {
    pub name: String,
    pub spec: TemplateSpec,
    /// Set for a workspace's template, `None` for one from the settings.
    pub own: Option<Template>,
}

pub async fn find(context: &BrokerContext, workspace: &str, name: &str) -> Result<ResolvedTemplate, ApiError> {
    if let Some(spec) = context.config.templates.get(name) {
        return Ok(ResolvedTemplate { name: name.to_owned(), spec: spec.clone(), own: None });
    }
    let found = context.store.template(workspace, name).await.map_err(store_error)?;
    found.map(ResolvedTemplate::from).ok_or_else(|| not_found(name))
}

impl From<Template> for ResolvedTemplate {
    fn from(template: Template) -> Self {
        Self { name: template.name.clone(), spec: template.spec.clone(), own: Some(template) }
    }
}

impl ResolvedTemplate {
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
    pub context: Arc<BrokerContext>,
}

impl Templates {
    pub async fn create(&self, request: &RequestContext<'_>, params: CreateTemplate) -> Result<ResolvedTemplate, ApiError> {
        let context = &self.context;
        let CreateTemplate { name, provider, image, resources, env, mounts } = params;
        sandboxes::check_name(&name)?;
        let spec = TemplateSpec { provider, image, rootfs: None, resources, env, mounts };
        spec.check()?;
        let (policy, subject) = (context.policy(), request.caller.subject());
        policy.check_template(&subject, &name)?;
        if policy.has_listed_templates(&subject) && !request.caller.principal.is_operator() {
            return Err(ApiError::new(
                ErrorCode::Forbidden,
                "the policy lists the templates you may use; only operators may create one of this name",
            ));
        }
        if let Some(other) = spec.provider.as_deref().filter(|p| *p != context.provider.name()) {
            return Err(ApiError::invalid(format!("provider: there is no `{other}` here; this broker has `{}`", context.provider.name())));
        }
        // Volumes may come and go; everything else is checked now.
        sandbox_spec::check_template(&*context.provider, &spec).map_err(|e| sandbox_spec::refused(&e))?;
        if context.config.templates.contains_key(&name) {
            return Err(name_taken(&name));
        }
        let (principal, now) = (&request.caller.principal, context.now());
        let template = Template {
            workspace: principal.workspace.clone(),
            name,
            owner: principal.name.clone(),
            spec,
            created_at: now,
            updated_at: now,
        };
        let audit = request.audit(self.context.now(), "template.created", &template.name);
        match context.store.add_template(&template, MAX_TEMPLATES, &audit).await.map_err(store_error)? {
            AddedResource::Added => Ok(template.into()),
            AddedResource::NameTaken => Err(name_taken(&template.name)),
            AddedResource::TooMany | AddedResource::TooLarge => Err(ApiError::new(
                ErrorCode::QuotaExceeded,
                format!("the workspace has {MAX_TEMPLATES} templates, which is its limit; remove some first"),
            )),
        }
    }

    /// The operator's and the workspace's templates that the policy lets the caller use, by name.
    pub async fn list(&self, request: &RequestContext<'_>) -> Result<Vec<ResolvedTemplate>, ApiError> {
        let context = &self.context;
        let (policy, subject) = (context.policy(), request.caller.subject());
        let own = context.store.templates(&request.caller.principal.workspace).await.map_err(store_error)?;
        let operators =
            context.config.templates.iter().map(|(name, spec)| ResolvedTemplate { name: name.clone(), spec: spec.clone(), own: None });
        let own = own.into_iter().filter(|t| !context.config.templates.contains_key(&t.name)).map(ResolvedTemplate::from);
        let mut all: Vec<ResolvedTemplate> = operators.chain(own).filter(|t| policy.check_template(&subject, &t.name).is_ok()).collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(all)
    }

    pub async fn get(&self, request: &RequestContext<'_>, name: &str) -> Result<ResolvedTemplate, ApiError> {
        let context = &self.context;
        context.policy().check_template(&request.caller.subject(), name)?;
        find(context, &request.caller.principal.workspace, name).await
    }

    pub async fn rename(&self, request: &RequestContext<'_>, name: &str, to: &str) -> Result<ResolvedTemplate, ApiError> {
        let context = &self.context;
        sandboxes::check_name(to)?;
        let template = self.own_template(request, name).await?;
        context.policy().check_template(&request.caller.subject(), to)?;
        if context.config.templates.contains_key(to) {
            return Err(name_taken(to));
        }
        let audit = request.audit(self.context.now(), "template.renamed", &format!("{name} to {to}"));
        match context.store.rename_template(&template, to, context.now(), &audit).await.map_err(store_error)? {
            ChangedResource::Changed => find(context, &template.workspace, to).await,
            ChangedResource::NameTaken => Err(name_taken(to)),
            ChangedResource::Gone => Err(not_found(name)),
        }
    }

    pub async fn delete(&self, request: &RequestContext<'_>, name: &str) -> Result<(), ApiError> {
        let template = self.own_template(request, name).await?;
        let audit = request.audit(self.context.now(), "template.deleted", name);
        match self.context.store.remove_template(&template, &audit).await.map_err(store_error)? {
            RemovedResource::Removed => Ok(()),
            RemovedResource::InUse(pools) => Err(ApiError::new(
                ErrorCode::InUse,
                format!("template {name} is used by the pools {}; delete them first", pools.join(", ")),
            )),
            RemovedResource::Gone => Err(not_found(name)),
        }
    }

    /// A template that the caller may change.
    async fn own_template(&self, request: &RequestContext<'_>, name: &str) -> Result<Template, ApiError> {
        let found = find(&self.context, &request.caller.principal.workspace, name).await?;
        let Some(template) = found.own else {
            return Err(ApiError::new(
                ErrorCode::Forbidden,
                format!("template {name} is defined in the broker's configuration; change it there"),
            ));
        };
        access::may_end(&request.caller.principal, &template)?;
        Ok(template)
    }
}

fn not_found(name: &str) -> ApiError {
    let name = printable(name, MAX_SHOWN_CHARS);
    ApiError::new(
        ErrorCode::TemplateNotFound,
        format!("template: there is no template `{name}`; `GET /v1/templates` lists the existing ones"),
    )
}

fn name_taken(name: &str) -> ApiError {
    ApiError::new(ErrorCode::NameTaken, format!("name: a template {name} already exists"))
}
