//! A shadow table in Postgres.

use std::time::Duration;

use adapters::postgres::{PostgresConfig, connect};
use futures_util::TryStreamExt;
use tokio_postgres::{Client, types::ToSql};

use super::{Cleaned, SUFFIX, Survey, Through, is_loopback};
use crate::drill::shape::Row;

/// Bookkeeping tables, and what of a drill is in them: `$1` is the route, `$2` the target.
const BOOKKEEPING: [(&str, &str); 6] = [
    ("oncegate_routes", "name = $1 OR $2 = ''"),
    ("oncegate_shards", "route = $1 OR $2 = ''"),
    ("oncegate_marks", "route = $1 OR $2 = ''"),
    ("oncegate_dead_letters", "route = $1 OR $2 = ''"),
    ("oncegate_tombstones", "route = $1 OR target = $2"),
    ("oncegate_targets", "target = $2 OR $1 = ''"),
];

/// The longest name that Postgres keeps, bytes.
const MAX_NAME: usize = 63;

/// A table of the server, and the one beside it.
pub(crate) struct PostgresShadow {
    config: PostgresConfig,
    route: String,
    schema: String,
    real: String,
    shadow: String,
    meta: String,
    /// Bookkeeping tables that were there before.
    before: Vec<String>,
    made: bool,
}

impl PostgresShadow {
    pub(super) fn new(config: PostgresConfig, route: String) -> Self {
        let (schema, real) = config.table.split_once('.').unwrap_or(("public", &config.table));
        let mut kept = real;
        while kept.len() + SUFFIX.len() > MAX_NAME {
            kept = &kept[..kept.len() - kept.chars().next_back().map_or(1, char::len_utf8)];
        }
        let (schema, real, shadow) = (schema.to_owned(), real.to_owned(), format!("{kept}{SUFFIX}"));
        let meta = config.meta_schema.clone().unwrap_or_else(|| schema.clone());
        Self { config, route, schema, real, shadow, meta, before: Vec::new(), made: false }
    }

    pub(super) fn table(&self) -> String {
        format!("{}.{}", self.schema, self.shadow)
    }

    pub(super) fn through(&self) -> Option<Through> {
        let (host, port) = endpoint(&self.config.url)?;
        Some(Through { host, port, key: "url" })
    }

    pub(super) fn url_through(&self, port: u16) -> Option<String> {
        through(&self.config.url, port)
    }

    async fn client(&self) -> Result<Client, String> {
        let client = connect(&self.config, "oncegate/drill").await;
        let client = client.map_err(|fault| format!("cannot connect to Postgres: {fault}"))?;
        Ok(client)
    }

    /// As [`Self::client`], within a transaction. Nothing is set for the session: behind a pooler another program may have it next.
    async fn transaction(&self) -> Result<Client, String> {
        let client = self.client().await?;
        client.batch_execute(&format!("BEGIN; {SETTINGS}")).await.map_err(|fault| text(&fault))?;
        Ok(client)
    }

    async fn bookkeeping(&self, client: &Client) -> Result<Vec<String>, String> {
        let names: Vec<&str> = BOOKKEEPING.iter().map(|(name, _)| *name).collect();
        let query = "SELECT c.relname::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace \
                     WHERE n.nspname = $1 AND c.relname = ANY($2) AND c.relkind IN ('r', 'p')";
        let rows = client.query(query, &[&self.meta, &names]).await.map_err(|fault| text(&fault))?;
        Ok(rows.iter().map(|row| row.get(0)).collect())
    }

