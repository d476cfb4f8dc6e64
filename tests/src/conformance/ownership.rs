//! Who may write: epochs, the fence, races, unknown outcomes (P3 to P6, P13).

use std::time::Duration;

use adapters::{
    lineage::Lineage,
    sink::{Acquire, Mode, Resolution, RouteRow, RowOutcome, ShardId, ShardState, ShardStep, SinkError},
};

use super::{Bed, Encoded, Parcel, Place, ROUTE, SHARD, Shape, Target, block, deliver, write};

/// Everything but what the take-over brought about, which is looked at here: the epoch is above `least`, and it is kept that its
/// owner's first batch is the next one.
fn told(state: &ShardState, least: i64) -> ShardState {
    assert!(state.epoch > least, "{state:?}");
    assert!(state.lineage.has(state.sequence + 1, state.epoch), "{state:?}");
    ShardState { epoch: 0, lineage: Lineage::default(), ..state.clone() }
}

/// P3: a new shard stands at its beginning; a later owner gets all that the sink knows.
pub async fn p3_acquire_raises_the_epoch_and_tells_all<T: Target>(target: &T) {
    let mut bed = Bed::new(target, Mode::Insert).await;
    let fresh = |shard: &str| ShardState::unowned(&shard.into());
    assert_eq!(told(&bed.shards[0], 0), fresh(SHARD));
    let mut steps = bed.steps();
    steps[0].position = Some(4711);
    bed.deliver_at(&steps, &[write("a", 1, 1)]).await.expect("the batch goes in");
    let next = bed.rival("second", &["other", SHARD]).await;
    let known = ShardState { sequence: 1, position: Some(4711), watermark_ms: 100, ..fresh(SHARD) };
    let [other, taken] = &next.shards[..] else { panic!("{:?}", next.shards) };
    assert_eq!(
        [told(other, 0), told(taken, bed.shards[0].epoch)],
        [fresh("other"), known],
        "in the order given"
    );
    assert!(taken.lineage.has(1, bed.shards[0].epoch), "who wrote the first batch is kept: {taken:?}");
    let owner = format!("SELECT owner FROM oncegate_shards WHERE shard = '{SHARD}'");
    assert_eq!(bed.text(&owner).await, "second");
}

/// P6: epochs rise by chance, so that an owner whose epoch was lost with the sink's history is told from the next one there.
pub async fn p6_no_epoch_comes_again<T: Target>(target: &T) {
    let bed = Bed::new(target, Mode::Insert).await;
    let mut rises = Vec::new();
    for number in 0..6 {
        let taken = bed.rival(&format!("owner {number}"), &[&format!("p/{number}")]).await;
        rises.push(taken.shards[0].epoch);
    }
    assert!(rises.iter().any(|rise| *rise != rises[0]), "all the same: {rises:?}");
}

/// P3: `IfFree` refuses while another owner's heartbeat is fresh, and names the owner.
pub async fn p3_a_live_owner_is_not_disturbed<T: Target>(target: &T) {
    let mut bed = Bed::new(target, Mode::Insert).await;
    let shards: Vec<ShardId> = vec!["free".into(), SHARD.into()];
    let if_free = |ms| Acquire::IfFree { stale_after_ms: ms };
    let sink = bed.place.sink(&bed.shape);
    let mut second = sink.session(ROUTE, "second");
    let held = second.acquire(&shards, if_free(60_000)).await;
    let Err(SinkError::Held { shard, owner, seen_ms }) = held else { panic!("held, but: {held:?}") };
    assert_eq!((shard.as_str(), owner.as_str()), (SHARD, "first"));
    assert!((0..60_000).contains(&seen_ms), "{seen_ms}");
    bed.deliver(&[write("a", 1, 1)]).await.expect("the owner is not disturbed");

    // Its own earlier run is no other owner.
    let mut again = sink.session(ROUTE, "first");
    let own = again.acquire(&shards, if_free(60_000)).await.expect("its own").remove(1).epoch;
    assert!(own > bed.shards[0].epoch);
    // A heartbeat keeps it; silence frees it.
    tokio::time::sleep(Duration::from_millis(300)).await;
    again.heartbeat(&[(SHARD.into(), own)]).await.expect("the owner lives");
    second.acquire(&shards[1..], if_free(250)).await.expect_err("the heartbeat is fresh");
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(second.acquire(&shards[1..], if_free(250)).await.expect("silent for long")[0].epoch > own);
}

