//! Start-up checks: everything that would make a batch fail or a promise hollow, found at once, each with its remedy.

use std::{collections::HashMap, sync::Arc, time::Duration};

use tokio_postgres::Client;

use super::{
    Probed, Shared,
    connect::cause,
    encode::{Encoder, Target},
    tables::{Tables, quote},
    types::Kind,
};
use crate::sink::{Column, Misfit, Mode};

/// How long the whole probe may take, beside connecting.
const PROBE_TIMEOUT: Duration = Duration::from_secs(60);

/// Runs every check on a connection of its own.
pub(super) async fn run(shared: &Shared) -> Result<Probed, Vec<Misfit>> {
    let (client, _pulse) = shared.address.connect("oncegate/probe").await.map_err(|error| {
        vec![misfit(
            format!("cannot connect to Postgres: {}", cause(&error)),
            "check host, port, user, password and TLS (sslmode, sslrootcert) of the url",
        )]
    })?;
    let mut probe = Probe { shared, client, misfits: Vec::new() };
    let found = match tokio::time::timeout(PROBE_TIMEOUT, probe.check()).await {
        Ok(Ok(found)) => found,
        Ok(Err(error)) => {
            probe.push(
                format!("a start-up check failed: {}", cause(&error)),
                "mend what the server says, and start again",
            );
            None
        }
        Err(_) => {
            probe.push(
                "the start-up checks took more than 60 s",
                "see what locks the tables or loads the server",
            );
            None
        }
    };
    match found {
        Some(found) if probe.misfits.is_empty() => Ok(found),
        _ => Err(probe.misfits),
    }
}

fn misfit(what: impl Into<String>, remedy: impl Into<String>) -> Misfit {
    Misfit { what: what.into(), remedy: remedy.into() }
}

struct Probe<'a> {
    shared: &'a Shared,
    client: Client,
    misfits: Vec<Misfit>,
}

/// A table column as the catalog has it.
struct Found {
    number: i16,
    column: Column,
    /// Never filled by us: generated, or identity `always`.
    always: bool,
    kind: Result<Kind, String>,
    base: BaseType,
    deterministic: bool,
    /// Compared bytewise.
    bytewise: bool,
}

/// A type with its domains taken off.
#[derive(Clone, Debug)]
struct BaseType {
    oid: u32,
    array_oid: u32,
    name: String,
    sql: String,
    element: u32,
    enumerated: bool,
    typmod: i32,
    not_null: bool,
    has_default: bool,
}

