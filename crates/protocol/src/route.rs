//! Table of the dataplane's routes and the capabilities that each requires. boxd's tests compare boxd with this table; the gateway uses it
//! for sandboxes without boxd.

use crate::{
    ApiError,
    Capability::{self, Exec, FsRead, FsWrite, Shell, ShellObserve},
    json::unknown_parameter,
    langsmith::{DOWNLOAD, EXECUTE, EXECUTE_RESUME, EXECUTE_START, EXECUTE_WS, GLOB, GREP, TUNNEL, UPLOAD, operation},
};

/// One method of one path. A trailing `{path}` matches any number of segments, any other name in braces matches one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    pub method: &'static str,
    pub template: &'static str,
    /// Required capabilities, all of them; empty if the route needs no token.
    pub needs: &'static [Capability],
    /// Accepted query parameters.
    pub query: &'static [&'static str],
}

pub const FILE: &str = "/v1/files/{path}";

/// All routes. A route with a literal segment precedes one whose parameter would match that segment.
pub const ROUTES: &[Route] = &[
    route("GET", "/healthz", &[]),
    route("GET", "/v1/healthz", &[]),
    route("POST", "/v1/exec", &[Exec]),
    route("GET", "/v1/exec/ws", &[Exec]),
    route("GET", "/v1/processes", &[Exec]),
    route("DELETE", "/v1/processes/{id}", &[Exec]),
    route("POST", "/v1/processes/{id}/signal", &[Exec]),
    route("POST", "/v1/files/upload", &[FsWrite]).query(&["path", "sync"]),
    route("GET", "/v1/files/download", &[FsRead]).query(&["path"]),
    route("GET", FILE, &[FsRead]).query(&["hash"]),
    route("HEAD", FILE, &[FsRead]).query(&["hash"]),
    route("PUT", FILE, &[FsWrite]).query(&["sync"]),
    route("DELETE", FILE, &[FsWrite]),
    route("GET", "/v1/watch", &[FsRead]).query(&["path", "recursive", "cursor"]),
    route("GET", "/v1/sync/ws", &[FsRead]).query(&["path", "pull"]),
    route("POST", "/v1/fs/list", &[FsRead]),
    route("POST", "/v1/fs/stat", &[FsRead]),
    route("POST", "/v1/fs/glob", &[FsRead]),
    route("POST", "/v1/fs/grep", &[FsRead]),
    route("POST", "/v1/fs/mkdir", &[FsWrite]),
    route("POST", "/v1/fs/move", &[FsWrite]),
    route("POST", "/v1/fs/copy", &[FsRead, FsWrite]),
    route("POST", "/v1/fs/remove", &[FsWrite]),
    route("POST", "/v1/fs/edit", &[FsRead, FsWrite]),
    route("GET", "/v1/archive", &[FsRead]).query(&["path"]),
    route("PUT", "/v1/archive", &[FsWrite]).query(&["path", "links"]),
    route("GET", "/v1/shell/ws", &[ShellObserve]),
    route("GET", "/v1/ws", &[ShellObserve]),
    route("GET", "/v1/shells", &[ShellObserve]),
    route("POST", "/v1/shells", &[Shell]),
    route("GET", "/v1/shells/{shell}", &[ShellObserve]),
    route("DELETE", "/v1/shells/{shell}", &[Shell]),
    route("POST", "/v1/shells/{shell}/run", &[Exec, ShellObserve]),
    route("POST", EXECUTE, &[Exec]),
    route("GET", EXECUTE_WS, &[Exec]),
    route("POST", EXECUTE_START, &[Exec]),
    route("POST", EXECUTE_RESUME, &[Exec]),
    route("POST", UPLOAD, &[FsWrite]).query(&["path"]),
    route("GET", DOWNLOAD, &[FsRead]).query(&["hash", "path"]),
    route("HEAD", DOWNLOAD, &[FsRead]).query(&["hash", "path"]),
    route("POST", GLOB, &[FsRead]),
    route("POST", GREP, &[FsRead]),
    route("GET", TUNNEL, &[]),
];

