//! From Avro's bytes to JSON text.

use std::fmt::Write;

use base64::Engine;

use super::schema::{AvroSchema, Kind, Meaning, NodeId};
use crate::{
    format::{
        connect::push_name,
        semantic::{self, Semantic},
    },
    naming::json::MAX_DEPTH,
};

/// The longest text that one record may become, bytes.
const MAX_TEXT: usize = 64 << 20;

impl AvroSchema {
    /// Appends the one value that `bytes` hold as JSON text. What `kept` knows stays as it is. Errors name the field and the byte,
    /// never a value.
    pub(crate) fn read(
        &self,
        bytes: &[u8],
        kept: &dyn Fn(&str) -> bool,
        out: &mut String,
    ) -> Result<(), String> {
        let mut reader =
            Reader { schema: self, bytes, at: 0, kept, most: out.len().saturating_add(MAX_TEXT) };
        let mut path = Vec::new();
        let read =
            reader.value(self.root, MAX_DEPTH, &mut path, out).and_then(|()| match bytes.len() - reader.at {
                0 => Ok(()),
                left => Err(format!("{left} bytes are left behind the value")),
            });
        read.map_err(|fault| {
            let place = if path.is_empty() { "the record".to_owned() } else { format!("field {}", path.join(".")) };
            format!(
                "{place}, byte {} of {}: {fault}; the payload was not written with this schema, or it is damaged",
                reader.at,
                bytes.len()
            )
        })
    }
}

