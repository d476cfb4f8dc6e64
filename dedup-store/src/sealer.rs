//! Seals closed slots, off the hot path: one thread writes each as a run with its filter, publishes it, and
//! drops its table and tail.
//!
//! Order of publication (P16): run synced, renamed, folder synced; manifest committed; only then the table
//! gives way to the filter, and the tail is unlinked. A crash before the manifest leaves a file that the next
//! open removes; one after it leaves a tail that it removes.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use tracing::{info, warn};

use crate::{
    committer::{RETRY, Shared, StopOnPanic},
    disk::{Disk, Fail},
    files,
    filter::Plane,
    fingerprint::Hasher,
    run::{self, Run},
    slots::{Place, Work},
    sync::Mutex,
    table::Table,
};

/// A run that did not fit is written again after [`RETRY`], then ever more rarely, for each attempt writes all of it; at least this
/// often.
const MAX_PAUSE: Duration = Duration::from_secs(30);

/// The sealer's loop; ends when the store closes or stops.
pub(crate) fn run(shared: &Shared, disk: &dyn Disk) {
    let _stop = StopOnPanic(shared, "sealer");
    let mut pause = RETRY;
    while let Some((work, hasher)) = await_work(shared, pause) {
        let done = match work {
            Work::Seal(table) => seal(shared, disk, &hasher, &table),
            Work::Filter(run) => build_filter(shared, disk, &hasher, run),
            Work::Clear(place) => {
                place.plane.clear(place.column);
                drop(free(shared, &place));
                Ok(())
            }
        };
        let mut held = shared.held.lock();
        held.sealing = false;
        match done {
            Ok(()) => (held.seal_full, pause) = (false, RETRY),
            Err(Fail::Full(text)) => {
                if !held.seal_full {
                    warn!(text, "the disk is full: a slot stays in memory until there is room to seal it");
                } else {
                    pause = (pause * 2).min(MAX_PAUSE);
                }
                held.seal_full = true;
            }
            Err(fail) => drop(shared.failed(&mut held, fail)),
        }
        drop(held);
        shared.done.notify_all();
    }
}

/// Waits until there is something to do, after an attempt that found no room so long, or until room is made; none at the
/// end.
fn await_work(shared: &Shared, pause: Duration) -> Option<(Work, Hasher)> {
    let mut held = shared.held.lock();
    let due = Instant::now() + pause;
    while held.seal_full
        && !held.room_made
        && !(held.closing || held.stopped.is_some())
        && Instant::now() < due
    {
        shared.seal.wait_until(&mut held, due);
    }
    held.room_made = false;
    loop {
        if held.closing || held.stopped.is_some() {
            return None;
        }
        let work = held.state.all_slots().work(held.durable, held.open_tail);
        if let (Some(work), Some((_, hasher))) = (work, &held.bound) {
            let hasher = hasher.clone();
            held.sealing = true;
            return Some((work, hasher));
        }
        shared.seal.wait(&mut held);
    }
}

fn seal(shared: &Shared, disk: &dyn Disk, hasher: &Hasher, table: &Arc<Table>) -> Result<(), Fail> {
    let go_on = || {
        let held = shared.held.lock();
        !held.closing && held.stopped.is_none()
    };
    let (blocks, place) = shared.held.lock().state.all_slots_mut().place(table.keys() as u64);
    let written = run::write(disk, hasher, table, blocks, &go_on);
    let (meta, filter) = match written {
        Ok(Some(written)) => written,
        Ok(None) => return Ok(()),
        Err(fail) => {
            place.iter().for_each(|place| drop(free(shared, place)));
            return Err(give_up(disk, table.generation, fail));
        }
    };
    let place = place.unwrap_or_else(|| add_plane(shared, blocks));
    place.plane.add(place.column, &filter);
    let prepared = run::write_filter(disk, hasher, table.generation, &filter)
        .and_then(|()| Run::open(disk, hasher, table.generation, &meta));
    let published = prepared.and_then(|run| {
        let Some(files) = &shared.files else { return Ok(None) };
        let mut files = files.lock();
        if !shared.held.lock().state.all_slots().holds_table(table) {
            return Ok(None);
        }
        let gone = files.publish(table.generation, meta)?;
        let mut held = shared.held.lock();
        held.measure(&files);
        let old = held.state.all_slots_mut().seal(Arc::new(run), &place);
        Ok(Some((gone, old)))
    });
    match published {
        Ok(Some((gone, old))) => {
            drop(old);
            info!(slot = table.generation, keys = meta.keys, "sealed");
            files::remove(disk, &gone)
        }
        Ok(None) => {
            // It expired, or was discarded, meanwhile.
            place.plane.clear(place.column);
            drop(free(shared, &place));
            files::remove(disk, &run::file_names(table.generation))
        }
        Err(fail) => {
            place.plane.clear(place.column);
            drop(free(shared, &place));
            Err(give_up(disk, table.generation, fail))
        }
    }
}

/// What is left of a run that does not fit on the disk must not take up the room that others wait for.
fn give_up(disk: &dyn Disk, generation: u64, fail: Fail) -> Fail {
    match fail {
        Fail::Full(_) => files::remove(disk, &run::file_names(generation)).err().unwrap_or(fail),
        // After any other the store stops, and the next open tells what counts.
        other => other,
    }
}

/// Builds the filter of a run that has none, from its facts.
fn build_filter(shared: &Shared, disk: &dyn Disk, hasher: &Hasher, run: Arc<Run>) -> Result<(), Fail> {
    let filter = run::rebuild_filter(&run)?;
    let place = shared.held.lock().state.all_slots_mut().place_in(filter.blocks());
    let place = place.unwrap_or_else(|| add_plane(shared, filter.blocks()));
    place.plane.add(place.column, &filter);
    let written = run::write_filter(disk, hasher, run.generation, &filter);
    let name = [run::filter_name(run.generation)];
    // Whoever drops the run removes its files: either what was written is among them, or the run is seen to
    // be gone.
    let files = shared.files.as_ref().map(Mutex::lock);
    let mut held = shared.held.lock();
    if !held.state.all_slots().holds(&run) {
        drop((held, files));
        place.plane.clear(place.column);
        drop(free(shared, &place));
        return files::remove(disk, &name);
    }
    info!(slot = run.generation, "its filter is built again");
    let old = held.state.all_slots_mut().seal(Arc::clone(&run), &place);
    drop((held, files));
    drop(old);
    match written {
        // It serves from memory; what there is of the file is of no use.
        Err(fail @ Fail::Full(_)) => Err(files::remove(disk, &name).err().unwrap_or(fail)),
        other => other,
    }
}

/// A first column in a new plane, which is large to make: without the lock.
fn add_plane(shared: &Shared, blocks: u64) -> Place {
    let plane = Arc::new(Plane::new(blocks));
    shared.held.lock().state.all_slots_mut().add_plane(plane)
}

#[must_use]
fn free(shared: &Shared, place: &Place) -> Option<Arc<Plane>> {
    shared.held.lock().state.all_slots_mut().free(place)
}
