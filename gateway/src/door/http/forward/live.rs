//! One turn a key: copies of a request wait for the first.

use std::{collections::HashMap, sync::Arc};

use dedup_store::Fingerprint;
use parking_lot::Mutex;
use tokio::sync::watch;

/// Keys that are at work in this process.
#[derive(Default)]
pub(super) struct Live(Mutex<HashMap<Fingerprint, watch::Receiver<()>>>);

/// A key at work; when it is dropped, those who wait for it go on.
pub(super) struct Guard {
    live: Arc<Live>,
    name: Fingerprint,
    _ended: watch::Sender<()>,
}

impl Live {
    /// The key's own turn, or what ends with the turn of who has it.
    pub(super) fn enter(live: &Arc<Self>, name: Fingerprint) -> Result<Guard, watch::Receiver<()>> {
        let mut keys = live.0.lock();
        if let Some(first) = keys.get(&name) {
            return Err(first.clone());
        }
        let (ended, ending) = watch::channel(());
        keys.insert(name, ending);
        Ok(Guard { live: live.clone(), name, _ended: ended })
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.live.0.lock().remove(&self.name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_has_one_turn_at_a_time() {
        let live = Arc::<Live>::default();
        let (one, two) = (Fingerprint([1; 16]), Fingerprint([2; 16]));
        let first = Live::enter(&live, one).ok().unwrap();
        let waits = Live::enter(&live, one).err().unwrap();
        assert!(Live::enter(&live, two).is_ok());
        assert!(waits.has_changed().is_ok());
        drop(first);
        assert!(waits.has_changed().is_err(), "the sender is gone");
        assert!(Live::enter(&live, one).is_ok() && live.0.lock().is_empty());
    }
}
