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

    #[test]
    fn a_clock_that_runs_backwards_falls_no_lower_than_the_floor() {
        assert_eq!(arrival(100 * SECOND, Duration::from_secs(1), -SECOND, 90 * SECOND), 90 * SECOND);
    }
}
