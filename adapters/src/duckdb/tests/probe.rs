//! Start-up checks: what fits, and each thing that does not.

use super::super::*;

fn misfits(ddl: &str, change: impl FnOnce(&mut DuckdbConfig)) -> Vec<String> {
    let folder = tempfile::tempdir().unwrap();
    let mut config = DuckdbConfig::new(folder.path().join("rows.db"), "t");
    FileConnection::open(&config.path).unwrap().execute_batch(ddl).unwrap();
    change(&mut config);
    probe::probe(&config).err().unwrap_or_default().iter().map(ToString::to_string).collect()
}

fn keyed(mode: Mode, row_key: &[&str], version: Option<&str>) -> impl FnOnce(&mut DuckdbConfig) {
    let row_key = row_key.iter().map(|name| (*name).to_owned()).collect();
    let version = version.map(str::to_owned);
    move |config| (config.mode, config.row_key, config.version) = (mode, row_key, version)
}

#[test]
fn unique_indexes_in_every_form() {
    for ddl in [
        "CREATE TABLE t (id INTEGER PRIMARY KEY, a VARCHAR)",
        "CREATE TABLE t (id VARCHAR UNIQUE, a VARCHAR)",
        "CREATE TABLE t (id VARCHAR, a VARCHAR); CREATE UNIQUE INDEX i ON t (id)",
        "CREATE TABLE t (id VARCHAR PRIMARY KEY, a VARCHAR UNIQUE)",
        "CREATE TABLE t (id VARCHAR, a VARCHAR); CREATE UNIQUE INDEX i ON t (a); CREATE UNIQUE INDEX j ON t (\"id\")",
    ] {
        assert_eq!(misfits(ddl, keyed(Mode::Upsert, &["id"], None)), [""; 0], "{ddl}");
    }
    for ddl in [
        "CREATE TABLE t (id VARCHAR, a VARCHAR)",
        "CREATE TABLE t (id VARCHAR, a VARCHAR); CREATE INDEX i ON t (id)",
        "CREATE TABLE t (id VARCHAR, a VARCHAR, UNIQUE (id, a))",
    ] {
        let found = misfits(ddl, keyed(Mode::Upsert, &["id"], None));
        assert!(
            found.len() == 1 && found[0].contains("run: CREATE UNIQUE INDEX \"t_id\" ON \"t\" (\"id\")"),
            "{ddl}: {found:?}"
        );
    }
}

#[test]
fn whether_rows_stand_apart_is_read_from_the_table() {
    for (ddl, row_key, apart) in [
        ("CREATE TABLE t (id INTEGER PRIMARY KEY, a INTEGER CHECK (a > 0))", &["id"][..], true),
        ("CREATE TABLE t (id INTEGER, a INTEGER); CREATE UNIQUE INDEX i ON t (id)", &["id"], true),
        ("CREATE TABLE t (id INTEGER, a INTEGER)", &[], true),
        ("CREATE TABLE t (id INTEGER PRIMARY KEY, a INTEGER)", &[], false),
        ("CREATE TABLE t (id INTEGER PRIMARY KEY, a INTEGER UNIQUE)", &["id"], false),
        (
            "CREATE TABLE t (id INTEGER PRIMARY KEY, a INTEGER); CREATE UNIQUE INDEX i ON t (a)",
            &["id"],
            false,
        ),
        (
            "CREATE TABLE p (id INTEGER PRIMARY KEY); CREATE TABLE t (id INTEGER PRIMARY KEY, a INTEGER REFERENCES p)",
            &["id"],
            false,
        ),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let mut config = DuckdbConfig::new(folder.path().join("rows.db"), "t");
        FileConnection::open(&config.path).unwrap().execute_batch(ddl).unwrap();
        config.row_key = row_key.iter().map(|name| (*name).to_owned()).collect();
        assert_eq!(probe::probe(&config).unwrap().apart, apart, "{ddl}");
    }
}

