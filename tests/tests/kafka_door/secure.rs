//! Who may read, and what does not fit.

use oncegate::door::kafka::RelayOptions;
use oncegate_tests::{eventually, free_port, gateway::Gateway, servers::Kafka};

use crate::rig::*;

/// Signs in by SASL PLAIN; with a wrong password it says that the broker refuses, what to look at, and not the password.
#[tokio::test(flavor = "multi_thread")]
async fn sasl_plain_signs_in_and_a_wrong_password_is_said_and_not_shown() {
    let port = free_port();
    let kafka = Kafka::with_sasl(port, "oncegate", "open-sesame");
    kafka.topic("secret", 2).await;
    kafka.produce("secret", numbers(2, 0..1000));
    let as_user = |password: &str| {
        let mut config = config(&kafka, "secret");
        config.brokers = format!("127.0.0.1:{port}");
        for (name, value) in [
            ("security.protocol", "SASL_PLAINTEXT"),
            ("sasl.mechanisms", "PLAIN"),
            ("sasl.username", "oncegate"),
            ("sasl.password", password),
        ] {
            config.options.insert(name.to_owned(), value.to_owned());
        }
        config
    };
    let sink = Shared::default();
    let wrong = instance(&sink, 1, as_user("hunter2"), RelayOptions::default());
    let why = reason(&wrong.relay, "refuses").await;
    assert!(why.contains("Authentication") && why.contains("`sasl.password`"), "{why}");
    assert!(!why.contains("hunter2"), "{why}");
    wrong.relay.stop().await;
    let right = instance(&sink, 1, as_user("open-sesame"), RelayOptions::default());
    assert_whole(&kept(&sink, 1000).await, 0..1000);
    right.relay.stop().await;
}

/// Signs in by SCRAM over TLS; a broker whose certificate nobody vouches for, and a wrong password, are said with what to look at.
/// `cargo test -p oncegate-tests --features kafka-tls --test kafka_door scram`
#[cfg(feature = "kafka-tls")]
#[tokio::test(flavor = "multi_thread")]
async fn scram_over_tls_signs_in_and_what_is_wrong_is_said() {
    let port = free_port();
    let (kafka, certificate) = Kafka::with_scram_over_tls(port, "oncegate", "open-sesame");
    kafka.topic("scram", 2).await;
    kafka.produce("scram", numbers(2, 0..1000));
    let as_user = |password: &str, certificate: Option<&std::path::Path>| {
        let mut config = config(&kafka, "scram");
        config.brokers = format!("127.0.0.1:{port}");
        for (name, value) in [
            ("security.protocol", "SASL_SSL"),
            ("sasl.mechanisms", "SCRAM-SHA-256"),
            ("sasl.username", "oncegate"),
            ("sasl.password", password),
        ] {
            config.options.insert(name.to_owned(), value.to_owned());
        }
        if let Some(path) = certificate {
            config.options.insert("ssl.ca.location".to_owned(), path.display().to_string());
        }
        config
    };
    let sink = Shared::default();
    let unknown = instance(&sink, 1, as_user("open-sesame", None), RelayOptions::default());
    let why = reason(&unknown.relay, "certificate").await;
    assert!(!why.contains("open-sesame"), "{why}");
    unknown.relay.stop().await;
    let wrong = instance(&sink, 1, as_user("hunter2", Some(&certificate)), RelayOptions::default());
    let why = reason(&wrong.relay, "refuses").await;
    assert!(why.contains("Authentication") && !why.contains("hunter2"), "{why}");
    wrong.relay.stop().await;
    let right = instance(&sink, 1, as_user("open-sesame", Some(&certificate)), RelayOptions::default());
    assert_whole(&kept(&sink, 1000).await, 0..1000);
    right.relay.stop().await;
}

/// A broker that is not there is said with what the client library knows of it.
#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_does_not_answer_is_said_with_its_address() {
    let port = free_port();
    let mut config = config(Kafka::shared(), "nowhere");
    config.brokers = format!("127.0.0.1:{port}");
    let relay = instance(&Shared::default(), 1, config, RelayOptions::default());
    let why = reason(&relay.relay, &port.to_string()).await;
    assert!(why.contains("Connection refused"), "{why}");
    relay.relay.stop().await;
}

