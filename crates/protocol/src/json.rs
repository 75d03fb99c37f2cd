//! Reading a stranger's JSON: a refusal names the field and what is expected of it, and repeats no strings, which may be secrets.

use std::{fmt, marker::PhantomData};

use serde::{
    Deserialize, Deserializer,
    de::{DeserializeOwned, MapAccess, Visitor, value::MapAccessDeserializer},
};

use crate::{ApiError, secret::redact};

/// Longest word of a caller's that a refusal repeats, in characters.
const MAX_REPEATED_CHARS: usize = 64;

/// Reads a request's body, which is always an object.
pub fn read_object<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    // A list would be taken for an object's fields in their order.
    if bytes.trim_ascii_start().first() != Some(&b'{') {
        return Err(ApiError::invalid("the body: must be a JSON object"));
    }
    let mut text = serde_json::Deserializer::from_slice(bytes);
    let value = serde_path_to_error::deserialize(&mut text).map_err(|e| {
        let path = e.path().to_string();
        match e.inner().classify() {
            serde_json::error::Category::Data => ApiError::invalid(in_plain_words(&path, &e.inner().to_string())),
            _ => not_json(e.inner()),
        }
    })?;
    text.end().map_err(|e| not_json(&e))?;
    Ok(value)
}

/// Refuses the body of a request whose route takes none: what it says might be a restriction. Nothing and `{}` say nothing.
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

/// What is an object inside another, for `deserialize_with`: there a list would be taken for its fields too.
pub fn object<'de, D: Deserializer<'de>, T: Deserialize<'de>>(from: D) -> Result<T, D::Error> {
    Object::deserialize(from).map(|Object(value)| value)
}

/// As [`object`], for a list of them.
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

/// What a deserialiser says of a field, as one would say it to whoever sent it.
pub fn in_plain_words(path: &str, said: &str) -> String {
    let said = said.rfind(" at line ").map_or(said, |i| &said[..i]);
    let quoted = |prefix: &str| said.strip_prefix(prefix).and_then(|rest| rest.split_once('`'));
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
        return format!("{name}: is there twice");
    }
    if let Some((word, rest)) = quoted("unknown variant `") {
        return format!("{field}: `{}` is not known{}", cut(word), rest.replace(", expected", "; it must be"));
    }
    let wrong = said.strip_prefix("invalid type: ").or_else(|| said.strip_prefix("invalid value: "));
    match wrong.and_then(|w| w.rsplit_once(", expected ")) {
        Some((given, expected)) => format!("{field}: must be {}, not {}", expectation(expected), kind(given)),
        None => format!("{field}: {said}"),
    }
}

/// Refuses a query parameter that a route doesn't take.
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

/// Redacted before it is cut: a part of a key could no longer be told from another word.
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
    fn a_refusal_names_the_field_and_what_it_must_be() {
        let said = |text: &str| read_object::<NegotiateRequest>(text.as_bytes()).unwrap_err().message;
        assert_eq!(said("[]"), "the body: must be a JSON object");
        assert_eq!(said(""), "the body: must be a JSON object");
        assert_eq!(said("{"), "the body: is not JSON: EOF while parsing an object at line 1 column 1");
        assert_eq!(said(r#"{"mode": "get"}"#), "thread_id: is missing");
        assert_eq!(said(r#"{"thread_id": 3}"#), "thread_id: must be a string, not 3");
        assert_eq!(
            said(r#"{"thread_id": "t", "mode": "grab"}"#),
            "mode: `grab` is not known; it must be one of `get`, `ensure`, `create_only`"
        );
        assert_eq!(said(r#"{"thread_id": "t", "mode": "get", "scopes": "fs"}"#), "scopes: must be a list, not a string");
        assert_eq!(said(r#"{"thread_id": "t", "ttl": -1}"#), "ttl: must be a whole number, 0 or more and not too large, not -1");
        assert_eq!(said(r#"{"thread_id": "t", "thread_id": "t"}"#), "thread_id: is there twice");
        let key = read_object::<CreateKey>(br#"{"nam": "x"}"#).unwrap_err().message;
        assert_eq!(key, "nam: is not a field of this request; known are `name`, `kind`, `workspace`, `expires_at`");
        let nested = read_object::<Nested>(br#"{"list": [{"access": "all"}]}"#).unwrap_err().message;
        assert_eq!(nested, "list[0].access: `all` is not known; it must be `workspace` or `owner`");
    }

    #[test]
    fn a_body_that_is_not_wanted_must_say_nothing() {
        must_be_empty(b"").unwrap();
        must_be_empty(b" {} ").unwrap();
        let said = must_be_empty(br#"{"dry_run": true}"#).unwrap_err().message;
        assert!(said.starts_with("dry_run: is not a field of this request") && said.ends_with("takes no body"), "{said}");
        must_be_empty(b"[]").unwrap_err();
    }

    #[test]
    fn what_was_sent_as_a_string_is_not_repeated() {
        let said = read_object::<NegotiateRequest>(br#"{"thread_id": "t", "ttl": "cbx_secret"}"#).unwrap_err().message;
        assert!(!said.contains("secret"), "{said}");
    }

    #[test]
    fn a_key_in_the_place_of_a_name_is_not_repeated_in_part() {
        let key = format!("cbx_{}_{}", "0".repeat(26), "k".repeat(43));
        let said = read_object::<CreateKey>(format!(r#"{{"{key}": 1}}"#).as_bytes()).unwrap_err().message;
        assert!(said.contains("is not a field of this request") && !said.contains("kkk"), "{said}");
        assert!(!unknown_parameter(&key, &["limit"]).message.contains("kkk"));
    }

    #[test]
    fn a_list_is_no_object_inside_another_either() {
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
