//! Where in a source database's log a change stands: one order per kind of log, as digits of fixed width.
//!
//! Positions are compared as what they are (numbers, or lists of numbers), never as the text that they come in:
//! `mysql-bin.999999` lies before `mysql-bin.1000000`. Padded with zeros to the width of their kind, the digits have that order
//! both as a number and as text, so a column of either type can be the version.

use std::borrow::Cow;

use crate::naming::json;

/// The members that say where a change comes from: those of `source`, or those that a flattened record has kept.
#[derive(Clone, Debug, Default)]
pub(crate) struct Fields<'a>(pub(crate) Vec<(Cow<'a, str>, &'a str)>);

impl<'a> Fields<'a> {
    /// The JSON text of member `name`; none if it is missing or null.
    pub(crate) fn get(&self, name: &str) -> Option<&'a str> {
        let member = self.0.iter().find(|(member, _)| member == name);
        member.map(|(_, value)| *value).filter(|value| *value != "null")
    }

    /// The text of a string, or of another scalar as it stands.
    pub(crate) fn text(&self, name: &str) -> Option<Cow<'a, str>> {
        let value = self.get(name)?;
        match value.starts_with('"') {
            true => json::text(value).ok(),
            false => Some(Cow::Borrowed(value)),
        }
    }

    /// A whole number, also as a string.
    fn number(&self, name: &str) -> Result<Option<u64>, String> {
        let Some(text) = self.text(name) else { return Ok(None) };
        match text.parse() {
            Ok(number) => Ok(Some(number)),
            Err(_) => Err(format!("source member {name:?} is not a whole number from 0 to {}", u64::MAX)),
        }
    }
}

/// The kinds of logs whose positions have an order here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Log {
    Postgres,
    MySql,
    SqlServer,
    Oracle,
    MongoDb,
}

impl Log {
    /// From the connector's name in `source.connector`, or else from the members that only its kind has.
    pub(crate) fn of(fields: &Fields<'_>) -> Option<Self> {
        if let Some(connector) = fields.text("connector") {
            return match connector.as_ref() {
                "postgresql" => Some(Log::Postgres),
                "mysql" | "mariadb" => Some(Log::MySql),
                "sqlserver" | "db2" => Some(Log::SqlServer),
                "oracle" => Some(Log::Oracle),
                "mongodb" => Some(Log::MongoDb),
                _ => None,
            };
        }
        let there = |name| fields.get(name).is_some();
        match () {
            () if there("lsn") => Some(Log::Postgres),
            () if there("file") && there("pos") => Some(Log::MySql),
            () if there("commit_lsn") || there("change_lsn") => Some(Log::SqlServer),
            () if there("scn") => Some(Log::Oracle),
            () if there("ord") => Some(Log::MongoDb),
            () => None,
        }
    }

    /// Digits of a position, without the one that tells a snapshot from the stream.
    #[cfg(test)]
    pub(crate) fn width(self) -> usize {
        match self {
            Log::Postgres => 20,
            Log::MySql => 50,
            Log::SqlServer => 70,
            Log::Oracle => 65,
            Log::MongoDb => 40,
        }
    }

    /// The position as digits; says which member is missing or malformed, never its value.
    pub(crate) fn position(self, fields: &Fields<'_>) -> Result<String, String> {
        let mut digits = String::with_capacity(70);
        let needed = |name: &str| {
            format!(
                "source member {name:?} is missing: it tells the change's position; keep it (add.fields of \
                 ExtractNewRecordState), or set version = \"ts_ms\""
            )
        };
        match self {
            // Changes of one row are ordered by the LSN of the change itself: a second transaction changes the row only after
            // the first has committed. Rows of one COPY share it, which is why the row key is part of the dedup key.
            Log::Postgres => digits.push_str(&format!("{:020}", lsn(fields)?.ok_or_else(|| needed("lsn"))?)),
            Log::MySql => {
                let file = fields.text("file").ok_or_else(|| needed("file"))?;
                let suffix = file.rsplit_once('.').map(|(_, suffix)| suffix);
                let number_of_file: u64 = suffix
                    .filter(|suffix| !suffix.is_empty() && suffix.bytes().all(|byte| byte.is_ascii_digit()))
                    .and_then(|suffix| suffix.parse().ok())
                    .ok_or(
                        "source member \"file\" has no number behind its last dot, such as mysql-bin.000003",
                    )?;
                let pos = fields.number("pos")?.ok_or_else(|| needed("pos"))?;
                let row = fields.number("row")?.unwrap_or(0);
                if row > 9_999_999_999 {
                    return Err("source member \"row\" is above 9999999999".to_owned());
                }
                digits.push_str(&format!("{number_of_file:020}{pos:020}{row:010}"));
            }
            Log::SqlServer => {
                // A snapshot has no change of its own.
                let commit = colons(fields, "commit_lsn", ':')?.ok_or_else(|| needed("commit_lsn"))?;
                let change = colons(fields, "change_lsn", ':')?.unwrap_or(0);
                digits.push_str(&format!("{commit:025}{change:025}"));
                digits.push_str(&format!("{:020}", fields.number("event_serial_no")?.unwrap_or(0)));
            }
            Log::Oracle => {
                let scn = fields.number("scn")?.ok_or_else(|| needed("scn"))?;
                let redo = colons(fields, "rs_id", '.')?.unwrap_or(0);
                let statement = fields.number("ssn")?.unwrap_or(0);
                digits.push_str(&format!("{scn:020}{redo:025}{statement:020}"));
            }
            Log::MongoDb => {
                let ts_ms = fields.number("ts_ms")?.ok_or_else(|| needed("ts_ms"))?;
                let ord = fields.number("ord")?.unwrap_or(0);
                digits.push_str(&format!("{ts_ms:020}{ord:020}"));
            }
        }
        Ok(digits)
    }
}

