//! `understudy status`.

use crate::{output, table};
use understudy_client::{Client, Exit, Failure};

/// Shows one VM, or all.
pub fn run(client: &Client, vm: Option<&str>, json: bool) -> Result<Exit, Failure> {
    let Some(name) = vm else {
        output::show(json, &client.status()?, table::host)?;
        return Ok(Exit::Ok);
    };
    let status = client.vm_status(name)?;
    output::show(json, &status, table::vm)?;
    Ok(if status.is_degraded() { Exit::Degraded } else { Exit::Ok })
}
