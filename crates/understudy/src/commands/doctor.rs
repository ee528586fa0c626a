//! `understudy doctor`.

use crate::doctor::{self, Report};
use std::path::Path;
use understudy_client::{Exit, Failure, output};

/// Checks the machine and prints what was found.
pub fn run(config: Option<&Path>, json: bool) -> Result<Exit, Failure> {
    let report = doctor::examine(config);
    output::show(json, &report, Report::text)?;
    Ok(if report.ok { Exit::Ok } else { Exit::Error })
}
