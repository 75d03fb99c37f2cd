//! Every route of the control plane, and the router made from them. A new route must also be described in `openapi/`.

use axum::{
    Router,
    routing::{MethodRouter, delete, get, post},
};

use super::{
    Api, audit, capabilities, events, internal, keys, langsmith, ops, principals, sandboxes, sessions, shares, snapshots, templates,
    threads, tokens, volumes, webhooks,
};

/// Path and handlers.
type Route = (&'static str, fn() -> MethodRouter<Api>);

const ROUTES: &[Route] = &[
    ("/v1/sandbox/sessions", || post(sessions::negotiate).get(sessions::list)),
    ("/v1/sandbox/sessions/{id}", || get(sessions::show).delete(sessions::release)),
    ("/v1/sandbox/sessions/{id}/refresh", || post(sessions::refresh)),
    ("/v1/sandbox/sessions/{id}/refresh-token", || post(sessions::refresh_token)),
    ("/v1/sandbox/sessions/{id}/heartbeat", || post(sessions::heartbeat)),
    ("/v1/sandbox/sessions/{id}/delegate", || post(tokens::of_session)),
    ("/sandbox/{id}/delegate", || post(tokens::of_sandbox)),
    ("/v1/sandbox/sessions/{id}/file-links", || post(tokens::file_link)),
    ("/v1/sandbox/sessions/{id}/share", || post(shares::share).get(shares::list)),
    ("/v1/sandbox/sessions/{id}/share/{principal}", || get(shares::principal_access).delete(shares::unshare)),
    ("/internal/tokens/introspect", || post(internal::introspect)),
    ("/internal/tokens/revoke", || post(internal::revoke)),
    ("/internal/tokens/{token}", || get(internal::show)),
    ("/internal/sandboxes/{id}", || delete(internal::end_sandbox)),
    ("/internal/sandboxes/{id}/rotate-key", || post(internal::rotate_key)),
    ("/v1/sandbox/sessions/{id}/events", || get(events::events)),
    ("/threads/{thread_id}", || delete(threads::end)),
    ("/threads/{thread_id}/sandbox", || post(threads::negotiate).get(threads::show).delete(threads::release)),
    ("/threads/{thread_id}/sandbox/refresh", || post(threads::refresh)),
    ("/threads/{thread_id}/sandbox/heartbeat", || post(threads::heartbeat)),
    ("/webhooks/threads", || post(webhooks::thread)),
    ("/capabilities", || get(capabilities::show)),
    ("/v1/sandboxes", || get(sandboxes::list).post(sandboxes::create)),
    ("/v1/sandboxes/{id_or_name}", || get(sandboxes::show).patch(sandboxes::change).delete(sandboxes::remove)),
    ("/v1/sandboxes/{id_or_name}/restore", || post(sandboxes::restore)),
    ("/v1/sandboxes/{id_or_name}/usage", || get(sandboxes::usage)),
    ("/v1/templates", || get(templates::list).post(templates::create)),
    ("/v1/templates/{name}", || get(templates::show).delete(templates::remove)),
    ("/v1/sandboxes/{id_or_name}/snapshots", || post(snapshots::take)),
    ("/v1/snapshots", || get(snapshots::list)),
    ("/v1/snapshots/{reference}", || get(snapshots::show).delete(snapshots::remove)),
    ("/v1/volumes", || get(volumes::list).post(volumes::create)),
    ("/v1/volumes/{name_or_id}", || get(volumes::show).delete(volumes::remove)),
    ("/v1/keys", || get(keys::list).post(keys::create)),
    ("/v1/keys/{id}", || get(keys::show).patch(keys::expire).delete(keys::revoke)),
    ("/v1/principals", || get(principals::list)),
    ("/v1/principals/{name}/disable", || post(principals::disable)),
    ("/v1/principals/{name}/enable", || post(principals::enable)),
    ("/v1/audit", || get(audit::list)),
    ("/v1/audit/heads", || get(audit::heads)),
    ("/v1/audit/links", || get(audit::links)),
    ("/healthz", || get(ops::healthz)),
    ("/readyz", || get(ops::readyz)),
    ("/metrics", || get(ops::metrics)),
    ("/openapi.json", || get(ops::openapi)),
];

/// The routes of the LangSmith sandbox API, below both of its prefixes.
const LANGSMITH_ROUTES: &[Route] = {
    use langsmith::{boxes, pools, snapshots, templates, volumes};
    &[
        ("/boxes", || get(boxes::list).post(boxes::create)),
        ("/boxes/{name}", || get(boxes::show).patch(boxes::change).delete(boxes::remove)),
        ("/boxes/{name}/status", || get(boxes::status)),
        ("/boxes/{name}/start", || post(boxes::start)),
        ("/boxes/{name}/stop", || post(boxes::stop)),
        ("/boxes/{name}/download-url", || post(boxes::download_url)),
        ("/boxes/{name}/service-url", || post(boxes::no_service_urls)),
        ("/boxes/{name}/service-urls", || get(boxes::no_service_urls).delete(boxes::no_service_urls)),
        ("/boxes/{name}/snapshot", || post(snapshots::take)),
        ("/snapshots", || get(snapshots::list).post(snapshots::create)),
        ("/snapshots/{reference}", || get(snapshots::show).delete(snapshots::remove)),
        ("/snapshots-by-name/{name}", || get(snapshots::by_name)),
        ("/registries", || get(snapshots::no_registries).post(snapshots::no_registries)),
        ("/registries/{id}", || get(snapshots::no_registries).patch(snapshots::no_registries).delete(snapshots::no_registries)),
        ("/templates", || get(templates::list).post(templates::create)),
        ("/templates/{name}", || get(templates::show).patch(templates::change).delete(templates::remove)),
        ("/volumes", || get(volumes::list).post(volumes::create)),
        ("/volumes/{name}", || get(volumes::show).patch(volumes::change).delete(volumes::remove)),
        ("/pools", || get(pools::list).post(pools::create)),
        ("/pools/{name}", || get(pools::show).patch(pools::change).delete(pools::remove)),
    ]
};

fn all() -> impl Iterator<Item = (String, MethodRouter<Api>)> {
    let own = ROUTES.iter().map(|(path, methods)| ((*path).to_owned(), methods()));
    let below = |prefix| LANGSMITH_ROUTES.iter().map(move |(path, methods)| (format!("{prefix}{path}"), methods()));
    own.chain(langsmith::PREFIXES.into_iter().flat_map(below))
}

pub fn router() -> Router<Api> {
    all().fold(Router::new(), |router, (path, methods)| router.route(&path, methods))
}

/// The paths of all routes, including the gateway's. A test compares the documentation with them.
pub fn paths() -> Vec<String> {
    all().map(|(path, _)| path).chain(cobox_gateway::PATHS.iter().map(|path| (*path).to_owned())).collect()
}
