//! A shadow table in a SQLite file.

use std::time::Duration;

use adapters::sqlite::SqliteConfig;
use rusqlite::{Connection, OpenFlags, OptionalExtension, types::ValueRef};

use super::{Cleaned, SUFFIX, Survey};
use crate::drill::{shape::Row, values::hex};

/// Bookkeeping tables, and what of a drill is in them: `?1` is the route, `?2` the target.
const BOOKKEEPING: [(&str, &str); 5] = [
    ("oncegate_routes", "name = ?1 AND ?2 <> ''"),
    ("oncegate_shards", "route = ?1 AND ?2 <> ''"),
    ("oncegate_marks", "route = ?1 AND ?2 <> ''"),
    ("oncegate_dead_letters", "route = ?1 AND ?2 <> ''"),
    ("oncegate_tombstones", "route = ?1 OR target = ?2"),
];

/// A table of the file, and the one beside it.
pub(crate) struct SqliteShadow {
    config: SqliteConfig,
    route: String,
    shadow: String,
    /// Bookkeeping tables that were there before.
    before: Vec<String>,
    /// The file's journal mode before: the gateway turns the write-ahead log on.
    journal: String,
    made: bool,
}

impl SqliteShadow {
    pub(super) fn new(config: SqliteConfig, route: String) -> Self {
        let shadow = format!("{}{SUFFIX}", config.table);
        Self { config, route, shadow, before: Vec::new(), journal: String::new(), made: false }
    }

    pub(super) fn table(&self) -> String {
        self.shadow.clone()
    }

    fn open(&self) -> Result<Connection, String> {
        let path = &self.config.path;
        let named = |fault: rusqlite::Error| format!("{}: {fault}", path.display());
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let connection = Connection::open_with_flags(path, flags).map_err(named)?;
        connection.busy_timeout(self.config.busy_timeout.max(Duration::from_secs(10))).map_err(named)?;
        Ok(connection)
    }

    fn bookkeeping(connection: &Connection) -> Result<Vec<String>, String> {
        let mut found = Vec::new();
        for (name, _) in BOOKKEEPING {
            if sql_of(connection, "table", name)?.is_some() {
                found.push(name.to_owned());
            }
        }
        Ok(found)
    }

    pub(super) fn survey(&mut self) -> Result<Survey, String> {
        let (path, table) = (self.config.path.display().to_string(), &self.config.table);
        if !self.config.path.exists() {
            return Err(format!("{path} does not exist; make the file with its table {table} first"));
        }
        let connection = self.open()?;
        if sql_of(&connection, "table", table)?.is_none() {
            return Err(format!("{path} has no table {table}; create it first"));
        }
        if sql_of(&connection, "table", &self.shadow)?.is_some() {
            return Err(format!(
                "{path} has a table {}: another drill is at work, or one was killed; if none is, DROP TABLE {}",
                self.shadow,
                quote(&self.shadow)
            ));
        }
        let query = format!("SELECT EXISTS (SELECT 1 FROM {})", quote(table));
        let has_rows =
            connection.query_row(&query, [], |row| row.get(0)).map_err(|fault| fault.to_string())?;
        self.before = Self::bookkeeping(&connection)?;
        let journal = connection.query_row("PRAGMA journal_mode", [], |row| row.get(0));
        self.journal = journal.map_err(|fault| fault.to_string())?;
        let mut makes = vec![format!("table {}, like {table}", self.shadow)];
        makes.push(if self.before.len() == BOOKKEEPING.len() {
            format!("rows of a route {} in the tables oncegate_*", self.route)
        } else {
            "the bookkeeping tables oncegate_* that are missing".to_owned()
        });
        Ok(Survey { place: format!("table {table} of the file {path}"), local: true, has_rows, makes })
    }

    pub(super) fn make(&mut self) -> Result<(), String> {
        let mut connection = self.open()?;
        let table = &self.config.table;
        let ddl = sql_of(&connection, "table", table)?.unwrap_or_default();
        let mut script =
            vec![renamed(&ddl, &[(table, &self.shadow)]).ok_or("the table's DDL cannot be read")?];
        let query = "SELECT name, sql FROM sqlite_schema WHERE type = 'index' AND tbl_name = ?1 COLLATE NOCASE \
                     AND sql IS NOT NULL";
        let indexes = || -> rusqlite::Result<Vec<(String, String)>> {
            let mut statement = connection.prepare(query)?;
            let rows = statement.query_map([table], |row| Ok((row.get(0)?, row.get(1)?)))?;
            rows.collect()
        };
        for (name, sql) in indexes().map_err(|fault| fault.to_string())? {
            let shadow = format!("{name}{SUFFIX}");
            let renamed = renamed(&sql, &[(&name, &shadow), (table, &self.shadow)]);
            script.push(renamed.ok_or_else(|| format!("the DDL of index {name} cannot be read"))?);
        }
        let run = || -> rusqlite::Result<()> {
            let transaction = connection.transaction()?;
            for ddl in &script {
                transaction.execute_batch(ddl)?;
            }
            transaction.commit()
        };
        let mut run = run;
        run().map_err(|fault| format!("table {} cannot be made: {fault}", self.shadow))?;
        self.made = true;
        Ok(())
    }

