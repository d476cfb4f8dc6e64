//! What the store uses of parking_lot, over shuttle: a step between threads at each lock, wait and wake-up.

use std::{
    ops::{Deref, DerefMut},
    time::{Duration, Instant},
};

pub(crate) use shuttle::thread;

/// A wait of so long is one for ever: if nothing else wakes it, that is a lost wake-up. A shorter one may end at any time.
const FOR_EVER: Duration = Duration::from_secs(60);

#[derive(Default)]
pub(crate) struct Mutex<T>(shuttle::sync::Mutex<T>);

pub(crate) struct MutexGuard<'a, T> {
    lock: &'a Mutex<T>,
    /// None only while it is unlocked.
    guard: Option<shuttle::sync::MutexGuard<'a, T>>,
}

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Mutex(shuttle::sync::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        MutexGuard { lock: self, guard: Some(self.0.lock().unwrap()) }
    }
}

impl<T> MutexGuard<'_, T> {
    pub(crate) fn unlocked<U>(guard: &mut Self, act: impl FnOnce() -> U) -> U {
        guard.guard = None;
        let done = act();
        guard.guard = guard.lock.lock().guard;
        done
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.guard.as_ref().unwrap()
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.guard.as_mut().unwrap()
    }
}

#[derive(Default)]
pub(crate) struct Condvar(shuttle::sync::Condvar);

impl Condvar {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    pub(crate) fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        let held = guard.guard.take().unwrap();
        guard.guard = Some(self.0.wait(held).unwrap());
    }

    pub(crate) fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, timeout: Duration) {
        if timeout >= FOR_EVER {
            self.wait(guard);
        } else {
            MutexGuard::unlocked(guard, thread::yield_now);
        }
    }

    pub(crate) fn wait_until<T>(&self, guard: &mut MutexGuard<'_, T>, due: Instant) {
        self.wait_for(guard, due.saturating_duration_since(Instant::now()));
    }

    pub(crate) fn notify_one(&self) {
        self.0.notify_one();
    }

    pub(crate) fn notify_all(&self) {
        self.0.notify_all();
    }
}
