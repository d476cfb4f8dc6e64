//! A shadow prefix in Redis.

use adapters::redis::{Look, RedisConfig, bookkeeping};

use super::{Cleaned, Survey, Through, is_loopback};
use crate::drill::{
    shape::{Compared, Row},
    values::{Kind, hex},
};

/// Stands before the real prefix. It does not begin with it: who looks for the real rows does not find those of a drill.
const BEFORE: &str = "drill-of-";
/// Hashes that are asked for, or removed, at once.
const STEP: usize = 1_000;

/// A prefix of the server, and the one of the drill.
pub(crate) struct RedisShadow {
    config: RedisConfig,
    route: String,
    made: bool,
}

impl RedisShadow {
    pub(super) fn new(config: RedisConfig, route: String) -> Self {
        Self { config, route, made: false }
    }

    pub(super) fn prefix(&self) -> String {
        format!("{BEFORE}{}", self.config.prefix)
    }

    pub(super) fn through(&self) -> Option<Through> {
        let (_, host, port, _) = parts(&self.config.url)?;
        Some(Through { host, port, key: "url" })
    }

    pub(super) fn url_through(&self, port: u16) -> Option<String> {
        let (login, _, _, rest) = parts(&self.config.url)?;
        Some(format!("redis://{login}127.0.0.1:{port}{rest}"))
    }

    async fn look(&self) -> Result<Look, String> {
        Box::pin(Look::open(&self.config)).await
    }

    pub(super) async fn survey(&self) -> Result<Survey, String> {
        let mut look = self.look().await?;
        let prefix = self.prefix();
        if !look.keys(&prefix, 1).await?.is_empty() {
            return Err(format!(
                "there are keys that begin with {prefix:?}: another drill is at work, or one was killed; if none is, remove them"
            ));
        }
        let has_rows = !look.keys(&self.config.prefix, 1).await?.is_empty();
        let shown = self.config.url.rsplit('@').next().unwrap_or_default();
        let shown = shown.trim_start_matches("redis://").trim_start_matches("rediss://");
        let host = parts(&self.config.url).map(|(_, host, ..)| host).unwrap_or_default();
        Ok(Survey {
            place: format!("hashes {}* at {shown}", self.config.prefix),
            local: is_loopback(&host),
            has_rows,
            makes: vec![
                format!("hashes {prefix}*"),
                format!("keys {}*", bookkeeping(&self.route, &prefix)[0]),
            ],
        })
    }

    /// There is nothing to make before the first row.
    pub(super) fn make(&mut self) {
        self.made = true;
    }

    pub(super) async fn read(
        &self,
        columns: &[Compared],
        each: &mut (dyn FnMut(Row) -> Result<(), String> + Send),
    ) -> Result<(), String> {
        let mut look = self.look().await?;
        let keys: Vec<Vec<u8>> = look.keys(&self.prefix(), usize::MAX).await?.into_iter().collect();
        for keys in keys.chunks(STEP) {
            let keys: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
            for fields in look.hashes(&keys).await? {
                let text = |column: &Compared| {
                    let value = fields.get(&column.name)?;
                    Some(match column.kind {
                        Kind::Bytes => hex(value),
                        _ => String::from_utf8_lossy(value).into_owned(),
                    })
                };
                each(columns.iter().map(text).collect())?;
            }
        }
        Ok(())
    }

    pub(super) async fn lose_a_row(&self) -> Result<(), String> {
        let mut look = self.look().await?;
        let keys = look.keys(&self.prefix(), 1).await?;
        let first: Vec<&[u8]> = keys.iter().take(1).map(Vec::as_slice).collect();
        look.remove(&first).await.map(drop)
    }

    pub(super) async fn clean(&mut self) -> Cleaned {
        if !self.made {
            return Cleaned::default();
        }
        let mut cleaned = Cleaned::default();
        let prefix = self.prefix();
        let [ours, tombstones] = bookkeeping(&self.route, &prefix);
        let mut look = match self.look().await {
            Ok(look) => look,
            Err(fault) => {
                let all = [format!("keys {prefix}*"), format!("keys {ours}*"), format!("key {tombstones}")];
                return Cleaned {
                    left: all.iter().map(|what| format!("{what}: {fault}")).collect(),
                    ..cleaned
                };
            }
        };
        for front in [prefix, ours, tombstones] {
            match remove(&mut look, &front).await {
                Ok(count) => cleaned.gone.push(format!("{count} keys {front}*")),
                Err(fault) => cleaned.left.push(format!("keys {front}*: {fault}")),
            }
        }
        self.made = !cleaned.left.is_empty();
        cleaned
    }
}

async fn remove(look: &mut Look, front: &str) -> Result<u64, String> {
    let keys: Vec<Vec<u8>> = look.keys(front, usize::MAX).await?.into_iter().collect();
    let mut count = 0;
    for keys in keys.chunks(STEP) {
        let keys: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
        count += look.remove(&keys).await?;
    }
    Ok(count)
}

/// Login with its `@`, host, port, and the rest of a `redis://` URL. With TLS the certificate does not bear the proxy's name.
fn parts(url: &str) -> Option<(String, String, u16, String)> {
    let rest = url.strip_prefix("redis://")?;
    let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let (login, place) = match authority.rfind('@') {
        Some(at) => authority.split_at(at + 1),
        None => ("", authority),
    };
    let (host, port) = match place.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((host, port)) => (host, port.strip_prefix(':')),
        None => place.split_once(':').map_or((place, None), |(host, port)| (host, Some(port))),
    };
    let port = port.map_or(Some(6379), |port| port.parse().ok())?;
    Some((login.to_owned(), host.to_owned(), port, path.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_goes_through_the_proxy_with_its_login_and_database() {
        let through =
            |url: &str| RedisShadow::new(RedisConfig::new(url, "o:"), "r".to_owned()).url_through(9);
        assert_eq!(through("redis://me:pass@cache/3").as_deref(), Some("redis://me:pass@127.0.0.1:9/3"));
        assert_eq!(through("redis://[::1]:7").as_deref(), Some("redis://127.0.0.1:9"));
        assert_eq!(through("rediss://cache"), None);
    }
}
