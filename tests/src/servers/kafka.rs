//! Kafka brokers (and controllers) of their own, one JVM each, from the jars that `test.sh` fetched.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::{Mutex, MutexGuard, OnceLock, PoisonError},
    time::{Duration, Instant},
};

use rdkafka::{
    ClientConfig, Message,
    admin::{AdminClient, AdminOptions, NewTopic, TopicReplication},
    client::DefaultClientContext,
    consumer::{BaseConsumer, Consumer},
    error::KafkaError,
    message::{Header, OwnedHeaders},
    producer::{BaseRecord, DefaultProducerContext, Producer, ThreadedProducer},
    types::RDKafkaErrorCode,
};
use tempfile::TempDir;

use crate::{
    child::{Child, Spec},
    free_port,
};

const JARS: &str = "kafka-4.4.0";

/// One record to produce.
#[derive(Clone, Debug, Default)]
pub struct Produced {
    /// Partition.
    pub partition: i32,
    /// Record key.
    pub key: Option<Vec<u8>>,
    /// Payload; none for a tombstone.
    pub payload: Option<Vec<u8>>,
    /// Headers.
    pub headers: Vec<(&'static str, String)>,
    /// Record timestamp, ms since the epoch; the producer's clock if none.
    pub timestamp_ms: Option<i64>,
}

/// A Kafka cluster: one broker without authentication, unless it was started otherwise.
pub struct Kafka {
    // Before the others: a field is dropped in the order of declaration.
    nodes: Vec<Node>,
    producer: OnceLock<ThreadedProducer<DefaultProducerContext>>,
    folder: TempDir,
}

/// One broker, which is a controller too.
struct Node {
    server: Mutex<Option<Child>>,
    port: u16,
}

impl Node {
    fn server(&self) -> MutexGuard<'_, Option<Child>> {
        self.server.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kafka {
    /// Formats a folder and starts a broker on a free port. Panics if the jars are missing: a live test never passes unseen.
    pub fn start() -> Self {
        Self::cluster(1)
    }

    /// `count` brokers of one cluster. Topics have a replica on each (three at most), and a write is taken once all but one have it.
    pub fn cluster(count: usize) -> Self {
        Self::with(count, |_, _| String::new())
    }

    /// One broker that also listens on `port` to those who name themselves by SASL PLAIN.
    pub fn with_sasl(port: u16, user: &str, password: &str) -> Self {
        Self::with(1, |_, listeners| {
            format!(
                "listeners={listeners},SASL_PLAINTEXT://127.0.0.1:{port}\n\
                 listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SASL_PLAINTEXT:SASL_PLAINTEXT\n\
                 sasl.enabled.mechanisms=PLAIN\n\
                 listener.name.sasl_plaintext.plain.sasl.jaas.config=\
                 org.apache.kafka.common.security.plain.PlainLoginModule required user_{user}=\"{password}\";\n"
            )
        })
    }

    /// One broker that also listens on `port`, by TLS, to those who name themselves by SASL SCRAM-SHA-256; and the certificate that it
    /// shows, as a PEM file.
    pub fn with_scram_over_tls(port: u16, user: &str, password: &str) -> (Self, PathBuf) {
        let keys = tempfile::Builder::new().prefix("oncegate-keys-").tempdir().expect("a temporary folder");
        let (store, certificate) = (keys.path().join("broker.p12"), keys.path().join("broker.pem"));
        let (store, certificate) = (store.display().to_string(), certificate.display().to_string());
        let keytool = |arguments: &[&str]| {
            let of =
                ["-alias", "broker", "-storetype", "PKCS12", "-storepass", "changeit", "-keystore", &store];
            let made = Command::new("keytool").args(arguments).args(of).output();
            let made = made.expect("keytool comes with Java");
            assert!(made.status.success(), "keytool: {}", String::from_utf8_lossy(&made.stdout));
        };
        let name = ["-dname", "CN=localhost", "-ext", "san=ip:127.0.0.1"];
        keytool(&[&["-genkeypair", "-keyalg", "RSA", "-validity", "2"][..], &name].concat());
        keytool(&["-exportcert", "-rfc", "-file", &certificate]);
        let scram = format!("SCRAM-SHA-256=[name=\"{user}\",password=\"{password}\"]");
        let kafka = Self::formatted(1, &["--add-scram", &scram], |_, listeners| {
            format!(
                "listeners={listeners},SASL_SSL://127.0.0.1:{port}\n\
                 listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SASL_SSL:SASL_SSL\n\
                 sasl.enabled.mechanisms=SCRAM-SHA-256\n\
                 listener.name.sasl_ssl.scram-sha-256.sasl.jaas.config=\
                 org.apache.kafka.common.security.scram.ScramLoginModule required;\n\
                 ssl.keystore.type=PKCS12\nssl.keystore.password=changeit\nssl.keystore.location={store}\n"
            )
        });
        let kept = kafka.path("broker.pem");
        fs::copy(&certificate, &kept).expect("the certificate was made");
        (kafka, kept)
    }

    /// `count` brokers with further lines in their properties, made of a broker's number (from 0) and its listeners.
    pub fn with(count: usize, further: impl Fn(usize, &str) -> String) -> Self {
        Self::formatted(count, &[], further)
    }

    fn formatted(count: usize, format: &[&str], further: impl Fn(usize, &str) -> String) -> Self {
        let folder =
            tempfile::Builder::new().prefix("oncegate-kafka-").tempdir().expect("a temporary folder");
        let nodes: Vec<Node> =
            (0..count).map(|_| Node { server: Mutex::new(None), port: free_port() }).collect();
        let controllers: Vec<u16> = (0..count).map(|_| free_port()).collect();
        let kafka = Self { nodes, producer: OnceLock::new(), folder };
        let voters: Vec<String> =
            controllers.iter().enumerate().map(|(at, port)| format!("{}@127.0.0.1:{port}", at + 1)).collect();
        let (voters, replicas) = (voters.join(","), kafka.replicas());
        let in_sync = (replicas - 1).max(1);
        for (at, controller) in controllers.into_iter().enumerate() {
            let (id, port) = (at + 1, kafka.nodes[at].port);
            let data = kafka.path(&format!("data-{at}")).display().to_string();
            let listeners = format!("PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}");
            let mut properties = format!(
                "process.roles=broker,controller\n\
                 node.id={id}\n\
                 controller.quorum.voters={voters}\n\
                 listeners={listeners}\n\
                 controller.listener.names=CONTROLLER\n\
                 log.dirs={data}\n\
                 auto.create.topics.enable=false\n\
                 default.replication.factor={replicas}\n\
                 min.insync.replicas={in_sync}\n\
                 offsets.topic.replication.factor={replicas}\n\
                 offsets.topic.num.partitions=4\n\
                 transaction.state.log.replication.factor={replicas}\n\
                 transaction.state.log.min.isr={in_sync}\n\
                 transaction.state.log.num.partitions=4\n\
                 broker.heartbeat.interval.ms=500\n\
                 broker.session.timeout.ms=3000\n\
                 group.initial.rebalance.delay.ms=0\n"
            );
            properties.push_str(&further(at, &listeners));
            fs::write(kafka.properties(at), properties).expect("the temporary folder can be written");
            let arguments = [&["format", "-t", "b25jZWdhdGUtdGVzdHMtMQ"], format, &["-c"]].concat();
            let arguments = kafka.java(at, "kafka.tools.StorageTool", &arguments);
            let formatted = Command::new("java").args(&arguments).output();
            let formatted = formatted
                .expect("Java is not installed: run ./test.sh once, it installs what the live tests need");
            assert!(formatted.status.success(), "format: {}", String::from_utf8_lossy(&formatted.stderr));
        }
        kafka.run();
        kafka
    }

    /// The one of this test binary. A test that ends it uses its own.
    pub fn shared() -> &'static Self {
        static SHARED: OnceLock<Kafka> = OnceLock::new();
        SHARED.get_or_init(Self::start)
    }

