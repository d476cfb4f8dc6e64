//! A shadow table in ClickHouse. What the sink keeps beside the rows is its journal, which is in the drill's own folder.

use adapters::{
    clickhouse::{ClickhouseConfig, ask},
    sink::Mode,
};
use serde_json::Value;

use super::{Cleaned, SUFFIX, Survey, Through, is_loopback};
use crate::drill::{
    shape::{Compared, Row},
    values::Kind,
};

/// Rows of one answer, about: an answer is bounded.
const PAGE: u64 = 50_000;

/// A table of the server, and the one beside it.
pub(crate) struct ClickhouseShadow {
    config: ClickhouseConfig,
    database: String,
    real: String,
    made: bool,
}

impl ClickhouseShadow {
    pub(super) fn new(config: ClickhouseConfig) -> Self {
        let (database, real) = config.table.split_once('.').unwrap_or(("default", &config.table));
        let (database, real) = (database.to_owned(), real.to_owned());
        Self { config, database, real, made: false }
    }

    pub(super) fn table(&self) -> String {
        format!("{}.{}{SUFFIX}", self.database, self.real)
    }

    /// With TLS the server's certificate does not bear the proxy's name.
    pub(super) fn through(&self) -> Option<Through> {
        let (_, host, port, _) = parts(&self.config.url)?;
        Some(Through { host, port, key: "url" })
    }

    pub(super) fn url_through(&self, port: u16) -> Option<String> {
        let (login, _, _, rest) = parts(&self.config.url)?;
        Some(format!("http://{login}127.0.0.1:{port}{rest}"))
    }

    fn quoted(&self, table: &str) -> String {
        let quote = |name: &str| format!("`{}`", name.replace('\\', "\\\\").replace('`', "\\`"));
        format!("{}.{}", quote(&self.database), quote(table))
    }

    fn shadow(&self) -> String {
        self.quoted(&format!("{}{SUFFIX}", self.real))
    }

    async fn ask(&self, sql: &str) -> Result<String, String> {
        let answer = ask(&self.config, sql).await;
        answer.map(|text| text.trim().to_owned()).map_err(|fault| format!("ClickHouse: {fault}"))
    }

    pub(super) async fn survey(&self) -> Result<Survey, String> {
        if self.ask(&format!("EXISTS TABLE {}", self.quoted(&self.real))).await? != "1" {
            return Err(format!("table {} does not exist; create it first", self.config.table));
        }
        if self.ask(&format!("EXISTS TABLE {}", self.shadow())).await? == "1" {
            return Err(format!(
                "table {} exists: another drill is at work, or one was killed; if none is, DROP TABLE {}",
                self.table(),
                self.shadow()
            ));
        }
        let rows = self.ask(&format!("SELECT 1 FROM {} LIMIT 1 FORMAT TSV", self.quoted(&self.real))).await?;
        let shown = self.config.url.rsplit('@').next().unwrap_or_default();
        let shown = shown.trim_start_matches("http://").trim_start_matches("https://");
        let host = parts(&self.config.url).map(|(_, host, ..)| host).unwrap_or_default();
        Ok(Survey {
            place: format!("table {} at {shown}", self.config.table),
            local: is_loopback(&host),
            has_rows: !rows.is_empty(),
            makes: vec![format!("table {}, like {}", self.table(), self.config.table)],
        })
    }

    pub(super) async fn make(&mut self) -> Result<(), String> {
        let ddl = format!("CREATE TABLE {} AS {}", self.shadow(), self.quoted(&self.real));
        self.ask(&ddl).await.map_err(|fault| format!("{} cannot be made ({ddl}): {fault}", self.table()))?;
        self.made = true;
        Ok(())
    }

    pub(super) async fn read(
        &self,
        columns: &[Compared],
        each: &mut (dyn FnMut(Row) -> Result<(), String> + Send),
    ) -> Result<(), String> {
        let table = self.shadow();
        // Of a ReplacingMergeTree what counts is what its merges will leave.
        let last = if self.config.mode == Mode::Insert { "" } else { " FINAL" };
        let list: Vec<String> = columns
            .iter()
            .map(|column| {
                let name = format!("`{}`", column.name.replace('\\', "\\\\").replace('`', "\\`"));
                match column.kind {
                    Kind::Timestamp(_) => format!("toString(toTimeZone({name}, 'UTC'))"),
                    _ => format!("toString({name})"),
                }
            })
            .collect();
        let list = list.join(", ");
        let count = self.ask(&format!("SELECT count() FROM {table}{last} FORMAT TSV")).await?;
        let count: u64 = count.parse().map_err(|_| format!("ClickHouse counts {count:?} rows"))?;
        let pages = count / PAGE + 1;
        for page in 0..pages {
            // Where one value is null, a hash of the values themselves would be too.
            let part = if pages == 1 {
                String::new()
            } else {
                format!(" WHERE cityHash64(toString(tuple({list}))) % {pages} = {page}")
            };
            let query = format!("SELECT {list} FROM {table}{last}{part} FORMAT JSONCompactEachRow");
            let text = self.ask(&query).await?;
            for line in text.lines() {
                let values: Vec<Value> =
                    serde_json::from_str(line).map_err(|fault| format!("ClickHouse's row: {fault}"))?;
                each(values.iter().map(|value| value.as_str().map(str::to_owned)).collect())?;
            }
        }
        Ok(())
    }

    pub(super) async fn clean(&mut self) -> Cleaned {
        let mut cleaned = Cleaned::default();
        if self.made {
            let ddl = format!("DROP TABLE {}", self.shadow());
            match self.ask(&ddl).await {
                Ok(_) => {
                    self.made = false;
                    cleaned.gone.push(format!("table {}", self.table()));
                }
                Err(fault) => cleaned.left.push(format!("table {}: {fault}; {ddl}", self.table())),
            }
        }
        cleaned
    }
}

/// Login with its `@`, host, port, and the rest of an `http://` URL.
fn parts(url: &str) -> Option<(String, String, u16, String)> {
    let rest = url.strip_prefix("http://")?;
    let (authority, path) = rest.split_at(rest.find(['/', '?']).unwrap_or(rest.len()));
    let (login, place) = match authority.rfind('@') {
        Some(at) => authority.split_at(at + 1),
        None => ("", authority),
    };
    let (host, port) = match place.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((host, port)) => (host, port.strip_prefix(':')),
        None => place.split_once(':').map_or((place, None), |(host, port)| (host, Some(port))),
    };
    let port = port.map_or(Some(80), |port| port.parse().ok())?;
    Some((login.to_owned(), host.to_owned(), port, path.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_goes_through_the_proxy_with_its_login_and_path() {
        let through = |url: &str| {
            ClickhouseShadow::new(ClickhouseConfig::new(url, "shop.orders", "journal")).url_through(9)
        };
        assert_eq!(
            through("http://me:pass@ch:8123/x?a=b").as_deref(),
            Some("http://me:pass@127.0.0.1:9/x?a=b")
        );
        assert_eq!(through("http://[::1]:8123").as_deref(), Some("http://127.0.0.1:9"));
        assert_eq!(through("https://ch:8443"), None);
        let shadow = ClickhouseShadow::new(ClickhouseConfig::new("http://h", "orders", "journal"));
        assert_eq!(shadow.table(), "default.orders_oncegate_drill");
        assert_eq!(shadow.shadow(), "`default`.`orders_oncegate_drill`");
    }
}
