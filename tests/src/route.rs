//! The config of a route that takes orders into Postgres: [`OrdersRoute`].

use std::fmt::Write;

use crate::workload::Mode;

/// One sink and one route of the same name, which is also the table's.
#[derive(Clone, Debug)]
pub struct OrdersRoute {
    /// Name of route, sink and table.
    pub name: String,
    /// How rows meet rows.
    pub mode: Mode,
    /// The database.
    pub url: String,
    /// Whether the sink names a row key. Without, nothing but the marks keeps copies out.
    pub row_key: bool,
    /// Brokers, topic and group of the relay.
    pub kafka: Option<(String, String, String)>,
    /// This instance's fixed name in the group.
    pub instance: Option<String>,
    /// Further lines of `[routes.<name>]`.
    pub options: String,
}

impl OrdersRoute {
    /// A route with a row key and without a relay.
    pub fn new(name: &str, mode: Mode, url: &str) -> Self {
        let (name, url) = (name.to_owned(), url.to_owned());
        Self { name, mode, url, row_key: true, kafka: None, instance: None, options: String::new() }
    }

    /// Without a row key (`insert` only).
    pub fn without_row_key(mut self) -> Self {
        self.row_key = false;
        self
    }

    /// Also a relay of the topic of the same name.
    pub fn relay(mut self, brokers: &str, topic: &str, group: &str) -> Self {
        self.kafka = Some((brokers.to_owned(), topic.to_owned(), group.to_owned()));
        self
    }

    /// See [`OrdersRoute::instance`].
    pub fn as_instance(mut self, instance: &str) -> Self {
        self.instance = Some(instance.to_owned());
        self
    }

    /// See [`OrdersRoute::options`].
    pub fn options(mut self, options: &str) -> Self {
        self.options = options.to_owned();
        self
    }

    /// As the config file has it.
    pub fn toml(&self) -> String {
        let Self { name, url, options, .. } = self;
        let mode = self.mode.word();
        let mut text = format!(
            "[sinks.{name}]\ntype = \"postgres\"\nurl = \"{url}\"\ntable = \"public.{name}\"\nmode = \"{mode}\"\n"
        );
        if self.row_key {
            text.push_str("row_key = [\"order_id\"]\n");
        }
        if self.mode == Mode::UpsertIfNewer {
            text.push_str("version = \"updated_at\"\n");
        }
        // Tombstones have no payload: what names them, and their version, stand beside it.
        let (key, event_time) = match self.mode {
            Mode::Insert => (r#"["/order_id"]"#, r#""/updated_at""#),
            Mode::Upsert => (r#"["/order_id", "/updated_at"]"#, r#""/updated_at""#),
            Mode::UpsertIfNewer => {
                (r#"[{ kafka = "key" }, { kafka_header = "updated_at" }]"#, r#"{ kafka = "timestamp" }"#)
            }
        };
        write!(
            text,
            "\n[routes.{name}]\nsink = \"{name}\"\nkey = {key}\nevent_time = {event_time}\nwindow = \"24h\"\nlateness = \"1h\"\n{options}\n"
        )
        .expect("text can be written to");
        if self.mode == Mode::UpsertIfNewer {
            write!(
                text,
                "unknown_fields = \"ignore\"\n\n[routes.{name}.columns]\nupdated_at = {{ kafka_header = \"updated_at\" }}\n"
            )
            .expect("text can be written to");
        }
        if let Some((brokers, topic, group)) = &self.kafka {
            write!(
                text,
                "\n[routes.{name}.kafka]\nbrokers = \"{brokers}\"\ntopics = [\"{topic}\"]\ngroup = \"{group}\"\n"
            )
            .expect("text can be written to");
            if let Some(instance) = &self.instance {
                writeln!(text, "instance = \"{instance}\"").expect("text can be written to");
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_config_of_every_mode_is_good() {
        let url = "postgres://postgres@127.0.0.1:5432/orders";
        let relay = |mode| OrdersRoute::new("orders", mode, url).relay("127.0.0.1:9092", "orders", "g");
        let routes = [
            OrdersRoute::new("orders", Mode::Insert, url),
            relay(Mode::Insert).without_row_key(),
            relay(Mode::Upsert).as_instance("one").options("batch = { max_records = 100 }"),
            relay(Mode::UpsertIfNewer),
        ];
        for route in routes {
            let text = route.toml();
            let errors = oncegate::config::load(&text, |_| None).err().unwrap_or_default();
            assert!(errors.is_empty(), "{errors:#?}\n{text}");
        }
    }
}
