//! The lanes, proved: a sink in memory that fails in every way that the protocol speaks of, a source log, and real gates over
//! both, on paused time. `rules`, `protocol`, `order` and `effects` hold one test a rule or more, `review` one a fault found;
//! `model` drives random runs against a model.

mod door;
mod drift;
mod effects;
mod encode;
mod faults;
mod invariant;
mod journal;
mod model;
mod order;
mod protocol;
mod review;
mod rig;
mod rules;
mod session;
mod sink;
mod trace;
mod world;
