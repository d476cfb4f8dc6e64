//! Start-up checks, all misfits in one list.

use tracing::warn;

use super::{
    Dialect, StreamLoadConfig,
    client::Failure,
    ddl::{self, Model, Otherwise},
    layout::{Keep, Layout, delete_sign, headers, member, statement},
    load::Loader,
    types::{self, Kind},
    values,
};
use crate::{
    sink::{Column, Misfit, Mode},
    value::Value,
};

/// Labels that are kept for a shorter time are of no use for any retry, s.
const LEAST_SECONDS: i64 = 600;
/// Of fewer loads neither.
const LEAST_LOADS: i64 = 100;
/// What should be kept.
const GOOD_LOADS: i64 = 10_000;

fn misfit(what: impl Into<String>, remedy: impl Into<String>) -> Misfit {
    Misfit { what: what.into(), remedy: remedy.into() }
}

/// How the table looks, or everything that does not fit.
pub(super) async fn probe(config: &StreamLoadConfig, loader: &mut Loader) -> Result<Layout, Vec<Misfit>> {
    let (database, table) = config.names();
    let who = config.dialect.name();
    let shown = match loader.sql(&format!("SHOW CREATE TABLE `{database}`.`{table}`")).await {
        Ok(rows) => rows,
        Err(failure) => {
            let remedy = match failure {
                Failure::Unsent(_) => "check the sink's url, and that a front-end runs there",
                Failure::Unclear(_) => {
                    "check user and password, that the table is there and that the user may SELECT from it; StarRocks answers SQL over HTTP from 3.2 on"
                }
            };
            return Err(vec![misfit(
                format!("{who} cannot be asked for the table: {}", failure.text()),
                remedy,
            )]);
        }
    };
    let text = shown.first().and_then(|row| row.get("create table")).cloned().unwrap_or_default();
    let found = match ddl::parse(&text) {
        Ok(found) => found,
        Err(why) => {
            return Err(vec![misfit(
                format!("{database}.{table} is no table that can be read: {why}"),
                "name a table, no view and no external table",
            )]);
        }
    };
    let mut misfits = Vec::new();
    check_model(config, &found, &mut misfits);
    let keep = keep(config, loader, &mut misfits).await;
    let mut layout = fill(config, loader, &found, keep, &mut misfits);
    let types: String = layout.columns.iter().map(|column| format!(",{}", column.type_name)).collect();
    layout.tag = xxhash_rust::xxh3::xxh3_64((layout.statement.clone() + &types).as_bytes()) as u32;
    if misfits.is_empty()
        && let Err(why) = loader.look(&headers(&layout.statement)).await
    {
        misfits.push(misfit(
            format!("nothing can be loaded into {database}.{table}: {why}"),
            format!("GRANT the user what a load needs (StarRocks: INSERT, Doris: LOAD), and see that the back-ends that {who} redirects to can be reached from here"),
        ));
    }
    if misfits.is_empty() { Ok(layout) } else { Err(misfits) }
}

fn check_model(config: &StreamLoadConfig, found: &ddl::Table, misfits: &mut Vec<Misfit>) {
    let property =
        |name: &str| found.properties.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str());
    let sequence = property("function_column.sequence_col");
    let typed = property("function_column.sequence_type");
    let keyed = match config.dialect {
        Dialect::StarRocks => (Model::Primary, "PRIMARY KEY"),
        Dialect::Doris => (Model::Unique, "UNIQUE KEY"),
    };
    match config.mode {
        Mode::Insert => {
            if !config.row_key.is_empty() {
                misfits.push(misfit(
                    "mode = \"insert\" with row_key: a load does not look for the row that is there",
                    "remove row_key (the route's key keeps copies out), or use mode = \"upsert\" and a keyed table",
                ));
            }
            if found.model != Model::Duplicate {
                misfits.push(misfit(
                    format!("mode = \"insert\" needs a DUPLICATE KEY table, and this one is {:?}", found.model),
                    "a row would replace or change the one that is there: use mode = \"upsert\", or another table",
                ));
            }
            return;
        }
        Mode::Upsert | Mode::UpsertIfNewer if found.model != keyed.0 => {
            misfits.push(misfit(
                format!("this mode needs a {} table, and this one is {:?}", keyed.1, found.model),
                format!("make the table with {}({})", keyed.1, config.row_key.join(", ")),
            ));
        }
        _ => {}
    }
    let (mut key, mut row_key) = (found.key.clone(), config.row_key.clone());
    key.sort();
    row_key.sort();
    if found.model == keyed.0 && key != row_key {
        misfits.push(misfit(
            format!(
                "{} is ({}), and row_key is ({})",
                keyed.1,
                found.key.join(", "),
                config.row_key.join(", ")
            ),
            "have both name the same columns",
        ));
    }
    if config.dialect == Dialect::StarRocks {
        return;
    }
    if property("enable_unique_key_merge_on_write") == Some("false") {
        warn!(
            "table {}: enable_unique_key_merge_on_write = false: rows are merged when they are read, which is slow",
            config.table
        );
    }
    match config.mode {
        Mode::Upsert if sequence.is_some() || typed.is_some() => misfits.push(misfit(
            "the table has a sequence column, and mode = \"upsert\" does not compare it",
            "use mode = \"upsert-if-newer\" with the sequence column as version",
        )),
        Mode::UpsertIfNewer
            if typed.is_none() && sequence.is_none_or(|name| Some(name) != config.version.as_deref()) =>
        {
            misfits.push(misfit(
                format!(
                    "the table's sequence column is {}, and the sink's version is {}",
                    sequence.unwrap_or("missing"),
                    config.version.as_deref().unwrap_or("missing")
                ),
                "make the table with PROPERTIES(\"function_column.sequence_col\" = \"VERSION COLUMN\"): else the last write wins",
            ));
        }
        _ => {}
    }
}

