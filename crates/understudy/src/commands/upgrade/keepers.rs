//! `understudy upgrade --keepers`.

use serde::Serialize;
use understudy_client::{Client, Exit, Failure, output};
use understudy_protocol::{HostName, VmName};
use understudy_report::upgrade::{KeeperReplacement, UpgradePlan};

/// The report of what came of it.
#[derive(Default, Serialize)]
struct Report {
    replaced: Vec<KeeperReplacement>,
    /// VMs that keep their keeper.
    refused: Vec<Refusal>,
    /// VMs that get a new keeper here when their primary's is replaced.
    later: Vec<Backup>,
}

#[derive(Serialize)]
struct Backup {
    vm: VmName,
    primary: HostName,
}

#[derive(Serialize)]
struct Refusal {
    vm: VmName,
    reason: String,
}

/// Has the keepers of these VMs replaced, one after the other; without names those that run another program than
/// the daemon, but for those of backups. What is refused of one is no hindrance to the others.
pub fn replace(client: &Client, vms: &[VmName], json: bool) -> Result<Exit, Failure> {
    let mut report = Report::default();
    let vms = match vms {
        [] => {
            let (outdated, later) = apart(&client.upgrade_plan()?);
            report.later = later;
            outdated
        }
        named => named.to_vec(),
    };
    for vm in vms {
        match client.replace_keeper(&vm) {
            Ok(replacement) => {
                if !json {
                    println!("{}", words(&replacement));
                }
                report.replaced.push(replacement);
            }
            Err(failure) => report.refused.push(Refusal { vm, reason: failure.message }),
        }
    }
    output::show(json, &report, describe)?;
    Ok(if report.refused.is_empty() { Exit::Ok } else { Exit::Error })
}

/// The VMs whose keepers are to be replaced, and the backups among them, which are not.
fn apart(plan: &UpgradePlan) -> (Vec<VmName>, Vec<Backup>) {
    let (mut outdated, mut later) = (Vec::new(), Vec::new());
    for (vm, keeper) in plan.outdated() {
        match &keeper.backs_up_for {
            None => outdated.push(vm.clone()),
            Some(primary) => later.push(Backup { vm: vm.clone(), primary: primary.clone() }),
        }
    }
    (outdated, later)
}

/// When a backup gets a keeper of another program.
pub fn comes_later(vm: &VmName, primary: &HostName) -> String {
    format!(
        "gets a new keeper here when that on host {primary} is replaced: `understudy upgrade --keepers {vm}` there, \
         or a fail-over and back if that is refused"
    )
}

fn words(replacement: &KeeperReplacement) -> String {
    let KeeperReplacement { vm, former, keeper, still_ms } = replacement;
    format!(
        "{vm}: keeper {former} is replaced by {keeper}; the guest stood still for {still_ms} ms"
    )
}

/// Describes what was not said while it was done.
fn describe(report: &Report) -> String {
    let refused = |refusal: &Refusal| format!("{}: NOT REPLACED: {}\n", refusal.vm, refusal.reason);
    let later = |Backup { vm, primary }: &Backup| format!("{vm}: {}\n", comes_later(vm, primary));
    let text: String =
        report.refused.iter().map(refused).chain(report.later.iter().map(later)).collect();
    match text.is_empty() && report.replaced.is_empty() {
        true => "all keepers run the daemon's program\n".to_owned(),
        false => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use understudy_protocol::literal;
    use understudy_report::upgrade::{KeeperProgram, UpgradeOutcome, UpgradeStep, Versions};

    #[test]
    fn backups_are_not_refused_but_said_to_come_later() {
        let step = |vm: &'static str, backs_up_for: Option<&'static str>| {
            let keeper = KeeperProgram {
                pid: 7,
                version: None,
                is_daemons: false,
                obstacle: None,
                backs_up_for: backs_up_for.map(literal),
            };
            let outcome = UpgradeOutcome::GoesOn { keeper: Some(keeper) };
            UpgradeStep { vm: literal(vm), group: None, outcome }
        };
        let plan = UpgradePlan {
            host: literal("b"),
            running: Versions::of_this_program(),
            next_qemu: None,
            peers: Vec::new(),
            vms: vec![step("db", Some("a")), step("web", None)],
        };
        let (outdated, later) = apart(&plan);
        assert_eq!(outdated, [literal::<VmName>("web")]);
        let told = describe(&Report { later, ..Report::default() });
        assert!(told.starts_with("db: gets a new keeper here when that on host a is"), "{told}");
    }

    #[test]
    fn what_is_refused_is_told_and_what_is_done() {
        let replaced =
            KeeperReplacement { vm: literal("db"), former: 4711, keeper: 4890, still_ms: 38 };
        let told = "db: keeper 4711 is replaced by 4890; the guest stood still for 38 ms";
        assert_eq!(words(&replaced), told);
        let mut report = Report::default();
        assert!(describe(&report).contains("all keepers"));
        report.refused.push(Refusal { vm: literal("web"), reason: "it is in lockstep".into() });
        report.replaced.push(replaced);
        assert_eq!(describe(&report), "web: NOT REPLACED: it is in lockstep\n");
    }
}
