//! StarRocks and Doris: a **stand-in** for both, after their documented Stream Load ([`StandIn`]), or a real cluster whose address the
//! environment gives. Neither's own code runs here.

mod cluster;
mod table;

use std::{
    convert::Infallible,
    io,
    net::SocketAddr,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use adapters::stream_load::Dialect;
use base64::{Engine, engine::general_purpose::STANDARD};
use bytes::Bytes;
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::net::TcpListener;

pub use cluster::{Cluster, Fault, Txn, TxnState};
pub use table::{Model, TableSpec};

const USER: &str = "oncegate";
const PASSWORD: &str = "p@ss:word";
const DATABASE: &str = "oncegate_tests";

/// What tests write to.
#[derive(Debug)]
pub struct StreamLoad {
    dialect: Dialect,
    stand_in: Option<StandIn>,
    given: String,
}

/// One front-end and two back-ends on loopback, with tables in memory, for as long as the process lives.
#[derive(Debug)]
pub struct StandIn {
    front: SocketAddr,
    cluster: Arc<Mutex<Cluster>>,
}

impl StreamLoad {
    /// The stand-in, unless the environment gives `http://user:password@host:8030` in `ONCEGATE_TEST_STARROCKS` or `ONCEGATE_TEST_DORIS`.
    pub fn start(dialect: Dialect) -> Self {
        let name = match dialect {
            Dialect::StarRocks => "ONCEGATE_TEST_STARROCKS",
            Dialect::Doris => "ONCEGATE_TEST_DORIS",
        };
        match std::env::var(name) {
            Ok(given) => Self { dialect, stand_in: None, given },
            Err(_) => Self { dialect, stand_in: Some(StandIn::start(dialect)), given: String::new() },
        }
    }

    /// The one of this test binary for each dialect. A test that scripts faults starts its own.
    pub fn shared(dialect: Dialect) -> &'static Self {
        static STARROCKS: OnceLock<StreamLoad> = OnceLock::new();
        static DORIS: OnceLock<StreamLoad> = OnceLock::new();
        let shared = match dialect {
            Dialect::StarRocks => &STARROCKS,
            Dialect::Doris => &DORIS,
        };
        shared.get_or_init(|| Self::start(dialect))
    }

    /// Whose it is.
    pub fn dialect(&self) -> Dialect {
        self.dialect
    }

    /// As a sink's config takes it.
    pub fn url(&self) -> String {
        match &self.stand_in {
            Some(stand_in) => format!("http://{USER}:p%40ss%3Aword@{}", stand_in.front),
            None => self.given.clone(),
        }
    }

    /// What can be scripted. None if the server is a real one: such a test says that it is left out.
    pub fn stand_in(&self) -> Option<&StandIn> {
        if self.stand_in.is_none() {
            eprintln!("left out: this needs scripted faults, and the server is a real one");
        }
        self.stand_in.as_ref()
    }

    /// A table of its own, as `database.name`.
    pub fn table(&self, spec: &TableSpec) -> String {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("t_{}_{number}", std::process::id());
        match &self.stand_in {
            Some(stand_in) => stand_in.cluster.lock().create(DATABASE, &name, spec.clone()),
            None => {
                self.mysql(&format!("CREATE DATABASE IF NOT EXISTS {DATABASE}"));
                self.mysql(&format!("USE {DATABASE}; {}", spec.ddl(self.dialect, &name)));
            }
        }
        format!("{DATABASE}.{name}")
    }

    /// The rows of these columns, as lines with tabs between them, in order.
    pub fn rows(&self, table: &str, columns: &[&str]) -> Vec<String> {
        let mut rows = match &self.stand_in {
            Some(stand_in) => stand_in.cluster.lock().rows(table, columns),
            None => {
                let names: Vec<String> = columns.iter().map(|name| format!("`{name}`")).collect();
                let text = self.mysql(&format!("SELECT {} FROM {table}", names.join(", ")));
                text.lines().map(|line| line.replace("NULL", "\\N")).collect()
            }
        };
        rows.sort();
        rows
    }

    /// Runs SQL by the `mysql` client, on the query port that `ONCEGATE_TEST_SQL_PORT` names (9030 else).
    fn mysql(&self, sql: &str) -> String {
        let url: http::Uri = self.given.parse().expect("the address of a front-end");
        let authority = url.authority().expect("a host");
        let (user, password) = authority
            .as_str()
            .rsplit_once('@')
            .and_then(|(user, _)| user.split_once(':'))
            .unwrap_or(("root", ""));
        let port = std::env::var("ONCEGATE_TEST_SQL_PORT").unwrap_or_else(|_| "9030".to_owned());
        let output = std::process::Command::new("mysql")
            .args(["-N", "-B", "-h", authority.host(), "-P", &port, "-u", user, "-e", sql])
            .env("MYSQL_PWD", password)
            .output()
            .expect("the mysql client is installed");
        assert!(output.status.success(), "{sql}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("UTF-8")
    }
}

impl StandIn {
    /// On free ports, with a thread of its own: tests have a runtime each.
    pub fn start(dialect: Dialect) -> Self {
        let bind = || std::net::TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
        let listeners = [bind(), bind(), bind()];
        let address = |at: usize| listeners[at].local_addr().expect("an address");
        let (front, backs) = (address(0), [address(1), address(2)]);
        let cluster = Arc::new(Mutex::new(Cluster::new(dialect, front, backs)));
        let served = cluster.clone();
        std::thread::spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(async move {
                let nodes = listeners.into_iter().enumerate().map(|(node, listener)| {
                    listener.set_nonblocking(true).expect("a listener takes the option");
                    serve(node, TcpListener::from_std(listener).expect("a listener"), served.clone())
                });
                futures_util::future::join_all(nodes).await;
            });
        });
        Self { front, cluster }
    }

    /// What is in it, and what it shall do next.
    pub fn cluster(&self) -> parking_lot::MutexGuard<'_, Cluster> {
        self.cluster.lock()
    }

    /// The next loads (or steps of them) fail so.
    pub fn script(&self, faults: &[(&'static str, Fault)]) {
        self.cluster.lock().faults.extend(faults.iter().copied());
    }
}

/// Node 0 is the front-end.
async fn serve(node: usize, listener: TcpListener, cluster: Arc<Mutex<Cluster>>) {
    while let Ok((stream, _)) = listener.accept().await {
        let cluster = cluster.clone();
        let service = service_fn(move |request: Request<Incoming>| {
            let cluster = cluster.clone();
            async move { answer(node, request, &cluster).await }
        });
        tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
    }
}

/// A request as the cluster takes it.
#[derive(Debug)]
pub(crate) struct Asked {
    pub(crate) node: usize,
    pub(crate) method: Method,
    pub(crate) path: String,
    pub(crate) query: String,
    pub(crate) headers: http::HeaderMap,
    pub(crate) body: Bytes,
}

impl Asked {
    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
    }
}