#[test]
fn each_thing_that_does_not_fit_is_named() {
    let newer = || keyed(Mode::UpsertIfNewer, &["id"], Some("v"));
    for (ddl, change, part) in [
        ("CREATE VIEW t AS SELECT 1 AS id", keyed(Mode::Insert, &[], None), "is a view"),
        (
            "CREATE TABLE t (id INTEGER, l INTEGER[])",
            keyed(Mode::Insert, &[], None),
            "column \"l\" of table \"t\" has the type INTEGER[]",
        ),
        (
            "CREATE TABLE t (id INTEGER, s STRUCT(a INTEGER))",
            keyed(Mode::Insert, &[], None),
            "STRUCT(a INTEGER)",
        ),
        (
            "CREATE TABLE t (id VARCHAR PRIMARY KEY); CREATE UNIQUE INDEX i ON t (lower(id))",
            keyed(Mode::Insert, &["id"], None),
            "the unique index \"i\" of table \"t\" is on an expression",
        ),
        ("CREATE TABLE t (id BIT)", keyed(Mode::Insert, &[], None), "the type BIT"),
        ("CREATE TABLE u (id INTEGER)", keyed(Mode::Insert, &[], None), "there is no table \"t\""),
        (
            "CREATE TABLE u (id INTEGER)",
            keyed(Mode::Upsert, &["id"], None),
            "CREATE TABLE \"t\" (\"id\" VARCHAR, PRIMARY KEY (\"id\"))",
        ),
        (
            "CREATE TABLE t (id INTEGER PRIMARY KEY)",
            keyed(Mode::Upsert, &["no"], None),
            "row_key \"no\" is no column",
        ),
        (
            "CREATE TABLE t (id INTEGER PRIMARY KEY, g INTEGER AS (id + 1))",
            keyed(Mode::Insert, &["g"], None),
            "row_key \"g\" is no column of table \"t\" that can be written to",
        ),
        (
            "CREATE TABLE t (id INTEGER PRIMARY KEY, v INTERVAL)",
            newer(),
            "version \"v\" has the type INTERVAL",
        ),
        ("CREATE TABLE t (id VARCHAR COLLATE NOCASE PRIMARY KEY, v INTEGER)", newer(), "collation"),
        (
            "CREATE TABLE t (id INTEGER PRIMARY KEY, v INTEGER)",
            keyed(Mode::UpsertIfNewer, &["id"], None),
            "needs a version column",
        ),
        ("CREATE TABLE t (id INTEGER)", keyed(Mode::Upsert, &[], None), "need a row key"),
        (
            "CREATE TABLE oncegate_marks (id INTEGER)",
            keyed(Mode::Insert, &[], None),
            "bookkeeping table oncegate_marks is not as this build makes it",
        ),
    ] {
        let found = misfits(ddl, change);
        assert!(found.iter().any(|misfit| misfit.contains(part)), "{ddl}: {found:?}");
    }
}

#[test]
fn generated_columns_are_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let config = DuckdbConfig::new(folder.path().join("rows.db"), "t");
    let ddl = "CREATE TABLE t (id INTEGER, g INTEGER AS (id + 1), d INTEGER DEFAULT 5)";
    FileConnection::open(&config.path).unwrap().execute_batch(ddl).unwrap();
    let layout = probe::probe(&config).unwrap();
    let names: Vec<(&str, bool)> =
        layout.columns.iter().map(|column| (column.name.as_str(), column.has_default)).collect();
    assert_eq!(names, [("id", false), ("d", true)]);
}

#[test]
fn files_that_are_none_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let missing = DuckdbConfig::new(folder.path().join("no/rows.db"), "t");
    let text = |config: &DuckdbConfig| probe::probe(config).unwrap_err()[0].to_string();
    assert!(text(&missing).contains("rows.db"), "{}", text(&missing));
    let other = DuckdbConfig::new(folder.path().join("text.db"), "t");
    std::fs::write(&other.path, "x".repeat(10_000)).unwrap();
    assert!(text(&other).contains("cannot be opened"), "{}", text(&other));
    assert!(text(&DuckdbConfig::new(":memory:", "t")).contains("names no file"));
}
