//! Parsing of untrusted JSON. An error names the field and the expected type, and repeats no string values, which may be secrets.

use std::{fmt, marker::PhantomData};

use serde::{
    Deserialize, Deserializer,
    de::{DeserializeOwned, MapAccess, Visitor, value::MapAccessDeserializer},
};

use crate::{ApiError, secret::redact};

/// Maximum length of a name from the request that an error repeats, in characters.
const MAX_REPEATED_CHARS: usize = 64;

/// Parses a request body, which must be an object.
pub fn read_object<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    // serde would accept a list as the fields of a struct, in order.
    if bytes.trim_ascii_start().first() != Some(&b'{') {
        return Err(ApiError::invalid("the body: must be a JSON object"));
    }
    let mut text = serde_json::Deserializer::from_slice(bytes);
    let value = serde_path_to_error::deserialize(&mut text).map_err(|e| {
        let path = e.path().to_string();
        match e.inner().classify() {
            serde_json::error::Category::Data => ApiError::invalid(describe_parse_error(&path, &e.inner().to_string())),
            _ => not_json(e.inner()),
        }
    })?;
    text.end().map_err(|e| not_json(&e))?;
    Ok(value)
}

/// Refuses the body of a request whose route accepts none: a field in it might be meant as a restriction. Empty bodies and `{}` pass.
pub fn must_be_empty(bytes: &[u8]) -> Result<(), ApiError> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct NoFields {}
    match bytes {
        [] => Ok(()),
        bytes => {
            read_object::<NoFields>(bytes).map(drop).map_err(|e| ApiError::invalid(format!("{}; this route takes no body", e.message)))
        }
    }
}

/// For `deserialize_with` on a nested object: refuses a list, which serde would accept as the object's fields.
pub fn object<'de, D: Deserializer<'de>, T: Deserialize<'de>>(from: D) -> Result<T, D::Error> {
    Object::deserialize(from).map(|Object(value)| value)
}

/// As [`object`], for a list of objects.
pub fn objects<'de, D: Deserializer<'de>, T: Deserialize<'de>>(from: D) -> Result<Vec<T>, D::Error> {
    Ok(Vec::deserialize(from)?.into_iter().map(|Object(value)| value).collect())
}

struct Object<T>(T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Fields<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Fields<T> {
            type Value = T;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, fields: A) -> Result<T, A::Error> {
                T::deserialize(MapAccessDeserializer::new(fields))
            }
        }
        from.deserialize_map(Fields(PhantomData)).map(Object)
    }
}

fn not_json(e: &serde_json::Error) -> ApiError {
    ApiError::invalid(format!("the body: is not JSON: {e}"))
}

/// Rephrases a serde error about a field for the client that sent it.
pub fn describe_parse_error(path: &str, message: &str) -> String {
    let message = message.rfind(" at line ").map_or(message, |i| &message[..i]);
    let quoted = |prefix: &str| message.strip_prefix(prefix).and_then(|rest| rest.split_once('`'));
    let field = if matches!(path, "" | "." | "?") { "the body" } else { path };
    if let Some((name, _)) = quoted("missing field `") {
        return if field == "the body" { format!("{name}: is missing") } else { format!("{field}.{name}: is missing") };
    }
    if let Some((name, rest)) = quoted("unknown field `") {
        return format!(
            "{}: is not a field of this request{}",
            cut(name),
            rest.replace(", expected", "; known are").replace("one of ", "")
        );
    }
    if let Some((name, _)) = quoted("duplicate field `") {
        return format!("{name}: appears twice");
    }
    if let Some((word, rest)) = quoted("unknown variant `") {
        return format!("{field}: `{}` is not known{}", cut(word), rest.replace(", expected", "; it must be"));
    }
    let wrong = message.strip_prefix("invalid type: ").or_else(|| message.strip_prefix("invalid value: "));
    match wrong.and_then(|w| w.rsplit_once(", expected ")) {
        Some((given, expected)) => format!("{field}: must be {}, not {}", expectation(expected), kind(given)),
        None => format!("{field}: {message}"),
    }
}

/// Error for a query parameter that the route does not accept.
pub fn unknown_parameter<S: AsRef<str>>(name: &str, known: &[S]) -> ApiError {
    let known: Vec<String> = known.iter().map(|name| format!("`{}`", name.as_ref())).collect();
    let known = if known.is_empty() { ", which takes none".to_owned() } else { format!("; known are {}", known.join(", ")) };
    ApiError::invalid(format!("{}: is not a query parameter of this route{known}", cut(name)))
}

fn expectation(expected: &str) -> &str {
    match expected {
        "a sequence" => "a list",
        "a map" => "an object",
        "f32" | "f64" => "a number",
        "u8" | "u16" | "u32" | "u64" | "usize" => "a whole number, 0 or more and not too large",
        e if e.starts_with("struct ") => "an object",
        other => other,
    }
}

