//! Start-up checks, all misfits in one list.

use serde::Deserialize;
use tracing::warn;

use super::{
    ClickhouseConfig,
    client::{Client, Failure, parameters},
    layout::{Layout, Partition, Window, literal, quoted},
    packing::{Compression, Packer},
    types::{self, Kind},
};
use crate::sink::{Column, Misfit, Mode};

/// A window of fewer blocks is too small for any retry.
const LEAST_BLOCKS: i64 = 100;
/// What a window should have.
const GOOD_BLOCKS: i64 = 10_000;
/// A window that is shorter is too small for any retry, s.
const LEAST_SECONDS: i64 = 600;

/// Settings under which a batch's part is one block of one partition, taken or dropped by its token, before the call ends. Those that the
/// server does not know are left out.
const PINNED: [(&str, &str); 14] = [
    ("async_insert", "0"),
    ("insert_deduplicate", "1"),
    ("deduplicate_insert", "enable"),
    ("deduplicate_blocks_in_dependent_materialized_views", "1"),
    ("max_insert_block_size", "10000000"),
    ("max_insert_block_size_bytes", "0"),
    // However it is read, it is put together again.
    ("min_insert_block_size_rows", "10000000"),
    ("min_insert_block_size_bytes", "1099511627776"),
    ("input_format_max_block_size_bytes", "0"),
    ("input_format_parallel_parsing", "0"),
    ("input_format_defaults_for_omitted_fields", "1"),
    ("max_partitions_per_insert_block", "1"),
    ("throw_on_max_partitions_per_insert_block", "1"),
    ("timeout_overflow_mode", "throw"),
];

fn misfit(what: impl Into<String>, remedy: impl Into<String>) -> Misfit {
    Misfit { what: what.into(), remedy: remedy.into() }
}

#[derive(Deserialize)]
struct TableRow {
    engine: String,
    engine_full: String,
    partition_key: String,
    sorting_key: String,
    create_table_query: String,
    views: Vec<String>,
}

#[derive(Deserialize)]
struct ColumnRow {
    name: String,
    #[serde(rename = "type")]
    type_name: String,
    default_kind: String,
    is_in_partition_key: u8,
}

#[derive(Deserialize)]
struct Setting {
    name: String,
    value: String,
}

async fn rows<T: for<'de> Deserialize<'de>>(client: &mut Client, sql: &str) -> Result<Vec<T>, Failure> {
    let sql = format!("{sql} FORMAT JSONEachRow");
    let answer = client.query(&sql, &parameters([("output_format_json_quote_64bit_integers", "0")])).await?;
    answer
        .body
        .split(|byte| *byte == b'\n')
        .filter(|line| !line.is_empty())
        .map(|line| {
            serde_json::from_slice(line).map_err(|fault| {
                Failure::Unclear(format!("the answer is not what ClickHouse gives: {fault}"))
            })
        })
        .collect()
}

