//! A Postgres cluster of its own, from Debian's binaries.

use std::{
    fs,
    os::unix::fs::chown,
    path::PathBuf,
    process::{Command, Stdio},
    sync::OnceLock,
    time::{Duration, Instant},
};

use tempfile::TempDir;
use tokio_postgres::{Client, NoTls};

use crate::{
    child::{Child, Spec},
    free_port,
};

const CONFIG: &str = "
listen_addresses = '127.0.0.1'
unix_socket_directories = ''
max_connections = 60
shared_buffers = 64MB
max_wal_size = 1GB
wal_level = replica
max_wal_senders = 4
log_line_prefix = '%m [%p] %a '
";

/// A Postgres cluster; its superuser is `postgres`, without a password.
#[derive(Debug)]
pub struct Postgres {
    // Before `folder`: a field is dropped in the order of declaration.
    server: Option<Child>,
    folder: TempDir,
    port: u16,
    user: Option<(u32, u32)>,
}

impl Postgres {
    /// Makes a cluster and starts it on a free port. Panics if Postgres is not installed: a live test never passes unseen.
    pub fn start() -> Self {
        let user = server_user();
        let folder =
            tempfile::Builder::new().prefix("oncegate-postgres-").tempdir().expect("a temporary folder");
        if let Some((uid, gid)) = user {
            chown(folder.path(), Some(uid), Some(gid)).expect("root can give a folder away");
        }
        let mut postgres = Self { server: None, folder, port: free_port(), user };
        let data = postgres.data();
        postgres.tool(
            "initdb",
            &["-A", "trust", "-U", "postgres", "--no-sync", "-E", "UTF8", "--locale=C.UTF-8", "-D", &data],
        );
        let mut config = fs::read_to_string(format!("{data}/postgresql.conf")).expect("initdb wrote it");
        config.push_str(CONFIG);
        fs::write(format!("{data}/postgresql.conf"), config).expect("the cluster's folder can be written");
        postgres.run();
        postgres
    }

