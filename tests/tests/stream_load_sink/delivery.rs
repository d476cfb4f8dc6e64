//! Labels and their states, two phases, redirects; what is lost and driven again.

use std::{sync::Arc, time::Duration};

use adapters::{
    sink::{OnRefused, Resolution, RowKind, RowOutcome, SinkError},
    stream_load::Dialect,
};
use oncegate_tests::servers::{
    StreamLoad,
    stream_load::{Fault, Model},
};

use crate::rig::{BOTH, Fields, Rig, rows_of};

/// P15: one batch, driven fifty times behind answers that are lost, is in once, under one label.
#[tokio::test]
async fn p15_one_batch_driven_fifty_times_is_in_once() {
    for dialect in BOTH {
        for two_phase in [false, true] {
            let mut rig = Rig::plain(dialect, |config| config.two_phase = two_phase).await;
            let Some(stand_in) = rig.server.stand_in() else { return };
            // The answers of the load and of every question for its label.
            let step = if two_phase { "commit" } else { "load" };
            stand_in.script(&[(step, Fault::LostAfter)]);
            stand_in.script(&[("state", Fault::LostBefore); 50]);
            let lost = rig.deliver(&[&[("id", "1")], &[("id", "2")]]).await.unwrap_err();
            assert!(matches!(lost, SinkError::Unknown { .. }), "{lost}");
            let mut asked = 1;
            while let Err(SinkError::Unknown { .. }) = rig.resolve().await {
                asked += 1;
            }
            assert!(asked >= 50, "{asked}");
            assert_eq!((rig.state.sequence, rig.ids()), (1, vec!["1".to_owned(), "2".to_owned()]));
            let cluster = rig.stand_in().cluster();
            assert_eq!(cluster.in_by_label().values().copied().collect::<Vec<_>>(), [1]);
        }
    }
}

