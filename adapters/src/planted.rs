//! Faults that a simulation plants, one at a time, to show that it finds each. Without the feature `simulation` `planted!` is `false`.

/// Whether this fault is planted.
#[cfg(not(feature = "simulation"))]
#[allow(unused_macros, reason = "the journal alone has some")]
macro_rules! planted {
    ($bug:ident) => {
        false
    };
}

#[cfg(feature = "simulation")]
macro_rules! planted {
    ($bug:ident) => {
        $crate::simulated::is_planted($crate::simulated::Bug::$bug)
    };
}