    /// `host:port` of each broker, as `bootstrap.servers` and the gateway's config take it.
    pub fn brokers(&self) -> String {
        let addresses: Vec<String> =
            self.nodes.iter().map(|node| format!("127.0.0.1:{}", node.port)).collect();
        addresses.join(",")
    }

    /// Ends all brokers as a crash would.
    pub fn kill(&self) {
        (0..self.nodes.len()).for_each(|at| self.kill_broker(at));
    }

    /// Ends one broker as a crash would.
    pub fn kill_broker(&self, at: usize) {
        if let Some(mut server) = self.nodes[at].server().take() {
            server.stop("KILL");
        }
    }

    /// Stops all brokers where they are: their connections stand, and nobody answers.
    pub fn freeze(&self) {
        self.signal("STOP");
    }

    /// Lets them go on after [`Kafka::freeze`].
    pub fn thaw(&self) {
        self.signal("CONT");
    }

    fn signal(&self, name: &str) {
        for node in &self.nodes {
            if let Some(server) = &mut *node.server() {
                server.signal(name);
            }
        }
    }

    /// Starts the brokers that do not run, on their ports, and waits until all have joined.
    pub fn run(&self) {
        for at in 0..self.nodes.len() {
            if self.nodes[at].server().is_some() {
                continue;
            }
            let mut command = vec!["java".to_owned()];
            command.extend(self.java(at, "kafka.Kafka", &[]));
            let log = self.path(&format!("log-{at}"));
            let folder = Some(self.folder.path());
            *self.nodes[at].server() = Some(Child::start(&Spec {
                command,
                environment: vec![],
                log: &log,
                user: None,
                end: "KILL",
                folder,
            }));
        }
        let probe: BaseConsumer = self.client().create().expect("a client can be made");
        let deadline = Instant::now() + Duration::from_secs(60);
        let all = self.nodes.len();
        while probe
            .fetch_metadata(None, Duration::from_secs(1))
            .map_or(true, |metadata| metadata.brokers().len() < all)
        {
            for node in &self.nodes {
                let mut server = node.server();
                let Some(server) = &mut *server else { continue };
                let running = server.exited().is_none() && Instant::now() < deadline;
                assert!(running, "Kafka does not start:\n{}", server.log_tail(20));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn replicas(&self) -> i32 {
        i32::try_from(self.nodes.len().min(3)).unwrap_or(3)
    }

    /// Makes a topic and waits until every partition has a leader.
    pub async fn topic(&self, name: &str, partitions: i32) {
        let admin: AdminClient<DefaultClientContext> = self.client().create().expect("a client can be made");
        let topic = NewTopic::new(name, partitions, TopicReplication::Fixed(self.replicas()));
        let made = admin.create_topics([&topic], &AdminOptions::new()).await.expect("Kafka answers");
        made.into_iter().for_each(|result| drop(result.expect("a topic of that name does not exist yet")));
        self.led(&admin, name, partitions).await;
    }

    async fn led(&self, admin: &AdminClient<DefaultClientContext>, name: &str, partitions: i32) {
        crate::eventually("leaders of a new topic", Duration::from_secs(20), async || {
            let metadata = admin
                .inner()
                .fetch_metadata(Some(name), Duration::from_secs(2))
                .map_err(|e| e.to_string())?;
            let found = metadata.topics().first().map_or(0, |topic| {
                topic.partitions().iter().filter(|partition| partition.leader() >= 0).count()
            });
            if found == usize::try_from(partitions).unwrap_or(0) {
                Ok(())
            } else {
                Err(format!("{found} of {partitions}"))
            }
        })
        .await;
    }

    /// Deletes a topic and makes it again under the same name, with another id.
    pub async fn make_again(&self, name: &str, partitions: i32) {
        let admin: AdminClient<DefaultClientContext> = self.client().create().expect("a client can be made");
        let gone = admin.delete_topics(&[name], &AdminOptions::new()).await.expect("Kafka answers");
        gone.into_iter().for_each(|result| drop(result.expect("the topic exists")));
        crate::eventually("a new topic of the name of the old one", Duration::from_secs(20), async || {
            let topic = NewTopic::new(name, partitions, TopicReplication::Fixed(self.replicas()));
            let made =
                admin.create_topics([&topic], &AdminOptions::new()).await.map_err(|e| e.to_string())?;
            made.into_iter().next().map_or(Err("no answer".to_owned()), |made| {
                made.map(drop).map_err(|(_, code)| code.to_string())
            })
        })
        .await;
        self.led(&admin, name, partitions).await;
    }

    /// Appends `records` in order and waits until the broker has all of them.
    pub fn produce(&self, topic: &str, records: impl IntoIterator<Item = Produced>) {
        let producer = self.producer.get_or_init(|| {
            let mut config = self.client();
            config.set("linger.ms", "5").set("enable.idempotence", "true");
            config.create().expect("a producer can be made")
        });
        for produced in records {
            let headers = produced.headers.iter().fold(OwnedHeaders::new(), |headers, (key, value)| {
                headers.insert(Header { key, value: Some(value) })
            });
            let mut record: BaseRecord<'_, [u8], [u8]> =
                BaseRecord::to(topic).partition(produced.partition).headers(headers);
            record.key = produced.key.as_deref();
            record.payload = produced.payload.as_deref();
            record.timestamp = produced.timestamp_ms;
            while let Err((error, again)) = producer.send(record) {
                assert_eq!(
                    error,
                    KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull),
                    "produce to {topic}"
                );
                std::thread::sleep(Duration::from_millis(10));
                record = again;
            }
        }
        producer.flush(Duration::from_secs(120)).expect("Kafka takes the records");
        assert_eq!(producer.in_flight_count(), 0);
    }

    /// The offset after the last record of each partition.
    pub fn ends(&self, topic: &str, partitions: i32) -> Vec<i64> {
        let consumer: BaseConsumer = self.client().create().expect("a client can be made");
        let end = |partition| consumer.fetch_watermarks(topic, partition, Duration::from_secs(10));
        (0..partitions).map(|partition| end(partition).expect("Kafka answers").1).collect()
    }

    /// The offsets that `group` has committed, one a partition; -1 where it has none.
    pub fn committed(&self, topic: &str, partitions: i32, group: &str) -> Vec<i64> {
        let consumer: BaseConsumer =
            self.client().set("group.id", group).create().expect("a client can be made");
        let mut asked = rdkafka::TopicPartitionList::new();
        asked.add_partition_range(topic, 0, partitions - 1);
        let found = consumer.committed_offsets(asked, Duration::from_secs(10)).expect("Kafka answers");
        found.elements().iter().map(|partition| partition.offset().to_raw().unwrap_or(-1).max(-1)).collect()
    }

    /// Payloads of all records of `partition` that are there now.
    pub fn read_all(&self, topic: &str, partition: i32) -> Vec<Option<Vec<u8>>> {
        let consumer: BaseConsumer =
            self.client().set("group.id", "reader").create().expect("a client can be made");
        let end =
            consumer.fetch_watermarks(topic, partition, Duration::from_secs(10)).expect("Kafka answers").1;
        let mut from = rdkafka::TopicPartitionList::new();
        from.add_partition_offset(topic, partition, rdkafka::Offset::Beginning).expect("the offset is valid");
        consumer.assign(&from).expect("the partition can be assigned");
        let mut payloads = vec![];
        let mut next = 0;
        while next < end {
            let message =
                consumer.poll(Duration::from_secs(20)).expect("the rest comes").expect("Kafka answers");
            next = message.offset() + 1;
            payloads.push(message.payload().map(<[u8]>::to_vec));
        }
        payloads
    }

    fn client(&self) -> ClientConfig {
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", self.brokers()).set("broker.address.family", "v4");
        config
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn properties(&self, at: usize) -> PathBuf {
        self.path(&format!("server-{at}.properties"))
    }

    fn java(&self, at: usize, main: &str, arguments: &[&str]) -> Vec<String> {
        let classes = format!("{}/*", jars().display());
        let fixed = ["-Xmx512m", "-XX:+UseSerialGC", "-cp", &classes, main];
        let mut all: Vec<String> =
            fixed.iter().chain(arguments).map(|&argument| argument.to_owned()).collect();
        all.push(self.properties(at).display().to_string());
        all
    }
}

fn jars() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/test-servers");
    let cache = std::env::var_os("ONCEGATE_TEST_CACHE").map_or(root, PathBuf::from);
    let folder = cache.join(JARS);
    let found = fs::read_dir(&folder).is_ok_and(|mut entries| entries.next().is_some());
    assert!(
        found,
        "no Kafka in {}: run ./test.sh once, it fetches what the live tests need",
        folder.display()
    );
    folder
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn kafka_keeps_what_was_produced_through_a_kill() {
        let kafka = Kafka::start();
        kafka.topic("t", 2).await;
        let payload = |n: i32| Some(n.to_string().into_bytes());
        kafka.produce(
            "t",
            (0..1000).map(|n| Produced { partition: n % 2, payload: payload(n), ..Produced::default() }),
        );
        kafka.kill();
        kafka.run();
        let found = crate::eventually("records after a restart", Duration::from_secs(30), async || {
            let ends = kafka.ends("t", 2);
            if ends == [500, 500] { Ok(kafka.read_all("t", 1)) } else { Err(format!("{ends:?}")) }
        })
        .await;
        assert_eq!(found, (0..500).map(|n| payload(2 * n + 1)).collect::<Vec<_>>());
        assert_eq!(kafka.committed("t", 2, "nobody"), [-1, -1]);
    }
}
