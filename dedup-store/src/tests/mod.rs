//! Tests over whole stores.

// The others' threads are not shuttle's.
#[cfg(not(feature = "shuttle"))]
mod crash;
#[cfg(not(feature = "shuttle"))]
mod damage;
#[cfg_attr(feature = "shuttle", allow(dead_code))]
pub(crate) mod faulty;
#[cfg(not(feature = "shuttle"))]
mod floors;
#[cfg(not(feature = "shuttle"))]
mod folder;
#[cfg(not(feature = "shuttle"))]
mod full;
#[cfg(feature = "shuttle")]
mod interleaved;
#[cfg(not(feature = "shuttle"))]
mod kill;
#[cfg(not(feature = "shuttle"))]
mod layout;
#[cfg(not(feature = "shuttle"))]
mod model;
#[cfg(not(feature = "shuttle"))]
mod points;
#[cfg(not(feature = "shuttle"))]
mod protocol;
#[cfg(not(feature = "shuttle"))]
mod replay;
#[cfg(not(feature = "shuttle"))]
mod seal;
#[cfg(not(feature = "shuttle"))]
mod slots;
#[cfg(not(feature = "shuttle"))]
mod stalled;
