//! One route at work: [`Gate`]. Doors and library calls go through it alike.
