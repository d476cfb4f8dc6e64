//! What becomes of rows: modes, deletes, copies, bad rows, values, dead letters.

use adapters::{
    sink::{DeadLetter, Mode, OnRefused, RowKind, RowOutcome, SinkError},
    value::Value,
};

use super::{
    Bed, Encoded, Parcel, Place, Record, Shape, Target, delete, deliver, encode, letters, source, write,
};

/// Delivers and answers with the outcomes' letters.
async fn outcomes<P: Place>(bed: &mut Bed<P>, records: &[Record]) -> String {
    letters(&bed.deliver(records).await.expect("the batch goes in"))
}

/// `insert`: written once, stale afterwards; what is there stays.
pub async fn insert_skips_what_exists<T: Target>(target: &T) {
    let mut bed = Bed::new(target, Mode::Insert).await;
    assert_eq!(outcomes(&mut bed, &[write("b", 1, 1), write("a", 1, 2)]).await, "ww");
    assert_eq!(outcomes(&mut bed, &[write("a", 9, 9), write("c", 1, 3)]).await, "sw");
    let table = bed.table().await;
    assert_eq!(table["a"], (1, 2, "none".to_owned()));
    assert_eq!(table.len(), 3);
}

/// `upsert`: written, then updated, older versions too.
pub async fn upsert_takes_the_last_write<T: Target>(target: &T) {
    let mut bed = Bed::new(target, Mode::Upsert).await;
    assert_eq!(outcomes(&mut bed, &[write("a", 5, 1), write("b", 5, 1)]).await, "ww");
    assert_eq!(outcomes(&mut bed, &[write("c", 1, 2), write("a", 4, 2)]).await, "wu");
    assert_eq!(bed.table().await["a"], (4, 2, "none".to_owned()));
}

/// `upsert-if-newer`: only a higher version changes a row; an equal one is stale.
pub async fn upsert_if_newer_takes_the_highest_version<T: Target>(target: &T) {
    let mut bed = Bed::new(target, Mode::UpsertIfNewer).await;
    assert_eq!(outcomes(&mut bed, &[write("a", 5, 1), write("b", 5, 1), write("c", 5, 1)]).await, "www");
    assert_eq!(outcomes(&mut bed, &[write("a", 6, 2), write("b", 5, 2), write("c", 4, 2)]).await, "uss");
    let table = bed.table().await;
    assert_eq!((table["a"].1, table["b"].1, table["c"].1), (2, 1, 1));
}

/// A column left out gets its default when the row is made, and stays as it is when the row is changed.
pub async fn a_default_applies_once_and_stays<T: Target>(target: &T) {
    let mut bed = Bed::new(target, Mode::Upsert).await;
    let rows = [write("a", 1, 1), write("b", 1, 1).note("set")];
    assert_eq!(outcomes(&mut bed, &rows).await, "ww");
    let rows = [write("a", 2, 1).note("later"), write("b", 2, 1)];
    assert_eq!(outcomes(&mut bed, &rows).await, "uu");
    let rows =
        [write("c", 1, 1).note("one"), write("c", 2, 2), write("c", 3, 3).note("three"), write("c", 4, 4)];
    assert_eq!(outcomes(&mut bed, &rows).await, "wuuu");
    let table = bed.table().await;
    assert_eq!((table["a"].2.as_str(), table["b"].2.as_str()), ("later", "set"));
    assert_eq!(table["c"], (4, 4, "three".to_owned()));
}

/// Without versions a tombstone deletes what is there: updated; nothing there: written.
pub async fn deletes_by_tombstone<T: Target>(target: &T) {
    for mode in [Mode::Insert, Mode::Upsert] {
        let mut bed = Bed::new(target, mode).await;
        assert_eq!(outcomes(&mut bed, &[write("a", 1, 1), write("b", 1, 1)]).await, "ww");
        assert_eq!(outcomes(&mut bed, &[delete("a", 1), delete("x", 1)]).await, "uw", "{mode:?}");
        assert_eq!(outcomes(&mut bed, &[write("a", 2, 2)]).await, "w", "{mode:?}");
        // Before and after a write of the same batch.
        let rows = [delete("a", 3), write("a", 3, 3), write("c", 1, 1), delete("c", 1)];
        assert_eq!(outcomes(&mut bed, &rows).await, "uwwu", "{mode:?}");
        let table = bed.table().await;
        assert_eq!(table.keys().collect::<Vec<_>>(), ["a", "b"], "{mode:?}");
        assert_eq!(table["a"].1, 3, "{mode:?}");
    }
}

