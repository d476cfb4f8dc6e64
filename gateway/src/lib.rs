//! Oncegate: a gateway in front of sinks. Writes reach it at least once; each takes effect once.

pub mod gate;
pub mod lane;
pub mod naming;
pub mod outcome;
