//! One line of the marks topic: what its key, headers and value say. Pure.
//!
//! A line's key is its shard; its headers are texts, so that any tool can show them; its value is a mark's packed keys. Every line says
//! how the whole shard stood after it: the newest valid one is the shard row (P3).

use crate::{
    lineage::Lineage,
    sink::{RouteRow, ShardId},
};

/// Bytes of a packed block in one record: below the least `max.message.bytes` that brokers come with. Larger blocks go in parts.
pub(super) const PART_BYTES: usize = 512 << 10;

/// What a line is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    /// A batch's step; its keys, or the last part of them, are the value.
    Mark,
    /// An earlier part of a mark's keys.
    Part,
    /// The shard is taken over. Valid only if the shard was at epoch `after` when it was written.
    Claim {
        /// The epoch that the claim raises.
        after: i64,
    },
    /// The owner lives; also how floor and partition count change, how the first source is kept, and how old state is kept from expiring.
    Beat,
    /// Watermark and floor are those of a shard without a batch, and its marks are gone.
    Forget,
    /// The source is another one than before: the position is forgotten.
    Renew,
    /// The route's identity, proposed.
    Route,
    /// The same, repeated once it was decided.
    RouteAgain,
    /// Asks the broker for its time.
    Clock,
}

const WORDS: [(&str, Kind); 9] = [
    ("mark", Kind::Mark),
    ("part", Kind::Part),
    ("claim", Kind::Claim { after: 0 }),
    ("beat", Kind::Beat),
    ("forget", Kind::Forget),
    ("renew", Kind::Renew),
    ("route", Kind::Route),
    ("route-again", Kind::RouteAgain),
    ("clock", Kind::Clock),
];

/// See the module.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Line {
    pub(super) kind: Kind,
    pub(super) shard: ShardId,
    pub(super) state: State,
    /// Keys in the mark, and their event times.
    pub(super) keys: Keys,
    /// Which part of a block this is, from 0.
    pub(super) part: usize,
}

/// A shard row.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct State {
    pub(super) epoch: i64,
    pub(super) sequence: i64,
    pub(super) position: Option<i64>,
    pub(super) watermark_ms: i64,
    pub(super) floor_ms: i64,
    /// How many partitions the source's topic has.
    pub(super) partitions: Option<i64>,
    /// Which source it is: the topic's id.
    pub(super) source: Option<String>,
    /// The owner's name.
    pub(super) owner: String,
    /// The transactional id under which the owner writes.
    pub(super) writer: String,
    /// The consumer group whose generation fences the owner's batches, if one does (KIP-447).
    pub(super) group: Option<String>,
    /// Who wrote its batches.
    pub(super) lineage: Lineage,
}

impl State {
    /// Of a shard that nobody has owned yet.
    pub(super) fn unowned() -> Self {
        Self {
            epoch: 0,
            sequence: 0,
            position: None,
            watermark_ms: i64::MIN,
            floor_ms: i64::MIN,
            partitions: None,
            source: None,
            owner: String::new(),
            writer: String::new(),
            group: None,
            lineage: Lineage::default(),
        }
    }
}

/// What a mark's block holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Keys {
    pub(super) count: i64,
    pub(super) min_ms: i64,
    pub(super) max_ms: i64,
}

