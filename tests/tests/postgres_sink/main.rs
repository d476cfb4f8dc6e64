//! The Postgres sink against a real server.

mod delivery;
mod model;
mod ownership;
mod probing;
mod rig;
mod types;
