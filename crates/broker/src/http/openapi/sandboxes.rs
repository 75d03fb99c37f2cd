//! OpenAPI operations of `/v1/sandboxes`.

use cobox_openapi::{Operation, Parameter};
use cobox_protocol::{
    ErrorCode::*,
    sandbox::{CreateSandbox, PatchSandbox, RestoreResponse, RestoreSandbox, SandboxInfo, SandboxUsage},
    session::Page,
};

use super::{flag, keyed, page_of, prefer, tags};

pub fn routes() -> Vec<Operation> {
    let which = || Parameter::path("id_or_name", "Its id, or its name in your workspace.");
    let routes = vec![
        keyed("post", "/v1/sandboxes", "createSandbox", "Make a sandbox without a session")
            .with([prefer()])
            .takes::<CreateSandbox>()
            .body_optional()
            .gives::<SandboxInfo>(201, "It was made; `provisioning` while it still starts.")
            .fails(&[
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
            .with([tags(), flag("deleted", "Those that were deleted and can be restored, instead of those that live.")])
            .with(page_of())
            .gives::<Page<SandboxInfo>>(200, "A page, newest first."),
        keyed("get", "/v1/sandboxes/{id_or_name}", "getSandbox", "Look at a sandbox")
            .with([which()])
            .gives::<SandboxInfo>(200, "The sandbox.")
            .fails(&[Forbidden, SandboxNotFound]),
        keyed("patch", "/v1/sandboxes/{id_or_name}", "changeSandbox", "Change its name, its tags, and how it is kept")
            .about("All of it or nothing; for its owner and operators.")
            .with([which()])
            .takes::<PatchSandbox>()
            .gives::<SandboxInfo>(200, "The sandbox as it is now.")
            .fails(&[Forbidden, SandboxNotFound, SandboxConflict]),
        keyed("delete", "/v1/sandboxes/{id_or_name}", "deleteSandbox", "End it, and every session that uses it")
            .about("It can be restored for a while, unless policy or `permanent` says otherwise; for its owner and operators.")
            .with([which(), flag("permanent", "Remove its files at once; of a deleted sandbox too.")])
            .gives_nothing(204, "It has ended.")
            .fails(&[Forbidden, SandboxNotFound, ProviderUnavailable]),
        keyed("post", "/v1/sandboxes/{id_or_name}/restore", "restoreSandbox", "Bring a deleted sandbox back, suspended, with its files")
            .about("For its owner and operators. Shares and tokens from before are not restored. A thread that has had another sandbox since does not return.")
            .with([which()])
            .takes::<RestoreSandbox>()
            .body_optional()
            .gives::<RestoreResponse>(200, "The sandbox, suspended, and the threads that return to it.")
            .fails(&[Forbidden, SandboxNotFound, SandboxConflict, SandboxStarting, InUse]),
        keyed("get", "/v1/sandboxes/{id_or_name}/usage", "getSandboxUsage", "Count the files that deleting it would erase")
            .about("For its owner and operators.")
            .with([which(), flag("deleted", "Of a deleted sandbox: what a permanent deletion would erase.")])
            .gives::<SandboxUsage>(200, "What was written in it.")
            .fails(&[Forbidden, SandboxNotFound]),
    ];
    routes.into_iter().map(|route| route.tag("sandboxes")).collect()
}
