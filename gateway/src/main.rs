//! The gateway program.

fn main() {}