/// `lsn` as a number or as `16/B374D848`; else the second of `sequence`, a string that holds `["last commit","this change"]`.
fn lsn(fields: &Fields<'_>) -> Result<Option<u64>, String> {
    if let Some(text) = fields.text("lsn") {
        let parts = text.split_once('/').map(|(high, low)| {
            Some(
                u64::from(u32::from_str_radix(high, 16).ok()?) << 32
                    | u64::from(u32::from_str_radix(low, 16).ok()?),
            )
        });
        return match parts {
            Some(Some(lsn)) => Ok(Some(lsn)),
            Some(None) => Err("source member \"lsn\" is no LSN such as 16/B374D848".to_owned()),
            None => fields.number("lsn"),
        };
    }
    let Some(sequence) = fields.text("sequence") else { return Ok(None) };
    let fault = || "source member \"sequence\" is no pair of LSNs such as [\"23850\",\"23860\"]".to_owned();
    let elements = json::elements(&sequence).map_err(|_| fault())?;
    let [_, last] = elements[..] else { return Err(fault()) };
    let last = if last.starts_with('"') { json::text(last)? } else { Cow::Borrowed(last) };
    last.parse().map(Some).map_err(|_| fault())
}

/// Three hexadecimal numbers of 32, 32 and 16 bits: SQL Server's `00000027:00000ac0:0002`, Oracle's `0x000012.00000034.0010`.
fn colons(fields: &Fields<'_>, name: &str, mark: char) -> Result<Option<u128>, String> {
    let Some(text) = fields.text(name) else { return Ok(None) };
    let text = text.trim();
    let text = text.strip_prefix("0x").unwrap_or(text);
    if text.is_empty() || text == "NULL" {
        return Ok(None);
    }
    let fault = || {
        format!(
            "source member {name:?} is not three hexadecimal numbers such as 00000027{mark}00000ac0{mark}0002"
        )
    };
    let mut value = 0u128;
    let mut count = 0;
    for (part, bits) in text.split(mark).zip([32, 32, 16]) {
        let legal = !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_hexdigit());
        let number = u128::from_str_radix(part, 16).ok().filter(|number| legal && *number < 1 << bits);
        value = value << bits | number.ok_or_else(fault)?;
        count += 1;
    }
    if count != 3 || text.split(mark).count() != 3 {
        return Err(fault());
    }
    Ok(Some(value))
}

