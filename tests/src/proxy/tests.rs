use super::{wire::*, *};
use crate::servers::Postgres;
use tokio_postgres::{Client, NoTls};

fn message(kind: u8, body: &[u8]) -> Vec<u8> {
    let mut bytes = vec![kind];
    bytes.extend(u32::try_from(body.len() + 4).unwrap().to_be_bytes());
    bytes.extend(body);
    bytes
}

fn all_seen(frontend: &mut Frontend, in_transaction: bool) -> Vec<Seen> {
    std::iter::from_fn(|| frontend.next(|| in_transaction)).map(|(_, seen)| seen).collect()
}

#[test]
fn commits_are_seen_in_every_form() {
    let mut frontend = Frontend::default();
    let mut start = vec![0, 0, 0, 8];
    start.extend(80_877_103_u32.to_be_bytes());
    start.extend([0, 0, 0, 9, 0, 3, 0, 0, 0]);
    frontend.extend(&start);
    assert_eq!(all_seen(&mut frontend, false), [Seen::Ssl, Seen::Other]);

    let query = |text: &str| message(b'Q', format!("{text}\0").as_bytes());
    let extended = |text: &str| {
        let parse = message(b'P', format!("s1\0{text}\0\0\0").as_bytes());
        [parse, message(b'B', b"\0s1\0\0\0\0\0\0\0"), message(b'E', b"\0\0\0\0\0"), message(b'S', b"")]
            .concat()
    };
    let marks = "INSERT INTO \"oncegate_marks\" VALUES (1)";
    use Seen::{Commit, CopyData, Other};
    // Text sent, whether a transaction block is open, what is seen.
    let cases = [
        (query("BEGIN"), false, vec![Other]),
        (message(b'd', b"rows"), true, vec![CopyData]),
        (extended(marks), true, vec![Other; 4]),
        (query("COMMIT"), true, vec![Commit]),
        // Not of a batch: an owner that acquires commits too.
        (query("COMMIT"), true, vec![Other]),
        (query(marks), true, vec![Other]),
        (query("rollback;"), true, vec![Other]),
        (query("COMMIT"), true, vec![Other]),
        (query(marks), false, vec![Commit]),
        (query(&format!("BEGIN; {marks}; commit;")), false, vec![Commit]),
        (
            extended(&format!("WITH fence AS (UPDATE x), m AS ({marks}) SELECT 1")),
            false,
            vec![Other, Other, Other, Commit],
        ),
    ];
    for (bytes, in_transaction, expected) in cases {
        let (early, late) = bytes.split_at(3);
        frontend.extend(early);
        assert_eq!(all_seen(&mut frontend, in_transaction), []);
        frontend.extend(late);
        assert_eq!(all_seen(&mut frontend, in_transaction), expected, "{}", String::from_utf8_lossy(&bytes));
    }
}

#[test]
fn the_end_of_a_transaction_is_seen_in_any_pieces() {
    let mut bytes = b"N".to_vec();
    bytes.extend(message(b'D', &[b'Z'; 100]));
    bytes.extend(message(b'Z', b"T"));
    bytes.extend(message(b'C', b"COMMIT\0"));
    bytes.extend(message(b'Z', b"I"));
    for size in 1..bytes.len() {
        let mut backend = Backend::default();
        backend.expect_single_byte();
        let idle: Vec<bool> = bytes.chunks(size).map(|chunk| backend.observe(chunk)).collect();
        assert_eq!(idle.iter().filter(|idle| **idle).count(), 1, "pieces of {size}");
        assert!(!backend.in_transaction());
    }
}

