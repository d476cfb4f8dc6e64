//! What only a sink with a log has to show: open transactions, fencing by transactional ids, lost replies, records as they came.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use adapters::{
    kafka_sink::{KafkaSink, KafkaSinkConfig, KeyFrom, PartitionFrom, TimestampFrom},
    sink::{
        Acquire, Batch, DeadLetter, Encode, MarkBlock, Mode, OnRefused, Original, Resolution, RouteRow, Row,
        RowKind, RowOutcome, Session, ShardState, ShardStep, Sink, SinkError, Source,
    },
    value::Value,
};
use oncegate_tests::{
    conformance::{
        Place, Shape, Target,
        kafka::{TopicPlace, Topics, make_topic},
    },
    free_port,
    servers::{Committed, Kafka, committed},
};
use rdkafka::{
    ClientConfig,
    message::{Header, OwnedHeaders},
    producer::{BaseProducer, BaseRecord, Producer},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

/// One sink and a session that owns a shard.
pub(crate) struct Desk {
    encoder: Arc<dyn Encode>,
    pub(crate) session: Box<dyn Session>,
    pub(crate) state: ShardState,
}

impl Desk {
    pub(crate) async fn new(config: KafkaSinkConfig, owner: &str, shard: &str) -> Self {
        Self::of(&KafkaSink::new(config).expect("a good configuration"), owner, shard).await
    }

    pub(crate) async fn of(sink: &KafkaSink, owner: &str, shard: &str) -> Self {
        let encoder = sink.probe().await.expect("the topics fit");
        let mut session = sink.session("route", owner);
        let states = session.acquire(&[shard.into()], Acquire::Force).await.expect("the shard can be had");
        Self { encoder, session, state: states.into_iter().next().expect("one shard") }
    }

    pub(crate) fn step(&self) -> ShardStep {
        ShardStep {
            shard: self.state.shard.clone(),
            epoch: self.state.epoch,
            sequence: self.state.sequence + 1,
            position: Some((self.state.sequence + 1) * 10),
            watermark_ms: 1_000,
        }
    }

    /// Writes payloads with what they brought along.
    async fn write(
        &mut self,
        records: &[(Option<&[u8]>, Original<'_>)],
    ) -> Result<Vec<RowOutcome>, SinkError> {
        self.write_with(records, &[]).await
    }

    async fn write_with(
        &mut self,
        records: &[(Option<&[u8]>, Original<'_>)],
        dead_letters: &[DeadLetter<'_>],
    ) -> Result<Vec<RowOutcome>, SinkError> {
        let encoded: Vec<(Vec<u8>, Vec<u8>)> = records
            .iter()
            .map(|(payload, original)| {
                let (mut row, mut key) = (Vec::new(), Vec::new());
                let values = vec![Value::Json("\"the row key\""); self.encoder.columns().len()];
                let kind = if payload.is_some() { RowKind::Write } else { RowKind::Delete };
                self.encoder.encode_whole(kind, &values, original, &mut row, &mut key).expect("a good row");
                (row, key)
            })
            .collect();
        let rows: Vec<Row<'_>> = encoded
            .iter()
            .zip(records)
            .map(|((bytes, row_key), (payload, original))| Row {
                kind: if payload.is_some() { RowKind::Write } else { RowKind::Delete },
                bytes,
                row_key,
                source: Source {
                    step: 0,
                    position: Some(5),
                    key: b"0123456789abcdef",
                    payload: *payload,
                    event_ms: original.event_ms,
                },
            })
            .collect();
        let steps = [self.step()];
        let seal = |outcomes: &[RowOutcome]| {
            let count = outcomes.len();
            vec![MarkBlock {
                step: 0,
                min_ms: 1,
                max_ms: 1_000,
                count,
                block: format!("block {count}").into(),
            }]
        };
        let batch = Batch {
            steps: &steps,
            rows: &rows,
            dead_letters,
            on_refused: OnRefused::DeadLetter,
            known_new: true,
            seal: &seal,
        };
        let receipts = self.session.deliver(&batch).await?;
        self.state.sequence += 1;
        Ok(receipts.rows)
    }

    pub(crate) async fn write_text(&mut self, text: &str) -> Result<Vec<RowOutcome>, SinkError> {
        self.write(&[(Some(text.as_bytes()), Original::default())]).await
    }
}

pub(crate) async fn place() -> TopicPlace {
    Topics.place(&Shape::new(Mode::Insert)).await
}

pub(crate) fn config(place: &TopicPlace) -> KafkaSinkConfig {
    KafkaSinkConfig { row_key: vec![], ..place.config(&Shape::new(Mode::Insert)) }
}

pub(crate) fn payloads(records: &[Committed]) -> Vec<&str> {
    let text = |bytes| std::str::from_utf8(bytes).expect("a payload of the case");
    records.iter().filter_map(|record| record.payload.as_deref()).map(text).collect()
}

/// A process that has died, or sleeps, in the middle of a transaction: marks and rows are in, the commit is not.
struct Sleeper(BaseProducer);

impl Sleeper {
    fn begin(place: &TopicPlace, id: &str, shard: &str, marks_partition: i32) -> Self {
        let mut config = ClientConfig::new();
        config
            .set("bootstrap.servers", Kafka::shared().brokers())
            .set("broker.address.family", "v4")
            .set("transactional.id", id)
            .set("transaction.timeout.ms", "120000");
        let producer: BaseProducer = config.create().expect("a client can be made");
        producer.init_transactions(Duration::from_secs(20)).expect("a coordinator");
        producer.begin_transaction().expect("a transaction");
        let mut headers = OwnedHeaders::new();
        for (key, value) in
            [("kind", "mark"), ("route", "route"), ("epoch", "1"), ("sequence", "1"), ("writer", id)]
        {
            headers = headers.insert(Header { key, value: Some(value) });
        }
        let mark: BaseRecord<'_, str, str> = BaseRecord::to(&place.marks)
            .partition(marks_partition)
            .key(shard)
            .payload("keys")
            .headers(headers);
        producer.send(mark).map_err(|(error, _)| error).expect("queued");
        let row: BaseRecord<'_, str, str> = BaseRecord::to(&place.topic).payload("of the sleeper");
        producer.send(row).map_err(|(error, _)| error).expect("queued");
        while producer.in_flight_count() > 0 {
            producer.poll(Duration::from_millis(5));
        }
        Self(producer)
    }
}

/// P14: the marks partition has an open transaction of a dead process, and committed marks behind it. Reading to the last stable
/// offset would miss them; waiting for the time-out would take two minutes.
#[tokio::test]
async fn p14_marks_behind_a_dead_process_are_found_within_seconds_and_it_writes_nothing_more() {
    let place = place().await;
    let mut owner = Desk::new(config(&place), "first", "http/0").await;
    owner.write_text("before").await.expect("goes in");
    // Shard 3 has its marks in the same partition of three.
    let sleeper = Sleeper::begin(&place, "oncegate/route/dead/7", "http/3", 0);
    for text in ["one", "two", "three"] {
        owner.write_text(text).await.expect("goes in");
    }
    let began = Instant::now();
    let mut next = Desk::new(config(&place), "second", "http/0").await;
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    assert!(next.state.epoch > owner.state.epoch);
    assert_eq!((next.state.sequence, next.state.position), (4, Some(40)));
    let marks = next.session.marks_since(&"http/0".into(), 0).await.expect("marks");
    assert_eq!(marks.iter().map(|mark| mark.sequence).collect::<Vec<_>>(), [1, 2, 3, 4]);
    sleeper.0.commit_transaction(Duration::from_secs(10)).expect_err("it was ended");
    next.write_text("after").await.expect("goes in");
    let records = committed(&Kafka::shared().brokers(), &place.topic);
    let mut texts = payloads(&records);
    texts.sort_unstable();
    assert_eq!(texts, ["after", "before", "one", "three", "two"]);
}

/// The owner itself falls asleep with a full batch in flight; whoever takes its shard over need not wait, and nothing of it comes.
#[tokio::test]
async fn p14_an_owner_that_sleeps_with_a_batch_in_flight_writes_nothing_when_it_wakes() {
    let place = place().await;
    let mut owner = Desk::new(config(&place), "first", "http/0").await;
    owner.write_text("before").await.expect("goes in");
    // The first session of a sink has number 0: this takes the owner's id over, as the owner in its transaction.
    let sleeper = Sleeper::begin(&place, "oncegate/route/first/0", "http/0", 0);
    let began = Instant::now();
    let mut next = Desk::new(config(&place), "second", "http/0").await;
    assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
    assert!(next.state.epoch > owner.state.epoch);
    assert_eq!(next.state.sequence, 1);
    next.write_text("after").await.expect("goes in");
    sleeper.0.commit_transaction(Duration::from_secs(10)).expect_err("it is fenced");
    let fenced = owner.write_text("late").await;
    assert!(
        matches!(&fenced, Err(SinkError::Fenced { owner, epoch, .. }) if owner == "second" && *epoch == next.state.epoch),
        "{fenced:?}"
    );
    let records = committed(&Kafka::shared().brokers(), &place.topic);
    let mut texts = payloads(&records);
    texts.sort_unstable();
    assert_eq!(texts, ["after", "before"]);
}

/// P14: whoever only looks disturbs nobody in its time, and hears what holds it up.
#[tokio::test]
async fn p14_a_look_that_is_held_up_names_the_transactional_id() {
    let place = place().await;
    let short = KafkaSinkConfig { transaction_timeout: Duration::from_secs(1), ..config(&place) };
    drop(Desk::new(config(&place), "first", "http/0").await);
    let sleeper = Sleeper::begin(&place, "oncegate/route/other/1", "kafka/c/t/3", 0);
    let mut looker = KafkaSink::new(short).expect("good").session("route", "looker");
    let held = looker.shards("").await;
    let Err(SinkError::NotApplied { reason, retry: true }) = &held else { panic!("held up, but: {held:?}") };
    assert!(reason.contains("\"oncegate/route/other/1\"") && reason.contains("partition 0"), "{reason}");
    sleeper.0.commit_transaction(Duration::from_secs(10)).expect("nobody ended it");
    looker.shards("").await.expect("nothing holds it up");
}

/// P14: a look that comes before a take-over, as at the start of an instance, is not held up for long by an owner that shows no life;
/// nor once more by each of a dead instance's transactions.
#[tokio::test]
async fn p14_a_look_ends_an_owner_that_is_silent_in_its_transaction() {
    for shards in [["http/3", "http/4"], ["kafka/c/t/3", "kafka/c/t/4"]] {
        let place = place().await;
        drop(Desk::new(config(&place), "first", "http/0").await);
        let sleepers = [0, 1].map(|number: i32| {
            let id = format!("oncegate/route/other/{number}");
            Sleeper::begin(&place, &id, shards[number as usize], number)
        });
        let mut looker = KafkaSink::new(config(&place)).expect("good").session("route", "looker");
        let began = Instant::now();
        looker.shards("").await.expect("not held up for ever");
        assert!((5..11).contains(&began.elapsed().as_secs()), "{:?}", began.elapsed());
        for sleeper in sleepers {
            sleeper.0.commit_transaction(Duration::from_secs(10)).expect_err("it was ended");
        }
    }
}

/// P1: who the route is has been decided, whatever is open.
#[tokio::test]
async fn p1_a_route_that_is_known_is_told_beside_an_open_transaction() {
    let place = place().await;
    let row = |byte: u8| RouteRow {
        route_id: vec![byte; 16],
        key_spec_id: 1,
        algorithm: 1,
        secret: vec![byte; 192],
    };
    let mut first = Desk::new(config(&place), "first", "http/0").await;
    assert_eq!(first.session.register_route(&row(1)).await.expect("registered"), row(1));
    let sleeper = Sleeper::begin(&place, "oncegate/route/other/1", "kafka/c/t/3", 0);
    let mut next = KafkaSink::new(config(&place)).expect("good").session("route", "second");
    let began = Instant::now();
    assert_eq!(next.register_route(&row(2)).await.expect("registered"), row(1));
    assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
    sleeper.0.commit_transaction(Duration::from_secs(10)).expect("nobody ended it");
}

/// Keys, headers, partitions, timestamps and values are as they came; tombstones too.
#[tokio::test]
async fn records_are_written_as_they_came() {
    let place = place().await;
    let mut desk = Desk::new(config(&place), "first", "http/0").await;
    let now_ms = oncegate_tests::workload::now_us() / 1000;
    let headers: [(&str, Option<&[u8]>); 3] = [("a", Some(b"1")), ("none", None), ("a", Some(b"\xff"))];
    let original = |partition| Original {
        key: Some(b"key\x00\xff"),
        headers: &headers,
        timestamp_ms: Some(now_ms - 5_000),
        event_ms: now_ms - 9_000,
        partition: Some(partition),
    };
    let records = [
        (Some(&b"not JSON \x00\xff"[..]), original(2)),
        (None, original(1)),
        (Some(&b""[..]), Original { key: None, headers: &[], partition: Some(0), ..original(0) }),
    ];
    let outcomes = desk.write(&records).await.expect("goes in");
    assert_eq!(outcomes, vec![RowOutcome::Written; 3]);
    let found = committed(&Kafka::shared().brokers(), &place.topic);
    assert_eq!(found.iter().map(|record| record.partition).collect::<Vec<_>>(), [0, 1, 2]);
    let [empty, tombstone, bytes] = &found[..] else { panic!("three records") };
    assert_eq!((empty.key.as_deref(), empty.payload.as_deref()), (None, Some(&b""[..])));
    assert_eq!((tombstone.key.as_deref(), tombstone.payload.as_deref()), (Some(&b"key\x00\xff"[..]), None));
    assert_eq!(bytes.payload.as_deref(), Some(&b"not JSON \x00\xff"[..]));
    let as_came: Vec<_> =
        headers.iter().map(|(name, value)| ((*name).to_owned(), value.map(<[u8]>::to_vec))).collect();
    assert_eq!((&bytes.headers, bytes.timestamp_ms), (&as_came, Some(now_ms - 5_000)));
    assert!(empty.headers.is_empty());
}

/// The route may choose otherwise, and add what names the record.
#[tokio::test]
async fn a_route_may_choose_key_partition_and_timestamp_and_add_headers() {
    let place = place().await;
    let chosen = KafkaSinkConfig {
        mode: Mode::Upsert,
        row_key: vec!["id".to_owned()],
        key: KeyFrom::RowKey,
        partition: PartitionFrom::Key,
        timestamp: TimestampFrom::Event,
        add_headers: true,
        ..config(&place)
    };
    let mut desk = Desk::new(chosen, "first", "http/0").await;
    let now_ms = oncegate_tests::workload::now_us() / 1000;
    let original = Original {
        key: Some(b"theirs"),
        event_ms: now_ms - 7_000,
        partition: Some(2),
        ..Original::default()
    };
    let records = [(Some(&b"one"[..]), original), (None, Original { partition: Some(0), ..original })];
    desk.write(&records).await.expect("goes in");
    let found = committed(&Kafka::shared().brokers(), &place.topic);
    assert_eq!(found[0].partition, found[1].partition, "one key, one partition");
    for record in &found {
        assert_eq!((record.key(), record.timestamp_ms), ("the row key", Some(now_ms - 7_000)));
        assert_eq!(record.header("oncegate-key"), Some("30313233343536373839616263646566"));
        assert_eq!(record.header("oncegate-outcome"), Some("written"));
    }
    assert_eq!(found[1].payload, None, "a delete is a tombstone");
}

/// P10: dead letters are in the batch's transaction; what the topic does not take is one of them.
#[tokio::test]
async fn p10_dead_letters_are_in_the_batchs_transaction() {
    let place = place().await;
    let mut desk = Desk::new(config(&place), "first", "http/0").await;
    let source = Source {
        step: 0,
        position: Some(77),
        key: b"0123456789abcdef",
        payload: Some(b"late one"),
        event_ms: 9,
    };
    let letter = DeadLetter { source, kind: "late", reason: "too late".to_owned() };
    let large = vec![b'x'; 30_000];
    let records = [(Some(&b"good"[..]), Original::default()), (Some(&large[..]), Original::default())];
    let outcomes = desk.write_with(&records, &[letter]).await.expect("goes in");
    assert!(
        matches!(&outcomes[..], [RowOutcome::Written, RowOutcome::Refused { reason }] if reason.contains("max.message.bytes")),
        "{outcomes:?}"
    );
    let brokers = Kafka::shared().brokers();
    assert_eq!(payloads(&committed(&brokers, &place.topic)), ["good"]);
    let letters = committed(&brokers, &place.letters);
    let [late, refused] = &letters[..] else { panic!("two letters, but: {letters:?}") };
    assert_eq!((late.header("oncegate-kind"), late.header("oncegate-position")), (Some("late"), Some("77")));
    assert_eq!(
        (late.key(), late.payload.as_deref()),
        ("30313233343536373839616263646566", Some(&b"late one"[..]))
    );
    assert_eq!(
        (refused.header("oncegate-kind"), refused.payload.as_deref()),
        (Some("rejected"), Some(&large[..]))
    );
}

/// What does not fit is named before anything is written.
#[tokio::test]
async fn the_start_names_what_does_not_fit() {
    let place = place().await;
    let probe = async |change: &dyn Fn(&mut KafkaSinkConfig)| {
        let mut config = config(&place);
        change(&mut config);
        let misfits =
            KafkaSink::new(config).expect("good by itself").probe().await.expect_err("does not fit");
        misfits.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
    };
    let missing = probe(&|config| config.topic = "nowhere".to_owned()).await;
    assert!(missing.contains("\"nowhere\" does not exist"), "{missing}");
    let long = probe(&|config| config.transaction_timeout = Duration::from_secs(1_800)).await;
    assert!(long.contains("1800000 ms") && long.contains("900000 ms"), "{long}");
    let newest = probe(&|config| config.mode = Mode::UpsertIfNewer).await;
    assert!(newest.contains("has no rows"), "{newest}");

    for (name, settings, says) in [
        ("compacted", ("cleanup.policy", "compact"), "cleanup.policy=compact"),
        ("short", ("retention.ms", "60000"), "retention.ms=60000"),
        ("small", ("retention.bytes", "100000"), "retention.bytes=100000"),
    ] {
        let marks = format!("{}-{name}", place.marks);
        make_topic(&marks, 1, &[settings]).await;
        let config = KafkaSinkConfig { marks_topic: Some(marks), ..config(&place) };
        let mut session = KafkaSink::new(config).expect("good").session("route", "x");
        let refused = session.acquire(&["http/0".into()], Acquire::Force).await;
        assert!(
            matches!(&refused, Err(SinkError::NotApplied { reason, retry: false }) if reason.contains(says)),
            "{refused:?}"
        );
    }
    assert!(place.texts("SELECT id FROM rows").await.is_empty());
}

/// A way to the broker on which replies can be lost.
struct Way {
    port: u16,
    armed: Arc<AtomicBool>,
    silent: Arc<AtomicBool>,
}

const END_TXN: i16 = 26;

impl Way {
    async fn to(server: u16) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a free port");
        let port = listener.local_addr().expect("bound").port();
        let (armed, silent) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let way = Self { port, armed: armed.clone(), silent: silent.clone() };
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let Ok(server) = TcpStream::connect(("127.0.0.1", server)).await else { continue };
                let (mut from_client, mut to_client) = client.into_split();
                let (mut from_server, mut to_server) = server.into_split();
                let (armed, muted) = (armed.clone(), silent.clone());
                tokio::spawn(async move {
                    loop {
                        let mut size = [0; 4];
                        from_client.read_exact(&mut size).await?;
                        let mut frame = vec![0; u32::from_be_bytes(size) as usize];
                        from_client.read_exact(&mut frame).await?;
                        if i16::from_be_bytes([frame[0], frame[1]]) == END_TXN
                            && armed.swap(false, Ordering::SeqCst)
                        {
                            muted.store(true, Ordering::SeqCst);
                        }
                        to_server.write_all(&size).await?;
                        to_server.write_all(&frame).await?;
                    }
                    #[expect(unreachable_code, reason = "says what the error is")]
                    Ok::<(), std::io::Error>(())
                });
                let silent = silent.clone();
                tokio::spawn(async move {
                    let mut bytes = vec![0; 1 << 16];
                    loop {
                        let count = from_server.read(&mut bytes).await?;
                        if count == 0 || silent.load(Ordering::SeqCst) {
                            // Neither this reply nor a later one comes back.
                            return Ok(());
                        }
                        to_client.write_all(&bytes[..count]).await?;
                    }
                    #[expect(unreachable_code, reason = "says what the error is")]
                    Ok::<(), std::io::Error>(())
                });
            }
        });
        way
    }
}

/// P5: the broker commits, and its answer is lost for longer than anybody waits: the batch is found, and not written again.
#[tokio::test(flavor = "multi_thread")]
async fn p5_a_commit_whose_reply_is_lost_is_found_and_not_repeated() {
    let behind = free_port();
    let way = Way::to(behind).await;
    let kafka = Kafka::with(1, |_, listeners| {
        let plain = listeners.split(',').next().unwrap_or_default();
        format!(
            "listeners={listeners},BEHIND://127.0.0.1:{behind}\n\
             advertised.listeners={plain},BEHIND://127.0.0.1:{}\n\
             listener.security.protocol.map=PLAINTEXT:PLAINTEXT,BEHIND:PLAINTEXT,CONTROLLER:PLAINTEXT\n",
            way.port
        )
    });
    kafka.topic("rows", 1).await;
    let config = KafkaSinkConfig {
        transaction_timeout: Duration::from_secs(3),
        options: [("broker.address.family", "v4"), ("socket.timeout.ms", "2000")]
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .into(),
        ..KafkaSinkConfig::new(&format!("127.0.0.1:{}", way.port), "rows")
    };
    let mut desk = Desk::new(config, "first", "http/0").await;
    desk.write_text("one").await.expect("goes in");
    way.armed.store(true, Ordering::SeqCst);
    let step = desk.step();
    let lost = desk.write_text("two").await;
    assert!(matches!(lost, Err(SinkError::Unknown { .. })), "{lost:?}");
    assert!(!desk.session.connected());
    way.silent.store(false, Ordering::SeqCst);
    let until = Instant::now() + Duration::from_secs(60);
    let (resolution, states) = loop {
        match desk.session.resolve(std::slice::from_ref(&step)).await {
            Ok(found) => break found,
            Err(error) => assert!(Instant::now() < until, "{error}"),
        }
    };
    let Resolution::Applied(marks) = resolution else { panic!("applied, but: {resolution:?}") };
    assert_eq!((marks.len(), marks[0].1.sequence, states[0].sequence), (1, 2, 2));
    desk.state = states.into_iter().next().expect("one shard");
    desk.write_text("three").await.expect("goes on");
    assert_eq!(payloads(&committed(&kafka.brokers(), "rows")), ["one", "two", "three"]);
}
