//! All client routes, one table entry each, in the order in which a reader would look for them.

mod files;
mod langsmith;
mod programs;
mod tree;

use cobox_openapi::{Operation, Shape};

pub fn all() -> Vec<Operation> {
    let health = |path, id| {
        Operation::new("get", path, id, "Check that boxd responds").tag("health").response_as(
            200,
            "It does.",
            "application/json",
            Shape::Plain(serde_json::json!({
                "type": "object", "properties": { "status": { "const": "ok" } }, "required": ["status"]
            })),
        )
    };
    let health = vec![health("/healthz", "health"), health("/v1/healthz", "healthBelowBase")];
    [health, programs::routes(), files::routes(), tree::routes(), langsmith::routes()].into_iter().flatten().collect()
}
