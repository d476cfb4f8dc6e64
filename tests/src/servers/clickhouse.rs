//! The real ClickHouse engine (chdb) behind a thin HTTP front of ours, or a real server whose address the environment gives.

use std::{
    path::{Path, PathBuf},
    sync::{
        Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt, Full};
use hyper_util::rt::TokioIo;
use tempfile::TempDir;
use tokio::net::TcpStream;

use crate::{
    child::{Child, Spec},
    free_port,
};

const ENGINE: &str = "chdb-26.5.0";
/// `http://user:password@host:port` of a ClickHouse server that the tests may make databases in.
const GIVEN: &str = "ONCEGATE_TEST_CLICKHOUSE";

/// A ClickHouse that tests may write to.
#[derive(Debug)]
pub struct Clickhouse {
    // Before `folder`: a field is dropped in the order of declaration.
    engine: Mutex<Option<Child>>,
    folder: TempDir,
    url: String,
    port: u16,
}

impl Clickhouse {
    /// The engine on a free port, unless the environment gives a server. Panics if it is missing: a live test never passes unseen.
    pub fn start() -> Self {
        let folder =
            tempfile::Builder::new().prefix("oncegate-clickhouse-").tempdir().expect("a temporary folder");
        if let Ok(url) = std::env::var(GIVEN) {
            let address: http::Uri = url.parse().expect("the address of a ClickHouse server");
            let port = address.port_u16().unwrap_or(8123);
            return Self { engine: Mutex::default(), folder, url, port };
        }
        let port = free_port();
        let clickhouse =
            Self { engine: Mutex::default(), folder, url: format!("http://127.0.0.1:{port}"), port };
        clickhouse.run();
        clickhouse
    }

    /// The one of this test binary. A test that ends it uses its own.
    pub fn shared() -> &'static Self {
        static SHARED: OnceLock<Clickhouse> = OnceLock::new();
        SHARED.get_or_init(Self::start)
    }

    fn engine(&self) -> MutexGuard<'_, Option<Child>> {
        self.engine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// It is the tests' own, and can be killed.
    pub fn is_ours(&self) -> bool {
        std::env::var(GIVEN).is_err()
    }

    /// Starts it where it was, and waits until it answers. Nothing happens if it runs.
    pub fn run(&self) {
        if !self.is_ours() || self.engine().is_some() {
            return;
        }
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/test-servers");
        let cache = std::env::var_os("ONCEGATE_TEST_CACHE").map_or(root, PathBuf::from);
        let python = cache.join(ENGINE).join("bin/python");
        assert!(
            python.exists(),
            "no ClickHouse engine in {}: run ./test.sh once, it fetches what the live tests need",
            cache.display()
        );
        let front = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/servers/clickhouse_front.py");
        let folder = self.folder.path();
        let port = self.port.to_string();
        let command = [&*python, &*front, Path::new(&port), folder];
        let child = Child::start(&Spec {
            command: command.iter().map(|word| word.display().to_string()).collect(),
            environment: vec![],
            log: &folder.join("log"),
            user: None,
            end: "KILL",
            folder: Some(folder),
        });
        let mut engine = self.engine();
        let child = engine.insert(child);
        let deadline = Instant::now() + Duration::from_secs(60);
        while std::net::TcpStream::connect(("127.0.0.1", self.port)).is_err() {
            let ended = child.exited();
            assert!(
                ended.is_none() && Instant::now() < deadline,
                "no engine ({ended:?}): {}",
                child.log_tail(20)
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// `kill -9`, if it is ours.
    pub fn kill(&self) {
        if let Some(mut engine) = self.engine().take() {
            engine.stop("KILL");
        }
    }

    /// As the gateway's config takes it.
    pub fn url(&self) -> String {
        self.url.clone()
    }

    /// The same through a proxy on `port`.
    pub fn url_through(&self, port: u16) -> String {
        let user =
            self.url.split_once("//").and_then(|(_, rest)| rest.rsplit_once('@')).map(|(user, _)| user);
        format!("http://{}127.0.0.1:{port}", user.map(|user| format!("{user}@")).unwrap_or_default())
    }

    /// Its port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// A table of its own, as `database.name`: `rest` is what stands behind its name in CREATE TABLE.
    pub async fn table(&self, name: &str, rest: &str) -> String {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        self.query("CREATE DATABASE IF NOT EXISTS oncegate_tests").await.expect("a database can be made");
        let table = format!("oncegate_tests.{name}_{}_{number}", std::process::id());
        self.query(&format!("CREATE TABLE {table} {rest}")).await.expect("the DDL of the test is right");
        table
    }

    /// Runs one statement: the answer as text, or the error's.
    pub async fn query(&self, sql: &str) -> Result<String, String> {
        self.ask(sql).await.map_err(|fault| fault.to_string())
    }

    async fn ask(&self, sql: &str) -> Result<String, Box<dyn std::error::Error + Send + Sync>> {
        let uri: http::Uri = self.url.parse()?;
        let authority = uri.authority().ok_or("no host")?;
        let stream = TcpStream::connect((authority.host(), self.port)).await?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        tokio::spawn(connection);
        let mut request = Request::post("/").header("host", authority.host());
        if let Some((user, password)) =
            authority.as_str().rsplit_once('@').and_then(|(user, _)| user.split_once(':'))
        {
            request = request.header("X-ClickHouse-User", user).header("X-ClickHouse-Key", password);
        }
        let answer = sender.send_request(request.body(Full::new(Bytes::from(sql.to_owned())))?).await?;
        let status = answer.status();
        let text = String::from_utf8(answer.into_body().collect().await?.to_bytes().to_vec())?;
        if status.is_success() { Ok(text) } else { Err(text.into()) }
    }

    /// One number.
    pub async fn number(&self, sql: &str) -> i64 {
        let text = self.query(sql).await.expect("the SQL of the test is right");
        text.trim().parse().unwrap_or_else(|_| panic!("{sql}: {text:?} is no number"))
    }

    /// The lines of an answer.
    pub async fn lines(&self, sql: &str) -> Vec<String> {
        let text = self.query(sql).await.expect("the SQL of the test is right");
        text.lines().map(str::to_owned).collect()
    }
}
