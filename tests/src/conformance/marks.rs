//! Marks: kept with their batch, read in order, expired under the fence (P6, P11, P13).

use adapters::sink::{Batch, MarkBlock, Mode, OnRefused, RowOutcome, SinkError};
use bytes::Bytes;

use super::{Bed, Encoded, Parcel, SHARD, Target, block, deliver, write};

/// P13: duplicates only: no rows, no marks, the position moves.
pub async fn empty_batches_move_positions<T: Target>(target: &T) {
    let mut bed = Bed::new(target, Mode::Insert).await;
    let rows = Encoded::of(&*bed.encoder, &[]);
    for n in 1..4 {
        let mut steps = bed.steps();
        steps[0].position = Some(n * 1000);
        let parcel = Parcel {
            rows: &rows,
            steps: &steps,
            dead_letters: &[],
            on_refused: OnRefused::Report,
            known_new: false,
            marks: false,
        };
        let receipts = deliver(&mut *bed.session, &parcel).await.expect("goes in");
        assert!(receipts.rows.is_empty());
        bed.advance(&steps);
    }
    let state = bed.rival("second", &[SHARD]).await.shards.remove(0);
    assert_eq!((state.sequence, state.position, state.watermark_ms), (3, Some(3000), 300));
    assert_eq!(bed.number("SELECT CAST(count(*) AS text) FROM oncegate_marks").await, 0);
}

/// The marks are sealed once the outcomes are known, and hold them.
pub async fn marks_say_what_became_of_each_row<T: Target>(target: &T) {
    let mut bed = Bed::new(target, Mode::Upsert).await;
    let steps = bed.steps();
    bed.deliver(&[write("a", 1, 1)]).await.expect("goes in");
    let second = bed.steps();
    let outcomes =
        bed.deliver(&[write("a", 1, 2), write("b", 1, -1), write("c", 1, 1)]).await.expect("goes in");
    let marks = bed.session.marks_since(&SHARD.into(), 0).await.expect("marks");
    assert_eq!(marks.iter().map(|mark| mark.sequence).collect::<Vec<_>>(), [1, 2]);
    assert_eq!(marks[0].block, block(&steps[0], &[RowOutcome::Written]));
    assert_eq!(marks[1].block, block(&second[0], &outcomes));
    assert!(marks[1].block.ends_with(b" urw"), "{:?}", marks[1].block);
    assert_eq!(bed.number("SELECT CAST(sum(count) AS text) FROM oncegate_marks").await, 4);
}

/// Ascending, above the sequence asked for, of one shard only, in pages of about 16 MiB.
pub async fn marks_come_in_order_and_in_pages<T: Target>(target: &T) {
    const BIG: usize = 3 << 20;
    let mut bed = Bed::new(target, Mode::Insert).await;
    bed.acquire(&["p/0", "p/1"]).await;
    for n in 1..=14u8 {
        let steps = bed.steps();
        // One is larger than a page; shard p/1 keeps few.
        let size = if n == 7 { (16 << 20) + 1 } else { BIG };
        let seal = |_: &[RowOutcome]| {
            let mark = |step, size| MarkBlock {
                step,
                min_ms: 0,
                max_ms: 0,
                count: 1,
                block: Bytes::from(vec![n; size]),
            };
            let mut marks = vec![mark(0, size)];
            if n % 5 == 0 {
                marks.push(mark(1, 10));
            }
            marks
        };
        let batch = Batch {
            steps: &steps,
            rows: &[],
            dead_letters: &[],
            on_refused: OnRefused::Report,
            known_new: false,
            seal: &seal,
        };
        bed.session.deliver(&batch).await.expect("goes in");
        bed.advance(&steps);
    }
    let (mut at, mut pages) = (2, Vec::new());
    loop {
        let page = bed.session.marks_since(&"p/0".into(), at).await.expect("marks");
        let Some(last) = page.last() else { break };
        let bytes: usize = page.iter().map(|mark| mark.block.len()).sum();
        assert!(page.len() == 1 || bytes <= (16 << 20) + BIG, "{bytes} bytes in a page");
        at = last.sequence;
        pages.push(page);
        assert!(pages.len() < 20, "the pages have no end");
    }
    assert!(pages.len() >= 3, "{} pages", pages.len());
    let all: Vec<_> = pages.concat();
    assert_eq!(all.iter().map(|mark| mark.sequence).collect::<Vec<_>>(), (3..=14).collect::<Vec<i64>>());
    for mark in &all {
        let size = if mark.sequence == 7 { (16 << 20) + 1 } else { BIG };
        assert!(mark.block.len() == size && mark.block.iter().all(|byte| i64::from(*byte) == mark.sequence));
    }
    let few = bed.session.marks_since(&"p/1".into(), 0).await.expect("marks");
    assert_eq!(few.iter().map(|mark| mark.sequence).collect::<Vec<_>>(), [5, 10]);
    assert!(bed.session.marks_since(&"p/2".into(), 0).await.expect("no such shard").is_empty());
}

