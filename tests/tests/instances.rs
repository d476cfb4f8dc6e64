//! Several instances of one relay, through kills, freezes that last longer than the group's session, joins and leaves: at the end
//! each key took effect once, in order within its key, and nothing is lost.
//!
//! The sizes that run everywhere are small. The whole drill, and the one in which brokers die too, are asked for by name:
//!
//! ```text
//! cargo test -p oncegate-tests --test instances -- --ignored --nocapture drill_of_a_million
//! cargo test -p oncegate-tests --test instances -- --ignored --nocapture drill_with_three_brokers
//! ONCEGATE_SOAK_MINUTES=120 cargo test -p oncegate-tests --test instances -- --ignored --nocapture soak
//! ```

use std::{
    collections::BTreeMap,
    fmt::Write,
    time::{Duration, Instant},
};

use oncegate_tests::{
    eventually,
    gateway::Gateway,
    route::OrdersRoute,
    servers::{Kafka, Postgres, Produced},
    workload::{
        Change, Mode, Order, Workload, assert_each_effect_once, await_table, effects_of, now_us, orders_table,
    },
};
use rand::{Rng, SeedableRng, rngs::StdRng};
use tokio_postgres::Client;

const PARTITIONS: u32 = 12;
const COPIES: u32 = 20;
/// The group's session is over after 6 s: who is frozen for longer has lost its partitions, and does not know.
const FREEZE: Duration = Duration::from_secs(8);
/// How long an instance is away after a kill.
const AWAY: Duration = Duration::from_millis(1500);

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

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fault {
    /// `kill -9`, and back after a while.
    Kill,
    /// The same, and the store is lost with it.
    KillAndLoseStore,
    /// SIGSTOP for longer than the session, then SIGCONT.
    Freeze,
    /// One more instance joins.
    Join,
    /// An instance leaves as an operator has it.
    Leave,
    /// A broker dies, and comes back after a while.
    Broker,
}

/// What has to be made good again, and when.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Due {
    Start(usize),
    Thaw(usize),
    Broker,
}

#[derive(PartialEq, Eq, Clone, Copy, Debug)]
enum Is {
    Running,
    Frozen,
    Away,
}