/// A tombstone has a version too: an older one is stale, and an older write after it is stale.
pub async fn versioned_deletes_keep_older_writes_away<T: Target>(target: &T) {
    let mut bed = Bed::new(target, Mode::UpsertIfNewer).await;
    assert_eq!(outcomes(&mut bed, &[write("a", 5, 1), write("b", 5, 1)]).await, "ww");
    assert_eq!(outcomes(&mut bed, &[delete("a", 4), delete("b", 5)]).await, "ss", "not newer than the rows");
    assert_eq!(outcomes(&mut bed, &[delete("a", 7), delete("x", 7)]).await, "uw");
    assert_eq!(
        outcomes(&mut bed, &[write("a", 6, 2), write("x", 7, 2)]).await,
        "ss",
        "not newer than the tombstones"
    );
    assert_eq!(outcomes(&mut bed, &[delete("a", 7), delete("a", 6)]).await, "ss", "nor are these");
    assert_eq!(outcomes(&mut bed, &[write("a", 8, 3), delete("x", 9)]).await, "ww");
    assert_eq!(outcomes(&mut bed, &[write("x", 8, 3), delete("a", 9)]).await, "su");
    assert_eq!(bed.table().await.keys().collect::<Vec<_>>(), ["b"]);
}

/// Without its version nobody knows what a tombstone outranks.
pub async fn a_versioned_delete_needs_its_version<T: Target>(target: &T) {
    let bed = Bed::new(target, Mode::UpsertIfNewer).await;
    for version in [Value::Missing, Value::Json("null")] {
        let bad = encode(
            &*bed.encoder,
            RowKind::Delete,
            &[Value::Json("\"a\""), version, Value::Missing, Value::Missing],
        );
        assert_eq!(bad.expect_err("refused").column, "version");
    }
    let whole = [Value::Json("\"a\""), Value::Json("1"), Value::Missing, Value::Missing];
    encode(&*bed.encoder, RowKind::Delete, &whole).expect("row key and version are enough");
    let bed = Bed::new(target, Mode::Upsert).await;
    let keyed = [Value::Json("\"a\""), Value::Missing, Value::Missing, Value::Missing];
    encode(&*bed.encoder, RowKind::Delete, &keyed).expect("without versions the row key is enough");
    let bad = encode(&*bed.encoder, RowKind::Delete, &[Value::Missing; 4]);
    assert_eq!(bad.expect_err("refused").column, "id");
}

/// P8: `insert` keeps the first, `upsert` the last, `upsert-if-newer` the highest version and the first among equals.
pub async fn copies_of_a_row_key_in_one_batch<T: Target>(target: &T) {
    let copies = [write("a", 2, 1), write("b", 1, 2), write("a", 7, 3), write("a", 7, 4), write("a", 3, 5)];
    for (mode, expected, amount) in
        [(Mode::Insert, "wwsss", 1), (Mode::Upsert, "wwuuu", 5), (Mode::UpsertIfNewer, "swwss", 3)]
    {
        let mut bed = Bed::new(target, mode).await;
        assert_eq!(outcomes(&mut bed, &copies).await, expected, "{mode:?}");
        let table = bed.table().await;
        assert_eq!((table["a"].1, table["b"].1, table.len()), (amount, 2, 2), "{mode:?}");
    }
}