/// The headers of a line, by name.
pub(super) type Header = (&'static str, String);

impl Line {
    pub(super) fn new(kind: Kind, shard: &ShardId, state: State) -> Self {
        Self { kind, shard: shard.clone(), state, keys: Keys::default(), part: 0 }
    }

    /// The headers of this line of `route`.
    pub(super) fn headers(&self, route: &str) -> Vec<Header> {
        let Self { kind, state, keys, part, .. } = self;
        let word =
            WORDS.iter().find(|(_, known)| std::mem::discriminant(known) == std::mem::discriminant(kind));
        let mut headers = vec![
            ("kind", word.map_or("", |(word, _)| *word).to_owned()),
            ("route", route.to_owned()),
            ("epoch", state.epoch.to_string()),
            ("sequence", state.sequence.to_string()),
            ("watermark-ms", state.watermark_ms.to_string()),
            ("floor-ms", state.floor_ms.to_string()),
            ("owner", state.owner.clone()),
            ("writer", state.writer.clone()),
        ];
        headers.extend(state.position.map(|position| ("position", position.to_string())));
        headers.extend(state.partitions.map(|count| ("partitions", count.to_string())));
        headers.extend(state.source.clone().map(|source| ("source", source)));
        headers.extend(state.group.clone().map(|group| ("group", group)));
        if state.lineage != Lineage::default() {
            headers.push(("lineage", state.lineage.to_string()));
        }
        if let Kind::Claim { after } = kind {
            headers.push(("after", after.to_string()));
        }
        if *kind == Kind::Mark && keys.count > 0 {
            headers.push(("count", keys.count.to_string()));
            headers.push(("min-ms", keys.min_ms.to_string()));
            headers.push(("max-ms", keys.max_ms.to_string()));
        }
        if *part > 0 {
            headers.push(("part", part.to_string()));
        }
        headers
    }

    /// The line of `route` that a record's key and headers spell; none if it is another route's, or not a line at all.
    pub(super) fn read<'a>(
        route: &str,
        key: Option<&[u8]>,
        headers: impl Iterator<Item = (&'a str, &'a [u8])>,
    ) -> Option<Self> {
        let shard: ShardId = std::str::from_utf8(key.unwrap_or_default()).ok()?.into();
        let (mut kind, mut ours, mut after) = (None, false, 0);
        let mut line = Self::new(Kind::Beat, &shard, State::unowned());
        for (name, value) in headers {
            let text = std::str::from_utf8(value).ok()?;
            let number = || text.parse::<i64>().ok();
            let state = &mut line.state;
            match name {
                "kind" => kind = WORDS.iter().find(|(word, _)| *word == text).map(|(_, kind)| *kind),
                "route" => ours = text == route,
                "epoch" => state.epoch = number()?,
                "sequence" => state.sequence = number()?,
                "position" => state.position = Some(number()?),
                "watermark-ms" => state.watermark_ms = number()?,
                "floor-ms" => state.floor_ms = number()?,
                "partitions" => state.partitions = Some(number()?),
                "source" => state.source = Some(text.to_owned()),
                "owner" => state.owner = text.to_owned(),
                "writer" => state.writer = text.to_owned(),
                "group" => state.group = Some(text.to_owned()),
                "lineage" => state.lineage = Lineage::read(text),
                "after" => after = number()?,
                "count" => line.keys.count = number()?,
                "min-ms" => line.keys.min_ms = number()?,
                "max-ms" => line.keys.max_ms = number()?,
                "part" => line.part = text.parse().ok()?,
                // Of a later release.
                _ => {}
            }
        }
        line.kind = match kind? {
            Kind::Claim { .. } => Kind::Claim { after },
            kind => kind,
        };
        ours.then_some(line)
    }
}

/// The value of a route line: its identity, in fixed places.
pub(super) fn route_bytes(row: &RouteRow) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(26 + row.secret.len());
    bytes.extend_from_slice(&row.key_spec_id.to_be_bytes());
    bytes.extend_from_slice(&row.algorithm.to_be_bytes());
    bytes.extend_from_slice(&row.route_id);
    bytes.extend_from_slice(&row.secret);
    bytes
}

