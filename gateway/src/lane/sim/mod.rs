//! The lanes, proved: a sink in memory that fails in every way that the protocol speaks of, a source log, and real gates over
//! both, on paused time. `rules` and `protocol` hold one test a rule; `model` drives random runs against a model.

mod door;
mod encode;
mod faults;
mod model;
mod protocol;
mod rig;
mod rules;
mod session;
mod sink;
mod world;