    pub(super) fn read(
        &self,
        columns: &[&str],
        each: &mut (dyn FnMut(Row) -> Result<(), String> + Send),
    ) -> Result<(), String> {
        let connection = self.open()?;
        let list: Vec<String> = columns.iter().map(|name| quote(name)).collect();
        let query = format!("SELECT {} FROM {}", list.join(", "), quote(&self.shadow));
        let mut statement = connection.prepare(&query).map_err(|fault| fault.to_string())?;
        let mut rows = statement.query([]).map_err(|fault| fault.to_string())?;
        while let Some(row) = rows.next().map_err(|fault| fault.to_string())? {
            let mut values = Row::with_capacity(columns.len());
            for at in 0..columns.len() {
                values.push(match row.get_ref(at).map_err(|fault| fault.to_string())? {
                    ValueRef::Null => None,
                    ValueRef::Integer(number) => Some(number.to_string()),
                    ValueRef::Real(number) => Some(format!("{number:?}")),
                    ValueRef::Text(text) => Some(String::from_utf8_lossy(text).into_owned()),
                    ValueRef::Blob(bytes) => Some(hex(bytes)),
                });
            }
            each(values)?;
        }
        Ok(())
    }

    pub(super) fn lose_a_row(&self) -> Result<(), String> {
        let table = quote(&self.shadow);
        // A table without rowid has no name for its rows but their keys.
        let query = format!("DELETE FROM {table} WHERE rowid = (SELECT min(rowid) FROM {table})");
        self.open()?.execute(&query, []).map(drop).map_err(|fault| fault.to_string())
    }

    pub(super) fn clean(&mut self) -> Cleaned {
        let mut cleaned = Cleaned::default();
        let path = self.config.path.display();
        let all = format!("table {} and rows of route {} in oncegate_* of {path}", self.shadow, self.route);
        let connection = match self.open() {
            Ok(connection) => connection,
            Err(fault) => return Cleaned { left: vec![format!("{all}: {fault}")], ..cleaned },
        };
        let now = match Self::bookkeeping(&connection) {
            Ok(now) => now,
            Err(fault) => return Cleaned { left: vec![format!("{all}: {fault}")], ..cleaned },
        };
        if self.made {
            match connection.execute_batch(&format!("DROP TABLE {}", quote(&self.shadow))) {
                Ok(()) => {
                    self.made = false;
                    cleaned.gone.push(format!("table {} of {path}", self.shadow));
                }
                Err(fault) => cleaned.left.push(format!("table {} of {path}: {fault}", self.shadow)),
            }
        }
        let mut rows = 0;
        for (name, which) in BOOKKEEPING.iter().filter(|(name, _)| now.iter().any(|now| now == name)) {
            match connection
                .execute(&format!("DELETE FROM {name} WHERE {which}"), [&self.route, &self.shadow])
            {
                Ok(count) => rows += count,
                Err(fault) => {
                    cleaned.left.push(format!("rows of route {} in {name} of {path}: {fault}", self.route))
                }
            }
            // It is never dropped: a gateway that was started meanwhile may be at home in it, with or without rows.
            if !self.before.iter().any(|before| before == name) {
                cleaned.notes.push(format!("table {name} of {path}, which gateways use, was made and stays"));
            }
        }
        cleaned.gone.push(format!("{rows} rows of route {} in oncegate_* of {path}", self.route));
        if !self.journal.is_empty() && !self.journal.eq_ignore_ascii_case("wal") {
            let back = format!("PRAGMA journal_mode = {}", self.journal);
            let now: rusqlite::Result<String> = connection.query_row(&back, [], |row| row.get(0));
            if !now.as_ref().is_ok_and(|now| now.eq_ignore_ascii_case(&self.journal)) {
                cleaned.notes.push(format!(
                    "the journal mode of {path} stays WAL, which the gateway sets, and was {}: another connection has the file open",
                    self.journal
                ));
            }
        }
        cleaned
    }
}

fn sql_of(connection: &Connection, kind: &str, name: &str) -> Result<Option<String>, String> {
    let query = "SELECT sql FROM sqlite_schema WHERE type = ?1 AND name = ?2 COLLATE NOCASE";
    connection.query_row(query, [kind, name], |row| row.get(0)).optional().map_err(|fault| fault.to_string())
}

