//! The Kafka door against a real broker, with lanes of the test's own that write into memory.

#![allow(clippy::unwrap_used, reason = "what a test's helpers unwrap in vain fails the test")]

mod drift;
mod flow;
mod gaps;
mod hand_over;
mod reading;
mod rig;
mod secure;