/// P3: also those of lanes that are not configured any more; not those of other routes.
pub async fn p3_all_shards_of_a_route_are_found<T: Target>(target: &T) {
    let bed = Bed::new(target, Mode::Insert).await;
    drop(bed.rival("x", &["http/1", "http/10", "kafka/c/t/0", "http%2"]).await);
    let sink = bed.place.sink(&bed.shape);
    let mut other = sink.session("another", "x");
    other.acquire(&["http/7".into()], Acquire::Force).await.expect("another route");
    let mut session = sink.session(ROUTE, "x");
    let found = session.shards("http/").await.expect("without any connection before");
    assert_eq!(found.iter().map(|state| &*state.shard).collect::<Vec<_>>(), ["http/0", "http/1", "http/10"]);
    assert_eq!(session.shards("").await.expect("all").len(), 5);
    assert_eq!(found[..1], bed.shards, "as they stand: nothing was raised");
    assert!(session.shards("nothing").await.expect("none").is_empty());
    assert!(!session.connected(), "only acquire makes the connection that verdicts may rest on");
}

/// P1: the route's identity is made once.
pub async fn p1_the_first_writer_names_the_route<T: Target>(target: &T) {
    let bed = Bed::new(target, Mode::Insert).await;
    let row = |byte: u8| RouteRow {
        route_id: vec![byte; 16],
        key_spec_id: i64::MIN + i64::from(byte),
        algorithm: i16::from(byte),
        secret: vec![byte; 192],
    };
    let sinks = [bed.place.sink(&bed.shape), bed.place.sink(&bed.shape)];
    let (mut one, mut two) = (sinks[0].session(ROUTE, "one"), sinks[1].session(ROUTE, "two"));
    let (rows_one, rows_two) = (row(1), row(2));
    let (one_has, two_has) = tokio::join!(one.register_route(&rows_one), two.register_route(&rows_two));
    let (one_has, two_has) = (one_has.expect("registered"), two_has.expect("registered"));
    assert_eq!(one_has, two_has);
    assert!(one_has == row(1) || one_has == row(2));
    assert_eq!(two.register_route(&row(3)).await.expect("registered"), one_has);
    let mut other = sinks[0].session("another", "one");
    assert_eq!(other.register_route(&row(4)).await.expect("registered"), row(4));
}

/// P4: from n - 1 to n, and nothing else; a step that was done is `Unknown`, for it may be this very batch.
pub async fn p4_the_fence_moves_only_one_step<T: Target>(target: &T) {
    let mut bed = Bed::new(target, Mode::Insert).await;
    bed.deliver(&[write("a", 1, 1)]).await.expect("the first step");
    let mut steps = bed.steps();
    for (sequence, is_unknown) in [(1, true), (3, false), (0, true), (-5, true)] {
        steps[0].sequence = sequence;
        let known = bed.shards.clone();
        let error = bed.deliver_at(&steps, &[write("b", 1, 1)]).await.expect_err("not the next step");
        match error {
            SinkError::Unknown { .. } => assert!(is_unknown, "{sequence}"),
            SinkError::NotApplied { retry: true, .. } => assert!(!is_unknown, "{sequence}"),
            other => panic!("{sequence}: {other}"),
        }
        assert_eq!((bed.sequence().await, bed.table().await.len()), (1, 1));
        assert!(!bed.session.connected(), "the sink is looked at anew before any verdict");
        bed.acquire(&[SHARD]).await;
        assert!(bed.shards[0].epoch > known[0].epoch);
        assert_eq!(bed.shards[0].sequence, 1);
        steps = bed.steps();
    }
    bed.deliver(&[write("b", 1, 1)]).await.expect("the next step");
}

/// P4: a newer owner fences the older one, which hears by whom.
pub async fn p4_the_fence_holds_an_older_epoch_back<T: Target>(target: &T) {
    let mut bed = Bed::new(target, Mode::Insert).await;
    bed.deliver(&[write("a", 1, 1)]).await.expect("the owner writes");
    let mut next = bed.rival("second", &[SHARD]).await;
    for rows in [vec![write("b", 1, 1)], vec![]] {
        let fenced = bed.deliver(&rows).await;
        let Err(SinkError::Fenced { shard, owner, epoch }) = &fenced else {
            panic!("fenced, but: {fenced:?}")
        };
        assert_eq!((shard.as_str(), owner.as_str(), *epoch), (SHARD, "second", next.shards[0].epoch));
    }
    assert_eq!(bed.table().await.len(), 1);
    next.deliver(&[write("b", 1, 1)]).await.expect("the new owner writes");
}

