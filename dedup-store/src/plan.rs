//! What a store will need once its window is full, from the keys that have come so far: [`Plan`]. Pure.

use std::fmt;

use crate::{
    filter,
    slots::{self, SlotSizes},
    store::StoreOptions,
    table,
};

/// Bytes on disk of a sealed key: its entry in a run, and its share of the filter's file.
const RUN_BYTES_PER_KEY: f64 = 20.2 + filter::BITS_PER_KEY as f64 / 8.0;
/// Bytes on disk of a key in a tail.
const TAIL_BYTES_PER_KEY: f64 = 30.0;
/// Tables besides the open slot's: one slot is sealed while the next fills.
const TABLES: u64 = 2;

/// No store holds more, and the bytes of so many can still be counted. A watermark that hardly moved while keys came makes any pace.
const MOST_KEYS: f64 = (1_u64 << 48) as f64;

/// How fast keys come, in event time: measured over whole slots, older ones count less and less.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Pace {
    keys: f64,
    passed_ms: f64,
}

impl Pace {
    /// A slot was closed: so many keys came while the watermark moved so far.
    pub(crate) fn add(&mut self, keys: u64, passed_ms: i64) {
        (self.keys, self.passed_ms) = (self.keys * 0.75, self.passed_ms * 0.75);
        self.keys += keys as f64;
        self.passed_ms += passed_ms.max(0) as f64;
    }

    /// Keys per ms; none before the watermark has moved.
    fn per_ms(&self) -> Option<f64> {
        (self.passed_ms >= 1.0).then(|| self.keys / self.passed_ms)
    }
}

/// What the store will hold and need when the window is full, if keys go on coming as they did in the last slots.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Plan {
    /// New keys in a second of event time, as measured.
    pub keys_per_s: f64,
    /// Keys within window + lateness.
    pub keys: u64,
    /// Bytes of tables and filters.
    pub memory_bytes: u64,
    /// Bytes of tails, runs and filters.
    pub disk_bytes: u64,
    /// The budgets that they must fit into.
    pub max_memory_bytes: u64,
    /// As above.
    pub max_disk_bytes: u64,
    /// The longest window that fits both budgets at this pace, ms.
    pub window_fits_ms: i64,
}

impl Plan {
    pub(crate) fn new(pace: &Pace, sizes: &SlotSizes, options: &StoreOptions) -> Option<Self> {
        let per_ms = pace.per_ms()?;
        let lateness_ms = options.lateness_ms.max(0);
        let need = |window_ms: i64| Need::of(per_ms, window_ms.saturating_add(lateness_ms), sizes);
        let fits = |need: Need| {
            need.memory_bytes <= options.max_memory_bytes && need.disk_bytes <= options.max_disk_bytes
        };
        let window_ms = options.window_ms.max(0);
        let all = need(window_ms);
        let window_fits_ms = if fits(all) {
            window_ms
        } else {
            let (mut least, mut most) = (0, window_ms);
            while most - least > 1 + window_ms / 1_000 {
                let middle = least + (most - least) / 2;
                if fits(need(middle)) { least = middle } else { most = middle }
            }
            least
        };
        // A larger budget makes larger slots, which need more.
        let mut memory_bytes = all.memory_bytes;
        if memory_bytes > options.max_memory_bytes {
            loop {
                let sizes = SlotSizes::new(sizes.width_ms, memory_bytes);
                let need = Need::of(per_ms, window_ms.saturating_add(lateness_ms), &sizes).memory_bytes;
                if need <= memory_bytes {
                    break;
                }
                memory_bytes = need.max(memory_bytes.saturating_add(memory_bytes / 16));
            }
        }
        Some(Plan {
            keys_per_s: per_ms * 1e3,
            keys: all.keys,
            memory_bytes,
            disk_bytes: all.disk_bytes,
            max_memory_bytes: options.max_memory_bytes,
            max_disk_bytes: options.max_disk_bytes,
            window_fits_ms,
        })
    }

    /// Both budgets suffice.
    pub fn fits(&self) -> bool {
        self.memory_bytes <= self.max_memory_bytes && self.disk_bytes <= self.max_disk_bytes
    }
}

/// What does not suffice, and what to do; or that all does.
impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Plan { keys_per_s, keys, memory_bytes, disk_bytes, .. } = self;
        write!(
            f,
            "at {keys_per_s:.1} keys/s the window will hold {keys} keys, in {memory_bytes} bytes of memory and \
             {disk_bytes} of disk"
        )?;
        let short = [
            ("max_memory", *memory_bytes, self.max_memory_bytes),
            ("max_disk", *disk_bytes, self.max_disk_bytes),
        ];
        for (name, need, bound) in short.into_iter().filter(|(_, need, bound)| need > bound) {
            write!(f, "; {name} is {bound} bytes: raise it to {need}")?;
        }
        if !self.fits() {
            write!(
                f,
                ", or shorten the window to {} s; else new records will be refused when it is full",
                self.window_fits_ms / 1_000
            )?;
        }
        Ok(())
    }
}

#[derive(Clone, Copy)]
struct Need {
    keys: u64,
    memory_bytes: u64,
    disk_bytes: u64,
}

