//! Small steps over JSON text that keep it as text. Every object is checked for members of the same name: two parsers may
//! disagree on which one counts. Errors say what is wrong and never hold a value.

use std::{borrow::Cow, fmt};

use serde::{
    Deserialize, Deserializer,
    de::{Error, MapAccess, Visitor},
};
use serde_json::value::RawValue;

use crate::key::Pointer;

/// The deepest nesting that may be configured: the recursion limit of the JSON parser.
pub(crate) const MAX_DEPTH: usize = 128;

/// A member's name, borrowed unless it has escapes.
pub(crate) struct Name<'a>(pub(crate) Cow<'a, str>);

impl<'de> Deserialize<'de> for Name<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NameVisitor;
        impl<'de> Visitor<'de> for NameVisitor {
            type Value = Name<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }
            fn visit_borrowed_str<E: Error>(self, text: &'de str) -> Result<Name<'de>, E> {
                Ok(Name(Cow::Borrowed(text)))
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Name<'de>, E> {
                Ok(Name(Cow::Owned(text.to_owned())))
            }
        }
        deserializer.deserialize_str(NameVisitor)
    }
}

/// The content of a JSON string.
pub(crate) fn text(json: &str) -> Result<Cow<'_, str>, String> {
    let inner = &json[1..json.len() - 1];
    if memchr::memchr(b'\\', inner.as_bytes()).is_none() {
        return Ok(Cow::Borrowed(inner));
    }
    serde_json::from_str::<Name<'_>>(json).map(|name| name.0).map_err(|_| {
        "a string holds half of a surrogate pair (\\ud800 to \\udfff); send whole characters".to_owned()
    })
}

/// The one JSON value that `text` is, without the white space around it.
pub(crate) fn whole(text: &str) -> Result<&str, String> {
    serde_json::from_str::<&RawValue>(text).map(RawValue::get).map_err(syntax)
}

/// The elements of a JSON array.
pub(crate) fn elements(json: &str) -> Result<Vec<&str>, String> {
    let elements: Vec<&RawValue> = serde_json::from_str(json).map_err(syntax)?;
    Ok(elements.into_iter().map(RawValue::get).collect())
}

/// The members of a JSON object, in order.
pub(crate) fn members(json: &str) -> Result<Vec<(Cow<'_, str>, &str)>, String> {
    struct Members;
    impl<'de> Visitor<'de> for Members {
        type Value = Vec<(Cow<'de, str>, &'de str)>;
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object")
        }
        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut members = Vec::new();
            while let Some((name, value)) = map.next_entry::<Name<'de>, &RawValue>()? {
                members.push((name.0, value.get()));
            }
            Ok(members)
        }
    }
    let mut deserializer = serde_json::Deserializer::from_str(json);
    let members = deserializer.deserialize_map(Members).map_err(syntax)?;
    match repeated(members.iter().map(|(name, _)| name.as_ref())) {
        Some(name) => Err(twice(name)),
        None => Ok(members),
    }
}

/// Follows `steps` into `json`; none where there is nothing.
pub(crate) fn descend<'a>(json: &'a str, steps: &[String]) -> Result<Option<&'a str>, String> {
    let mut here = json;
    for step in steps {
        let next = match here.as_bytes().first() {
            Some(b'{') => members(here)?.into_iter().find(|(name, _)| name == step).map(|(_, value)| value),
            Some(b'[') => match index(step) {
                Some(index) => elements(here)?.get(index).copied(),
                None => None,
            },
            _ => None,
        };
        match next {
            Some(value) => here = value,
            None => return Ok(None),
        }
    }
    Ok(Some(here))
}

/// Refuses members of the same name and nesting deeper than `limit` anywhere in `json`, which is valid JSON. Looks at the
/// text only, so that no number is too big for it.
pub(crate) fn check(json: &str, limit: usize) -> Result<(), String> {
    let bytes = json.as_bytes();
    if !matches!(bytes.first(), Some(b'{' | b'[')) {
        return Ok(());
    }
    // Per open container: where its members' names start, none for an array.
    let mut open: Vec<Option<usize>> = Vec::new();
    let mut names: Vec<Cow<'_, str>> = Vec::new();
    let (mut at, mut name_next) = (0, false);
    while let Some(byte) = bytes.get(at) {
        match byte {
            b'"' => {
                let end = string_end(bytes, at);
                if name_next {
                    names.push(text(&json[at..end])?);
                    name_next = false;
                }
                at = end;
                continue;
            }
            b'{' | b'[' if open.len() == limit => {
                return Err(format!("values are nested deeper than {limit} levels; flatten them"));
            }
            b'{' => {
                open.push(Some(names.len()));
                name_next = true;
            }
            b'[' => open.push(None),
            b'}' | b']' => {
                if let Some(Some(start)) = open.pop() {
                    if let Some(name) = repeated(names[start..].iter().map(AsRef::as_ref)) {
                        return Err(twice(name));
                    }
                    names.truncate(start);
                }
                name_next = false;
            }
            b',' => name_next = matches!(open.last(), Some(Some(_))),
            _ => {}
        }
        at += 1;
    }
    Ok(())
}

