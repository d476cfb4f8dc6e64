//! The Redis sink on live servers, beyond what all sinks are asked ([`oncegate_tests::conformance`]): faults of the server, lost replies,
//! servers that go back, start-up checks, types.

mod faults;
mod lost;
mod probing;
mod rig;
mod types;
