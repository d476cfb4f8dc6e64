//! Avro's binary encoding, read by the schema that its writer has registered. Pure.
//!
//! Read here and not by a crate, because Debezium's declared types are attributes of primitive types (`connect.name`), which the
//! usual parsers drop, and because a record must not be able to nest its way through the stack: `max_depth` and the size of what
//! comes out are bounded.

mod read;
mod schema;

pub(crate) use self::schema::AvroSchema;

#[cfg(test)]
mod tests;
