//! Tests over whole stores.

mod crash;
mod damage;
pub(crate) mod faulty;
mod floors;
mod folder;
mod full;
mod kill;
mod model;
mod protocol;
mod replay;
mod seal;
mod slots;
mod stalled;
