//! Any HTTP service as the target of single requests: a **book** of keys and answers, and a **client** that knows what became of a
//! request.
//!
//! | file | holds |
//! | --- | --- |
//! | `book.rs` | keys that were begun and answers that were had, durable, in SQLite; group commit |
//! | `client.rs` | one request and its answer, or why there is none |
//!
//! There are no batches and no marks here: the service keeps nothing for us, so the book is all that is known.

mod book;
mod client;
#[cfg(test)]
mod tests;

pub use book::{Begin, Book, BookConfig, Found, Kept, NameSecret};
pub use client::{Cut, Passing, Sent, Upstream, UpstreamAnswer, UpstreamConfig};
