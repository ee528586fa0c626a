//! `understudy protect`, `unprotect` and `failover`.

use super::lapse::{self, Lapse, Silence};
use crate::cli::{DiskReadsKind, ProtectArgs};
use serde_json::json;
use std::thread;
use std::time::Duration;
use understudy_client::{
    Client, Exit, Failure, FailureKind, ModeKind, output, progress::SyncProgress,
};
use understudy_protocol::GroupName;
use understudy_report::{GroupRequest, ProtectRequest, Protection, VmStatus};

/// Time between two questions for the progress.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Protects a VM or a group; waits until it is protected, unless told not to.
pub fn protect(client: &Client, args: &ProtectArgs, json: bool) -> Result<Exit, Failure> {
    let policy = args.policy().map_err(|words| Failure::new(FailureKind::Usage, words))?;
    let (to, encoding) = (args.to.clone(), args.encoding());
    if (args.mode, args.disk_reads) == (ModeKind::Checkpoint, DiskReadsKind::Log) {
        let words = "--disk-reads log is for --mode lockstep: a backup that gets checkpoints reads \
                     no disk";
        return Err(Failure::new(FailureKind::Usage, words));
    }
    match (&args.group, &args.vms[..]) {
        (Some(_), _) if args.mode == ModeKind::Lockstep => {
            let words = "a group cannot be protected in lockstep: protect its VMs one by one, or \
                         the group with --mode checkpoint";
            return Err(Failure::new(FailureKind::Usage, words));
        }
        (Some(group), vms) => {
            let (vms, repair, hold_console) = (vms.to_vec(), !args.no_repair, args.hold_console);
            let request = GroupRequest { vms, to, policy, encoding, repair, hold_console };
            let begun = client.protect_group(group, &request)?;
            let follow = |status| follow(client, status, args.no_wait, json);
            let all = begun.into_iter().map(follow).collect::<Result<Vec<_>, _>>()?;
            output::show(json, &all, |all| all.iter().map(describe).collect())?;
        }
        (None, [vm]) => {
            let (repair, output) = (!args.no_repair, args.output());
            let (mode, disk_reads) = (args.mode.into(), args.disk_reads.into());
            let hold_console = args.hold_console;
            let request = ProtectRequest {
                to,
                mode,
                disk_reads,
                policy,
                encoding,
                repair,
                output,
                hold_console,
            };
            let begun = client.protect(vm, &request)?;
            let status = follow(client, begun, args.no_wait, json)?;
            output::show(json, &status, describe)?;
            if args.unheld_output && !args.no_wait {
                return Ok(Exit::Degraded);
            }
        }
        (None, _) => {
            let words = "several VMs are protected as one group: name it with --group NAME, \
                         or protect them one by one";
            return Err(Failure::new(FailureKind::Usage, words));
        }
    }
    Ok(Exit::Ok)
}

/// Waits until a VM is protected, unless told not to.
fn follow(
    client: &Client,
    begun: VmStatus,
    no_wait: bool,
    json: bool,
) -> Result<VmStatus, Failure> {
    if no_wait {
        return Ok(begun);
    }
    let (name, mut progress) = (begun.name.clone(), SyncProgress::new(json));
    let patience = (Lapse::new(json), Silence::new());
    let outcome = wait(begun, &mut progress, patience, || {
        thread::sleep(POLL_INTERVAL);
        client.vm_status(&name)
    });
    progress.finish();
    outcome
}

