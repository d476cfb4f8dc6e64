//! Shards: fence, take-over, unknown commits, marks and floors.

use std::time::{Duration, Instant};

use adapters::{
    postgres::PostgresSink,
    sink::{Acquire, Batch, OnRefused, Resolution, RouteRow, Session, ShardId, ShardStep, Sink, SinkError},
};
use oncegate_tests::{
    proxy::{Action, Point, Proxy},
    servers::Postgres,
};

use crate::rig::{Rig, Rows, SHARD, seal};

const TABLE: &str = "CREATE TABLE t (id int PRIMARY KEY, x text)";

async fn rig() -> Rig {
    Rig::new(TABLE, |config| config.row_key = vec!["id".into()]).await
}

/// A second session of the same route, from another owner.
fn other(rig: &Rig, owner: &str) -> Box<dyn Session> {
    rig.sink.session("orders", owner)
}

async fn deliver_steps(rig: &mut Rig, steps: &[ShardStep], records: &[&str]) -> Result<(), SinkError> {
    let rows = Rows::new(&*rig.encoder, records).unwrap();
    let rows = rows.rows();
    let seal = seal(steps);
    let batch = Batch {
        steps,
        rows: &rows,
        dead_letters: &[],
        on_refused: OnRefused::Report,
        known_new: true,
        seal: &seal,
    };
    rig.session.deliver(&batch).await.map(drop)
}

