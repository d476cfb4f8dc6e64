//! The HTTP door.

use crate::{Scale, report::Report};

pub(crate) async fn run(_scale: Scale, _only: &str) -> Report {
    Report::new("http")
}
