//! Start-up checks: what fits, and each thing that does not.

use super::super::*;

struct Case {
    folder: tempfile::TempDir,
    config: SqliteConfig,
}

fn case(ddl: &str, mode: Mode, row_key: &[&str]) -> Case {
    let folder = tempfile::tempdir().unwrap();
    let mut config = SqliteConfig::new(folder.path().join("rows.db"), "t");
    config.mode = mode;
    config.row_key = row_key.iter().map(|name| (*name).to_owned()).collect();
    rusqlite::Connection::open(&config.path).unwrap().execute_batch(ddl).unwrap();
    Case { folder, config }
}

impl Case {
    fn misfits(&self) -> Vec<String> {
        probe::probe(&self.config).err().unwrap_or_default().iter().map(ToString::to_string).collect()
    }

    fn layout(&self) -> probe::Layout {
        probe::probe(&self.config).unwrap()
    }
}

#[track_caller]
fn refused(ddl: &str, row_key: &[&str], part: &str) {
    let found = case(ddl, Mode::Upsert, row_key).misfits();
    assert!(found.len() == 1 && found[0].contains(part), "{ddl}: {found:?}");
}

#[test]
fn unique_indexes_in_every_form() {
    for ddl in [
        "CREATE TABLE t (id INTEGER PRIMARY KEY, a)",
        "CREATE TABLE t (id TEXT PRIMARY KEY, a)",
        "CREATE TABLE t (id TEXT PRIMARY KEY, a) WITHOUT ROWID",
        "CREATE TABLE t (id INTEGER PRIMARY KEY DESC, a)",
        "CREATE TABLE t (id INT PRIMARY KEY, a ANY) STRICT",
        "CREATE TABLE t (id UNIQUE, a)",
        "CREATE TABLE t (id TEXT COLLATE NOCASE PRIMARY KEY, a)",
        "CREATE TABLE t (id, a); CREATE UNIQUE INDEX i ON t (id COLLATE RTRIM)",
        "CREATE TABLE t (id, a); CREATE UNIQUE INDEX i ON t (id COLLATE NOCASE); CREATE UNIQUE INDEX j ON t (id)",
    ] {
        let case = case(ddl, Mode::Upsert, &["id"]);
        assert_eq!(case.misfits(), [""; 0], "{ddl}");
    }
    for ddl in [
        "CREATE TABLE t (id TEXT, a)",
        "CREATE TABLE t (id TEXT, a); CREATE INDEX i ON t (id)",
        "CREATE TABLE t (id TEXT, a, UNIQUE (id, a))",
        "CREATE TABLE t (id TEXT, a); CREATE UNIQUE INDEX i ON t (id) WHERE a > 5",
        "CREATE TABLE t (id TEXT, a); CREATE UNIQUE INDEX i ON t (lower(id))",
    ] {
        refused(ddl, &["id"], "run: CREATE UNIQUE INDEX \"t_id\" ON \"t\" (\"id\")");
    }
    let mixed = case("CREATE TABLE t (id INTEGER PRIMARY KEY, a)", Mode::Upsert, &["id"]).layout();
    assert!(!mixed.columns[0].nullable && mixed.columns[0].has_default, "a row id makes itself");
    let both = "CREATE TABLE t (a TEXT, b TEXT, PRIMARY KEY (b, a))";
    assert_eq!(case(both, Mode::Upsert, &["a", "b"]).misfits(), [""; 0], "in any order");
}

#[test]
fn what_no_row_can_be_written_to_is_refused() {
    refused("CREATE TABLE u (id PRIMARY KEY); CREATE VIEW t AS SELECT * FROM u", &["id"], "is a view");
    refused("CREATE TABLE u (id)", &["id"], "make it, with the right types: CREATE TABLE \"t\"");
    let deferred = "CREATE TABLE p (id PRIMARY KEY); \
                    CREATE TABLE t (id PRIMARY KEY, p REFERENCES p DEFERRABLE INITIALLY DEFERRED)";
    refused(deferred, &["id"], "INITIALLY DEFERRED");
    let from_another =
        "CREATE TABLE t (id PRIMARY KEY); CREATE TABLE c (t REFERENCES t DEFERRABLE INITIALLY DEFERRED)";
    refused(from_another, &["id"], "table \"c\"");
    let immediate = "CREATE TABLE p (id PRIMARY KEY); CREATE TABLE t (id PRIMARY KEY, p REFERENCES p)";
    assert_eq!(case(immediate, Mode::Upsert, &["id"]).misfits(), [""; 0]);

    let mut generated =
        case("CREATE TABLE t (id PRIMARY KEY, a, g AS (a + 1), s AS (a) STORED)", Mode::Upsert, &["id"]);
    let names: Vec<String> = generated.layout().columns.into_iter().map(|column| column.name).collect();
    assert_eq!(names, ["id", "a"], "generated columns are left out");
    generated.config.columns = Some(vec!["id".to_owned(), "g".to_owned()]);
    assert!(generated.misfits()[0].contains("is generated"));
}

