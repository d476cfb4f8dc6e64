//! Reads a parsed TOML file key by key. Every fault is noted and reading goes on, so that one run finds them all.

use std::{
    cell::{Cell, RefCell},
    fmt::Display,
    ops::{Range, RangeInclusive},
    time::Duration,
};

use toml::de::{DeTable, DeValue};

use super::{error::ConfigError, units};

/// Where variables come from.
pub(super) type Lookup<'c> = dyn Fn(&str) -> Option<String> + 'c;

/// One file being read.
pub(super) struct Reader<'c> {
    text: &'c str,
    lookup: &'c Lookup<'c>,
    errors: RefCell<Vec<ConfigError>>,
}

impl<'c> Reader<'c> {
    pub(super) fn new(text: &'c str, lookup: &'c Lookup<'c>) -> Self {
        Self { text, lookup, errors: RefCell::default() }
    }

    /// Notes a fault. `value` is the source text to show.
    pub(super) fn note(
        &self,
        span: &Range<usize>,
        key: &str,
        value: Option<String>,
        what: impl Display,
        bound: Option<String>,
        remedy: impl Display,
    ) {
        let before = self.text.get(..span.start.min(self.text.len())).unwrap_or_default();
        let line_start = before.rfind('\n').map_or(0, |at| at + 1);
        self.errors.borrow_mut().push(ConfigError {
            line: before.matches('\n').count() + 1,
            column: before[line_start..].chars().count() + 1,
            key: key.to_owned(),
            what: what.to_string(),
            value,
            bound,
            remedy: remedy.to_string(),
        });
    }

    /// All that was noted, in the order of the file.
    pub(super) fn errors(&self) -> Vec<ConfigError> {
        let mut errors = self.errors.take();
        errors.sort_by_key(|error| (error.line, error.column));
        errors.dedup();
        errors
    }

    fn source(&self, span: &Range<usize>) -> Option<String> {
        let text = self.text.get(span.clone())?;
        if text.contains('\n') {
            return None;
        }
        Some(if text.chars().count() > 60 {
            format!("{}..", text.chars().take(60).collect::<String>())
        } else {
            text.to_owned()
        })
    }
}

/// One value, with its place.
#[derive(Clone)]
pub(super) struct Item<'r, 't> {
    pub(super) reader: &'r Reader<'r>,
    pub(super) path: String,
    pub(super) span: Range<usize>,
    pub(super) value: &'t DeValue<'t>,
    secret: bool,
}

impl<'r, 't> Item<'r, 't> {
    /// Its value will not be shown.
    pub(super) fn secret(mut self) -> Self {
        self.secret = true;
        self
    }

    /// Notes a fault of this value.
    pub(super) fn fault(&self, what: impl Display, remedy: impl Display) {
        self.reader.note(&self.span, &self.path, self.shown(), what, None, remedy);
    }

    /// Notes that this value is out of bounds.
    pub(super) fn out_of_bounds(&self, what: impl Display, bound: String, remedy: impl Display) {
        self.reader.note(&self.span, &self.path, self.shown(), what, Some(bound), remedy);
    }

    fn shown(&self) -> Option<String> {
        match self.value {
            DeValue::Table(_) | DeValue::Array(_) => None,
            _ if self.secret => Some("***".to_owned()),
            _ => self.reader.source(&self.span),
        }
    }

    fn wrong_type(&self, wanted: &str) {
        let is = match self.value {
            DeValue::String(_) => "a string",
            DeValue::Integer(_) => "an integer",
            DeValue::Float(_) => "a number with a fraction",
            DeValue::Boolean(_) => "true or false",
            DeValue::Datetime(_) => "a date",
            DeValue::Array(_) => "a list",
            DeValue::Table(_) => "a table",
        };
        self.fault(format!("is {is}, not {wanted}"), format!("write {wanted}"));
    }

    /// A string with its variables filled in.
    pub(super) fn text(&self) -> Option<String> {
        self.text_as("a string")
    }

    /// As [`Self::text`], for a value that `wanted` describes.
    pub(super) fn text_as(&self, wanted: &str) -> Option<String> {
        match self.value {
            DeValue::String(text) => self.expand(text),
            _ => {
                self.wrong_type(wanted);
                None
            }
        }
    }

    /// `${NAME}` becomes the variable, `$${` becomes `${`.
    fn expand(&self, text: &str) -> Option<String> {
        let mut out = String::with_capacity(text.len());
        let mut rest = text;
        let mut whole = true;
        while let Some(at) = rest.find("${") {
            if rest[..at].ends_with('$') {
                out.push_str(&rest[..at - 1]);
                out.push_str("${");
                rest = &rest[at + 2..];
                continue;
            }
            out.push_str(&rest[..at]);
            let Some(end) = rest[at..].find('}') else {
                self.fault("has `${` without `}`", "close it, or write `$${` for the characters themselves");
                return None;
            };
            let name = &rest[at + 2..at + end];
            let legal = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
            if name.is_empty() || !name.bytes().all(legal) || name.as_bytes()[0].is_ascii_digit() {
                self.fault("has a variable whose name is not letters, digits and `_`", "write it as ${NAME}");
                whole = false;
            } else if let Some(value) = (self.reader.lookup)(name) {
                out.push_str(&value);
            } else {
                self.fault(
                    format!("uses variable {name}, which the environment does not have"),
                    format!("set {name}"),
                );
                whole = false;
            }
            rest = &rest[at + end + 1..];
        }
        out.push_str(rest);
        whole.then_some(out)
    }