/// Rule 10: the rest goes in, the mark is intact and knows the outcome.
pub async fn rule10_a_bad_row_costs_one_outcome<T: Target>(target: &T) {
    for mode in [Mode::Insert, Mode::Upsert, Mode::UpsertIfNewer] {
        let mut bed = Bed::new(target, mode).await;
        let mut rows: Vec<Record> = (0..40).map(|n| write(&format!("k{n}"), 1, n)).collect();
        for bad in [0, 17, 18, 39] {
            rows[bad].amount = -1;
        }
        let answer = bed.deliver(&rows).await.expect("the batch goes in");
        for (index, outcome) in answer.iter().enumerate() {
            match outcome {
                RowOutcome::Refused { reason } => {
                    assert!([0, 17, 18, 39].contains(&index), "{mode:?} row {index}: {reason}");
                    assert!(
                        !reason.is_empty() && !reason.contains("-1") && !reason.contains("k17"),
                        "{reason}"
                    );
                }
                outcome => assert_eq!(*outcome, RowOutcome::Written, "{mode:?} row {index}"),
            }
        }
        assert_eq!(bed.table().await.len(), 36);
        let dead = "SELECT CAST(count(*) AS text) FROM oncegate_dead_letters";
        assert_eq!(bed.number(dead).await, 0, "reported, not kept");
        let marks = bed.session.marks_since(&bed.shards[0].shard.clone(), 0).await.expect("marks");
        assert_eq!(marks.len(), 1);
        assert_eq!(
            &marks[0].block[..],
            super::block(&bed_step(&bed), &answer),
            "the mark says what became of each row"
        );
        assert_eq!(outcomes(&mut bed, &[write("after", 1, 1)]).await, "w", "the session goes on");
    }
}

/// The step that `bed` delivered last.
fn bed_step<P: Place>(bed: &Bed<P>) -> adapters::sink::ShardStep {
    let mut step = bed.steps().remove(0);
    step.sequence -= 1;
    step
}

/// Rule 10 for copies of one row key: the good one goes in, wherever the bad one stands.
pub async fn rule10_a_bad_copy_gives_way_to_a_good_one<T: Target>(target: &T) {
    for mode in [Mode::Insert, Mode::Upsert, Mode::UpsertIfNewer] {
        let mut bed = Bed::new(target, mode).await;
        // The bad copy would win in every mode.
        let (good, bad) = (write("a", 1, 1), write("a", 2, -1));
        let rows = if mode == Mode::Insert { [bad, good] } else { [good, bad] };
        let expected = if mode == Mode::Insert { "rw" } else { "wr" };
        assert_eq!(outcomes(&mut bed, &rows).await, expected, "{mode:?}");
        assert_eq!(bed.table().await["a"], (1, 1, "none".to_owned()), "{mode:?}");
        let again = [write("a", 5, -5), write("a", 6, -6)];
        assert_eq!(outcomes(&mut bed, &again).await.len(), 2);
        assert_eq!(bed.table().await["a"].1, 1, "{mode:?}: nothing bad is in");
    }
}

/// `insert` without row key: every row is one of its own; what a unique index says is a refusal.
pub async fn rows_without_row_key<T: Target>(target: &T) {
    let mut bed = Bed::shaped(target, Shape { keyed: false, ..Shape::new(Mode::Insert) }).await;
    assert_eq!(outcomes(&mut bed, &[write("a", 1, 1), write("b", 1, 2), write("a", 1, 3)]).await, "wwr");
    assert_eq!(outcomes(&mut bed, &[write("b", 1, 4), write("c", 1, 5)]).await, "rw");
    assert_eq!(bed.table().await.len(), 3);
    let (row, key) = encode(
        &*bed.encoder,
        RowKind::Write,
        &[Value::Json("\"z\""), Value::Json("1"), Value::Json("1"), Value::Missing],
    )
    .expect("a good row");
    assert!(!row.is_empty() && key.is_empty());
    encode(
        &*bed.encoder,
        RowKind::Delete,
        &[Value::Json("\"z\""), Value::Json("1"), Value::Missing, Value::Missing],
    )
    .expect_err("a tombstone without row key deletes nothing");
}

/// 3,000 rows: new ones, then half of them again among new ones, with some bad ones.
pub async fn large_batches_of_every_kind<T: Target>(target: &T) {
    for mode in [Mode::Insert, Mode::Upsert, Mode::UpsertIfNewer] {
        let mut bed = Bed::new(target, mode).await;
        let record = |n: i64, version: i64| write(&format!("key-{:05}", (n * 7919) % 100_000), version, n);
        let first: Vec<Record> = (0..3000).map(|n| record(n, 1)).collect();
        let answer = bed.deliver(&first).await.expect("the batch goes in");
        assert!(answer.iter().all(|outcome| *outcome == RowOutcome::Written), "{mode:?}");
        let mut second: Vec<Record> = (1500..4500).map(|n| record(n, 2)).collect();
        second[100].amount = -1;
        second[2000].amount = -1;
        let answer = letters(&bed.deliver(&second).await.expect("the batch goes in"));
        let met = if mode == Mode::Insert { 's' } else { 'u' };
        for (index, letter) in answer.chars().enumerate() {
            let expected = match index {
                // A row that is there hides that its copy is bad, where nothing would be written.
                100 if mode == Mode::Insert => continue,
                100 | 2000 => 'r',
                0..1500 => met,
                _ => 'w',
            };
            assert_eq!(letter, expected, "{mode:?} row {index}");
        }
        assert_eq!(bed.table().await.len(), 4499, "{mode:?}");
    }
}

