//! The real `oncegate` binary as a child process: [`Gateway`].

use std::{
    fs,
    net::SocketAddr,
    path::PathBuf,
    process::ExitStatus,
    time::{Duration, Instant},
};

use rand::{Rng, rngs::StdRng};
use tempfile::TempDir;

use crate::{
    child::{Child, Spec},
    eventually, free_port,
    http_client::HttpClient,
};

/// One gateway instance: its config, its store folder, its ports, and the process while it runs. The ports stay the
/// same over restarts, so that clients find it again.
#[derive(Debug)]
pub struct Gateway {
    // Before `folder`: a field is dropped in the order of declaration.
    process: Option<Child>,
    folder: TempDir,
    listen: SocketAddr,
    admin: SocketAddr,
    starts: usize,
}

impl Gateway {
    /// Writes a config: `[server]` and `[store]` are added to `rest`, which holds sinks and routes. Starts nothing.
    pub fn new(rest: &str) -> Self {
        let folder =
            tempfile::Builder::new().prefix("oncegate-gateway-").tempdir().expect("a temporary folder");
        let [listen, admin] = [free_port(), free_port()].map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
        let gateway = Self { process: None, folder, listen, admin, starts: 0 };
        gateway.configure(rest);
        gateway
    }

    /// Replaces the config; the next start reads it.
    pub fn configure(&self, rest: &str) {
        let (listen, admin, store) = (self.listen, self.admin, self.path("store"));
        let text = format!(
            "[server]\nlisten = \"{listen}\"\nadmin_listen = \"{admin}\"\ninstance = \"{}\"\n\n[store]\npath = {:?}\n\n{rest}\n",
            self.name(),
            store.display().to_string()
        );
        fs::write(self.path("oncegate.toml"), text).expect("the temporary folder can be written");
    }