/// The source's time, nanoseconds since the epoch: `ts_ns`, else `ts_us`, else `ts_ms`.
pub(crate) fn source_ns(fields: &Fields<'_>) -> Result<u64, String> {
    for (name, factor) in [("ts_ns", 1), ("ts_us", 1_000), ("ts_ms", 1_000_000)] {
        if let Some(number) = fields.number(name)? {
            return number
                .checked_mul(factor)
                .ok_or_else(|| format!("source member {name:?} is beyond the year 2554"));
        }
    }
    Err("source member \"ts_ms\" is missing: it tells the change's time; keep it (add.fields of ExtractNewRecordState)"
        .to_owned())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn position(json: &str) -> Result<String, String> {
        let fields = Fields(json::members(json).unwrap());
        Log::of(&fields).expect("a known log").position(&fields)
    }

    #[test]
    fn binlog_files_are_compared_by_number() {
        let at = |file: &str, pos: u64, row: u64| {
            position(&format!(r#"{{"connector":"mysql","file":"{file}","pos":{pos},"row":{row}}}"#)).unwrap()
        };
        let ordered = [
            at("mysql-bin.000003", 9, 1),
            at("mysql-bin.000003", 10, 0),
            at("mysql-bin.000003", 10, 1),
            at("mysql-bin.999999", 4, 0),
            at("mysql-bin.1000000", 4, 0),
        ];
        assert!(ordered.windows(2).all(|pair| pair[0] < pair[1]), "{ordered:?}");
        assert!(ordered.iter().all(|digits| digits.len() == Log::MySql.width()));
    }

    #[test]
    fn lsns_come_as_numbers_texts_and_sequences() {
        let expected = "00000000000024023128";
        for json in [
            r#"{"connector":"postgresql","lsn":24023128}"#,
            r#"{"connector":"postgresql","lsn":"24023128"}"#,
            r#"{"connector":"postgresql","lsn":"0/16E9058"}"#,
            r#"{"connector":"postgresql","lsn":null,"sequence":"[\"24023119\",\"24023128\"]"}"#,
            r#"{"lsn":24023128}"#,
        ] {
            assert_eq!(position(json).as_deref(), Ok(expected), "{json}");
        }
        assert!(position(r#"{"connector":"postgresql","lsn":"0/XYZ"}"#).unwrap_err().contains("\"lsn\""));
        assert!(position(r#"{"connector":"postgresql","lsn":-1}"#).unwrap_err().contains("whole number"));
        assert!(position(r#"{"connector":"postgresql"}"#).unwrap_err().contains("add.fields"));
    }

    #[test]
    fn sql_server_orders_by_commit_then_change_then_serial() {
        let at = |commit: &str, change: &str, serial: u64| {
            position(&format!(
                r#"{{"connector":"sqlserver","commit_lsn":"{commit}","change_lsn":{change},"event_serial_no":{serial}}}"#
            ))
            .unwrap()
        };
        let ordered = [
            at("00000027:00000ac0:0002", "null", 0),
            at("00000027:00000ac0:0002", "\"00000027:00000ab0:0002\"", 1),
            at("00000027:00000ac0:0002", "\"00000027:00000ab0:0003\"", 1),
            at("00000027:00000ac0:0002", "\"00000027:00000ab0:0003\"", 2),
            at("00000028:00000001:0001", "\"00000027:00000001:0001\"", 1),
        ];
        assert!(ordered.windows(2).all(|pair| pair[0] < pair[1]), "{ordered:?}");
        assert!(ordered.iter().all(|digits| digits.len() == Log::SqlServer.width()));
        for bad in ["00000027:00000ac0", "g:0:0", "100000000:0:0", "0:0:10000", "0:0:0:0", "::"] {
            let json = format!(r#"{{"connector":"sqlserver","commit_lsn":"{bad}"}}"#);
            assert!(position(&json).unwrap_err().contains("\"commit_lsn\""), "{bad}");
        }
    }

    #[test]
    fn oracle_and_mongodb_have_an_order_too() {
        let oracle = |scn: &str, rs_id: &str, ssn: u64| {
            let json = format!(r#"{{"connector":"oracle","scn":"{scn}","rs_id":"{rs_id}","ssn":{ssn}}}"#);
            position(&json).unwrap()
        };
        assert!(oracle("999", " 0x000012.00000034.0010 ", 0) < oracle("1000", "0x000012.00000034.0010", 0));
        assert!(oracle("1000", "0x000012.00000034.0010", 0) < oracle("1000", "0x000012.00000034.0011", 0));
        assert_eq!(oracle("1", "0x1.1.1", 1).len(), Log::Oracle.width());
        let mongo = |ms: u64, ord: u64| {
            position(&format!(r#"{{"connector":"mongodb","ts_ms":{ms},"ord":{ord}}}"#)).unwrap()
        };
        assert!(mongo(1_000, 9) < mongo(1_000, 10) && mongo(1_000, 10) < mongo(2_000, 1));
        assert_eq!(mongo(1, 1).len(), Log::MongoDb.width());
    }

    #[test]
    fn the_finest_source_time_counts() {
        let ns = |json: &str| source_ns(&Fields(json::members(json).unwrap()));
        assert_eq!(ns(r#"{"ts_ms":5}"#), Ok(5_000_000));
        assert_eq!(ns(r#"{"ts_ms":5,"ts_us":5001}"#), Ok(5_001_000));
        assert_eq!(ns(r#"{"ts_ms":5,"ts_us":5001,"ts_ns":5001002}"#), Ok(5_001_002));
        assert!(ns(r#"{"ts_ms":18446744073709551615}"#).unwrap_err().contains("2554"));
        assert!(ns("{}").unwrap_err().contains("ts_ms"));
    }

    proptest! {
        #[test]
        fn digits_have_the_order_of_lsns(a: u64, b: u64) {
            let at = |lsn: u64| position(&format!(r#"{{"connector":"postgresql","lsn":{lsn}}}"#)).unwrap();
            prop_assert_eq!(at(a).cmp(&at(b)), a.cmp(&b));
        }

        #[test]
        fn digits_have_the_order_of_binlog_positions(
            a in (0..2_000_000u64, any::<u64>(), 0..100u64),
            b in (0..2_000_000u64, any::<u64>(), 0..100u64),
        ) {
            let at = |(file, pos, row): (u64, u64, u64)| position(&format!(
                r#"{{"connector":"mysql","file":"bin.log.{file:06}","pos":{pos},"row":{row}}}"#
            )).unwrap();
            prop_assert_eq!(at(a).cmp(&at(b)), a.cmp(&b));
        }

        #[test]
        fn digits_have_the_order_of_sql_servers_lsns(
            a in (any::<u32>(), any::<u32>(), any::<u16>()), b in (any::<u32>(), any::<u32>(), any::<u16>()),
        ) {
            let at = |(x, y, z): (u32, u32, u16)| position(&format!(
                r#"{{"connector":"sqlserver","commit_lsn":"{x:08x}:{y:08X}:{z:04x}"}}"#
            )).unwrap();
            prop_assert_eq!(at(a).cmp(&at(b)), a.cmp(&b));
        }
    }
}
