//! One operation of the document: a method of a path, what it takes, what it answers, and how all of it reads as OpenAPI.

use std::collections::BTreeMap;

use cobox_protocol::{Capability, Envelope, ErrorCode};
use schemars::{
    JsonSchema, Schema, SchemaGenerator,
    generate::{Contract, SchemaSettings},
};
use serde_json::{Map, Value, json};

use ErrorCode::*;

/// What every route behind a token may answer.
const OF_ANY_TOKEN: [ErrorCode; 9] = [
    InvalidRequest,
    Unauthenticated,
    TokenExpired,
    TokenRevoked,
    CapabilityDenied,
    SessionExpired,
    RateLimited,
    Internal,
    ProviderUnavailable,
];

/// Where the schemas of types are made and kept: what is read and what is written differ in which fields are always there.
pub struct Schemas {
    read: SchemaGenerator,
    written: SchemaGenerator,
    /// Refusals that many routes have in common, by their codes.
    refusals: BTreeMap<String, Value>,
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
    fn render(&self, schemas: &mut Schemas) -> Value {
        match self {
            Shape::Read(make) => make(&mut schemas.read).to_value(),
            Shape::Written(make) => make(&mut schemas.written).to_value(),
            Shape::Plain(value) => value.clone(),
        }
    }
}

pub struct Parameter {
    place: &'static str,
    name: &'static str,
    about: &'static str,
    schema: Value,
    is_required: bool,
}

impl Parameter {
    pub fn path(name: &'static str, about: &'static str) -> Self {
        Self { place: "path", name, about, schema: json!({ "type": "string" }), is_required: true }
    }
    pub fn query(name: &'static str, about: &'static str) -> Self {
        Self { place: "query", name, about, schema: json!({ "type": "string" }), is_required: false }
    }
    pub fn header(name: &'static str, about: &'static str) -> Self {
        Self { place: "header", name, about, schema: json!({ "type": "string" }), is_required: false }
    }
    pub fn of(mut self, schema: Value) -> Self {
        self.schema = schema;
        self
    }
    pub fn required(mut self) -> Self {
        self.is_required = true;
        self
    }
    fn render(&self) -> Value {
        json!({ "in": self.place, "name": self.name, "description": self.about, "required": self.is_required, "schema": self.schema })
    }
}

