//! The ClickHouse sink against the real engine.

mod delivery;
mod probing;
mod rig;
mod types;