/// The same where each attempt reaches the servers, and where the first has not.
#[tokio::test]
async fn p15_a_load_that_is_sent_again_and_again_is_in_once() {
    for dialect in BOTH {
        for first in [Fault::LostBefore, Fault::LostAfter, Fault::Late] {
            let mut rig = Rig::plain(dialect, |_| {}).await;
            let Some(stand_in) = rig.server.stand_in() else { return };
            stand_in.script(&[("load", first), ("state", Fault::LostBefore)]);
            stand_in.script(&[("load", Fault::LostBefore); 5]);
            assert!(matches!(rig.deliver(&[&[("id", "1")]]).await, Err(SinkError::Unknown { .. })));
            let mut asked = 0;
            while let Err(error) = rig.resolve().await {
                assert!(matches!(error, SinkError::Unknown { .. }), "{error}");
                asked += 1;
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            assert!(asked == 5 || first != Fault::LostBefore, "{asked}");
            assert_eq!(rig.state.sequence, 1);
            tokio::time::sleep(Duration::from_millis(400)).await;
            assert_eq!(rig.ids(), ["1"], "{dialect:?} {first:?}");
        }
    }
}

/// Each way in which a load can end, in one phase and in two: one row each, whatever was answered.
#[tokio::test]
async fn p5_whatever_becomes_of_a_load_its_rows_are_in_once() {
    for dialect in BOTH {
        for two_phase in [false, true] {
            let mut rig = Rig::plain(dialect, |config| config.two_phase = two_phase).await;
            if rig.server.stand_in().is_none() {
                return;
            }
            let any = [
                Fault::LostBefore,
                Fault::LostAfter,
                Fault::Late,
                Fault::Broken { done: false },
                Fault::Broken { done: true },
                Fault::Garbage { done: false },
                Fault::Garbage { done: true },
            ];
            let mut scripts: Vec<(&'static str, Fault)> = Vec::new();
            let steps: &[&'static str] = match (two_phase, dialect) {
                (false, _) => &["load"],
                (true, Dialect::StarRocks) => &["begin", "append", "prepare", "commit"],
                (true, Dialect::Doris) => &["load", "commit"],
            };
            // Of two phases each step ends in each way that matters to it; all ways are those of one.
            let some = if two_phase { &any[..2] } else { &any[..] };
            scripts.extend(steps.iter().flat_map(|step| some.iter().map(|fault| (*step, *fault))));
            if two_phase {
                scripts.extend([("commit", Fault::Late), ("commit", Fault::Broken { done: true })]);
            }
            if steps.contains(&"load") {
                scripts.extend([("load", Fault::Fail), ("load", Fault::TooManyVersions)]);
            }
            if !two_phase {
                scripts.extend(
                    [
                        Fault::PublishTimeout,
                        Fault::StuckThenIn(200),
                        Fault::StuckThenAborted(200),
                        Fault::FailThoughIn,
                    ]
                    .map(|fault| ("load", fault)),
                );
            }
            scripts.extend([("front", Fault::LostBefore), ("front", Fault::Garbage { done: false })]);
            for (at, script) in scripts.iter().enumerate() {
                rig.stand_in().script(&[*script]);
                let id = at.to_string();
                rig.deliver_patiently(&[(RowKind::Write, &[("id", &id)])]).await;
                // What comes late comes now.
                if script.1 == Fault::Late {
                    tokio::time::sleep(Duration::from_millis(350)).await;
                }
                assert!(
                    rig.stand_in().cluster().faults.is_empty(),
                    "{dialect:?} {two_phase} {script:?} was not met: {:?}",
                    rig.stand_in().cluster().txns.last_key_value()
                );
                let ids = rig.ids();
                assert_eq!(ids.len(), at + 1, "{dialect:?} two phases: {two_phase} {script:?}: {ids:?}");
            }
            assert!(rig.stand_in().cluster().in_by_label().values().all(|count| *count == 1));
            assert_eq!(rig.stand_in().cluster().misplaced, 0, "no front-end was sent a body");
        }
    }
}

/// What the answers mean, one by one.
#[tokio::test]
async fn p5_answers_are_taken_for_what_they_say() {
    for dialect in BOTH {
        let mut rig = Rig::plain(dialect, |_| {}).await;
        if rig.server.stand_in().is_none() {
            return;
        }
        // Committed and not visible yet, and failed by words though it is in: it is in.
        for fault in
            [Fault::PublishTimeout, Fault::FailThoughIn, Fault::LostAfter, Fault::Garbage { done: true }]
        {
            rig.stand_in().script(&[("load", fault)]);
            rig.deliver(&[&[("id", "1")]]).await.unwrap_or_else(|error| panic!("{fault:?}: {error}"));
        }
        // Aborted, and said so: nothing is in.
        for (fault, says) in [(Fault::Fail, "back-end is down"), (Fault::TooManyVersions, "-235")] {
            rig.stand_in().script(&[("load", fault)]);
            match rig.deliver(&[&[("id", "2")]]).await {
                Err(SinkError::NotApplied { reason, retry: true }) => {
                    assert!(reason.contains(says), "{reason}")
                }
                other => panic!("{fault:?}: {other:?}"),
            }
        }
        // Under way: neither.
        rig.stand_in().script(&[("load", Fault::StuckThenIn(400))]);
        assert!(matches!(rig.deliver(&[&[("id", "3")]]).await, Err(SinkError::Unknown { .. })));
        let waits = rig.resolve().await.unwrap_err().to_string();
        assert!(waits.contains("under way"), "{waits}");
        assert!(matches!(rig.resolve_patiently().await, Resolution::Applied(_)));
        // Sent on in a circle, or to where nobody can be followed: nobody has taken it.
        for (fault, says) in [(Fault::Loop, "redirects"), (Fault::Elsewhere, "only http and https")] {
            let many = if fault == Fault::Loop { 8 } else { 1 };
            rig.stand_in().script(&vec![("front", fault); many]);
            match rig.deliver(&[&[("id", "4")]]).await {
                Err(SinkError::NotApplied { reason, retry: true }) => {
                    assert!(reason.contains(says), "{reason}")
                }
                other => panic!("{fault:?}: {other:?}"),
            }
            rig.stand_in().cluster().faults.clear();
        }
        assert_eq!(rig.ids(), ["1", "1", "1", "1", "3"]);
    }
}

/// A load that the server says it has taken in part, or under another label, is never taken for one that is in.
#[tokio::test]
async fn rows_that_are_left_out_stop_the_lane() {
    for dialect in BOTH {
        let mut rig = Rig::plain(dialect, |_| {}).await;
        if rig.server.stand_in().is_none() {
            return;
        }
        rig.stand_in().script(&[("load", Fault::Short)]);
        let short = rig.deliver(&[&[("id", "1")], &[("id", "2")]]).await.unwrap_err().to_string();
        assert!(short.contains("1 of 2 rows are loaded"), "{short}");
        let stopped = rig.resolve().await.unwrap_err().to_string();
        assert!(stopped.contains("1 of 2 rows are loaded") && stopped.contains("verdict"), "{stopped}");
        // Its label alone would settle it. (A start waits for seconds: each of these once.)
        let stopped = if dialect == Dialect::StarRocks {
            rig.again().await.map(drop)
        } else {
            rig.resolve().await.map(drop)
        };
        let stopped = stopped.unwrap_err().to_string();
        assert!(stopped.contains("1 of 2 rows are loaded"), "{stopped}");

        let mut rig = Rig::plain(dialect, |_| {}).await;
        rig.stand_in().script(&[("load", Fault::OtherLabel)]);
        let other = rig.deliver(&[&[("id", "1")]]).await.unwrap_err().to_string();
        assert!(other.contains("another label"), "{other}");
        // Under its own label it is not known: it would be sent again at each restart.
        let loads = rig.stand_in().cluster().loads;
        let stopped = if dialect == Dialect::Doris {
            rig.again().await.map(drop)
        } else {
            rig.resolve().await.map(drop)
        };
        let stopped = stopped.unwrap_err().to_string();
        assert!(stopped.contains("another label"), "{stopped}");
        assert_eq!(rig.stand_in().cluster().loads, loads);

        // In two phases it is looked at before the commit, where the first phase counts.
        if dialect == Dialect::Doris {
            let mut rig = Rig::plain(dialect, |config| config.two_phase = true).await;
            rig.stand_in().script(&[("load", Fault::Short)]);
            rig.deliver_patiently(&[(RowKind::Write, &[("id", "1")]), (RowKind::Write, &[("id", "2")])])
                .await;
            assert_eq!(rig.ids(), ["1", "2"]);
        }
    }
}

/// P15: what is prepared when the gateway dies is found again, given up and loaded once more: nobody knows whether it had all rows.
#[tokio::test]
async fn p15_what_is_prepared_is_finished_after_a_crash() {
    for dialect in BOTH {
        let mut rig = Rig::plain(dialect, |config| config.two_phase = true).await;
        let Some(stand_in) = rig.server.stand_in() else { return };
        stand_in.script(&[("commit", Fault::LostBefore)]);
        rig.deliver(&[&[("id", "1")]]).await.unwrap_err();
        assert!(rig.ids().is_empty(), "it is not committed");
        let loads = rig.stand_in().cluster().loads;
        rig.again().await.unwrap();
        assert_eq!((rig.state.sequence, rig.ids()), (1, vec!["1".to_owned()]));
        assert_eq!(rig.stand_in().cluster().loads, loads + 1);
        // Its answer is lost as well.
        rig.stand_in().script(&[
            ("commit", Fault::LostBefore),
            ("state", Fault::LostBefore),
            ("commit", Fault::LostAfter),
        ]);
        rig.deliver(&[&[("id", "2")]]).await.unwrap_err();
        rig.again().await.unwrap();
        assert_eq!(rig.ids(), ["1", "2"]);
    }
}

/// P15: past half of the loads whose labels are kept, nothing whose label is not known is sent again.
#[tokio::test]
async fn p15_past_half_of_the_labels_that_are_kept_the_lane_stops() {
    for dialect in BOTH {
        let mut rig = Rig::plain(dialect, |_| {}).await;
        if rig.server.stand_in().is_none() {
            return;
        }
        let keep = rig.stand_in().cluster().keep;
        // In; its label is forgotten, long before the time that labels are kept.
        rig.stand_in().script(&[("load", Fault::LostAfter), ("state", Fault::LostBefore)]);
        rig.deliver(&[&[("id", "1")]]).await.unwrap_err();
        rig.stand_in().cluster().others(keep + 10);
        for _ in 0..3 {
            let stopped = rig.resolve().await.unwrap_err().to_string();
            assert!(
                stopped.contains("transactions have begun since") && stopped.contains("verdict"),
                "{stopped}"
            );
            assert!(stopped.contains("docs/starrocks-doris.md"), "{stopped}");
        }
        assert_eq!(rig.ids(), ["1"]);
        rig.book().execute("UPDATE oncegate_journal SET verdict = 'in'", []).unwrap();
        rig.again().await.unwrap();
        assert_eq!(rig.state.sequence, 1);
        rig.deliver(&[&[("id", "2")]]).await.unwrap();
        assert_eq!(rig.ids(), ["1", "2"]);

        // Up to half it is sent again, once.
        let mut rig = Rig::plain(dialect, |_| {}).await;
        rig.stand_in().script(&[("load", Fault::LostBefore), ("state", Fault::LostBefore)]);
        rig.deliver(&[&[("id", "1")]]).await.unwrap_err();
        rig.stand_in().cluster().others(keep / 2 - 10);
        assert!(matches!(rig.resolve().await.unwrap(), Resolution::Applied(_)));
        assert_eq!(rig.ids(), ["1"]);
    }
}

/// A row that the encoder took and the server refuses costs one outcome, with its place; the others go in.
#[tokio::test]
async fn rule10_rows_that_the_server_refuses_are_found_and_left_out() {
    for dialect in BOTH {
        for two_phase in [false, true] {
            let mut rig = Rig::plain(dialect, |config| config.two_phase = two_phase).await;
            if rig.server.stand_in().is_none() {
                return;
            }
            let ids: Vec<String> = (0..300).map(|id: u32| id.to_string()).collect();
            let bad = |at: usize| at == 7 || at == 8 || at == 299;
            let rows: Vec<Vec<(&str, &str)>> = ids
                .iter()
                .enumerate()
                .map(|(at, id)| {
                    vec![("id", id.as_str()), ("note", if bad(at) { "\"no partition\"" } else { "\"x\"" })]
                })
                .collect();
            let fields: Vec<Fields<'_>> = rows.iter().map(Vec::as_slice).collect();
            let outcomes = rig.deliver(&fields).await.unwrap();
            for (at, outcome) in outcomes.iter().enumerate() {
                match outcome {
                    RowOutcome::Refused { reason } if bad(at) => {
                        assert!(
                            reason.contains("column_name[") && reason.contains("out of range"),
                            "{reason}"
                        );
                        assert!(!reason.contains("no partition"), "a value is told: {reason}");
                    }
                    RowOutcome::Written if !bad(at) => {}
                    other => panic!("{at}: {other:?}"),
                }
            }
            assert_eq!(rig.ids().len(), 297);
            let places: Vec<i64> = rig
                .book()
                .prepare("SELECT position FROM oncegate_dead_letters ORDER BY position")
                .unwrap()
                .query_map([], |row| row.get(0))
                .unwrap()
                .collect::<Result<_, _>>()
                .unwrap();
            assert_eq!(places, [7, 8, 299]);
            let trials = rig.stand_in().cluster().trials;
            assert!(trials < 60, "{trials} trials for three of 300");
            // The next batch is not suspected.
            rig.deliver(&[&[("id", "1000")]]).await.unwrap();
            assert_eq!(rig.stand_in().cluster().trials, trials);
            // All of them; and one refused may stop the batch.
            let row: Fields<'_> = &[("id", "2000"), ("note", "\"no partition\"")];
            let all = rig.deliver(&[row, row]).await.unwrap();
            assert!(all.iter().all(|outcome| matches!(outcome, RowOutcome::Refused { .. })));
            let mixed: [(RowKind, Fields<'_>); 2] =
                [(RowKind::Write, &[("id", "3000")]), (RowKind::Write, row)];
            let aborted = rig.deliver_kinds(&mixed, OnRefused::Abort).await;
            assert!(matches!(aborted, Err(SinkError::Refused { row: 1, .. })));
            assert_eq!(rig.ids().len(), 298);
        }
    }
}

/// A batch with such a row whose answer is lost does not hold the shard up: nothing of it is in, ever.
#[tokio::test]
async fn a_refused_batch_of_a_crash_is_given_back() {
    for dialect in BOTH {
        let mut rig = Rig::plain(dialect, |_| {}).await;
        if rig.server.stand_in().is_none() {
            return;
        }
        rig.stand_in().script(&[("load", Fault::LostBefore)]);
        let row: Fields<'_> = &[("id", "1"), ("note", "\"no partition\"")];
        assert!(matches!(rig.deliver(&[row, &[("id", "2")]]).await, Err(SinkError::Unknown { .. })));
        rig.again().await.unwrap();
        assert_eq!(rig.state.sequence, 0, "nothing is in");
        let outcomes = rig.deliver(&[row, &[("id", "2")]]).await.unwrap();
        assert!(matches!(outcomes[..], [RowOutcome::Refused { .. }, RowOutcome::Written]));
        assert_eq!(rig.ids(), ["2"]);
    }
}

#[tokio::test]
async fn p15_two_routes_into_one_table_share_no_label() {
    for dialect in BOTH {
        let server = Arc::new(StreamLoad::start(dialect));
        let table = server.table(&rows_of(Model::Duplicate, false));
        let mut one = Rig::on(server.clone(), table.clone(), "orders", |_| {}).await;
        let folder = one.config.journal.folder.clone();
        let mut two = Rig::on(server.clone(), table.clone(), "others", |_| {}).await;
        let mut three =
            Rig::on(server.clone(), table, "third", |config| config.journal.folder = folder.clone()).await;
        for _ in 0..3 {
            for rig in [&mut one, &mut two, &mut three] {
                rig.deliver(&[&[("id", "7")], &[("id", "8")]]).await.unwrap();
            }
        }
        assert_eq!(one.ids().len(), 18);
        if let Some(stand_in) = server.stand_in() {
            assert_eq!(stand_in.cluster().in_by_label().len(), 9);
        }
    }
}

/// A front-end that is gone gives way to the next; none at all has taken nothing.
#[tokio::test]
async fn front_ends_are_tried_in_turn() {
    for dialect in BOTH {
        let mut rig = Rig::plain(dialect, |config| {
            config.urls.insert(0, format!("http://127.0.0.1:{}", oncegate_tests::free_port()));
        })
        .await;
        rig.deliver(&[&[("id", "1")]]).await.unwrap();
        assert_eq!(rig.ids(), ["1"]);
        rig.config.urls.pop();
        let nobody = adapters::stream_load::StreamLoadSink::new(rig.config.clone()).unwrap();
        let misfits = adapters::sink::Sink::probe(&nobody).await.unwrap_err();
        assert!(misfits[0].what.contains("cannot be asked"), "{misfits:?}");
    }
}
