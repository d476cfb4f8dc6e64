//! `[sinks.NAME]`.

use std::{path::PathBuf, time::Duration};

use adapters::sink::Mode;

use super::{
    error::Secret,
    read::{Item, Section, ms, secs},
};

/// A target and how its rows are written.
#[derive(Clone, Debug)]
pub struct SinkConfig {
    /// Its name in the file.
    pub name: String,
    /// What it is.
    pub target: Target,
    /// The table's name, with its schema, if any, for Postgres; or the topic's; or the folder; or the prefix.
    pub table: String,
    /// How a row meets the row that is there.
    pub mode: Mode,
    /// The row key's columns; may be empty in `insert` mode.
    pub row_key: Vec<String>,
    /// The version column; there in `upsert-if-newer` mode, and only there.
    pub version: Option<String>,
}

/// What a sink is.
#[derive(Clone, Debug)]
pub enum Target {
    /// A Postgres server.
    Postgres {
        /// Connection string.
        url: Secret,
        /// Bound on making a connection.
        connect_timeout: Duration,
        /// Bound on one statement.
        statement_timeout: Duration,
        /// How long a frozen owner is waited for before it is ended.
        lock_timeout: Duration,
        /// Schema of the bookkeeping tables; the table's own if none.
        meta_schema: Option<String>,
    },
    /// A SQLite file.
    Sqlite {
        /// The file.
        path: PathBuf,
        /// How long to wait for another writer of the file.
        busy_timeout: Duration,
        /// DDL to run if the table is missing.
        create: Option<String>,
    },
    /// A DuckDB file.
    #[cfg(feature = "duckdb")]
    Duckdb {
        /// The file.
        path: PathBuf,
        /// How long to wait for another lane that writes to the file.
        busy_timeout: Duration,
        /// DDL to run if the table is missing.
        create: Option<String>,
    },
    /// A folder of files.
    Files(adapters::files::FilesConfig),
    /// A table of ClickHouse, but for what all sinks have.
    #[cfg(feature = "clickhouse")]
    Clickhouse(Box<adapters::clickhouse::ClickhouseConfig>),
    /// A table of StarRocks or Doris, but for what all sinks have.
    #[cfg(feature = "stream-load")]
    StreamLoad(Box<adapters::stream_load::StreamLoadConfig>),
    /// A topic, but for what its route says.
    #[cfg(feature = "kafka")]
    Kafka(Box<adapters::kafka_sink::KafkaSinkConfig>),
    /// Hashes of a Redis server.
    #[cfg(feature = "redis")]
    Redis(Box<adapters::redis::RedisConfig>),
}

impl SinkConfig {
    /// For the SQLite sink; none if it is another target.
    pub fn sqlite(&self) -> Option<adapters::sqlite::SqliteConfig> {
        let Target::Sqlite { path, busy_timeout, create } = &self.target else { return None };
        Some(adapters::sqlite::SqliteConfig {
            mode: self.mode,
            row_key: self.row_key.clone(),
            version: self.version.clone(),
            create: create.clone(),
            busy_timeout: *busy_timeout,
            ..adapters::sqlite::SqliteConfig::new(path, &self.table)
        })
    }

    /// For the DuckDB sink; none if it is another target.
    #[cfg(feature = "duckdb")]
    pub fn duckdb(&self) -> Option<adapters::duckdb::DuckdbConfig> {
        let Target::Duckdb { path, busy_timeout, create } = &self.target else { return None };
        Some(adapters::duckdb::DuckdbConfig {
            mode: self.mode,
            row_key: self.row_key.clone(),
            version: self.version.clone(),
            create: create.clone(),
            busy_timeout: *busy_timeout,
            ..adapters::duckdb::DuckdbConfig::new(path, &self.table)
        })
    }

    /// For the Kafka sink of `route`; none if it is another target.
    #[cfg(feature = "kafka")]
    pub fn kafka(&self, rules: &crate::lane::Rules) -> Option<adapters::kafka_sink::KafkaSinkConfig> {
        let Target::Kafka(config) = &self.target else { return None };
        let keep_ms = rules.window_ms.saturating_add(rules.lateness_ms).saturating_add(rules.max_ahead_ms);
        let keep = Duration::from_millis(keep_ms.unsigned_abs());
        Some(adapters::kafka_sink::KafkaSinkConfig { keep, ..(**config).clone() })
    }

