//! `understudy lockstep`: VMs in lockstep.

use crate::cli::LockstepCommand;
use understudy_client::{Client, Exit, Failure, output};

/// Does one of them.
pub fn run(client: &Client, command: &LockstepCommand, json: bool) -> Result<Exit, Failure> {
    match command {
        LockstepCommand::Verify { vm } => verify(client, vm, json),
    }
}

fn verify(client: &Client, vm: &str, json: bool) -> Result<Exit, Failure> {
    let report = client.verify_lockstep(vm)?;
    output::show(json, &report, |report| format!("{}\n", report.words()))?;
    Ok(if report.is_same() { Exit::Ok } else { Exit::Error })
}
