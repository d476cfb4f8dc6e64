use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Method};
use proptest::prelude::*;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
};

use super::{
    book::{pack, unpack},
    *,
};

fn config(folder: &std::path::Path) -> BookConfig {
    BookConfig { folder: folder.join("b"), max_bytes: 1 << 20, route: "r".into(), key_spec_id: 7 }
}

fn secret(byte: u8) -> NameSecret {
    NameSecret { route_id: [byte; 16], secret: [byte; 192] }
}

fn key(name: u8, now_ms: i64) -> Begin {
    Begin { name: [name; 16], digest: u64::MAX, now_ms, until_ms: now_ms + 100, sent_key: "\"k\"".into() }
}

fn kept(body: Option<&'static [u8]>) -> std::sync::Arc<Kept> {
    let head = vec![("location".to_owned(), "/a".into()), ("x".to_owned(), Bytes::from_static(b"\xff"))];
    Kept { digest: u64::MAX, until_ms: 100, status: 201, head, body: body.map(Bytes::from_static) }.into()
}

#[tokio::test]
async fn what_was_begun_and_answered_is_known_after_the_book_is_opened_again() {
    let folder = tempfile::tempdir().unwrap();
    let book = Book::open(&config(folder.path()), secret(1)).unwrap();
    assert_eq!(book.begin(key(1, 0)).await, Ok(Found::New));
    assert_eq!(book.begin(key(2, 0)).await, Ok(Found::New));
    assert_eq!(book.begin(key(3, 0)).await, Ok(Found::New));
    book.settle(key(2, 0), kept(Some(b"\0body"))).await.unwrap();
    book.settle(key(3, 0), kept(None)).await.unwrap();
    drop(book);
    let book = Book::open(&config(folder.path()), secret(2)).unwrap();
    assert_eq!(book.secret().secret, [1; 192], "the first secret stays");
    let begun = Found::Begun { digest: u64::MAX, sent_key: "\"k\"".into() };
    assert_eq!(book.begin(key(1, 50)).await, Ok(begun));
    assert_eq!(book.begin(key(2, 50)).await, Ok(Found::Answered(kept(Some(b"\0body")))));
    assert_eq!(book.begin(key(3, 50)).await, Ok(Found::Answered(kept(None))));
    book.free([1; 16]).await.unwrap();
    assert_eq!(book.begin(key(1, 50)).await, Ok(Found::New));
    // The window is over.
    assert_eq!(book.begin(key(2, 100)).await, Ok(Found::New));
}

#[tokio::test]
async fn a_full_book_begins_nothing_until_keys_expire() {
    let folder = tempfile::tempdir().unwrap();
    let book = Book::open(&BookConfig { max_bytes: 600, ..config(folder.path()) }, secret(1)).unwrap();
    assert_eq!(book.begin(key(1, 0)).await, Ok(Found::New));
    assert_eq!(book.begin(key(2, 0)).await, Ok(Found::New));
    assert_eq!(book.begin(key(3, 0)).await, Ok(Found::Full));
    // What is known is still said, and an answer is still kept.
    book.settle(key(1, 0), kept(Some(b"body"))).await.unwrap();
    assert_eq!(book.begin(key(1, 0)).await, Ok(Found::Answered(kept(Some(b"body")))));
    assert_eq!(book.begin(key(3, 99)).await, Ok(Found::Full));
    assert_eq!(book.begin(key(3, 100)).await, Ok(Found::New));
}

#[tokio::test]
async fn a_book_is_of_one_route_and_one_key() {
    let folder = tempfile::tempdir().unwrap();
    drop(Book::open(&config(folder.path()), secret(1)).unwrap());
    for other in [
        BookConfig { route: "q".into(), ..config(folder.path()) },
        BookConfig { key_spec_id: 8, ..config(folder.path()) },
    ] {
        let misfit = Book::open(&other, secret(1)).err().unwrap();
        assert!(misfit.what.contains("was made for route \"r\""), "{}", misfit.what);
    }
}

