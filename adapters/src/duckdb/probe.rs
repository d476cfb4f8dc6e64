//! Start-up checks, all misfits in one list, and how the target table looks.

use std::time::Duration;

use duckdb::{Connection, OptionalExt};

use super::{
    DuckdbConfig, errors,
    instance::OpenError,
    schema::{self, quoted},
    session::looked_at,
    types::{self, Kind},
};
use crate::sink::{Column, Misfit, Mode};

/// The checks wait at least so long for lanes that write.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);

/// The oldest library whose unique indexes behave: before it, a key that came again in one statement or transaction could fail.
const LEAST_VERSION: (u32, u32) = (1, 4);

/// The target table as rows are written to it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Layout {
    /// The database's name inside DuckDB.
    pub(super) catalog: String,
    pub(super) table: String,
    pub(super) mode: Mode,
    /// Those that records fill, in the order of their values.
    pub(super) columns: Vec<Column>,
    /// One a column.
    pub(super) kinds: Vec<Kind>,
    /// Indices into `columns`.
    pub(super) key: Vec<usize>,
    /// Index into `columns`; only in `UpsertIfNewer`.
    pub(super) version: Option<usize>,
    /// The columns are all that the table has, in its order.
    pub(super) whole: bool,
    /// Whether a row goes in does not depend on other rows: the row key is the only unique key, and no row refers to another.
    pub(super) apart: bool,
}

impl Layout {
    /// Bytes that say something of each column.
    pub(super) fn bitmap_bytes(&self) -> usize {
        self.columns.len().div_ceil(8)
    }

    /// The table, in SQL.
    pub(super) fn target(&self) -> String {
        format!("{}.main.{}", quoted(&self.catalog), quoted(&self.table))
    }

    /// Names of columns, in SQL.
    pub(super) fn names(&self, columns: &[usize]) -> String {
        let names: Vec<String> = columns.iter().map(|&column| quoted(&self.columns[column].name)).collect();
        names.join(", ")
    }

    /// The row key's columns as texts, in SQL.
    pub(super) fn key_texts(&self, prefix: &str) -> String {
        let texts: Vec<String> = self
            .key
            .iter()
            .map(|&column| match self.kinds[column] {
                Kind::Blob | Kind::Varchar | Kind::Json => {
                    format!("{prefix}{}", quoted(&self.columns[column].name))
                }
                _ => format!("{prefix}{}::VARCHAR", quoted(&self.columns[column].name)),
            })
            .collect();
        texts.join(", ")
    }

    /// The row of the table `target` has the key of the staged row `s`.
    pub(super) fn same_key(&self) -> String {
        let parts: Vec<String> = self
            .key
            .iter()
            .map(|&column| quoted(&self.columns[column].name))
            .map(|name| format!("target.{name} = s.{name}"))
            .collect();
        parts.join(" AND ")
    }

    /// The staged row `s` has a higher version than the row of the table `target`; without versions always.
    pub(super) fn newer(&self) -> String {
        match self.version {
            Some(version) => {
                let name = quoted(&self.columns[version].name);
                format!("(target.{name} IS NULL OR s.{name} > target.{name})")
            }
            None => "true".to_owned(),
        }
    }

    /// Reads the table, or says all that does not fit.
    pub(super) fn read(connection: &Connection, config: &DuckdbConfig) -> Result<Self, Vec<Misfit>> {
        let mut misfits = config_misfits(config);
        match Table::read(connection, &config.table) {
            Ok(Some(table)) => table.fit(connection, config, misfits),
            Ok(None) => {
                misfits.push(missing_table(config));
                Err(misfits)
            }
            Err(error) => {
                misfits.push(misfit(
                    format!("{}: cannot be read: {}", config.path.display(), errors::text(&error)),
                    "check that it is a DuckDB file, and not damaged",
                ));
                Err(misfits)
            }
        }
    }
}