/// What goes in comes out: integers to their bounds, any text.
pub async fn values_are_kept_exactly<T: Target>(target: &T) {
    let mut bed = Bed::new(target, Mode::Upsert).await;
    let notes = [
        "",
        "null",
        "a\"b\\c'd",
        "tab\tline\nend",
        "é e\u{301} 😀 \u{10ffff}",
        "{\"x\": 1}",
        " 1.0 ",
        "0x00",
    ];
    let mut rows: Vec<Record> = notes.iter().map(|note| write(note, 1, 1).note(note)).collect();
    rows.push(write("low", i64::MIN, 0));
    rows.push(write("high", i64::MAX, i32::MAX.into()));
    rows.push(write("2^53", (1 << 53) + 1, 0));
    let answer = outcomes(&mut bed, &rows).await;
    assert!(answer.chars().all(|letter| letter == 'w'), "{answer}");
    let table = bed.table().await;
    for note in notes {
        assert_eq!(table[note].2, note);
    }
    assert_eq!((table["low"].0, table["high"].0, table["2^53"].0), (i64::MIN, i64::MAX, (1 << 53) + 1));
    assert_eq!(table["high"].1, i64::from(i32::MAX));
}

/// Lossless or refused, and the error names the column; the buffers stay as they were.
pub async fn what_cannot_be_kept_is_a_bad_value<T: Target>(target: &T) {
    let bed = Bed::new(target, Mode::Upsert).await;
    let good = ["\"a\"", "1", "1", "\"n\""];
    let bad = [
        (0, "\"nul \\u0000\""),
        (0, "\"\\ud800 alone\""),
        (0, "12"),
        (0, "null"),
        (1, "9223372036854775808"),
        (1, "1.5"),
        (1, "\"one\""),
        (1, "null"),
        (1, "true"),
        (2, "1e400"),
        (2, "[1]"),
        (3, "{\"a\": 1}"),
        (3, "\"\\udc00\""),
    ];
    let names = ["id", "version", "amount", "note"];
    for (column, json) in bad.into_iter().filter(|(column, json)| !target.takes(names[*column], json)) {
        let mut values = good.map(Value::Json);
        values[column] = Value::Json(json);
        let (mut row, mut key) = (b"row".to_vec(), b"key".to_vec());
        let error = bed.encoder.encode(RowKind::Write, &values, &mut row, &mut key).expect_err(json);
        assert_eq!(error.column, names[column], "{json}: {error}");
        assert!(!error.column_type.is_empty() && !error.reason.is_empty(), "{json}: {error}");
        assert_eq!((row.as_slice(), key.as_slice()), (&b"row"[..], &b"key"[..]), "{json}");
    }
    for version in ["1", "1.0", "10e-1", "\"1\""] {
        let values = [Value::Json("\"a\""), Value::Json(version), Value::Json("1"), Value::Missing];
        encode(&*bed.encoder, RowKind::Write, &values).expect(version);
    }
    encode(&*bed.encoder, RowKind::Write, &[Value::Missing; 3]).expect_err("three values for four columns");
}

