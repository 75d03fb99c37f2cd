//! A whole document, and what must hold of it.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use serde_json::{Value, json};

use crate::{Operation, Schemas};

/// Set, tests write the documents instead of comparing them.
const WRITE: &str = "COBOX_WRITE_OPENAPI";

/// What a document says beside its routes.
pub struct Document {
    pub title: &'static str,
    pub about: &'static str,
    pub server: Value,
    /// Name and description of each group of routes.
    pub tags: &'static [(&'static str, &'static str)],
    /// What is asked of a request where its route doesn't say.
    pub security: Value,
    pub security_schemes: Value,
}

impl Document {
    pub fn render(self, operations: &[Operation]) -> Value {
        let mut schemas = Schemas::default();
        let mut paths: BTreeMap<&str, BTreeMap<&str, Value>> = BTreeMap::new();
        for operation in operations {
            let twice = paths.entry(operation.path).or_default().insert(operation.method, operation.render(&mut schemas));
            assert!(twice.is_none(), "{} {} is in the table twice", operation.method, operation.path);
        }
        let (schemas, refusals) = schemas.into_components();
        let tags: Vec<Value> = self.tags.iter().map(|(name, about)| json!({ "name": name, "description": about })).collect();
        json!({
            "openapi": "3.1.0",
            "info": {
                "title": self.title, "version": "1", "description": self.about,
                "license": { "name": "Apache-2.0", "identifier": "Apache-2.0" },
            },
            "servers": [self.server],
            "tags": tags,
            "security": self.security,
            "paths": paths,
            "components": {
                "schemas": schemas,
                "responses": refusals,
                "headers": {
                    "X-Request-Id": {
                        "description": "Names the request in answers, logs and audit records.",
                        "required": true, "schema": { "type": "string", "pattern": "^req_[0-7][0-9a-hjkmnp-tv-z]{25}$" },
                    },
                    "Retry-After": { "description": "Seconds to wait.", "required": true, "schema": { "type": "integer", "minimum": 0 } },
                },
                "securitySchemes": self.security_schemes,
            },
        })
    }
}

/// The file holds what the code says; with `COBOX_WRITE_OPENAPI` it does afterwards.
pub fn assert_checked_in(made: &Value, file: &Path) {
    let made = serde_json::to_string_pretty(made).expect("a value can be written") + "\n";
    if std::env::var_os(WRITE).is_some() {
        std::fs::write(file, &made).expect("the document can be written");
    }
    let kept = std::fs::read_to_string(file).unwrap_or_default();
    let differs = made.lines().zip(kept.lines()).position(|(made, kept)| made != kept);
    let file = file.file_name().unwrap_or_default().display();
    assert!(made == kept, "openapi/{file} is not what the code says (line {differs:?}); run `make openapi` and look at the difference");
}

/// Every reference leads somewhere, and every name is used once.
pub fn assert_sound(document: &Value) {
    let mut found = BTreeSet::new();
    references(document, &mut found);
    for target in found {
        assert!(document.pointer(target.trim_start_matches('#')).is_some(), "{target} leads nowhere");
    }
    let mut ids = BTreeSet::new();
    for (path, operations) in document["paths"].as_object().into_iter().flatten() {
        for (method, operation) in operations.as_object().into_iter().flatten() {
            assert!(ids.insert(operation["operationId"].as_str()), "{method} {path} has another's operationId");
        }
    }
}

fn references<'a>(value: &'a Value, found: &mut BTreeSet<&'a str>) {
    match value {
        Value::Object(fields) => fields.iter().for_each(|(name, value)| match value {
            Value::String(target) if name == "$ref" => drop(found.insert(target)),
            other => references(other, found),
        }),
        Value::Array(items) => items.iter().for_each(|item| references(item, found)),
        _ => {}
    }
}
