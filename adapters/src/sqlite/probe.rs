//! Start-up checks, all misfits in one list, and how the target table looks.

use std::time::Duration;

use rusqlite::{Connection, OptionalExtension, TransactionBehavior};

use super::{
    SqliteConfig,
    schema::{self, OpenError, quoted},
};
use crate::sink::{Column, Misfit, Mode};

/// What a column takes: from its declared type, by SQLite's rules of affinity and by custom.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Integer,
    Real,
    Text,
    Blob,
    /// `NUMERIC`, `DECIMAL(p, s)`: an integer, or a double where that is exact.
    Numeric,
    Boolean,
    /// `numeric`: the declared type gives the column numeric affinity.
    Json {
        numeric: bool,
    },
    Date,
    Time,
    Timestamp,
    Uuid,
    /// No declared type, or `ANY` of a strict table.
    Any,
}

impl Kind {
    pub(super) fn of(declared: &str, strict: bool) -> Self {
        let upper = declared.trim().to_ascii_uppercase();
        if strict {
            return match upper.as_str() {
                "INT" | "INTEGER" => Self::Integer,
                "REAL" => Self::Real,
                "BLOB" => Self::Blob,
                "ANY" => Self::Any,
                _ => Self::Text,
            };
        }
        let base = upper.split('(').next().unwrap_or_default().trim_end();
        let affinity = Self::affinity(&upper);
        match base {
            _ if base.starts_with("JSON") => {
                Self::Json { numeric: affinity != Self::Text && affinity != Self::Blob }
            }
            "BOOLEAN" | "BOOL" => Self::Boolean,
            "DATE" => Self::Date,
            "TIME" => Self::Time,
            "DATETIME" => Self::Timestamp,
            _ if base.starts_with("TIMESTAMP") && affinity == Self::Numeric => Self::Timestamp,
            "UUID" => Self::Uuid,
            _ => affinity,
        }
    }

    /// <https://sqlite.org/datatype3.html>, 3.1.
    fn affinity(upper: &str) -> Self {
        let has = |part: &str| upper.contains(part);
        if has("INT") {
            Self::Integer
        } else if has("CHAR") || has("CLOB") || has("TEXT") {
            Self::Text
        } else if has("BLOB") {
            Self::Blob
        } else if upper.is_empty() {
            Self::Any
        } else if has("REAL") || has("FLOA") || has("DOUB") {
            Self::Real
        } else {
            Self::Numeric
        }
    }
}

/// How the row key's index compares text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Collation {
    Binary,
    NoCase,
    RTrim,
}

impl Collation {
    fn of(name: &str) -> Option<Self> {
        match name.to_ascii_uppercase().as_str() {
            "BINARY" => Some(Self::Binary),
            "NOCASE" => Some(Self::NoCase),
            "RTRIM" => Some(Self::RTrim),
            _ => None,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Binary => "BINARY",
            Self::NoCase => "NOCASE",
            Self::RTrim => "RTRIM",
        }
    }
}

/// One column of the row key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct KeyColumn {
    /// Index into [`Layout::columns`].
    pub(super) column: usize,
    pub(super) collation: Collation,
    /// Name and collation, quoted.
    pub(super) sql: String,
}

/// The target table as rows are written to it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Layout {
    pub(super) table: String,
    pub(super) mode: Mode,
    /// Those that records fill, in the order of their values.
    pub(super) columns: Vec<Column>,
    /// One a column.
    pub(super) kinds: Vec<Kind>,
    pub(super) key: Vec<KeyColumn>,
    /// Index into `columns`; only in `UpsertIfNewer`.
    pub(super) version: Option<usize>,
    /// Rows may be written in row key order. Not so where a row of the table refers to another one.
    pub(super) sorted: bool,
}

impl Layout {
    /// Bytes that say which columns a row has.
    pub(super) fn bitmap_bytes(&self) -> usize {
        self.columns.len().div_ceil(8)
    }

    /// Reads the table, or says all that does not fit.
    pub(super) fn read(connection: &Connection, config: &SqliteConfig) -> Result<Self, Vec<Misfit>> {
        let mut misfits = config_misfits(config);
        match Table::read(connection, &config.table) {
            Ok(Some(table)) => table.fit(config, misfits),
            Ok(None) => {
                misfits.push(missing_table(config));
                Err(misfits)
            }
            Err(error) => {
                misfits.push(unreadable(config, &error));
                Err(misfits)
            }
        }
    }
}

