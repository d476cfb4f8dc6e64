//! Which partitions wait for others (P11). Pure.
//!
//! The route's watermark is the smallest of its partitions', so none that is ahead makes the others late. But what lies between the
//! slowest and the fastest has to be kept; so none goes further ahead than `max_drift`.

/// How far one partition has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Come {
    /// The latest event time that was read; none before the first record.
    pub(super) to_ms: Option<i64>,
    /// There may be more to read, and it can be read: others wait for it.
    pub(super) goes_on: bool,
}

/// Up to where event time may be read now; none if there is no bound.
pub(super) fn limit(partitions: impl IntoIterator<Item = Come>, max_drift_ms: i64) -> Option<i64> {
    let slowest = partitions.into_iter().filter(|come| come.goes_on).filter_map(|come| come.to_ms).min();
    slowest.map(|slowest| slowest.saturating_add(max_drift_ms))
}

/// Whether a partition that has come so far waits.
pub(super) fn waits(to_ms: Option<i64>, limit: Option<i64>) -> bool {
    to_ms.zip(limit).is_some_and(|(to_ms, limit)| to_ms > limit)
}

/// The event time of a record as alignment counts it: what lies in the future comes from a wrong clock, and must not hold up its
/// partition until the others are there too.
pub(super) fn counted(event_ms: i64, now_ms: i64) -> i64 {
    event_ms.min(now_ms)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn come() -> impl Strategy<Value = Come> {
        (prop::option::of(-1_000..1_000_i64), any::<bool>())
            .prop_map(|(to_ms, goes_on)| Come { to_ms, goes_on })
    }

    proptest! {
        /// If all waited, the relay would stand still for ever.
        #[test]
        fn p11_the_slowest_partition_that_goes_on_never_waits(
            partitions in prop::collection::vec(come(), 1..12), max_drift_ms in 0..500_i64
        ) {
            let limit = limit(partitions.iter().copied(), max_drift_ms);
            let going: Vec<&Come> = partitions.iter().filter(|come| come.goes_on).collect();
            let slowest = going.iter().filter(|come| come.to_ms.is_some()).min_by_key(|come| come.to_ms);
            if let Some(slowest) = slowest {
                prop_assert!(!waits(slowest.to_ms, limit));
            }
            for come in &partitions {
                if waits(come.to_ms, limit) {
                    let behind = going.iter().filter_map(|other| other.to_ms).min();
                    prop_assert!(behind.is_some_and(|behind| come.to_ms.unwrap() - behind > max_drift_ms));
                }
            }
        }
    }

    #[test]
    fn p11_nobody_waits_for_a_partition_that_is_at_its_end_or_stopped() {
        let come = |to_ms, goes_on| Come { to_ms: Some(to_ms), goes_on };
        let limit_of = |partitions: &[Come]| limit(partitions.iter().copied(), 100);
        assert_eq!(limit_of(&[come(0, false), come(1_000, true)]), Some(1_100));
        assert_eq!(limit_of(&[come(0, false), come(1_000, false)]), None);
        assert_eq!(limit_of(&[come(0, true), come(1_000, true)]), Some(100));
        assert!(waits(Some(1_000), Some(100)) && !waits(Some(100), Some(100)) && !waits(None, Some(100)));
    }

    #[test]
    fn p11_a_wrong_clock_ahead_does_not_hold_its_partition_up() {
        assert_eq!(counted(9_999_999, 500), 500);
        assert_eq!(counted(400, 500), 400);
    }
}