/// P11: what is gone lies below the floor that the shard row then says; the floor never falls.
pub async fn p11_expiry_raises_the_floor_in_its_own_transaction<T: Target>(target: &T) {
    let mut bed = Bed::new(target, Mode::Insert).await;
    for n in 0..5 {
        bed.deliver(&[write(&format!("k{n}"), 1, 1)]).await.expect("goes in");
    }
    // Newest keys of the marks: 100, 200, .. 500.
    let owned = bed.owned();
    assert_eq!(bed.session.expire_marks(&owned, 300).await.expect("ours"), 2);
    assert_eq!(bed.session.expire_marks(&owned, 300).await.expect("ours"), 0);
    let marks = bed.session.marks_since(&SHARD.into(), 0).await.expect("marks");
    assert_eq!(marks.iter().map(|mark| mark.sequence).collect::<Vec<_>>(), [3, 4, 5], "300 is not below 300");
    assert_eq!(bed.session.expire_marks(&owned, 50).await.expect("ours"), 0);
    let state = bed.rival("second", &[SHARD]).await.shards.remove(0);
    assert_eq!((state.floor_ms, state.sequence), (300, 5));
}

/// P11: under a lost epoch nothing is deleted and no floor moves, of the other shards neither.
pub async fn p11_expiry_is_fenced<T: Target>(target: &T) {
    let mut bed = Bed::new(target, Mode::Insert).await;
    bed.acquire(&["p/0", "p/1"]).await;
    bed.deliver(&[write("a", 1, 1)]).await.expect("goes in");
    let owned = bed.owned();
    drop(bed.rival("second", &["p/1"]).await);
    let fenced = bed.session.expire_marks(&owned, 1000).await;
    assert!(matches!(&fenced, Err(SinkError::Fenced { shard, .. }) if shard == "p/1"), "{fenced:?}");
    let marks = "SELECT CAST(count(*) AS text) FROM oncegate_marks";
    let floors = "SELECT CAST(count(*) AS text) FROM oncegate_shards WHERE floor_ms >= 0";
    assert_eq!((bed.number(marks).await, bed.number(floors).await), (2, 0));
    assert_eq!(bed.session.expire_marks(&owned[..1], 1000).await.expect("still ours"), 1);
    assert_eq!((bed.number(marks).await, bed.number(floors).await), (1, 1));
}

/// P11: after a reset nothing of the route is known any more, and reading goes on where it was.
pub async fn p11_forgetting_all_takes_marks_and_floors_and_leaves_positions<T: Target>(target: &T) {
    let mut bed = Bed::new(target, Mode::Insert).await;
    for n in 0..5 {
        bed.deliver(&[write(&format!("k{n}"), 1, 1)]).await.expect("goes in");
    }
    let owned = bed.owned();
    bed.session.expire_marks(&owned, 300).await.expect("ours");
    let before = bed.session.shards("").await.expect("shards").remove(0);
    assert!(before.floor_ms == 300 && before.watermark_ms > 0);
    let stale: Vec<_> = owned.iter().map(|(shard, epoch)| (shard.clone(), epoch - 1)).collect();
    let fenced = bed.session.forget_all(&stale).await;
    assert!(matches!(&fenced, Err(SinkError::Fenced { .. })), "{fenced:?}");
    assert_eq!(bed.session.forget_all(&owned).await.expect("ours"), 3);
    let after = bed.session.shards("").await.expect("shards").remove(0);
    assert_eq!((after.floor_ms, after.watermark_ms), (i64::MIN, i64::MIN));
    assert_eq!((after.sequence, after.position), (before.sequence, before.position));
    assert!(bed.session.marks_since(&SHARD.into(), 0).await.expect("marks").is_empty());
    let rows = "SELECT CAST(count(*) AS text) FROM rows";
    assert_eq!(bed.number(rows).await, 5, "rows stay");
    let now_ms = bed.session.now_ms().await.expect("the sink's clock");
    let host_ms =
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970").as_millis();
    assert!(now_ms.abs_diff(host_ms as i64) < 60_000, "{now_ms} {host_ms}");
}
