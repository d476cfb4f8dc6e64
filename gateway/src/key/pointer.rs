//! JSON pointers (RFC 6901).

use std::{fmt, str::FromStr};

/// The most steps of one pointer.
const MAX_STEPS: usize = 32;

/// Points at one value of a JSON document: `/user/id`, `/items/0`, or the empty pointer for the whole of it.
#[derive(Clone, PartialEq, Eq, Debug, Hash, PartialOrd, Ord)]
pub struct Pointer {
    text: String,
    steps: Vec<String>,
}

impl Pointer {
    /// From its text.
    pub fn parse(text: &str) -> Result<Self, PointerError> {
        let bad = |reason| PointerError { pointer: text.to_owned(), reason };
        if text.is_empty() {
            return Ok(Self { text: String::new(), steps: Vec::new() });
        }
        let steps = text.strip_prefix('/').ok_or_else(|| bad("it does not start with `/`"))?;
        let steps: Vec<String> = steps
            .split('/')
            .map(|step| unescape(step).ok_or_else(|| bad("`~` stands before something else than 0 or 1")))
            .collect::<Result<_, _>>()?;
        if steps.len() > MAX_STEPS {
            return Err(bad("it has more than 32 steps"));
        }
        Ok(Self { text: text.to_owned(), steps })
    }

    /// At the top-level member `name`.
    pub fn member(name: &str) -> Self {
        Self {
            text: format!("/{}", name.replace('~', "~0").replace('/', "~1")),
            steps: vec![name.to_owned()],
        }
    }

    /// Its text.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Unescaped; empty for the whole document.
    pub fn steps(&self) -> &[String] {
        &self.steps
    }
}

impl fmt::Display for Pointer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl FromStr for Pointer {
    type Err = PointerError;

    fn from_str(text: &str) -> Result<Self, PointerError> {
        Self::parse(text)
    }
}

/// Not a JSON pointer.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "{pointer:?} is not a JSON pointer: {reason}; write it as \"/member\" or \"/outer/inner\" (RFC 6901)"
)]
pub struct PointerError {
    /// As given.
    pub pointer: String,
    /// What is wrong.
    pub reason: &'static str,
}

fn unescape(step: &str) -> Option<String> {
    let mut out = String::with_capacity(step.len());
    let mut characters = step.chars();
    while let Some(character) = characters.next() {
        out.push(match character {
            '~' => match characters.next()? {
                '0' => '~',
                '1' => '/',
                _ => return None,
            },
            other => other,
        });
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pointers_follow_rfc_6901() {
        let steps = |text: &str| Pointer::parse(text).map(|pointer| pointer.steps().to_vec());
        assert_eq!(steps(""), Ok(vec![]));
        assert_eq!(steps("/"), Ok(vec![String::new()]));
        assert_eq!(steps("/a~1b/m~0n/0"), Ok(vec!["a/b".into(), "m~n".into(), "0".into()]));
        assert_eq!(Pointer::member("a/~b"), Pointer::parse("/a~1~0b").unwrap());
        for text in ["a", "/~", "/~2", "/a~"] {
            let error = Pointer::parse(text).unwrap_err().to_string();
            assert!(error.contains(&format!("{text:?}")), "{error}");
        }
        assert!(Pointer::parse(&"/a".repeat(33)).is_err());
    }
}