/// Waits until the first synchronisation has ended, one way or the other; for the end of a lapse right after it, too.
fn wait(
    mut status: VmStatus,
    progress: &mut SyncProgress,
    (mut lapse, mut silence): (Lapse, Silence),
    mut next: impl FnMut() -> Result<VmStatus, Failure>,
) -> Result<VmStatus, Failure> {
    loop {
        // Both look at each status.
        let waits = lapse.is_worth_waiting(&status) | silence.is_worth_waiting(&status);
        let reason = match &status.protection {
            Protection::Protected { .. } | Protection::Unheld { .. } => return Ok(status),
            Protection::Syncing { .. } => {
                progress.update(&status.protection);
                status = next()?;
                continue;
            }
            Protection::Degraded { .. } if waits => {
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
    match (&vm.protection, &vm.group) {
        (Protection::Protected { peer }, Some(group)) => {
            format!("{} is protected in group {group}: {peer} stands by\n", vm.name)
        }
        (Protection::Protected { peer }, None) => {
            format!("{} is protected: {peer} stands by\n", vm.name)
        }
        (Protection::Unheld { peer }, _) => {
            format!("{} is NOT protected: {peer} follows it, but its output is not held\n", vm.name)
        }
        _ => format!("{} is being copied; see `understudy status {}`\n", vm.name, vm.name),
    }
}

/// Ends a VM's protection.
pub fn unprotect(client: &Client, vm: &str, json: bool) -> Result<Exit, Failure> {
    let group = client.vm_status(vm)?.group;
    let status = client.unprotect(vm)?;
    output::show(json, &status, |_| format!("{} on, unprotected\n", whom(vm, &group, "run")))?;
    Ok(Exit::Ok)
}

/// Hands a VM over to its backup.
pub fn failover(client: &Client, vm: &str, json: bool) -> Result<Exit, Failure> {
    let group = client.vm_status(vm)?.group;
    lapse::hand_over(client, vm, json)?;
    let done = json!({"name": vm, "group": group, "failed_over": true});
    output::show(json, &done, |_| format!("{} on the backup now\n", whom(vm, &group, "run")))?;
    Ok(Exit::Ok)
}

/// The VM, or all of its group, as the subject of a sentence.
fn whom(vm: &str, group: &Option<GroupName>, verb: &str) -> String {
    match group {
        Some(group) => format!("{vm} and all others of group {group} {verb}"),
        None => format!("{vm} {verb}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::lapse::tests::{degraded, endless, over, unheard};
    use crate::table::tests::example;
    use understudy_protocol::literal;

    fn syncing() -> VmStatus {
        example(Protection::Syncing {
            peer: literal("b"),
            done_bytes: 1,
            total_bytes: 2,
            remaining_seconds: None,
        })
    }

    fn quietly() -> (Lapse, Silence) {
        (Lapse::new(true), Silence::new())
    }

    /// Waits while the protection goes from syncing through `states`.
    fn wait_through(states: Vec<Protection>) -> Result<VmStatus, Failure> {
        let mut states = states.into_iter().map(example);
        wait(syncing(), &mut SyncProgress::new(true), quietly(), || {
            Ok(states.next().expect("no more states"))
        })
    }

    #[test]
    fn it_waits_until_protected() {
        let protected = Protection::Protected { peer: literal("b") };
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

    /// The command once failed if the first look fell into a lapse.
    #[test]
    fn it_waits_for_the_end_of_a_lapse_with_a_bound() {
        let lapsed = || degraded(Some("its disk is slow"));
        let protected = example(Protection::Protected { peer: literal("b") });
        let wait_with = |lapse| {
            let mut states = [lapsed(), lapsed(), protected.clone()].into_iter();
            wait(syncing(), &mut SyncProgress::new(true), (lapse, Silence::new()), || {
                Ok(states.next().expect("no more states"))
            })
        };
        assert_eq!(wait_with(Lapse::new(true)).unwrap().protection, protected.protection);
        assert_eq!(wait_with(over()).unwrap_err().exit(), Exit::Degraded);
    }

    /// It ended with 3 after two seconds, and the copy went on.
    #[test]
    fn it_waits_for_a_keeper_that_is_silent_with_a_bound() {
        let protected = example(Protection::Protected { peer: literal("b") });
        let wait_with = |silence| {
            let mut states = [unheard(), syncing(), unheard(), protected.clone()].into_iter();
            let patience = (Lapse::new(true), silence);
            wait(syncing(), &mut SyncProgress::new(true), patience, || {
                Ok(states.next().expect("no more states"))
            })
        };
        assert_eq!(wait_with(Silence::new()).unwrap().protection, protected.protection);
        assert_eq!(wait_with(endless()).unwrap_err().exit(), Exit::Degraded);
    }

    #[test]
    fn a_daemon_that_goes_away_ends_the_wait() {
        let gone = Failure::new(FailureKind::DaemonUnreachable, "gone");
        let mut progress = SyncProgress::new(true);
        let outcome = wait(syncing(), &mut progress, quietly(), || Err(gone.clone()));
        assert_eq!(outcome.unwrap_err(), gone);
    }
}
