//! The bridges of VMs that run here: one that an administrator, or a tool, makes anew has lost its ports, and the guest
//! hears and says nothing. A backup's are looked at with its proofs (`understudy_replication::backup`).

use crate::host::Host;
use crate::vm::PrimaryVm;
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;
use tracing::{info, warn};
use understudy_protocol::VmName;
use understudy_report::VmStatus;

/// Time between two looks.
const INTERVAL: Duration = Duration::from_secs(5);

/// Looks for as long as the host lives.
pub(crate) fn start(host: &Arc<Host>) -> std::io::Result<()> {
    let host = Arc::downgrade(host);
    thread::Builder::new().name("bridges".to_owned()).spawn(move || run(&host)).map(drop)
}

fn run(host: &Weak<Host>) {
    while let Some(host) = host.upgrade() {
        let mut found = BTreeMap::new();
        host.primaries().iter().for_each(|vm| look(vm, &mut found));
        let before = host.vms.note(|all| std::mem::replace(&mut all.findings.cards, found.clone()));
        for (card, problem) in &found {
            if before.get(card) != Some(problem) {
                let (vm, mac) = card;
                warn!(%vm, "card {mac}: {problem}");
            }
        }
        drop(host);
        thread::sleep(INTERVAL);
    }
}

fn look(vm: &PrimaryVm, found: &mut BTreeMap<(VmName, String), String>) {
    let machine = vm.machine();
    if !machine.is_alive() {
        return;
    }
    for port in machine.ports() {
        let (name, mac) = (vm.name(), port.mac().to_string());
        match port.see_to_bridge() {
            Ok(false) => {}
            Ok(true) => {
                let bridge = port.bridge();
                let told = format!("card {mac} is on bridge {bridge} again, which was made anew");
                info!(vm = %name, "{told}");
                vm.events.note(told);
            }
            // The tap of a VM that has ended meanwhile is gone with it.
            Err(_) if !machine.is_alive() => {}
            Err(error) => drop(found.insert((name.clone(), mac), error.to_string())),
        }
    }
}

impl Host {
    /// Says of a VM's cards why they are on no bridge.
    pub(crate) fn describe_cards(&self, status: &mut VmStatus) {
        self.vms.look(|all| {
            for card in &mut status.cards {
                let key = (status.name.clone(), card.mac.clone());
                card.problem = all.findings.cards.get(&key).cloned();
            }
        });
    }
}
