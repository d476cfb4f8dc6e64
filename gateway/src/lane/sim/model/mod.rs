//! Random runs against a model: random workloads, faults, crashes, hand-overs, a sink that goes back; in the end the table, the
//! dead letters, the positions and the counts are what the workload says. Every run is named by its seed and can be repeated:
//! `ONCEGATE_SEED=7 cargo test -p oncegate --lib model_random`; `ONCEGATE_SEEDS=20000` asks for more of them.

mod chaos;
mod load;
mod run;

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

/// Runs of a plain `cargo test`.
const SEEDS: u64 = 800;
/// A run takes some ms; one that takes so long in real time, even on a busy machine, spins without end.
const TOO_LONG: Duration = Duration::from_secs(240);

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().expect("a number"))
}

#[test]
fn model_random_runs_end_as_the_workload_says() {
    let first = number("ONCEGATE_SEED");
    let count = number("ONCEGATE_SEEDS").unwrap_or(if first.is_some() { 1 } else { SEEDS });
    let first = first.unwrap_or(1);
    let next = Arc::new(AtomicU64::new(first));
    let failures: Arc<Mutex<Vec<(u64, String)>>> = Arc::default();
    let workers: Vec<_> = (0..thread::available_parallelism().map_or(2, usize::from))
        .map(|_| {
            let at_work: Arc<Mutex<Option<(u64, Instant)>>> = Arc::default();
            let (next, failures, mine) = (next.clone(), failures.clone(), at_work.clone());
            let work = move || {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= first + count || failures.lock().len() >= 5 {
                        return;
                    }
                    *mine.lock() = Some((seed, Instant::now()));
                    let ended = thread::Builder::new()
                        .name(format!("seed {seed}"))
                        .spawn(move || run::seed(seed))
                        .expect("a thread")
                        .join();
                    *mine.lock() = None;
                    let failure = match ended {
                        Ok(Ok(())) => continue,
                        Ok(Err(text)) => text,
                        Err(panic) => panic
                            .downcast_ref::<String>()
                            .cloned()
                            .or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()))
                            .unwrap_or_default(),
                    };
                    eprintln!("seed {seed}: {failure}");
                    failures.lock().push((seed, failure));
                }
            };
            (thread::spawn(work), at_work)
        })
        .collect();
    for (worker, at_work) in workers {
        while !worker.is_finished() {
            thread::sleep(Duration::from_millis(20));
            if let Some((seed, since)) = *at_work.lock() {
                assert!(since.elapsed() < TOO_LONG, "seed {seed} spins without end");
            }
        }
        worker.join().expect("a worker does not fail");
    }
    eprintln!("seeds {first}..{}: {:?}", first + count, run::MET);
    let failures = failures.lock();
    assert!(
        failures.is_empty(),
        "{} of the seeds {first}..{} failed; the first: seed {}: {}",
        failures.len(),
        first + count,
        failures[0].0,
        failures[0].1
    );
    assert!(
        count < SEEDS || run::MET.whole(),
        "the runs did not meet all that they are made for: {:?}",
        run::MET
    );
}