fn kind(given: &str) -> String {
    match given.split_once([' ', '`']) {
        Some(("string", _)) => "a string".to_owned(),
        Some(("integer" | "floating" | "boolean", rest)) => cut(rest.trim_start_matches("point ").trim_matches('`')),
        _ => match given {
            "sequence" => "a list".to_owned(),
            "map" => "an object".to_owned(),
            other => cut(other),
        },
    }
}

/// Redacts before truncating, because a truncated key would no longer be recognized as one.
fn cut(word: &str) -> String {
    redact(word).chars().take(MAX_REPEATED_CHARS).collect()
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;
    use crate::{
        key::CreateKey,
        session::{Access, NegotiateRequest},
    };

    #[derive(Debug, Deserialize)]
    #[allow(dead_code, reason = "only the refusals are looked at")]
    struct Nested {
        list: Vec<Inner>,
    }
    #[derive(Debug, Deserialize)]
    #[allow(dead_code, reason = "only the refusals are looked at")]
    struct Inner {
        access: Access,
    }

    #[test]
    fn an_error_names_the_field_and_the_expected_value() {
        let message = |text: &str| read_object::<NegotiateRequest>(text.as_bytes()).unwrap_err().message;
        assert_eq!(message("[]"), "the body: must be a JSON object");
        assert_eq!(message(""), "the body: must be a JSON object");
        assert_eq!(message("{"), "the body: is not JSON: EOF while parsing an object at line 1 column 1");
        assert_eq!(message(r#"{"mode": "get"}"#), "thread_id: is missing");
        assert_eq!(message(r#"{"thread_id": 3}"#), "thread_id: must be a string, not 3");
        assert_eq!(
            message(r#"{"thread_id": "t", "mode": "grab"}"#),
            "mode: `grab` is not known; it must be one of `get`, `ensure`, `create_only`"
        );
        assert_eq!(message(r#"{"thread_id": "t", "mode": "get", "scopes": "fs"}"#), "scopes: must be a list, not a string");
        assert_eq!(message(r#"{"thread_id": "t", "ttl": -1}"#), "ttl: must be a whole number, 0 or more and not too large, not -1");
        assert_eq!(message(r#"{"thread_id": "t", "thread_id": "t"}"#), "thread_id: appears twice");
        let key = read_object::<CreateKey>(br#"{"nam": "x"}"#).unwrap_err().message;
        assert_eq!(key, "nam: is not a field of this request; known are `name`, `kind`, `workspace`, `expires_at`");
        let nested = read_object::<Nested>(br#"{"list": [{"access": "all"}]}"#).unwrap_err().message;
        assert_eq!(nested, "list[0].access: `all` is not known; it must be `workspace` or `owner`");
    }

    #[test]
    fn a_body_of_a_route_that_takes_none_must_be_empty() {
        must_be_empty(b"").unwrap();
        must_be_empty(b" {} ").unwrap();
        let message = must_be_empty(br#"{"dry_run": true}"#).unwrap_err().message;
        assert!(message.starts_with("dry_run: ") && message.ends_with("takes no body"), "{message}");
        must_be_empty(b"[]").unwrap_err();
    }

    #[test]
    fn string_values_are_not_repeated_in_errors() {
        let message = read_object::<NegotiateRequest>(br#"{"thread_id": "t", "ttl": "cbx_secret"}"#).unwrap_err().message;
        assert!(!message.contains("secret"), "{message}");
    }

    #[test]
    fn an_api_key_used_as_a_field_name_is_redacted_before_truncation() {
        let key = format!("cbx_{}_{}", "0".repeat(26), "k".repeat(43));
        let message = read_object::<CreateKey>(format!(r#"{{"{key}": 1}}"#).as_bytes()).unwrap_err().message;
        assert!(message.contains("is not a field of this request") && !message.contains("kkk"), "{message}");
        assert!(!unknown_parameter(&key, &["limit"]).message.contains("kkk"));
    }

    #[test]
    fn a_list_is_refused_in_place_of_a_nested_object() {
        #[derive(Debug, Default, Deserialize)]
        struct Counted {
            count: u32,
        }
        #[derive(Debug, Deserialize)]
        struct Outer {
            #[serde(default, deserialize_with = "object")]
            one: Counted,
            #[serde(default, deserialize_with = "objects")]
            many: Vec<Counted>,
        }
        let read = |text: &str| read_object::<Outer>(text.as_bytes()).map(|o| (o.one.count, o.many.len()));
        assert_eq!(read(r#"{"one": {"count": 3}, "many": [{"count": 1}]}"#).unwrap(), (3, 1));
        assert_eq!(read("{}").unwrap(), (0, 0));
        for text in [r#"{"one": [3]}"#, r#"{"many": [[3]]}"#, r#"{"many": {"count": 1}}"#] {
            read(text).unwrap_err();
        }
    }
}