/// P4: two sessions take the shard and write at once.
pub async fn p4_of_two_racing_sessions_one_wins<T: Target>(target: &T) {
    let mut one = Bed::new(target, Mode::Insert).await;
    let mut two = one.rival("second", &[SHARD]).await;
    for round in 0..12 {
        tokio::join!(one.acquire(&[SHARD]), two.acquire(&[SHARD]));
        assert_ne!(one.shards[0].epoch, two.shards[0].epoch);
        assert_eq!(one.shards[0].sequence, round);
        let one_wins = one.shards[0].epoch > two.shards[0].epoch;
        let (one_rows, two_rows) =
            ([write(&format!("one-{round}"), 1, 1)], [write(&format!("two-{round}"), 1, 1)]);
        let (one_did, two_did) = tokio::join!(one.deliver(&one_rows), two.deliver(&two_rows));
        let (won, lost) = if one_wins { (one_did, two_did) } else { (two_did, one_did) };
        assert_eq!(won.expect("the newer owner"), [RowOutcome::Written]);
        assert!(matches!(lost, Err(SinkError::Fenced { .. })), "{lost:?}");
    }
    assert_eq!((one.table().await.len(), one.sequence().await), (12, 12));
}

/// P4, P5: a take-over sees a batch whole or keeps it out.
pub async fn p4_a_take_over_races_a_batch<T: Target>(target: &T) {
    let mut one = Bed::new(target, Mode::Insert).await;
    let mut two = one.rival("second", &[SHARD]).await;
    let mut expected = 0;
    for round in 0..12 {
        one.acquire(&[SHARD]).await;
        let before = one.shards[0].sequence;
        let rows: Vec<_> = (0..500).map(|n| write(&format!("{round}-{n}"), 1, 1)).collect();
        let delayed = async {
            tokio::time::sleep(Duration::from_millis(round)).await;
            two.acquire(&[SHARD]).await;
        };
        let (delivered, ()) = tokio::join!(one.deliver(&rows), delayed);
        match delivered {
            Ok(_) => {
                assert_eq!(two.shards[0].sequence, before + 1, "round {round}: acknowledged before, so seen");
                expected += 500;
            }
            Err(SinkError::Fenced { .. }) => {
                assert_eq!(two.shards[0].sequence, before, "round {round}: fenced, so not there");
            }
            // A sink may end the older owner's connection rather than wait for it.
            Err(SinkError::Unknown { .. } | SinkError::NotApplied { retry: true, .. }) => {
                let applied = two.shards[0].sequence == before + 1;
                expected += if applied { 500 } else { 0 };
            }
            Err(other) => panic!("round {round}: {other}"),
        }
        assert_eq!(one.table().await.len(), expected, "round {round}: whole or not at all");
    }
}

/// P13: one foreign shard holds the whole batch back.
pub async fn p13_several_shards_move_together_or_not_at_all<T: Target>(target: &T) {
    let mut bed = Bed::new(target, Mode::Insert).await;
    bed.acquire(&["p/0", "p/1", "p/2"]).await;
    let mut steps = bed.steps();
    steps[1].position = Some(5);
    bed.deliver_at(&steps, &[write("a", 1, 1)]).await.expect("all are ours");
    drop(bed.rival("second", &["p/1"]).await);
    let fenced = bed.deliver(&[write("b", 1, 1)]).await;
    assert!(matches!(&fenced, Err(SinkError::Fenced { shard, .. }) if shard == "p/1"), "{fenced:?}");
    let moved = "SELECT CAST(count(*) AS text) FROM oncegate_shards WHERE sequence = 1 AND shard LIKE 'p/%'";
    assert_eq!((bed.number(moved).await, bed.table().await.len()), (3, 1));
    // Without the lost shard it goes in.
    bed.acquire(&["p/0", "p/2"]).await;
    bed.deliver(&[write("b", 1, 1)]).await.expect("both are ours");
    let state = bed.rival("third", &["p/1"]).await.shards.remove(0);
    assert_eq!((state.sequence, state.position), (1, Some(5)));
}

