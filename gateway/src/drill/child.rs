//! The gateway under test: this program as a child process ([`Child`]), killed, paused, started again.

use std::{
    fs::{self, OpenOptions},
    net::{Ipv4Addr, SocketAddr, TcpListener},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{self, Command, Stdio},
    time::{Duration, Instant},
};

use http::{Request, header};
use http_body_util::Full;
use hyper::client::conn::http1::handshake;
use hyper_util::rt::TokioIo;
use rand::Rng;
use tokio::net::TcpStream;

/// How long a start may take.
const PATIENCE: Duration = Duration::from_secs(90);

/// Dropping it kills the process.
pub(crate) struct Child {
    folder: PathBuf,
    admin: SocketAddr,
    /// Added to its environment.
    variables: Vec<(String, String)>,
    process: Option<process::Child>,
}

impl Child {
    /// Serves `oncegate.toml` of the folder; starts nothing yet.
    pub(crate) fn new(folder: &Path, admin: SocketAddr, variables: Vec<(String, String)>) -> Self {
        Self { folder: folder.to_owned(), admin, variables, process: None }
    }

    /// Starts the process and does not wait.
    pub(crate) fn spawn(&mut self) -> Result<(), String> {
        let program = std::env::current_exe().map_err(|fault| format!("this program's own file: {fault}"))?;
        let path = self.log();
        let named = |fault: std::io::Error| format!("{}: {fault}", path.display());
        let log = OpenOptions::new().create(true).append(true).open(&path).map_err(named)?;
        let mut command = Command::new(program);
        command
            .args(["serve", "--config"])
            .arg(self.folder.join("oncegate.toml"))
            .envs(self.variables.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(log.try_clone().map_err(named)?)
            .stderr(log)
            // Ctrl-C is for the drill, which ends the gateway itself.
            .process_group(0);
        let process = command.spawn().map_err(|fault| format!("the gateway cannot be started: {fault}"))?;
        self.process = Some(process);
        Ok(())
    }

    /// Waits until it takes records.
    pub(crate) async fn ready(&mut self) -> Result<(), String> {
        let deadline = Instant::now() + PATIENCE;
        let mut said = String::new();
        while Instant::now() < deadline {
            if let Some(Ok(Some(status))) = self.process.as_mut().map(process::Child::try_wait) {
                return Err(format!("the gateway ended with {status}:\n{}", self.tail()));
            }
            match self.health().await {
                Ok(()) => return Ok(()),
                Err(fault) => said = fault,
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Err(format!("the gateway was not ready within {} s ({said}):\n{}", PATIENCE.as_secs(), self.tail()))
    }

    async fn health(&self) -> Result<(), String> {
        let ask = async {
            let stream = TcpStream::connect(self.admin).await.map_err(|fault| fault.to_string())?;
            let (mut sender, connection) =
                handshake(TokioIo::new(stream)).await.map_err(|fault| fault.to_string())?;
            // Its end is seen by the sender.
            let driver = tokio::spawn(connection);
            let request = Request::get("/readyz").header(header::HOST, "localhost");
            let request = request.body(Full::<bytes::Bytes>::default()).map_err(|fault| fault.to_string())?;
            let answer = sender.send_request(request).await.map_err(|fault| fault.to_string());
            driver.abort();
            match answer?.status() {
                status if status.is_success() => Ok(()),
                status => Err(status.to_string()),
            }
        };
        tokio::time::timeout(Duration::from_secs(5), ask)
            .await
            .unwrap_or_else(|_| Err("no answer".to_owned()))
    }

    /// How it ended, if nobody ended it; with its last words.
    pub(crate) fn ended(&mut self) -> Option<String> {
        let status = self.process.as_mut()?.try_wait().ok()??;
        self.process = None;
        Some(format!("it ended by itself with {status}:\n{}", self.tail()))
    }

    /// `kill -9`, and waits until it is gone.
    pub(crate) fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            // It may have ended by itself.
            process.kill().ok();
            process.wait().ok();
        }
    }

    /// Sends a signal by its name, such as `STOP`.
    pub(crate) fn signal(&self, name: &str) -> Result<(), String> {
        let Some(process) = &self.process else { return Ok(()) };
        let sent = Command::new("kill").args([&format!("-{name}"), &process.id().to_string()]).status();
        match sent {
            Ok(status) if status.success() => Ok(()),
            Ok(status) => Err(format!("kill -{name} of the gateway: {status}")),
            Err(fault) => Err(format!("the program `kill` cannot be started: {fault}")),
        }
    }

    /// Ends it as an operator does, and kills it if that takes more than 40 s. Says whether it drained.
    pub(crate) async fn terminate(&mut self) -> Result<bool, String> {
        self.signal("TERM")?;
        let deadline = Instant::now() + Duration::from_secs(40);
        while let Some(process) = &mut self.process {
            match process.try_wait() {
                Ok(Some(status)) => {
                    self.process = None;
                    return Ok(status.success());
                }
                Ok(None) if Instant::now() < deadline => tokio::time::sleep(Duration::from_millis(20)).await,
                _ => self.kill(),
            }
        }
        Ok(false)
    }

    /// It forgets all that it kept itself; it must not run.
    pub(crate) fn empty_store(&self) -> Result<(), String> {
        let store = self.folder.join("store");
        match fs::remove_dir_all(&store) {
            Err(fault) if fault.kind() != std::io::ErrorKind::NotFound => {
                Err(format!("{}: {fault}", store.display()))
            }
            _ => Ok(()),
        }
    }

    fn log(&self) -> PathBuf {
        self.folder.join("log")
    }

    /// The last lines of its log.
    pub(crate) fn tail(&self) -> String {
        let log = fs::read(self.log()).unwrap_or_default();
        let text = String::from_utf8_lossy(&log);
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(20)..].join("\n")
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Below the ports that the system gives to outgoing connections: a caller that calls while the gateway is away must not come to
/// sit on the gateway's own port.
const PORTS: std::ops::Range<u16> = 15_000..32_000;

/// Two free ports of loopback.
pub(crate) fn free_ports() -> Result<[SocketAddr; 2], String> {
    let free = || {
        (0..1_000).find_map(|_| {
            let port = rand::rng().random_range(PORTS);
            TcpListener::bind((Ipv4Addr::LOCALHOST, port)).ok()
        })
    };
    // Held together, so that they differ.
    let (Some(one), Some(two)) = (free(), free()) else {
        return Err(format!("no port of loopback from {} to {} is free", PORTS.start, PORTS.end));
    };
    let address = |listener: TcpListener| listener.local_addr().map_err(|fault| fault.to_string());
    Ok([address(one)?, address(two)?])
}