    pub(super) fn flag(&self) -> Option<bool> {
        let flag = self.value.as_bool();
        if flag.is_none() {
            self.wrong_type("true or false");
        }
        flag
    }

    /// A whole number; also as a string if it comes from a variable.
    pub(super) fn integer(&self, bounds: RangeInclusive<i64>) -> Option<i64> {
        let number = match self.value {
            DeValue::Integer(number) => i64::from_str_radix(number.as_str(), number.radix()).ok(),
            DeValue::String(text) if text.contains("${") => match self.expand(text)?.trim().parse() {
                Ok(number) => Some(number),
                Err(_) => {
                    self.fault("holds a variable that is not a whole number", "set the variable to a number");
                    return None;
                }
            },
            _ => {
                self.wrong_type("a whole number");
                return None;
            }
        };
        match number.filter(|number| bounds.contains(number)) {
            Some(number) => Some(number),
            None => {
                self.out_of_bounds(
                    "is out of bounds",
                    format!("{} to {}", bounds.start(), bounds.end()),
                    "choose a number within them",
                );
                None
            }
        }
    }

    pub(super) fn duration(&self, bounds: RangeInclusive<Duration>) -> Option<Duration> {
        let text = self.text_as("a duration such as \"10s\"")?;
        let Some(duration) = units::duration(&text) else {
            self.fault("is not a duration", "write whole numbers with ms, s, m, h or d, such as \"1h30m\"");
            return None;
        };
        if bounds.contains(&duration) {
            return Some(duration);
        }
        let bound =
            format!("{} to {}", units::show_duration(*bounds.start()), units::show_duration(*bounds.end()));
        self.out_of_bounds("is out of bounds", bound, "choose a duration within them");
        None
    }

    pub(super) fn size(&self, bounds: RangeInclusive<u64>) -> Option<u64> {
        let text = self.text_as("a size such as \"16MiB\"")?;
        let Some(size) = units::size(&text) else {
            self.fault(
                "is not a size",
                "write a whole number with B, KiB, MiB, GiB or TiB, such as \"16MiB\"",
            );
            return None;
        };
        if bounds.contains(&size) {
            return Some(size);
        }
        let bound = format!("{} to {}", units::show_size(*bounds.start()), units::show_size(*bounds.end()));
        self.out_of_bounds("is out of bounds", bound, "choose a size within them");
        None
    }

    /// One of some words.
    pub(super) fn choice<T: Copy>(&self, choices: &[(&str, T)]) -> Option<T> {
        let words = choices.iter().map(|(word, _)| format!("{word:?}")).collect::<Vec<_>>().join(", ");
        let text = self.text_as(&format!("one of {words}"))?;
        let found = choices.iter().find(|(word, _)| *word == text).map(|(_, choice)| *choice);
        if found.is_none() {
            let guess = nearest(&text, choices.iter().map(|(word, _)| *word));
            let remedy =
                guess.map_or("choose one of them".to_owned(), |word| format!("did you mean {word:?}?"));
            self.out_of_bounds("is none of the choices", format!("one of {words}"), remedy);
        }
        found
    }

    /// A list, item by item; a single value counts as a list of one.
    pub(super) fn list(&self) -> Vec<Item<'r, 't>> {
        match self.value {
            DeValue::Array(items) => items
                .iter()
                .enumerate()
                .map(|(at, item)| Item {
                    path: format!("{}[{at}]", self.path),
                    span: item.span(),
                    value: item.get_ref(),
                    ..self.clone()
                })
                .collect(),
            _ => vec![self.clone()],
        }
    }

    /// A list of strings that are not empty and come once.
    pub(super) fn texts(&self) -> Vec<String> {
        let mut texts: Vec<String> = Vec::new();
        for item in self.list() {
            match item.text() {
                Some(text) if text.is_empty() => item.fault("is empty", "write a name"),
                Some(text) if texts.contains(&text) => item.fault("is there twice", "leave one out"),
                Some(text) => texts.push(text),
                None => {}
            }
        }
        texts
    }

    pub(super) fn section(&self) -> Option<Section<'r, 't>> {
        match self.value {
            DeValue::Table(table) => {
                Some(Section::new(self.reader, self.path.clone(), self.span.clone(), table))
            }
            _ => {
                self.wrong_type("a table");
                None
            }
        }
    }
}