/// What the cluster does with one.
#[derive(Debug)]
pub(crate) enum Done {
    Answer(StatusCode, String),
    Redirect(String),
    /// The connection ends without an answer.
    Cut,
    /// The same; the request is done so much later.
    Late(Duration),
}

async fn answer(
    node: usize,
    request: Request<Incoming>,
    cluster: &Arc<Mutex<Cluster>>,
) -> Result<Response<Full<Bytes>>, io::Error> {
    let (head, body) = request.into_parts();
    let wanted = format!("Basic {}", STANDARD.encode(format!("{USER}:{PASSWORD}")));
    let asked = Asked {
        node,
        method: head.method,
        path: head.uri.path().to_owned(),
        query: head.uri.query().unwrap_or_default().to_owned(),
        headers: head.headers,
        body: body.collect().await.map_err(io::Error::other)?.to_bytes(),
    };
    let response = |status: StatusCode, body: String| {
        let mut response = Response::new(Full::new(Bytes::from(body)));
        *response.status_mut() = status;
        Ok(response)
    };
    // What is said of refused rows is told to anybody.
    if asked.header("authorization") != wanted && !asked.path.ends_with("/_load_error_log") {
        return response(
            StatusCode::UNAUTHORIZED,
            r#"{"status":"FAILED","msg":"Access denied for user 'x'"}"#.to_owned(),
        );
    }
    let done = cluster.lock().take(&asked);
    match done {
        Done::Answer(status, body) => response(status, body),
        Done::Redirect(location) => {
            let mut redirect = Response::new(Full::default());
            *redirect.status_mut() = StatusCode::TEMPORARY_REDIRECT;
            let location = location.parse().map_err(io::Error::other)?;
            redirect.headers_mut().insert("location", location);
            redirect.headers_mut().insert("connection", http::HeaderValue::from_static("close"));
            Ok(redirect)
        }
        Done::Cut => Err(io::Error::other("cut")),
        Done::Late(after) => {
            let cluster = cluster.clone();
            tokio::spawn(async move {
                tokio::time::sleep(after).await;
                cluster.lock().take_plainly(&asked);
                Ok::<_, Infallible>(())
            });
            Err(io::Error::other("cut"))
        }
    }
}
