//! What a reader of committed transactions finds in a topic.

use std::time::{Duration, Instant};

use rdkafka::{
    ClientConfig, Message, Offset, TopicPartitionList,
    consumer::{BaseConsumer, Consumer},
    error::KafkaError,
    message::Headers,
};

/// One record.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Committed {
    /// Where it is.
    pub partition: i32,
    /// Where it is in the partition.
    pub offset: i64,
    /// Its key.
    pub key: Option<Vec<u8>>,
    /// Its payload.
    pub payload: Option<Vec<u8>>,
    /// Its headers, in order.
    pub headers: Vec<(String, Option<Vec<u8>>)>,
    /// Its timestamp, ms.
    pub timestamp_ms: Option<i64>,
}

impl Committed {
    /// The text of a header.
    pub fn header(&self, name: &str) -> Option<&str> {
        let (_, value) = self.headers.iter().find(|(found, _)| found == name)?;
        std::str::from_utf8(value.as_deref()?).ok()
    }

    /// The key as text.
    pub fn key(&self) -> &str {
        std::str::from_utf8(self.key.as_deref().unwrap_or_default()).expect("a key of the tests is text")
    }
}

fn reader(brokers: &str, isolation: &str) -> BaseConsumer {
    let mut config = ClientConfig::new();
    config
        .set("bootstrap.servers", brokers)
        .set("broker.address.family", "v4")
        .set("group.id", "committed")
        .set("isolation.level", isolation)
        .set("enable.partition.eof", "true")
        .set("enable.auto.commit", "false")
        .set("fetch.wait.max.ms", "5");
    config.create().expect("a client can be made")
}

/// All committed records of a topic, by partition and offset: waits until no transaction is open.
pub fn committed(brokers: &str, topic: &str) -> Vec<Committed> {
    let (all, decided) = (reader(brokers, "read_uncommitted"), reader(brokers, "read_committed"));
    let answer = Duration::from_secs(10);
    let metadata = all.fetch_metadata(Some(topic), answer).expect("Kafka answers");
    let partitions = metadata.topics().first().map_or(0, |topic| topic.partitions().len()) as i32;
    let until = Instant::now() + Duration::from_secs(60);
    let mut list = TopicPartitionList::new();
    for partition in 0..partitions {
        loop {
            let end = |reader: &BaseConsumer| {
                reader.fetch_watermarks(topic, partition, answer).expect("Kafka answers").1
            };
            let (stable, end) = (end(&decided), end(&all));
            if stable >= end {
                break;
            }
            assert!(Instant::now() < until, "{topic}/{partition}: a transaction stays open at {stable}");
            std::thread::sleep(Duration::from_millis(5));
        }
        list.add_partition_offset(topic, partition, Offset::Beginning).expect("a valid offset");
    }
    decided.assign(&list).expect("the partitions can be assigned");
    let (mut found, mut ended) = (vec![], 0);
    while ended < partitions {
        match decided.poll(Duration::from_secs(20)).expect("the rest comes") {
            Ok(message) => {
                let headers = message.headers().map_or_else(Vec::new, |headers| {
                    headers
                        .iter()
                        .map(|header| (header.key.to_owned(), header.value.map(<[u8]>::to_vec)))
                        .collect()
                });
                found.push(Committed {
                    partition: message.partition(),
                    offset: message.offset(),
                    key: message.key().map(<[u8]>::to_vec),
                    payload: message.payload().map(<[u8]>::to_vec),
                    headers,
                    timestamp_ms: message.timestamp().to_millis(),
                });
            }
            Err(KafkaError::PartitionEOF(_)) => ended += 1,
            Err(error) => panic!("reading {topic}: {error}"),
        }
    }
    found.sort_by_key(|record| (record.partition, record.offset));
    found
}
