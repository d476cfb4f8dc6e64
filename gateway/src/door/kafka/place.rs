//! Where a partition is read from. Pure.

use adapters::kafka::TopicPartition;

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

#[cfg(test)]
mod tests {
    use super::*;

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
