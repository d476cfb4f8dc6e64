//! Oncegate: a gateway in front of sinks. Writes reach it at least once; each takes effect once.

#[macro_use]
mod planted;

pub mod admin;
pub mod cli;
mod clock;
pub mod config;
pub mod door;
pub mod drill;
pub mod format;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzzing;
pub mod gate;
mod heartbeat;
pub mod key;
pub mod lane;
pub mod logging;
pub mod metrics;
pub mod naming;
pub mod outcome;
mod route;
pub mod serve;
