//! Whole gateways from Kafka to Kafka: each event once, in order within its key, through kills, freezes and an empty store.
//!
//! ```text
//! cargo test -p oncegate-tests --test kafka_to_kafka -- --ignored --nocapture drill_of_a_million_into_kafka
//! ```

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    time::{Duration, Instant},
};

use oncegate_tests::{
    eventually,
    fleet::{Fault, Fleet},
    gateway::Gateway,
    servers::{Committed, Kafka, Produced, committed},
    workload::now_us,
};
use rand::{Rng, SeedableRng, rngs::StdRng};

const PARTITIONS: i32 = 4;
/// In a hundred.
const COPIES: u32 = 20;

/// Events of some entities, each with a number of its own; copies follow within a few hundred records, in the same partition.
struct Source {
    topic: &'static str,
    records: Vec<Produced>,
    partitions: i32,
    events: usize,
    produced: usize,
}

impl Source {
    async fn new(kafka: &Kafka, topic: &'static str, partitions: i32, count: usize, seed: u64) -> Self {
        kafka.topic(topic, partitions).await;
        kafka.topic(&format!("{topic}-out"), partitions).await;
        let mut random = StdRng::seed_from_u64(seed);
        let now_ms = now_us() / 1000;
        let mut records: Vec<Produced> = Vec::with_capacity(count);
        let mut events = 0;
        while records.len() < count {
            let back = random.random_range(1..500).min(records.len());
            if back > 0 && random.random_ratio(COPIES, 100) {
                records.push(records[records.len() - back].clone());
                continue;
            }
            let entity = random.random_range(0..1_000);
            let payload =
                format!("{{\"id\":{events},\"entity\":\"e{entity}\",\"pad\":\"{:0>80}\"}}", events * 7);
            records.push(Produced {
                partition: entity % partitions,
                key: Some(format!("e{entity}").into_bytes()),
                payload: Some(payload.into_bytes()),
                headers: vec![("number", events.to_string())],
                timestamp_ms: Some(now_ms),
            });
            events += 1;
        }
        Self { topic, partitions, records, events, produced: 0 }
    }

    fn produce(&mut self, kafka: &Kafka, until: usize) {
        kafka.produce(self.topic, self.records[self.produced..until].iter().cloned());
        self.produced = until;
    }

    fn out(&self) -> String {
        format!("{}-out", self.topic)
    }

    /// Sink, route and relay.
    fn config(&self, kafka: &Kafka, further: &str) -> String {
        let (brokers, topic, partitions) = (kafka.brokers(), self.topic, self.partitions);
        format!(
            "[sinks.{topic}]\ntype = \"kafka\"\nbrokers = \"{brokers}\"\ntopic = \"{topic}-out\"\nmarks_partitions = {partitions}\n\
             options = {{ \"broker.address.family\" = \"v4\" }}\n\n\
             [routes.{topic}]\nsink = \"{topic}\"\nkey = \"/id\"\nevent_time = {{ kafka = \"timestamp\" }}\nwindow = \"24h\"\n\
             lateness = \"1h\"\nbatch = {{ max_records = 2000 }}\n{further}\n\
             [routes.{topic}.kafka]\nbrokers = \"{brokers}\"\ntopics = [\"{topic}\"]\ngroup = \"{topic}\"\n"
        )
    }

    /// Each event once, as it came, and those of an entity in their order.
    fn check(&self, found: &[Committed]) -> Result<(), String> {
        let mut firsts: HashMap<&[u8], &Produced> = HashMap::new();
        for record in &self.records[..self.produced] {
            firsts.entry(record.payload.as_deref().unwrap_or_default()).or_insert(record);
        }
        let mut seen: BTreeMap<u64, usize> = BTreeMap::new();
        let mut last: HashMap<(i32, &str), u64> = HashMap::new();
        for record in found {
            let source = firsts
                .get(record.payload.as_deref().unwrap_or_default())
                .ok_or("a record that was never sent")?;
            let as_came = (&source.key, source.partition, source.timestamp_ms);
            assert_eq!((&record.key, record.partition, record.timestamp_ms), as_came);
            let number: u64 =
                record.header("number").ok_or("a header is lost")?.parse().map_err(|_| "no number")?;
            *seen.entry(number).or_default() += 1;
            if let Some(before) = last.insert((record.partition, record.key()), number) {
                assert!(before < number, "event {number} of {} came after {before}", record.key());
            }
        }
        let doubled: BTreeSet<_> =
            seen.iter().filter(|(_, count)| **count > 1).map(|(number, _)| number).collect();
        assert!(
            doubled.is_empty(),
            "{} events are there more than once: {:?}",
            doubled.len(),
            doubled.first()
        );
        if seen.len() == firsts.len() {
            Ok(())
        } else {
            Err(format!("{} of {} events", seen.len(), firsts.len()))
        }
    }

    async fn await_all(&self, kafka: &Kafka, patience: Duration) {
        let out = self.out();
        eventually("all events", patience, async || {
            let ends: i64 = kafka.ends(&out, self.partitions).iter().sum();
            if (ends as usize) < self.events.min(self.produced) / 2 {
                return Err(format!("the log ends at {ends}"));
            }
            self.check(&committed(&kafka.brokers(), &out))
        })
        .await;
    }

