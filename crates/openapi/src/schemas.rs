//! Generates and collects the schemas of types while a document is written.

use std::collections::BTreeMap;

use schemars::{
    JsonSchema, Schema, SchemaGenerator,
    generate::{Contract, SchemaSettings},
};
use serde_json::{Value, json};

/// Separate generators for types that are read and those that are written: they differ in which fields are required.
pub struct Schemas {
    read: SchemaGenerator,
    written: SchemaGenerator,
    /// Error responses that many routes share, by their codes.
    pub(crate) error_responses: BTreeMap<String, Value>,
}

impl Default for Schemas {
    fn default() -> Self {
        let settings = |contract: Contract| {
            SchemaSettings::draft2020_12().with(|s| {
                s.definitions_path = "/components/schemas".into();
                s.meta_schema = None;
                s.contract = contract.clone();
            })
        };
        Self {
            read: settings(Contract::Deserialize).into_generator(),
            written: settings(Contract::Serialize).into_generator(),
            error_responses: BTreeMap::new(),
        }
    }
}

impl Schemas {
    /// All types and error responses used so far, by their names. A type that is both read and written must have the
    /// same schema in both directions.
    pub fn into_components(mut self) -> (BTreeMap<String, Value>, BTreeMap<String, Value>) {
        let mut all: BTreeMap<String, Value> = self.written.take_definitions(true).into_iter().collect();
        for (name, schema) in self.read.take_definitions(true) {
            if let Some(other) = all.insert(name.clone(), schema.clone()) {
                assert_eq!(other, schema, "{name} has different schemas for reading and writing; use separate types");
            }
        }
        (all, self.error_responses)
    }
}

/// A schema that is generated when the document is rendered.
#[derive(Clone)]
pub enum Shape {
    Read(fn(&mut SchemaGenerator) -> Schema),
    Written(fn(&mut SchemaGenerator) -> Schema),
    Plain(Value),
    /// A shape with additional constraints.
    Constrained(Box<Shape>, Value),
}

pub fn read<T: JsonSchema>() -> Shape {
    Shape::Read(|g| g.subschema_for::<T>())
}

pub fn written<T: JsonSchema>() -> Shape {
    Shape::Written(|g| g.subschema_for::<T>())
}

pub fn bytes() -> Shape {
    Shape::Plain(json!({ "type": "string", "format": "binary" }))
}

impl Shape {
    pub fn and(self, more: Value) -> Self {
        Shape::Constrained(Box::new(self), more)
    }

    pub(crate) fn render(&self, schemas: &mut Schemas) -> Value {
        match self {
            Shape::Read(make) => make(&mut schemas.read).to_value(),
            Shape::Written(make) => make(&mut schemas.written).to_value(),
            Shape::Plain(value) => value.clone(),
            Shape::Constrained(shape, more) => json!({ "allOf": [shape.render(schemas), more] }),
        }
    }
}
