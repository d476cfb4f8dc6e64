//! [`ConfigError`]: one thing that is wrong with a config file.

use std::fmt;

/// What is wrong, where, which value, which bound, what to do.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ConfigError {
    /// Line, from 1.
    pub line: usize,
    /// Column in characters, from 1.
    pub column: usize,
    /// Path of the key, such as `routes.orders.window`; empty for the whole file.
    pub key: String,
    /// What is wrong.
    pub what: String,
    /// The value as the file has it, if it is short and may be shown: `***` for secrets, variables not filled in.
    pub value: Option<String>,
    /// What the value must be within.
    pub bound: Option<String>,
    /// What to do.
    pub remedy: String,
}

/// Without the place: `key: what; value, bound; remedy`.
impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.key.is_empty() {
            write!(f, "{}: ", self.key)?;
        }
        f.write_str(&self.what)?;
        if let Some(value) = &self.value {
            write!(f, " (value: {value})")?;
        }
        if let Some(bound) = &self.bound {
            write!(f, ", must be {bound}")?;
        }
        write!(f, "; {}", self.remedy)
    }
}

impl std::error::Error for ConfigError {}

/// Text that is not shown: a password, a token, a URL that may hold one.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Secret(String);

impl Secret {
    /// Keeps `text` from being shown.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The text itself.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}