/// How long labels are kept: as the front-end says, or as it does by default.
async fn keep(config: &StreamLoadConfig, loader: &mut Loader, misfits: &mut Vec<Misfit>) -> Keep {
    let (seconds_of, loads_of): (&[&str], &str) = match config.dialect {
        Dialect::StarRocks => (&["label_keep_max_second"], "label_keep_max_num"),
        Dialect::Doris => {
            (&["label_keep_max_second", "streaming_label_keep_max_second"], "label_num_threshold")
        }
    };
    let told = loader.sql("ADMIN SHOW FRONTEND CONFIG LIKE '%label%'").await;
    let (mut seconds, mut loads) = match config.dialect {
        Dialect::StarRocks => (259_200, 1000),
        Dialect::Doris => (43_200, 2000),
    };
    match &told {
        Ok(rows) => {
            let number = |name: &str| {
                let row = rows.iter().find(|row| row.get("key").is_some_and(|key| key == name))?;
                row.get("value")?.parse::<i64>().ok()
            };
            seconds = seconds_of.iter().filter_map(|name| number(name)).min().unwrap_or(seconds);
            // One that has no such bound keeps by time alone.
            loads = number(loads_of).filter(|loads| *loads >= 0).unwrap_or(i64::MAX);
        }
        Err(_) => warn!(
            "table {}: the user may not read the front-end's settings (ADMIN SHOW FRONTEND CONFIG): labels are taken to be kept as by default, \
             {seconds} s and {loads} loads; where less is set, name label_keep",
            config.table
        ),
    }
    if let Some(given) = config.label_keep {
        let given = i64::try_from(given.as_secs()).unwrap_or(i64::MAX);
        if told.is_ok() && given > seconds {
            misfits.push(misfit(
                format!("label_keep is {given} s, and the front-end keeps labels for {seconds} s"),
                format!(
                    "leave label_keep out, or run ADMIN SET FRONTEND CONFIG (\"{}\" = \"{given}\")",
                    seconds_of[seconds_of.len() - 1]
                ),
            ));
        }
        seconds = seconds.min(given);
    }
    if seconds < LEAST_SECONDS {
        misfits.push(misfit(
            format!(
                "labels are kept for {seconds} s ({}), at least {LEAST_SECONDS} is needed",
                seconds_of.join(", ")
            ),
            "keep them for days: ADMIN SET FRONTEND CONFIG, and fe.conf",
        ));
    }
    let slow = config.request_timeout + config.connect_timeout;
    if seconds >= LEAST_SECONDS && slow.as_secs() >= seconds.unsigned_abs() / 4 {
        misfits.push(misfit(
            format!("request_timeout and connect_timeout are {slow:?} together, and labels are kept for {seconds} s: a request could come in after that"),
            "lower request_timeout to less than a quarter of it, or have labels kept for longer",
        ));
    }
    if loads < LEAST_LOADS {
        misfits.push(misfit(
            format!("the labels of {loads} loads are kept ({loads_of}), at least {LEAST_LOADS} is needed"),
            format!("ADMIN SET FRONTEND CONFIG (\"{loads_of}\" = \"{GOOD_LOADS}\"), and in fe.conf"),
        ));
    } else if loads < GOOD_LOADS {
        warn!(
            "table {}: {loads_of} = {loads}: once half as many loads have begun, of anyone into the cluster, a load whose answer was lost and whose \
             label is not known is not tried again; consider {GOOD_LOADS}",
            config.table
        );
    }
    Keep { ms: seconds.saturating_mul(1000), loads }
}

