//! The configuration of the drill's gateway: the user's own, with the route alone, and its sink pointed at the shadow. Pure.

use std::{net::SocketAddr, path::Path};

use toml::{Table, Value};

/// What is put in the place of what the file has.
pub(crate) struct Place<'a> {
    /// The route as the file names it.
    pub(crate) route: &'a str,
    /// The route's name in the drill.
    pub(crate) shadow_route: &'a str,
    /// The sink as the file names it.
    pub(crate) sink: &'a str,
    /// Keys and values that say where the rows go.
    pub(crate) target: &'a [(&'a str, String)],
    /// Key and value of the sink's address, if its connections go through the proxy.
    pub(crate) address: Option<(&'a str, &'a str)>,
    /// Of the drill's own files.
    pub(crate) folder: &'a Path,
    pub(crate) listen: SocketAddr,
    pub(crate) admin: SocketAddr,
    /// The door takes no record without it.
    pub(crate) bearer: &'a str,
}

/// The text of the file. `${NAME}`s stay as they are.
pub(crate) fn shadow(text: &str, place: &Place<'_>) -> Result<String, String> {
    let mut file: Table = text.parse().map_err(|fault: toml::de::Error| fault.to_string())?;
    let missing = |what: &str| format!("the file has no section {what}");
    let section = |file: &mut Table, of: &str, name: &str| -> Result<Table, String> {
        let sections = file.get_mut(of).and_then(Value::as_table_mut);
        let section = sections.and_then(|sections| sections.remove(name));
        section.and_then(|section| section.try_into().ok()).ok_or_else(|| missing(&format!("[{of}.{name}]")))
    };
    let mut route = section(&mut file, "routes", place.route)?;
    let mut sink = section(&mut file, "sinks", place.sink)?;
    for key in ["kafka", "gap", "scope", "dead_letters"] {
        route.remove(key);
    }
    if let Some(Value::Table(columns)) = route.get_mut("columns") {
        for (_, source) in columns.iter_mut().filter(|(_, source)| is_kafkas(source)) {
            // A record over HTTP has none of it: the column is left to itself.
            *source = "default".into();
        }
    }
    if let Some(Value::Table(lanes)) = route.get_mut("lanes") {
        lanes.remove("relay");
    }
    let http = route.entry("http").or_insert_with(|| Value::Table(Table::new()));
    if let Value::Table(http) = http {
        http.insert("bearer".into(), place.bearer.into());
    }
    for (key, value) in place.target {
        sink.insert((*key).into(), value.as_str().into());
    }
    sink.remove("create");
    if sink.contains_key("journal") {
        let journal = place.folder.join("journal");
        sink.insert("journal".into(), journal.display().to_string().into());
    }
    if let Some((key, value)) = place.address {
        sink.insert(key.into(), value.into());
    }
    let mut server =
        file.remove("server").and_then(|server| server.try_into::<Table>().ok()).unwrap_or_default();
    server.insert("listen".into(), place.listen.to_string().into());
    server.insert("admin_listen".into(), place.admin.to_string().into());
    // The same over a lost store: it takes its own shards back at once.
    server.insert("instance".into(), place.shadow_route.into());
    let mut store = file.remove("store").and_then(|store| store.try_into::<Table>().ok()).unwrap_or_default();
    store.insert("path".into(), place.folder.join("store").display().to_string().into());
    let mut whole = Table::new();
    whole.insert("server".into(), server.into());
    whole.insert("store".into(), store.into());
    if let Some(log) = file.remove("log") {
        whole.insert("log".into(), log);
    }
    let one = |name: &str, section: Table| Table::from_iter([(name.to_owned(), Value::from(section))]);
    whole.insert("sinks".into(), one(place.sink, sink).into());
    whole.insert("routes".into(), one(place.shadow_route, route).into());
    toml::to_string(&whole).map_err(|fault| fault.to_string())
}

/// A column's source that only a record of Kafka has.
fn is_kafkas(source: &Value) -> bool {
    source
        .as_table()
        .is_some_and(|source| source.contains_key("kafka") || source.contains_key("kafka_header"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config;

    #[test]
    fn the_example_file_gives_a_file_that_loads_for_each_of_its_tables() {
        let example = include_str!("../../../docs/oncegate.example.toml");
        let environment = |name: &str| {
            Some(match name {
                "DATABASE_URL" | "DRILL_URL" => "postgres://me@localhost/db".to_owned(),
                "REDIS_URL" => "redis://localhost".to_owned(),
                _ => "0123456789abcdef".to_owned(),
            })
        };
        for (route, sink, address) in
            [("orders", "orders", true), ("clicks", "clicks", false), ("events", "events", false)]
        {
            let text = shadow(
                example,
                &Place {
                    route,
                    shadow_route: "drill-1",
                    sink,
                    target: &[("table", "public.shadow".to_owned())],
                    address: address.then_some(("url", "${DRILL_URL}")),
                    folder: Path::new("somewhere"),
                    listen: ([127, 0, 0, 1], 1).into(),
                    admin: ([127, 0, 0, 1], 2).into(),
                    bearer: "0123456789abcdef0123",
                },
            )
            .unwrap();
            assert!(!text.contains("postgres://"), "{text}");
            let config =
                config::load(&text, environment).unwrap_or_else(|faults| panic!("{faults:?}\n{text}"));
            assert_eq!(config.routes.keys().collect::<Vec<_>>(), ["drill-1"]);
            assert_eq!(config.sinks[sink].table, "public.shadow");
            assert!(config.routes["drill-1"].relay.is_none());
            assert_eq!(config.store.path, Path::new("somewhere/store"));
        }
    }
}
