//! A Redis server of its own, from Debian's package.

use std::{
    collections::BTreeMap,
    fs,
    path::PathBuf,
    sync::OnceLock,
    time::{Duration, Instant},
};

use redis::{Connection, cmd};
use tempfile::TempDir;

use crate::{
    child::{Child, Spec},
    free_port,
};

/// Rows as Redis has them: key to field to value.
pub type Hashes = BTreeMap<String, BTreeMap<String, String>>;

/// A Redis server with an append-only file.
#[derive(Debug)]
pub struct Redis {
    // Before `folder`: a field is dropped in the order of declaration.
    server: Option<Child>,
    folder: TempDir,
    port: u16,
}

impl Redis {
    /// Starts one on a free port that syncs before each reply, with further lines of its configuration, which come later and so win.
    /// Panics if Redis is not installed: a live test never passes unseen.
    pub fn start(options: &str) -> Self {
        let folder =
            tempfile::Builder::new().prefix("oncegate-redis-").tempdir().expect("a temporary folder");
        let port = free_port();
        let text = format!(
            "bind 127.0.0.1\nport {port}\ndir {:?}\ndatabases 1000\nsave \"\"\nappendonly yes\nappendfsync always\n\
             enable-debug-command local\n{options}\n",
            folder.path()
        );
        fs::write(folder.path().join("redis.conf"), text).expect("the temporary folder can be written");
        let mut redis = Self { server: None, folder, port };
        redis.run();
        redis
    }

    /// The one of this test binary. A test that ends it or takes it back uses its own.
    pub fn shared() -> &'static Self {
        static SHARED: OnceLock<Redis> = OnceLock::new();
        SHARED.get_or_init(|| Self::start("appendfsync everysec"))
    }

    /// Its port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The URL of a database, as the gateway's config takes it.
    pub fn url(&self, database: u32) -> String {
        self.url_through(self.port, database)
    }

    /// The same through a proxy on `port`.
    pub fn url_through(&self, port: u16, database: u32) -> String {
        format!("redis://127.0.0.1:{port}/{database}")
    }

    /// A connection to a database, once the server answers.
    pub fn connect(&self, database: u32) -> Connection {
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            let client = redis::Client::open(self.url(database)).expect("a good URL");
            let connected =
                client.get_connection_with_timeout(Duration::from_secs(5)).and_then(|mut connection| {
                    match cmd("PING").query::<()>(&mut connection) {
                        // It answers, and takes no writes.
                        Err(error) if matches!(error.code(), Some("MISCONF" | "MASTERDOWN")) => {
                            Ok(connection)
                        }
                        result => result.map(|()| connection),
                    }
                });
            match connected {
                Ok(connection) => return connection,
                Err(error) => {
                    assert!(
                        Instant::now() < deadline,
                        "Redis does not answer: {error}\n{}",
                        self.log_tail(20)
                    );
                    std::thread::sleep(Duration::from_millis(20));
                }
            }
        }
    }

    /// Runs a command of words on a database and shows what it answers.
    pub fn command(&self, database: u32, words: &[&str]) -> redis::RedisResult<redis::Value> {
        let mut command = cmd(words[0]);
        command.arg(&words[1..]);
        command.query(&mut self.connect(database))
    }

    /// All hashes whose keys begin with `prefix`.
    pub fn hashes(&self, database: u32, prefix: &str) -> Hashes {
        let mut connection = self.connect(database);
        let keys: Vec<String> = cmd("KEYS").arg(format!("{prefix}*")).query(&mut connection).expect("keys");
        let mut hashes = Hashes::new();
        for keys in keys.chunks(5000) {
            let mut all = redis::pipe();
            for key in keys {
                all.cmd("HGETALL").arg(key);
            }
            let rows: Vec<BTreeMap<String, String>> = all.query(&mut connection).expect("hashes");
            hashes.extend(keys.iter().cloned().zip(rows));
        }
        hashes
    }

    /// Ends the server as a crash would.
    pub fn kill(&mut self) {
        if let Some(mut server) = self.server.take() {
            server.stop("KILL");
        }
    }

    /// Stops it in its tracks, as a host does that hangs.
    pub fn freeze(&mut self) {
        self.server.as_mut().expect("it runs").signal("STOP");
    }

    /// Lets it go on after [`Redis::freeze`].
    pub fn thaw(&mut self) {
        self.server.as_mut().expect("it runs").signal("CONT");
    }

    /// Starts a killed server again, on the same port, from its files.
    pub fn run(&mut self) {
        let config = self.path("redis.conf").display().to_string();
        let command = vec!["redis-server".to_owned(), config];
        let (log, folder) = (self.path("log"), Some(self.folder.path()));
        self.server = Some(Child::start(&Spec {
            command,
            environment: vec![],
            log: &log,
            user: None,
            end: "KILL",
            folder,
        }));
        drop(self.connect(0));
    }

    /// Copies its files, of a server that does not run, for [`Redis::restore`].
    pub fn keep_files(&self, name: &str) {
        self.copy("appendonlydir", name);
    }

    /// Puts the copy in place of its files; it must not run.
    pub fn restore(&self, name: &str) {
        fs::remove_dir_all(self.path("appendonlydir")).expect("its files are there");
        self.copy(name, "appendonlydir");
    }

    /// Lets its next snapshots fail, as a failing disk does: another thing is at their file's name.
    pub fn block_snapshots(&self) {
        fs::create_dir(self.path("dump.rdb")).expect("the temporary folder can be written");
    }

    /// The last lines of its log.
    pub fn log_tail(&self, lines: usize) -> String {
        self.server.as_ref().map_or_else(String::new, |server| server.log_tail(lines))
    }

    fn copy(&self, from: &str, to: &str) {
        assert!(self.server.is_none(), "the server runs");
        fs::create_dir_all(self.path(to)).expect("the temporary folder can be written");
        for entry in fs::read_dir(self.path(from)).expect("its files are there") {
            let entry = entry.expect("an entry");
            fs::copy(entry.path(), self.path(to).join(entry.file_name())).expect("a file can be copied");
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redis_survives_a_kill_and_goes_back_to_a_copy() {
        let mut redis = Redis::start("");
        let set = |redis: &Redis, value: &str| {
            redis.command(3, &["HSET", "k", "f", value]).unwrap();
        };
        set(&redis, "1");
        redis.kill();
        redis.keep_files("early");
        redis.run();
        assert_eq!(redis.hashes(3, "")["k"]["f"], "1");
        set(&redis, "2");
        redis.kill();
        redis.restore("early");
        redis.run();
        assert_eq!(redis.hashes(3, "")["k"]["f"], "1");
        assert!(redis.hashes(4, "").is_empty());
    }
}
