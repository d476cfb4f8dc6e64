//! Where a partition is read from. Pure.

use adapters::kafka::TopicPartition;

use crate::lane::AssignedShard;

/// Where to begin when the sink has no position yet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Start {
    /// At the first record of the log.
    Earliest,
    /// After the last record that is there when the group reads the partition for the first time.
    Latest,
    /// At the first record that is not older, ms since the epoch.
    Time(i64),
}

/// What to do when records that were not read yet are gone from the log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Gap {
    /// The partition stops and says what is missing.
    Stop,
    /// Reading goes on behind the gap; the missing offsets are counted.
    Skip,
}

/// What to do with one partition.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Placement {
    /// Read from here.
    Read(i64),
    /// The offsets `from..to` are gone: count them and read from `to`.
    Skip {
        /// First missing offset.
        from: i64,
        /// First offset that is there.
        to: i64,
    },
    /// Do not read.
    Stop(String),
}

/// Where to read `at` whose log holds `start..end`, when the next offset wanted is `position`.
pub(super) fn place(at: &TopicPartition, position: i64, (start, end): (i64, i64), gap: Gap) -> Placement {
    if position > end {
        // Skipping cannot help: what is in the log now bears offsets that the sink has settled already.
        return Placement::Stop(format!(
            "{at}: the sink's position {position} lies beyond the log's end {end}: the topic was deleted and made again, or its \
             log was cut by a failover; relay it as a new topic name or route, so that its offsets are not taken for settled ones"
        ));
    }
    if position < start {
        return match gap {
            Gap::Skip => Placement::Skip { from: position, to: start },
            Gap::Stop => Placement::Stop(format!(
                "{at}: the offsets {position} to {last} are gone from the log before they were read ({count} offsets); \
                 bring them back another way, then set `gap = \"skip\"` to read on at {start}",
                last = start - 1,
                count = start - position,
            )),
        };
    }
    Placement::Read(position)
}

/// Whether the topic is another one than that whose position the sink has (P3), and what to do then: to read the new one from its
/// start on, with a warning, or to stop. None if it is the same, or if nothing is known of the one before.
pub(super) fn source(
    at: &TopicPartition,
    shard: &AssignedShard,
    id: &str,
    gap: Gap,
) -> Option<Result<String, String>> {
    let before = shard.source.as_deref().filter(|before| *before != id)?;
    let what = format!(
        "{at}: the topic was deleted and made again: its id was {before} and is {id}. What was not read of the old one is gone"
    );
    Some(match gap {
        Gap::Skip => Ok(format!("{what}; the new one is read from its start on")),
        Gap::Stop => Err(format!(
            "{what}, and the sink's position ({}) is the old one's; set `gap = \"skip\"` to read the new one from its `start` on",
            shard.position.map_or("none".to_owned(), |position| position.to_string())
        )),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn p3_a_topic_that_was_made_again_stops_or_begins_at_its_start_and_says_so() {
        let shard = |source: Option<&str>| AssignedShard {
            slot: 0,
            generation: 1,
            position: Some(70),
            source: source.map(str::to_owned),
        };
        assert_eq!(source(&at(), &shard(None), "new", Gap::Stop), None, "nothing was kept: it is kept now");
        assert_eq!(source(&at(), &shard(Some("new")), "new", Gap::Stop), None);
        let Some(Err(reason)) = source(&at(), &shard(Some("old")), "new", Gap::Stop) else { panic!() };
        for says in ["orders/3", "its id was old and is new", "position (70)", "gap = \"skip\""] {
            assert!(reason.contains(says), "{reason}");
        }
        let Some(Ok(warning)) = source(&at(), &shard(Some("old")), "new", Gap::Skip) else { panic!() };
        assert!(warning.contains("from its start on"), "{warning}");
    }

    fn at() -> TopicPartition {
        TopicPartition::new("orders", 3)
    }

    #[test]
    fn p13_inside_the_log_the_sinks_position_is_read_from() {
        for position in [10, 15, 20] {
            assert_eq!(place(&at(), position, (10, 20), Gap::Stop), Placement::Read(position));
        }
    }

    #[test]
    fn p13_a_gap_stops_and_names_the_exact_range() {
        let Placement::Stop(reason) = place(&at(), 4, (10, 20), Gap::Stop) else { panic!() };
        assert!(
            reason.contains("orders/3") && reason.contains("4 to 9") && reason.contains("6 offsets"),
            "{reason}"
        );
        assert_eq!(place(&at(), 4, (10, 20), Gap::Skip), Placement::Skip { from: 4, to: 10 });
    }

    #[test]
    fn p13_a_position_beyond_the_end_always_stops() {
        for gap in [Gap::Stop, Gap::Skip] {
            let Placement::Stop(reason) = place(&at(), 21, (10, 20), gap) else { panic!() };
            assert!(reason.contains("21") && reason.contains("20"), "{reason}");
        }
    }
}
