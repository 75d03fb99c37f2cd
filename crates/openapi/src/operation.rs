//! One operation of the document: a method of a path with its parameters, bodies, responses and errors, and its OpenAPI
//! representation.

use std::collections::BTreeMap;

use cobox_protocol::{Capability, Envelope, ErrorCode};
use schemars::JsonSchema;
use serde_json::{Map, Value, json};

use crate::{Schemas, Shape, read, written};
use ErrorCode::*;

/// Errors that every route behind a token may return.
const TOKEN_ERRORS: [ErrorCode; 9] = [
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
    location: &'static str,
    name: &'static str,
    about: &'static str,
    schema: Value,
    is_required: bool,
}

impl Parameter {
    pub fn path(name: &'static str, about: &'static str) -> Self {
        Self { location: "path", name, about, schema: json!({ "type": "string" }), is_required: true }
    }
    pub fn query(name: &'static str, about: &'static str) -> Self {
        Self { location: "query", name, about, schema: json!({ "type": "string" }), is_required: false }
    }
    pub fn header(name: &'static str, about: &'static str) -> Self {
        Self { location: "header", name, about, schema: json!({ "type": "string" }), is_required: false }
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
        json!({ "in": self.location, "name": self.name, "description": self.about, "required": self.is_required, "schema": self.schema })
    }
}

