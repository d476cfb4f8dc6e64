//! Crashes by the number, of each kind of sink and mode.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use super::{explain, met::MET, number, plan::Plan, run_drawn};

/// Crashes of each kind.
const CRASHES: u64 = 10_000;
/// Where its seeds begin: beyond those of a plain `cargo test`.
const FROM: u64 = 1_000_001;

/// Prints the table of docs/proof.md. Of each kind the seeds are taken in order, and those without a crash are left out.
#[test]
#[ignore = "takes half an hour of a core: see the module above, or docs/proof.md"]
fn model_crash_points_of_each_sink_and_mode() {
    let wanted = number("ONCEGATE_CRASHES").unwrap_or(CRASHES);
    let from = number("ONCEGATE_FROM").unwrap_or(FROM);
    println!(
        "| sink and mode | crashes | runs | seeds | batches | s | fell |\n| --- | --- | --- | --- | --- | --- | --- |"
    );
    let mut fallen = Vec::new();
    for kind in Plan::KINDS {
        let (began, batches) = (Instant::now(), MET.batches.load(Ordering::Relaxed));
        let (seed, drawn, runs) =
            (Arc::new(AtomicU64::new(from)), AtomicU64::new(0), Arc::new(AtomicU64::new(0)));
        let next = {
            let (seed, runs) = (seed.clone(), runs.clone());
            move || {
                while drawn.load(Ordering::Relaxed) < wanted {
                    let seed = seed.fetch_add(1, Ordering::Relaxed);
                    let plan = Plan::draw(seed);
                    if plan.kind() == kind && plan.crashes() > 0 {
                        drawn.fetch_add(plan.crashes(), Ordering::Relaxed);
                        runs.fetch_add(1, Ordering::Relaxed);
                        return Some(seed);
                    }
                }
                None
            }
        };
        let failures = run_drawn(None, usize::MAX, next);
        let crashes = MET.crashes.lock().get(kind).copied().unwrap_or_default();
        println!(
            "| {kind} | {crashes} | {} | {from} to {} | {} | {:.0} | {} |",
            runs.load(Ordering::Relaxed),
            seed.load(Ordering::Relaxed),
            MET.batches.load(Ordering::Relaxed) - batches,
            began.elapsed().as_secs_f64(),
            failures.len()
        );
        assert!(crashes >= wanted || !failures.is_empty(), "{crashes} crashes of {kind}");
        failures.iter().for_each(|(seed, fell)| println!("seed {seed}: {fell}"));
        fallen.extend(failures);
    }
    if let Some((seed, _)) = fallen.first() {
        panic!("{} runs fell\n\n{}", fallen.len(), explain(*seed, None));
    }
}