fn misfit(what: impl Into<String>, remedy: impl Into<String>) -> Misfit {
    Misfit { what: what.into(), remedy: remedy.into() }
}

fn unreadable(config: &SqliteConfig, error: &rusqlite::Error) -> Misfit {
    misfit(
        format!("{}: cannot be read: {}", config.path.display(), schema::text(error)),
        "check that it is a SQLite file, not damaged, not locked by another process, and may be read and written",
    )
}

fn missing_table(config: &SqliteConfig) -> Misfit {
    let names = config.columns.iter().flatten().chain(&config.row_key).chain(&config.version);
    let mut columns: Vec<&str> = Vec::new();
    for name in names {
        if !columns.contains(&name.as_str()) {
            columns.push(name);
        }
    }
    let mut parts: Vec<String> = columns.iter().map(|name| format!("{} TEXT", quoted(name))).collect();
    if !config.row_key.is_empty() {
        parts.push(format!("PRIMARY KEY ({})", list(&config.row_key)));
    }
    if parts.is_empty() {
        parts.push("..".to_owned());
    }
    misfit(
        format!("{}: there is no table {:?}", config.path.display(), config.table),
        format!(
            "make it, with the right types: CREATE TABLE {} ({})",
            quoted(&config.table),
            parts.join(", ")
        ),
    )
}

fn list(names: &[String]) -> String {
    names.iter().map(|name| quoted(name)).collect::<Vec<_>>().join(", ")
}

/// What the configuration alone shows.
fn config_misfits(config: &SqliteConfig) -> Vec<Misfit> {
    let mut misfits = Vec::new();
    let path = config.path.as_os_str();
    if path.is_empty() || path == ":memory:" {
        misfits.push(misfit(
            format!("path {:?} names no file", path.to_string_lossy()),
            "name a file: rows and marks must outlive the process",
        ));
    }
    if config.table.to_ascii_lowercase().starts_with("oncegate_")
        && schema::TABLES.iter().any(|(name, _)| name.eq_ignore_ascii_case(&config.table))
    {
        misfits
            .push(misfit(format!("table {:?} is a bookkeeping table", config.table), "name another table"));
    }
    if config.row_key.is_empty() && config.mode != Mode::Insert {
        misfits.push(misfit(
            format!("mode {} needs a row key", mode_name(config.mode)),
            "set row_key to the columns of a unique index",
        ));
    }
    if config.version.is_none() && config.mode == Mode::UpsertIfNewer {
        misfits.push(misfit("mode upsert-if-newer needs a version column", "set version"));
    }
    if config.busy_timeout > Duration::from_secs(3600) {
        misfits.push(misfit(
            format!("busy_timeout is {} s, above 3600 s", config.busy_timeout.as_secs()),
            "lower it",
        ));
    }
    for (index, name) in config.row_key.iter().enumerate() {
        if config.row_key[..index].contains(name) {
            misfits.push(misfit(format!("row_key names {name:?} twice"), "name it once"));
        }
    }
    let columns = config.columns.as_deref().unwrap_or_default();
    for (index, name) in columns.iter().enumerate() {
        if columns[..index].contains(name) {
            misfits.push(misfit(format!("columns name {name:?} twice"), "name it once"));
        }
    }
    misfits
}

fn mode_name(mode: Mode) -> &'static str {
    match mode {
        Mode::Insert => "insert",
        Mode::Upsert => "upsert",
        Mode::UpsertIfNewer => "upsert-if-newer",
    }
}

/// The table as SQLite describes it.
struct Table {
    name: String,
    /// `table`, `view`, `virtual`, `shadow`.
    kind: String,
    without_rowid: bool,
    strict: bool,
    columns: Vec<TableColumn>,
    uniques: Vec<Unique>,
    self_reference: bool,
    deferred_by: Vec<String>,
}

struct TableColumn {
    name: String,
    declared: String,
    not_null: bool,
    has_default: bool,
    in_primary_key: bool,
    generated: bool,
}

