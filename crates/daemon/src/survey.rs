//! Survey of the hosts that could back a VM up, and how well: the configured peers and the
//! roomiest members are asked over the link between hosts, all at the same time.

use crate::containment;
use crate::host::Host;
use crate::membership;
use crate::vm::Vm;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use understudy_arbiter::{Arbiter, Unreachable};
use understudy_protocol::repair::{Candidate, Fitness};
use understudy_protocol::wire::Kind;
use understudy_protocol::{HostName, Ownership, VmName};
use understudy_qemu::capabilities::CapabilityError;
use understudy_qemu::definition::CardDefinition;
use understudy_qemu::{Capabilities, CpuNeeds};
use understudy_replication::handshake::{Offered, Purpose};
use understudy_report::Mode;
use understudy_report::error::HostError;

/// Time for a host to answer: one that is down must not hold up the choice of another.
const PATIENCE: Duration = Duration::from_millis(1_500);
/// Most hosts that beside the configured peers are asked, the roomiest.
const MOST_MEMBERS: usize = 16;

/// Answer of a host.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SurveyAnswer {
    /// The host.
    pub host: HostName,
    /// Bytes of memory that it has to spare.
    pub free_memory: u64,
    /// Runnable threads for each 100 processors.
    pub load_percent: u32,
    /// VMs that it runs or backs up.
    pub vms: u32,
    /// Zone that shares its fate.
    pub zone: Option<String>,
    /// Reason why it cannot take the VM, if it cannot.
    pub refuses: Option<String>,
}

/// Needs of a VM that a host must meet.
#[derive(Clone, Debug)]
pub(crate) struct Needs {
    /// Bytes of memory.
    pub memory: u64,
    /// Needs of its processor.
    pub cpu: CpuNeeds,
    /// Bridges for these.
    pub cards: Vec<CardDefinition>,
    /// What its offer says; none of a version before this.
    pub offered: Option<Box<Offered>>,
}

impl Host {
    /// Answer of this host when it is asked whether it could back `vm` up.
    pub(crate) fn survey_answer(&self, vm: &VmName, needs: &Needs) -> SurveyAnswer {
        let vms = (self.vms.count() + self.keepers().len()) as u32;
        SurveyAnswer {
            host: self.config.name.clone(),
            free_memory: self.free_memory(),
            load_percent: load_percent(),
            vms,
            zone: self.config.repair.zone.clone(),
            refuses: self.objection(vm, needs),
        }
    }

    fn objection(&self, vm: &VmName, needs: &Needs) -> Option<String> {
        if self.is_going_down() {
            return Some("is shutting down".to_owned());
        }
        let Some(arbiter) = &self.arbiter else {
            return Some("has no [arbiter]".to_owned());
        };
        if let Some(problem) = &self.kernel_problem {
            return Some(problem.clone());
        }
        if self.keeper_of(vm).is_some() {
            return Some(format!("still has a keeper of {vm}"));
        }
        let present = self.vms.get(vm);
        match present {
            Some(Vm::Primary(_)) => return Some(format!("still has a copy of {vm}")),
            Some(Vm::Backup(session)) => return Some(session.describe()),
            // Gives way to the new backup.
            Some(Vm::Fenced(_)) | None => {}
        }
        if let Err(error) = arbiter.identify().and_then(|_| prove_as_it_is(arbiter, vm)) {
            return Some(format!("could not take it over: {error}"));
        }
        if let Err(error) = self.check_cpu_needs(&needs.cpu) {
            return Some(error.to_string());
        }
        let offered = |()| match &needs.offered {
            None => Ok(()),
            Some(offered) => self.check_offered(vm, offered),
        };
        let bridges = self.check_bridges(&needs.cards).and_then(offered);
        bridges.and_then(|()| self.check_memory(needs.memory)).err().map(|error| error.to_string())
    }

    /// Refuses what an offer would be refused for: whoever asks may give its backup up for this host.
    fn check_offered(&self, vm: &VmName, offered: &Offered) -> Result<(), HostError> {
        self.check_emulator(&offered.qemu, &offered.machine_type, offered.processor.as_deref())?;
        if offered.mode == Mode::Lockstep {
            self.check_build(offered.qemu_build.as_deref())?;
        }
        self.check_cluster(vm, offered.cluster.as_ref())?;
        // Where there are images of it they are brought up to date, or give way.
        match self.record(vm) {
            Ok(None) => self.check_room_for_disks(vm, offered.disk_used),
            _ => Ok(()),
        }
    }

    /// Refuses a guest that this host's KVM or processor cannot run as it ran elsewhere.
    pub(crate) fn check_cpu_needs(&self, needs: &CpuNeeds) -> Result<(), CapabilityError> {
        self.capabilities.check_accelerator(needs.accelerator)?;
        Capabilities::check_portable(needs)?;
        Capabilities::check_tsc(needs)?;
        self.capabilities.check_processor(needs)
    }

    /// Every host that this one knows, with its addresses: the configured peers,
    /// and the members that etcd knows of.
    pub(crate) fn known_hosts(&self) -> BTreeMap<HostName, Vec<SocketAddr>> {
        let members = self.members().into_iter();
        let mut known: BTreeMap<_, _> =
            members.map(|(name, member)| (name, member.addresses)).collect();
        // What the operator wrote counts more than what a host says of itself.
        known.extend(self.peers());
        known
    }