fn fill(
    config: &StreamLoadConfig,
    loader: &Loader,
    found: &ddl::Table,
    keep: Keep,
    misfits: &mut Vec<Misfit>,
) -> Layout {
    let dialect = config.dialect;
    let (mut columns, mut kinds, mut defaults) = (Vec::new(), Vec::new(), Vec::new());
    for column in found.columns.iter().filter(|column| column.default != Otherwise::Computed) {
        if column.name.contains(['`', ',', '=', '\n', '\r', ':', '\\', '"']) {
            misfits.push(misfit(
                format!("column {:?} has a name that a load cannot say", column.name),
                "rename it",
            ));
        }
        let kind = types::parse(dialect, &column.type_name).unwrap_or_else(|why| {
            misfits.push(misfit(
                format!("column {:?} has type {}: {why}", column.name, column.type_name),
                "change its type, or drop it",
            ));
            Kind::Text(0)
        });
        let default = match &column.default {
            Otherwise::Literal(text) => {
                let default = literal(&kind, text);
                if default.is_none() {
                    warn!(
                        "table {}: the default of column {:?} is not understood: records must bring it",
                        config.table, column.name
                    );
                }
                default
            }
            _ => None,
        };
        columns.push(Column {
            name: column.name.clone(),
            type_name: column.type_name.clone(),
            nullable: column.nullable,
            has_default: default.is_some(),
        });
        kinds.push(kind);
        defaults.push(default);
    }
    let index = |name: &str| columns.iter().position(|column: &Column| column.name == name);
    let mut key = Vec::new();
    for name in &config.row_key {
        match index(name) {
            Some(at)
                if matches!(
                    kinds[at],
                    Kind::Float
                        | Kind::Double
                        | Kind::Json
                        | Kind::Array(_)
                        | Kind::Map(..)
                        | Kind::Struct(_)
                ) =>
            {
                misfits.push(misfit(
                    format!("row_key column {name:?} has type {}", columns[at].type_name),
                    "name columns that can be a key",
                ));
            }
            Some(at) => key.push(at),
            None => misfits.push(misfit(
                format!("row_key names column {name:?}, which the table has not, or makes itself"),
                "correct row_key, or add the column",
            )),
        }
    }
    let newer = config.mode == Mode::UpsertIfNewer;
    let version = config.version.as_deref().and_then(index).filter(|_| newer);
    if newer && !version.is_some_and(|at| matches!(kinds[at], Kind::Int(..) | Kind::Date | Kind::DateTime(_)))
    {
        misfits.push(misfit(
            format!(
                "version {:?} is no column of an integer type, DATE or DATETIME",
                config.version.as_deref().unwrap_or_default()
            ),
            "name such a column",
        ));
    }
    let deletes = match (config.mode, dialect) {
        (Mode::Upsert, _) | (Mode::UpsertIfNewer, Dialect::Doris) => Some(delete_sign(dialect)),
        _ => None,
    };
    let typed = found.properties.iter().any(|(name, _)| name == "function_column.sequence_type");
    let version_name = config.version.as_deref().filter(|_| newer);
    let statement = load_headers(dialect, loader, &columns, &kinds, deletes, version_name, typed);
    Layout { dialect, columns, kinds, defaults, key, version, deletes, statement, tag: 0, keep }
}

fn load_headers(
    dialect: Dialect,
    loader: &Loader,
    columns: &[Column],
    kinds: &[Kind],
    deletes: Option<&'static str>,
    version: Option<&str>,
    typed: bool,
) -> String {
    let mut names: Vec<String> =
        columns.iter().zip(kinds).map(|(column, kind)| format!("`{}`", member(&column.name, kind))).collect();
    names.extend(deletes.map(|sign| format!("`{sign}`")));
    for (column, kind) in columns.iter().zip(kinds) {
        if let Kind::Binary(_) = kind {
            names.push(format!("`{0}`=to_binary(`{1}`,'hex')", column.name, member(&column.name, kind)));
        }
    }
    let mut headers = vec![
        ("format", "json".to_owned()),
        ("columns", names.join(",")),
        ("strict_mode", "true".to_owned()),
        ("max_filter_ratio", "0".to_owned()),
        ("timeout", loader.timeout_header()),
    ];
    match dialect {
        Dialect::StarRocks => {
            headers.extend([
                ("strip_outer_array", "true".to_owned()),
                ("ignore_json_size", "true".to_owned()),
                // It takes no labels.
                ("enable_merge_commit", "false".to_owned()),
            ]);
            headers.extend(version.map(|version| ("merge_condition", version.to_owned())));
        }
        Dialect::Doris => {
            headers.extend([
                ("read_json_by_line", "true".to_owned()),
                // It takes no labels.
                ("group_commit", "off_mode".to_owned()),
            ]);
            if let Some(sign) = deletes {
                headers.extend([("merge_type", "MERGE".to_owned()), ("delete", format!("`{sign}`=1"))]);
            }
            headers.extend(
                version.filter(|_| typed).map(|version| ("function_column.sequence_col", version.to_owned())),
            );
        }
    }
    statement(&headers)
}

/// A default as a value of its column.
fn literal(kind: &Kind, text: &str) -> Option<Vec<u8>> {
    let text = match (kind, text) {
        (Kind::Bool, "1") => "true",
        (Kind::Bool, "0") => "false",
        (_, text) => text,
    };
    let value = match kind {
        Kind::Array(_) | Kind::Map(..) | Kind::Struct(_) | Kind::Json => Value::Json(text),
        _ => Value::Text(text),
    };
    let mut out = Vec::new();
    values::put(kind, value, &mut out).ok().map(|()| out)
}