    /// For the ClickHouse sink; none if it is another target.
    #[cfg(feature = "clickhouse")]
    pub fn clickhouse(&self) -> Option<adapters::clickhouse::ClickhouseConfig> {
        let Target::Clickhouse(config) = &self.target else { return None };
        Some(adapters::clickhouse::ClickhouseConfig {
            table: self.table.clone(),
            mode: self.mode,
            row_key: self.row_key.clone(),
            version: self.version.clone(),
            ..(**config).clone()
        })
    }

    /// For the StarRocks or Doris sink; none if it is another target.
    #[cfg(feature = "stream-load")]
    pub fn stream_load(&self) -> Option<adapters::stream_load::StreamLoadConfig> {
        let Target::StreamLoad(config) = &self.target else { return None };
        Some(adapters::stream_load::StreamLoadConfig {
            table: self.table.clone(),
            mode: self.mode,
            row_key: self.row_key.clone(),
            version: self.version.clone(),
            ..(**config).clone()
        })
    }

    /// Whether it keeps rows that can be looked at.
    pub fn keeps_rows(&self) -> bool {
        match &self.target {
            Target::Postgres { .. } | Target::Sqlite { .. } => true,
            #[cfg(feature = "duckdb")]
            Target::Duckdb { .. } => true,
            Target::Files(_) => false,
            #[cfg(feature = "clickhouse")]
            Target::Clickhouse(_) => true,
            #[cfg(feature = "stream-load")]
            Target::StreamLoad(_) => false,
            #[cfg(feature = "kafka")]
            Target::Kafka(_) => false,
            #[cfg(feature = "redis")]
            Target::Redis(_) => true,
        }
    }

    /// Records and bytes of one batch at most.
    pub fn most_of_batch(&self) -> (i64, u64) {
        match &self.target {
            #[cfg(feature = "redis")]
            Target::Redis(_) => (adapters::redis::MAX_ROWS as i64, adapters::redis::MAX_BYTES),
            #[cfg(feature = "stream-load")]
            Target::StreamLoad(_) => (MOST_OF_BATCH.0, adapters::stream_load::MAX_BYTES),
            _ => MOST_OF_BATCH,
        }
    }

    /// For the Postgres sink; none if it is another target.
    #[cfg(feature = "postgres")]
    pub fn postgres(&self) -> Option<adapters::postgres::PostgresConfig> {
        let Target::Postgres { url, connect_timeout, statement_timeout, lock_timeout, meta_schema } =
            &self.target
        else {
            return None;
        };
        Some(adapters::postgres::PostgresConfig {
            mode: self.mode,
            row_key: self.row_key.clone(),
            version: self.version.clone(),
            connect_timeout: *connect_timeout,
            statement_timeout: *statement_timeout,
            lock_timeout: *lock_timeout,
            meta_schema: meta_schema.clone(),
            ..adapters::postgres::PostgresConfig::new(url.expose(), &self.table)
        })
    }
}

/// Records and bytes of one batch at most, whatever the sink.
pub(super) const MOST_OF_BATCH: (i64, u64) = (1_000_000, 1 << 30);

/// Sink types that the design names and this build does not have.
const LATER: [&str; 2] = ["elasticsearch", "opensearch"];

/// Those that it has.
const TYPES: &str = "\"postgres\", \"sqlite\", \"duckdb\", \"kafka\", \"redis\", \"files\", \"clickhouse\", \"starrocks\", \"doris\" or \"http\"";

#[derive(Clone, Copy)]
enum Type {
    Postgres,
    Sqlite,
    Duckdb,
    Kafka,
    Redis,
    Files,
    Clickhouse,
    StarRocks,
    Doris,
    Later,
}