/// P10: dead letters are in the batch's transaction, as they came.
pub async fn p10_dead_letters_come_with_their_batch<T: Target>(target: &T) {
    let mut bed = Bed::new(target, Mode::Insert).await;
    let payload = b"not JSON \x00\xff".as_slice();
    let letter =
        |payload| DeadLetter { source: source(0, payload), kind: "late", reason: "too late".to_owned() };
    let rows = Encoded::of(&*bed.encoder, &[write("a", 1, 1), write("b", 1, -1)]);
    let steps = bed.steps();
    let parcel = Parcel {
        rows: &rows,
        steps: &steps,
        dead_letters: &[letter(Some(payload)), letter(None)],
        on_refused: OnRefused::DeadLetter,
        known_new: true,
        marks: true,
    };
    let receipts = deliver(&mut *bed.session, &parcel).await.expect("the batch goes in");
    assert_eq!(letters(&receipts.rows), "wr");
    let kinds = "SELECT kind FROM oncegate_dead_letters ORDER BY id";
    let kinds: Vec<String> = bed.place.texts(kinds).await.into_iter().flatten().collect();
    assert_eq!(kinds, ["late", "late", "rejected"]);
    let count = "SELECT CAST(count(*) AS text) FROM oncegate_dead_letters";
    let whole = format!(
        "{count} WHERE kind = 'late' AND payload IS NULL AND position = 77 AND event_ms = 1000 AND octet_length(key) = 16"
    );
    assert_eq!(bed.number(&whole).await, 1);
    assert_eq!(bed.number(&format!("{count} WHERE kind = 'late' AND octet_length(payload) = 11")).await, 1);
    assert_eq!(
        bed.number(&format!("{count} WHERE reason LIKE '%amount%' AND shard = 'http/0' AND route = 'route'"))
            .await,
        1
    );

    // The same batch again is fenced off, and its dead letters with it.
    deliver(&mut *bed.session, &parcel).await.expect_err("the step was done");
    assert_eq!(bed.number(count).await, 3);
    bed.acquire(&[super::SHARD]).await;
    let mut steps = bed.steps();
    steps[0].epoch -= 1;
    let fenced = deliver(&mut *bed.session, &Parcel { steps: &steps, ..parcel }).await;
    assert!(matches!(fenced, Err(SinkError::Fenced { .. })), "{fenced:?}");
    assert_eq!(bed.number(count).await, 3);
}

/// A route may want all or nothing: then nothing is in, and the same step can be taken by another batch.
pub async fn a_refused_row_can_abort_its_batch<T: Target>(target: &T) {
    let mut bed = Bed::new(target, Mode::Insert).await;
    let rows = Encoded::of(&*bed.encoder, &[write("a", 1, 1), write("b", 1, -1), write("c", 1, 1)]);
    let steps = bed.steps();
    let letter = DeadLetter { source: source(0, None), kind: "late", reason: "too late".to_owned() };
    let parcel = Parcel {
        rows: &rows,
        steps: &steps,
        dead_letters: &[letter],
        on_refused: OnRefused::Abort,
        known_new: false,
        marks: true,
    };
    let refused = deliver(&mut *bed.session, &parcel).await;
    assert!(
        matches!(&refused, Err(SinkError::Refused { row: 1, reason }) if !reason.is_empty()),
        "{refused:?}"
    );
    assert!(bed.session.connected());
    let nothing = "SELECT CAST((SELECT count(*) FROM rows) + (SELECT count(*) FROM oncegate_marks) \
                   + (SELECT count(*) FROM oncegate_dead_letters) AS text)";
    assert_eq!((bed.number(nothing).await, bed.sequence().await), (0, 0));
    assert_eq!(outcomes(&mut bed, &[write("a", 1, 1)]).await, "w");
}

/// One list of all that does not fit, each with what to do.
pub async fn the_probe_lists_all_misfits<T: Target>(target: &T) {
    let shape = Shape::new(Mode::UpsertIfNewer);
    let place = target.place(&shape).await;
    place.execute("CREATE TABLE loose (id text, amount integer)").await;
    let columns = ["id", "version", "nope"].map(str::to_owned).to_vec();
    let loose = Shape { table: "loose", columns: Some(columns), ..shape.clone() };
    let misfits = place.sink(&loose).probe().await.expect_err("it does not fit");
    let all: Vec<String> = misfits.iter().map(ToString::to_string).collect();
    for part in ["nope", "version", "UNIQUE INDEX"] {
        assert!(all.iter().any(|misfit| misfit.contains(part)), "{part} is in none of {all:#?}");
    }
    assert!(misfits.iter().all(|misfit| !misfit.what.is_empty() && !misfit.remedy.is_empty()), "{all:#?}");
    let missing =
        place.sink(&Shape { table: "missing", ..shape.clone() }).probe().await.expect_err("no such table");
    assert!(missing.iter().any(|misfit| misfit.to_string().contains("missing")), "{missing:?}");
    place.execute("CREATE VIEW seen AS SELECT * FROM rows").await;
    place.sink(&Shape { table: "seen", ..shape.clone() }).probe().await.expect_err("a view keeps no rows");
    place.sink(&shape).probe().await.expect("the table of all cases fits");
}
