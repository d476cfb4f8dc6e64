//! Golden bytes: never edit an expected value here; a change means that every key ever kept has another name.

use dedup_store::{Algorithm, Identity};
use proptest::prelude::*;

use super::*;

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn part(json: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    KeyBuffer::new(&mut bytes).json(json).unwrap();
    bytes
}

fn hasher(algorithm: Algorithm) -> Hasher {
    let secret = std::array::from_fn(|at| at as u8);
    Hasher::new(&Identity { route_id: *b"route id 16 byte", key_spec_id: 7, algorithm, secret })
}

fn name(json: &str, algorithm: Algorithm) -> String {
    let hasher = hasher(algorithm);
    let mut key = Vec::new();
    KeyBuffer::begin(&mut key, hasher.prefix(), "tenant", Kind::Parts).json(json).unwrap();
    hasher.fingerprint(&key).to_string()
}

#[test]
fn golden_key_bytes_of_each_json_value() {
    let mut missing = Vec::new();
    KeyBuffer::new(&mut missing).missing();
    assert_eq!(hex(&missing), "0000000000");
    for (json, bytes) in [
        ("null", "0100000000"),
        ("false", "0200000000"),
        ("true", "0300000000"),
        ("1", "040000000131"),
        ("1.0", "0400000003312e30"),
        ("1e0", "0400000003316530"),
        ("-0", "04000000022d30"),
        ("9007199254740993", "040000001039303037313939323534373430393933"),
        (
            "0.1000000000000000055511151231257827",
            "0400000024302e31303030303030303030303030303030303535353131313531323331323537383237",
        ),
        ("\"1\"", "050000000131"),
        ("\"\"", "0500000000"),
        ("\"null\"", "05000000046e756c6c"),
        ("\"a\"", "050000000161"),
        (r#""\u0061""#, "050000000161"),
        (r#""\u00e9""#, "0500000002c3a9"),
        ("\"\u{e9}\"", "0500000002c3a9"),
        ("\"e\u{301}\"", "050000000365cc81"),
        (r#""\ud83d\ude00\u0000""#, "0500000005f09f988000"),
        ("[]", "0600000000"),
        ("{}", "0700000000"),
        ("[1,[\"a\"],null]", "060000000304000000013106000000010500000001610100000000"),
        ("{\"b\":1 , \"a\":[ ]}", "070000000205000000016106000000000500000001620400000001 31"),
    ] {
        assert_eq!(hex(&part(json)), bytes.replace(' ', ""), "{json}");
    }
}

#[test]
fn golden_key_bytes_of_what_is_no_json() {
    let mut bytes = Vec::new();
    let mut buffer = KeyBuffer::begin(&mut bytes, b"\xff", "t1", Kind::Parts);
    buffer.header(b"h");
    buffer.kafka_key(b"k");
    buffer.kafka_header(b"x");
    buffer.position("to", 3, -1);
    buffer.content(b"{}");
    assert_eq!(
        hex(&bytes),
        "ff0000000274310110000000016811000000016b120000000178130000000e00000003ffffffffffffffff746f14000000027b7d"
    );
    KeyBuffer::begin(&mut bytes, b"\xff", "", Kind::Explicit).explicit(b"k", None);
    assert_eq!(hex(&bytes), "ff000000000215000000016b");
    KeyBuffer::begin(&mut bytes, b"\xff", "", Kind::Explicit).explicit(b"k", Some(2));
    assert_eq!(hex(&bytes), "ff000000000215000000016b160000000400000002");
    KeyBuffer::begin(&mut bytes, b"", "", Kind::Effect).effect("k");
    assert_eq!(hex(&bytes), "000000000517000000016b");
}

#[test]
fn golden_fingerprints() {
    let names = ["1", "\"1\"", "1.0", "1e0", "null", "\"e\u{301}\"", "{\"a\":[1]}"]
        .map(|json| [json.to_owned(), name(json, Algorithm::Xxh3Secret), name(json, Algorithm::SipHash24)]);
    assert_eq!(
        names,
        [
            ["1", "0200bc282bdd4ce13f558c2b0b20471b", "1b3ff8690a1aab13ee368619c2f69361"],
            ["\"1\"", "129b771b6f2ec5b3891cc4603d017c48", "98bab38928b2bb395c045318a257549f"],
            ["1.0", "424a6bd73e1e596c7a61eee35de0e024", "95b1202823e91daab65fc4d1adb8406d"],
            ["1e0", "65bb5068c7fa7a4a8bb34f35bc64d1ff", "f72a26d8c3aaf33de56016cefec3a585"],
            ["null", "ff0b6631b434f95affae65a2a6f20960", "5fbaa4d05b11b41e4f1f5a3b139d892d"],
            ["\"e\u{301}\"", "0a1f583e5a95031c95c995f9a915a3ea", "20724ff1901154419eb68db471e687f7"],
            ["{\"a\":[1]}", "bb7087406e41a47153ef19c9c1fce214", "e234212e98dcbefc4e4cfcdaa2e169f1"]
        ]
    );
    assert_eq!(
        effect_fingerprint(&hasher(Algorithm::Xxh3Secret), "", "invoice-42").to_string(),
        "c095e640003f0de7c21925565608d237"
    );
}

#[test]
fn golden_key_spec_ids() {
    let id = |parts: Vec<Part>| KeySpec::new(parts).unwrap().id();
    let pointers = KeySpec::pointers(["/user_id", "/kind"]).unwrap();
    let header = || Part::Header("X-Id".into());
    let ids = [
        pointers.id(),
        KeySpec::pointers(["/kind", "/user_id"]).unwrap().id(),
        pointers.clone().with_idempotency_key(IdempotencyKey::Ignore).unwrap().id(),
        KeySpec::idempotency_key().id(),
        id(vec![header()]),
        id(vec![Part::KafkaHeader("X-Id".into())]),
        id(vec![Part::KafkaKey]),
        id(vec![Part::KafkaPosition]),
        id(vec![Part::Content]),
    ];
    assert_eq!(
        ids,
        [
            3122736322260400795,
            1354517184679482933,
            1200601693594423921,
            14351293866376898573,
            16182605957799774407,
            543316631025070554,
            199700870268997100,
            4146540523207292372,
            8565281909968184415,
        ]
    );
    assert_eq!(ids[0], pointers.strict(true).on_missing(OnMissing::Allow).id());
    assert_eq!(id(vec![header()]), id(vec![Part::Header("x-id".into())]));
}

#[test]
fn values_that_look_alike_have_different_names() {
    let parts = [
        "1",
        "\"1\"",
        "1.0",
        "1e0",
        "1E0",
        "null",
        "\"\"",
        "\"null\"",
        "true",
        "\"true\"",
        "[]",
        "{}",
        "[1]",
        "[[1]]",
        "{\"1\":1}",
    ];
    let mut names: Vec<Vec<u8>> = parts.iter().map(|json| part(json)).collect();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), parts.len());
}

#[test]
fn composite_parts_do_not_run_together() {
    let key = |parts: [&str; 2]| parts.iter().flat_map(|json| part(json)).collect::<Vec<u8>>();
    assert_ne!(key(["\"a\"", "\"bc\""]), key(["\"ab\"", "\"c\""]));
    assert_ne!(key(["\"\"", "\"a\""]), key(["\"a\"", "\"\""]));
    assert_ne!(part("[\"a\",\"b\"]"), part("[[\"a\"],\"b\"]"));
}

#[test]
fn order_and_white_space_of_members_do_not_count_and_repeats_are_refused() {
    assert_eq!(part(r#"{"a":1,"b":{"c":2,"d":3}}"#), part(r#"{ "b" : {"d":3,"\u0063":2}, "a" : 1 }"#));
    let repeat = |json| KeyBuffer::new(&mut Vec::new()).json(json).unwrap_err();
    assert!(repeat(r#"{"a":1,"a":1}"#).contains("\"a\" comes twice"));
    assert!(repeat(r#"[{"a":{"b":1,"\u0062":1}}]"#).contains("\"b\" comes twice"));
    assert!(repeat(r#""\ud800""#).contains("surrogate"));
    assert!(repeat(&format!("{}{}", "[".repeat(200), "]".repeat(200))).contains("deeper than 128"));
}

/// The conformance cases A07 to A21 of `Idempotency-Key`.
#[test]
fn idempotency_keys_are_canonical_whether_quoted_or_not() {
    let lenient = KeySpec::idempotency_key();
    let strict = lenient.clone().strict(true);
    let key = |spec: &KeySpec, value: &str| {
        spec.canonical_idempotency_key(value.as_bytes())
            .map(|key| String::from_utf8(key.into_owned()).unwrap())
    };
    for (value, canonical) in [
        ("\"abc\"", "abc"),
        (r#""foo \"bar\"""#, r#"foo "bar""#),
        (r#""a\\b""#, r"a\b"),
        ("  \"foo\"  ", "foo"),
        ("\"a%0d%0aSET x\"", "a%0d%0aSET x"),
        ("\"../:*\"", "../:*"),
    ] {
        assert_eq!(key(&lenient, value).as_deref(), Ok(canonical));
        assert_eq!(key(&strict, value).as_deref(), Ok(canonical));
    }
    for (value, raw) in [
        ("abc", "abc"),
        ("8e03978e-40d5-43e8-bc93-6894a57f9324", "8e03978e-40d5-43e8-bc93-6894a57f9324"),
        ("\"foo", "\"foo"),
        (r#""foo \"#, r#""foo \"#),
        (r#""foo \x""#, r#""foo \x""#),
        ("\"", "\""),
        ("\"a\";b=1", "\"a\";b=1"),
        (r#""a"b""#, r#""a"b""#),
        ("\"é\"", "\"é\""),
        ("\"a\u{7f}\"", "\"a\u{7f}\""),
    ] {
        assert_eq!(key(&lenient, value).as_deref(), Ok(raw));
        assert!(key(&strict, value).unwrap_err().contains("RFC 9651"), "{value}");
    }
    assert_eq!(key(&lenient, &"a".repeat(255)).unwrap().len(), 255);
    assert_eq!(key(&strict, &format!("\"{}\"", "\\\"".repeat(255))).unwrap().len(), 255);
    assert!(key(&lenient, &"a".repeat(256)).unwrap_err().contains("256 bytes, more than 255"));
    assert!(key(&lenient, "\"\"").unwrap_err().contains("empty"));
    assert!(key(&lenient, " ").unwrap_err().contains("empty"));
}

#[test]
fn key_specs_that_name_nothing_or_twice_the_same_are_refused() {
    assert_eq!(KeySpec::pointers([]), Err(KeySpecError::NoParts));
    assert_eq!(KeySpec::pointers(["/a", "/b", "/a"]), Err(KeySpecError::Twice(3)));
    assert!(matches!(KeySpec::pointers(["a"]), Err(KeySpecError::Pointer(_))));
    let many: Vec<String> = (0..17).map(|at| format!("/{at}")).collect();
    assert_eq!(KeySpec::pointers(many.iter().map(String::as_str)), Err(KeySpecError::TooManyParts(17)));
    assert_eq!(KeySpec::new(vec![Part::Header(String::new())]), Err(KeySpecError::NoName));
    let explicit = KeySpec::idempotency_key();
    assert_eq!(explicit.with_idempotency_key(IdempotencyKey::First), Err(KeySpecError::NoParts));
}

#[test]
fn fingerprints_are_read_back() {
    let name = hasher(Algorithm::Xxh3Secret).fingerprint(b"x");
    assert_eq!(parse_fingerprint(&name.to_string()), Some(name));
    for bad in ["", "00", &"0".repeat(33), &format!("+{}", "0".repeat(31)), &"g".repeat(32)] {
        assert_eq!(parse_fingerprint(bad), None);
    }
}

fn json() -> impl Strategy<Value = serde_json::Value> {
    let leaf = prop_oneof![
        Just(serde_json::Value::Null),
        any::<bool>().prop_map(Into::into),
        (0..3_i64).prop_map(Into::into),
        "[01ab\"]{0,2}".prop_map(Into::into),
    ];
    leaf.prop_recursive(3, 12, 3, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..3).prop_map(Into::into),
            prop::collection::hash_map("[ab]{0,2}", inner, 0..3)
                .prop_map(|members| serde_json::Value::Object(members.into_iter().collect())),
        ]
    })
}

proptest! {
    /// Two lists of parts have the same bytes only if they are the same.
    #[test]
    fn bytes_are_injective(a in prop::collection::vec(json(), 1..4), b in prop::collection::vec(json(), 1..4)) {
        let bytes = |values: &[serde_json::Value]| values.iter().flat_map(|value| part(&value.to_string())).collect::<Vec<u8>>();
        prop_assert_eq!(bytes(&a) == bytes(&b), a == b);
    }
}