/// One table being read: keys that were not asked for are faults in the end.
pub(super) struct Section<'r, 't> {
    pub(super) reader: &'r Reader<'r>,
    pub(super) path: String,
    pub(super) span: Range<usize>,
    table: &'t DeTable<'t>,
    known: RefCell<Vec<&'static str>>,
    secret: Cell<bool>,
}

impl<'r, 't> Section<'r, 't> {
    pub(super) fn new(
        reader: &'r Reader<'r>,
        path: String,
        span: Range<usize>,
        table: &'t DeTable<'t>,
    ) -> Self {
        Self { reader, path, span, table, known: RefCell::default(), secret: Cell::new(false) }
    }

    /// No value of it will be shown.
    pub(super) fn secret(&self) {
        self.secret.set(true);
    }

    /// The value of `key`, if it is there.
    pub(super) fn item(&self, key: &'static str) -> Option<Item<'r, 't>> {
        if !self.known.borrow().contains(&key) {
            self.known.borrow_mut().push(key);
        }
        self.items().find(|(name, _)| name == key).map(|(_, item)| item)
    }

    /// As [`Self::item`]; a fault if it is missing.
    pub(super) fn required(&self, key: &'static str, example: &str) -> Option<Item<'r, 't>> {
        let item = self.item(key);
        if item.is_none() {
            self.fault(format!("`{key}` is missing"), format!("add {key} = {example}"));
        }
        item
    }

    /// All values, with their keys; for tables whose keys are names.
    pub(super) fn items(&self) -> impl Iterator<Item = (String, Item<'r, 't>)> + use<'r, 't> {
        let (reader, path, secret) = (self.reader, self.path.clone(), self.secret.get());
        self.table.iter().map(move |(key, value)| {
            let name = key.get_ref().to_string();
            let shown = if name.is_empty()
                || !name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-".contains(&byte))
            {
                format!("{name:?}")
            } else {
                name.clone()
            };
            let path = if path.is_empty() { shown } else { format!("{path}.{shown}") };
            // A table is best found by its name.
            let span = if value.get_ref().is_table() { key.span() } else { value.span() };
            (name, Item { reader, path, span, value: value.get_ref(), secret })
        })
    }

    /// Notes a fault of the table itself.
    pub(super) fn fault(&self, what: impl Display, remedy: impl Display) {
        self.reader.note(&self.span, &self.path, None, what, None, remedy);
    }

    /// Notes every key that nothing asked for.
    pub(super) fn close(self) {
        let known = self.known.borrow();
        for (key, _) in self.table.iter() {
            let name: &str = key.get_ref();
            if known.contains(&name) {
                continue;
            }
            let remedy = match nearest(name, known.iter().copied()) {
                Some(guess) => format!("did you mean `{guess}`?"),
                None => format!("remove it; known here: {}", known.join(", ")),
            };
            self.reader.note(&key.span(), &self.path, None, format!("unknown key {name:?}"), None, remedy);
        }
    }

    pub(super) fn text(&self, key: &'static str) -> Option<String> {
        self.item(key)?.text()
    }

    pub(super) fn flag(&self, key: &'static str, default: bool) -> bool {
        self.item(key).and_then(|item| item.flag()).unwrap_or(default)
    }

    pub(super) fn count(&self, key: &'static str, bounds: RangeInclusive<i64>, default: i64) -> i64 {
        self.item(key).and_then(|item| item.integer(bounds)).unwrap_or(default)
    }

    pub(super) fn duration(
        &self,
        key: &'static str,
        bounds: RangeInclusive<Duration>,
        default: Duration,
    ) -> Duration {
        self.item(key).and_then(|item| item.duration(bounds)).unwrap_or(default)
    }

    pub(super) fn size(&self, key: &'static str, bounds: RangeInclusive<u64>, default: u64) -> u64 {
        self.item(key).and_then(|item| item.size(bounds)).unwrap_or(default)
    }

    pub(super) fn choice<T: Copy>(&self, key: &'static str, choices: &[(&str, T)], default: T) -> T {
        self.item(key).and_then(|item| item.choice(choices)).unwrap_or(default)
    }

    pub(super) fn section(&self, key: &'static str) -> Option<Section<'r, 't>> {
        self.item(key)?.section()
    }
}

/// The candidate that `word` most likely meant.
pub(super) fn nearest<'a>(word: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    if word.len() > 64 {
        return None;
    }
    candidates
        .map(|candidate| (strsim::damerau_levenshtein(&word.replace('-', "_"), candidate), candidate))
        .filter(|(distance, candidate)| {
            *distance <= (candidate.len() / 3).max(1) && *distance < candidate.len()
        })
        .min()
        .map(|(_, candidate)| candidate)
}

/// Milliseconds.
pub(super) const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// Seconds.
pub(super) const fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

/// Days.
pub(super) const fn days(days: u64) -> Duration {
    Duration::from_secs(days * 86_400)
}
