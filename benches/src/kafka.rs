//! Kafka to Kafka, with marks and dedup, against a plain transactional consume-and-produce loop without either.

use std::{
    sync::Arc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use adapters::{
    kafka::Membership,
    kafka_sink::{KafkaSink, KafkaSinkConfig},
};
use oncegate::lane::Rules;
use oncegate_tests::{
    servers::{Kafka, Produced, committed},
    workload::{Mode as Kind, Workload},
};
use rdkafka::{
    ClientConfig, Message, Offset, TopicPartitionList,
    consumer::{BaseConsumer, Consumer},
    error::KafkaError,
    producer::{BaseProducer, BaseRecord, Producer},
    types::RDKafkaErrorCode,
};

use crate::{
    Scale,
    relay::relayed,
    report::{Report, Row},
};

pub(crate) async fn run(scale: Scale, only: &str) -> Report {
    let records = if scale == Scale::Full { 1_000_000 } else { 300_000 };
    let mut report = Report::new("kafka");
    report.rivals = vec![
        ("1 lane, no copies", "oncegate", "plain loop", 0.9),
        ("2 lanes, no copies", "oncegate", "plain loop", 0.9),
        ("1 lane, 20 % copies", "oncegate", "plain loop", 0.9),
    ];
    let kafka = Kafka::start();
    let until = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_micros();
    let until = i64::try_from(until).expect("this era");
    for (figure, lanes, copies) in
        [("1 lane, no copies", 1, 0), ("2 lanes, no copies", 2, 0), ("1 lane, 20 % copies", 1, 20)]
    {
        if !figure.contains(only) {
            continue;
        }
        let workload = Workload::generate(Kind::Insert, 1, records, copies, until);
        let bench = Bench { kafka: &kafka, figure, lanes, workload: &workload };
        bench.fill().await;
        // The broker compiles its code as it runs: whoever comes first would pay for it.
        bench.rival("warm-up").await;
        report.rows.push(bench.rival("plain loop").await);
        report.rows.push(bench.oncegate().await);
        report.rows.push(bench.rival("plain loop (again)").await);
    }
    report
}

struct Bench<'a> {
    kafka: &'a Kafka,
    figure: &'static str,
    /// As many partitions, and threads of the rival.
    lanes: u32,
    workload: &'a Workload,
}

impl Bench<'_> {
    fn topic(&self, what: &str) -> String {
        format!("{}-{what}", self.figure.replace([' ', ',', '%', '('], "-"))
    }

    fn partitions(&self) -> i32 {
        self.lanes.cast_signed()
    }

    async fn fill(&self) {
        let topic = self.topic("in");
        self.kafka.topic(&topic, self.partitions()).await;
        let records: Vec<Produced> =
            self.workload.sent.iter().map(|change| change.produced(self.lanes)).collect();
        self.kafka.produce(&topic, records);
    }

    async fn rival(&self, arm: &'static str) -> Row {
        let (source, out) = (self.topic("in"), self.topic(&arm.replace([' ', '(', ')'], "-")));
        self.kafka.topic(&out, self.partitions()).await;
        let started = Instant::now();
        let threads: Vec<_> = (0..self.partitions())
            .map(|partition| {
                let (brokers, source, out) = (self.kafka.brokers(), source.clone(), out.clone());
                let end = self.kafka.ends(&source, self.partitions())[partition as usize];
                tokio::task::spawn_blocking(move || plain_loop(&brokers, &source, &out, partition, end))
            })
            .collect();
        let (mut first, mut last) = (Instant::now() + Duration::from_secs(3600), started);
        for thread in threads {
            let (began, ended) = thread.await.expect("the rival works");
            (first, last) = (first.min(began), last.max(ended));
        }
        let count = self.workload.sent.len();
        let took = last - first;
        let correct = committed(&self.kafka.brokers(), &out).len() == count;
        Row {
            figure: self.figure,
            arm,
            value: count as f64 / took.as_secs_f64(),
            unit: "records/s",
            correct,
            note: format!("{count} records in {took:.1?}, copies and all"),
        }
    }

    async fn oncegate(&self) -> Row {
        let (source, out) = (self.topic("in"), self.topic("oncegate"));
        self.kafka.topic(&out, self.partitions()).await;
        let count = self.workload.sent.len();
        let seat = Arc::new(Membership::default());
        let config = KafkaSinkConfig {
            marks_topic: Some(self.topic("marks")),
            marks_partitions: self.partitions(),
            ..KafkaSinkConfig::new(&self.kafka.brokers(), &out)
        };
        let sink = KafkaSink::new(config).expect("a good configuration").fenced_by(seat.clone());
        let lanes = (0, self.lanes, 0);
        let relayed =
            relayed(self.kafka, &source, &["/order_id"], Arc::new(sink), lanes, Some(seat), count).await;
        let found = committed(&self.kafka.brokers(), &out);
        let distinct: std::collections::HashSet<&[u8]> =
            found.iter().filter_map(|record| record.payload.as_deref()).collect();
        let correct = found.len() == distinct.len() && distinct.len() == self.workload.model().len();
        relayed.row(self.figure, correct)
    }
}