/// A unique index that names rows: not partial, columns only.
struct Unique {
    /// (column, collation)
    columns: Vec<(String, String)>,
    /// The rowid itself.
    rowid: bool,
}

impl Table {
    fn read(connection: &Connection, name: &str) -> rusqlite::Result<Option<Self>> {
        let about = connection
            .query_row(
                "SELECT name, type, wr, strict FROM pragma_table_list WHERE schema = 'main' AND name = ?1 COLLATE NOCASE",
                [name],
                |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?)),
            )
            .optional()?;
        let Some((name, kind, without_rowid, strict)): Option<(String, String, bool, bool)> = about else {
            return Ok(None);
        };
        let columns = connection
            .prepare("SELECT name, type, \"notnull\", dflt_value IS NOT NULL, pk > 0, hidden > 1 FROM pragma_table_xinfo(?1) WHERE hidden <> 1")?
            .query_map([&name], |row| {
                Ok(TableColumn {
                    name: row.get(0)?,
                    declared: row.get(1)?,
                    not_null: row.get(2)?,
                    has_default: row.get(3)?,
                    in_primary_key: row.get(4)?,
                    generated: row.get(5)?,
                })
            })?
            .collect::<rusqlite::Result<Vec<_>>>()?;
        let uniques = read_uniques(connection, &name, &columns, without_rowid)?;
        let self_reference = connection.query_row(
            "SELECT count(*) > 0 FROM pragma_foreign_key_list(?1) WHERE \"table\" = ?1 COLLATE NOCASE",
            [&name],
            |row| row.get(0),
        )?;
        let deferred_by = connection
            .prepare(
                "SELECT s.name, s.sql FROM sqlite_schema AS s WHERE s.type = 'table' AND s.sql IS NOT NULL
                 AND ((s.name = ?1 COLLATE NOCASE AND EXISTS (SELECT 1 FROM pragma_foreign_key_list(s.name)))
                   OR EXISTS (SELECT 1 FROM pragma_foreign_key_list(s.name) AS f WHERE f.\"table\" = ?1 COLLATE NOCASE))",
            )?
            .query_map([&name], |row| Ok((row.get::<_, String>(0)?, row.get::<_, String>(1)?)))?
            .filter_map(|found| match found {
                Ok((table, sql)) => initially_deferred(&sql).then_some(Ok(table)),
                Err(error) => Some(Err(error)),
            })
            .collect::<rusqlite::Result<Vec<_>>>()?;
        Ok(Some(Self { name, kind, without_rowid, strict, columns, uniques, self_reference, deferred_by }))
    }

    /// The layout for `config`, or `misfits` and all that follow.
    fn fit(self, config: &SqliteConfig, mut misfits: Vec<Misfit>) -> Result<Layout, Vec<Misfit>> {
        let table = &self.name;
        if self.kind != "table" {
            misfits.push(misfit(format!("{table:?} is a {}, not a table", self.kind), "name a table"));
            return Err(misfits);
        }
        for other in &self.deferred_by {
            misfits.push(misfit(
                format!("a foreign key of table {other:?} is INITIALLY DEFERRED: it would fail at COMMIT and name no row"),
                format!("make the foreign keys of {other:?} immediate (leave INITIALLY DEFERRED out)"),
            ));
        }
        let chosen = self.chosen(config, &mut misfits);
        let version = (config.mode == Mode::UpsertIfNewer).then_some(config.version.as_ref()).flatten();
        for (role, name) in
            config.row_key.iter().map(|name| ("row_key", name)).chain(version.map(|name| ("version", name)))
        {
            if self.columns.iter().all(|column| column.name != *name) {
                misfits.push(self.unknown(role, name));
            } else if chosen.iter().all(|column| column.name != *name) {
                misfits
                    .push(misfit(format!("{role} {name:?} is not among the columns"), "add it to columns"));
            }
        }
        if let Some(name) = version.filter(|name| config.row_key.contains(name)) {
            misfits.push(misfit(
                format!("{name:?} is both version and row key"),
                "a row's version changes, its key does not: take another column",
            ));
        }
        let key = self.key(config, &chosen, &mut misfits);
        if !misfits.is_empty() {
            return Err(misfits);
        }
        let kinds: Vec<Kind> = chosen.iter().map(|column| Kind::of(&column.declared, self.strict)).collect();
        Ok(Layout {
            table: table.clone(),
            mode: config.mode,
            version: version.and_then(|name| chosen.iter().position(|column| column.name == *name)),
            columns: chosen.iter().map(|column| self.public(column)).collect(),
            kinds,
            key,
            sorted: !self.self_reference,
        })
    }

    fn public(&self, column: &TableColumn) -> Column {
        let rowid = self.is_rowid(column);
        Column {
            name: column.name.clone(),
            type_name: if column.declared.is_empty() { "ANY".to_owned() } else { column.declared.clone() },
            nullable: !(column.not_null || rowid || self.without_rowid && column.in_primary_key),
            has_default: column.has_default || rowid,
        }
    }

    fn is_rowid(&self, column: &TableColumn) -> bool {
        self.uniques.iter().any(|unique| unique.rowid && unique.columns[0].0 == column.name)
    }

    fn unknown(&self, role: &str, name: &str) -> Misfit {
        let known: Vec<&str> = self.columns.iter().map(|column| column.name.as_str()).collect();
        misfit(
            format!("{role} {name:?} is no column of table {:?}", self.name),
            format!("its columns are: {}", known.join(", ")),
        )
    }

    /// The columns that records fill.
    fn chosen<'a>(&'a self, config: &SqliteConfig, misfits: &mut Vec<Misfit>) -> Vec<&'a TableColumn> {
        let Some(names) = &config.columns else {
            return self.columns.iter().filter(|column| !column.generated).collect();
        };
        let mut chosen = Vec::new();
        for name in names {
            match self.columns.iter().find(|column| column.name == *name) {
                Some(column) if column.generated => misfits.push(misfit(
                    format!("column {name:?} is generated: nothing can be written to it"),
                    "leave it out of columns",
                )),
                Some(column) => chosen.push(column),
                None => misfits.push(self.unknown("column", name)),
            }
        }
        for column in &self.columns {
            let needed =
                column.not_null && !column.has_default && !column.generated && !self.is_rowid(column);
            if needed && !names.contains(&column.name) {
                misfits.push(misfit(
                    format!(
                        "column {:?} is NOT NULL without a default and not among the columns",
                        column.name
                    ),
                    "add it to columns, or give it a default",
                ));
            }
        }
        chosen
    }

    /// The row key's columns, by the unique index that they are.
    fn key(
        &self,
        config: &SqliteConfig,
        chosen: &[&TableColumn],
        misfits: &mut Vec<Misfit>,
    ) -> Vec<KeyColumn> {
        if config.row_key.is_empty() {
            return Vec::new();
        }
        let same = |unique: &&Unique| {
            unique.columns.len() == config.row_key.len()
                && config.row_key.iter().all(|name| unique.columns.iter().any(|(column, _)| column == name))
        };
        let fits: Vec<&Unique> = self.uniques.iter().filter(same).collect();
        let binary = |unique: &&&Unique| {
            unique.columns.iter().all(|(_, collation)| collation.eq_ignore_ascii_case("binary"))
        };
        let Some(unique) = fits.iter().find(binary).or(fits.first()) else {
            if config.row_key.iter().all(|name| self.columns.iter().any(|column| column.name == *name)) {
                misfits.push(misfit(
                    format!(
                        "table {:?} has no unique index on exactly ({})",
                        self.name,
                        config.row_key.join(", ")
                    ),
                    format!(
                        "run: CREATE UNIQUE INDEX {} ON {} ({})",
                        quoted(&format!("{}_{}", self.name, config.row_key.join("_"))),
                        quoted(&self.name),
                        list(&config.row_key)
                    ),
                ));
            }
            return Vec::new();
        };
        let mut key = Vec::new();
        for (name, collation) in &unique.columns {
            let Some(column) = chosen.iter().position(|column| column.name == *name) else { continue };
            let Some(collation) = Collation::of(collation) else {
                misfits.push(misfit(
                    format!("row key column {name:?} is compared by the collation {collation:?}, which is unknown here"),
                    "make its unique index with COLLATE BINARY, NOCASE or RTRIM",
                ));
                continue;
            };
            let sql = if unique.rowid {
                quoted(name)
            } else {
                format!("{} COLLATE {}", quoted(name), collation.name())
            };
            key.push(KeyColumn { column, collation, sql });
        }
        key
    }
}

