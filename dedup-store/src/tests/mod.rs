//! Tests over whole stores.

mod crash;
mod faulty;
mod folder;
mod full;
mod protocol;
