//! Tests over whole stores.

mod crash;
mod damage;
mod faulty;
mod floors;
mod folder;
mod full;
mod protocol;
mod replay;