fn read_uniques(
    connection: &Connection,
    table: &str,
    columns: &[TableColumn],
    without_rowid: bool,
) -> rusqlite::Result<Vec<Unique>> {
    let indexes = connection
        .prepare("SELECT name, origin FROM pragma_index_list(?1) WHERE \"unique\" = 1 AND partial = 0")?
        .query_map([table], |row| Ok((row.get::<_, String>(0)?, row.get::<_, String>(1)?)))?
        .collect::<rusqlite::Result<Vec<_>>>()?;
    let mut uniques = Vec::new();
    let mut primary: Vec<&TableColumn> = columns.iter().filter(|column| column.in_primary_key).collect();
    if let (Some(column), true) = (primary.pop(), primary.is_empty())
        && !without_rowid
        && column.declared.eq_ignore_ascii_case("INTEGER")
        && indexes.iter().all(|(_, origin)| origin != "pk")
    {
        uniques.push(Unique { columns: vec![(column.name.clone(), "BINARY".to_owned())], rowid: true });
    }
    for (index, _) in &indexes {
        let parts = connection
            .prepare("SELECT name, coll FROM pragma_index_xinfo(?1) WHERE key = 1")?
            .query_map([index], |row| Ok((row.get::<_, Option<String>>(0)?, row.get::<_, String>(1)?)))?
            .collect::<rusqlite::Result<Vec<_>>>()?;
        let columns: Option<Vec<(String, String)>> =
            parts.into_iter().map(|(name, collation)| name.map(|name| (name, collation))).collect();
        uniques.extend(columns.map(|columns| Unique { columns, rowid: false }));
    }
    Ok(uniques)
}