/// How the table looks, or everything that does not fit.
pub(super) async fn probe(config: &ClickhouseConfig, client: &mut Client) -> Result<Layout, Vec<Misfit>> {
    let (database, table) = config.names();
    let unreached = |failure: Failure| {
        let remedy = match failure {
            Failure::Server { .. } => {
                "give the user the right to read system.tables, system.columns and system.settings"
            }
            _ => "check the sink's url, user and password, and that the server runs",
        };
        vec![misfit(format!("ClickHouse cannot be asked: {}", failure.full()), remedy)]
    };
    let of = format!("database = {} AND", literal(database));
    let found: Vec<TableRow> = rows(
        client,
        &format!(
            "SELECT engine, engine_full, partition_key, sorting_key, create_table_query,
             arrayMap((d, t) -> concat(d, '.', t), dependencies_database, dependencies_table) AS views
             FROM system.tables WHERE {of} name = {}",
            literal(table)
        ),
    )
    .await
    .map_err(unreached)?;
    let Some(found) = found.into_iter().next() else {
        return Err(vec![misfit(
            format!("table {database}.{table} does not exist, or the user may not see it"),
            "create it, or correct the sink's table = \"DATABASE.TABLE\"",
        )]);
    };
    let columns: Vec<ColumnRow> = rows(
        client,
        &format!(
            "SELECT name, type, default_kind, is_in_partition_key FROM system.columns WHERE {of} table = {} ORDER BY position",
            literal(table)
        ),
    )
    .await
    .map_err(unreached)?;
    let known: Vec<Setting> =
        rows(client, "SELECT name, value FROM system.settings").await.map_err(unreached)?;
    let defaults: Vec<Setting> = rows(
        client,
        &format!(
            "SELECT name, value FROM system.{} WHERE name LIKE '%deduplication_window%' OR name = 'fsync_after_insert'",
            if found.engine.starts_with("Replicated") || found.engine.starts_with("Shared") {
                "replicated_merge_tree_settings"
            } else {
                "merge_tree_settings"
            }
        ),
    )
    .await
    .map_err(unreached)?;

    let mut misfits = Vec::new();
    let replicated = found.engine.starts_with("Replicated") || found.engine.starts_with("Shared");
    check_engine(config, &found, &mut misfits);
    let window = window(config, &found, &defaults, replicated, &mut misfits);
    if !found.views.is_empty() && !config.accept_views {
        misfits.push(misfit(
            format!("materialized views read from the table: {}", found.views.join(", ")),
            "an insert that fails half way may be in the table and not in them; give the target of each a deduplication window of its own, \
             then set views = \"accept\"",
        ));
    }
    let mut layout = fill(config, &found, columns, window, replicated, &mut misfits);
    let mut pinned: Vec<(&str, String)> = PINNED
        .iter()
        .filter(|(name, _)| known.iter().any(|setting| setting.name == *name))
        .map(|(name, value)| (*name, (*value).to_owned()))
        .collect();
    // A request that we have given up does not go on for ever.
    pinned.push(("max_execution_time", config.request_timeout.as_secs().max(1).to_string()));
    let settings = parameters(pinned.iter().map(|(name, value)| (*name, value.as_str())));
    if let Err(failure) = client.query("SELECT 1", &settings).await {
        misfits.push(misfit(
            format!("the server does not let this sink set what it needs: {}", failure.full()),
            format!(
                "let the user change {} (its profile's constraints, or readonly)",
                pinned.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ")
            ),
        ));
    }
    if let Err(what) = takes_packed(config.compression, client).await {
        misfits.push(misfit(
            format!("the server does not unpack the bodies of requests: {what}"),
            "let what stands between pass Content-Encoding on, or set compression = \"none\"",
        ));
    }
    // Asked at each repeat: a user who may only insert would stop at the first.
    if let Some(column) = layout.batch.as_deref().filter(|_| misfits.is_empty()) {
        let (database, table, column) = (quoted(database), quoted(table), quoted(column));
        let asked = format!("SELECT count() FROM {database}.{table} WHERE {column} = 'none'");
        if let Err(failure) = client.query(&asked, "").await {
            misfits.push(misfit(
                format!("the table cannot be asked for the rows of a batch: {}", failure.full()),
                format!("GRANT SELECT({column}) ON {database}.{table} to the sink's user"),
            ));
        }
    }
    if config.mode == Mode::Insert && !layout.key.is_empty() && misfits.is_empty() {
        let (database, table) = (quoted(database), quoted(table));
        let names: Vec<String> = config.row_key.iter().map(|name| quoted(name)).collect();
        let names = names.join(", ");
        if let Err(failure) =
            client.query(&format!("SELECT {names} FROM {database}.{table} LIMIT 0"), "").await
        {
            misfits.push(misfit(
                format!("the table cannot be asked which rows it has: {}", failure.full()),
                format!("GRANT SELECT({names}) ON {database}.{table} to the sink's user"),
            ));
        }
    }
    let extra = layout.deleted.iter().chain(&layout.batch);
    let names: Vec<String> =
        layout.columns.iter().map(|column| &column.name).chain(extra).map(|name| quoted(name)).collect();
    let insert = format!(
        "INSERT INTO {}.{} ({}) FORMAT RowBinaryWithDefaults",
        quoted(database),
        quoted(table),
        names.join(", ")
    );
    layout.statement = format!("{}&wait_end_of_query=1&{settings}", parameters([("query", insert.as_str())]));
    let types: String = layout.columns.iter().map(|column| format!(",{}", column.type_name)).collect();
    layout.tag = xxhash_rust::xxh3::xxh3_64((layout.statement.clone() + &types).as_bytes()) as u32;
    if misfits.is_empty() { Ok(layout) } else { Err(misfits) }
}

/// A server, or what stands before it, that ignores how a body is packed would take it for rows.
async fn takes_packed(how: Compression, client: &mut Client) -> Result<(), String> {
    let question =
        Packer::default().pack(how, b"SELECT 'unpacked'".to_vec()).map_err(|fault| fault.to_string())?;
    match client.post("", how, question.into()).await {
        Ok(answer) if answer.body.trim_ascii() == b"unpacked" => Ok(()),
        Ok(_) => Err("a compressed question is answered as another one".to_owned()),
        Err(failure) => Err(failure.plain()),
    }
}

