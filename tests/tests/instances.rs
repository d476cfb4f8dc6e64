//! Several instances of one relay, through kills, freezes that last longer than the group's session, joins and leaves: at the end
//! each key took effect once, in order within its key, and nothing is lost.
//!
//! The sizes that run everywhere are small. The whole drill, and the one in which brokers die too, are asked for by name:
//!
//! ```text
//! cargo test -p oncegate-tests --test instances -- --ignored --nocapture drill_of_a_million
//! cargo test -p oncegate-tests --test instances -- --ignored --nocapture drill_with_three_brokers
//! ```

use std::{
    fmt::Write,
    time::{Duration, Instant},
};

use oncegate_tests::{
    fleet::{Fault, Fleet},
    gateway::Gateway,
    route::OrdersRoute,
    servers::{Kafka, Postgres, Produced},
    setting,
    workload::{
        Change, Mode, Workload, assert_each_effect_once, await_table, effects_of, now_us, orders_table,
    },
};
use rand::{Rng, SeedableRng, rngs::StdRng};
use tokio_postgres::Client;

const PARTITIONS: u32 = 12;
const COPIES: u32 = 20;
/// One drill.
struct Drill {
    name: &'static str,
    mode: Mode,
    /// `partition.assignment.strategy`.
    assignment: &'static str,
    /// Instances have fixed names in the group.
    fixed: bool,
    records: usize,
    faults: usize,
    /// Brokers die in turn, too.
    brokers: bool,
    seed: u64,
}

impl Drill {
    fn config(&self, url: &str, brokers: &str, member: usize) -> String {
        let mut route = OrdersRoute::new("orders", self.mode, url)
            .relay(brokers, self.name, self.name)
            .options("lanes = { http = 0, relay = 2 }\nbatch = { max_records = 5000 }");
        if self.mode == Mode::Insert {
            route = route.without_row_key();
        }
        if self.fixed {
            route = route.as_instance(&format!("member-{member}"));
        }
        let mut text = route.toml();
        write!(
            text,
            "\n[routes.orders.kafka.options]\n\"partition.assignment.strategy\" = \"{}\"\n",
            self.assignment
        )
        .expect("text can be written to");
        text
    }

    fn ddl(&self) -> String {
        let table = orders_table("orders");
        // No unique index: a double would be a second row.
        let table =
            if self.mode == Mode::Insert { table.replace(" PRIMARY KEY", " NOT NULL") } else { table };
        // Effects of one row are numbered under its lock, in the order in which they came.
        format!("{table};{};ALTER TABLE orders_effects ADD COLUMN n bigserial", effects_of("orders"))
    }

    async fn run(&self, kafka: &Kafka) {
        let postgres = Postgres::shared();
        let table = postgres.database(self.name, &self.ddl()).await;
        kafka.topic(self.name, PARTITIONS.cast_signed()).await;
        let workload = Workload::generate(self.mode, self.seed, self.records, COPIES, now_us());
        let model = workload.model();
        let brokers = kafka.brokers();
        let url = postgres.url(self.name);
        let members = (0..4).map(|member| Gateway::new(&self.config(&url, &brokers, member))).collect();
        let mut fleet = Fleet::new(kafka, members).await;
        let begun = Instant::now();
        let mut random = StdRng::seed_from_u64(self.seed);
        let faults = Fault::in_turn(self.faults, self.brokers);
        let share = self.records / faults.len();
        for (round, fault) in faults.iter().enumerate() {
            let until = if round + 1 == faults.len() { self.records } else { (round + 1) * share };
            let slice = &workload.sent[round * share..until];
            // What comes before the fault comes again after it: copies whose first was written, or is on its way, or was not
            // even read when its partition moved.
            let (before, after) = slice.split_at(slice.len() * 2 / 3);
            self.produce(kafka, before);
            tokio::time::sleep(Duration::from_millis(random.random_range(100..600))).await;
            fleet.strike(*fault, &mut random).await;
            self.produce(kafka, &before[before.len() - before.len().min(share / 5)..]);
            self.produce(kafka, after);
            fleet.pass(Duration::from_millis(random.random_range(1000..2500))).await;
        }
        fleet.recover().await;
        println!("{}: {:?} within {:?}", self.name, fleet.done, begun.elapsed());
        await_table(&table, "orders", &model, Duration::from_secs(180)).await;
        println!("{}: all of {} records after {:?}", self.name, self.records, begun.elapsed());
        fleet.offsets_follow(self.name, PARTITIONS.cast_signed()).await;
        assert_each_effect_once(&table, "orders").await;
        assert_in_order(&table).await;
        fleet.assert_struck(self.name, self.faults).await;
    }