/// Whether the DDL has a deferred foreign key. Comments and strings may mislead it to a needless refusal, never the other way.
fn initially_deferred(sql: &str) -> bool {
    let mut words = sql.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let has = |word: &str| words.clone().any(|other| other.eq_ignore_ascii_case(word));
    let initially = has("initially");
    initially && words.any(|word| word.eq_ignore_ascii_case("deferred"))
}

/// Makes the table if it is missing, whole or not at all; several instances may try at once.
fn create(connection: &mut Connection, config: &SqliteConfig, ddl: &str) -> rusqlite::Result<()> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    if Table::read(&transaction, &config.table)?.is_none() {
        transaction.execute_batch(ddl)?;
    }
    transaction.commit()
}

/// The start-up checks.
pub(super) fn probe(config: &SqliteConfig) -> Result<Layout, Vec<Misfit>> {
    let early = config_misfits(config);
    if config.path.as_os_str().is_empty() || config.path.as_os_str() == ":memory:" {
        return Err(early);
    }
    let mut connection = schema::open(config).map_err(|error| {
        let mut misfits = early;
        misfits.push(match error {
            OpenError::Sqlite(error) => unreadable(config, &error),
            OpenError::NotDurable(why) => misfit(
                format!("{}: a commit would not be durable: {why}", config.path.display()),
                "put the file on a local disk that supports WAL",
            ),
        });
        misfits
    })?;
    let mut misfits = Vec::new();
    for (table, columns) in schema::TABLES {
        if let Err(error) = connection.prepare(&format!("SELECT {columns} FROM {table} LIMIT 0")) {
            misfits.push(misfit(
                format!("bookkeeping table {table} is not as this build makes it: {}", schema::text(&error)),
                format!("move it away if it is not Oncegate's; it must have the columns {columns}"),
            ));
        }
    }
    if let Some(ddl) = &config.create
        && let Err(error) = create(&mut connection, config, ddl)
    {
        misfits.push(misfit(
            format!("the DDL in create failed: {}", schema::text(&error)),
            format!("mend it, or make table {:?} by hand", config.table),
        ));
    }
    match Layout::read(&connection, config) {
        Ok(layout) if misfits.is_empty() => Ok(layout),
        Ok(_) => Err(misfits),
        Err(more) => {
            misfits.extend(more);
            Err(misfits)
        }
    }
}
