//! Remembers which keys took effect, within a window, across crashes.
//!
//! One [`Store`] per route. It knows no sink, no HTTP and no Kafka: it is handed fingerprints and says
//! what is known of them ([`Store::claim`]), and is told what took effect ([`Store::settle`]).
//! All calls are synchronous; time is passed in by the caller.

mod api;

pub use api::*;