struct ResponseSpec {
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
    /// Alternative security schemes with the required scopes; empty for routes without authentication.
    security: Vec<(&'static str, Vec<&'static str>)>,
    parameters: Vec<Parameter>,
    request: Vec<(&'static str, Shape)>,
    is_body_optional: bool,
    answers: BTreeMap<u16, ResponseSpec>,
    /// Description of the response for every status that isn't listed.
    any_response: Option<&'static str>,
    errors: Vec<ErrorCode>,
    error_shape: Shape,
    /// Replaced for dialects whose statuses differ from those of the codes.
    status_of: fn(ErrorCode) -> u16,
    /// Formats of error responses that differ from the usual one, by status.
    special_errors: BTreeMap<u16, Shape>,
    /// Prefix for the names of error responses that don't use the standard envelope.
    dialect: &'static str,
    events: Vec<(&'static str, Shape)>,
    frames: Option<(Shape, Shape)>,
}

impl Operation {
    /// `id` is the operation's name in generated clients.
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
            any_response: None,
            errors: Vec::new(),
            error_shape: written::<Envelope>(),
            status_of: ErrorCode::status,
            special_errors: BTreeMap::new(),
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
    /// Requires a token with these capabilities, and adds the errors that a token can cause.
    pub fn needs(mut self, capabilities: &[Capability]) -> Self {
        self.needs = capabilities.to_vec();
        self.security = vec![("token", capabilities.iter().map(|c| c.as_str()).collect())];
        self.errors(&TOKEN_ERRORS)
    }
    /// Requires one of these schemes, without scopes.
    pub fn security(mut self, schemes: &[&'static str]) -> Self {
        self.security = schemes.iter().map(|scheme| (*scheme, Vec::new())).collect();
        self
    }
    pub fn with(mut self, parameters: impl IntoIterator<Item = Parameter>) -> Self {
        self.parameters.extend(parameters);
        self
    }
    pub fn request_body<T: JsonSchema>(self) -> Self {
        self.request_body_as("application/json", read::<T>()).errors(&[TooLarge])
    }
    pub fn request_body_as(mut self, media: &'static str, shape: Shape) -> Self {
        self.request.push((media, shape));
        self
    }
    pub fn body_optional(mut self) -> Self {
        self.is_body_optional = true;
        self
    }
    pub fn response<T: JsonSchema>(self, status: u16, about: &'static str) -> Self {
        self.response_as(status, about, "application/json", written::<T>())
    }
    pub fn response_as(mut self, status: u16, about: &'static str, media: &'static str, shape: Shape) -> Self {
        let answer = self.answers.entry(status).or_insert_with(|| ResponseSpec { about, content: Vec::new(), headers: Vec::new() });
        answer.content.push((media, shape));
        self
    }
    pub fn empty_response(mut self, status: u16, about: &'static str) -> Self {
        self.answers.insert(status, ResponseSpec { about, content: Vec::new(), headers: Vec::new() });
        self
    }
    /// Any status and any body, because another program answers.
    pub fn any_response(mut self, about: &'static str) -> Self {
        self.any_response = Some(about);
        self
    }
    pub fn response_headers(mut self, status: u16, headers: &[(&'static str, &'static str)]) -> Self {
        if let Some(answer) = self.answers.get_mut(&status) {
            answer.headers.extend_from_slice(headers);
        }
        self
    }
    pub fn errors(mut self, codes: &[ErrorCode]) -> Self {
        self.errors.extend_from_slice(codes);
        self
    }
    pub fn error_format(mut self, dialect: &'static str, shape: Shape) -> Self {
        self.error_shape = shape;
        if self.method != "head" {
            self.dialect = dialect;
        }
        self
    }
    /// Replaces the codes' own statuses.
    pub fn statuses(mut self, status_of: fn(ErrorCode) -> u16) -> Self {
        self.status_of = status_of;
        self
    }
    pub fn error_format_of(mut self, status: u16, shape: Shape) -> Self {
        self.special_errors.insert(status, shape);
        self
    }
    /// The events of a `text/event-stream` response, by the name in their `event:` line.
    pub fn events(mut self, events: impl IntoIterator<Item = (&'static str, Shape)>) -> Self {
        self.events.extend(events);
        self
    }
    /// Makes this a WebSocket, with the frames that client and boxd send.
    pub fn websocket(mut self, client: Shape, server: Shape) -> Self {
        self.frames = Some((client, server));
        self.empty_response(101, "The connection is a WebSocket from here on.")
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
            let mut response = json!({ "description": answer.about, "headers": common_headers() });
            if !answer.content.is_empty() {
                response["content"] = content(&answer.content, schemas);
            }
            for (name, about) in &answer.headers {
                response["headers"][*name] = json!({ "description": about, "schema": { "type": "string" } });
            }
            responses.insert(status.to_string(), response);
        }
        if let Some(about) = self.any_response {
            responses.insert("default".to_owned(), json!({ "description": about, "headers": common_headers() }));
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
            if !schemas.error_responses.contains_key(&name) {
                let error_response = self.error_response(status, &codes, schemas);
                schemas.error_responses.insert(name.clone(), error_response);
            }
            responses.insert(status.to_string(), json!({ "$ref": format!("#/components/responses/{name}") }));
        }
        json!(responses)
    }

    fn error_response(&self, status: u16, codes: &[&str], schemas: &mut Schemas) -> Value {
        let mut error_response = json!({ "description": codes.join(", "), "headers": common_headers() });
        // The response to HEAD has only a status and headers.
        if self.method != "head" {
            let shape = self.special_errors.get(&status).unwrap_or(&self.error_shape);
            error_response["content"] = content(&[("application/json", shape.clone())], schemas);
        }
        let is_retryable = codes.iter().all(|c| [SandboxStarting.as_str(), RateLimited.as_str()].contains(c));
        if is_retryable {
            error_response["headers"]["Retry-After"] = json!({ "$ref": "#/components/headers/Retry-After" });
        }
        if status == 401 {
            error_response["headers"]["WWW-Authenticate"] = json!({ "description": "`Bearer`.", "schema": { "type": "string" } });
        }
        error_response
    }
}

fn common_headers() -> Value {
    json!({ "X-Request-Id": { "$ref": "#/components/headers/X-Request-Id" } })
}

fn content(content: &[(&'static str, Shape)], schemas: &mut Schemas) -> Value {
    let each = content.iter().map(|(media, shape)| ((*media).to_owned(), json!({ "schema": shape.render(schemas) })));
    Value::Object(each.collect())
}