    /// `oncegate check --servers`: its exit status and what it printed.
    pub async fn check_servers(&self) -> (Option<i32>, String) {
        let output = tokio::process::Command::new(binary())
            .args(["check", "--servers", "-c"])
            .arg(self.path("oncegate.toml"))
            .output()
            .await
            .expect("the program can be run");
        (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Starts the process and does not wait.
    pub fn spawn(&mut self) {
        assert!(self.process.is_none(), "the gateway runs already");
        let config = self.path("oncegate.toml").display().to_string();
        let command = vec![binary().display().to_string(), "serve".into(), "-c".into(), config];
        let level = std::env::var("RUST_LOG").unwrap_or_else(|_| "info,tokio_postgres=warn".into());
        let environment = vec![("RUST_LOG", level)];
        let (log, folder) = (self.path("log"), Some(self.folder.path()));
        self.process =
            Some(Child::start(&Spec { command, environment, log: &log, user: None, end: "KILL", folder }));
        self.starts += 1;
    }

    /// Starts the process and waits until `/readyz` says 200.
    pub async fn start(&mut self) {
        self.spawn();
        self.ready(Duration::from_secs(30)).await;
    }

    /// Waits until `/readyz` says 200; panics with the log if the process ends or `patience` is over. In runs at length, which meet a busy
    /// machine, it waits longer, and a gateway that did not get through its start-up checks starts again, as a supervisor has it.
    pub async fn ready(&mut self, patience: Duration) {
        let at_length = std::env::var_os("ONCEGATE_KILLS").is_some();
        let deadline = Instant::now() + if at_length { patience * 5 } else { patience };
        let mut client = HttpClient::new(self.admin);
        loop {
            let answer = client.get("/readyz?verbose").await;
            if answer.as_ref().is_ok_and(|answer| answer.status == 200) {
                return;
            }
            let said = answer.map_or_else(|error| error.to_string(), |answer| answer.text());
            let gone = self.process.as_mut().and_then(Child::exited);
            if gone.is_some() && at_length && Instant::now() < deadline {
                self.process = None;
                self.spawn();
                continue;
            }
            if gone.is_some() || Instant::now() > deadline {
                panic!("the gateway is not ready ({gone:?}): {said}\n{}", self.log_tail(40));
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Ends it with `kill -9` and waits until it is gone.
    pub fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.stop("KILL");
        }
    }

    /// So many kills, after so many ms of life each; some hit it while it is still starting. Ready in the end.
    pub async fn goes_through(&mut self, kills: usize, life_ms: std::ops::Range<u64>, random: &mut StdRng) {
        for kill in 0..kills {
            tokio::time::sleep(Duration::from_millis(random.random_range(life_ms.clone()))).await;
            self.kill();
            self.spawn();
            if kill % 5 != 4 {
                self.ready(Duration::from_secs(30)).await;
            }
        }
        self.ready(Duration::from_secs(30)).await;
    }

    /// Ends it with SIGTERM, as an operator would; panics if it does not drain within 30 s.
    pub async fn terminate(&mut self) -> ExitStatus {
        self.terminate_within(Duration::from_secs(30)).await
    }

    /// As [`Gateway::terminate`], where a batch may be on its way to a server that does not answer.
    pub async fn terminate_within(&mut self, patience: Duration) -> ExitStatus {
        let mut process = self.process.take().expect("the gateway runs");
        process.signal("TERM");
        eventually("a drain on SIGTERM", patience, async || {
            process.exited().ok_or_else(|| format!("still running\n{}", process.log_tail(20)))
        })
        .await
    }

    /// Freezes it with SIGSTOP.
    pub fn freeze(&mut self) {
        self.process.as_mut().expect("the gateway runs").signal("STOP");
    }

    /// Lets it go on after [`Gateway::freeze`].
    pub fn thaw(&mut self) {
        self.process.as_mut().expect("the gateway runs").signal("CONT");
    }

    /// How it ended by itself, if it has.
    pub fn exited(&mut self) -> Option<ExitStatus> {
        self.process.as_mut().and_then(Child::exited)
    }

    /// Deletes its store folder; it must not run.
    pub fn delete_store(&self) {
        assert!(self.process.is_none(), "the gateway runs");
        fs::remove_dir_all(self.path("store")).expect("the store folder is there");
    }

    /// Its name as an owner; the same over restarts, also after a lost store.
    pub fn name(&self) -> String {
        format!("gateway-{}", self.listen.port())
    }

    /// Where clients send records.
    pub fn listen(&self) -> SocketAddr {
        self.listen
    }

    /// Where health and metrics are.
    pub fn admin(&self) -> SocketAddr {
        self.admin
    }

    /// Its process id, while it runs.
    pub fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(Child::pid)
    }

    /// How often it was started.
    pub fn starts(&self) -> usize {
        self.starts
    }

    /// Its log, over all starts.
    pub fn log(&self) -> String {
        fs::read(self.path("log"))
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
            .unwrap_or_default()
    }

    /// The last lines of its log.
    pub fn log_tail(&self, lines: usize) -> String {
        let log = self.log();
        let all: Vec<&str> = log.lines().collect();
        all[all.len().saturating_sub(lines)..].join("\n")
    }

    /// Waits for a log line that holds all of `words`, and answers with it.
    pub async fn logged(&self, words: &[&str], patience: Duration) -> String {
        eventually(&format!("a log line with {words:?}"), patience, async || {
            let log = self.log();
            let found = log.lines().find(|line| words.iter().all(|word| line.contains(word)));
            found.map(str::to_owned).ok_or_else(|| self.log_tail(40))
        })
        .await
    }

    /// The sum of a metric over the samples whose labels hold all of `labels` (`name="value"`); none while it cannot be asked.
    pub async fn metric(&self, name: &str, labels: &[&str]) -> Option<f64> {
        let answer = HttpClient::new(self.admin).get("/metrics").await.ok()?;
        let text = answer.text();
        let samples = text.lines().filter(|line| {
            let rest = line.strip_prefix(name);
            rest.is_some_and(|rest| rest.starts_with(['{', ' ']))
                && labels.iter().all(|label| line.contains(label))
        });
        Some(samples.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum())
    }

    /// The folder of its store.
    pub fn store(&self) -> PathBuf {
        self.path("store")
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

/// A failed test shows what its gateways said.
impl Drop for Gateway {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- {}, started {} times:\n{}", self.name(), self.starts, self.log_tail(200));
        }
    }
}

/// The binary of the profile that this test (`target/<profile>/deps/..`) or bench (`target/<profile>/..`) was built with, or the
/// one that `ONCEGATE_BIN` names.
pub fn binary() -> PathBuf {
    let beside = || -> Option<PathBuf> {
        let test = std::env::current_exe().ok()?;
        let folder = test.parent()?;
        let profile = if folder.ends_with("deps") { folder.parent()? } else { folder };
        Some(profile.join("oncegate"))
    };
    let path =
        std::env::var_os("ONCEGATE_BIN").map(PathBuf::from).or_else(beside).expect("a test has a path");
    assert!(
        path.exists(),
        "{} is missing: run `cargo build --workspace` first (./test.sh does)",
        path.display()
    );
    path
}