/// P5: after a lost answer the batch is found by its sequence, with its marks.
pub async fn p5_an_applied_batch_is_found<T: Target>(target: &T) {
    let mut bed = Bed::new(target, Mode::Insert).await;
    bed.acquire(&["p/0", "p/1"]).await;
    let steps = bed.steps();
    let outcomes = bed.deliver_at(&steps, &[write("a", 1, 1), write("b", 1, -1)]).await.expect("goes in");
    let (resolution, states) = bed.session.resolve(&steps).await.expect("the sink can be asked");
    let Resolution::Applied(marks) = resolution else { panic!("applied, but: {resolution:?}") };
    let found: Vec<(usize, i64, &[u8])> =
        marks.iter().map(|(index, mark)| (*index, mark.sequence, &mark.block[..])).collect();
    let blocks = [block(&steps[0], &outcomes), block(&steps[1], &outcomes)];
    assert_eq!(found, [(0, 1, &blocks[0][..]), (1, 1, &blocks[1][..])]);
    assert!(states.iter().zip(&steps).all(|(state, step)| state.epoch > step.epoch && state.sequence == 1));
    assert!(bed.session.connected());
    bed.shards = states;
    bed.deliver(&[write("c", 1, 1)]).await.expect("goes on under the new epoch");

    // A batch that kept no marks is found too.
    let steps = bed.steps();
    let rows = Encoded::of(&*bed.encoder, &[]);
    let parcel = Parcel {
        rows: &rows,
        steps: &steps,
        dead_letters: &[],
        on_refused: adapters::sink::OnRefused::Report,
        known_new: false,
        marks: false,
    };
    deliver(&mut *bed.session, &parcel).await.expect("goes in");
    let (resolution, _) = bed.session.resolve(&steps).await.expect("the sink can be asked");
    assert_eq!(resolution, Resolution::Applied(Vec::new()));
}

/// P5: after `NotApplied` the old attempt can no longer come.
pub async fn p5_a_batch_proven_absent_cannot_come<T: Target>(target: &T) {
    let mut bed = Bed::new(target, Mode::Insert).await;
    bed.deliver(&[write("a", 1, 1)]).await.expect("goes in");
    let steps = bed.steps();
    let (resolution, states) = bed.session.resolve(&steps).await.expect("the sink can be asked");
    assert_eq!(resolution, Resolution::NotApplied);
    assert!(states[0].epoch > steps[0].epoch);
    assert_eq!(states[0].sequence, 1);
    // The old attempt, late.
    let late = bed.deliver_at(&steps, &[write("b", 1, 1)]).await;
    assert!(matches!(late, Err(SinkError::Fenced { .. })), "{late:?}");
    bed.shards = states;
    bed.deliver(&[write("b", 1, 2)]).await.expect("the same batch again, under the new epoch");
    assert_eq!(bed.table().await["b"].1, 2);
}

/// P5 must not undo P4: who was fenced meanwhile hears so, and the new owner stays.
pub async fn p5_resolving_takes_no_shard_back<T: Target>(target: &T) {
    let mut bed = Bed::new(target, Mode::Insert).await;
    let steps = bed.steps();
    let mut next = bed.rival("second", &[SHARD]).await;
    next.deliver(&[write("a", 1, 1)]).await.expect("the new owner writes");
    let resolved = bed.session.resolve(&steps).await;
    assert!(
        matches!(&resolved, Err(SinkError::Fenced { owner, epoch, .. }) if owner == "second" && *epoch == next.shards[0].epoch),
        "{resolved:?}"
    );
    next.deliver(&[write("b", 1, 1)]).await.expect("the new owner is not disturbed");
}

/// P6: a session without connection says so, and only `acquire` makes one.
pub async fn p6_nothing_reconnects_but_acquire<T: Target>(target: &T) {
    let shape = Shape::new(Mode::Insert);
    let bed = Bed::shaped(target, shape.clone()).await;
    let mut session = bed.place.sink(&shape).session(ROUTE, "x");
    let owned = [(ShardId::from(SHARD), 1)];
    let steps = bed.steps();
    let rows = Encoded::of(&*bed.encoder, &[write("a", 1, 1)]);
    let parcel = Parcel {
        rows: &rows,
        steps: &steps,
        dead_letters: &[],
        on_refused: adapters::sink::OnRefused::Report,
        known_new: false,
        marks: true,
    };
    let refused = [
        deliver(&mut *session, &parcel).await.map(drop),
        session.marks_since(&owned[0].0, 0).await.map(drop),
        session.expire_marks(&owned, 5).await.map(drop),
        session.heartbeat(&owned).await,
    ];
    for result in refused {
        assert!(matches!(result, Err(SinkError::NotApplied { retry: true, .. })), "{result:?}");
    }
    assert!(!session.connected());
    session.acquire(&["y".into()], Acquire::Force).await.expect("acquired");
    assert!(session.connected());
    assert!(bed.table().await.is_empty());
}