fn many(count: usize) -> Vec<String> {
    (0..count).map(|id| format!(r#"{{"id":{id},"x":"{}"}}"#, "x".repeat(200))).collect()
}

#[tokio::test]
async fn p3_acquire_raises_the_epoch_and_says_what_the_sink_knows() {
    let mut rig = rig().await;
    assert!(rig.epoch > 0);
    rig.deliver(&[r#"{"id":1}"#]).await;
    let shards: Vec<ShardId> = vec!["http/1".into(), SHARD.into()];
    let states = rig.session.acquire(&shards, Acquire::Force).await.unwrap();
    assert_eq!((&*states[0].shard, states[0].sequence, states[0].watermark_ms), ("http/1", 0, i64::MIN));
    assert_eq!((&*states[1].shard, states[1].sequence, states[1].watermark_ms), (SHARD, 1, 1000));
    assert!(states[1].epoch > rig.epoch && states[1].lineage.has(1, rig.epoch));
    assert_eq!((states[0].position, states[0].floor_ms), (None, i64::MIN));
    let found = rig.session.shards("http/").await.unwrap();
    assert_eq!(found, [states[1].clone(), states[0].clone()], "as they stand, and not taken");
    assert!(rig.session.shards("kafka/").await.unwrap().is_empty());
}

#[tokio::test]
async fn p4_a_second_owner_fences_the_first_on_every_way_in() {
    let mut rig = rig().await;
    let mut second = other(&rig, "second");
    let theirs = second.acquire(&[SHARD.into()], Acquire::Force).await.unwrap()[0].epoch;
    for count in [0, 2, 600] {
        for known_new in [true, false] {
            rig.options.known_new = known_new;
            let records = many(count);
            let records: Vec<&str> = records.iter().map(String::as_str).collect();
            let error = rig.try_deliver(&records).await.unwrap_err();
            let SinkError::Fenced { shard, owner, epoch } = error else { panic!("{error}") };
            assert_eq!((shard.as_str(), owner.as_str(), epoch), (SHARD, "second", theirs));
        }
    }
    let error = rig.session.heartbeat(&[(SHARD.into(), rig.epoch)]).await.unwrap_err();
    assert!(matches!(error, SinkError::Fenced { .. }));
    let error = rig.session.expire_marks(&[(SHARD.into(), rig.epoch)], 0).await.unwrap_err();
    assert!(matches!(error, SinkError::Fenced { .. }));
    assert_eq!((rig.count("t").await, rig.count("oncegate_marks").await), (0, 0));
}

#[tokio::test]
async fn p4_a_batch_moves_each_shard_by_one_or_none_of_them() {
    let mut rig = rig().await;
    let shards: Vec<ShardId> = vec!["kafka/c/t/0".into(), "kafka/c/t/1".into()];
    let states = rig.session.acquire(&shards, Acquire::Force).await.unwrap();
    let step = |at: usize, sequence| ShardStep {
        shard: shards[at].clone(),
        epoch: states[at].epoch,
        sequence,
        position: Some(10 * sequence),
        watermark_ms: 5,
    };
    deliver_steps(&mut rig, &[step(0, 1), step(1, 1)], &[r#"{"id":1}"#]).await.unwrap();
    let records = many(400);
    let records: Vec<&str> = records[2..].iter().map(String::as_str).collect();
    deliver_steps(&mut rig, &[step(0, 2), step(1, 2)], &records).await.unwrap();
    for records in [&[r#"{"id":1000}"#][..], &records] {
        let error = deliver_steps(&mut rig, &[step(0, 3), step(1, 2)], records).await.unwrap_err();
        assert!(matches!(&error, SinkError::Unknown { reason } if reason.contains("kafka/c/t/1")), "{error}");
        assert!(!rig.session.connected(), "an answer in doubt gives the connection up");
        rig.session.acquire(&[SHARD.into()], Acquire::Force).await.unwrap();
    }
    let error = deliver_steps(&mut rig, &[step(0, 3), step(1, 9)], &[r#"{"id":1000}"#]).await.unwrap_err();
    assert!(
        matches!(&error, SinkError::NotApplied { reason, .. } if reason.contains("went back")),
        "{error}"
    );
    assert!(!rig.session.connected(), "verdicts wait until the sequences are compared (P6)");
    let states = rig.session.acquire(&shards, Acquire::Force).await.unwrap();
    assert_eq!((states[0].sequence, states[0].position, states[1].sequence), (2, Some(20), 2));
    assert_eq!(rig.count("t").await, 399);
}

#[tokio::test]
async fn a_live_owner_is_named_and_a_dead_one_gives_way() {
    let rig = rig().await;
    let mut second = other(&rig, "second");
    let if_free = |stale_after_ms| Acquire::IfFree { stale_after_ms };
    let error = second.acquire(&["http/1".into(), SHARD.into()], if_free(60_000)).await.unwrap_err();
    let SinkError::Held { shard, owner, seen_ms } = error else { panic!("{error}") };
    assert_eq!((shard.as_str(), owner.as_str()), (SHARD, "test/1"));
    assert!((0..60_000).contains(&seen_ms));
    assert_eq!(rig.count("oncegate_shards").await, 1, "nothing was taken");
    let mut first = other(&rig, "test/1");
    let own = first.acquire(&[SHARD.into()], if_free(60_000)).await.unwrap()[0].epoch;
    assert!(own > rig.epoch, "our own");
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(second.acquire(&[SHARD.into()], if_free(10)).await.unwrap()[0].epoch > own);
}

/// A stand-by that only asked waited for the row that a living owner's batch had locked, and after a second ended its connection: no
/// batch that took longer ever went in.
#[tokio::test]
async fn p5_a_standby_that_asks_leaves_a_living_owners_slow_batch_alone() {
    let mut rig = rig().await;
    let client = Postgres::shared().connect(&rig.database).await.unwrap();
    client
        .batch_execute(
            "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(3); RETURN NULL; END';
             CREATE TRIGGER slow AFTER INSERT ON t FOR EACH STATEMENT EXECUTE FUNCTION slow()",
        )
        .await
        .unwrap();
    let mut standby = other(&rig, "standby");
    let asks = async {
        for _ in 0..4 {
            tokio::time::sleep(Duration::from_millis(300)).await;
            let how = Acquire::IfFree { stale_after_ms: 60_000 };
            let error = standby.acquire(&[SHARD.into()], how).await.unwrap_err();
            assert!(matches!(error, SinkError::Held { .. }), "{error}");
        }
    };
    let began = Instant::now();
    let (delivered, ()) = tokio::join!(rig.try_deliver(&[r#"{"id":1}"#]), asks);
    delivered.expect("the batch goes in at its first attempt");
    assert!(began.elapsed() > Duration::from_secs(3), "{:?}", began.elapsed());
}

#[tokio::test]
async fn p5_a_frozen_owner_that_holds_the_shard_is_ended() {
    let mut rig = rig().await;
    let frozen = Postgres::shared().connect(&rig.database).await.unwrap();
    frozen.batch_execute("SET application_name = 'oncegate/orders/frozen'; BEGIN; UPDATE oncegate_shards SET heartbeat = now()").await.unwrap();
    let start = Instant::now();
    assert_eq!(rig.acquire().await, 0);
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    assert!(frozen.batch_execute("COMMIT").await.is_err(), "it was ended");

    let stranger = Postgres::shared().connect(&rig.database).await.unwrap();
    stranger
        .batch_execute(
            "SET application_name = 'oncegate/other/1'; BEGIN; UPDATE oncegate_shards SET heartbeat = now()",
        )
        .await
        .unwrap();
    let error = rig.session.acquire(&[SHARD.into()], Acquire::Force).await.unwrap_err();
    assert!(matches!(error, SinkError::NotApplied { retry: true, .. }), "{error}");
    stranger.batch_execute("COMMIT").await.expect("another route's connection is left alone");
    rig.acquire().await;
}

#[tokio::test]
async fn p5_an_owner_frozen_inside_copy_is_ended_and_wrote_nothing() {
    let mut rig = rig().await;
    let proxy = Proxy::start(Postgres::shared().port()).await;
    let mut config = rig.config.clone();
    config.url = Postgres::shared().url_through(proxy.port(), &rig.database);
    let sink = PostgresSink::new(config).unwrap();
    sink.probe().await.unwrap();
    rig.session = sink.session("orders", "test/1");
    rig.acquire().await;
    rig.options.known_new = true;
    let caught = proxy.trap(Point::InsideCopy, Action::Hold);
    let mut second = other(&rig, "second");
    let records = many(10_000);
    let take_over = async {
        caught.await.unwrap();
        second.acquire(&[SHARD.into()], Acquire::Force).await.unwrap()
    };
    let records: Vec<&str> = records.iter().map(String::as_str).collect();
    let first = async {
        let result = rig.try_deliver(&records).await;
        (result, rig)
    };
    let released = async {
        let states = take_over.await;
        proxy.release();
        states
    };
    let ((result, rig), states) = tokio::join!(first, released);
    assert!(states[0].epoch > rig.epoch);
    assert_eq!(states[0].sequence, 0);
    assert!(matches!(result, Err(SinkError::NotApplied { .. })), "{result:?}");
    assert_eq!(rig.count("t").await, 0);
}

/// Rows of the one-statement form, of a straight COPY and of the staged path.
const SIZES: [usize; 2] = [2, 700];

#[tokio::test]
async fn p5_a_commit_whose_reply_was_lost_is_resolved_as_applied() {
    for count in SIZES {
        let mut rig = rig().await;
        let proxy = Proxy::start(Postgres::shared().port()).await;
        let mut config = rig.config.clone();
        config.url = Postgres::shared().url_through(proxy.port(), &rig.database);
        rig.sink = PostgresSink::new(config).unwrap();
        rig.sink.probe().await.unwrap();
        rig.session = rig.sink.session("orders", "test/1");
        rig.acquire().await;
        rig.options.known_new = true;
        let step = rig.step();
        let caught = proxy.trap(Point::CommitDone, Action::Cut);
        let records = many(count);
        let records: Vec<&str> = records.iter().map(String::as_str).collect();
        let error = rig.try_deliver(&records).await.unwrap_err();
        caught.await.unwrap();
        assert!(matches!(error, SinkError::Unknown { .. }), "{count}: {error}");
        assert!(!rig.session.connected());
        let (resolution, states) = rig.session.resolve(std::slice::from_ref(&step)).await.unwrap();
        let Resolution::Applied(marks) = resolution else { panic!("{count}: not applied") };
        assert_eq!((marks.len(), marks[0].0, marks[0].1.sequence), (1, 0, 1));
        assert_eq!(&marks[0].1.block[..], "W".repeat(count).as_bytes());
        assert!(states[0].epoch > step.epoch);
        assert_eq!(states[0].sequence, 1);
        assert!(rig.session.connected());
        assert_eq!(rig.count("t").await, count as i64);
    }
}

#[tokio::test]
async fn p5_a_commit_that_never_arrived_is_resolved_as_not_applied_and_cannot_come_later() {
    for count in SIZES {
        let mut rig = rig().await;
        let proxy = Proxy::start(Postgres::shared().port()).await;
        let direct = rig.sink.session("orders", "test/1");
        let mut config = rig.config.clone();
        config.url = Postgres::shared().url_through(proxy.port(), &rig.database);
        config.statement_timeout = Duration::from_millis(100);
        let sink = PostgresSink::new(config).unwrap();
        sink.probe().await.unwrap();
        rig.session = sink.session("orders", "test/1");
        rig.acquire().await;
        rig.options.known_new = true;
        let step = rig.step();
        let caught = proxy.trap(Point::CommitArriving, Action::Cut);
        let records = many(count);
        let records: Vec<&str> = records.iter().map(String::as_str).collect();
        let error = rig.try_deliver(&records).await.unwrap_err();
        caught.await.unwrap();
        assert!(matches!(error, SinkError::Unknown { .. }), "{count}: {error}");
        rig.session = direct;
        let (resolution, states) = rig.session.resolve(std::slice::from_ref(&step)).await.unwrap();
        assert_eq!(resolution, Resolution::NotApplied);
        (rig.epoch, rig.sequence) = (states[0].epoch, states[0].sequence);
        assert_eq!(rig.sequence, 0);
        assert_eq!(
            rig.try_deliver(&records).await.unwrap().len(),
            count,
            "it goes again under the new epoch"
        );
        assert_eq!(rig.count("t").await, count as i64);
    }
}

#[tokio::test]
async fn p5_who_asks_after_a_take_over_is_fenced_and_ends_nobody() {
    let mut rig = rig().await;
    let ours = rig.step();
    let mut second = other(&rig, "second");
    let theirs = second.acquire(&[SHARD.into()], Acquire::Force).await.unwrap().remove(0).epoch;
    assert!(theirs > ours.epoch);
    // The new owner holds the shard row, as inside a long COPY.
    let busy = Postgres::shared().connect(&rig.database).await.unwrap();
    busy.batch_execute("SET application_name = 'oncegate/orders/second'; BEGIN; UPDATE oncegate_shards SET heartbeat = now()")
        .await
        .unwrap();
    let error = rig.session.resolve(std::slice::from_ref(&ours)).await.unwrap_err();
    assert!(matches!(&error, SinkError::Fenced { owner, .. } if owner == "second"), "{error}");
    busy.batch_execute("COMMIT").await.expect("it was left alone");
    let mine = rig.session.heartbeat(&[(SHARD.into(), ours.epoch)]).await;
    assert!(matches!(mine, Err(SinkError::Fenced { .. } | SinkError::NotApplied { .. })), "{mine:?}");
    second.heartbeat(&[(SHARD.into(), theirs)]).await.expect("the new owner stays");
}

#[tokio::test]
async fn p5_a_look_that_fails_leaves_the_batch_unknown() {
    let mut rig = rig().await;
    let step = rig.step();
    let mut config = rig.config.clone();
    config.url = format!("postgres://postgres@127.0.0.1:{}/x", oncegate_tests::free_port());
    rig.session = PostgresSink::new(config).unwrap().session("orders", "test/1");
    let error = rig.session.resolve(std::slice::from_ref(&step)).await.unwrap_err();
    assert!(matches!(error, SinkError::Unknown { .. }), "{error}");
}

/// A server of its own with a certificate that only it vouches for.
#[tokio::test]
async fn tls_is_verified_where_it_is_required() {
    let server = Postgres::start();
    let client = server.database("secret", TABLE).await;
    let folder: String = client.query_one("SHOW data_directory", &[]).await.unwrap().get(0);
    let make = format!(
        "COPY (SELECT 1) TO PROGRAM 'cat > /dev/null; cd {folder} && openssl req -x509 -newkey rsa:2048 -nodes -days 2 \
         -keyout server.key -out server.crt -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1 \
         -addext basicConstraints=critical,CA:FALSE 2> /dev/null'"
    );
    client.batch_execute(&make).await.unwrap();
    client.batch_execute("ALTER SYSTEM SET ssl = on").await.unwrap();
    client.batch_execute("SELECT pg_reload_conf()").await.unwrap();
    let pem: String = client.query_one("SELECT pg_read_file('server.crt')", &[]).await.unwrap().get(0);
    let roots = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(roots.path(), pem).unwrap();
    oncegate_tests::eventually("TLS is on", Duration::from_secs(5), async || {
        let client = server.connect("secret").await.map_err(|error| error.to_string())?;
        let on: String = client.query_one("SHOW ssl", &[]).await.unwrap().get(0);
        (on == "on").then_some(()).ok_or(on)
    })
    .await;

    let sink = |options: &str, host: &str| {
        let url = server.url("secret").replace("127.0.0.1", host);
        PostgresSink::new(adapters::postgres::PostgresConfig::new(format!("{url}?{options}"), "t")).unwrap()
    };
    let root = format!("sslmode=verify-full&sslrootcert={}", roots.path().display());
    let query = "SELECT ssl FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE application_name = $1";
    let cases = [("sslmode=disable", false), ("sslmode=prefer", true), ("", true), (&root, true)];
    for (index, (options, encrypted)) in cases.into_iter().enumerate() {
        let sink = sink(options, "127.0.0.1");
        sink.probe().await.unwrap_or_else(|misfits| panic!("{options}: {misfits:?}"));
        let mut session = sink.session("tls", &index.to_string());
        session.acquire(&[SHARD.into()], Acquire::Force).await.unwrap();
        let ssl: bool = client.query_one(query, &[&format!("oncegate/tls/{index}")]).await.unwrap().get(0);
        assert_eq!(ssl, encrypted, "{options}");
    }
    for (options, host) in [("sslmode=require", "127.0.0.1"), (root.as_str(), "localhost")] {
        let misfits = sink(options, host).probe().await.unwrap_err();
        assert!(misfits[0].what.contains("cannot connect"), "{misfits:?}");
    }
}

#[tokio::test]
async fn p6_the_session_knows_at_once_that_its_connection_has_ended() {
    let mut rig = rig().await;
    assert!(rig.session.connected());
    let life = rig.session.life();
    assert!(life.stands());
    Postgres::shared().terminate_backends(&rig.database).await;
    // Nobody asks the session: a door has only this.
    let deadline = Instant::now() + Duration::from_secs(5);
    while life.stands() {
        assert!(Instant::now() < deadline);
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    while rig.session.connected() {
        assert!(Instant::now() < deadline);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(!rig.session.life().stands());
    let error = rig.try_deliver(&[r#"{"id":1}"#]).await.unwrap_err();
    assert!(matches!(error, SinkError::NotApplied { retry: true, .. }), "{error}");
    assert!(rig.session.marks_since(&SHARD.into(), 0).await.is_err(), "nothing but acquire reconnects");
    rig.session.shards("").await.unwrap();
    assert!(!rig.session.connected(), "shards were not compared on the new connection");
    rig.acquire().await;
    assert_eq!(rig.deliver(&[r#"{"id":1}"#]).await, "W");
    assert!(rig.session.life().stands() && !life.stands(), "a new connection, a new life");
}

#[tokio::test]
async fn marks_come_in_pages_and_expire_with_their_floor() {
    let mut rig = rig().await;
    let insert = "INSERT INTO oncegate_marks SELECT 'orders', 'http/0', n, 1, n * 10, n * 10 + 9, 1, decode(repeat('ab', $1::int), 'hex') \
                  FROM generate_series(1, $2::bigint) AS n";
    rig.client.execute(insert, &[&1_000_000i32, &40i64]).await.unwrap();
    let mut since = 0;
    let mut pages = Vec::new();
    loop {
        let page = rig.session.marks_since(&SHARD.into(), since).await.unwrap();
        let Some(last) = page.last() else { break };
        assert!(page.iter().map(|mark| mark.block.len()).sum::<usize>() <= 16 << 20);
        assert!(page.iter().zip(since + 1..).all(|(mark, sequence)| mark.sequence == sequence));
        since = last.sequence;
        pages.push(page.len());
    }
    assert_eq!(pages, [16, 16, 8]);

    rig.client.execute("DELETE FROM oncegate_marks", &[]).await.unwrap();
    rig.client.execute(insert, &[&10i32, &1200i64]).await.unwrap();
    let owned = [(ShardId::from(SHARD), rig.epoch)];
    let mut gone = Vec::new();
    for _ in 0..4 {
        gone.push(rig.session.expire_marks(&owned, 11_000).await.unwrap());
    }
    assert_eq!(
        gone,
        [500, 500, 99, 0],
        "the newest key of mark 1099 is below the floor, that of 1100 is not"
    );
    let states = rig.session.acquire(&[SHARD.into()], Acquire::Force).await.unwrap();
    assert_eq!(states[0].floor_ms, 11_000);
    let owned = [(ShardId::from(SHARD), states[0].epoch)];
    rig.session.expire_marks(&owned, 500).await.unwrap();
    let states = rig.session.acquire(&[SHARD.into()], Acquire::Force).await.unwrap();
    assert_eq!(states[0].floor_ms, 11_000, "a floor never falls");
}

#[tokio::test]
async fn tombstones_expire_with_the_marks() {
    let mut rig = Rig::new("CREATE TABLE t (id int PRIMARY KEY, v int)", |config| {
        config.row_key = vec!["id".into()];
        config.mode = adapters::sink::Mode::UpsertIfNewer;
        config.version = Some("v".into());
    })
    .await;
    rig.deliver(&[r#"-{"id":1,"v":1}"#, r#"-{"id":2,"v":1}"#]).await;
    let owned = [(ShardId::from(SHARD), rig.epoch)];
    rig.session.expire_marks(&owned, 701).await.unwrap();
    assert_eq!(rig.count("oncegate_tombstones").await, 1, "events were at 700 and 701");
}

#[tokio::test]
async fn p1_the_first_writer_of_a_route_wins() {
    let rig = rig().await;
    let route = |byte: u8| RouteRow {
        route_id: vec![byte; 16],
        key_spec_id: -5,
        algorithm: 1,
        secret: vec![byte; 192],
    };
    let (mut first, mut second) = (rig.sink.session("new", "a"), rig.sink.session("new", "b"));
    assert_eq!(first.register_route(&route(1)).await.unwrap(), route(1));
    assert_eq!(second.register_route(&route(2)).await.unwrap(), route(1));
    assert!(!first.connected());
}
