//! [`FakeSink`]: the sink in memory as gates see it.

use std::sync::Arc;

use adapters::sink::{Encode, Guarantee, Misfit, Mode, Session, Sink};
use async_trait::async_trait;
use parking_lot::Mutex;

use super::{encode::FakeEncode, session::FakeSession, world::World};

/// Cheap to clone; all clones are one sink.
#[derive(Clone)]
pub(super) struct FakeSink {
    pub(super) world: Arc<Mutex<World>>,
    pub(super) mode: Mode,
    pub(super) row_key: Vec<String>,
}

impl std::fmt::Debug for FakeSink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("FakeSink")
    }
}

#[async_trait]
impl Sink for FakeSink {
    fn guarantee(&self) -> Guarantee {
        Guarantee::Transactional
    }

    fn mode(&self) -> Mode {
        self.mode
    }

    fn row_key(&self) -> &[String] {
        &self.row_key
    }

    fn version(&self) -> Option<&str> {
        (self.mode == Mode::UpsertIfNewer).then_some("ver")
    }

    async fn probe(&self) -> Result<Arc<dyn Encode>, Vec<Misfit>> {
        Ok(Arc::new(FakeEncode { keyed: !self.row_key.is_empty() }))
    }

    fn session(&self, _route: &str, owner: &str) -> Box<dyn Session> {
        Box::new(FakeSession::new(self.world.clone(), owner))
    }
}