/// Behind the closing quote of the string that opens at `at`.
fn string_end(bytes: &[u8], at: usize) -> usize {
    let mut here = at + 1;
    while let Some(offset) = memchr::memchr2(b'"', b'\\', bytes.get(here..).unwrap_or_default()) {
        if bytes[here + offset] == b'"' {
            return here + offset + 1;
        }
        here += offset + 2;
    }
    bytes.len()
}

/// A name that comes twice, if there is one.
pub(crate) fn repeated<'a>(names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let mut names: Vec<&str> = names.collect();
    names.sort_unstable();
    names.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0])
}

/// Says that a member comes twice.
pub(crate) fn twice(name: &str) -> String {
    format!("member {} comes twice; send each member once", shown(name))
}

/// A member's name as messages show it: quoted, escaped, at most 64 characters.
pub(crate) fn shown(name: &str) -> String {
    match name.char_indices().nth(64) {
        Some((end, _)) => format!("{:?}..", &name[..end]),
        None => format!("{name:?}"),
    }
}

/// Names a pointer in a message.
pub(crate) fn at(pointer: &Pointer) -> String {
    if pointer.steps().is_empty() { "the payload".to_owned() } else { format!("{pointer}") }
}

/// What the parser says of malformed text: its words are fixed and hold none of the text.
pub(crate) fn syntax(error: serde_json::Error) -> String {
    if error.is_data() {
        return format!("not valid JSON at line {} column {}; send valid JSON", error.line(), error.column());
    }
    format!("not valid JSON: {error}; send valid JSON")
}

/// An array index as RFC 6901 writes it.
fn index(step: &str) -> Option<usize> {
    let plain = step == "0" || (!step.starts_with('0') && step.bytes().all(|digit| digit.is_ascii_digit()));
    plain.then(|| step.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steps(pointer: &str) -> Vec<String> {
        Pointer::parse(pointer).unwrap().steps().to_vec()
    }

    #[test]
    fn descend_finds_members_and_elements() {
        let json = r#"{"a":{"b":[10,{"c/d":1.50}]},"":2}"#;
        assert_eq!(descend(json, &steps("/a/b/1/c~1d")), Ok(Some("1.50")));
        assert_eq!(descend(json, &steps("/a/b/0")), Ok(Some("10")));
        assert_eq!(descend(json, &steps("/")), Ok(Some("2")));
        assert_eq!(descend(json, &steps("")), Ok(Some(json)));
        for nothing in
            ["/x", "/a/b/2", "/a/b/01", "/a/b/-", "/a/b/+1", "/a/b/0/x", "/a/b/99999999999999999999"]
        {
            assert_eq!(descend(json, &steps(nothing)), Ok(None), "{nothing}");
        }
        assert!(
            descend(r#"{"a":{"b":1,"\u0062":2}}"#, &steps("/a/b")).unwrap_err().contains("\"b\" comes twice")
        );
    }

    #[test]
    fn check_refuses_repeated_members_and_deep_nesting_anywhere() {
        assert_eq!(
            check(r#"[{"a":1},{"a":2.5,"b":[true,{},[],null,"\"a\":{",-1e400],"":{"b":"]"}}]"#, 10),
            Ok(())
        );
        assert!(check(r#"{"a":1,"b":["a"],"\u0061":1}"#, 10).unwrap_err().contains("\"a\" comes twice"));
        assert!(check(r#"[[{"a":1,"a":1}]]"#, 10).unwrap_err().contains("\"a\" comes twice"));
        let nested = |depth| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
        assert_eq!(check(&nested(127), 127), Ok(()));
        assert!(check(&nested(128), 127).unwrap_err().contains("deeper than 127"));
        assert!(check(&nested(4), 3).unwrap_err().contains("deeper than 3"));
        assert_eq!(check(&nested(3), 3), Ok(()));
        assert!(check(&nested(100_000), MAX_DEPTH).is_err());
    }

    #[test]
    fn messages_hold_no_values() {
        assert_eq!(shown(&"é".repeat(100)), format!("{:?}..", "é".repeat(64)));
        let error = members(r#"{"secret":"secret"#).unwrap_err();
        assert!(!error.contains("secret"), "{error}");
    }
}