async fn connect(port: u16, database: &str) -> Client {
    let url = Postgres::shared().url_through(port, database);
    let (client, connection) = tokio_postgres::connect(&url, NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

async fn rows(client: &Client) -> i64 {
    client.query_one("SELECT count(*) FROM t", &[]).await.unwrap().get(0)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_is_cut_before_and_after_it_reaches_the_server() {
    let postgres = Postgres::shared();
    let direct = postgres
        .database("cut_commit", "CREATE TABLE oncegate_marks (n int); CREATE VIEW t AS TABLE oncegate_marks")
        .await;
    let proxy = Proxy::start(postgres.port()).await;
    for (point, expected) in [(Point::CommitArriving, 0), (Point::CommitDone, 1), (Point::CommitDone, 2)] {
        let mut client = connect(proxy.port(), "cut_commit").await;
        let sprung = proxy.trap(point, Action::Cut);
        let transaction = client.transaction().await.unwrap();
        transaction.execute("INSERT INTO oncegate_marks VALUES (1)", &[]).await.unwrap();
        transaction.commit().await.expect_err("the reply must not come back");
        sprung.await.unwrap();
        assert_eq!(rows(&direct).await, expected, "{point:?}");
    }
    assert_eq!((proxy.commits(), proxy.connections()), (3, 3));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_is_held_and_let_go() {
    let postgres = Postgres::shared();
    let direct = postgres
        .database("hold_commit", "CREATE TABLE oncegate_marks (n int); CREATE VIEW t AS TABLE oncegate_marks")
        .await;
    let proxy = Proxy::start(postgres.port()).await;
    for (point, meanwhile) in [(Point::CommitArriving, 0), (Point::CommitDone, 2)] {
        let mut client = connect(proxy.port(), "hold_commit").await;
        let sprung = proxy.trap(point, Action::Hold);
        let commit = tokio::spawn(async move {
            let transaction = client.transaction().await.unwrap();
            transaction.execute("INSERT INTO oncegate_marks VALUES (1)", &[]).await.unwrap();
            transaction.commit().await
        });
        sprung.await.unwrap();
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert!(!commit.is_finished());
        assert_eq!(rows(&direct).await, meanwhile, "{point:?}");
        proxy.release();
        commit.await.unwrap().unwrap();
    }
    assert_eq!(rows(&direct).await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_is_held_in_the_middle_and_ended_from_outside() {
    use bytes::Bytes;
    let postgres = Postgres::shared();
    let direct = postgres.database("hold_copy", "CREATE TABLE t (n int)").await;
    let proxy = Proxy::start(postgres.port()).await;
    let client = connect(proxy.port(), "hold_copy").await;
    let sprung = proxy.trap(Point::InsideCopy, Action::Hold);
    let copy = tokio::spawn(async move {
        let sink = client.copy_in::<_, Bytes>("COPY t FROM STDIN").await.unwrap();
        let mut sink = std::pin::pin!(sink);
        futures_util::SinkExt::send(&mut sink, Bytes::from("1\n2\n3\n")).await.unwrap();
        sink.finish().await
    });
    sprung.await.unwrap();
    let ended = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'COPY t%'";
    assert_eq!(direct.query(ended, &[]).await.unwrap().len(), 1);
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(!copy.is_finished(), "a held connection hears nothing");
    proxy.release();
    copy.await.unwrap().expect_err("its backend was ended");
    assert_eq!(rows(&direct).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn traffic_is_frozen_delayed_refused_and_cut() {
    let postgres = Postgres::shared();
    postgres.database("frozen", "CREATE TABLE t (n int)").await;
    let proxy = Proxy::start(postgres.port()).await;
    let client = connect(proxy.port(), "frozen").await;
    proxy.freeze(true);
    let short = Duration::from_millis(150);
    assert!(tokio::time::timeout(short, rows(&client)).await.is_err());
    proxy.freeze(false);
    assert_eq!(rows(&client).await, 0);
    proxy.delay(Duration::from_millis(100));
    let before = std::time::Instant::now();
    rows(&client).await;
    assert!(before.elapsed() > Duration::from_millis(200));
    proxy.delay(Duration::ZERO);
    proxy.cut_all();
    client.query_one("SELECT 1", &[]).await.expect_err("cut");
    rows(&connect(proxy.port(), "frozen").await).await;
    proxy.refuse(true);
    assert!(tokio_postgres::connect(&postgres.url_through(proxy.port(), "frozen"), NoTls).await.is_err());
    proxy.refuse(false);
    rows(&connect(proxy.port(), "frozen").await).await;
}
