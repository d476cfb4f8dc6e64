//! One pass over a payload: which bytes hold which top-level member.

use std::{borrow::Cow, collections::HashMap, fmt};

use serde::{
    Deserializer,
    de::{DeserializeSeed, Error, MapAccess, Visitor},
};
use serde_json::value::RawValue;

use crate::naming::json;

/// The top-level members that a route uses, each with a slot.
#[derive(Debug, Default)]
pub(crate) struct Layout {
    names: Vec<String>,
    slots: HashMap<String, usize>,
}

impl Layout {
    /// The slot of `name`, made if it is new.
    pub(crate) fn slot(&mut self, name: &str) -> usize {
        if let Some(slot) = self.slots.get(name) {
            return *slot;
        }
        self.slots.insert(name.to_owned(), self.names.len());
        self.names.push(name.to_owned());
        self.names.len() - 1
    }

    pub(crate) fn len(&self) -> usize {
        self.names.len()
    }
}

/// What the pass found; ranges of one payload.
#[derive(Debug, Default)]
pub(crate) struct Found<'a> {
    /// Per slot of the layout: the JSON text of that member.
    pub(crate) slots: Vec<Option<&'a str>>,
    /// Members without a slot.
    pub(crate) unknown: Vec<(Cow<'a, str>, &'a str)>,
}

/// Which slot came after which in the last record: most producers keep their order, so most names are found at once.
#[derive(Debug, Default)]
pub(crate) struct Order {
    after: Vec<usize>,
}

impl Order {
    /// For a layout of `slots` slots, guessing their own order.
    pub(crate) fn new(slots: usize) -> Self {
        Self { after: (0..=slots).collect() }
    }
}

/// Fills `found` from `payload`. Refuses what is no object, trailing bytes, a member twice.
pub(crate) fn read<'a>(
    payload: &'a str,
    layout: &Layout,
    order: &mut Order,
    found: &mut Found<'a>,
) -> Result<(), String> {
    let kind = match payload.bytes().find(|byte| !matches!(byte, b' ' | b'\t' | b'\n' | b'\r')) {
        Some(b'{') => None,
        Some(b'[') => Some("an array"),
        Some(b'"') => Some("a string"),
        Some(b'-' | b'0'..=b'9') => Some("a number"),
        Some(b't' | b'f' | b'n') => Some("true, false or null"),
        Some(_) => Some("not JSON"),
        None => Some("empty"),
    };
    if let Some(kind) = kind {
        return Err(format!("the payload is {kind}; send a JSON object"));
    }
    found.slots.clear();
    found.slots.resize(layout.len(), None);
    found.unknown.clear();
    let mut repeated = None;
    let mut deserializer = serde_json::Deserializer::from_str(payload);
    let pass = Pass { layout, order, found, repeated: &mut repeated };
    if let Err(error) = deserializer.deserialize_map(pass).and_then(|()| deserializer.end()) {
        return Err(repeated.map_or_else(|| json::syntax(error), |name: String| json::twice(&name)));
    }
    match json::repeated(found.unknown.iter().map(|(name, _)| name.as_ref())) {
        Some(name) => Err(json::twice(name)),
        None => Ok(()),
    }
}

struct Pass<'p, 'a> {
    layout: &'p Layout,
    order: &'p mut Order,
    found: &'p mut Found<'a>,
    repeated: &'p mut Option<String>,
}

impl<'a> Visitor<'a> for Pass<'_, 'a> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'a>>(self, mut map: A) -> Result<(), A::Error> {
        // Behind no slot (0) and behind slot n (n + 1).
        let mut last = 0;
        while let Some(member) =
            map.next_key_seed(Lookup { layout: self.layout, guess: self.order.after[last] })?
        {
            let value = map.next_value::<&RawValue>()?.get();
            match member {
                Member::Slot(slot) => {
                    if self.found.slots[slot].replace(value).is_some() {
                        *self.repeated = Some(self.layout.names[slot].clone());
                        return Err(A::Error::custom(""));
                    }
                    self.order.after[last] = slot;
                    last = slot + 1;
                }
                Member::Unknown(name) => self.found.unknown.push((name, value)),
            }
        }
        Ok(())
    }
}

enum Member<'a> {
    Slot(usize),
    Unknown(Cow<'a, str>),
}

#[derive(Clone, Copy)]
struct Lookup<'p> {
    layout: &'p Layout,
    guess: usize,
}

impl Lookup<'_> {
    fn slot(self, name: &str) -> Option<usize> {
        if self.layout.names.get(self.guess).is_some_and(|guess| guess == name) {
            return Some(self.guess);
        }
        self.layout.slots.get(name).copied()
    }
}

impl<'de> DeserializeSeed<'de> for Lookup<'_> {
    type Value = Member<'de>;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Member<'de>, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl<'de> Visitor<'de> for Lookup<'_> {
    type Value = Member<'de>;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a member's name")
    }
    fn visit_borrowed_str<E: Error>(self, name: &'de str) -> Result<Member<'de>, E> {
        Ok(self.slot(name).map_or(Member::Unknown(Cow::Borrowed(name)), Member::Slot))
    }
    fn visit_str<E: Error>(self, name: &str) -> Result<Member<'de>, E> {
        Ok(self.slot(name).map_or_else(|| Member::Unknown(Cow::Owned(name.to_owned())), Member::Slot))
    }
}
