//! The protocol's paragraphs, P3 to P13.
