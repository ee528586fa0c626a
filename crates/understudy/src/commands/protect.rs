//! `understudy protect`, `unprotect` and `failover`.

use crate::cli::ProtectArgs;
use crate::client::Client;
use crate::failure::{Exit, Failure, FailureKind};
use crate::output;
use crate::progress::SyncProgress;
use serde_json::json;
use std::thread;
use std::time::Duration;
use understudy_daemon::report::{ProtectRequest, Protection, VmStatus};

/// How often the progress is asked for.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Protects a VM; waits until it is protected, unless told not to.
pub fn protect(client: &Client, args: &ProtectArgs, json: bool) -> Result<Exit, Failure> {
    let policy = args.policy().map_err(|words| Failure::new(FailureKind::Usage, words))?;
    let request = ProtectRequest { to: args.to.clone(), policy };
    let mut status = client.protect(&args.vm, &request)?;
    if !args.no_wait {
        let mut progress = SyncProgress::new(json);
        let outcome = wait(client, status, &mut progress);
        progress.finish();
        status = outcome?;
    }
    output::show(json, &status, describe)?;
    Ok(Exit::Ok)
}

/// Waits until the first synchronisation has ended, one way or the other.
fn wait(
    client: &Client,
    mut status: VmStatus,
    progress: &mut SyncProgress,
) -> Result<VmStatus, Failure> {
    loop {
        match &status.protection {
            Protection::Protected { .. } => return Ok(status),
            Protection::Syncing { .. } => progress.update(&status.protection),
            Protection::Degraded { reason } => {
                let message = format!("{} is not protected: {reason}", status.name);
                return Err(Failure::new(FailureKind::Degraded, message));
            }
            Protection::Off => {
                let message = format!("{} is not protected: somebody ended it", status.name);
                return Err(Failure::new(FailureKind::Degraded, message));
            }
        }
        thread::sleep(POLL_INTERVAL);
        status = client.vm_status(&status.name)?;
    }
}

fn describe(vm: &VmStatus) -> String {
    match &vm.protection {
        Protection::Protected { peer } => format!("{} is protected: {peer} stands by\n", vm.name),
        _ => format!("{} is being copied; see `understudy status {}`\n", vm.name, vm.name),
    }
}

/// Ends a VM's protection.
pub fn unprotect(client: &Client, vm: &str, json: bool) -> Result<Exit, Failure> {
    let status = client.unprotect(vm)?;
    output::show(json, &status, |_| format!("{vm} runs on, unprotected\n"))?;
    Ok(Exit::Ok)
}

/// Hands a VM over to its backup.
pub fn failover(client: &Client, vm: &str, json: bool) -> Result<Exit, Failure> {
    client.failover(vm)?;
    let done = json!({"name": vm, "failed_over": true});
    output::show(json, &done, |_| format!("{vm} runs on its backup now\n"))?;
    Ok(Exit::Ok)
}
