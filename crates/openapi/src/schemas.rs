//! Where the schemas of types are made and kept while a document is written.

use std::collections::BTreeMap;

use schemars::{
    JsonSchema, Schema, SchemaGenerator,
    generate::{Contract, SchemaSettings},
};
use serde_json::{Value, json};

/// What is read and what is written differ in which fields are always there.
pub struct Schemas {
    read: SchemaGenerator,
    written: SchemaGenerator,
    /// Refusals that many routes have in common, by their codes.
    pub(crate) refusals: BTreeMap<String, Value>,
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
            refusals: BTreeMap::new(),
        }
    }
}

impl Schemas {
    /// All types and refusals met so far, by their names. A type that is both read and written must look the same.
    pub fn into_components(mut self) -> (BTreeMap<String, Value>, BTreeMap<String, Value>) {
        let mut all: BTreeMap<String, Value> = self.written.take_definitions(true).into_iter().collect();
        for (name, schema) in self.read.take_definitions(true) {
            if let Some(other) = all.insert(name.clone(), schema.clone()) {
                assert_eq!(other, schema, "{name} is read and written, and not alike; give the two directions types of their own");
            }
        }
        (all, self.refusals)
    }
}

/// A schema, once there is a generator to make it with.
#[derive(Clone)]
pub enum Shape {
    Read(fn(&mut SchemaGenerator) -> Schema),
    Written(fn(&mut SchemaGenerator) -> Schema),
    Plain(Value),
    /// All of a shape, and more asked of it.
    Narrowed(Box<Shape>, Value),
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
        Shape::Narrowed(Box::new(self), more)
    }

    pub(crate) fn render(&self, schemas: &mut Schemas) -> Value {
        match self {
            Shape::Read(make) => make(&mut schemas.read).to_value(),
            Shape::Written(make) => make(&mut schemas.written).to_value(),
            Shape::Plain(value) => value.clone(),
            Shape::Narrowed(shape, more) => json!({ "allOf": [shape.render(schemas), more] }),
        }
    }
}
