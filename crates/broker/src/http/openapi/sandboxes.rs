//! OpenAPI operations of `/v1/sandboxes`.

use cobox_openapi::{Operation, Parameter};
use cobox_protocol::{
    ErrorCode::*,
    sandbox::{CreateSandbox, PatchSandbox, RestoreResponse, RestoreSandbox, SandboxInfo, SandboxUsage},
    session::Page,
};

use super::{flag, keyed, page_of, prefer, tags};

pub fn routes() -> Vec<Operation> {
    let which = || Parameter::path("id_or_name", "The sandbox's id, or its name in your workspace.");
    let routes = vec![
        keyed("post", "/v1/sandboxes", "createSandbox", "Create a sandbox without a session")
            .with([prefer()])
            .request_body::<CreateSandbox>()
            .body_optional()
            .response::<SandboxInfo>(201, "Created; the state is `provisioning` while it starts.")
            .errors(&[
                Forbidden,
                QuotaExceeded,
                SandboxConflict,
                InUse,
                TemplateNotFound,
                SnapshotNotFound,
                VolumeNotFound,
                SandboxStarting,
                SessionExpired,
                ProviderUnavailable,
            ]),
        keyed("get", "/v1/sandboxes", "listSandboxes", "List the sandboxes you may use")
            .with([tags(), flag("deleted", "Lists deleted sandboxes that can be restored, instead of existing ones.")])
            .with(page_of())
            .response::<Page<SandboxInfo>>(200, "A page, newest first."),
        keyed("get", "/v1/sandboxes/{id_or_name}", "getSandbox", "Get a sandbox")
            .with([which()])
            .response::<SandboxInfo>(200, "The sandbox.")
            .errors(&[Forbidden, SandboxNotFound]),
        keyed("patch", "/v1/sandboxes/{id_or_name}", "changeSandbox", "Change a sandbox's name, tags and lifetimes")
            .about("Applies all changes or none. For its owner and operators.")
            .with([which()])
            .request_body::<PatchSandbox>()
            .response::<SandboxInfo>(200, "The changed sandbox.")
            .errors(&[Forbidden, SandboxNotFound, SandboxConflict]),
        keyed("delete", "/v1/sandboxes/{id_or_name}", "deleteSandbox", "Delete a sandbox and end the sessions that use it")
            .about("It can be restored for a while, unless the policy or `permanent` excludes that. For its owner and operators.")
            .with([which(), flag("permanent", "Removes the files immediately, also those of a deleted sandbox.")])
            .empty_response(204, "Deleted.")
            .errors(&[Forbidden, SandboxNotFound, ProviderUnavailable]),
        keyed("post", "/v1/sandboxes/{id_or_name}/restore", "restoreSandbox", "Restore a deleted sandbox with its files")
            .about(
                "For its owner and operators. Earlier shares and tokens are not restored. A thread that has used another sandbox since \
                 then keeps that one.",
            )
            .with([which()])
            .request_body::<RestoreSandbox>()
            .body_optional()
            .response::<RestoreResponse>(200, "The sandbox, suspended, and the threads that use it again.")
            .errors(&[Forbidden, SandboxNotFound, SandboxConflict, SandboxStarting, InUse]),
        keyed("get", "/v1/sandboxes/{id_or_name}/usage", "getSandboxUsage", "Count the files that a deletion would erase")
            .about("For its owner and operators.")
            .with([which(), flag("deleted", "Counts for a deleted sandbox: what a permanent deletion would erase.")])
            .response::<SandboxUsage>(200, "Number and size of the files written in it.")
            .errors(&[Forbidden, SandboxNotFound]),
    ];
    routes.into_iter().map(|route| route.tag("sandboxes")).collect()
}