    /// The one of this test binary. A test that ends it or takes it back uses its own.
    pub fn shared() -> &'static Self {
        static SHARED: OnceLock<Postgres> = OnceLock::new();
        SHARED.get_or_init(Self::start)
    }

    /// Its port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The URL of `database`, as the gateway's config takes it.
    pub fn url(&self, database: &str) -> String {
        self.url_through(self.port, database)
    }

    /// The same through a proxy on `port`.
    pub fn url_through(&self, port: u16, database: &str) -> String {
        format!("postgres://postgres@127.0.0.1:{port}/{database}")
    }

    /// A connection to `database`.
    pub async fn connect(&self, database: &str) -> Result<Client, tokio_postgres::Error> {
        let (client, connection) = tokio_postgres::connect(&self.url(database), NoTls).await?;
        tokio::spawn(connection);
        Ok(client)
    }

    /// Makes an empty database with what `ddl` says and connects to it.
    pub async fn database(&self, name: &str, ddl: &str) -> Client {
        let admin = self.connect("postgres").await.expect("Postgres answers");
        admin
            .batch_execute(&format!("CREATE DATABASE {name}"))
            .await
            .expect("a database of that name does not exist yet");
        let client = self.connect(name).await.expect("Postgres answers");
        client.batch_execute(ddl).await.expect("the DDL of the test is right");
        client
    }

    /// `pg_terminate_backend` of all client connections to `database` but those of the tests. Answers how many.
    pub async fn terminate_backends(&self, database: &str) -> usize {
        let Ok(admin) = self.connect("postgres").await else { return 0 };
        let query = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
                     WHERE datname = $1 AND application_name <> '' AND pid <> pg_backend_pid()";
        admin.query(query, &[&database]).await.map_or(0, |rows| rows.iter().filter(|row| row.get(0)).count())
    }

    /// Copies the running cluster into `name` beside it, for [`Postgres::restore`].
    pub fn base_backup(&self, name: &str) {
        let target = self.path(name).display().to_string();
        let port = self.port.to_string();
        self.tool(
            "pg_basebackup",
            &["-h", "127.0.0.1", "-p", &port, "-U", "postgres", "-c", "fast", "-N", "-D", &target],
        );
    }

    /// Stops the cluster and starts the base backup `name` in its place, on the same port.
    pub fn restore(&mut self, name: &str) {
        self.stop();
        let data = self.path("data");
        fs::remove_dir_all(&data).expect("a stopped cluster can be removed");
        let copied = self.as_server_user("cp").arg("-a").arg(self.path(name)).arg(&data).status();
        assert!(copied.is_ok_and(|status| status.success()), "the backup {name} can be copied");
        self.run();
    }

    /// Stops the cluster as an administrator would.
    pub fn stop(&mut self) {
        if let Some(mut server) = self.server.take() {
            server.stop("INT");
        }
    }

    /// Ends the cluster as a crash would.
    pub fn kill(&mut self) {
        if let Some(mut server) = self.server.take() {
            server.stop("KILL");
        }
    }

    /// Starts a stopped or killed cluster again, on the same port.
    pub fn run(&mut self) {
        // A killed postmaster's backends end soon, but not at once; until then a new one refuses to start.
        let deadline = Instant::now() + Duration::from_secs(60);
        while !self.try_run() {
            let server = self.server.take();
            let log = server.map_or_else(String::new, |server| server.log_tail(20));
            assert!(Instant::now() < deadline, "Postgres does not start:\n{log}");
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    fn try_run(&mut self) -> bool {
        let log = self.path("log");
        let command = vec![binary("postgres"), "-D".into(), self.data(), "-p".into(), self.port.to_string()];
        let folder = Some(self.folder.path());
        let mut server = Child::start(&Spec {
            command,
            environment: vec![],
            log: &log,
            user: self.user,
            end: "QUIT",
            folder,
        });
        let port = self.port.to_string();
        let mut asked = self.as_server_user(&binary("pg_isready"));
        asked.args(["-q", "-h", "127.0.0.1", "-p", &port, "-U", "postgres"]);
        let deadline = Instant::now() + Duration::from_secs(30);
        while server.exited().is_none() && Instant::now() < deadline {
            if asked.status().is_ok_and(|status| status.success()) {
                self.server = Some(server);
                return true;
            }
            std::thread::sleep(Duration::from_millis(30));
        }
        self.server = Some(server);
        false
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn data(&self) -> String {
        self.path("data").display().to_string()
    }

    fn as_server_user(&self, program: &str) -> Command {
        use std::os::unix::process::CommandExt;
        let mut command = Command::new(program);
        if let Some((uid, gid)) = self.user {
            command.uid(uid).gid(gid);
        }
        command.current_dir("/").stdin(Stdio::null());
        command
    }

    fn tool(&self, name: &str, arguments: &[&str]) {
        let output = self.as_server_user(&binary(name)).args(arguments).output().expect("the tool starts");
        assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

/// Debian keeps the server's programs outside of `PATH`, one folder a version.
fn binary(name: &str) -> String {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    let folder = FOLDER.get_or_init(|| {
        let versions = fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
        let mut folders: Vec<(u32, PathBuf)> = versions
            .filter_map(|version| {
                Some((version.file_name().to_str()?.parse().ok()?, version.path().join("bin")))
            })
            .filter(|(_, folder)| folder.join("postgres").exists() && folder.join("initdb").exists())
            .collect();
        folders.sort();
        let found = folders.pop();
        found.expect("Postgres is not installed: run ./test.sh once, it installs what the live tests need").1
    });
    folder.join(name).display().to_string()
}

/// Postgres refuses to run as root; then the user that Debian's package made runs it.
fn server_user() -> Option<(u32, u32)> {
    let id = |arguments: &[&str]| -> Option<u32> {
        let output = Command::new("id").args(arguments).stderr(Stdio::null()).output().ok()?;
        String::from_utf8(output.stdout).ok()?.trim().parse().ok()
    };
    if id(&["-u"]) != Some(0) {
        return None;
    }
    let found = id(&["-u", "postgres"]).zip(id(&["-g", "postgres"]));
    Some(found.expect("there is no user postgres: run ./test.sh once, it installs what the live tests need"))
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn count(client: &Client) -> i64 {
        client.query_one("SELECT count(*) FROM t", &[]).await.unwrap().get(0)
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn postgres_goes_back_to_a_base_backup_and_survives_a_kill() {
        let mut postgres = Postgres::start();
        let client = postgres.database("x", "CREATE TABLE t (n int)").await;
        client.batch_execute("INSERT INTO t VALUES (1)").await.unwrap();
        postgres.base_backup("early");
        client.batch_execute("INSERT INTO t VALUES (2)").await.unwrap();
        assert_eq!(count(&client).await, 2);

        postgres.kill();
        postgres.run();
        assert_eq!(count(&postgres.connect("x").await.unwrap()).await, 2);

        postgres.restore("early");
        let client = postgres.connect("x").await.unwrap();
        assert_eq!(count(&client).await, 1);

        let url = postgres.url("x") + "?application_name=victim";
        let (victim, connection) = tokio_postgres::connect(&url, NoTls).await.unwrap();
        tokio::spawn(connection);
        assert_eq!(postgres.terminate_backends("x").await, 1);
        assert!(victim.query_one("SELECT 1", &[]).await.is_err());
        assert_eq!(count(&client).await, 1);
    }
}