pub(super) fn sink(name: String, section: Section<'_, '_>) -> Option<SinkConfig> {
    let item = section.required("type", TYPES)?;
    if let Some(later) = item.value.as_str().filter(|word| LATER.contains(word)) {
        item.fault(format!("sinks of type {later:?} are not in this build"), format!("use {TYPES}"));
        return None;
    }
    let types = [
        ("postgres", Type::Postgres),
        ("sqlite", Type::Sqlite),
        ("duckdb", Type::Duckdb),
        ("kafka", Type::Kafka),
        ("redis", Type::Redis),
        ("files", Type::Files),
        ("clickhouse", Type::Clickhouse),
        ("starrocks", Type::StarRocks),
        ("doris", Type::Doris),
    ];
    let kind = item.choice(&types).unwrap_or(Type::Later);
    #[cfg_attr(
        not(any(feature = "kafka", feature = "redis")),
        expect(unused_mut, reason = "only what has no columns of its own is fitted to the mode")
    )]
    let mut target = match kind {
        #[cfg(feature = "kafka")]
        Type::Kafka => super::kafka_sink::kafka(&section).map(|config| Target::Kafka(Box::new(config))),
        #[cfg(not(feature = "kafka"))]
        Type::Kafka => {
            item.fault("this build leaves Kafka out", "build with the feature `kafka`");
            return None;
        }
        #[cfg(feature = "redis")]
        Type::Redis => super::redis_sink::redis(&section).map(|config| Target::Redis(Box::new(config))),
        #[cfg(not(feature = "redis"))]
        Type::Redis => {
            item.fault("this build leaves Redis out", "build with the feature `redis`");
            return None;
        }
        Type::Postgres => postgres(&section, &item),
        Type::Sqlite => sqlite(&section),
        #[cfg(feature = "duckdb")]
        Type::Duckdb => duckdb(&section),
        #[cfg(not(feature = "duckdb"))]
        Type::Duckdb => {
            item.fault("this build leaves DuckDB out", "build with the feature `duckdb`");
            return None;
        }
        Type::Files => files(&section),
        #[cfg(feature = "clickhouse")]
        Type::Clickhouse => {
            super::clickhouse::clickhouse(&section).map(|config| Target::Clickhouse(Box::new(config)))
        }
        #[cfg(not(feature = "clickhouse"))]
        Type::Clickhouse => {
            item.fault("this build leaves ClickHouse out", "build with the feature `clickhouse`");
            return None;
        }
        #[cfg(feature = "stream-load")]
        Type::StarRocks | Type::Doris => {
            let dialect = match kind {
                Type::Doris => adapters::stream_load::Dialect::Doris,
                _ => adapters::stream_load::Dialect::StarRocks,
            };
            super::stream_load::stream_load(&section, dialect)
                .map(|config| Target::StreamLoad(Box::new(config)))
        }
        #[cfg(not(feature = "stream-load"))]
        Type::StarRocks | Type::Doris => {
            item.fault("this build leaves StarRocks and Doris out", "build with the feature `stream-load`");
            return None;
        }
        // Its keys are not known: nothing more can be said of them.
        Type::Later => return None,
    };
    let named = match kind {
        // Asked for with the rest of what names it.
        Type::Kafka => section.item("topic"),
        Type::Files => section.item("folder"),
        Type::Redis => section.item("prefix"),
        _ => section.required("table", "\"NAME\""),
    };
    let table = named.and_then(|item| {
        let table = item.text()?;
        if table.is_empty() {
            item.fault("is empty", "name a table");
        }
        Some(table)
    });
    let modes =
        [("insert", Mode::Insert), ("upsert", Mode::Upsert), ("upsert-if-newer", Mode::UpsertIfNewer)];
    let mode_item = section.item("mode");
    let mode = mode_item.as_ref().and_then(|item| item.choice(&modes)).unwrap_or(Mode::Insert);
    let row_key_item = section.item("row_key");
    let row_key = row_key_item.as_ref().map(Item::texts).unwrap_or_default();
    let version_item = section.item("version");
    let version = version_item.as_ref().and_then(Item::text);
    if let Type::Files = kind {
        only_appended_to(mode, [&mode_item, &row_key_item, &version_item]);
    } else if matches!(kind, Type::Redis) && row_key_item.is_none() {
        section.fault("`row_key` is missing: a row in Redis is at a key", "add row_key = [\"COLUMN\"]");
    } else if mode != Mode::Insert && row_key_item.is_none() {
        section.fault(
            "`row_key` is missing: this mode finds the row that is there by it",
            "add row_key = [\"COLUMN\"]",
        );
    } else if let (true, true, Some(item)) = (mode != Mode::Insert, row_key.is_empty(), &row_key_item) {
        item.fault(
            "names no column, and this mode finds the row that is there by it",
            "name the row key's columns",
        );
    }
    match (&version_item, mode) {
        _ if matches!(kind, Type::Files) => {}
        (None, Mode::UpsertIfNewer) if !matches!(kind, Type::Kafka) => {
            section.fault("`version` is missing: this mode compares it", "add version = \"COLUMN\"");
        }
        (Some(item), Mode::Insert | Mode::Upsert) => {
            item.fault(
                "counts in mode \"upsert-if-newer\" only",
                "remove it, or set mode = \"upsert-if-newer\"",
            );
        }
        (Some(item), Mode::UpsertIfNewer)
            if version.as_ref().is_some_and(|version| row_key.contains(version)) =>
        {
            item.fault("is a row key column too", "name a column that changes from version to version");
        }
        _ => {}
    }
    #[cfg(feature = "kafka")]
    if let Some(Target::Kafka(config)) = &mut target {
        super::kafka_sink::fit(&section, mode_item.as_ref(), mode, &row_key, config);
    }
    #[cfg(feature = "redis")]
    if let Some(Target::Redis(config)) = &mut target {
        super::redis_sink::fit(&section, mode, &row_key, version.as_ref(), config);
    }
    section.close();
    Some(SinkConfig { name, target: target?, table: table?, mode, row_key, version })
}

