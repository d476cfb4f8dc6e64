//! The lanes, proved: a sink in memory that fails in every way that the protocol speaks of, a source log, and real gates over
//! both, on paused time. `rules`, `protocol`, `order` and `effects` hold one test a rule or more; `model` drives random runs
//! against a model.

mod door;
mod effects;
mod encode;
mod faults;
mod model;
mod order;
mod protocol;
mod rig;
mod rules;
mod session;
mod sink;
mod world;