proptest! {
    #[test]
    fn heads_come_back_as_they_were(head in prop::collection::vec(("[a-z-]{0,9}", prop::collection::vec(any::<u8>(), 0..9)), 0..6), cut in 1..4usize) {
        let head: Vec<(String, Bytes)> = head.into_iter().map(|(name, value)| (name, value.into())).collect();
        let packed = pack(&head);
        prop_assert_eq!(unpack(packed.clone()), Some(head.clone()));
        if !head.is_empty() {
            prop_assert_eq!(unpack(packed[..packed.len() - cut].to_vec()), None);
        }
    }
}

/// Answers one connection after the other with these bytes; nothing: the connection is closed after the request came.
async fn service(answers: Vec<&'static str>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/base/", listener.local_addr().unwrap());
    tokio::spawn(async move {
        for answer in answers {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = vec![0; 4096];
            let length = stream.read(&mut request).await.unwrap();
            let text = String::from_utf8_lossy(&request[..length]).into_owned();
            assert!(text.starts_with("POST /base/x?y=1 HTTP/1.1\r\n"), "{text}");
            stream.write_all(answer.as_bytes()).await.unwrap();
            if answer.ends_with("wait") {
                tokio::time::sleep(Duration::from_secs(5)).await;
            }
        }
    });
    url
}

fn upstream(url: String) -> Upstream {
    let timeout = Duration::from_millis(200);
    Upstream::new(UpstreamConfig {
        url,
        connect_timeout: timeout,
        timeout,
        keep_alive: timeout,
        max_answer: 10,
    })
    .unwrap()
}

async fn sent(upstream: &Upstream) -> String {
    match upstream.send(Method::POST, "/x?y=1", HeaderMap::new(), "{}".into()).await {
        Sent::Answer(answer) => format!("{} {:?}", answer.status.as_u16(), answer.body),
        Sent::NotSent(_) => "not sent".to_owned(),
        Sent::Unknown { late, .. } => format!("unknown, late: {late}"),
    }
}

#[tokio::test]
async fn only_what_surely_did_not_leave_is_not_sent() {
    let url = service(vec![
        "HTTP/1.1 201 x\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok",
        "HTTP/1.1 200 x\r\ncontent-length: 11\r\nconnection: close\r\n\r\n01234567890",
        "",
        "HTTP/1.1 200 x\r\ncontent-length: 5\r\n\r\nbro",
        "HTTP/1.1 200 x\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n",
        "HTTP/1.1 200 x\r\ncontent-length: 5\r\n\r\nwait",
    ])
    .await;
    let upstream = upstream(url);
    assert_eq!(sent(&upstream).await, "201 Some(b\"ok\")");
    assert_eq!(sent(&upstream).await, "200 None", "a large body is not taken");
    assert_eq!(sent(&upstream).await, "unknown, late: false", "closed without an answer");
    assert_eq!(sent(&upstream).await, "unknown, late: false", "a body shorter than it said");
    assert_eq!(sent(&upstream).await, "unknown, late: false", "no last chunk");
    assert_eq!(sent(&upstream).await, "unknown, late: true");
}

#[tokio::test]
async fn a_refused_connection_sent_nothing() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    assert_eq!(sent(&upstream(url)).await, "not sent");
}

#[test]
fn users_in_the_url_are_refused_and_not_shown() {
    let timeout = Duration::from_secs(1);
    let config = |url: &str| UpstreamConfig {
        url: url.into(),
        connect_timeout: timeout,
        timeout,
        keep_alive: timeout,
        max_answer: 1,
    };
    let fault = Upstream::new(config("http://me:hunter2@host/")).err().unwrap();
    assert!(fault.contains("user or password") && !fault.contains("hunter2"), "{fault}");
    assert!(Upstream::new(config("ftp://host")).is_err());
}