    pub(super) async fn survey(&mut self) -> Result<Survey, String> {
        let client = self.transaction().await?;
        let exists = async |name: &str| {
            let query = "SELECT EXISTS (SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace \
                         WHERE n.nspname = $1 AND c.relname = $2)";
            let row = client.query_one(query, &[&self.schema, &name]).await;
            row.map(|row| row.get::<_, bool>(0)).map_err(|fault| text(&fault))
        };
        if !exists(&self.real).await? {
            return Err(format!("table {}.{} does not exist; create it first", self.schema, self.real));
        }
        if exists(&self.shadow).await? {
            return Err(format!(
                "table {} exists: another drill is at work, or one was killed; if none is, DROP TABLE {}",
                self.table(),
                quoted(&self.schema, &self.shadow)
            ));
        }
        let query = format!("SELECT EXISTS (SELECT FROM {})", quoted(&self.schema, &self.real));
        let row = client.query_one(&query, &[]).await.map_err(|fault| text(&fault))?;
        let has_rows: bool = row.get(0);
        self.before = self.bookkeeping(&client).await?;
        let mut makes = vec![format!("table {}, like {}.{}", self.table(), self.schema, self.real)];
        makes.push(if self.before.len() == BOOKKEEPING.len() {
            format!("rows of a route {} in the tables {}.oncegate_*", self.route, self.meta)
        } else {
            format!("the bookkeeping tables {}.oncegate_* that are missing", self.meta)
        });
        let endpoint = endpoint(&self.config.url);
        let local = match &endpoint {
            Some((host, _)) => is_loopback(host),
            None => !self.config.url.contains(',') && is_socket(&self.config.url),
        };
        let at = endpoint.map_or_else(
            || if local { "a socket of this host".to_owned() } else { "several hosts".to_owned() },
            |(host, port)| format!("{host}:{port}"),
        );
        let place = format!("table {}.{} at {at}", self.schema, self.real);
        Ok(Survey { place, local, has_rows, makes })
    }

    pub(super) async fn make(&mut self) -> Result<(), String> {
        let client = self.transaction().await?;
        let (real, shadow) = (quoted(&self.schema, &self.real), quoted(&self.schema, &self.shadow));
        let ddl = format!("CREATE TABLE {shadow} (LIKE {real} INCLUDING ALL)");
        client
            .batch_execute(&ddl)
            .await
            .map_err(|fault| format!("{} cannot be made ({ddl}): {}", self.table(), text(&fault)))?;
        // Its answer may be lost, or not be waited for: then it may be there.
        self.made = true;
        client
            .batch_execute("COMMIT")
            .await
            .map_err(|fault| format!("{} may have been made ({ddl}): {}", self.table(), text(&fault)))?;
        Ok(())
    }

    pub(super) async fn read(
        &self,
        columns: &[&str],
        each: &mut (dyn FnMut(Row) -> Result<(), String> + Send),
    ) -> Result<(), String> {
        let client = self.transaction().await?;
        let list: Vec<String> = columns.iter().map(|name| format!("{}::text", quote(name))).collect();
        let query = format!("SELECT {} FROM {}", list.join(", "), quoted(&self.schema, &self.shadow));
        let none: [&str; 0] = [];
        let rows = client.query_raw(&query, none).await.map_err(|fault| text(&fault))?;
        let mut rows = std::pin::pin!(rows);
        while let Some(row) = rows.try_next().await.map_err(|fault| text(&fault))? {
            each((0..columns.len()).map(|at| row.get(at)).collect())?;
        }
        Ok(())
    }

    pub(super) async fn lose_a_row(&self) -> Result<(), String> {
        let client = self.client().await?;
        let table = quoted(&self.schema, &self.shadow);
        let query = format!("DELETE FROM {table} WHERE ctid = (SELECT min(ctid::text)::tid FROM {table})");
        run(&client, &query, &[]).await.map(drop)
    }