    async fn await_offsets(&self, kafka: &Kafka) {
        eventually("committed offsets at the end", Duration::from_secs(60), async || {
            let ends = kafka.ends(self.topic, self.partitions);
            let committed = kafka.committed(self.topic, self.partitions, self.topic);
            if ends == committed { Ok(()) } else { Err(format!("{committed:?} of {ends:?}")) }
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn kafka_to_kafka_each_event_once_and_in_order_through_kills() {
    const RECORDS: usize = 120_000;
    let rounds = oncegate_tests::kills(12);
    let kafka = Kafka::shared();
    let mut source = Source::new(kafka, "kills", PARTITIONS, RECORDS, 5).await;
    let mut gateway = Gateway::new(&source.config(kafka, "lanes = { http = 0, relay = 2 }"));
    gateway.start().await;
    let mut random = StdRng::seed_from_u64(7);
    let begun = Instant::now();
    for round in 1..=rounds {
        source.produce(kafka, RECORDS * round / rounds);
        tokio::time::sleep(Duration::from_millis(random.random_range(50..2_500))).await;
        gateway.kill();
        gateway.spawn();
    }
    gateway.ready(Duration::from_secs(60)).await;
    source.await_all(kafka, Duration::from_secs(120)).await;
    println!("{} events of {RECORDS} records after {:?}", source.events, begun.elapsed());
    source.await_offsets(kafka).await;
    let before = kafka.ends(&source.out(), PARTITIONS);

    // An empty store learns all facts from the marks topic: the first records, sent again, are copies.
    assert!(gateway.terminate().await.success(), "{}", gateway.log_tail(20));
    gateway.delete_store();
    gateway.start().await;
    let again = RECORDS / 4;
    kafka.produce(source.topic, source.records[..again].iter().cloned());
    source.await_offsets(kafka).await;
    let counted = eventually("all are counted", Duration::from_secs(30), async || {
        let count = gateway.metric("oncegate_records_total", &["outcome=\"duplicate\""]).await.unwrap_or(0.0);
        if count as usize >= again { Ok(count as usize) } else { Err(format!("{count} of {again}")) }
    })
    .await;
    assert_eq!(counted, again, "each is a copy, and counted once");
    assert_eq!(kafka.ends(&source.out(), PARTITIONS), before, "nothing was written, also no aborted attempt");
    source.check(&committed(&kafka.brokers(), &source.out())).expect("as before");
}

/// A relay is stopped with a batch in flight for longer than the session time-out; another takes over; the first goes on.
#[tokio::test(flavor = "multi_thread")]
async fn p13_a_frozen_relay_into_kafka_is_replaced_and_writes_nothing_when_it_goes_on() {
    const ROUNDS: usize = 4;
    const RECORDS: usize = 60_000;
    let kafka = Kafka::shared();
    let mut source = Source::new(kafka, "freezes", PARTITIONS, RECORDS, 6).await;
    let config = source.config(kafka, "lanes = { http = 0, relay = 2 }");
    let mut gateways = [Gateway::new(&config), Gateway::new(&config)];
    for gateway in &mut gateways {
        gateway.start().await;
    }
    for round in 0..ROUNDS {
        source.produce(kafka, RECORDS * (round + 1) / ROUNDS);
        tokio::time::sleep(Duration::from_millis(150 + 170 * round as u64)).await;
        let frozen = round % 2;
        gateways[frozen].freeze();
        let began = Instant::now();
        // The other one owns all partitions within seconds, and reads them to their ends; the frozen one's transaction is ended, which
        // the broker would do after 30 s.
        source.await_offsets(kafka).await;
        println!("replaced after {:?}", began.elapsed());
        assert!(began.elapsed() < Duration::from_secs(25), "{:?}", began.elapsed());
        source.await_all(kafka, Duration::from_secs(60)).await;
        gateways[frozen].thaw();
        tokio::time::sleep(Duration::from_secs(2)).await;
        source.check(&committed(&kafka.brokers(), &source.out())).expect("the sleeper wrote nothing");
    }
    for gateway in &mut gateways {
        gateway.ready(Duration::from_secs(60)).await;
        let strays = gateway.log().lines().filter(|line| line.contains("should have kept out")).count();
        assert_eq!(strays, 0, "{}", gateway.log_tail(40));
    }
}

/// Three brokers that die in turn, three instances and more that are killed, frozen, join and leave. `ONCEGATE_DRILL_RECORDS` and
/// `ONCEGATE_DRILL_FAULTS` set other sizes.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes minutes, and three JVMs: see the module"]
async fn drill_of_a_million_into_kafka() {
    let setting = |name: &str, otherwise: usize| {
        std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(otherwise)
    };
    let records = setting("ONCEGATE_DRILL_RECORDS", 1_000_000);
    let faults = Fault::in_turn(setting("ONCEGATE_DRILL_FAULTS", 36), true);
    let kafka = Kafka::cluster(3);
    let mut source = Source::new(&kafka, "million", 12, records, 84).await;
    let config = source.config(&kafka, "lanes = { http = 0, relay = 2 }");
    let mut fleet = Fleet::new(&kafka, (0..4).map(|_| Gateway::new(&config)).collect()).await;
    let mut random = StdRng::seed_from_u64(84);
    let begun = Instant::now();
    for (round, fault) in faults.iter().enumerate() {
        let (from, until) = (source.produced, records * (round + 1) / faults.len());
        // A fault comes in the midst of records; some of their copies come after it.
        source.produce(&kafka, from + (until - from) * 2 / 3);
        fleet.pass(Duration::from_millis(random.random_range(100..600))).await;
        fleet.strike(*fault, &mut random).await;
        source.produce(&kafka, until);
        fleet.pass(Duration::from_millis(random.random_range(1000..2500))).await;
    }
    fleet.recover().await;
    println!("{:?} within {:?}", fleet.done, begun.elapsed());
    source.await_all(&kafka, Duration::from_secs(300)).await;
    println!("all of {records} records after {:?}", begun.elapsed());
    fleet.offsets_follow(source.topic, source.partitions).await;
    source.check(&committed(&kafka.brokers(), &source.out())).expect("as before");
    fleet.assert_struck("million", faults.len()).await;
}