const fn route(method: &'static str, template: &'static str, needs: &'static [Capability]) -> Route {
    Route { method, template, needs, query: &[] }
}

/// Finds the route of a request by its undecoded path.
pub fn find(method: &str, path: &str) -> Option<&'static Route> {
    ROUTES.iter().find(|r| r.method == method && r.matches(path))
}

/// The route of a file by its path, also of one whose path is another route's word.
pub fn of_file(method: &str) -> Option<&'static Route> {
    ROUTES.iter().find(|r| r.method == method && r.template == FILE)
}

impl Route {
    const fn query(self, query: &'static [&'static str]) -> Self {
        Self { query, ..self }
    }

    /// Refuses query parameters that this route does not accept, because an ignored filter or restriction would look as if it had been
    /// applied. LangSmith routes accept any, because the LangSmith SDKs send undocumented parameters.
    pub fn check_query(&self, query: Option<&str>) -> Result<(), ApiError> {
        if operation(self.template).is_some() {
            return Ok(());
        }
        let names = query.unwrap_or_default().split('&').filter(|pair| !pair.is_empty()).map(|pair| pair.split('=').next().unwrap_or(pair));
        for name in names {
            if !self.query.contains(&name) {
                return Err(unknown_parameter(name, self.query));
            }
        }
        Ok(())
    }

    fn matches(&self, path: &str) -> bool {
        if let Some(before) = self.template.strip_suffix("/{path}") {
            return path.strip_prefix(before).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
        }
        let (mut template, mut path) = (self.template.split('/'), path.split('/'));
        loop {
            match (template.next(), path.next()) {
                (None, None) => return true,
                (Some(name), Some(segment)) if name.starts_with('{') && !segment.is_empty() => {}
                (Some(word), Some(segment)) if word == segment => {}
                _ => return false,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_query_parameter_is_refused_by_name_except_on_langsmith_routes() {
        let check = |method, path, query| find(method, path).unwrap().check_query(query).map_err(|e| e.message);
        assert_eq!(check("GET", "/v1/files/a", Some("hash=sha256&hash=blake3&")), Ok(()));
        assert_eq!(check("GET", "/v1/files/a", None), Ok(()));
        let message = check("GET", "/v1/files/a", Some("hash=sha256&depth=1")).unwrap_err();
        assert_eq!(message, "depth: is not a query parameter of this route; known are `hash`");
        let message = check("POST", "/v1/exec", Some("timeout")).unwrap_err();
        assert_eq!(message, "timeout: is not a query parameter of this route, which takes none");
        check("GET", "/v1/files/a", Some("=1")).unwrap_err();
        assert_eq!(check("GET", "/download", Some("path=/a&anything=1")), Ok(()));
    }

    #[test]
    fn requests_match_their_route() {
        for (method, path, template) in [
            ("POST", "/v1/exec", Some("/v1/exec")),
            ("GET", "/v1/exec", None),
            ("GET", "/v1/files/workspace/a%2Fb", Some(FILE)),
            ("GET", "/v1/files", Some(FILE)),
            ("GET", "/v1/files/", Some(FILE)),
            ("GET", "/v1/filesystem", None),
            ("GET", "/v1/files/upload", Some(FILE)),
            ("POST", "/v1/files/upload", Some("/v1/files/upload")),
            ("HEAD", "/v1/files/download", Some(FILE)),
            ("GET", "/v1/files/download", Some("/v1/files/download")),
            ("POST", "/v1/shells/main/run", Some("/v1/shells/{shell}/run")),
            ("POST", "/v1/shells//run", None),
            ("POST", "/v1/exec/", None),
        ] {
            assert_eq!(find(method, path).map(|r| r.template), template, "{method} {path}");
        }
    }
}
