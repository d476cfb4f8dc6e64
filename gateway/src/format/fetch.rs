//! Fetches the schemas that a route's records name, one task for each, until the registry answers.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use adapters::registry::{Registry, RegistryConfig, RegistryFault};
use tracing::{info, warn};

use super::{Encoding, schemas::Schemas};

/// Waits between attempts: doubled each time.
const FIRST_WAIT: Duration = Duration::from_millis(100);
const LONGEST_WAIT: Duration = Duration::from_secs(10);
/// A replica of the registry may be behind the producer's: an unknown id is asked for once more after so long.
const SECOND_LOOK: Duration = Duration::from_millis(500);
/// So long an unknown id is not asked for again.
const KNOWN_UNKNOWN: Duration = Duration::from_secs(60);

/// A cache that is filled from a registry for as long as it is held. Must be called in a tokio runtime.
pub fn schemas(encoding: Encoding, config: RegistryConfig, route: &str) -> Result<Arc<Schemas>, String> {
    let registry = Arc::new(Registry::new(config)?);
    let (schemas, mut asked) = Schemas::new(encoding);
    let schemas = Arc::new(schemas);
    let (cache, route) = (Arc::downgrade(&schemas), route.to_owned());
    tokio::spawn(async move {
        while let Some(id) = asked.recv().await {
            tokio::spawn(fetch(id, registry.clone(), cache.clone(), route.clone()));
        }
    });
    Ok(schemas)
}

async fn fetch(id: u32, registry: Arc<Registry>, cache: Weak<Schemas>, route: String) {
    let (mut wait, mut looked, mut said) = (FIRST_WAIT, false, String::new());
    loop {
        let answer = registry.schema(id).await;
        let Some(schemas) = cache.upgrade() else { return };
        match answer {
            Ok(schema) => {
                info!(route, id, "schema fetched");
                schemas.found(id, &schema);
                return;
            }
            Err(RegistryFault::Unknown(reason)) if looked => {
                warn!(route, reason, "records with this schema are refused");
                schemas.unknown(id, &reason);
                drop(schemas);
                tokio::time::sleep(KNOWN_UNKNOWN).await;
                if let Some(schemas) = cache.upgrade() {
                    schemas.forget_unknown(id);
                }
                return;
            }
            Err(RegistryFault::Unknown(reason)) => {
                schemas.trouble(id, &reason);
                looked = true;
                wait = SECOND_LOOK;
            }
            Err(RegistryFault::Trouble(reason)) => {
                if said != reason {
                    warn!(route, reason, "the route waits for a schema");
                    said.clone_from(&reason);
                }
                schemas.trouble(id, &reason);
            }
        }
        drop(schemas);
        // Half of it by chance, so that many instances do not ask in step.
        tokio::time::sleep(wait.mul_f64(rand::random_range(0.5..1.0))).await;
        wait = (wait * 2).min(LONGEST_WAIT);
    }
}
