//! The Postgres sink against a real server.

#![allow(clippy::unwrap_used, reason = "what a test's helpers unwrap in vain fails the test")]

mod delivery;
mod model;
mod ownership;
mod probing;
mod rig;
mod types;
