//! `understudy upgrade --keepers`.

use serde::Serialize;
use understudy_client::{Client, Exit, Failure, output};
use understudy_protocol::VmName;
use understudy_report::upgrade::KeeperReplacement;

/// The report of what came of it.
#[derive(Default, Serialize)]
struct Report {
    replaced: Vec<KeeperReplacement>,
    /// VMs that keep their keeper.
    refused: Vec<Refusal>,
}

#[derive(Serialize)]
struct Refusal {
    vm: VmName,
    reason: String,
}

/// Has the keepers of these VMs replaced, one after the other; without names those that run another program than
/// the daemon. What is refused of one is no hindrance to the others.
pub fn replace(client: &Client, vms: &[VmName], json: bool) -> Result<Exit, Failure> {
    let outdated = || -> Result<Vec<VmName>, Failure> {
        Ok(client.upgrade_plan()?.outdated().map(|step| step.vm.clone()).collect())
    };
    let vms = if vms.is_empty() { outdated()? } else { vms.to_vec() };
    let mut report = Report::default();
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

fn words(replacement: &KeeperReplacement) -> String {
    let KeeperReplacement { vm, former, keeper, still_ms } = replacement;
    format!(
        "{vm}: keeper {former} is replaced by {keeper}; the guest stood still for {still_ms} ms"
    )
}

/// Describes what was not said while it was done.
fn describe(report: &Report) -> String {
    let refused = |refusal: &Refusal| format!("{}: NOT REPLACED: {}\n", refusal.vm, refusal.reason);
    let text: String = report.refused.iter().map(refused).collect();
    match report.replaced.is_empty() && report.refused.is_empty() {
        true => "all keepers run the daemon's program\n".to_owned(),
        false => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use understudy_protocol::literal;

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