    fn produce(&self, kafka: &Kafka, changes: &[Change]) {
        let records: Vec<Produced> = changes.iter().map(|change| change.produced(PARTITIONS)).collect();
        kafka.produce(self.name, records);
    }
}

/// No effect of a row came after a later one of the same row.
async fn assert_in_order(client: &Client) {
    let query = "SELECT order_id, updated_at::text FROM (SELECT order_id, updated_at, \
                 lag(updated_at) OVER (PARTITION BY order_id ORDER BY n) AS before FROM orders_effects) AS effects \
                 WHERE before > updated_at LIMIT 10";
    let found = client.query(query, &[]).await.expect("the effects can be read");
    let lines: Vec<String> =
        found.iter().map(|row| format!("{} {}", row.get::<_, &str>(0), row.get::<_, &str>(1))).collect();
    assert!(lines.is_empty(), "effects out of order:\n{}", lines.join("\n"));
}

/// Two fleets side by side: one by cooperative-sticky assignment, whose table has a row key; one of fixed names by eager
/// assignment, whose table has none, so that only the marks tell copies.
#[tokio::test(flavor = "multi_thread")]
async fn p13_members_that_die_freeze_join_and_leave_write_every_key_once_and_in_order() {
    let cooperative = Drill {
        name: "drill_cooperative",
        mode: Mode::Upsert,
        assignment: "cooperative-sticky",
        fixed: false,
        records: 90_000,
        faults: 6,
        brokers: false,
        seed: 71,
    };
    let eager = Drill {
        name: "drill_eager",
        mode: Mode::Insert,
        assignment: "range",
        fixed: true,
        records: 60_000,
        faults: 6,
        brokers: false,
        seed: 72,
    };
    let kafka = Kafka::start();
    tokio::join!(cooperative.run(&kafka), eager.run(&kafka));
}

/// `ONCEGATE_DRILL_RECORDS` and `ONCEGATE_DRILL_FAULTS` set other sizes.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes minutes: see the module"]
async fn drill_of_a_million() {
    let (records, faults) =
        (setting("ONCEGATE_DRILL_RECORDS", 1_000_000), setting("ONCEGATE_DRILL_FAULTS", 36));
    for (name, mode, assignment, fixed, seed) in [
        ("million_cooperative", Mode::Upsert, "cooperative-sticky", false, 81),
        ("million_eager", Mode::Insert, "range", true, 82),
    ] {
        let _alone = oncegate_tests::alone().await;
        let drill = Drill { name, mode, assignment, fixed, records, faults, brokers: false, seed };
        drill.run(&Kafka::start()).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes minutes, and three JVMs: see the module"]
async fn drill_with_three_brokers() {
    let _alone = oncegate_tests::alone().await;
    let drill = Drill {
        name: "three_brokers",
        mode: Mode::Upsert,
        assignment: "cooperative-sticky",
        fixed: false,
        records: setting("ONCEGATE_DRILL_RECORDS", 300_000),
        faults: setting("ONCEGATE_DRILL_FAULTS", 18),
        brokers: true,
        seed: 83,
    };
    drill.run(&Kafka::cluster(3)).await;
}
