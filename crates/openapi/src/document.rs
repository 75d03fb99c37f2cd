//! A complete OpenAPI document, and the checks that it must pass.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use serde_json::{Value, json};

use crate::{Operation, Schemas};

/// If this environment variable is set, tests write the documents instead of comparing them.
const WRITE_VARIABLE: &str = "COBOX_WRITE_OPENAPI";

/// The content of a document except its routes.
pub struct Document {
    pub title: &'static str,
    pub about: &'static str,
    pub server: Value,
    /// Name and description of each group of routes.
    pub tags: &'static [(&'static str, &'static str)],
    /// Default security requirement of routes that don't specify their own.
    pub security: Value,
    pub security_schemes: Value,
}

impl Document {
    pub fn render(self, operations: &[Operation]) -> Value {
        let mut schemas = Schemas::default();
        let mut paths: BTreeMap<&str, BTreeMap<&str, Value>> = BTreeMap::new();
        for operation in operations {
            let previous = paths.entry(operation.path).or_default().insert(operation.method, operation.render(&mut schemas));
            assert!(previous.is_none(), "{} {} is listed twice", operation.method, operation.path);
        }
        let (schemas, error_responses) = schemas.into_components();
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
                "responses": error_responses,
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

/// Asserts that a checked-in file equals the generated document. With `COBOX_WRITE_OPENAPI`, the file is written first.
pub fn assert_checked_in(generated: &Value, file: &Path) {
    let generated = serde_json::to_string_pretty(generated).expect("a JSON value can be serialized") + "\n";
    if std::env::var_os(WRITE_VARIABLE).is_some() {
        std::fs::write(file, &generated).expect("the document can be written");
    }
    let checked_in = std::fs::read_to_string(file).unwrap_or_default();
    let differs = generated.lines().zip(checked_in.lines()).position(|(generated, checked_in)| generated != checked_in);
    let file = file.file_name().unwrap_or_default().display();
    assert!(
        generated == checked_in,
        "openapi/{file} differs from the generated document (line {differs:?}); run `make openapi` and review the difference"
    );
}

/// Asserts that every reference resolves and that operation ids are unique.
pub fn assert_valid(document: &Value) {
    let mut found = BTreeSet::new();
    references(document, &mut found);
    for target in found {
        assert!(document.pointer(target.trim_start_matches('#')).is_some(), "{target} does not resolve");
    }
    let mut ids = BTreeSet::new();
    for (path, operations) in document["paths"].as_object().into_iter().flatten() {
        for (method, operation) in operations.as_object().into_iter().flatten() {
            assert!(ids.insert(operation["operationId"].as_str()), "{method} {path} has a duplicate operationId");
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