#[test]
fn all_misfits_come_in_one_list() {
    let mut case =
        case("CREATE TABLE t (id TEXT, needed TEXT NOT NULL, a)", Mode::UpsertIfNewer, &["id", "nope"]);
    case.config.columns = Some(vec!["id".to_owned(), "b".to_owned(), "id".to_owned()]);
    let found = case.misfits();
    for part in [
        "version",
        "\"id\" twice",
        "\"b\" is no column",
        "\"needed\" is NOT NULL",
        "row_key \"nope\" is no column",
    ] {
        assert_eq!(found.iter().filter(|misfit| misfit.contains(part)).count(), 1, "{part}: {found:#?}");
    }
    assert_eq!(found.len(), 5, "{found:#?}");
    case.config.version = Some("id".to_owned());
    assert!(case.misfits().iter().any(|misfit| misfit.contains("both version and row key")));
}

#[test]
fn files_that_cannot_hold_the_rows_are_refused() {
    let mut case = case("CREATE TABLE t (id PRIMARY KEY)", Mode::Insert, &[]);
    for path in ["", ":memory:"] {
        case.config.path = path.into();
        assert!(case.misfits()[0].contains("names no file"));
    }
    case.config.path = case.folder.path().join("no/such/folder.db");
    assert!(case.misfits()[0].contains("cannot be read"));
    let text = case.folder.path().join("text");
    std::fs::write(&text, "not a database, only text that is long enough to have a header".repeat(20))
        .unwrap();
    case.config.path = text;
    assert!(case.misfits()[0].contains("cannot be read"), "{:?}", case.misfits());
}

#[test]
fn a_foreign_bookkeeping_table_is_named() {
    let case =
        case("CREATE TABLE t (id PRIMARY KEY); CREATE TABLE oncegate_marks (route TEXT)", Mode::Insert, &[]);
    let found = case.misfits();
    assert!(found.iter().any(|misfit| misfit.contains("oncegate_marks")), "{found:?}");
    let mut own = case;
    own.config.table = "oncegate_shards".to_owned();
    assert!(own.misfits().iter().any(|misfit| misfit.contains("is a bookkeeping table")));
}

#[test]
fn create_makes_a_missing_table_once() {
    let mut case = case("CREATE TABLE other (id)", Mode::Upsert, &["id"]);
    case.config.create = Some("CREATE TABLE t (id INTEGER PRIMARY KEY, a TEXT)".to_owned());
    assert_eq!(case.misfits(), [""; 0]);
    assert_eq!(case.misfits(), [""; 0], "the second time it is there");
    let bad = self::case("CREATE TABLE other (id)", Mode::Insert, &[]);
    let config = SqliteConfig { create: Some("CREATE TABEL t".to_owned()), ..bad.config };
    let found = probe::probe(&config).unwrap_err();
    assert!(found.iter().any(|misfit| misfit.what.contains("create failed")), "{found:?}");
}

#[test]
fn names_are_quoted() {
    let mut case = case(
        "CREATE TABLE \"we\"\"ird table\" (\"se lect\" TEXT PRIMARY KEY, \"a\"\"b\" TEXT)",
        Mode::Upsert,
        &["se lect"],
    );
    case.config.table = "we\"ird table".to_owned();
    assert_eq!(case.misfits(), [""; 0]);
}

#[test]
fn several_instances_may_start_at_once_on_a_new_file() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = SqliteConfig::new(folder.path().join("rows.db"), "t");
    config.create = Some("CREATE TABLE t (id INTEGER PRIMARY KEY); CREATE INDEX i ON t (id)".to_owned());
    std::thread::scope(|scope| {
        let probes: Vec<_> = (0..8).map(|_| scope.spawn(|| probe::probe(&config))).collect();
        for probe in probes {
            probe.join().unwrap().unwrap();
        }
    });
}

#[test]
fn create_leaves_nothing_half_made() {
    let mut case = case("CREATE TABLE other (id)", Mode::Insert, &[]);
    case.config.create = Some("CREATE TABLE t (id); CREATE TABLE other (id)".to_owned());
    assert_eq!(case.misfits().len(), 2, "the DDL failed, and there is no table");
}