impl Need {
    fn of(per_ms: f64, span_ms: i64, sizes: &SlotSizes) -> Self {
        // A slot stays until its newest key has passed.
        let keys = (per_ms * (span_ms.max(0) as f64 + sizes.width_ms as f64)).ceil().min(MOST_KEYS) as u64;
        let of_width = ((per_ms * sizes.width_ms as f64).ceil() as u64).min(keys);
        let slot_keys =
            slots::full_keys_for(of_width).unwrap_or(of_width).min(of_width).clamp(1, sizes.max_keys);
        if slot_keys < sizes.seal_keys {
            let slots = keys.div_ceil(slot_keys);
            return Need {
                keys,
                memory_bytes: slots * table::bytes_for(slot_keys),
                disk_bytes: (keys as f64 * TAIL_BYTES_PER_KEY) as u64,
            };
        }
        let sealed = keys.saturating_sub(slot_keys);
        let planes = sealed.div_ceil(slot_keys).div_ceil(filter::COLUMNS as u64);
        let plane_bytes = filter::plane_bytes(filter::blocks_for(slot_keys));
        let tail_keys = slot_keys * TABLES;
        Need {
            keys,
            memory_bytes: planes * plane_bytes + TABLES * table::bytes_for(slot_keys),
            disk_bytes: (sealed as f64 * RUN_BYTES_PER_KEY + tail_keys as f64 * TAIL_BYTES_PER_KEY) as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR_MS: i64 = 3_600_000;

    fn options(max_memory_bytes: u64, max_disk_bytes: u64) -> StoreOptions {
        StoreOptions {
            window_ms: 12 * HOUR_MS,
            lateness_ms: 0,
            idle_after_ms: 0,
            max_disk_bytes,
            max_memory_bytes,
            commit_interval_ms: 5,
        }
    }

    fn plan(keys_per_slot: u64, options: &StoreOptions) -> Plan {
        let sizes = SlotSizes::new(HOUR_MS, options.max_memory_bytes);
        let mut pace = Pace::default();
        (0..3).for_each(|_| pace.add(keys_per_slot, HOUR_MS));
        Plan::new(&pace, &sizes, options).expect("the watermark has moved")
    }

    /// The bench at 10^8 keys in 12 hours took 5.9 bytes of memory and 23.2 of disk a key.
    #[test]
    fn a_plan_comes_near_what_was_measured() {
        let plan = plan(100_000_000 / 12, &options(16 << 30, 1 << 40));
        let keys = plan.keys as f64;
        assert!((100e6..110e6).contains(&keys), "{plan}");
        assert!((4.0..9.0).contains(&(plan.memory_bytes as f64 / keys)), "{plan}");
        assert!((20.0..27.0).contains(&(plan.disk_bytes as f64 / keys)), "{plan}");
        assert!(plan.fits() && plan.window_fits_ms == 12 * HOUR_MS, "{plan}");
    }

    #[test]
    fn a_budget_that_will_not_suffice_is_said_with_what_to_do() {
        let short = plan(100_000_000 / 12, &options(200 << 20, 1 << 40));
        assert!(!short.fits());
        let text = short.to_string();
        assert!(text.contains("max_memory is 209715200 bytes: raise it to"), "{text}");
        assert!(!text.contains("max_disk"), "{text}");
        assert!(short.window_fits_ms > 0 && short.window_fits_ms < 12 * HOUR_MS, "{short:?}");
        // What it advises fits indeed.
        let advised = StoreOptions { window_ms: short.window_fits_ms, ..options(200 << 20, 1 << 40) };
        let sizes = SlotSizes::new(HOUR_MS, advised.max_memory_bytes);
        let mut pace = Pace::default();
        pace.add(100_000_000 / 12, HOUR_MS);
        assert!(Plan::new(&pace, &sizes, &advised).unwrap().fits());
        let raised = options(short.memory_bytes, 1 << 40);
        assert!(plan(100_000_000 / 12, &raised).fits());
    }

    #[test]
    fn a_disk_that_will_not_suffice_is_said() {
        let text = plan(1_000_000, &options(16 << 30, 100 << 20)).to_string();
        assert!(text.contains("max_disk is 104857600 bytes: raise it to"), "{text}");
    }

    #[test]
    fn keys_without_end_are_planned_for_without_overflow() {
        for max_memory_bytes in [1 << 20, 1 << 40, u64::MAX] {
            let options = StoreOptions { window_ms: i64::MAX, ..options(max_memory_bytes, u64::MAX) };
            let sizes = SlotSizes::new(i64::MAX / 12, options.max_memory_bytes);
            let mut pace = Pace::default();
            pace.add(u64::MAX, 1);
            let plan = Plan::new(&pace, &sizes, &options).unwrap();
            assert!(plan.keys >= 1 << 47 && plan.disk_bytes > plan.keys, "{plan:?}");
        }
    }

    #[test]
    fn few_keys_stay_in_tables() {
        let plan = plan(1_000, &options(1 << 30, 1 << 30));
        assert!(plan.fits() && plan.keys == 13_000, "{plan:?}");
        assert!(plan.memory_bytes < 1_000_000, "{plan:?}");
    }

    #[test]
    fn nothing_is_said_before_the_watermark_has_moved() {
        let options = options(1 << 30, 1 << 30);
        let sizes = SlotSizes::new(HOUR_MS, 1 << 30);
        assert_eq!(Plan::new(&Pace::default(), &sizes, &options), None);
        let mut pace = Pace::default();
        pace.add(10, 0);
        assert_eq!(Plan::new(&pace, &sizes, &options), None);
    }

    #[test]
    fn a_pace_follows_the_last_slots() {
        let mut pace = Pace::default();
        (0..50).for_each(|_| pace.add(1_000, 1_000));
        (0..20).for_each(|_| pace.add(10_000, 1_000));
        let now = pace.per_ms().unwrap();
        assert!((9.9..=10.0).contains(&now), "{now}");
    }
}
