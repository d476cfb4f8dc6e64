//! The arrival clock (P11): arrival = max(wall clock, admission floor), and it never runs ahead of the monotonic clock by more
//! than a bound, so that one jump of the wall clock cannot retire facts.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use tokio::time::Instant;

/// How far the wall clock may jump ahead of the monotonic clock while the process runs.
const JUMP: Duration = Duration::from_secs(300);

/// See the module.
#[derive(Debug)]
pub(crate) struct ArrivalClock {
    last: Mutex<(i64, Instant)>,
}

/// Microseconds since the epoch by the wall clock.
pub(crate) fn wall_us() -> i64 {
    #[cfg(test)]
    if let Some(us) = simulated::wall_us() {
        return us;
    }
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_micros() as i64)
}

/// Milliseconds since the epoch by the wall clock.
pub(crate) fn wall_ms() -> i64 {
    wall_us() / 1_000
}

/// Between 0.5 and 1: spreads what would else march in step.
pub(crate) fn jitter() -> f64 {
    #[cfg(test)]
    if let Some(jitter) = simulated::jitter() {
        return jitter;
    }
    rand::random_range(0.5..1.0)
}

/// A wall clock that follows tokio's paused clock, and jitter from a seed, so that a simulated run can be repeated.
#[cfg(test)]
pub(crate) mod simulated {
    use std::cell::RefCell;

    use rand::{Rng, SeedableRng, rngs::SmallRng};
    use tokio::time::Instant;

    const MOST_TURNS: u32 = 50_000;

    thread_local! {
        static CLOCK: RefCell<Option<(i64, Instant, SmallRng)>> = const { RefCell::new(None) };
    }

    /// From now on this thread's wall clock stands at `us` and goes as tokio's clock does.
    pub(crate) fn start(us: i64, seed: u64) {
        CLOCK.set(Some((us, Instant::now(), SmallRng::seed_from_u64(seed))));
    }

    /// Moves the wall clock alone.
    pub(crate) fn shift(us: i64) {
        CLOCK.with_borrow_mut(|clock| {
            if let Some((base, ..)) = clock {
                *base += us;
            }
        });
    }

    /// Called at each turn of a loop that is to wait for something. In a simulated run that spins no time passes, and nobody else gets a
    /// turn: it would never end.
    pub(crate) fn turns() {
        thread_local! {
            static TURNS: RefCell<Option<(Instant, u32)>> = const { RefCell::new(None) };
        }
        if CLOCK.with_borrow(Option::is_none) {
            return;
        }
        let now = Instant::now();
        let turns = TURNS.with_borrow_mut(|last| {
            let turns = last.filter(|(at, _)| *at == now).map_or(0, |(_, turns)| turns + 1);
            *last = Some((now, turns));
            turns
        });
        assert!(turns < MOST_TURNS, "it spins: {turns} turns and no time passes");
    }

    pub(super) fn wall_us() -> Option<i64> {
        CLOCK
            .with_borrow(|clock| clock.as_ref().map(|(us, since, _)| us + since.elapsed().as_micros() as i64))
    }

    pub(super) fn jitter() -> Option<f64> {
        CLOCK.with_borrow_mut(|clock| clock.as_mut().map(|(.., rng)| rng.random_range(0.5..1.0)))
    }
}

/// Pure core: the anchor is (arrival then, monotonic time since).
fn arrival(anchor_us: i64, elapsed: Duration, wall_us: i64, floor_us: i64) -> i64 {
    let limit = anchor_us.saturating_add((elapsed + JUMP).as_micros() as i64);
    wall_us.min(limit).max(floor_us)
}

/// The clocks when a route by arrival opens, ms since the epoch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clocks {
    pub(crate) host_ms: i64,
    pub(crate) sink_ms: i64,
    /// How far event time has come, by all that is known of the route; none if nothing is.
    pub(crate) watermark_ms: Option<i64>,
}

/// What a route by arrival does with them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum AtStart {
    /// It opens.
    Good,
    /// It opens, and says this: nothing is forgotten too early.
    Warn(String),
    /// By this clock it would forget keys whose copies may still come.
    Refuse { what: String, remedy: String },
}

impl Clocks {
    /// A clock that is ahead moves the watermark, and with it the floors, for good: keys are forgotten too early, and their copies
    /// take effect again. So it is refused: by the sink's clock, where that is another one, and by how long the route would not have
    /// been used. A clock that is behind harms nobody: arrival is the watermark until the clock has caught up.
    pub(crate) fn at_start(
        &self,
        route: &str,
        window_ms: i64,
        max_skew_ms: i64,
        max_jump_ms: i64,
    ) -> AtStart {
        let Self { host_ms, sink_ms, watermark_ms } = *self;
        let ahead_ms = host_ms.saturating_sub(sink_ms);
        if ahead_ms > max_skew_ms {
            return AtStart::Refuse {
                what: format!(
                    "the clock of this host ({}) is {} ahead of the sink's ({}), more than max_clock_skew = {}; by it, keys would \
                     be forgotten too early",
                    shown(host_ms),
                    lasting(ahead_ms),
                    shown(sink_ms),
                    lasting(max_skew_ms),
                ),
                remedy: "set the clock that is wrong; raise max_clock_skew only if it is the sink's and has to stay so".into(),
            };
        }
        let Some(watermark_ms) = watermark_ms else { return AtStart::Good };
        let past_ms = host_ms.saturating_sub(watermark_ms);
        let most_ms = window_ms.saturating_add(max_jump_ms);
        if past_ms > most_ms {
            return AtStart::Refuse {
                what: format!(
                    "the clock of this host ({}) is {} past the last record that the route knows ({}), more than window + \
                     max_clock_jump = {}; if it is wrong, keys would be forgotten too early",
                    shown(host_ms),
                    lasting(past_ms),
                    shown(watermark_ms),
                    lasting(most_ms),
                ),
                remedy: format!(
                    "set the clock if it is wrong; if it is right, all that the route knows has expired: discard it with `oncegate \
                     store reset-floor --route {route}`, or raise max_clock_jump"
                ),
            };
        }
        if past_ms < -max_skew_ms {
            return AtStart::Warn(format!(
                "the clock of this host ({}) is {} behind the last record that the route knows ({}): records get that time as their \
                 arrival until the clock has caught up, and nothing is forgotten meanwhile; if an earlier start had a clock that was \
                 ahead, `oncegate store reset-floor --route {route}` discards what the route knows and begins anew",
                shown(host_ms),
                lasting(-past_ms),
                shown(watermark_ms),
            ));
        }
        AtStart::Good
    }
}

