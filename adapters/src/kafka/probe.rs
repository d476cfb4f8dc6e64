//! What of the cluster does not fit what a relay promises: asked when it starts, said in one list.

use std::{collections::BTreeMap, time::Duration};

use rdkafka::{
    admin::{AdminClient, AdminOptions, ResourceSpecifier},
    client::DefaultClientContext,
    consumer::Consumer,
};

use super::{KafkaConfig, KafkaFault, source::looked_up};
use crate::sink::Misfit;

/// How long one question may take.
const ANSWER: Duration = Duration::from_secs(5);

/// What a route asks of its topics.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SourceNeeds {
    /// Records should be there for so long: the window and the lateness, ms.
    pub keep_ms: i64,
    /// The event time is the record's timestamp.
    pub timestamps: bool,
}

/// What of one topic's settings does not fit.
fn of_topic(topic: &str, settings: &BTreeMap<String, String>, needs: SourceNeeds) -> Vec<Misfit> {
    let mut misfits = vec![];
    let mut add = |what: String, remedy: String| misfits.push(Misfit { what, remedy });
    let setting = |name: &str| settings.get(name).map(String::as_str).unwrap_or_default();
    if let Ok(retention) = setting("retention.ms").parse::<i64>()
        && (0..needs.keep_ms).contains(&retention)
    {
        add(
            format!(
                "topic {topic:?} keeps records for {retention} ms (retention.ms), less than window and lateness together ({} ms): what a \
                 relay that is away for longer has not read is gone",
                needs.keep_ms
            ),
            format!("raise retention.ms of the topic to {} or more", needs.keep_ms),
        );
    }
    if setting("cleanup.policy").contains("compact") {
        add(
            format!(
                "topic {topic:?} is compacted (cleanup.policy): of several records of a key only the last may be left to read"
            ),
            "take cleanup.policy = delete where every record counts".to_owned(),
        );
    }
    if needs.timestamps && setting("message.timestamp.type") == "LogAppendTime" {
        add(
            format!(
                "topic {topic:?} stamps records when they are appended (message.timestamp.type), and event_time is that stamp: two copies \
                 of one event have different event times"
            ),
            "take message.timestamp.type = CreateTime, or an event time out of the payload".to_owned(),
        );
    }
    if setting("unclean.leader.election.enable") == "true" {
        add(
            format!(
                "topic {topic:?} may lose records that were read already (unclean.leader.election.enable), and write others in their place"
            ),
            "take unclean.leader.election.enable = false".to_owned(),
        );
    }
    misfits
}

/// What of the group's other members does not fit: those that are no relays get partitions that nobody then writes.
fn of_group(group: &str, kind: &str, ours: &str, members: &[String]) -> Vec<Misfit> {
    let remedy = "give the relay a `group` of its own".to_owned();
    if !kind.is_empty() && kind != "consumer" {
        return vec![Misfit {
            what: format!("group {group:?} is one of kind {kind:?}, not of consumers"),
            remedy,
        }];
    }
    let mut others: Vec<&str> = members.iter().map(String::as_str).filter(|member| *member != ours).collect();
    others.sort_unstable();
    others.dedup();
    if others.is_empty() {
        return vec![];
    }
    vec![Misfit {
        what: format!(
            "group {group:?} has members of other clients ({}): they get a share of the partitions, and nobody writes it",
            others.join(", ")
        ),
        remedy,
    }]
}