/// Retention below window and lateness, compaction, stamps of the broker, another client in the group: one list when the relay joins,
/// and the relay reads on.
#[tokio::test(flavor = "multi_thread")]
async fn what_of_topic_and_group_does_not_fit_is_said_in_one_list() {
    use adapters::kafka::SourceNeeds;
    use rdkafka::{
        ClientConfig,
        admin::{AdminClient, AdminOptions, NewTopic, TopicReplication},
        client::DefaultClientContext,
        consumer::{BaseConsumer, Consumer},
    };
    let kafka = Kafka::shared();
    let folder = tempfile::tempdir().unwrap();
    let mut client = ClientConfig::new();
    client.set("bootstrap.servers", kafka.brokers()).set("broker.address.family", "v4");
    let admin: AdminClient<DefaultClientContext> = client.create().unwrap();
    let topic = NewTopic::new("misfits", 1, TopicReplication::Fixed(1))
        .set("retention.ms", "3600000")
        .set("cleanup.policy", "compact,delete")
        .set("message.timestamp.type", "LogAppendTime");
    let made = admin.create_topics([&topic], &AdminOptions::new()).await.unwrap();
    assert!(made.iter().all(Result::is_ok), "{made:?}");
    let stranger: BaseConsumer = client
        .set("group.id", "group-misfits")
        .set("client.id", "billing")
        .set("partition.assignment.strategy", "cooperative-sticky")
        .create()
        .unwrap();
    stranger.subscribe(&["misfits"]).unwrap();
    let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let polling = {
        let stop = stop.clone();
        std::thread::spawn(move || {
            while !stop.load(std::sync::atomic::Ordering::Acquire) {
                drop(stranger.poll(std::time::Duration::from_millis(50)));
            }
        })
    };
    eventually("the other client is a member", PATIENCE, async || {
        let found =
            admin.inner().fetch_group_list(Some("group-misfits"), PATIENCE).map_err(|e| e.to_string())?;
        match found.groups().first().map(|group| group.members().len()) {
            Some(members) if members > 0 => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await;
    let needs = SourceNeeds { keep_ms: 90_000_000, timestamps: true };
    let options = RelayOptions { needs, ..RelayOptions::default() };
    let relay = instance(&Shared::default(), 1, config(kafka, "misfits"), options);
    let misfits = eventually("misfits", PATIENCE, async || {
        let misfits = relay.relay.status().misfits;
        if misfits.is_empty() { Err("none yet") } else { Ok(misfits) }
    })
    .await;
    for says in ["retention.ms", "is compacted", "message.timestamp.type", "(billing)"] {
        assert!(misfits.iter().any(|misfit| misfit.contains(says)), "{says}: {misfits:#?}");
    }
    assert_eq!(misfits.len(), 4, "{misfits:#?}");
    // `oncegate check --servers` finds the same before anything is started, and what the sink has.
    let gateway = Gateway::new(&format!(
        "[sinks.t]\ntype = \"sqlite\"\npath = \"{}\"\ntable = \"missing\"\n\n\
         [routes.t]\nsink = \"t\"\nkey = \"/id\"\nevent_time = {{ kafka = \"timestamp\" }}\n\n\
         [routes.t.kafka]\nbrokers = \"{}\"\ntopics = [\"misfits\"]\ngroup = \"group-misfits\"\n",
        folder.path().join("t.db").display(),
        kafka.brokers()
    ));
    let (status, printed) = gateway.check_servers().await;
    assert_eq!(status, Some(1), "{printed}");
    for says in ["retention.ms", "is compacted", "message.timestamp.type", "(billing)", "missing"] {
        assert!(printed.contains(says), "{says}: {printed}");
    }
    stop.store(true, std::sync::atomic::Ordering::Release);
    polling.join().unwrap();
    relay.relay.stop().await;
}