struct Reader<'a> {
    schema: &'a AvroSchema,
    bytes: &'a [u8],
    at: usize,
    kept: &'a dyn Fn(&str) -> bool,
    /// `out` may become so long.
    most: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], String> {
        let left = self.bytes.len() - self.at;
        if count > left {
            return Err(format!("{count} bytes are wanted, and {left} are there"));
        }
        let taken = &self.bytes[self.at..self.at + count];
        self.at += count;
        Ok(taken)
    }

    /// Variable length, zigzag.
    fn long(&mut self) -> Result<i64, String> {
        let mut value = 0u64;
        for shift in (0..70).step_by(7) {
            let byte = self.take(1)?[0];
            if shift == 63 && byte > 1 {
                break;
            }
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Ok((value >> 1).cast_signed() ^ -((value & 1).cast_signed()));
            }
        }
        Err("a number has more than 64 bits".to_owned())
    }

    fn int(&mut self) -> Result<i64, String> {
        let value = self.long()?;
        i32::try_from(value).map(i64::from).map_err(|_| "a number has more than 32 bits".to_owned())
    }

    fn length(&mut self) -> Result<usize, String> {
        usize::try_from(self.long()?).map_err(|_| "a length is negative".to_owned())
    }

    fn block(&mut self) -> Result<u64, String> {
        let count = self.long()?;
        if count < 0 {
            // Its size in bytes, for those who skip it.
            self.long()?;
        }
        Ok(count.unsigned_abs())
    }

    /// All items of an array or a map, with commas between them.
    fn blocks(
        &mut self,
        out: &mut String,
        mut item: impl FnMut(&mut Self, &mut String) -> Result<(), String>,
    ) -> Result<(), String> {
        let mut first = true;
        loop {
            let count = self.block()?;
            if count == 0 {
                return Ok(());
            }
            for _ in 0..count {
                if !std::mem::take(&mut first) {
                    out.push(',');
                }
                item(self, out)?;
            }
        }
    }

    /// On an error `path` says where.
    fn value(
        &mut self,
        node: NodeId,
        depth: usize,
        path: &mut Vec<&'a str>,
        out: &mut String,
    ) -> Result<(), String> {
        let schema = self.schema;
        let node = &schema.nodes[node];
        let Some(deeper) = depth.checked_sub(1) else {
            return Err(format!("values are nested deeper than {MAX_DEPTH} levels; flatten them"));
        };
        if out.len() > self.most {
            return Err(format!("the record becomes longer than {MAX_TEXT} bytes of text"));
        }
        let start = out.len();
        match &node.kind {
            Kind::Null => out.push_str("null"),
            Kind::Boolean => match self.take(1)?[0] {
                0 => out.push_str("false"),
                1 => out.push_str("true"),
                _ => return Err("a boolean is neither 0 nor 1".to_owned()),
            },
            Kind::Int => push(out, self.int()?),
            Kind::Long => push(out, self.long()?),
            Kind::Float => {
                let bytes: [u8; 4] = self.take(4)?.try_into().unwrap_or_default();
                let value = f32::from_le_bytes(bytes);
                float(
                    value.into(),
                    value.is_finite().then(|| serde_json::to_string(&value).ok()).flatten(),
                    out,
                );
            }
            Kind::Double => {
                let bytes: [u8; 8] = self.take(8)?.try_into().unwrap_or_default();
                let value = f64::from_le_bytes(bytes);
                float(value, value.is_finite().then(|| serde_json::to_string(&value).ok()).flatten(), out);
            }
            Kind::Bytes | Kind::Fixed(_) => {
                let length = if let Kind::Fixed(size) = node.kind { size } else { self.length()? };
                let bytes = self.take(length)?;
                return self.bytes(bytes, &node.meaning, out);
            }
            Kind::String => {
                let length = self.length()?;
                let from = self.at;
                let text = std::str::from_utf8(self.take(length)?).map_err(|fault| {
                    format!("a string is not UTF-8 at byte {}", from + fault.valid_up_to())
                })?;
                push_string(text, out);
            }
            Kind::Enum(symbols) => {
                let index = self.long()?;
                let symbol = usize::try_from(index).ok().and_then(|index| symbols.get(index));
                let symbol = symbol.ok_or_else(|| {
                    format!("an enum has symbol number {index}, and its schema has {}", symbols.len())
                })?;
                push_string(symbol, out);
            }
            Kind::Union(branches) => {
                let index = self.long()?;
                let branch = usize::try_from(index).ok().and_then(|index| branches.get(index));
                let branch = branch.ok_or_else(|| {
                    format!("a union has branch number {index}, and its schema has {}", branches.len())
                })?;
                return self.value(*branch, deeper, path, out);
            }
            Kind::Array(items) => {
                out.push('[');
                self.blocks(out, |reader, out| reader.value(*items, deeper, path, out))?;
                out.push(']');
            }
            Kind::Map(values) => {
                out.push('{');
                self.blocks(out, |reader, out| {
                    let length = reader.length()?;
                    let name = std::str::from_utf8(reader.take(length)?)
                        .map_err(|_| "a key of a map is not UTF-8".to_owned())?;
                    push_name(name, out);
                    reader.value(*values, deeper, path, out)
                })?;
                out.push('}');
            }
            Kind::Record(fields) => {
                out.push('{');
                for (at, (name, of)) in fields.iter().enumerate() {
                    if at > 0 {
                        out.push(',');
                    }
                    push_name(name, out);
                    path.push(name);
                    self.value(*of, deeper, path, out)?;
                    path.pop();
                }
                out.push('}');
            }
        }
        if let Meaning::Semantic(semantic) = &node.meaning
            && !(self.kept)(&out[start..])
        {
            let plain = out[start..].to_owned();
            out.truncate(start);
            semantic.convert(&plain, out)?;
        }
        Ok(())
    }

    fn bytes(&self, bytes: &[u8], meaning: &Meaning, out: &mut String) -> Result<(), String> {
        match meaning {
            Meaning::Uuid => {
                out.push('"');
                for (at, byte) in bytes.iter().enumerate() {
                    if matches!(at, 4 | 6 | 8 | 10) {
                        out.push('-');
                    }
                    write!(out, "{byte:02x}").unwrap_or_default();
                }
                out.push('"');
                return Ok(());
            }
            Meaning::Duration => {
                let part = |at: usize| {
                    let part: [u8; 4] = bytes[at..at + 4].try_into().unwrap_or_default();
                    u32::from_le_bytes(part)
                };
                let (months, days, ms) = (part(0), part(4), part(8));
                write!(out, "\"P{months}M{days}DT{}.{:03}S\"", ms / 1000, ms % 1000).unwrap_or_default();
                return Ok(());
            }
            Meaning::Plain | Meaning::Semantic(_) => {}
        }
        let text = format!("\"{}\"", base64::engine::general_purpose::STANDARD.encode(bytes));
        match meaning {
            Meaning::Semantic(_) if (self.kept)(&text) => out.push_str(&text),
            Meaning::Semantic(Semantic::Decimal { scale }) => semantic::decimal(bytes, *scale, out)?,
            Meaning::Semantic(semantic) => semantic.convert(&text, out)?,
            _ => out.push_str(&text),
        }
        Ok(())
    }
}

fn push(out: &mut String, value: i64) {
    write!(out, "{value}").unwrap_or_default();
}

/// `text` is the shortest that gives the value back.
fn float(value: f64, text: Option<String>, out: &mut String) {
    match text {
        Some(text) => out.push_str(&text),
        None if value.is_nan() => out.push_str("\"NaN\""),
        None => out.push_str(if value > 0.0 { "\"Infinity\"" } else { "\"-Infinity\"" }),
    }
}

fn push_string(text: &str, out: &mut String) {
    out.push_str(&serde_json::Value::from(text).to_string());
}
