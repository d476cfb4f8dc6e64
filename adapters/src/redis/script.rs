//! The scripts, and their arguments.

use ::redis::{Cmd, cmd};

/// One of the scripts. The server keeps them by a hash of their text until it restarts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Script {
    Deliver,
    Take,
    Owned,
    Marks,
    Shards,
    Route,
    Probe,
}

macro_rules! text {
    ($file:literal) => {
        concat!(include_str!("lua/common.lua"), include_str!(concat!("lua/", $file)))
    };
}

/// The scripts' texts, in the order of [`Script`].
pub(super) const TEXTS: [&str; 7] = [
    text!("deliver.lua"),
    text!("take.lua"),
    text!("owned.lua"),
    text!("marks.lua"),
    text!("shards.lua"),
    text!("route.lua"),
    text!("probe.lua"),
];

/// Keys and arguments of one call.
#[derive(Clone, Debug, Default)]
pub(super) struct Call {
    pub(super) keys: Vec<Vec<u8>>,
    pub(super) arguments: Vec<Vec<u8>>,
}

impl Call {
    pub(super) fn key(&mut self, key: impl Into<Vec<u8>>) -> &mut Self {
        self.keys.push(key.into());
        self
    }

    pub(super) fn arg(&mut self, argument: impl Into<Vec<u8>>) -> &mut Self {
        self.arguments.push(argument.into());
        self
    }

    pub(super) fn number(&mut self, number: impl ToString) -> &mut Self {
        self.arg(number.to_string())
    }

    /// The command that runs the script of that hash.
    pub(super) fn command(&self, sha: &str) -> Cmd {
        let mut command = cmd("EVALSHA");
        command.arg(sha).arg(self.keys.len());
        for part in self.keys.iter().chain(&self.arguments) {
            command.arg(part.as_slice());
        }
        command
    }
}