fn postgres(section: &Section<'_, '_>, item: &Item<'_, '_>) -> Option<Target> {
    if !cfg!(feature = "postgres") {
        item.fault("this build leaves Postgres out", "build with the feature `postgres`");
    }
    let url = section.required("url", "\"${DATABASE_URL}\"").map(Item::secret);
    let text = url.as_ref().and_then(Item::text);
    #[cfg(feature = "postgres")]
    if let (Some(item), Some(text)) = (&url, &text)
        && let Err(misfit) =
            adapters::postgres::PostgresSink::new(adapters::postgres::PostgresConfig::new(text, "t"))
    {
        item.fault(misfit.what, misfit.remedy);
    }
    let target = Target::Postgres {
        url: Secret::new(text.clone().unwrap_or_default()),
        connect_timeout: section.duration("connect_timeout", ms(100)..=secs(600), secs(10)),
        statement_timeout: section.duration("statement_timeout", ms(100)..=secs(3600), secs(30)),
        lock_timeout: section.duration("lock_timeout", ms(10)..=secs(60), secs(1)),
        meta_schema: section.text("meta_schema"),
    };
    text.map(|_| target)
}

fn files(section: &Section<'_, '_>) -> Option<Target> {
    let folder = section.required("folder", "\"FOLDER\"").and_then(|item| {
        let folder = item.text()?;
        if folder.is_empty() {
            item.fault("is empty", "name a folder");
        }
        Some(folder)
    });
    let defaults = adapters::files::FilesConfig::new(folder.clone().unwrap_or_default());
    let target = Target::Files(adapters::files::FilesConfig {
        roll_bytes: section.size("roll_size", (1 << 10)..=(1 << 40), defaults.roll_bytes),
        roll_rows: section
            .count("roll_rows", 1..=1_000_000_000, defaults.roll_rows.cast_signed())
            .unsigned_abs(),
        roll_after: section.duration("roll_after", secs(1)..=secs(7 * 24 * 3600), defaults.roll_after),
        busy_timeout: section.duration("busy_timeout", ms(0)..=secs(600), defaults.busy_timeout),
        ..defaults
    });
    folder.map(|_| target)
}

/// Names what would need a row that is there.
fn only_appended_to(mode: Mode, [mode_item, row_key, version]: [&Option<Item<'_, '_>>; 3]) {
    if let (Some(item), true) = (mode_item, mode != Mode::Insert) {
        item.fault(
            "changes the row that is there, and files are only appended to",
            "set mode = \"insert\", and leave it to who reads the files to take the last row of a key",
        );
    }
    for item in [row_key, version].into_iter().flatten() {
        item.fault(
            "finds a row that is there, and files are only appended to",
            "remove it; the route's `key` keeps copies out",
        );
    }
}

fn sqlite(section: &Section<'_, '_>) -> Option<Target> {
    let (path, busy_timeout, create) = database_file(section)?;
    Some(Target::Sqlite { path, busy_timeout, create })
}

#[cfg(feature = "duckdb")]
fn duckdb(section: &Section<'_, '_>) -> Option<Target> {
    let (path, busy_timeout, create) = database_file(section)?;
    Some(Target::Duckdb { path, busy_timeout, create })
}

/// What names a database that is a file: the file, `busy_timeout` and `create`.
fn database_file(section: &Section<'_, '_>) -> Option<(PathBuf, Duration, Option<String>)> {
    let path = section.required("path", "\"FILE.db\"").and_then(|item| {
        let path = item.text()?;
        if path.is_empty() || path.starts_with(":memory:") {
            item.fault("is no file: two connections must see the same rows", "name a file");
        }
        Some(path)
    });
    let busy_timeout = section.duration("busy_timeout", ms(0)..=secs(600), secs(5));
    let create = section.text("create");
    Some((path?.into(), busy_timeout, create))
}
