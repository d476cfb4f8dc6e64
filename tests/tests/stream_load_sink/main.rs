//! The StarRocks and Doris sinks against a stand-in for both, or against real clusters (docs/starrocks-doris.md says how).

mod delivery;
mod modes;
mod probing;
mod rig;
