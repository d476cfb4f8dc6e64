//! Answers that were had lately: a copy that comes soon asks no disk. All of them are in the book; whoever is not here is asked for there.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
};

use adapters::upstream::Kept;
use dedup_store::Fingerprint;
use parking_lot::Mutex;

/// What they may take, bytes.
const MOST_BYTES: usize = 32 << 20;
/// What stands around one.
const AROUND: usize = 256;

/// Answers of one route, the oldest let go first.
#[derive(Default)]
pub(super) struct Recent(Mutex<Shelf>);

#[derive(Default)]
struct Shelf {
    answers: HashMap<Fingerprint, Arc<Kept>>,
    order: VecDeque<Fingerprint>,
    bytes: usize,
}

fn size(kept: &Kept) -> usize {
    let head: usize = kept.head.iter().map(|(name, value)| name.len() + value.len()).sum();
    AROUND + head + kept.body.as_ref().map_or(0, bytes::Bytes::len)
}

impl Recent {
    /// To be called once the book has it.
    pub(super) fn keep(&self, name: Fingerprint, kept: Arc<Kept>) {
        let bytes = size(&kept);
        if bytes > MOST_BYTES / 16 {
            return;
        }
        let shelf = &mut *self.0.lock();
        match shelf.answers.insert(name, kept) {
            Some(before) => shelf.bytes -= size(&before),
            None => shelf.order.push_back(name),
        }
        shelf.bytes += bytes;
        while shelf.bytes > MOST_BYTES
            && let Some(oldest) = shelf.order.pop_front()
        {
            if let Some(gone) = shelf.answers.remove(&oldest) {
                shelf.bytes -= size(&gone);
            }
        }
    }

    /// The answer, if its key is not forgotten yet.
    pub(super) fn find(&self, name: Fingerprint, now_ms: i64) -> Option<Arc<Kept>> {
        self.0.lock().answers.get(&name).filter(|kept| kept.until_ms > now_ms).cloned()
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    fn kept(until_ms: i64, bytes: usize) -> Arc<Kept> {
        let body = Some(Bytes::from(vec![b'a'; bytes]));
        Arc::new(Kept { digest: 1, until_ms, status: 200, head: vec![], body })
    }

    fn name(n: u32) -> Fingerprint {
        let mut bytes = [0; 16];
        bytes[..4].copy_from_slice(&n.to_le_bytes());
        Fingerprint(bytes)
    }

    #[test]
    fn an_answer_is_had_until_its_key_is_forgotten() {
        let recent = Recent::default();
        recent.keep(name(1), kept(100, 1));
        assert!(recent.find(name(1), 99).is_some() && recent.find(name(2), 99).is_none());
        assert!(recent.find(name(1), 100).is_none());
        // Forgotten, and answered anew.
        recent.keep(name(1), kept(200, 1));
        assert!(recent.find(name(1), 100).is_some());
    }

    #[test]
    fn the_oldest_make_room_and_the_bytes_are_bounded() {
        let recent = Recent::default();
        recent.keep(name(0), kept(100, MOST_BYTES));
        assert!(recent.find(name(0), 0).is_none(), "too large by itself");
        for n in 1..=100 {
            recent.keep(name(n), kept(100, 1 << 20));
            recent.keep(name(n), kept(100, 1 << 20));
        }
        let shelf = recent.0.lock();
        assert!(shelf.bytes <= MOST_BYTES && shelf.answers.len() == shelf.order.len());
        assert_eq!(shelf.bytes, shelf.answers.values().map(|kept| size(kept)).sum::<usize>());
        assert!(shelf.answers.contains_key(&name(100)) && !shelf.answers.contains_key(&name(60)));
    }
}
