//! What naming costs: ns a record for a payload of about 200 bytes and 6 columns, with the key, the digest and an encoder
//! that writes length-prefixed fields (text as it is, integers and RFC 3339 times as 8 bytes).
//!
//! `cargo run --release -p oncegate --example naming_cost`

use std::{sync::Arc, time::Instant};

use adapters::{
    sink::{Column, Encode, RowKind},
    value::{BadValue, Value},
};
use dedup_store::{Algorithm, Hasher, Identity};
use oncegate::{
    key::KeySpec,
    naming::{Chunk, EventTime, Namer, NamingRules, Record},
};

const RECORDS: usize = 10_000;
const ROUNDS: usize = 60;

#[derive(Debug)]
struct Fields(Vec<Column>);

impl Encode for Fields {
    fn columns(&self) -> &[Column] {
        &self.0
    }

    fn encode(
        &self,
        _: RowKind,
        values: &[Value<'_>],
        row: &mut Vec<u8>,
        row_key: &mut Vec<u8>,
    ) -> Result<(), BadValue> {
        for (column, value) in self.0.iter().zip(values) {
            let start = row.len();
            row.extend_from_slice(&[0; 4]);
            match (value, column.type_name.as_str()) {
                (Value::Json(text), "bigint") => {
                    row.extend_from_slice(&text.parse::<i64>().unwrap_or(0).to_be_bytes())
                }
                (Value::Json(text), "time") => {
                    let time: Option<jiff::Timestamp> = text.trim_matches('"').parse().ok();
                    row.extend_from_slice(&time.map_or(0, |time| time.as_microsecond()).to_be_bytes());
                }
                (Value::Json(text), _) => row.extend_from_slice(text.trim_matches('"').as_bytes()),
                _ => {}
            }
            let length = (row.len() - start - 4) as u32;
            row[start..start + 4].copy_from_slice(&length.to_be_bytes());
            if column.name == "order_id" {
                row_key.extend_from_slice(&row[start..]);
            }
        }
        Ok(())
    }
}

fn main() {
    let column = |(name, type_name): (&str, &str)| Column {
        name: name.into(),
        type_name: type_name.into(),
        nullable: true,
        has_default: false,
    };
    let columns = [
        ("order_id", "text"),
        ("customer_id", "bigint"),
        ("amount", "numeric"),
        ("status", "text"),
        ("note", "text"),
        ("updated_at", "time"),
    ];
    let payloads: Vec<String> = (0..RECORDS)
        .map(|at| {
            format!(
                r#"{{"order_id":"ord-{at:012}","customer_id":{},"amount":{}.{:02},"status":"shipped","note":"left at the door of the neighbour, as asked for","updated_at":"2026-11-29T19:{:02}:{:02}.123Z"}}"#,
                at * 7919 % 100_000, at % 1000, at % 100, at / 60 % 60, at % 60
            )
        })
        .collect();
    let bytes = payloads.iter().map(String::len).sum::<usize>() / RECORDS;
    println!("{bytes} bytes a record, {} columns", columns.len());
    for (arm, event_time) in [
        ("arrival time", EventTime::Arrival),
        (
            "event time by pointer",
            EventTime::Pointer { pointer: "/updated_at".parse().expect("a pointer"), unit: None },
        ),
    ] {
        let key = KeySpec::pointers(["/order_id"]).expect("one pointer");
        let identity = Identity {
            route_id: [1; 16],
            key_spec_id: key.id(),
            algorithm: Algorithm::Xxh3Secret,
            secret: [7; 192],
        };
        let rules = NamingRules { event_time, ..NamingRules::new(key) };
        let encoder = Arc::new(Fields(columns.map(column).into()));
        let namer = Namer::new(rules, encoder, Hasher::new(&identity)).expect("the rules fit");
        let mut chunk = Chunk::default();
        let mut rounds: Vec<f64> = (0..ROUNDS)
            .map(|_| {
                chunk.bytes.clear();
                chunk.records.clear();
                let start = Instant::now();
                for payload in &payloads {
                    namer.name(&Record::new(payload.as_bytes(), 1_795_972_081_123_000), &mut chunk);
                }
                start.elapsed().as_nanos() as f64 / RECORDS as f64
            })
            .collect();
        assert!(chunk.records.iter().all(|named| named.problem.is_none()));
        rounds.sort_by(f64::total_cmp);
        println!(
            "{arm}: {:.0} ns a record (median of {ROUNDS} rounds, best {:.0})",
            rounds[ROUNDS / 2],
            rounds[0]
        );
    }
}