impl Probe<'_> {
    fn push(&mut self, what: impl Into<String>, remedy: impl Into<String>) {
        self.misfits.push(misfit(what, remedy));
    }

    async fn check(&mut self) -> Result<Option<Probed>, tokio_postgres::Error> {
        let raise_commit = self.check_server().await?;
        self.check_bookkeeping().await?;
        let Some(table) = self.check_table().await? else { return Ok(None) };
        let columns = self.columns(table).await?;
        let encoder = self.choose(table, columns).await?;
        Ok(encoder.map(|encoder| Probed { encoder: Arc::new(encoder), raise_commit }))
    }

    /// Answers whether `synchronous_commit` must be raised.
    async fn check_server(&mut self) -> Result<bool, tokio_postgres::Error> {
        let row = self
            .client
            .query_one(
                "SELECT current_setting('server_version_num')::int, current_setting('fsync'), \
                 current_setting('synchronous_commit'), pg_is_in_recovery(), current_setting('transaction_read_only'), \
                 current_setting('server_encoding')",
                &[],
            )
            .await?;
        let version: i32 = row.get(0);
        if version < 120_000 {
            self.push(format!("Postgres {} is too old", version / 10_000), "use Postgres 12 or newer");
        }
        if row.get::<_, &str>(1) == "off" {
            self.push(
                "fsync is off: a crash of the server may lose what it said was written",
                "ALTER SYSTEM SET fsync = on; SELECT pg_reload_conf();",
            );
        }
        if row.get::<_, bool>(3) {
            self.push(
                "the server is a standby",
                "point the url at the primary, or add target_session_attrs=read-write",
            );
        } else if row.get::<_, &str>(4) == "on" {
            self.push("transactions are read-only", "set default_transaction_read_only = off for this user");
        }
        let encoding: &str = row.get(5);
        if encoding != "UTF8" {
            self.push(
                format!("the database's encoding is {encoding}"),
                "use a database whose encoding is UTF8",
            );
        }
        Ok(matches!(row.get(2), "off" | "local"))
    }

    /// Makes the bookkeeping tables if one is missing.
    async fn check_bookkeeping(&mut self) -> Result<(), tokio_postgres::Error> {
        let tables = &self.shared.tables;
        let schema = tables.meta_schema();
        let query = "SELECT count(*) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace \
                     WHERE n.nspname = $1 AND c.relname = ANY($2) AND c.relkind IN ('r', 'p')";
        let names: Vec<&str> = Tables::BOOKKEEPING.to_vec();
        let count: i64 = self.client.query_one(query, &[&schema, &names]).await?.get(0);
        let query = "SELECT 3 = (SELECT count(*) FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n \
                     ON n.oid = c.relnamespace WHERE n.nspname = $1 AND c.relname = 'oncegate_shards' \
                     AND a.attname IN ('partitions', 'source', 'lineage') AND NOT a.attisdropped)";
        let whole: bool = self.client.query_one(query, &[&schema]).await?.get(0);
        if count < names.len() as i64 || !whole {
            let ddl = tables.ddl();
            // Two instances that start together would trip over each other's CREATE.
            let script = format!("BEGIN; SELECT pg_advisory_xact_lock(7310579563027263333); {ddl}\nCOMMIT;");
            if let Err(error) = self.client.batch_execute(&script).await {
                self.client.batch_execute("ROLLBACK").await?;
                self.push(
                    format!(
                        "bookkeeping tables are missing{} in schema {schema:?} and cannot be made: {}",
                        if whole { "" } else { ", or a column of oncegate_shards is," },
                        cause(&error)
                    ),
                    format!("run as a user who may:\n{ddl}"),
                );
                return Ok(());
            }
        }
        let query = "SELECT c.relname, c.relpersistence::text, \
                     has_table_privilege(c.oid, 'SELECT') AND has_table_privilege(c.oid, 'INSERT') AND \
                     has_table_privilege(c.oid, 'UPDATE') AND has_table_privilege(c.oid, 'DELETE') \
                     FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace \
                     WHERE n.nspname = $1 AND c.relname = ANY($2)";
        for row in self.client.query(query, &[&schema, &names]).await? {
            let name: &str = row.get(0);
            let full = format!("{}.{name}", quote(schema));
            if row.get::<_, &str>(1) != "p" {
                self.push(
                    format!("table {full} is not permanent"),
                    format!("ALTER TABLE {full} SET LOGGED;"),
                );
            }
            if !row.get::<_, bool>(2) {
                self.push(
                    format!("this user may not read and write {full}"),
                    format!("GRANT SELECT, INSERT, UPDATE, DELETE ON {full} TO CURRENT_USER; (as its owner)"),
                );
            }
        }
        Ok(())
    }

    /// Answers with the table's oid.
    async fn check_table(&mut self) -> Result<Option<u32>, tokio_postgres::Error> {
        let Shared { schema, table, tables, .. } = self.shared;
        let query = "SELECT c.oid, c.relkind::text, c.relpersistence::text, c.relrowsecurity, \
                     has_table_privilege(c.oid, 'SELECT'), has_table_privilege(c.oid, 'INSERT'), \
                     has_table_privilege(c.oid, 'UPDATE'), has_table_privilege(c.oid, 'DELETE'), \
                     EXISTS (SELECT FROM pg_rewrite r WHERE r.ev_class = c.oid AND r.ev_type <> '1'), \
                     (SELECT array_agg(t.tgname::text) FROM pg_trigger t WHERE t.tgrelid = c.oid AND NOT t.tgisinternal \
                      AND t.tgenabled <> 'D' AND t.tgtype & 3 = 3) \
                     FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = $1 AND c.relname = $2";
        let Some(row) = self.client.query_opt(query, &[schema, table]).await? else {
            self.push(
                format!("table {} does not exist", tables.target),
                "create it, or name another in table",
            );
            return Ok(None);
        };
        let kind: &str = row.get(1);
        if !matches!(kind, "r" | "p") {
            let what = match kind {
                "v" | "m" => "a view",
                "f" => "a foreign table",
                _ => "no table",
            };
            self.push(format!("{} is {what}", tables.target), "name an ordinary or partitioned table");
            return Ok(None);
        }
        match row.get(2) {
            "u" => self.push(
                format!("table {} is unlogged: a crash of the server empties it", tables.target),
                format!("ALTER TABLE {} SET LOGGED;", tables.target),
            ),
            "t" => self.push(format!("table {} is temporary", tables.target), "name a permanent table"),
            _ => {}
        }
        if row.get::<_, bool>(8) {
            self.push(
                format!(
                    "table {} has rewrite rules: they bypass COPY and hide what was written",
                    tables.target
                ),
                "replace the rules by triggers",
            );
        }
        let needed: &[(&str, usize)] = match self.shared.config.mode {
            Mode::Insert => &[("SELECT", 4), ("INSERT", 5)],
            Mode::Upsert | Mode::UpsertIfNewer => {
                &[("SELECT", 4), ("INSERT", 5), ("UPDATE", 6), ("DELETE", 7)]
            }
        };
        for (privilege, index) in needed {
            if !row.get::<_, bool>(*index) {
                self.push(
                    format!("this user has no {privilege} on {}", tables.target),
                    format!("GRANT {privilege} ON {} TO CURRENT_USER; (as its owner)", tables.target),
                );
            }
        }
        if row.get::<_, bool>(3) {
            tracing::warn!(table = %tables.target, "the table has row security: rows that a policy hides count as refused");
        }
        if let Some(triggers) = row.get::<_, Option<Vec<String>>>(9) {
            tracing::warn!(
                table = %tables.target, triggers = %triggers.join(", "),
                "BEFORE triggers may drop or change rows: a dropped row counts as stale, and the row key must stay as it is"
            );
        }
        let oid: u32 = row.get(0);
        self.check_identity(oid).await?;
        Ok(Some(oid))
    }

    /// The marks speak of rows in one table: another table under the same name has none of them (P6).
    async fn check_identity(&mut self, oid: u32) -> Result<(), tokio_postgres::Error> {
        let Tables { targets, target_name, target, .. } = &self.shared.tables;
        if !self.misfits.is_empty() {
            return Ok(());
        }
        let insert =
            format!("INSERT INTO {targets} (target, identity) VALUES ($1, $2) ON CONFLICT DO NOTHING");
        self.client.execute(&insert, &[target_name, &i64::from(oid)]).await?;
        let query = format!("SELECT identity FROM {targets} WHERE target = $1");
        let known: i64 = self.client.query_one(&query, &[target_name]).await?.get(0);
        if known != i64::from(oid) {
            let key = target_name.replace('\'', "''");
            self.push(
                format!("table {target} is another one than before (oid {oid}, was {known}): the marks speak of rows that it may not have"),
                format!(
                    "if it holds the same rows (restored, renamed): DELETE FROM {targets} WHERE target = '{key}'; \
                     else forget what was written too: TRUNCATE {}, {}; and the same DELETE",
                    self.shared.tables.shards, self.shared.tables.marks
                ),
            );
        }
        Ok(())
    }

    async fn columns(&mut self, table: u32) -> Result<Vec<Found>, tokio_postgres::Error> {
        let query = "SELECT a.attnum, a.attname::text, a.attnotnull, a.atthasdef, a.attidentity::text, a.attgenerated::text, \
                     a.atttypid, a.atttypmod, format_type(a.atttypid, a.atttypmod), coalesce(l.collisdeterministic, true), \
                     coalesce(CASE WHEN l.collname = 'default' THEN d.datcollate ELSE l.collcollate END, l.collname::text) \
                     FROM pg_attribute a LEFT JOIN pg_collation l ON l.oid = a.attcollation \
                     CROSS JOIN (SELECT datcollate::text FROM pg_database WHERE datname = current_database()) d \
                     WHERE a.attrelid = $1 AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum";
        let mut types = HashMap::new();
        let mut found = Vec::new();
        for row in self.client.query(query, &[&table]).await? {
            let (type_oid, typmod): (u32, i32) = (row.get(6), row.get(7));
            let base = self.base_type(type_oid, typmod, &mut types).await?;
            let kind = self.kind(&base, &mut types).await?;
            let identity: &str = row.get(4);
            let generated: &str = row.get(5);
            let always = identity == "a" || !generated.is_empty();
            let collation: Option<&str> = row.get(10);
            found.push(Found {
                number: row.get(0),
                column: Column {
                    name: row.get(1),
                    type_name: row.get(8),
                    nullable: !row.get::<_, bool>(2) && !base.not_null,
                    has_default: row.get::<_, bool>(3) || !identity.is_empty() || base.has_default,
                },
                always,
                kind,
                base,
                deterministic: row.get(9),
                bytewise: matches!(collation, None | Some("C" | "POSIX" | "ucs_basic")),
            });
        }
        Ok(found)
    }

    /// Takes domains off `oid`.
    async fn base_type(
        &self,
        mut oid: u32,
        mut typmod: i32,
        types: &mut HashMap<u32, BaseType>,
    ) -> Result<BaseType, tokio_postgres::Error> {
        let (mut not_null, mut has_default) = (false, false);
        loop {
            if let Some(known) = types.get(&oid) {
                let mut base = known.clone();
                (base.typmod, base.not_null, base.has_default) = (typmod, not_null, has_default);
                return Ok(base);
            }
            let row = self
                .client
                .query_one(
                    "SELECT t.typtype::text, t.typbasetype, t.typtypmod, t.typnotnull, t.typdefault IS NOT NULL, t.typname::text, \
                     t.typarray, CASE WHEN t.typcategory = 'A' THEN t.typelem ELSE 0::oid END, format_type(t.oid, NULL) \
                     FROM pg_type t WHERE t.oid = $1",
                    &[&oid],
                )
                .await?;
            if row.get::<_, &str>(0) == "d" {
                not_null |= row.get::<_, bool>(3);
                has_default |= row.get::<_, bool>(4);
                let inner: i32 = row.get(2);
                if typmod < 0 {
                    typmod = inner;
                }
                oid = row.get(1);
                continue;
            }
            let name: String = row.get(5);
            let sql = match name.as_str() {
                // Without bounds the standard's names mean one character.
                "bpchar" => "bpchar".to_owned(),
                "_bpchar" => "bpchar[]".to_owned(),
                _ => row.get(8),
            };
            types.insert(
                oid,
                BaseType {
                    oid,
                    array_oid: row.get(6),
                    name,
                    sql,
                    element: row.get(7),
                    enumerated: row.get::<_, &str>(0) == "e",
                    typmod: -1,
                    not_null: false,
                    has_default: false,
                },
            );
        }
    }

    /// The kind of a base type, or why there is none.
    async fn kind(
        &self,
        base: &BaseType,
        types: &mut HashMap<u32, BaseType>,
    ) -> Result<Result<Kind, String>, tokio_postgres::Error> {
        if base.enumerated {
            let query = "SELECT coalesce(array_agg(enumlabel::text ORDER BY enumsortorder), '{}') FROM pg_enum WHERE enumtypid = $1";
            return Ok(Ok(Kind::Enum(self.client.query_one(query, &[&base.oid]).await?.get(0))));
        }
        if base.element != 0 {
            let element = self.base_type(base.element, base.typmod, types).await?;
            let kind = Box::pin(self.kind(&element, types)).await?;
            // The array's own element type goes into the value, domains included.
            return Ok(kind.map(|kind| Kind::Array(Box::new(kind), base.element)));
        }
        Ok(Kind::scalar(&base.name, base.typmod).ok_or_else(|| base.sql.clone()))
    }

    /// Picks the route's columns and checks row key, version and what is left out.
    async fn choose(
        &mut self,
        table: u32,
        found: Vec<Found>,
    ) -> Result<Option<Encoder>, tokio_postgres::Error> {
        let target = self.shared.tables.target.clone();
        let config = self.shared.config.clone();
        let names: Vec<String> = match &config.columns {
            Some(names) => names.clone(),
            None => {
                found.iter().filter(|found| !found.always).map(|found| found.column.name.clone()).collect()
            }
        };
        let mut chosen: Vec<&Found> = Vec::new();
        for name in &names {
            let Some(column) = found.iter().find(|found| found.column.name == *name) else {
                let there: Vec<&str> = found.iter().map(|found| found.column.name.as_str()).collect();
                self.push(
                    format!("table {target} has no column {name:?}"),
                    format!(
                        "use one of {}, or ALTER TABLE {target} ADD COLUMN {} ..",
                        there.join(", "),
                        quote(name)
                    ),
                );
                continue;
            };
            if chosen.iter().any(|other| other.number == column.number) {
                self.push(format!("column {name:?} is named twice"), "name it once in columns");
            } else if column.always {
                self.push(
                    format!("column {name:?} of {target} is always generated by the server"),
                    "leave it out of columns, or make it GENERATED BY DEFAULT",
                );
            } else {
                chosen.push(column);
            }
        }
        if chosen.is_empty() {
            self.push(format!("no column of {target} can be filled"), "name some in columns");
        }
        for column in &chosen {
            if let Err(type_name) = &column.kind {
                self.push(
                    format!("column {:?} of {target} has type {type_name}, which has no exact form from JSON here", column.column.name),
                    "leave it out of columns (it then needs a default or must be nullable), or use text or jsonb",
                );
            }
        }
        for left_out in
            found.iter().filter(|found| !chosen.iter().any(|column| column.number == found.number))
        {
            let Column { name, nullable, has_default, .. } = &left_out.column;
            if !nullable && !has_default && !names.contains(name) {
                self.push(
                    format!(
                        "column {name:?} of {target} is not null, has no default, and is not among columns"
                    ),
                    format!(
                        "add it to columns, or ALTER TABLE {target} ALTER COLUMN {} SET DEFAULT ..;",
                        quote(name)
                    ),
                );
            }
        }
        if chosen.iter().filter(|column| column.column.has_default).count() > 64 {
            self.push(
                format!("more than 64 columns of {target} have defaults"),
                "name in columns those that records fill",
            );
        }
        let row_key = self.check_row_key(table, &chosen, &config.row_key).await?;
        let version = config.version.as_deref().and_then(|version| self.check_version(&chosen, version));
        if !self.misfits.is_empty() {
            return Ok(None);
        }
        let targets = chosen
            .iter()
            .filter_map(|found| {
                Some(Target {
                    column: found.column.clone(),
                    kind: found.kind.clone().ok()?,
                    array_oid: found.base.array_oid,
                    element_oid: found.base.oid,
                    base_type: found.base.sql.clone(),
                })
            })
            .collect();
        Ok(Some(Encoder::new(targets, row_key, version)))
    }

    /// Answers with the indices of the row key columns among `chosen`.
    async fn check_row_key(
        &mut self,
        table: u32,
        chosen: &[&Found],
        row_key: &[String],
    ) -> Result<Vec<usize>, tokio_postgres::Error> {
        let target = self.shared.tables.target.clone();
        let mut indices = Vec::new();
        for name in row_key {
            let Some(index) = chosen.iter().position(|found| found.column.name == *name) else {
                self.push(
                    format!("row_key column {name:?} is not among the columns"),
                    "add it to columns, or mend row_key",
                );
                continue;
            };
            let Found { column, kind, base, deterministic, .. } = chosen[index];
            let comparable = kind.as_ref().is_ok_and(Kind::can_be_row_key) && base.name != "citext";
            if kind.is_ok() && !comparable {
                self.push(
                    format!(
                        "row_key column {name:?} has type {}, where equal values may differ in their bytes",
                        column.type_name
                    ),
                    "use an integer, numeric, text, uuid, date, time or timestamp column",
                );
            }
            if !deterministic {
                self.push(
                    format!("row_key column {name:?} has a nondeterministic collation: unequal texts may be equal rows"),
                    format!("ALTER TABLE {target} ALTER COLUMN {} TYPE {} COLLATE \"C\";", quote(name), column.type_name),
                );
            }
            if column.nullable {
                self.push(
                    format!("row_key column {name:?} may be null, and nulls are never equal"),
                    format!("ALTER TABLE {target} ALTER COLUMN {} SET NOT NULL;", quote(name)),
                );
            }
            if indices.contains(&index) {
                self.push(format!("row_key names column {name:?} twice"), "name it once");
            }
            indices.push(index);
        }
        if row_key.is_empty() || indices.len() < row_key.len() {
            return Ok(indices);
        }
        let query = "SELECT i.indexrelid::regclass::text, i.indisvalid AND i.indisready AND i.indimmediate AND i.indpred IS NULL \
                     AND i.indexprs IS NULL, (SELECT array_agg(k ORDER BY k) FROM unnest(i.indkey[0:i.indnkeyatts - 1]) AS k) \
                     FROM pg_index i WHERE i.indrelid = $1 AND i.indisunique";
        let mut wanted: Vec<i16> = indices.iter().map(|&index| chosen[index].number).collect();
        wanted.sort_unstable();
        let mut fits = false;
        let mut others = Vec::new();
        for row in self.client.query(query, &[&table]).await? {
            let columns: Option<Vec<i16>> = row.get(2);
            let same = columns.as_ref() == Some(&wanted);
            if same && row.get::<_, bool>(1) {
                fits = true;
            } else {
                others.push(row.get::<_, String>(0));
            }
        }
        if !fits {
            let columns: Vec<String> = row_key.iter().map(|name| quote(name)).collect();
            self.push(
                format!("no unique index of {target} is exactly on the row key ({}); partial, deferrable and invalid ones do not count", columns.join(", ")),
                format!("CREATE UNIQUE INDEX ON {target} ({});", columns.join(", ")),
            );
        } else if !others.is_empty() && self.shared.config.mode != Mode::Insert {
            tracing::warn!(%target, indexes = %others.join(", "), "rows that break another unique index than the row key's are refused");
        }
        Ok(indices)
    }

    fn check_version(&mut self, chosen: &[&Found], version: &str) -> Option<usize> {
        let Some(index) = chosen.iter().position(|found| found.column.name == version) else {
            self.push(
                format!("version column {version:?} is not among the columns"),
                "add it to columns, or mend version",
            );
            return None;
        };
        let Found { column, kind, base, bytewise, .. } = chosen[index];
        let Ok(kind) = kind else { return None };
        if !kind.can_be_version() || base.name == "citext" {
            self.push(
                format!(
                    "version column {version:?} has type {}, which has no order to compare by",
                    column.type_name
                ),
                "use an integer, numeric, date, timestamp, or text with collation \"C\"",
            );
        } else if matches!(kind, Kind::Text(_)) && !bytewise {
            self.push(
                format!("version column {version:?} is text whose collation does not compare bytewise"),
                format!(
                    "ALTER TABLE {} ALTER COLUMN {} TYPE {} COLLATE \"C\";",
                    self.shared.tables.target,
                    quote(version),
                    column.type_name
                ),
            );
        }
        if self.shared.config.row_key.iter().any(|name| name == version) {
            self.push(
                format!("version column {version:?} is part of the row key"),
                "use a column that changes",
            );
        }
        Some(index)
    }
}
