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
        let outcome = wait(status, &mut progress, || {
            thread::sleep(POLL_INTERVAL);
            client.vm_status(&args.vm)
        });
        progress.finish();
        status = outcome?;
    }
    output::show(json, &status, describe)?;
    Ok(Exit::Ok)
}

/// Waits until the first synchronisation has ended, one way or the other.
fn wait(
    mut status: VmStatus,
    progress: &mut SyncProgress,
    mut next: impl FnMut() -> Result<VmStatus, Failure>,
) -> Result<VmStatus, Failure> {
    loop {
        let reason = match &status.protection {
            Protection::Protected { .. } => return Ok(status),
            Protection::Syncing { .. } => {
                progress.update(&status.protection);
                status = next()?;
                continue;
            }
            Protection::Degraded { reason } => reason,
            Protection::Off => "its protection was ended",
        };
        let message = format!("{} is not protected: {reason}", status.name);
        return Err(Failure::new(FailureKind::Degraded, message));
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::Exit;
    use crate::table::tests::example;

    fn syncing() -> VmStatus {
        example(Protection::Syncing {
            peer: "b".into(),
            done_bytes: 1,
            total_bytes: 2,
            remaining_seconds: None,
        })
    }

    /// Waits while the protection goes from syncing through `states`.
    fn wait_through(states: Vec<Protection>) -> Result<VmStatus, Failure> {
        let mut states = states.into_iter().map(example);
        wait(syncing(), &mut SyncProgress::new(true), || Ok(states.next().expect("no more states")))
    }

    #[test]
    fn it_waits_until_protected() {
        let protected = Protection::Protected { peer: "b".into() };
        let status = wait_through(vec![syncing().protection, protected.clone()]).unwrap();
        assert_eq!(status.protection, protected);
    }

    #[test]
    fn a_failed_synchronisation_fails_with_its_reason() {
        let reason = "b closed the connection".to_owned();
        let failure = wait_through(vec![Protection::Degraded { reason }]).unwrap_err();
        assert_eq!(failure.exit(), Exit::Degraded);
        assert!(failure.message.contains("b closed the connection"), "{}", failure.message);
        let failure = wait_through(vec![syncing().protection, Protection::Off]).unwrap_err();
        assert_eq!(failure.exit(), Exit::Degraded);
    }

    #[test]
    fn a_daemon_that_goes_away_ends_the_wait() {
        let gone = Failure::new(FailureKind::DaemonUnreachable, "gone");
        let outcome = wait(syncing(), &mut SyncProgress::new(true), || Err(gone.clone()));
        assert_eq!(outcome.unwrap_err(), gone);
    }
}