struct Fleet<'a> {
    kafka: &'a Kafka,
    members: Vec<(Gateway, Is)>,
    due: Vec<(Instant, Due)>,
    brokers_down: bool,
    next_broker: usize,
    done: BTreeMap<String, usize>,
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
        let members = (0..4)
            .map(|member| (Gateway::new(&self.config(&postgres.url(self.name), &brokers, member)), Is::Away))
            .collect();
        let mut fleet =
            Fleet { kafka, members, due: vec![], brokers_down: false, next_broker: 0, done: BTreeMap::new() };
        for member in 0..3 {
            fleet.start(member);
        }
        for (member, _) in &mut fleet.members[..3] {
            member.ready(Duration::from_secs(60)).await;
        }
        let begun = Instant::now();
        let mut random = StdRng::seed_from_u64(self.seed);
        let faults = self.faults();
        let share = self.records / faults.len();
        for (round, fault) in faults.iter().enumerate() {
            let until = if round + 1 == faults.len() { self.records } else { (round + 1) * share };
            let slice = &workload.sent[round * share..until];
            // What comes before the fault comes again after it: copies whose first was written, or is on its way, or was not
            // even read when its partition moved.
            let (before, after) = slice.split_at(slice.len() * 2 / 3);
            self.produce(fleet.kafka, before);
            tokio::time::sleep(Duration::from_millis(random.random_range(100..600))).await;
            fleet.strike(*fault, &mut random).await;
            self.produce(fleet.kafka, &before[before.len() - before.len().min(share / 5)..]);
            self.produce(fleet.kafka, after);
            let pause = Duration::from_millis(random.random_range(1000..2500));
            let next = Instant::now() + pause;
            while Instant::now() < next {
                fleet.make_good();
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
        while !fleet.due.is_empty() {
            fleet.make_good();
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        println!("{}: {:?} within {:?}", self.name, fleet.done, begun.elapsed());
        await_table(&table, "orders", &model, Duration::from_secs(180)).await;
        println!("{}: all of {} records after {:?}", self.name, self.records, begun.elapsed());
        fleet.offsets_follow(self.name).await;
        assert_each_effect_once(&table, "orders").await;
        assert_in_order(&table).await;
        fleet.assert_struck(self, &model).await;
    }

    /// Each kind in turn.
    fn faults(&self) -> Vec<Fault> {
        use Fault::{Broker, Freeze, Join, Kill, KillAndLoseStore, Leave};
        let turn: &[Fault] = if self.brokers {
            &[Kill, Broker, Freeze, Broker, Join, Broker, KillAndLoseStore, Broker, Leave]
        } else {
            &[Freeze, Kill, Join, KillAndLoseStore, Freeze, Leave]
        };
        turn.iter().copied().cycle().take(self.faults).collect()
    }

    fn produce(&self, kafka: &Kafka, changes: &[Change]) {
        let records: Vec<Produced> = changes.iter().map(|change| change.produced(PARTITIONS)).collect();
        kafka.produce(self.name, records);
    }
}

impl Fleet<'_> {
    fn start(&mut self, member: usize) {
        self.members[member].0.spawn();
        self.members[member].1 = Is::Running;
    }

    /// One of those that run, if so many stay.
    fn pick(&self, random: &mut StdRng) -> Option<usize> {
        let running: Vec<usize> =
            (0..self.members.len()).filter(|at| self.members[*at].1 == Is::Running).collect();
        (running.len() > 1).then(|| running[random.random_range(0..running.len())])
    }

    async fn strike(&mut self, fault: Fault, random: &mut StdRng) {
        let now = Instant::now();
        match fault {
            Fault::Kill | Fault::KillAndLoseStore => {
                let Some(member) = self.pick(random) else { return };
                self.members[member].0.kill();
                if fault == Fault::KillAndLoseStore {
                    self.members[member].0.delete_store();
                }
                self.members[member].1 = Is::Away;
                self.due.push((now + AWAY, Due::Start(member)));
            }
            Fault::Freeze => {
                let Some(member) = self.pick(random) else { return };
                self.members[member].0.freeze();
                self.members[member].1 = Is::Frozen;
                self.due.push((now + FREEZE, Due::Thaw(member)));
            }
            Fault::Join => {
                let promised = |at: usize| self.due.iter().any(|(_, due)| *due == Due::Start(at));
                let away =
                    (0..self.members.len()).find(|at| self.members[*at].1 == Is::Away && !promised(*at));
                let Some(member) = away else { return };
                self.start(member);
            }
            Fault::Leave => {
                let Some(member) = self.pick(random) else { return };
                let ended = self.members[member].0.terminate().await;
                assert!(ended.success(), "{}", self.members[member].0.log_tail(20));
                self.members[member].1 = Is::Away;
                if (0..self.members.len()).filter(|at| self.members[*at].1 != Is::Away).count() < 3 {
                    self.due.push((now + AWAY, Due::Start(member)));
                }
            }
            Fault::Broker => {
                if self.brokers_down {
                    return;
                }
                self.kafka.kill_broker(self.next_broker);
                self.next_broker = (self.next_broker + 1) % 3;
                self.brokers_down = true;
                self.due.push((now + AWAY, Due::Broker));
            }
        }
        *self.done.entry(format!("{fault:?}")).or_default() += 1;
    }

    /// What is due now.
    fn make_good(&mut self) {
        let now = Instant::now();
        let (due, later) = self.due.drain(..).partition(|(at, _)| *at <= now);
        self.due = later;
        let due: Vec<(Instant, Due)> = due;
        for (_, due) in due {
            match due {
                Due::Start(member) => self.start(member),
                Due::Thaw(member) => {
                    self.members[member].0.thaw();
                    self.members[member].1 = Is::Running;
                }
                Due::Broker => {
                    self.kafka.run();
                    self.brokers_down = false;
                }
            }
        }
    }

    async fn offsets_follow(&self, topic: &str) {
        let partitions = PARTITIONS.cast_signed();
        eventually("committed offsets at the end", Duration::from_secs(60), async || {
            let (ends, committed) =
                (self.kafka.ends(topic, partitions), self.kafka.committed(topic, partitions, topic));
            if ends == committed { Ok(()) } else { Err(format!("{committed:?} of {ends:?}")) }
        })
        .await;
    }

    /// The drill did what it is for: partitions moved, and who froze found that out. Not each time: a member may have had no partition
    /// then, or be killed before it has its answer.
    async fn assert_struck(&mut self, drill: &Drill, model: &BTreeMap<String, Order>) {
        assert!(!model.is_empty());
        let logs: Vec<String> = self.members.iter().map(|(member, _)| member.log()).collect();
        let lines = |words: &[&str]| -> usize {
            let has = |line: &&str| words.iter().all(|word| line.contains(word));
            logs.iter().map(|log| log.lines().filter(has).count()).sum()
        };
        let counted = [
            ("assigned", lines(&["partitions are assigned"])),
            ("lost", lines(&["partitions are taken back", "lost=true"])),
            ("fenced", lines(&["fenced"])),
            ("facts learnt", lines(&["learnt facts from the sink's marks"])),
            ("not confirmed", lines(&["does not confirm this member"])),
        ];
        println!("{}: {counted:?}", drill.name);
        assert!(counted[0].1 > drill.faults / 2, "{counted:?}");
        assert!(counted[1].1 + counted[2].1 + counted[4].1 > 0, "{counted:?}");
        assert!(counted[3].1 > 0, "{counted:?}");
        let duplicates = {
            let mut sum = 0.0;
            for (member, is) in &self.members {
                if *is == Is::Running {
                    let found = member.metric("oncegate_records_total", &["outcome=\"duplicate\""]).await;
                    sum += found.unwrap_or(0.0);
                }
            }
            sum
        };
        assert!(duplicates > 0.0);
        for (member, is) in &mut self.members {
            if *is == Is::Running {
                assert!(member.exited().is_none(), "{}", member.log_tail(20));
            }
        }
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

fn setting(name: &str, otherwise: usize) -> usize {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(otherwise)
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

/// What one look at a gateway under a steady load shows.
#[derive(Clone, Copy, Debug)]
struct Look {
    lag: f64,
    memory_mib: u64,
    files: usize,
}

/// Resident memory in MiB, and open file descriptors.
fn look_at(pid: u32) -> (u64, usize) {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or_default();
    let kib: u64 = line.split_whitespace().next().and_then(|word| word.parse().ok()).unwrap_or(0);
    let files = std::fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count);
    (kib >> 10, files)
}

/// A steady load for `ONCEGATE_SOAK_MINUTES` (120): lag, memory and file descriptors stay flat, and the table is right at the end. The
/// window is a minute, so that keys expire all the while.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes hours: see the module"]
async fn soak() {
    let minutes = setting("ONCEGATE_SOAK_MINUTES", 120);
    let rate = setting("ONCEGATE_SOAK_RATE", 2_000);
    let (kafka, postgres) = (Kafka::start(), Postgres::shared());
    let table = postgres.database("soak", "CREATE TABLE t (id text NOT NULL, at bigint NOT NULL)").await;
    kafka.topic("soak", PARTITIONS.cast_signed()).await;
    let mut gateway = Gateway::new(&format!(
        "[sinks.t]\ntype = \"postgres\"\nurl = \"{}\"\ntable = \"public.t\"\n\n\
         [routes.t]\nsink = \"t\"\nkey = \"/id\"\nevent_time = \"/at\"\ntime_unit = \"ms\"\nwindow = \"1m\"\nlateness = \"10s\"\n\
         lanes = {{ http = 0, relay = 2 }}\n\n\
         [routes.t.kafka]\nbrokers = \"{}\"\ntopics = [\"soak\"]\ngroup = \"soak\"\n",
        postgres.url("soak"),
        kafka.brokers()
    ));
    gateway.start().await;
    let pid = gateway.pid().expect("it runs");
    let (begun, end) = (Instant::now(), Duration::from_secs(60 * minutes as u64));
    let (mut looks, mut sent, mut second) = (Vec::<Look>::new(), 0_i64, 0_u64);
    let every = if minutes > 20 { 60 } else { 10 };
    println!("{:>7} {:>12} {:>8} {:>10} {:>6}", "seconds", "records", "lag", "memory MiB", "files");
    while begun.elapsed() < end {
        let now_ms = jiff::Timestamp::now().as_millisecond();
        let fresh = (rate * 4 / 5) as i64;
        let record = |n: i64| Produced {
            partition: (n % i64::from(PARTITIONS)) as i32,
            // A copy has the event time of the first.
            payload: Some(format!(r#"{{"id":"{n}","at":{}}}"#, now_ms - n % 5).into_bytes()),
            ..Produced::default()
        };
        let records: Vec<Produced> = (sent..sent + fresh)
            .flat_map(|n| if n % 4 == 0 { vec![record(n), record(n)] } else { vec![record(n)] })
            .collect();
        kafka.produce("soak", records);
        sent += fresh;
        second += 1;
        if second.is_multiple_of(every) {
            let lag = gateway.metric("oncegate_lag_records", &[]).await.unwrap_or(-1.0);
            let (memory_mib, files) = look_at(pid);
            println!("{second:>7} {sent:>12} {lag:>8} {memory_mib:>10} {files:>6}");
            looks.push(Look { lag, memory_mib, files });
        }
        tokio::time::sleep((begun + Duration::from_secs(second)).saturating_duration_since(Instant::now()))
            .await;
    }
    eventually("the rest", Duration::from_secs(60), async || {
        let row =
            table.query_one("SELECT count(*), count(DISTINCT id) FROM t", &[]).await.expect("an answer");
        let (all, distinct): (i64, i64) = (row.get(0), row.get(1));
        assert_eq!(all, distinct, "rows came twice");
        if all == sent { Ok(()) } else { Err(format!("{all} of {sent}")) }
    })
    .await;
    // The first third warms up: the window fills, slots are sealed for the first time.
    let settled = &looks[looks.len() / 3..];
    let half = settled.len() / 2;
    let most = |part: &[Look], of: fn(&Look) -> f64| part.iter().map(of).fold(0.0, f64::max);
    let (early, late) = settled.split_at(half);
    for (what, of, room) in [
        ("memory", (|look| look.memory_mib as f64) as fn(&Look) -> f64, 24.0),
        ("files", |look| look.files as f64, 8.0),
        ("lag", |look| look.lag, (rate * 3) as f64),
    ] {
        let (early, late) = (most(early, of), most(late, of));
        println!("{what}: {early} at most, then {late}");
        assert!(late <= early * 1.1 + room, "{what} grows: {early}, then {late}");
    }
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