struct Answer {
    about: &'static str,
    content: Vec<(&'static str, Shape)>,
    headers: Vec<(&'static str, &'static str)>,
}

/// A method of a path.
pub struct Operation {
    pub method: &'static str,
    pub path: &'static str,
    id: &'static str,
    tag: &'static str,
    summary: &'static str,
    about: &'static str,
    needs: Vec<Capability>,
    parameters: Vec<Parameter>,
    request: Vec<(&'static str, Shape)>,
    is_body_optional: bool,
    answers: BTreeMap<u16, Answer>,
    errors: Vec<ErrorCode>,
    error_shape: Shape,
    /// Before the name of a refusal that is not in our own envelope.
    dialect: &'static str,
    events: Vec<(&'static str, Shape)>,
    frames: Option<(Shape, Shape)>,
}

impl Operation {
    /// `id` is what generated clients call it.
    pub fn new(method: &'static str, path: &'static str, id: &'static str, summary: &'static str) -> Self {
        Self {
            method,
            path,
            id,
            tag: "",
            summary,
            about: "",
            needs: Vec::new(),
            parameters: Vec::new(),
            request: Vec::new(),
            is_body_optional: false,
            answers: BTreeMap::new(),
            errors: Vec::new(),
            error_shape: written::<Envelope>(),
            dialect: if method == "head" { "head." } else { "" },
            events: Vec::new(),
            frames: None,
        }
    }

    pub fn tag(mut self, tag: &'static str) -> Self {
        self.tag = tag;
        self
    }
    pub fn about(mut self, about: &'static str) -> Self {
        self.about = about;
        self
    }
    /// Behind a token that has these, with all that a token can be refused for.
    pub fn needs(mut self, capabilities: &[Capability]) -> Self {
        self.needs = capabilities.to_vec();
        self.fails(&OF_ANY_TOKEN)
    }
    pub fn with(mut self, parameters: impl IntoIterator<Item = Parameter>) -> Self {
        self.parameters.extend(parameters);
        self
    }
    pub fn takes<T: JsonSchema>(self) -> Self {
        self.takes_as("application/json", read::<T>()).fails(&[TooLarge])
    }
    pub fn takes_as(mut self, media: &'static str, shape: Shape) -> Self {
        self.request.push((media, shape));
        self
    }
    pub fn body_optional(mut self) -> Self {
        self.is_body_optional = true;
        self
    }
    pub fn gives<T: JsonSchema>(self, status: u16, about: &'static str) -> Self {
        self.gives_as(status, about, "application/json", written::<T>())
    }
    pub fn gives_as(mut self, status: u16, about: &'static str, media: &'static str, shape: Shape) -> Self {
        let answer = self.answers.entry(status).or_insert_with(|| Answer { about, content: Vec::new(), headers: Vec::new() });
        answer.content.push((media, shape));
        self
    }
    pub fn gives_nothing(mut self, status: u16, about: &'static str) -> Self {
        self.answers.insert(status, Answer { about, content: Vec::new(), headers: Vec::new() });
        self
    }
    pub fn telling(mut self, status: u16, headers: &[(&'static str, &'static str)]) -> Self {
        if let Some(answer) = self.answers.get_mut(&status) {
            answer.headers.extend_from_slice(headers);
        }
        self
    }
    pub fn fails(mut self, codes: &[ErrorCode]) -> Self {
        self.errors.extend_from_slice(codes);
        self
    }
    pub fn errors_look_like(mut self, dialect: &'static str, shape: Shape) -> Self {
        self.error_shape = shape;
        if self.method != "head" {
            self.dialect = dialect;
        }
        self
    }
    /// The events of a `text/event-stream` answer, by the word of their `event:` line.
    pub fn events(mut self, events: impl IntoIterator<Item = (&'static str, Shape)>) -> Self {
        self.events.extend(events);
        self
    }
    /// A WebSocket, and what a client and boxd say on it.
    pub fn speaks(mut self, client: Shape, server: Shape) -> Self {
        self.frames = Some((client, server));
        self.gives_nothing(101, "The connection is a WebSocket from here on.")
    }

    pub fn needed(&self) -> &[Capability] {
        &self.needs
    }
    pub fn is_socket(&self) -> bool {
        self.frames.is_some()
    }

    pub fn render(&self, schemas: &mut Schemas) -> Value {
        let mut out = Map::new();
        out.insert("operationId".into(), json!(self.id));
        out.insert("tags".into(), json!([self.tag]));
        out.insert("summary".into(), json!(self.summary));
        if !self.about.is_empty() {
            out.insert("description".into(), json!(self.about));
        }
        let words: Vec<&str> = self.needs.iter().map(|c| c.word()).collect();
        out.insert("security".into(), if words.is_empty() { json!([]) } else { json!([{ "token": words }]) });
        if !self.parameters.is_empty() {
            out.insert("parameters".into(), self.parameters.iter().map(Parameter::render).collect());
        }
        if !self.request.is_empty() {
            out.insert("requestBody".into(), json!({ "required": !self.is_body_optional, "content": content(&self.request, schemas) }));
        }
        out.insert("responses".into(), self.responses(schemas));
        if !self.events.is_empty() {
            let events: Map<String, Value> = self.events.iter().map(|(word, shape)| ((*word).to_owned(), shape.render(schemas))).collect();
            out.insert("x-events".into(), events.into());
        }
        if let Some((client, server)) = &self.frames {
            out.insert("x-websocket".into(), json!({ "client": client.render(schemas), "server": server.render(schemas) }));
        }
        out.into()
    }

    fn responses(&self, schemas: &mut Schemas) -> Value {
        let mut responses: BTreeMap<String, Value> = BTreeMap::new();
        for (status, answer) in &self.answers {
            let mut response = json!({ "description": answer.about });
            if !answer.content.is_empty() {
                response["content"] = content(&answer.content, schemas);
            }
            for (name, about) in &answer.headers {
                response["headers"][*name] = json!({ "description": about, "schema": { "type": "string" } });
            }
            responses.insert(status.to_string(), response);
        }
        let mut codes: BTreeMap<u16, Vec<&str>> = BTreeMap::new();
        for code in &self.errors {
            let of_status = codes.entry(code.status()).or_default();
            if !of_status.contains(&code.as_str()) {
                of_status.push(code.as_str());
            }
        }
        for (status, codes) in codes {
            let name = [self.dialect, &codes.join(".")].concat();
            if !schemas.refusals.contains_key(&name) {
                let refusal = self.refusal(status, &codes, schemas);
                schemas.refusals.insert(name.clone(), refusal);
            }
            responses.insert(status.to_string(), json!({ "$ref": format!("#/components/responses/{name}") }));
        }
        json!(responses)
    }

    fn refusal(&self, status: u16, codes: &[&str], schemas: &mut Schemas) -> Value {
        let mut refusal = json!({ "description": codes.join(", ") });
        // A HEAD is answered by status and headers alone.
        if self.method != "head" {
            refusal["content"] = content(&[("application/json", self.error_shape.clone())], schemas);
        }
        if status == 429 {
            refusal["headers"]["Retry-After"] = json!({ "description": "Seconds to wait.", "schema": { "type": "integer" } });
        }
        refusal
    }
}

fn content(content: &[(&'static str, Shape)], schemas: &mut Schemas) -> Value {
    let each = content.iter().map(|(media, shape)| ((*media).to_owned(), json!({ "schema": shape.render(schemas) })));
    Value::Object(each.collect())
}