fn misfit(what: impl Into<String>, remedy: impl Into<String>) -> Misfit {
    Misfit { what: what.into(), remedy: remedy.into() }
}

fn missing_table(config: &DuckdbConfig) -> Misfit {
    let mut columns: Vec<&str> = Vec::new();
    for name in config.columns.iter().flatten().chain(&config.row_key).chain(&config.version) {
        if !columns.contains(&name.as_str()) {
            columns.push(name);
        }
    }
    let mut parts: Vec<String> = columns.iter().map(|name| format!("{} VARCHAR", quoted(name))).collect();
    if config.row_key.is_empty() {
        parts.push("..".to_owned());
    } else {
        parts.push(format!("PRIMARY KEY ({})", list(&config.row_key)));
    }
    misfit(
        format!("{}: there is no table {:?} in the schema main", config.path.display(), config.table),
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
fn config_misfits(config: &DuckdbConfig) -> Vec<Misfit> {
    let mut misfits = Vec::new();
    let path = config.path.to_string_lossy();
    if path.is_empty() || path.starts_with(":memory:") {
        misfits.push(misfit(
            format!("path {path:?} names no file"),
            "name a file: rows and marks must outlive the process",
        ));
    }
    if schema::TABLES.iter().any(|(name, _)| name.eq_ignore_ascii_case(&config.table)) {
        misfits
            .push(misfit(format!("table {:?} is a bookkeeping table", config.table), "name another table"));
    }
    if config.row_key.is_empty() && config.mode != Mode::Insert {
        misfits.push(misfit(
            "modes upsert and upsert-if-newer need a row key",
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
    for (what, names) in [
        ("row_key names", &config.row_key[..]),
        ("columns name", config.columns.as_deref().unwrap_or_default()),
    ] {
        for (index, name) in names.iter().enumerate() {
            if names[..index].contains(name) {
                misfits.push(misfit(format!("{what} {name:?} twice"), "name it once"));
            }
        }
    }
    misfits
}

/// The table as DuckDB describes it.
struct Table {
    catalog: String,
    name: String,
    sql: String,
    view: bool,
    columns: Vec<TableColumn>,
    /// Columns of each PRIMARY KEY and UNIQUE constraint, sorted.
    uniques: Vec<Vec<String>>,
    /// Unique indexes beside these: name, and columns, sorted.
    indexes: Vec<(String, Vec<String>)>,
    refers: bool,
}

struct TableColumn {
    name: String,
    declared: String,
    nullable: bool,
    has_default: bool,
    generated: bool,
}

/// Between the names of a list that SQL hands over as one text.
const BETWEEN: char = '\u{1f}';

impl Table {
    fn read(connection: &Connection, name: &str) -> Result<Option<Self>, duckdb::Error> {
        let catalog: String = connection.query_row("SELECT current_database()", [], |row| row.get(0))?;
        let about = connection
            .query_row(
                "SELECT table_name, coalesce(sql, ''), false FROM duckdb_tables()
                 WHERE database_name = ?1 AND schema_name = 'main' AND lower(table_name) = lower(?2)
                 UNION ALL SELECT view_name, '', true FROM duckdb_views()
                 WHERE database_name = ?1 AND schema_name = 'main' AND lower(view_name) = lower(?2)",
                [&catalog, name],
                |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)),
            )
            .optional()?;
        let Some((name, sql, view)): Option<(String, String, bool)> = about else { return Ok(None) };
        let of = [&catalog, &name];
        let there = "WHERE database_name = ?1 AND schema_name = 'main' AND table_name = ?2";
        let mut columns = connection
            .prepare(&format!(
                "SELECT column_name, data_type, is_nullable, column_default IS NOT NULL FROM duckdb_columns()
                 {there} ORDER BY column_index"
            ))?
            .query_map(of, |row| {
                Ok(TableColumn {
                    name: row.get(0)?,
                    declared: row.get(1)?,
                    nullable: row.get(2)?,
                    has_default: row.get(3)?,
                    generated: false,
                })
            })?
            .collect::<Result<Vec<_>, _>>()?;
        if !view {
            for column in columns.iter_mut().filter(|column| column.has_default) {
                // The catalog does not tell a generated column from one with a default.
                let insert = format!(
                    "INSERT INTO {}.main.{} ({}) SELECT NULL",
                    quoted(&catalog),
                    quoted(&name),
                    quoted(&column.name)
                );
                column.generated = connection
                    .prepare(&insert)
                    .is_err_and(|error| errors::text(&error).contains("generated column"));
            }
        }
        let constraints = connection
            .prepare(&format!(
                "SELECT constraint_type, array_to_string(list_sort(constraint_column_names), chr(31))
                 FROM duckdb_constraints() {there}"
            ))?
            .query_map(of, |row| Ok((row.get::<_, String>(0)?, row.get::<_, String>(1)?)))?
            .collect::<Result<Vec<_>, _>>()?;
        let uniques = constraints
            .iter()
            .filter(|(kind, _)| kind == "PRIMARY KEY" || kind == "UNIQUE")
            .map(|(_, names)| names.split(BETWEEN).map(str::to_owned).collect())
            .collect();
        let refers = constraints.iter().any(|(kind, _)| kind == "FOREIGN KEY");
        let indexes = connection
            .prepare(&format!(
                "SELECT index_name, coalesce(expressions, '') FROM duckdb_indexes() {there} AND is_unique"
            ))?
            .query_map(of, |row| Ok((row.get::<_, String>(0)?, plain(&row.get::<_, String>(1)?))))?
            .collect::<Result<Vec<_>, _>>()?;
        Ok(Some(Self { catalog, name, sql, view, columns, uniques, indexes, refers }))
    }

    /// The layout for `config`, or `misfits` and all that follow.
    fn fit(
        self,
        connection: &Connection,
        config: &DuckdbConfig,
        mut misfits: Vec<Misfit>,
    ) -> Result<Layout, Vec<Misfit>> {
        let table = &self.name;
        if self.view {
            misfits.push(misfit(format!("{table:?} is a view, not a table"), "name a table"));
            return Err(misfits);
        }
        let chosen = self.chosen(config, &mut misfits);
        let kinds: Vec<Option<Kind>> = chosen.iter().map(|column| Kind::of(&column.declared)).collect();
        for (column, _) in chosen.iter().zip(&kinds).filter(|(_, kind)| kind.is_none()) {
            misfits.push(misfit(
                format!(
                    "column {:?} of table {table:?} has the type {}, which this sink cannot write",
                    column.name, column.declared
                ),
                format!("make it {}, or move it to another table", types::KNOWN),
            ));
        }
        for (index, columns) in &self.indexes {
            // DuckDB takes it for one on the columns in the expression.
            if columns.iter().any(|column| column.contains('(')) {
                misfits.push(misfit(
                    format!("the unique index {index:?} of table {table:?} is on an expression"),
                    "drop it, or make it on columns alone",
                ));
            }
        }
        let version = (config.mode == Mode::UpsertIfNewer).then_some(config.version.as_ref()).flatten();
        let find = |name: &str| chosen.iter().position(|column| column.name.eq_ignore_ascii_case(name));
        let collated = self.sql.to_ascii_uppercase().contains("COLLATE");
        for (role, name) in
            config.row_key.iter().map(|name| ("row_key", name)).chain(version.map(|name| ("version", name)))
        {
            let Some(at) = find(name) else {
                let known: Vec<&str> = chosen.iter().map(|column| column.name.as_str()).collect();
                misfits.push(misfit(
                    format!("{role} {name:?} is no column of table {table:?} that can be written to"),
                    format!("its columns are: {}", known.join(", ")),
                ));
                continue;
            };
            if let Some(kind) = &kinds[at]
                && !kind.is_ordered()
            {
                misfits.push(misfit(
                    format!(
                        "{role} {name:?} has the type {}: equal values have several forms there",
                        chosen[at].declared
                    ),
                    "take a column of another type",
                ));
            }
            if collated && kinds[at] == Some(Kind::Varchar) {
                misfits.push(misfit(
                    format!("table {table:?} has a collation, and {role} {name:?} is a text: texts that differ could be one"),
                    "leave COLLATE out of the table",
                ));
            }
        }
        if let Some(name) = version.filter(|name| config.row_key.contains(name)) {
            misfits.push(misfit(
                format!("{name:?} is both version and row key"),
                "a row's version changes, its key does not: take another column",
            ));
        }
        let key: Vec<usize> = config.row_key.iter().filter_map(|name| find(name)).collect();
        let mut key_names: Vec<String> = key.iter().map(|&at| chosen[at].name.clone()).collect();
        key_names.sort();
        let key_plain = plain(&key_names.join(","));
        let others = self.uniques.iter().filter(|names| **names != key_names).count()
            + self.indexes.iter().filter(|(_, columns)| *columns != key_plain).count();
        if !key.is_empty()
            && key.len() == config.row_key.len()
            && others == self.uniques.len() + self.indexes.len()
        {
            misfits.push(no_unique_key(table, &config.row_key));
        }
        if !misfits.is_empty() {
            return Err(misfits);
        }
        let layout = Layout {
            catalog: self.catalog.clone(),
            table: table.clone(),
            mode: config.mode,
            version: version.and_then(|name| find(name)),
            columns: chosen
                .iter()
                .map(|column| Column {
                    name: column.name.clone(),
                    type_name: column.declared.clone(),
                    nullable: column.nullable,
                    has_default: column.has_default,
                })
                .collect(),
            kinds: kinds.into_iter().flatten().collect(),
            key,
            whole: config.columns.is_none() && self.columns.iter().all(|column| !column.generated),
            apart: others == 0 && !self.refers,
        };
        match unfit_key(connection, &layout) {
            Some(misfit) => Err(vec![misfit]),
            None => Ok(layout),
        }
    }
}

impl Table {
    /// The columns that records fill.
    fn chosen<'a>(&'a self, config: &DuckdbConfig, misfits: &mut Vec<Misfit>) -> Vec<&'a TableColumn> {
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
                None => {
                    let known: Vec<&str> = self.columns.iter().map(|column| column.name.as_str()).collect();
                    misfits.push(misfit(
                        format!("column {name:?} is no column of table {:?}", self.name),
                        format!("its columns are: {}", known.join(", ")),
                    ));
                }
            }
        }
        for column in &self.columns {
            let needed = !column.nullable && !column.has_default && !column.generated;
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
}

/// Whether DuckDB prepares the statement that finds rows by their key.
fn unfit_key(connection: &Connection, layout: &Layout) -> Option<Misfit> {
    if layout.key.is_empty() {
        return None;
    }
    let all: Vec<usize> = (0..layout.columns.len()).collect();
    let names = layout.names(&all);
    let sets: Vec<String> = all
        .iter()
        .filter(|column| !layout.key.contains(column))
        .map(|&column| quoted(&layout.columns[column].name))
        .map(|name| format!("{name} = excluded.{name}"))
        .collect();
    let action = if layout.mode == Mode::Insert || sets.is_empty() {
        "NOTHING".to_owned()
    } else {
        format!("UPDATE SET {}", sets.join(", "))
    };
    let target = layout.target();
    let insert = format!(
        "INSERT INTO {target} ({names}) SELECT {names} FROM {target} ON CONFLICT ({}) DO {action}",
        layout.names(&layout.key)
    );
    let error = connection.prepare(&insert).err()?;
    let text = errors::text(&error);
    Some(misfit(
        format!("DuckDB does not take the mode's statement for table {:?}: {text}", layout.table),
        "change the table, or the sink's mode",
    ))
}

fn no_unique_key(table: &str, row_key: &[String]) -> Misfit {
    misfit(
        format!("table {table:?} has no unique index on exactly ({})", row_key.join(", ")),
        format!(
            "run: CREATE UNIQUE INDEX {} ON {} ({})",
            quoted(&format!("{table}_{}", row_key.join("_"))),
            quoted(table),
            list(row_key)
        ),
    )
}

/// The columns of an index, sorted, without quotes: the catalog has them as one text, `[id, '"a b"']`.
fn plain(expressions: &str) -> Vec<String> {
    let mut columns: Vec<String> = expressions
        .trim_matches(['[', ']'])
        .split(',')
        .map(|column| column.chars().filter(|c| !matches!(c, '"' | '\'' | ' ')).collect())
        .collect();
    columns.sort();
    columns
}

/// The start-up checks.
pub(super) fn probe(config: &DuckdbConfig) -> Result<Layout, Vec<Misfit>> {
    let early = config_misfits(config);
    if !early.is_empty() {
        return Err(early);
    }
    let path = config.path.display();
    looked_at(config, |connection| check(connection, config)).unwrap_or_else(|error| {
        Err(vec![match error {
            OpenError::Duckdb(error) => unopened(config, &error),
            OpenError::Io(error) => {
                misfit(format!("{path}: {error}"), "make its folder, and check the permissions of both")
            }
            OpenError::Broken => misfit(format!("{path}: another lane of this process holds it"), "restart"),
        }])
    })
}

fn unopened(config: &DuckdbConfig, error: &duckdb::Error) -> Misfit {
    let text = errors::text(error);
    let remedy = if text.contains("lock") {
        "end the process that has it open: a DuckDB file has one process at a time"
    } else {
        "check that it is a DuckDB file that this version can read, and that file and folder can be written"
    };
    misfit(format!("{}: cannot be opened: {text}", config.path.display()), remedy)
}

fn check(connection: &Connection, config: &DuckdbConfig) -> Result<Layout, Vec<Misfit>> {
    let mut misfits = Vec::new();
    if let Ok(version) = connection.version()
        && parsed(&version).is_some_and(|version| version < LEAST_VERSION)
    {
        misfits.push(misfit(
            format!("the DuckDB library is {version}, below {}.{}", LEAST_VERSION.0, LEAST_VERSION.1),
            "install a newer one",
        ));
    }
    for (table, columns) in schema::TABLES {
        if let Err(error) = connection.prepare(&format!("SELECT {columns} FROM {table} LIMIT 0")) {
            misfits.push(misfit(
                format!("bookkeeping table {table} is not as this build makes it: {}", errors::text(&error)),
                format!("move it away if it is not Oncegate's; it must have the columns {columns}"),
            ));
        }
    }
    if let Some(ddl) = &config.create
        && let Err(error) = create(connection, config, ddl)
    {
        misfits.push(misfit(
            format!("the DDL in create failed: {}", errors::text(&error)),
            format!("mend it, or make table {:?} by hand", config.table),
        ));
    }
    match Layout::read(connection, config) {
        Ok(layout) if misfits.is_empty() => Ok(layout),
        Ok(_) => Err(misfits),
        Err(more) => {
            misfits.extend(more);
            Err(misfits)
        }
    }
}

/// Makes the table if it is missing, whole or not at all.
fn create(connection: &Connection, config: &DuckdbConfig, ddl: &str) -> Result<(), duckdb::Error> {
    if Table::read(connection, &config.table)?.is_some() {
        return Ok(());
    }
    connection.execute_batch(&format!("BEGIN TRANSACTION; {ddl}; COMMIT;")).inspect_err(|_| {
        // There may be none, if it could not even begin.
        drop(connection.execute_batch("ROLLBACK"));
    })
}

/// `v1.5.6`
fn parsed(version: &str) -> Option<(u32, u32)> {
    let mut parts = version.trim_start_matches('v').split('.');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}
