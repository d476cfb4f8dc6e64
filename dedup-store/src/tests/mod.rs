//! Tests over whole stores.

mod folder;
mod protocol;