fn check_engine(config: &ClickhouseConfig, found: &TableRow, misfits: &mut Vec<Misfit>) {
    let engine = &found.engine;
    if !engine.ends_with("MergeTree") {
        misfits.push(misfit(
            format!("the table's engine is {engine}, which does not know an insert that comes again"),
            "use an engine of the MergeTree family; for Distributed or Buffer, write to the table behind it",
        ));
    }
    // `CONSTRAINT name CHECK ..` of the create statement; constraints that are only assumed do no harm.
    if found.create_table_query.contains(" CHECK ") && found.create_table_query.contains("CONSTRAINT ") {
        misfits.push(misfit(
            "the table has CHECK constraints: one row that violates them would hold up its whole batch",
            "ALTER TABLE .. DROP CONSTRAINT .., and check when reading",
        ));
    }
    let replacing = engine.ends_with("ReplacingMergeTree");
    match config.mode {
        Mode::Insert if !config.row_key.is_empty() && engine != "MergeTree" => misfits.push(misfit(
            format!(
                "mode = \"insert\" with row_key: a table of engine {engine} cannot be asked which rows it has: merges change them, or another copy \
                 has more"
            ),
            "remove row_key (the route's key keeps copies out), use ENGINE = MergeTree, or mode = \"upsert-if-newer\" and ReplacingMergeTree",
        )),
        Mode::Insert => {}
        Mode::Upsert => misfits.push(misfit(
            "mode = \"upsert\": which of two rows wins would be left to the order of merges",
            "use mode = \"upsert-if-newer\" with a version column and ReplacingMergeTree(version)",
        )),
        Mode::UpsertIfNewer if !replacing => misfits.push(misfit(
            format!("mode = \"upsert-if-newer\" needs ReplacingMergeTree, and the table's engine is {engine}"),
            "make the table with ENGINE = ReplacingMergeTree(version, is_deleted)",
        )),
        Mode::UpsertIfNewer => {}
    }
}

/// A setting of the table: its own, or the server's.
fn setting<'a>(found: &'a TableRow, defaults: &'a [Setting], name: &str) -> Option<&'a str> {
    let own = found.engine_full.split_once(" SETTINGS ").and_then(|(_, settings)| {
        settings.split(',').filter_map(|pair| pair.split_once('=')).find(|(key, _)| key.trim() == name)
    });
    match own {
        Some((_, value)) => Some(value.trim().trim_matches('\'')),
        None => defaults.iter().find(|setting| setting.name == name).map(|setting| setting.value.as_str()),
    }
}

fn window(
    config: &ClickhouseConfig,
    found: &TableRow,
    defaults: &[Setting],
    replicated: bool,
    misfits: &mut Vec<Misfit>,
) -> Window {
    let number = |name: &str| setting(found, defaults, name).and_then(|value| value.parse::<i64>().ok());
    let alter = |name: &str, value: i64| {
        let (database, table) = config.names();
        format!("ALTER TABLE {}.{} MODIFY SETTING {name} = {value}", quoted(database), quoted(table))
    };
    let name =
        if replicated { "replicated_deduplication_window" } else { "non_replicated_deduplication_window" };
    let blocks = number(name).unwrap_or(0);
    if blocks < LEAST_BLOCKS {
        let what = if blocks == 0 { "remembers no inserts" } else { "remembers too few inserts" };
        misfits.push(misfit(
            format!("the table {what}: {name} = {blocks}, at least {LEAST_BLOCKS} is needed"),
            format!("run {}", alter(name, GOOD_BLOCKS)),
        ));
    } else if blocks < GOOD_BLOCKS {
        warn!(
            "table {}: {name} = {blocks}: once half as many blocks were written, by anyone, an insert whose answer was lost is not tried again; \
             consider {}",
            config.table,
            alter(name, GOOD_BLOCKS)
        );
    }
    let mut ms = None;
    if replicated {
        let name = "replicated_deduplication_window_seconds";
        let seconds = number(name).unwrap_or(0);
        if seconds < LEAST_SECONDS {
            misfits.push(misfit(
                format!("the table remembers inserts for too short a time: {name} = {seconds}, at least {LEAST_SECONDS} is needed"),
                format!("run {}", alter(name, 7 * 24 * 3600)),
            ));
        }
        ms = Some(seconds.saturating_mul(1000));
        let slow = config.request_timeout + config.connect_timeout;
        if seconds >= LEAST_SECONDS && slow.as_secs() >= seconds.unsigned_abs() / 4 {
            misfits.push(misfit(
                format!(
                    "request_timeout and connect_timeout are {slow:?} together, and the table remembers inserts for {seconds} s: a request could \
                     come in after that"
                ),
                format!("lower request_timeout to less than a quarter of it, or run {}", alter(name, 7 * 24 * 3600)),
            ));
        }
    }
    if number("fsync_after_insert") == Some(0) && !replicated {
        warn!(
            "table {}: fsync_after_insert = 0: a power cut of the server can take back rows that it has acknowledged (with 1 it can still take the token back: use batch_column too); consider {}",
            config.table,
            alter("fsync_after_insert", 1)
        );
    }
    Window { blocks, ms }
}

