//! Child processes that cannot outlive the test: [`Child`].

use std::{
    io::{BufRead, BufReader, Write},
    os::unix::process::{CommandExt, ExitStatusExt},
    path::{Path, PathBuf},
    process::{self, Command, ExitStatus, Stdio},
};

/// The wrapper waits for a word of its owner. When the owner dies, however it dies, the pipe closes: then the wrapper
/// ends the server and removes its folder. So a panic, an abort or `kill -9` of the test leaves nothing behind.
const WRAPPER: &str = r#"
"$@" >>"$CHILD_LOG" 2>&1 </dev/null &
child=$!
echo "$child"
exec 2>/dev/null
(
    read -r word
    [ "$word" = keep ] && exit
    kill -"$CHILD_END" "$child" 2>/dev/null
    while kill -0 "$child" 2>/dev/null; do sleep 0.05; done
    [ -z "$CHILD_FOLDER" ] || rm -rf "$CHILD_FOLDER"
) <&3 &
exec 3<&-
wait "$child"
"#;

/// How to start a [`Child`].
pub struct Spec<'a> {
    /// Program and arguments.
    pub command: Vec<String>,
    /// Environment to add.
    pub environment: Vec<(&'a str, String)>,
    /// Standard output and error are appended to it.
    pub log: &'a Path,
    /// Run as this user and group.
    pub user: Option<(u32, u32)>,
    /// The signal that ends it when it is dropped or the test dies.
    pub end: &'static str,
    /// Removed if the test dies without dropping the child.
    pub folder: Option<&'a Path>,
}

/// A running child process with a log. Dropping it ends it.
#[derive(Debug)]
pub struct Child {
    wrapper: process::Child,
    pid: u32,
    end: &'static str,
    log: PathBuf,
    finished: Option<ExitStatus>,
}

impl Child {
    /// Starts it.
    pub fn start(spec: &Spec<'_>) -> Self {
        let mut command = Command::new("sh");
        command
            .args(["-c", &format!("exec 3<&0 </dev/null\n{WRAPPER}"), "child"])
            .args(&spec.command)
            .envs(spec.environment.iter().map(|(name, value)| (name, value)))
            .env("CHILD_LOG", spec.log)
            .env("CHILD_END", spec.end)
            .env("CHILD_FOLDER", spec.folder.unwrap_or(Path::new("")))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .process_group(0);
        if let Some((user, group)) = spec.user {
            command.uid(user).gid(group).current_dir("/");
        }
        let mut wrapper = command.spawn().expect("sh starts");
        let mut line = String::new();
        BufReader::new(wrapper.stdout.take().expect("stdout is piped"))
            .read_line(&mut line)
            .expect("the wrapper answers");
        let pid =
            line.trim().parse().unwrap_or_else(|_| panic!("{:?} did not start: {line:?}", spec.command));
        Self { wrapper, pid, end: spec.end, log: spec.log.to_owned(), finished: None }
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Sends a signal (`KILL`, `STOP`, `CONT`, `TERM`, ...); nothing happens once it has ended.
    pub fn signal(&mut self, signal: &str) {
        if self.exited().is_none() {
            let sent = Command::new("kill").args([&format!("-{signal}"), &self.pid.to_string()]).status();
            assert!(
                sent.is_ok_and(|status| status.success()) || self.exited().is_some(),
                "kill -{signal} {}",
                self.pid
            );
        }
    }

    /// How it ended, if it has.
    pub fn exited(&mut self) -> Option<ExitStatus> {
        if self.finished.is_none() {
            self.finished = self.wrapper.try_wait().expect("the wrapper can be asked");
            if self.finished.is_some() {
                self.dismiss();
            }
        }
        self.finished
    }

    /// Sends a signal and waits until it has ended.
    pub fn stop(&mut self, signal: &str) -> ExitStatus {
        self.signal(signal);
        self.wait()
    }

    /// Waits until it has ended.
    pub fn wait(&mut self) -> ExitStatus {
        if self.finished.is_none() {
            // `wait` of std closes stdin, which to the wrapper means that its owner has died.
            let stdin = self.wrapper.stdin.take();
            self.finished = Some(self.wrapper.wait().expect("the wrapper can be waited for"));
            self.wrapper.stdin = stdin;
            self.dismiss();
        }
        self.finished.unwrap_or_else(|| ExitStatus::from_raw(0))
    }

    /// All that it has written so far.
    pub fn log(&self) -> String {
        std::fs::read(&self.log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
    }

    /// The last lines of its log.
    pub fn log_tail(&self, lines: usize) -> String {
        let log = self.log();
        let all: Vec<&str> = log.lines().collect();
        all[all.len().saturating_sub(lines)..].join("\n")
    }

    fn dismiss(&mut self) {
        if let Some(mut stdin) = self.wrapper.stdin.take() {
            // The reader may be gone already: then there is nobody to dismiss.
            drop(stdin.write_all(b"keep\n"));
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if self.exited().is_none() {
            let mut kill = Command::new("kill");
            kill.args([&format!("-{}", self.end), &self.pid.to_string()]).stderr(Stdio::null());
            drop(kill.status());
            self.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sleeper(log: &Path) -> Child {
        let command = vec!["sleep".to_owned(), "1000".to_owned()];
        Child::start(&Spec { command, environment: vec![], log, user: None, end: "KILL", folder: None })
    }

    fn alive(pid: u32) -> bool {
        Path::new(&format!("/proc/{pid}")).exists()
    }

    #[test]
    fn a_dropped_child_is_gone() {
        let folder = tempfile::tempdir().unwrap();
        let child = sleeper(&folder.path().join("log"));
        let pid = child.pid();
        assert!(alive(pid));
        drop(child);
        assert!(!alive(pid));
    }

    #[test]
    fn a_child_whose_owner_dies_is_gone_and_its_folder_too() {
        let folder = tempfile::tempdir().unwrap();
        let inner = folder.path().join("inner");
        std::fs::create_dir(&inner).unwrap();
        let command = vec!["sleep".to_owned(), "1000".to_owned()];
        let log = folder.path().join("log");
        let mut child = Child::start(&Spec {
            command,
            environment: vec![],
            log: &log,
            user: None,
            end: "KILL",
            folder: Some(&inner),
        });
        // What the kernel does to the pipe when the owner dies.
        drop(child.wrapper.stdin.take());
        for _ in 0..200 {
            if !alive(child.pid()) && !inner.exists() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(25));
        }
        panic!("alive: {}, folder: {}", alive(child.pid()), inner.exists());
    }

    #[test]
    fn a_stopped_child_says_how_it_ended_and_what_it_wrote() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        let command = ["sh", "-c", "echo hello; exit 3"].map(str::to_owned).to_vec();
        let mut child = Child::start(&Spec {
            command,
            environment: vec![],
            log: &log,
            user: None,
            end: "KILL",
            folder: None,
        });
        assert_eq!(child.wait().code(), Some(3));
        assert_eq!(child.log_tail(1), "hello");
        assert_eq!(sleeper(&log).stop("TERM").code(), Some(128 + 15));
    }
}