/// Reads one partition to its end and writes the same records, a transaction a batch; answers with when the first record came and
/// when the last was committed.
fn plain_loop(brokers: &str, source: &str, out: &str, partition: i32, end: i64) -> (Instant, Instant) {
    let client = || {
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", brokers).set("broker.address.family", "v4");
        config
    };
    let consumer: BaseConsumer = client()
        .set("group.id", out)
        .set("enable.auto.commit", "false")
        .set("isolation.level", "read_committed")
        .set("fetch.queue.backoff.ms", "10")
        .create()
        .expect("a consumer");
    let producer: BaseProducer = client()
        .set("transactional.id", format!("{out}-{partition}"))
        .set("linger.ms", "2")
        .set("queue.buffering.max.messages", "1000000")
        .create()
        .expect("a producer");
    let patience = Duration::from_secs(30);
    producer.init_transactions(patience).expect("a coordinator");
    let mut from = TopicPartitionList::new();
    from.add_partition_offset(source, partition, Offset::Beginning).expect("an offset");
    consumer.assign(&from).expect("the partition");
    let most = Rules::default().max_records;
    let (mut next, mut began) = (0, None);
    while next < end {
        producer.begin_transaction().expect("a transaction");
        let mut count = 0;
        while count < most && next < end {
            // What is here already, but for the first.
            let wait = if count == 0 { Duration::from_millis(100) } else { Duration::ZERO };
            let Some(message) = consumer.poll(wait) else { if count == 0 { continue } else { break } };
            let message = message.expect("Kafka answers");
            began.get_or_insert_with(Instant::now);
            let mut record: BaseRecord<'_, [u8], [u8]> = BaseRecord::to(out).partition(partition);
            record.key = message.key();
            record.payload = message.payload();
            record.timestamp = message.timestamp().to_millis();
            if let Some(headers) = message.headers() {
                record = record.headers(headers.detach());
            }
            while let Err((error, again)) = producer.send(record) {
                assert_eq!(error, KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull));
                producer.poll(Duration::from_millis(1));
                record = again;
            }
            next = message.offset() + 1;
            count += 1;
        }
        while producer.in_flight_count() > 0 {
            producer.poll(Duration::from_millis(1));
        }
        let mut offsets = TopicPartitionList::new();
        offsets.add_partition_offset(source, partition, Offset::Offset(next)).expect("an offset");
        let metadata = consumer.group_metadata().expect("a group");
        producer.send_offsets_to_transaction(&offsets, &metadata, patience).expect("offsets");
        producer.commit_transaction(patience).expect("a commit");
    }
    (began.expect("there were records"), Instant::now())
}
