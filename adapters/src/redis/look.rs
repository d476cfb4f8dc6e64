//! A look at a server from outside, beside the sink's own work: [`Look`], for drills.

use std::collections::{BTreeMap, BTreeSet};

use ::redis::{Value, cmd, pipe};

use super::{
    RedisConfig, RedisSink,
    connect::{Fault, Link},
    keys::Keys,
};
use crate::sink::SinkError;

/// Keys that one step of a scan looks at.
const STEP: usize = 1_000;

/// A connection of one's own.
pub struct Look {
    link: Link,
}

impl Look {
    /// Connects as the sink does.
    pub async fn open(config: &RedisConfig) -> Result<Self, String> {
        let sink = RedisSink::new(config.clone())
            .map_err(|misfits| misfits.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))?;
        let connected = Box::pin(sink.shared.connect()).await;
        connected.map(|(link, _)| Self { link }).map_err(|error| error.to_string())
    }

    /// Keys that begin with `prefix`, each once, until there are `most`: all that are there all the while, by scans.
    pub async fn keys(&mut self, prefix: &str, most: usize) -> Result<BTreeSet<Vec<u8>>, String> {
        let escaped: String =
            prefix.chars().flat_map(|c| if "*?[]\\".contains(c) { vec!['\\', c] } else { vec![c] }).collect();
        let (mut found, mut cursor) = (BTreeSet::new(), "0".to_owned());
        loop {
            let mut scan = cmd("SCAN");
            scan.arg(&cursor).arg("MATCH").arg(format!("{escaped}*")).arg("COUNT").arg(STEP);
            let Value::Array(answer) = self.link.command(&scan).await.map_err(said)? else {
                return Err("SCAN was answered by something else".to_owned());
            };
            let [Value::BulkString(next), Value::Array(keys)] = answer.as_slice() else {
                return Err("SCAN was answered by something else".to_owned());
            };
            found.extend(keys.iter().filter_map(|key| match key {
                Value::BulkString(key) => Some(key.clone()),
                _ => None,
            }));
            cursor = String::from_utf8_lossy(next).into_owned();
            if cursor == "0" || found.len() >= most {
                return Ok(found);
            }
        }
    }

    /// Fields and values of the hashes at `keys`, in their order.
    pub async fn hashes(&mut self, keys: &[&[u8]]) -> Result<Vec<BTreeMap<String, Vec<u8>>>, String> {
        let mut all = pipe();
        for key in keys {
            all.cmd("HGETALL").arg(*key);
        }
        self.link.hashes(&all).await.map_err(said)
    }

    /// Removes keys; answers how many there were.
    pub async fn remove(&mut self, keys: &[&[u8]]) -> Result<u64, String> {
        let mut unlink = cmd("UNLINK");
        unlink.arg(keys);
        match self.link.command(&unlink).await.map_err(said)? {
            Value::Int(count) => Ok(count.unsigned_abs()),
            _ => Err("UNLINK was answered by something else".to_owned()),
        }
    }
}

/// What all bookkeeping keys of a route begin with, and the key of the tombstones of its rows.
pub fn bookkeeping(route: &str, prefix: &str) -> [String; 2] {
    let keys = Keys::new(route, prefix);
    let front = keys.route();
    [front.trim_end_matches("route").to_owned(), keys.tombstones]
}

fn said(fault: Fault) -> String {
    match fault.not_applied() {
        SinkError::NotApplied { reason, .. } => reason,
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn bookkeeping_of_a_route_is_that_of_no_other() {
        let [front, tombstones] = super::bookkeeping("orders", "o:");
        assert_eq!((front.as_str(), tombstones.as_str()), ("oncegate:{orders}:", "oncegate:tombstones:o:"));
    }
}