    /// Those of them that are asked to be a backup.
    fn surveyed_hosts(&self) -> BTreeMap<HostName, Vec<SocketAddr>> {
        let (peers, mut others) = (self.peers(), self.members());
        others.retain(|name, _| !peers.contains_key(name));
        let room = others.iter().map(|(name, member)| (name.clone(), member.free_memory));
        for host in beyond_the_roomiest(room) {
            others.remove(&host);
        }
        others.into_iter().map(|(name, member)| (name, member.addresses)).chain(peers).collect()
    }

    /// Whether a host is a peer or a registered member. One that has just become a member is
    /// looked for.
    pub(crate) fn is_known(&self, name: &str) -> bool {
        let etcd = || self.arbiter.as_ref().and_then(Arbiter::etcd);
        self.peers().contains_key(name)
            || self.members().contains_key(name)
            || etcd().is_some_and(|etcd| membership::is_member(etcd, name))
    }

    /// Whether a connection comes from where a known host is.
    pub(crate) fn is_address_of_known(&self, from: IpAddr) -> bool {
        let is = |addresses: &Vec<SocketAddr>| addresses.iter().any(|known| known.ip() == from);
        let members = self.members();
        self.peers().values().any(is) || members.values().any(|known| is(&known.addresses))
    }

    /// Asks the [hosts that may be a backup](Host::surveyed_hosts) whether, and how well, each could back `vm` up.
    pub(crate) fn survey(self: &Arc<Self>, vm: &VmName, needs: &Needs) -> Vec<Candidate> {
        let known = self.surveyed_hosts();
        let (answers, answered) = crossbeam_channel::unbounded();
        for (host, addresses) in known.clone() {
            let (answers, asker) = (answers.clone(), self.clone());
            let Needs { memory, cpu, cards, offered } = needs.clone();
            let purpose = Purpose::Survey { vm: vm.to_owned(), memory, cpu, cards, offered };
            // One that takes too long ends by itself; nobody waits for it.
            let ask = move || {
                let answer = asker.ask_fitness(&host, &addresses, &purpose);
                // The asker may have stopped listening.
                let _ = answers.send((host, answer));
            };
            containment::spawn_for_request("survey", ask);
        }
        drop(answers);
        let deadline = Instant::now() + PATIENCE;
        let mut found = BTreeMap::new();
        while let Ok((host, answer)) = answered.recv_deadline(deadline) {
            found.insert(host, answer);
        }
        let judge = |host: HostName| {
            let silent = || Err("does not answer".to_owned());
            Candidate { answer: found.remove(&host).unwrap_or_else(silent), host }
        };
        known.into_keys().map(judge).collect()
    }

    fn ask_fitness(
        &self,
        host: &HostName,
        addresses: &[SocketAddr],
        purpose: &Purpose,
    ) -> Result<Fitness, String> {
        let ask = || -> anyhow::Result<SurveyAnswer> {
            let (link, _) = self.identity.dial_first(host, addresses, |_| purpose.clone())?;
            link.set_read_timeout(Some(PATIENCE))?;
            link.expect_json(Kind::Welcome)
        };
        let answer = ask().map_err(|error| format!("{error:#}"))?;
        if answer.host != *host {
            return Err(format!("its address is that of host {}", answer.host));
        }
        if let Some(reason) = answer.refuses {
            return Err(reason);
        }
        let zone = &self.config.repair.zone;
        Ok(Fitness {
            free_memory: answer.free_memory,
            load_percent: answer.load_percent,
            same_zone: zone.is_some() && *zone == answer.zone,
        })
    }
}

/// Hosts that are not asked, of those that no operator has written down: all but the roomiest.
fn beyond_the_roomiest(hosts: impl Iterator<Item = (HostName, u64)>) -> Vec<HostName> {
    let mut hosts: Vec<_> = hosts.collect();
    hosts.sort_by_key(|&(_, free_memory)| std::cmp::Reverse(free_memory));
    hosts.into_iter().skip(MOST_MEMBERS).map(|(name, _)| name).collect()
}

/// The load of the last minute, in percent of the processors.
pub(crate) fn load_percent() -> u32 {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load: f64 = text.split(' ').next().and_then(|load| load.parse().ok()).unwrap_or(0.0);
    let processors = thread::available_parallelism().map_or(1, usize::from);
    (load * 100.0 / processors as f64) as u32
}

/// Tries whether this host could change the arbiter's record of a VM, whoever owns that.
fn prove_as_it_is(arbiter: &Arbiter, vm: &VmName) -> Result<(), Unreachable> {
    match arbiter.current(vm)? {
        Some(Ownership { host: Some(owner), generation }) => arbiter.prove(vm, &owner, generation),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use understudy_protocol::literal;

    // Before, a full host was no known host among many: its copy of a VM was not asked about, nor was it heard as a winner.
    #[test]
    fn only_to_be_a_backup_are_the_roomiest_asked() {
        let hosts = (0..18).map(|n| (format!("h{n}").parse().unwrap(), n * 100));
        let left: Vec<HostName> = vec![literal("h1"), literal("h0")];
        assert_eq!(beyond_the_roomiest(hosts), left);
        assert!(
            beyond_the_roomiest((0..16).map(|n| (format!("h{n}").parse().unwrap(), n))).is_empty()
        );
    }
}