    pub(super) async fn clean(&mut self) -> Cleaned {
        let mut cleaned = Cleaned::default();
        let shadow = quoted(&self.schema, &self.shadow);
        let client = match self.client().await {
            Ok(client) => client,
            Err(fault) => {
                if self.made {
                    cleaned.left.push(format!("table {}: {fault}; DROP TABLE {shadow};", self.table()));
                }
                cleaned.left.push(format!(
                    "rows of route {} in {}.oncegate_*: {fault}; delete those whose route (or name) is that",
                    self.route, self.meta
                ));
                return cleaned;
            }
        };
        if self.made {
            match drop_table(&client, &shadow).await {
                Ok(()) => {
                    self.made = false;
                    cleaned.gone.push(format!("table {}", self.table()));
                }
                Err(fault) => {
                    cleaned.left.push(format!("table {}: {fault}; DROP TABLE {shadow};", self.table()))
                }
            }
        }
        let now = match self.bookkeeping(&client).await {
            Ok(now) => now,
            Err(fault) => {
                cleaned
                    .left
                    .push(format!("rows of route {} in {}.oncegate_*: {fault}", self.route, self.meta));
                return cleaned;
            }
        };
        let mut rows = 0;
        for (name, which) in BOOKKEEPING.iter().filter(|(name, _)| now.iter().any(|now| now == name)) {
            let table = quoted(&self.meta, name);
            let query = format!("DELETE FROM {table} WHERE {which}");
            match run(&client, &query, &[&self.route, &self.table()]).await {
                Ok(count) => rows += count,
                Err(fault) => cleaned.left.push(format!("rows of route {} in {table}: {fault}", self.route)),
            }
            // It is never dropped: a gateway that was started meanwhile may be at home in it, with or without rows.
            if !self.before.iter().any(|before| before == name) {
                cleaned
                    .notes
                    .push(format!("table {}.{name}, which gateways use, was made and stays", self.meta));
            }
        }
        cleaned.gone.push(format!("{rows} rows of route {} in {}.oncegate_*", self.route, self.meta));
        cleaned
    }
}

/// What a drill's own transactions go by.
const SETTINGS: &str = "SET LOCAL timezone = 'UTC'; SET LOCAL datestyle = 'ISO'; SET LOCAL bytea_output = 'hex'; \
                        SET LOCAL extra_float_digits = 1; SET LOCAL lock_timeout = '10s'; SET LOCAL statement_timeout = 0";

/// One statement in a transaction of its own; answers with how many rows it touched.
async fn run(client: &Client, query: &str, params: &[&(dyn ToSql + Sync)]) -> Result<u64, String> {
    let done = async {
        client.batch_execute(&format!("BEGIN; {SETTINGS}")).await?;
        let count = client.execute(query, params).await?;
        client.batch_execute("COMMIT").await?;
        Ok(count)
    };
    match done.await {
        Ok(count) => Ok(count),
        Err(fault) => {
            // The transaction has failed, if it is still there.
            drop(client.batch_execute("ROLLBACK").await);
            Err(text(&fault))
        }
    }
}

