use std::{collections::BTreeMap, time::Duration};

use async_trait::async_trait;
use rdkafka::{
    ClientConfig,
    error::{KafkaError, RDKafkaErrorCode},
    message::{Header, OwnedHeaders},
    producer::{DeliveryFuture, FutureProducer, FutureRecord},
};

use super::{KafkaFault, config::client_fault};
use crate::dead_letters::{DeadLetterFault, DeadLetters, Letter};

/// Dead letters as records of a topic: payload and headers say what the file's lines say. Cheap to clone.
///
/// Durable means: acknowledged by all in-sync replicas. The topic's own settings decide how many those are.
#[derive(Clone)]
pub struct DeadLetterTopic {
    producer: FutureProducer,
    topic: String,
}

impl std::fmt::Debug for DeadLetterTopic {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("DeadLetterTopic").field(&self.topic).finish()
    }
}

/// Longer than this a letter is not waited for: the lane tries again.
const PATIENCE_MS: &str = "30000";
/// Options that would make a letter less than durable, or that have a name of their own here.
const REFUSED: [(&str, &str); 7] = [
    ("acks", "dead letters are acknowledged by all in-sync replicas"),
    ("bootstrap.servers", "use `brokers`"),
    ("delivery.timeout.ms", "use \"message.timeout.ms\""),
    ("enable.idempotence", "dead letters are written by an idempotent producer"),
    ("metadata.broker.list", "use `brokers`"),
    ("request.required.acks", "dead letters are acknowledged by all in-sync replicas"),
    ("transactional.id", "dead letters are not part of a transaction"),
];
const QUEUE_FULL_PAUSE: Duration = Duration::from_millis(10);

impl DeadLetterTopic {
    /// Writes to `topic` of the cluster at `brokers`; `options` are librdkafka's. Does not connect yet.
    pub fn new(brokers: &str, topic: &str, options: &BTreeMap<String, String>) -> Result<Self, KafkaFault> {
        let mut config = ClientConfig::new();
        config
            .set("bootstrap.servers", brokers)
            .set("enable.idempotence", "true")
            .set("acks", "all")
            .set("message.timeout.ms", PATIENCE_MS)
            .set("linger.ms", "1");
        for (name, value) in options {
            if let Some((_, reason)) = REFUSED.iter().find(|(refused, _)| refused == name) {
                return Err(KafkaFault::Configuration(format!("{name:?} is not passed on: {reason}")));
            }
            config.set(name, value);
        }
        let producer =
            config.create().map_err(|error: KafkaError| KafkaFault::Configuration(client_fault(&error)))?;
        Ok(Self { producer, topic: topic.to_owned() })
    }

    async fn send(&self, letter: &Letter<'_>) -> Result<DeliveryFuture, KafkaError> {
        let (position, event_ms) =
            (letter.position.map(|position| position.to_string()), letter.event_ms.to_string());
        let key = letter.key_hex();
        let mut headers = OwnedHeaders::new_with_capacity(6);
        for (name, value) in [
            ("oncegate-route", Some(letter.route)),
            ("oncegate-shard", Some(letter.shard)),
            ("oncegate-position", position.as_deref()),
            ("oncegate-kind", Some(letter.kind)),
            ("oncegate-reason", Some(letter.reason)),
            ("oncegate-event-ms", Some(event_ms.as_str())),
        ] {
            if value.is_some() {
                headers = headers.insert(Header { key: name, value });
            }
        }
        let mut record: FutureRecord<'_, str, [u8]> = FutureRecord::to(&self.topic).headers(headers);
        record.key = (!key.is_empty()).then_some(key.as_str());
        record.payload = letter.payload;
        loop {
            match self.producer.send_result(record) {
                Ok(delivery) => return Ok(delivery),
                Err((KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull), again)) => {
                    record = again;
                    tokio::time::sleep(QUEUE_FULL_PAUSE).await;
                }
                Err((error, _)) => return Err(error),
            }
        }
    }
}

#[async_trait]
impl DeadLetters for DeadLetterTopic {
    async fn write(&mut self, letters: &[Letter<'_>]) -> Result<(), DeadLetterFault> {
        let fault = |reason: String| DeadLetterFault { target: format!("topic {}", self.topic), reason };
        let mut deliveries = Vec::with_capacity(letters.len());
        for letter in letters {
            deliveries.push(self.send(letter).await.map_err(|error| fault(error.to_string()))?);
        }
        // Delivery reports are awaited: a flush would poll in steps of 100 ms.
        for delivery in deliveries {
            match delivery.await {
                Ok(Ok(_)) => {}
                Ok(Err((error, _))) => return Err(fault(error.to_string())),
                Err(_) => return Err(fault("the producer has ended".to_owned())),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn p10_options_that_make_letters_less_than_durable_are_refused() {
        for (name, _) in REFUSED {
            let options = BTreeMap::from([(name.to_owned(), "0".to_owned())]);
            let fault = DeadLetterTopic::new("127.0.0.1:1", "dead", &options).unwrap_err();
            assert!(fault.to_string().contains(name), "{fault}");
        }
    }
}