fn quote(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// DDL with other names, each in the place of the first word that is the old one: `CREATE TABLE old`, `CREATE INDEX old ON old`.
fn renamed(ddl: &str, names: &[(&str, &str)]) -> Option<String> {
    let mut out = String::new();
    let mut rest = ddl;
    for (old, new) in names {
        loop {
            let start = rest.find(|c: char| !c.is_whitespace())?;
            out.push_str(&rest[..start]);
            rest = &rest[start..];
            let (word, length) = word(rest)?;
            let found = word.eq_ignore_ascii_case(old);
            out.push_str(if found { "" } else { &rest[..length] });
            rest = &rest[length..];
            if found {
                out.push_str(&quote(new));
                break;
            }
            // Names come before the list of columns.
            if out.ends_with('(') {
                return None;
            }
        }
    }
    Some(out + rest)
}

/// The first word, quotes taken off, and how many bytes it has with them.
fn word(text: &str) -> Option<(String, usize)> {
    let first = text.chars().next()?;
    let close = match first {
        '"' | '`' | '\'' => first,
        '[' => ']',
        _ if first.is_alphanumeric() || first == '_' || !first.is_ascii() => {
            let length = text
                .find(|c: char| !(c.is_alphanumeric() || c == '_' || c == '$' || !c.is_ascii()))
                .unwrap_or(text.len());
            return Some((text[..length].to_owned(), length));
        }
        _ => return Some((first.to_string(), first.len_utf8())),
    };
    let mut inside = String::new();
    let mut at = 1;
    loop {
        let end = at + text[at..].find(close)?;
        inside.push_str(&text[at..end]);
        at = end + 1;
        if close != ']' && text[at..].starts_with(close) {
            inside.push(close);
            at += 1;
        } else {
            return Some((inside, at));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ddl_gets_other_names_and_stays_what_it_is() {
        let cases = [
            ("CREATE TABLE orders (orders TEXT)", "CREATE TABLE \"new\" (orders TEXT)"),
            ("CREATE TABLE \"orders\"(id)", "CREATE TABLE \"new\"(id)"),
            ("CREATE TABLE [Orders]\n(id)", "CREATE TABLE \"new\"\n(id)"),
            ("CREATE TABLE `orders`(id) STRICT", "CREATE TABLE \"new\"(id) STRICT"),
        ];
        for (ddl, expected) in cases {
            assert_eq!(renamed(ddl, &[("orders", "new")]).as_deref(), Some(expected));
        }
        let ddl = "CREATE UNIQUE INDEX by_id ON orders (id, orders)";
        let expected = "CREATE UNIQUE INDEX \"by_id2\" ON \"new\" (id, orders)";
        assert_eq!(renamed(ddl, &[("by_id", "by_id2"), ("orders", "new")]).as_deref(), Some(expected));
        assert_eq!(renamed("CREATE TABLE other (orders TEXT)", &[("orders", "new")]), None);
        let ddl = "CREATE TABLE \"a\"\"b\" (id)";
        assert_eq!(renamed(ddl, &[("a\"b", "c")]).as_deref(), Some("CREATE TABLE \"c\" (id)"));
    }

    #[test]
    fn a_shadow_is_made_with_its_indexes_and_taken_away_with_all_that_it_left() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("shop.db");
        let connection = Connection::open(&path).unwrap();
        let ddl = "CREATE TABLE orders (id TEXT PRIMARY KEY, at TEXT) STRICT, WITHOUT ROWID;
                   CREATE UNIQUE INDEX by_at ON orders (at); INSERT INTO orders VALUES ('a', 'b')";
        connection.execute_batch(ddl).unwrap();
        let dump = || -> Vec<String> {
            let mut statement = connection.prepare("SELECT name FROM sqlite_schema ORDER BY name").unwrap();
            statement.query_map([], |row| row.get(0)).unwrap().collect::<Result<_, _>>().unwrap()
        };
        let before = dump();
        let mut shadow = SqliteShadow::new(SqliteConfig::new(&path, "orders"), "drill".to_owned());
        let survey = shadow.survey().unwrap();
        assert!(survey.local && survey.has_rows, "{survey:?}");
        shadow.make().unwrap();
        assert!(shadow.survey().unwrap_err().contains("DROP TABLE \"orders_oncegate_drill\""));
        let insert = "INSERT INTO orders_oncegate_drill VALUES (?1, ?2)";
        connection.execute(insert, ["1", "x"]).unwrap();
        assert!(connection.execute(insert, ["2", "x"]).is_err(), "the unique index is there");
        let mut rows = Vec::new();
        shadow
            .read(&["at", "id"], &mut |row| {
                rows.push(row);
                Ok(())
            })
            .unwrap();
        assert_eq!(rows, [[Some("x".to_owned()), Some("1".to_owned())]]);
        let Cleaned { gone, left, .. } = shadow.clean();
        assert!(left.is_empty() && gone.len() == 2, "{gone:?} {left:?}");
        assert_eq!(dump(), before);
    }
}