/// The other way.
pub(super) fn route_row(bytes: &[u8]) -> Option<RouteRow> {
    let (key_spec_id, rest) = bytes.split_first_chunk::<8>()?;
    let (algorithm, rest) = rest.split_first_chunk::<2>()?;
    let (route_id, secret) = rest.split_first_chunk::<16>()?;
    Some(RouteRow {
        route_id: route_id.to_vec(),
        key_spec_id: i64::from_be_bytes(*key_spec_id),
        algorithm: i16::from_be_bytes(*algorithm),
        secret: secret.to_vec(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(line: &Line, route: &str) -> Option<Line> {
        let headers = line.headers("orders");
        let headers = headers.iter().map(|(name, value)| (*name, value.as_bytes()));
        Line::read(route, Some(line.shard.as_bytes()), headers)
    }

    #[test]
    fn a_line_says_what_it_was_made_of() {
        let state = State {
            epoch: 7,
            sequence: -3,
            position: Some(i64::MAX),
            watermark_ms: i64::MIN,
            floor_ms: 12,
            partitions: Some(4),
            source: Some("id".to_owned()),
            owner: "a, b".to_owned(),
            writer: "é".to_owned(),
            group: Some("g".to_owned()),
            lineage: Lineage::read("0:2 5:7"),
        };
        let shard: ShardId = "kafka/c/t/0".into();
        for (_, kind) in WORDS {
            let kind = if let Kind::Claim { .. } = kind { Kind::Claim { after: 6 } } else { kind };
            let mut line = Line::new(kind, &shard, state.clone());
            if kind == Kind::Mark {
                line.keys = Keys { count: 2, min_ms: -5, max_ms: 5 };
            }
            line.part = 2;
            assert_eq!(read(&line, "orders"), Some(line.clone()));
            assert_eq!(read(&line, "others"), None, "of another route");
        }
        let bare = Line::new(Kind::Beat, &shard, State::unowned());
        assert_eq!(read(&bare, "orders"), Some(bare.clone()));
    }

    /// These texts are in topics: what they say must not change.
    #[test]
    fn p3_lines_of_all_builds_are_read_and_written_the_same() {
        let earlier: Vec<Header> = [
            ("kind", "mark"),
            ("route", "orders"),
            ("epoch", "3"),
            ("sequence", "41"),
            ("watermark-ms", "1700000000000"),
            ("floor-ms", "-9223372036854775808"),
            ("owner", "host-1"),
            ("writer", "oncegate/orders/host-1/0"),
            ("position", "1234"),
            ("partitions", "4"),
            ("group", "g"),
            ("count", "2"),
            ("min-ms", "-5"),
            ("max-ms", "5"),
        ]
        .map(|(name, value)| (name, value.to_owned()))
        .into();
        let of = |headers: &[Header]| {
            let headers = headers.iter().map(|(name, value)| (*name, value.as_bytes()));
            Line::read("orders", Some(b"kafka/c/t/0"), headers).expect("a line")
        };
        let mut line = of(&earlier);
        let state = State {
            epoch: 3,
            sequence: 41,
            position: Some(1234),
            watermark_ms: 1_700_000_000_000,
            floor_ms: i64::MIN,
            partitions: Some(4),
            source: None,
            owner: "host-1".to_owned(),
            writer: "oncegate/orders/host-1/0".to_owned(),
            group: Some("g".to_owned()),
            lineage: Lineage::default(),
        };
        assert_eq!((line.kind, &line.state), (Kind::Mark, &state));
        assert_eq!(line.keys, Keys { count: 2, min_ms: -5, max_ms: 5 });
        assert_eq!(line.headers("orders"), earlier, "a shard without a source is told as before");
        line.state.source = Some("topic id".to_owned());
        let mut with_source = earlier;
        with_source.insert(10, ("source", "topic id".to_owned()));
        assert_eq!(line.headers("orders"), with_source);
        assert_eq!(of(&with_source), line);
        line.state.lineage = Lineage::read("0:1 40:3");
        with_source.insert(12, ("lineage", "0:1 40:3".to_owned()));
        assert_eq!(line.headers("orders"), with_source);
        assert_eq!(of(&with_source), line);
        let renew = [("kind", "renew"), ("route", "orders"), ("epoch", "3"), ("source", "another")]
            .map(|(name, value)| (name, value.to_owned()));
        let renew = of(&renew);
        assert_eq!((renew.kind, renew.state.source.as_deref()), (Kind::Renew, Some("another")));
        assert_eq!(renew.state.position, None);
    }

    #[test]
    fn what_is_no_line_is_none() {
        let read = |headers: &[(&str, &[u8])]| Line::read("r", Some(b"http/0"), headers.iter().copied());
        assert_eq!(read(&[]), None);
        assert_eq!(read(&[("kind", b"mark")]), None);
        assert_eq!(read(&[("kind", b"nothing"), ("route", b"r")]), None);
        assert_eq!(read(&[("kind", b"mark"), ("route", b"r"), ("epoch", b"x")]), None);
        assert!(read(&[("kind", b"mark"), ("route", b"r"), ("later", b"x")]).is_some());
        assert_eq!(
            Line::read("r", Some(b"\xff"), [("kind", &b"mark"[..]), ("route", b"r")].into_iter()),
            None
        );
    }

    #[test]
    fn a_route_row_comes_back() {
        let row =
            RouteRow { route_id: vec![1; 16], key_spec_id: i64::MIN + 3, algorithm: 2, secret: vec![9; 192] };
        assert_eq!(route_row(&route_bytes(&row)), Some(row));
        assert_eq!(route_row(&[0; 20]), None);
    }
}