/// The backend of a process that was killed may hold the table for a moment.
async fn drop_table(client: &Client, table: &str) -> Result<(), String> {
    let mut said = String::new();
    for _ in 0..3 {
        match run(client, &format!("DROP TABLE IF EXISTS {table}"), &[]).await {
            Ok(_) => return Ok(()),
            Err(fault) => said = fault,
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    Err(said)
}

fn text(fault: &tokio_postgres::Error) -> String {
    fault.as_db_error().map_or_else(|| fault.to_string(), ToString::to_string)
}

fn quote(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

fn quoted(schema: &str, table: &str) -> String {
    format!("{}.{}", quote(schema), quote(table))
}

fn is_socket(url: &str) -> bool {
    authority(url).map_or_else(
        || url.split(' ').any(|word| word.starts_with("host=/")),
        |(from, until)| {
            url[from..until].is_empty() || url[from..until].to_ascii_lowercase().starts_with("%2f")
        },
    )
}

/// Where host and port of a URL stand; none for a `key=value` list.
fn authority(url: &str) -> Option<(usize, usize)> {
    let begin = url.find("://")? + 3;
    if !(url.starts_with("postgres://") || url.starts_with("postgresql://")) {
        return None;
    }
    let end = url[begin..].find(['/', '?']).map_or(url.len(), |end| begin + end);
    let from = url[begin..end].rfind('@').map_or(begin, |at| begin + at + 1);
    Some((from, end))
}

/// `host:port` in two; without port 5432.
fn host_and_port(text: &str) -> Option<(String, u16)> {
    if text.is_empty() || text.contains([',', '%', '/']) {
        return None;
    }
    let (host, port) = match text.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((host, port)) => (host, port.strip_prefix(':')),
        None => text.split_once(':').map_or((text, None), |(host, port)| (host, Some(port))),
    };
    let port = port.filter(|port| !port.is_empty()).map_or(Some(5432), |port| port.parse().ok())?;
    Some((host.to_owned(), port))
}

/// Host and port, if there is one of each.
fn endpoint(url: &str) -> Option<(String, u16)> {
    if let Some((from, until)) = authority(url) {
        let elsewhere = ["host=", "hostaddr=", "port="].iter().any(|key| url[until..].contains(key));
        return if elsewhere { None } else { host_and_port(&url[from..until]) };
    }
    let value = |key: &str| url.split(' ').find_map(|word| word.strip_prefix(key)?.strip_prefix('='));
    // Quoted values may hold anything.
    if url.contains('\'') || value("hostaddr").is_some() {
        return None;
    }
    host_and_port(&format!("{}:{}", value("host")?, value("port").unwrap_or_default()))
}

/// The same address over a port of loopback; the server's name stays, for its certificate.
fn through(url: &str, port: u16) -> Option<String> {
    let (host, _) = endpoint(url)?;
    match authority(url) {
        Some((from, until)) => {
            let shown = if host.contains(':') { format!("[{host}]") } else { host };
            let sign = if url[until..].contains('?') { '&' } else { '?' };
            Some(format!("{}{shown}:{port}{}{sign}hostaddr=127.0.0.1", &url[..from], &url[until..]))
        }
        None => {
            let kept: Vec<&str> = url.split(' ').filter(|word| !word.starts_with("port=")).collect();
            Some(format!("{} port={port} hostaddr=127.0.0.1", kept.join(" ")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_goes_through_the_proxy_under_its_own_name() {
        let cases = [
            (
                "postgres://me:p%40ss@db.example:5433/shop?sslmode=verify-full",
                Some("postgres://me:p%40ss@db.example:9/shop?sslmode=verify-full&hostaddr=127.0.0.1"),
            ),
            ("postgres://localhost", Some("postgres://localhost:9?hostaddr=127.0.0.1")),
            ("postgresql://me@[::1]:5432/shop", Some("postgresql://me@[::1]:9/shop?hostaddr=127.0.0.1")),
            ("postgres://a:1,b:2/shop", None),
            ("postgres://%2Fvar%2Frun/shop", None),
            ("postgres:///shop?host=/var/run", None),
            (
                "host=db user=me port=5433 dbname=shop",
                Some("host=db user=me dbname=shop port=9 hostaddr=127.0.0.1"),
            ),
            ("host=/var/run dbname=shop", None),
        ];
        for (url, expected) in cases {
            assert_eq!(through(url, 9).as_deref(), expected, "{url}");
            if let Some(through) = through(url, 9) {
                let config: tokio_postgres::Config =
                    through.replace("sslmode=verify-full&", "").parse().unwrap();
                assert_eq!(config.get_ports(), [9], "{through}");
                assert_eq!(config.get_hostaddrs(), [std::net::IpAddr::from([127, 0, 0, 1])]);
                assert_eq!(config.get_hosts().len(), 1);
            }
        }
        assert_eq!(endpoint("postgres://me@db/shop"), Some(("db".to_owned(), 5432)));
        assert_eq!(endpoint("host=db port=7"), Some(("db".to_owned(), 7)));
    }

    #[test]
    fn only_addresses_of_this_host_are_local() {
        for host in ["localhost", "127.0.0.1", "127.1.2.3", "::1"] {
            assert!(is_loopback(host), "{host}");
        }
        for host in ["db.example", "10.0.0.1", "localhost.example"] {
            assert!(!is_loopback(host), "{host}");
        }
        assert!(is_socket("postgres://%2Fvar%2Frun/shop") && is_socket("host=/var/run dbname=shop"));
        assert!(!is_socket("host=db dbname=shop") && !is_socket("postgres://db/shop"));
    }

    #[test]
    fn a_shadows_name_fits() {
        let long = "ä".repeat(31);
        let config = PostgresConfig::new("postgres://localhost", format!("shop.{long}"));
        let shadow = PostgresShadow::new(config, "r".to_owned());
        assert!(shadow.shadow.len() <= MAX_NAME && shadow.shadow.ends_with(SUFFIX), "{}", shadow.shadow);
        assert_eq!(shadow.meta, "shop");
    }
}
