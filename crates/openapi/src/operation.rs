//! One operation of the document: a method of a path, what it takes, what it answers, and how all of it reads as OpenAPI.

use std::collections::BTreeMap;

use cobox_protocol::{Capability, Envelope, ErrorCode};
use schemars::JsonSchema;
use serde_json::{Map, Value, json};

use crate::{Schemas, Shape, read, written};
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
    /// The schemes of which one must be satisfied, with the scopes it needs; none for whoever comes.
    security: Vec<(&'static str, Vec<&'static str>)>,
    parameters: Vec<Parameter>,
    request: Vec<(&'static str, Shape)>,
    is_body_optional: bool,
    answers: BTreeMap<u16, Answer>,
    /// What stands for every status that isn't named.
    anything: Option<&'static str>,
    errors: Vec<ErrorCode>,
    error_shape: Shape,
    /// Where a dialect has others than the codes themselves.
    status_of: fn(ErrorCode) -> u16,
    /// What an error of a status looks like where it is none of the usual.
    odd_errors: BTreeMap<u16, Shape>,
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
            security: Vec::new(),
            parameters: Vec::new(),
            request: Vec::new(),
            is_body_optional: false,
            answers: BTreeMap::new(),
            anything: None,
            errors: Vec::new(),
            error_shape: written::<Envelope>(),
            status_of: ErrorCode::status,
            odd_errors: BTreeMap::new(),
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
        self.security = vec![("token", capabilities.iter().map(|c| c.as_str()).collect())];
        self.fails(&OF_ANY_TOKEN)
    }
    /// Behind one of these schemes, whatever it allows.
    pub fn behind(mut self, schemes: &[&'static str]) -> Self {
        self.security = schemes.iter().map(|scheme| (*scheme, Vec::new())).collect();
        self
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
    /// Any status and any body: somebody else answers.
    pub fn gives_anything(mut self, about: &'static str) -> Self {
        self.anything = Some(about);
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
    /// In place of the codes' own statuses.
    pub fn statuses(mut self, status_of: fn(ErrorCode) -> u16) -> Self {
        self.status_of = status_of;
        self
    }
    pub fn error_looks_like(mut self, status: u16, shape: Shape) -> Self {
        self.odd_errors.insert(status, shape);
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
        let security = self.security.iter().map(|(scheme, scopes)| json!({ *scheme: scopes }));
        out.insert("security".into(), security.collect());
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
            let mut response = json!({ "description": answer.about, "headers": told_always() });
            if !answer.content.is_empty() {
                response["content"] = content(&answer.content, schemas);
            }
            for (name, about) in &answer.headers {
                response["headers"][*name] = json!({ "description": about, "schema": { "type": "string" } });
            }
            responses.insert(status.to_string(), response);
        }
        if let Some(about) = self.anything {
            responses.insert("default".to_owned(), json!({ "description": about, "headers": told_always() }));
        }
        let mut codes: BTreeMap<u16, Vec<&str>> = BTreeMap::new();
        for code in &self.errors {
            let of_status = codes.entry((self.status_of)(*code)).or_default();
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
        let mut refusal = json!({ "description": codes.join(", "), "headers": told_always() });
        // A HEAD is answered by status and headers alone.
        if self.method != "head" {
            let shape = self.odd_errors.get(&status).unwrap_or(&self.error_shape);
            refusal["content"] = content(&[("application/json", shape.clone())], schemas);
        }
        let is_to_come_again = codes.iter().all(|c| [SandboxStarting.as_str(), RateLimited.as_str()].contains(c));
        if is_to_come_again {
            refusal["headers"]["Retry-After"] = json!({ "$ref": "#/components/headers/Retry-After" });
        }
        if status == 401 {
            refusal["headers"]["WWW-Authenticate"] = json!({ "description": "`Bearer`.", "schema": { "type": "string" } });
        }
        refusal
    }
}

fn told_always() -> Value {
    json!({ "X-Request-Id": { "$ref": "#/components/headers/X-Request-Id" } })
}

fn content(content: &[(&'static str, Shape)], schemas: &mut Schemas) -> Value {
    let each = content.iter().map(|(media, shape)| ((*media).to_owned(), json!({ "schema": shape.render(schemas) })));
    Value::Object(each.collect())
}