/// Rows or values may go by time. A text of the statement that only holds the word counts too.
fn expires(create_table_query: &str) -> bool {
    create_table_query.split(|at: char| !at.is_ascii_alphanumeric() && at != '_').any(|word| word == "TTL")
}

/// What stands in the brackets behind the engine's name.
fn arguments(engine_full: &str) -> Vec<String> {
    let Some(rest) = engine_full.split_once("MergeTree(").map(|(_, rest)| rest) else { return Vec::new() };
    let inside = rest.split_once(')').map_or("", |(inside, _)| inside);
    let names = inside.split(',').map(|name| name.trim().trim_matches('`').to_owned());
    // Replicated engines have path and name of the copy first.
    names.filter(|name| !name.is_empty() && !name.starts_with('\'')).collect()
}

fn fill(
    config: &ClickhouseConfig,
    found: &TableRow,
    mut columns: Vec<ColumnRow>,
    window: Window,
    replicated: bool,
    misfits: &mut Vec<Misfit>,
) -> Layout {
    let (database, table) = config.names();
    let replacing = found.engine.ends_with("ReplacingMergeTree");
    let arguments = if replacing { arguments(&found.engine_full) } else { Vec::new() };
    let in_mode = config.mode == Mode::UpsertIfNewer && replacing;
    let deleted = arguments.get(1).filter(|_| in_mode).cloned();
    columns.retain(|column| {
        !matches!(column.default_kind.as_str(), "MATERIALIZED" | "ALIAS" | "EPHEMERAL")
            || column.is_in_partition_key != 0
    });
    if let Some(name) = &config.batch_column {
        let fits = columns.iter().any(|column| {
            column.name == *name && matches!(column.type_name.as_str(), "String" | "LowCardinality(String)")
        });
        if !fits {
            misfits.push(misfit(
                format!("batch_column = {name:?}: the table has no such column of type String"),
                format!(
                    "run ALTER TABLE {}.{} ADD COLUMN {} String",
                    quoted(database),
                    quoted(table),
                    quoted(name)
                ),
            ));
        }
    }
    let partition_columns: Vec<String> = columns
        .iter()
        .filter(|column| column.is_in_partition_key != 0)
        .map(|column| column.name.clone())
        .collect();
    let computed = columns.iter().find(|column| {
        column.is_in_partition_key != 0
            && matches!(column.default_kind.as_str(), "MATERIALIZED" | "ALIAS" | "EPHEMERAL")
    });
    let is_computed = computed.is_some();
    if let Some(column) = computed {
        misfits.push(misfit(
            format!(
                "the partition key is computed from column {:?}, which is {}",
                column.name, column.default_kind
            ),
            "write its expression into PARTITION BY: the partition must follow from what records bring",
        ));
    }
    let own = |name: &str| deleted.as_deref() == Some(name) || config.batch_column.as_deref() == Some(name);
    columns.retain(|column| !own(&column.name));
    let mut kinds = Vec::new();
    for column in &columns {
        kinds.push(types::parse(&column.type_name).unwrap_or_else(|why| {
            misfits.push(misfit(
                format!("column {:?} has type {}: {why}", column.name, column.type_name),
                "change its type, or drop it",
            ));
            Kind::String
        }));
    }
    let index = |name: &str| columns.iter().position(|column| column.name == name);
    let mut key = Vec::new();
    for name in &config.row_key {
        match index(name) {
            Some(at) => key.push(at),
            None => misfits.push(misfit(
                format!("row_key names column {name:?}, which the table has not"),
                "correct row_key, or add the column",
            )),
        }
    }
    if in_mode {
        let plain = |name: &str| name.trim().trim_matches('`').to_owned();
        let mut sorting: Vec<String> = found.sorting_key.split(',').map(plain).collect();
        let mut row_key = config.row_key.clone();
        sorting.sort();
        row_key.sort();
        if sorting != row_key {
            misfits.push(misfit(
                format!("ORDER BY is ({}), and row_key is ({})", found.sorting_key, config.row_key.join(", ")),
                "have both name the same columns: ReplacingMergeTree replaces rows that are equal in ORDER BY",
            ));
        }
        if arguments.first() != config.version.as_ref() {
            misfits.push(misfit(
                format!(
                    "the table's version is {}, and the sink's is {}",
                    arguments.first().map_or("missing", String::as_str),
                    config.version.as_deref().unwrap_or("missing")
                ),
                "name the version column in both: ENGINE = ReplacingMergeTree(version, is_deleted)",
            ));
        }
        if let Some(outside) = partition_columns.iter().find(|name| !config.row_key.contains(name)) {
            misfits.push(misfit(
                format!("the partition key is computed from column {outside:?}, which is not in row_key"),
                "partition by row key columns only: rows in two partitions never replace each other",
            ));
        }
    }
    for &at in &key {
        if let Kind::Nullable(_) = kinds[at] {
            let name = &columns[at].name;
            misfits.push(misfit(format!("row_key column {name:?} may be null"), "make it not null"));
        }
    }
    let version = config.version.as_deref().and_then(index);
    if let (Some(name), true) = (&config.version, in_mode) {
        let fits = version.is_some_and(|at| {
            matches!(
                kinds[at],
                Kind::Int { signed: false, bits: 8..=64 } | Kind::Date | Kind::DateTime | Kind::DateTime64(_)
            )
        });
        if !fits {
            misfits.push(misfit(
                format!(
                    "version {name:?} is no column of type UInt8 to UInt64, Date, DateTime or DateTime64"
                ),
                "name such a column",
            ));
        }
    }
    let missing: Vec<&String> = partition_columns.iter().filter(|name| index(name).is_none()).collect();
    if let (Some(name), false) = (missing.first(), is_computed) {
        misfits.push(misfit(
            format!("the partition key is computed from column {name:?}, which records do not fill"),
            "partition by other columns",
        ));
    }
    let partition = (!partition_columns.is_empty()).then(|| {
        let columns_of: Vec<usize> = partition_columns.iter().filter_map(|name| index(name)).collect();
        let structure: Vec<String> = columns_of
            .iter()
            .map(|&at| format!("{} {}", quoted(&columns[at].name), columns[at].type_name))
            .collect();
        Partition {
            columns: columns_of,
            expression: found.partition_key.clone(),
            structure: structure.join(", "),
        }
    });
    Layout {
        database: database.to_owned(),
        table: table.to_owned(),
        columns: columns
            .iter()
            .zip(&kinds)
            .map(|(column, kind)| Column {
                name: column.name.clone(),
                type_name: column.type_name.clone(),
                nullable: matches!(kind, Kind::Nullable(_)),
                has_default: column.default_kind == "DEFAULT",
            })
            .collect(),
        kinds,
        key,
        version: version.filter(|_| in_mode),
        partition,
        deleted,
        batch: config.batch_column.clone(),
        statement: String::new(),
        tag: 0,
        window,
        replicated,
        plain: config.mode == Mode::Insert
            && found.engine == "MergeTree"
            && !expires(&found.create_table_query),
        views: !found.views.is_empty(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engines_arguments_are_columns() {
        assert_eq!(arguments("ReplacingMergeTree(v, `del`) ORDER BY id"), ["v", "del"]);
        assert_eq!(
            arguments("ReplicatedReplacingMergeTree('/c/{shard}/t', '{replica}', v) ORDER BY (a, b)"),
            ["v"]
        );
        assert_eq!(arguments("ReplacingMergeTree ORDER BY f(id)"), Vec::<String>::new());
    }

    #[test]
    fn a_tables_ttl_is_seen_of_rows_and_of_columns() {
        for expiring in
            ["(a Date) ENGINE = MergeTree ORDER BY a TTL a + toIntervalDay(1)", "(a Date, b UInt8 TTL a)"]
        {
            assert!(expires(expiring), "{expiring}");
        }
        assert!(!expires("(`ttl` Date, THROTTLED UInt8) ENGINE = MergeTree"));
    }

    #[test]
    fn a_tables_own_setting_comes_before_the_servers() {
        let found = TableRow {
            engine: "MergeTree".into(),
            engine_full: "MergeTree ORDER BY id SETTINGS a = 5, index_granularity = 8192".into(),
            partition_key: String::new(),
            sorting_key: "id".into(),
            create_table_query: String::new(),
            views: Vec::new(),
        };
        let defaults =
            [("a", "7"), ("b", "8")].map(|(name, value)| Setting { name: name.into(), value: value.into() });
        assert_eq!(setting(&found, &defaults, "a"), Some("5"));
        assert_eq!((setting(&found, &defaults, "b"), setting(&found, &defaults, "c")), (Some("8"), None));
    }
}