/// A heartbeat of a shard that was taken is `Fenced`.
pub async fn a_heartbeat_shows_a_lost_shard<T: Target>(target: &T) {
    let mut bed = Bed::new(target, Mode::Insert).await;
    bed.acquire(&["p/0", "p/1"]).await;
    let owned = bed.owned();
    bed.session.heartbeat(&owned).await.expect("both are ours");
    drop(bed.rival("second", &["p/1"]).await);
    let fenced = bed.session.heartbeat(&owned).await;
    assert!(
        matches!(&fenced, Err(SinkError::Fenced { shard, owner, .. }) if shard == "p/1" && owner == "second")
    );
    bed.session.heartbeat(&owned[..1]).await.expect("this one still is ours");
}

/// P3: what the shard's source is stays until it is renewed, which takes the position and nothing else; a table that lacks the column
/// gets it.
pub async fn p3_the_shard_row_keeps_its_source_also_in_tables_of_earlier_builds<T: Target>(target: &T) {
    let bed = Bed::new(target, Mode::Insert).await;
    bed.place.execute("ALTER TABLE oncegate_shards DROP COLUMN source").await;
    let mut bed = bed.rival("second", &[SHARD, "p/1"]).await;
    let sources = |bed: &Bed<T::Place>, source: &str| -> Vec<(ShardId, i64, String)> {
        bed.owned().into_iter().map(|(shard, epoch)| (shard, epoch, source.to_owned())).collect()
    };
    let old = Some("old".to_owned());
    assert_eq!(bed.session.keep_sources(&sources(&bed, "old"), false).await.expect("kept"), [None, None]);
    let steps: Vec<ShardStep> =
        bed.steps().into_iter().map(|step| ShardStep { position: Some(7), ..step }).collect();
    bed.deliver_at(&steps, &[write("a", 1, 1)]).await.expect("goes in");
    let kept = bed.session.keep_sources(&sources(&bed, "new"), false).await.expect("kept");
    assert_eq!(kept, [old.clone(), old.clone()]);
    let mut third = bed.rival("third", &["p/1"]).await;
    // What is another's now is left alone.
    let kept = bed.session.keep_sources(&sources(&bed, "new"), true).await.expect("kept");
    assert_eq!(kept, [old.clone(), None]);
    let states = bed.session.shards("").await.expect("the shards");
    let state =
        |shard: &str| states.iter().find(|state| *state.shard == *shard).expect("it is there").clone();
    assert_eq!((state(SHARD).position, state(SHARD).sequence), (None, 1));
    assert_eq!(third.session.keep_sources(&sources(&third, "old"), true).await.expect("kept"), [old]);
    let kept = bed.session.keep_sources(&sources(&bed, "new"), true).await.expect("kept");
    assert_eq!(kept, [Some("new".to_owned()), None]);
    let states = bed.session.shards("").await.expect("the shards");
    let third = states.iter().find(|state| &*state.shard == "p/1").expect("it is there");
    assert_eq!(third.position, Some(7), "the same source renews nothing");
}

/// P13: the count that was kept before comes back, by whoever owns the shard; a table that lacks the column gets it.
pub async fn p13_the_shard_row_keeps_the_partition_count_also_in_tables_of_earlier_builds<T: Target>(
    target: &T,
) {
    let bed = Bed::new(target, Mode::Insert).await;
    bed.place.execute("ALTER TABLE oncegate_shards DROP COLUMN partitions").await;
    let mut bed = bed.rival("second", &[SHARD, "p/1"]).await;
    let counts = |bed: &Bed<T::Place>, count: i64| -> Vec<(ShardId, i64, i64)> {
        bed.owned().into_iter().map(|(shard, epoch)| (shard, epoch, count)).collect()
    };
    assert_eq!(bed.session.keep_partitions(&counts(&bed, 3)).await.expect("kept"), [None, None]);
    bed.deliver(&[write("a", 1, 1)]).await.expect("goes in");
    assert_eq!(bed.session.keep_partitions(&counts(&bed, 3)).await.expect("kept"), [Some(3), Some(3)]);
    let mut third = bed.rival("third", &["p/1"]).await;
    assert_eq!(third.session.keep_partitions(&counts(&third, 6)).await.expect("kept"), [Some(3)]);
    // What is another's now is left alone.
    assert_eq!(bed.session.keep_partitions(&counts(&bed, 9)).await.expect("kept"), [Some(3), None]);
    assert_eq!(third.session.keep_partitions(&counts(&third, 6)).await.expect("kept"), [Some(6)]);
}
