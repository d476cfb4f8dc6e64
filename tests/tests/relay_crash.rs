//! Relays of every row mode at once, through kills of the gateway, ended backends and commits without a reply: each table
//! equals its model, row for row, and each change took effect once.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use oncegate_tests::{
    gateway::Gateway,
    kills,
    proxy::{Action, Point, Proxy},
    route::OrdersRoute,
    servers::{Kafka, Postgres, Produced},
    workload::{
        Mode, Order, Workload, assert_each_effect_once, assert_table_equals, await_table, effects_of, now_us,
        orders_table,
    },
};
use rand::{Rng, SeedableRng, rngs::StdRng};

const RECORDS: usize = 300_000;
const COPIES: u32 = 20;
const PARTITIONS: u32 = 4;
/// Without `ONCEGATE_KILLS`.
const KILLS: usize = 50;
const TERMINATIONS: usize = 50;
const CUTS: usize = 20;
const SEED: u64 = 21;

/// One mode's topic, table and what is left to produce.
struct Course {
    name: &'static str,
    workload: Workload,
    model: BTreeMap<String, Order>,
    produced: usize,
}

impl Course {
    async fn new(name: &'static str, mode: Mode, seed: u64, kafka: &Kafka) -> Self {
        kafka.topic(name, PARTITIONS.cast_signed()).await;
        let workload = Workload::generate(mode, seed, RECORDS, COPIES, now_us());
        let model = workload.model();
        Self { name, workload, model, produced: 0 }
    }

    fn produce(&mut self, kafka: &Kafka, until: usize) {
        let slice = self.workload.sent[self.produced..until].iter();
        kafka.produce(self.name, slice.map(|change| change.produced(PARTITIONS)).collect::<Vec<Produced>>());
        self.produced = until;
    }
}

/// What has been done to the gateway.
#[derive(Debug, Default)]
struct Done {
    kills: usize,
    terminations: usize,
    cuts: usize,
}

#[tokio::test(flavor = "multi_thread")]
async fn each_mode_ends_in_its_model_through_kills_ended_backends_and_lost_replies() {
    let (kafka, postgres) = (Kafka::shared(), Postgres::shared());
    let modes = [("inserts", Mode::Insert), ("upserts", Mode::Upsert), ("newest", Mode::UpsertIfNewer)];
    let ddl: Vec<String> =
        modes.iter().map(|(name, _)| orders_table(name) + ";" + &effects_of(name)).collect();
    let table = postgres.database("relay_crash", &ddl.join(";")).await;
    let proxy = Proxy::start(postgres.port()).await;
    let url = postgres.url_through(proxy.port(), "relay_crash");
    let mut courses = vec![];
    let mut config = String::new();
    for (seed, (name, mode)) in (SEED..).zip(modes) {
        courses.push(Course::new(name, mode, seed, kafka).await);
        config +=
            &OrdersRoute::new(name, mode, &url).relay(&kafka.brokers(), name, name).as_instance("one").toml();
    }
    let mut gateway = Gateway::new(&config);
    gateway.start().await;

    let mut random = StdRng::seed_from_u64(SEED);
    let mut done = Done::default();
    let rounds = kills(KILLS);
    let begun = Instant::now();
    for round in 1..=rounds {
        // Set before there is anything to write, so that the first commits of this round go into it.
        let point = if done.cuts % 2 == 0 { Point::CommitSent } else { Point::CommitDone };
        let sprung = (done.cuts * rounds < CUTS * round).then(|| proxy.trap(point, Action::Cut));
        for course in &mut courses {
            course.produce(kafka, RECORDS * round / rounds);
        }
        tokio::time::sleep(Duration::from_millis(random.random_range(50..400))).await;
        if let Some(sprung) = sprung {
            done.cuts += usize::from(tokio::time::timeout(Duration::from_secs(10), sprung).await.is_ok());
            proxy.disarm();
        }
        // Now and then twice, since a gateway that has just started has nothing to end.
        for _ in 0..1 + usize::from(round % 5 == 0) {
            done.terminations += usize::from(postgres.terminate_backends("relay_crash").await > 0);
            tokio::time::sleep(Duration::from_millis(random.random_range(20..100))).await;
        }
        tokio::time::sleep(Duration::from_millis(random.random_range(50..400))).await;
        gateway.kill();
        done.kills += 1;
        gateway.spawn();
        if round % 5 != 4 {
            gateway.ready(Duration::from_secs(60)).await;
        }
    }
    gateway.ready(Duration::from_secs(60)).await;
    println!("seed {SEED}: {done:?} within {:?}, {} commits", begun.elapsed(), proxy.commits());
    assert!(done.kills >= rounds && done.terminations >= TERMINATIONS && done.cuts >= CUTS, "{done:?}");

    for course in &courses {
        await_table(&table, course.name, &course.model, Duration::from_secs(180)).await;
        assert_each_effect_once(&table, course.name).await;
    }
    println!("all of {} records after {:?}", 3 * RECORDS, begun.elapsed());
    committed_offsets_follow(kafka, &courses).await;

    // From the start again with an empty store: nothing changes.
    assert!(gateway.terminate().await.success(), "{}", gateway.log_tail(20));
    gateway.delete_store();
    gateway.start().await;
    for course in &mut courses {
        course.produced = 0;
        course.produce(kafka, RECORDS / 10);
    }
    committed_offsets_follow(kafka, &courses).await;
    for course in &courses {
        assert_table_equals(&table, course.name, &course.model).await;
        assert_each_effect_once(&table, course.name).await;
    }
}

/// The group's committed offsets come to the end of every partition, so that any lag monitor works.
async fn committed_offsets_follow(kafka: &Kafka, courses: &[Course]) {
    for course in courses {
        oncegate_tests::eventually("committed offsets at the end", Duration::from_secs(60), async || {
            let ends = kafka.ends(course.name, PARTITIONS.cast_signed());
            let committed = kafka.committed(course.name, PARTITIONS.cast_signed(), course.name);
            if ends == committed {
                Ok(())
            } else {
                Err(format!("{}: {committed:?} of {ends:?}", course.name))
            }
        })
        .await;
    }
}