/// Everything of the topics and the group of `config` that does not fit `needs`, each with its remedy. Joins no group. Blocks for some
/// seconds at most.
pub fn misfits(config: &KafkaConfig, needs: SourceNeeds) -> Result<Vec<Misfit>, KafkaFault> {
    let (probe, topics) = looked_up(config)?;
    let mut misfits = vec![];
    for (topic, settings) in settings(config, &topics)? {
        match settings {
            Ok(settings) => misfits.extend(of_topic(topic, &settings, needs)),
            Err(reason) => misfits.push(Misfit {
                what: format!(
                    "the settings of topic {topic:?} cannot be read ({reason}), so its retention is not checked"
                ),
                remedy: "allow DescribeConfigs on the topic".to_owned(),
            }),
        }
    }
    let group = &config.group;
    if let Ok(found) = probe.client().fetch_group_list(Some(group), ANSWER) {
        for info in found.groups() {
            let members: Vec<String> =
                info.members().iter().map(|member| member.client_id().to_owned()).collect();
            let ours = config.options.get("client.id").map_or("oncegate", String::as_str);
            misfits.extend(of_group(group, info.protocol_type(), ours, &members));
        }
    }
    Ok(misfits)
}

#[allow(clippy::type_complexity)]
fn settings<'a>(
    config: &KafkaConfig,
    topics: &'a [(String, usize)],
) -> Result<Vec<(&'a str, Result<BTreeMap<String, String>, String>)>, KafkaFault> {
    let admin = config.probe().create::<AdminClient<DefaultClientContext>>();
    let admin = admin.map_err(|error| KafkaFault::from(&error))?;
    let asked: Vec<ResourceSpecifier<'_>> =
        topics.iter().map(|(topic, _)| ResourceSpecifier::Topic(topic)).collect();
    let options = AdminOptions::new().request_timeout(Some(ANSWER));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
    let runtime = runtime.map_err(|error| KafkaFault::Unavailable(error.to_string()))?;
    let found = runtime.block_on(admin.describe_configs(&asked, &options));
    let found = found.map_err(|error| KafkaFault::from(&error))?;
    let settings = found.into_iter().zip(topics).map(|(found, (topic, _))| {
        let settings = found.map_err(|code| code.to_string()).map(|found| {
            found.entries.into_iter().filter_map(|entry| Some((entry.name, entry.value?))).collect()
        });
        (topic.as_str(), settings)
    });
    Ok(settings.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEEDS: SourceNeeds = SourceNeeds { keep_ms: 90_000_000, timestamps: true };

    fn said(settings: &[(&str, &str)]) -> Vec<String> {
        let settings =
            settings.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        of_topic("orders", &settings, NEEDS).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_topic_that_fits_says_nothing() {
        let good = [
            ("retention.ms", "90000000"),
            ("cleanup.policy", "delete"),
            ("message.timestamp.type", "CreateTime"),
            ("unclean.leader.election.enable", "false"),
        ];
        assert_eq!(said(&good), [] as [&str; 0]);
        assert_eq!(said(&[("retention.ms", "-1")]), [] as [&str; 0], "kept for ever");
    }

    #[test]
    fn what_does_not_fit_is_named_with_its_remedy_all_at_once() {
        let bad = [
            ("retention.ms", "3600000"),
            ("cleanup.policy", "compact,delete"),
            ("message.timestamp.type", "LogAppendTime"),
            ("unclean.leader.election.enable", "true"),
        ];
        let said = said(&bad);
        assert_eq!(said.len(), 4, "{said:?}");
        assert!(said[0].contains("3600000 ms") && said[0].contains("90000000 or more"), "{said:?}");
        let other = SourceNeeds { timestamps: false, ..NEEDS };
        let stamped = BTreeMap::from([("message.timestamp.type".to_owned(), "LogAppendTime".to_owned())]);
        assert_eq!(of_topic("orders", &stamped, other), []);
    }

    #[test]
    fn members_of_the_group_that_are_no_relays_are_named() {
        let of = |kind, members: &[&str]| {
            let members: Vec<String> = members.iter().map(|member| (*member).to_owned()).collect();
            of_group("g", kind, "oncegate", &members).iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert_eq!(of("consumer", &["oncegate", "oncegate"]), [] as [&str; 0]);
        assert_eq!(of("", &[]), [] as [&str; 0]);
        let found = of("consumer", &["oncegate", "billing", "billing"]);
        assert!(found.len() == 1 && found[0].contains("(billing)"), "{found:?}");
        assert!(of("connect", &[])[0].contains("\"connect\""));
    }
}