/// A time for people.
pub(crate) fn shown(ms: i64) -> String {
    jiff::Timestamp::from_millisecond(ms).map_or_else(|_| format!("{ms} ms"), |time| time.to_string())
}

fn lasting(ms: i64) -> String {
    let (days, hours, minutes, seconds) =
        (ms / 86_400_000, ms / 3_600_000 % 24, ms / 60_000 % 60, ms / 1_000 % 60);
    let parts = [(days, "d"), (hours, "h"), (minutes, "min"), (seconds, "s")];
    let told: Vec<String> =
        parts.iter().filter(|(count, _)| *count > 0).map(|(count, unit)| format!("{count} {unit}")).collect();
    if told.is_empty() { format!("{ms} ms") } else { told.join(" ") }
}

impl ArrivalClock {
    pub(crate) fn new() -> Self {
        Self { last: Mutex::new((wall_us(), Instant::now())) }
    }

    /// Arrival of a record that comes now, microseconds since the epoch, at or above `floor_ms`.
    pub(crate) fn arrival_us(&self, floor_ms: i64) -> i64 {
        let mut last = self.last.lock();
        let now = Instant::now();
        let elapsed = now.saturating_duration_since(last.1);
        let at = arrival(last.0, elapsed, wall_us(), floor_ms.saturating_mul(1_000));
        // The anchor follows the monotonic clock, so that a jump is caught up with slowly and never at once.
        if elapsed > JUMP {
            *last = (at.min(last.0.saturating_add((elapsed * 2).as_micros() as i64)), now);
        }
        at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: i64 = 1_000_000;

    #[test]
    fn p11_arrival_is_the_wall_clock_at_or_above_the_floor() {
        assert_eq!(arrival(0, Duration::from_secs(5), 5 * SECOND, 0), 5 * SECOND);
        assert_eq!(arrival(0, Duration::from_secs(5), 5 * SECOND, 9 * SECOND), 9 * SECOND);
    }

    #[test]
    fn p11_a_jump_of_the_wall_clock_is_bounded() {
        let a_year = 365 * 86_400 * SECOND;
        assert_eq!(arrival(0, Duration::from_secs(10), a_year, 0), 310 * SECOND);
    }

    const DAY_MS: i64 = 86_400_000;

    /// A host came up with its clock two years ahead: the first record moved the watermark there, every key was forgotten, and copies
    /// of records of the same morning were written a second time.
    #[test]
    fn p11_a_clock_that_is_ahead_at_the_start_is_refused_and_the_way_out_is_named() {
        let now = 1_800_000_000_000;
        let at_start = |host_ms, sink_ms, watermark_ms| {
            Clocks { host_ms, sink_ms, watermark_ms }.at_start("orders", DAY_MS, 300_000, 30 * DAY_MS)
        };
        for (host, sink, watermark) in [
            (now, now, None),
            (now, now, Some(now - 1_000)),
            (now + 299_000, now, Some(now)),
            // Away for a week, and for as long as may be.
            (now, now, Some(now - 7 * DAY_MS)),
            (now, now, Some(now - 31 * DAY_MS)),
            // A new route on a host whose clock is behind, and one that is a little behind its own watermark.
            (now - 2 * DAY_MS, now, None),
            (now - 299_000, now, Some(now)),
        ] {
            assert_eq!(at_start(host, sink, watermark), AtStart::Good, "{host} {sink} {watermark:?}");
        }
        let refused = |host, sink, watermark| match at_start(host, sink, watermark) {
            AtStart::Refuse { what, remedy } => (what, remedy),
            other => panic!("{other:?}"),
        };
        for watermark in [None, Some(now), Some(now - 20 * DAY_MS)] {
            let (what, remedy) = refused(now + 90_061_000, now, watermark);
            assert!(
                what.contains("1 d 1 h 1 min 1 s ahead") && what.contains("2027-01-15T08:00:00Z"),
                "{what}"
            );
            assert!(
                what.contains("max_clock_skew = 5 min") && remedy.contains("max_clock_skew"),
                "{what}; {remedy}"
            );
        }
        let (what, remedy) = refused(now, now, Some(now - 31 * DAY_MS - 1));
        assert!(what.contains("31 d past") && what.contains("max_clock_jump = 31 d"), "{what}");
        assert!(remedy.contains("oncegate store reset-floor --route orders"), "{remedy}");
        let AtStart::Warn(warning) = at_start(now - 2 * DAY_MS, now, Some(now)) else { panic!("no warning") };
        assert!(warning.contains("2 d behind") && warning.contains("reset-floor"), "{warning}");
    }

    #[test]
    fn a_clock_that_runs_backwards_falls_no_lower_than_the_floor() {
        assert_eq!(arrival(100 * SECOND, Duration::from_secs(1), -SECOND, 90 * SECOND), 90 * SECOND);
    }
}
