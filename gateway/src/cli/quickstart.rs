//! `oncegate quickstart`: everything embedded. A child process serves a SQLite table; this process sends it orders with copies,
//! kills it in the middle, starts it again, and counts.

use std::{
    io::IsTerminal,
    net::{Ipv4Addr, SocketAddr, TcpListener},
    path::{Path, PathBuf},
    process::{Child, Command, ExitCode, Stdio},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use clap::Args;
use http::{Request, header};
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use rand::{Rng, SeedableRng, rngs::SmallRng, seq::SliceRandom};
use tokio::{net::TcpStream, sync::Mutex};

/// Options of the quickstart.
#[derive(Args, Debug)]
pub(super) struct Quickstart {
    /// Where its files go; must not exist yet, or be an earlier quickstart's.
    #[arg(long, default_value = "oncegate-quickstart")]
    folder: PathBuf,
    /// Orders to write.
    #[arg(long, default_value_t = 100_000, value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    orders: u64,
    /// Ends after the table, instead of serving until Ctrl-C.
    #[arg(long)]
    exit: bool,
    /// Seed of the workload.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

const BATCH: usize = 1_000;
const SENDERS: usize = 4;
/// One order in so many is sent again, in another request.
const COPY_EVERY: u64 = 4;

impl Quickstart {
    pub(super) fn run(&self) -> ExitCode {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
        match runtime.map_err(|fault| fault.to_string()).and_then(|runtime| runtime.block_on(self.play())) {
            Ok(()) => ExitCode::SUCCESS,
            Err(reason) => {
                eprintln!("quickstart: {reason}");
                ExitCode::FAILURE
            }
        }
    }

    async fn play(&self) -> Result<(), String> {
        let place = Place::make(&self.folder)?;
        println!(
            "Oncegate quickstart: an HTTP door, a dedup store and a SQLite table, all in {}\n",
            self.folder.display()
        );
        let mut gateway = place.start()?;
        place.ready(&mut gateway).await?;
        let batches = batches(self.orders, self.seed);
        let sent: u64 = batches.iter().map(|batch| batch.records).sum();
        let bar = progress(sent);
        let counts = Arc::new(Counts::default());
        let queue = Arc::new(Mutex::new(batches));
        let started = Instant::now();
        let senders: Vec<_> = (0..SENDERS)
            .map(|_| tokio::spawn(send_all(place.data, queue.clone(), counts.clone(), bar.clone())))
            .collect();
        while counts.acknowledged.load(Ordering::Relaxed) < sent / 2 {
            if senders.iter().all(tokio::task::JoinHandle::is_finished) {
                break;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        gateway.kill();
        let crashed_at = counts.acknowledged.load(Ordering::Relaxed);
        bar.suspend(|| println!("  kill -9 of the writer, in the middle of its work"));
        let restarted = Instant::now();
        let mut gateway = place.start()?;
        place.ready(&mut gateway).await?;
        let recovery = restarted.elapsed();
        bar.suspend(|| println!("  started again; ready after {recovery:.1?}\n"));
        for sender in senders {
            sender.await.map_err(|fault| fault.to_string())??;
        }
        let took = started.elapsed();
        bar.finish_and_clear();
        let (rows, distinct) = place.count()?;
        let resent = counts.resent.load(Ordering::Relaxed);
        println!("  orders                              {:>10}", self.orders);
        println!("  records sent (orders and copies)    {sent:>10}");
        println!("  records sent again after the crash  {resent:>10}");
        println!("  acknowledged before the crash       {crashed_at:>10}");
        println!("  answered written                    {:>10}", counts.written.load(Ordering::Relaxed));
        println!("  answered duplicate                  {:>10}", counts.duplicate.load(Ordering::Relaxed));
        println!("  rows in the table                   {rows:>10}");
        println!("  distinct orders in the table        {distinct:>10}");
        println!(
            "  time, crash included                {took:>10.1?}   ({:.0} records/s)\n",
            sent as f64 / took.as_secs_f64()
        );
        println!(
            "See for yourself:\n  sqlite3 {} 'select count(*), count(distinct order_id) from orders'\n",
            place.database.display()
        );
        if rows != self.orders || distinct != self.orders {
            return Err(format!(
                "expected {} rows, one an order: this is a fault of Oncegate, please report it",
                self.orders
            ));
        }
        println!(
            "Each order is there once, though {} of the records that came were copies.\n",
            sent - self.orders + resent
        );
        if !self.exit {
            place.serve_on(&mut gateway).await?;
        }
        Ok(())
    }
}

/// Where the quickstart lives.
struct Place {
    config: PathBuf,
    log: PathBuf,
    database: PathBuf,
    data: SocketAddr,
    admin: SocketAddr,
}

/// The serving process; it ends with this one.
struct Gateway(Child);

impl Gateway {
    fn kill(&mut self) {
        // It may have ended by itself.
        self.0.kill().ok();
        self.0.wait().ok();
    }

    /// Why it is not there any more, if so.
    fn ended(&mut self, log: &Path) -> Result<(), String> {
        match self.0.try_wait() {
            Ok(Some(status)) => Err(format!("the gateway ended with {status}; its log is {}", log.display())),
            _ => Ok(()),
        }
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.kill();
    }
}

impl Place {
    /// Clears an earlier quickstart's files away, and writes the config.
    fn make(folder: &Path) -> Result<Self, String> {
        let config = folder.join("oncegate.toml");
        let named = |fault: std::io::Error| format!("{}: {fault}", folder.display());
        if folder.exists() {
            let theirs = std::fs::read_to_string(&config).is_ok_and(|text| text.starts_with(FIRST_LINE));
            if !theirs {
                return Err(format!(
                    "{} exists and is no earlier quickstart's folder; name another one with --folder",
                    folder.display()
                ));
            }
            std::fs::remove_dir_all(folder).map_err(named)?;
        }
        std::fs::create_dir_all(folder).map_err(named)?;
        let (data, admin) = (free(8080)?, free(9090)?);
        let database = folder.join("orders.db");
        let text = CONFIG
            .replace("{listen}", &data.to_string())
            .replace("{admin}", &admin.to_string())
            .replace("{store}", &toml_text(&folder.join("store")))
            .replace("{database}", &toml_text(&database));
        std::fs::write(&config, format!("{FIRST_LINE}{text}")).map_err(named)?;
        Ok(Self { config, log: folder.join("oncegate.log"), database, data, admin })
    }

    /// The product as it is, serving the config.
    fn start(&self) -> Result<Gateway, String> {
        let program = std::env::current_exe().map_err(|fault| format!("this program's own file: {fault}"))?;
        let log = std::fs::OpenOptions::new().create(true).append(true).open(&self.log);
        let log = log.map_err(|fault| format!("{}: {fault}", self.log.display()))?;
        let errors = log.try_clone().map_err(|fault| format!("{}: {fault}", self.log.display()))?;
        let mut command = Command::new(program);
        command
            .arg("serve")
            .arg("--config")
            .arg(&self.config)
            .stdin(Stdio::null())
            .stdout(log)
            .stderr(errors);
        Ok(Gateway(command.spawn().map_err(|fault| format!("the gateway cannot be started: {fault}"))?))
    }

    async fn ready(&self, gateway: &mut Gateway) -> Result<(), String> {
        let deadline = Instant::now() + Duration::from_secs(60);
        while Instant::now() < deadline {
            gateway.ended(&self.log)?;
            if let Ok(mut client) = connect(self.admin).await {
                let request = Request::get("/readyz").header(header::HOST, "localhost").body(Full::default());
                let request = request.map_err(|fault| fault.to_string())?;
                if client.send_request(request).await.is_ok_and(|answer| answer.status().is_success()) {
                    return Ok(());
                }
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Err(format!("the gateway did not get ready within 60 s; its log is {}", self.log.display()))
    }

    fn count(&self) -> Result<(u64, u64), String> {
        adapters::sqlite::count_distinct(&self.database, "orders", "order_id")
            .map_err(|fault| fault.to_string())
    }

    async fn serve_on(&self, gateway: &mut Gateway) -> Result<(), String> {
        println!("Serving until Ctrl-C. Try:\n");
        println!("  curl -i http://{}/v1/orders -H 'content-type: application/json' \\", self.data);
        println!(
            "    -d '{{\"order_id\":\"my-order\",\"user_id\":7,\"amount\":\"12.50\",\"currency\":\"EUR\",\"note\":\"hello\"}}'"
        );
        println!("\nand the same again: the same answer, with Idempotent-Replayed: true. Then:\n");
        println!("  curl 'http://{}/readyz?verbose'", self.admin);
        println!("  curl -s http://{}/metrics | grep oncegate_records_total", self.admin);
        loop {
            tokio::select! {
                ended = tokio::signal::ctrl_c() => return ended.map_err(|fault| fault.to_string()),
                () = tokio::time::sleep(Duration::from_millis(500)) => gateway.ended(&self.log)?,
            }
        }
    }
}

const FIRST_LINE: &str =
    "# Written by `oncegate quickstart`. Serve it again with: oncegate serve --config <this file>\n";
const CONFIG: &str = r#"[server]
listen = "{listen}"
admin_listen = "{admin}"

[store]
path = {store}

[sinks.orders]
type = "sqlite"
path = {database}
table = "orders"
mode = "insert"
row_key = ["order_id"]
create = """
CREATE TABLE orders (
  order_id TEXT NOT NULL PRIMARY KEY,
  user_id  INTEGER NOT NULL,
  amount   TEXT NOT NULL,
  currency TEXT NOT NULL,
  note     TEXT
)"""

[routes.orders]
key = ["/order_id"]
window = "24h"
sink = "orders"
"#;

fn toml_text(path: &Path) -> String {
    toml::Value::String(path.display().to_string()).to_string()
}

/// The wanted port if it is free, else any.
fn free(wanted: u16) -> Result<SocketAddr, String> {
    let at = |port| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let listener = TcpListener::bind(at(wanted)).or_else(|_| TcpListener::bind(at(0)));
    listener.and_then(|listener| listener.local_addr()).map_err(|fault| format!("no free port: {fault}"))
}

/// Some orders as NDJSON.
struct Lines {
    body: Bytes,
    records: u64,
}

/// All orders, and a copy of some in another place, in random order.
fn batches(orders: u64, seed: u64) -> Vec<Lines> {
    let mut random = SmallRng::seed_from_u64(seed);
    let mut order: Vec<u64> = (0..orders).chain((0..orders).filter(|n| n % COPY_EVERY == 0)).collect();
    order.shuffle(&mut random);
    order
        .chunks(BATCH)
        .map(|chunk| {
            let lines: Vec<String> = chunk.iter().map(|&n| line(n, seed)).collect();
            Lines { body: (lines.join("\n") + "\n").into(), records: chunk.len() as u64 }
        })
        .collect()
}

/// An order; a copy has the same bytes.
fn line(n: u64, seed: u64) -> String {
    let mut random = SmallRng::seed_from_u64(seed ^ n.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let (user, cents) = (random.random_range(1..50_000), random.random_range(100..1_000_000));
    let currency = ["EUR", "USD", "JPY", "GBP"][random.random_range(0..4)];
    let amount = format!("{}.{:02}", cents / 100, cents % 100);
    format!(
        r#"{{"order_id":"o-{n:09}","user_id":{user},"amount":"{amount}","currency":"{currency}","note":"order {n} of user {user}"}}"#
    )
}

#[derive(Default)]
struct Counts {
    acknowledged: AtomicU64,
    written: AtomicU64,
    duplicate: AtomicU64,
    resent: AtomicU64,
}

/// Sends batches until the queue is empty, each until it is acknowledged.
async fn send_all(
    data: SocketAddr,
    queue: Arc<Mutex<Vec<Lines>>>,
    counts: Arc<Counts>,
    bar: ProgressBar,
) -> Result<(), String> {
    let mut client: Option<SendRequest<Full<Bytes>>> = None;
    loop {
        let Some(lines) = queue.lock().await.pop() else { return Ok(()) };
        let deadline = Instant::now() + Duration::from_secs(120);
        let mut last_fault = None;
        loop {
            match send(&mut client, data, &lines).await {
                Ok((written, duplicate)) => {
                    counts.written.fetch_add(written, Ordering::Relaxed);
                    counts.duplicate.fetch_add(duplicate, Ordering::Relaxed);
                    counts.acknowledged.fetch_add(lines.records, Ordering::Relaxed);
                    bar.inc(lines.records);
                    if last_fault.is_some() {
                        counts.resent.fetch_add(lines.records, Ordering::Relaxed);
                    }
                    break;
                }
                Err(reason) if Instant::now() > deadline => {
                    return Err(format!("not acknowledged within 2 min: {reason}"));
                }
                Err(reason) => {
                    client = None;
                    last_fault = Some(reason);
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            }
        }
    }
}

/// One request; how many records were written, and how many were known.
async fn send(
    client: &mut Option<SendRequest<Full<Bytes>>>,
    data: SocketAddr,
    lines: &Lines,
) -> Result<(u64, u64), String> {
    #[derive(serde::Deserialize)]
    struct Answer {
        counts: std::collections::BTreeMap<String, u64>,
    }
    let sender = match client {
        Some(sender) if !sender.is_closed() => sender,
        _ => client.insert(connect(data).await?),
    };
    let request = Request::post("/v1/orders")
        .header(header::HOST, "localhost")
        .header(header::CONTENT_TYPE, "application/x-ndjson")
        .body(Full::new(lines.body.clone()))
        .map_err(|fault| fault.to_string())?;
    let answer = sender.send_request(request).await.map_err(|fault| fault.to_string())?;
    let status = answer.status();
    let body = answer.into_body().collect().await.map_err(|fault| fault.to_string())?.to_bytes();
    let text = || String::from_utf8_lossy(&body).chars().take(300).collect::<String>();
    if !status.is_success() {
        return Err(format!("{status}: {}", text()));
    }
    let answer: Answer = serde_json::from_slice(&body).map_err(|fault| fault.to_string())?;
    let count = |word: &str| answer.counts.get(word).copied().unwrap_or_default();
    let (written, duplicate) = (count("written"), count("duplicate"));
    if written + duplicate == lines.records {
        Ok((written, duplicate))
    } else {
        Err(format!("not every record of the batch has its outcome: {}", text()))
    }
}

async fn connect(address: SocketAddr) -> Result<SendRequest<Full<Bytes>>, String> {
    let stream = TcpStream::connect(address).await.map_err(|fault| fault.to_string())?;
    stream.set_nodelay(true).map_err(|fault| fault.to_string())?;
    let (sender, connection) = handshake(TokioIo::new(stream)).await.map_err(|fault| fault.to_string())?;
    // Its end is seen by the sender.
    tokio::spawn(async move { drop(connection.await) });
    Ok(sender)
}

fn progress(records: u64) -> ProgressBar {
    let terminal = std::io::stderr().is_terminal();
    let target = if terminal { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
    let style = ProgressStyle::with_template("  {bar:40} {human_pos}/{human_len} records  {per_sec}  {eta}");
    ProgressBar::with_draw_target(Some(records), target)
        .with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}
