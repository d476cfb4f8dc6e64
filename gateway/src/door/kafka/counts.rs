//! How many partitions the topics have. Pure.

use std::collections::BTreeMap;

/// Per topic, and what it had before if that was another number.
#[derive(Debug)]
pub(super) struct Counts(BTreeMap<String, Count>);

#[derive(Clone, Copy, Debug)]
struct Count {
    now: i64,
    before: Option<i64>,
}

impl Counts {
    pub(super) fn new<'a>(topics: impl IntoIterator<Item = (&'a str, usize)>) -> Self {
        let count = |now: usize| Count { now: now as i64, before: None };
        Self(topics.into_iter().map(|(topic, now)| (topic.to_owned(), count(now))).collect())
    }

    /// Of `topic`, as last seen.
    pub(super) fn of(&self, topic: &str) -> Option<i64> {
        self.0.get(topic).map(|count| count.now)
    }

    /// The client library has seen so many. Answers with what is to be logged if the topic has grown. Fewer are not believed: they
    /// are seen while partitions are looked up, and a topic that was made again is another one only once it is opened anew.
    pub(super) fn seen(&mut self, topic: &str, partitions: usize) -> Option<String> {
        let count = self.0.get_mut(topic)?;
        let (before, now) = (count.now, partitions as i64);
        if now <= before {
            return None;
        }
        *count = Count { now, before: Some(before) };
        Some(warning(topic, before, now))
    }

    /// A shard row says that the topic had so many when it was last read. Answers with what is to be logged, once a topic.
    pub(super) fn kept(&mut self, topic: &str, before: i64) -> Option<String> {
        let count = self.0.get_mut(topic)?;
        if before == count.now || count.before.is_some() {
            return None;
        }
        count.before = Some(before);
        Some(warning(topic, before, count.now))
    }

    /// Topic, partitions now, and before if they have changed.
    pub(super) fn all(&self) -> impl Iterator<Item = (&str, i64, Option<i64>)> {
        self.0.iter().map(|(topic, count)| (topic.as_str(), count.now, count.before))
    }
}

fn warning(topic: &str, before: i64, now: i64) -> String {
    let cause = if now < before {
        "it was deleted and made again with fewer"
    } else {
        "records of a key may go to another partition than they did"
    };
    format!(
        "topic {topic:?} had {before} partitions and has {now}: {cause}. A copy of a record from before may come through another \
         partition than the first; if that one is read by another process, or its store is lost, only the table's row key tells the \
         copy. That ends once no copy from before the change can come any more"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A topic grew from 3 to 6 partitions; copies of the last hour's events went to other partitions, which another instance read,
    /// and took effect again. Nothing had said that the count mattered, or that it had changed.
    #[test]
    fn p13_a_changed_partition_count_is_told_once_with_both_numbers() {
        let mut counts = Counts::new([("orders", 6), ("clicks", 2)]);
        assert_eq!((counts.of("orders"), counts.of("none")), (Some(6), None));
        assert_eq!(counts.kept("clicks", 2), None);
        let told = counts.kept("orders", 3).unwrap();
        for says in ["\"orders\"", "had 3 partitions and has 6", "row key"] {
            assert!(told.contains(says), "{told}");
        }
        assert_eq!(counts.kept("orders", 3), None, "each of its shards says the same");
        // While it runs.
        assert_eq!(counts.seen("clicks", 2), None);
        assert_eq!(counts.seen("clicks", 1), None, "not all are looked up yet");
        assert!(counts.seen("clicks", 4).unwrap().contains("had 2 partitions and has 4"));
        assert_eq!(counts.seen("clicks", 4), None);
        assert_eq!(counts.kept("clicks", 2), None, "the rows still say what was told");
        assert_eq!(counts.all().collect::<Vec<_>>(), [("clicks", 4, Some(2)), ("orders", 6, Some(3))]);
        let mut again = Counts::new([("orders", 2)]);
        assert!(again.kept("orders", 3).unwrap().contains("made again with fewer"));
    }
}
