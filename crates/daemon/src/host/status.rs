//! How the host and its VMs are, for `status`.

use super::Host;
use crate::config::ArbiterConfig;
use crate::gate::address;
use crate::lost;
use understudy_protocol::VmName;
use understudy_report::error::HostError;
use understudy_report::{ArbiterReport, HostStatus, Role, VmStatus};

impl Host {
    /// One VM's status.
    pub fn vm_status(&self, name: &VmName) -> Result<VmStatus, HostError> {
        // One that was taken back just now may still be among those that stand still.
        let is_here = self.vms.has(name);
        match self.status_of_untold(name).filter(|_| !is_here) {
            Some(status) => Ok(self.complete(status)),
            None => Ok(self.complete(self.vm(name)?.status())),
        }
    }

    /// Adds what others know of the VM.
    fn complete(&self, mut status: VmStatus) -> VmStatus {
        self.describe_cards(&mut status);
        status.events = self.events.sentences(&status.name);
        status.since_ms = self.events.since(&status.name);
        status.filling = self.snapshots.filling(&status.name);
        status.sampled_pages = self.snapshots.sampled_pages(&status.name);
        // A backup has its QEMU, and its keeper is another one once it is made anew.
        let starts_for_it = self.keeps.is_some() && status.role != Role::Backup;
        status.qemu_obstacle = if starts_for_it { self.qemu_obstacle() } else { None };
        status
    }

    /// What is wrong with this host, which has these VMs, and on which those are lost.
    fn problems(&self, vms: &[VmStatus], lost: &[VmName]) -> Vec<String> {
        let certificates = self.problems_of_certificates();
        let others = self.arbiter_problem().into_iter().chain(self.problem_of_peers());
        let qemu = self.qemu_obstacle();
        let snapshots = self.vms.look(|all| all.findings.of_snapshots());
        others
            .chain(certificates)
            .chain(qemu)
            .chain(vms.iter().flat_map(VmStatus::unconnected))
            .chain(self.problem_of_webhook())
            .chain(lost::problems(lost))
            .chain(self.problems_of_orphans())
            .chain(snapshots)
            .chain(self.snapshots.problems())
            .chain(self.problems_of_addresses())
            .chain(self.problems_of_tokens())
            .collect()
    }

    /// Keepers have none.
    fn problems_of_addresses(&self) -> Vec<String> {
        match self.keeps {
            Some(_) => Vec::new(),
            None => address::problems(&self.config),
        }
    }

    /// Keepers have none, and see no such file.
    fn problems_of_tokens(&self) -> Vec<String> {
        match (&self.config.api, &self.keeps) {
            (Some(api), None) => api.problems_of_tokens(),
            _ => Vec::new(),
        }
    }

    fn arbiter_problem(&self) -> Option<String> {
        self.vms.look(|all| all.findings.arbiter.clone())
    }

    fn arbiter_report(&self) -> Option<ArbiterReport> {
        let kind = match self.config.arbiter.as_ref()? {
            ArbiterConfig::File { .. } => "file",
            ArbiterConfig::Etcd(_) => "etcd",
        };
        Some(ArbiterReport { kind: kind.to_owned(), problem: self.arbiter_problem() })
    }

    /// Everything on this host.
    pub fn status(&self) -> HostStatus {
        // In this order: one that is taken back meanwhile is in either.
        let mut still = self.orphans.untold();
        let known = self.vms.all();
        still.retain(|vm| self.keeper_of(vm).is_none() && !known.contains_key(vm));
        let still: Vec<_> = still.iter().filter_map(|vm| self.status_of_untold(vm)).collect();
        let vms = self.all_just_lost(&known).into_iter().chain(known.into_values());
        let vms = vms.map(|vm| vm.status()).chain(still);
        let vms: Vec<_> = vms.map(|vm| self.complete(vm)).collect();
        let lost = self.lost_vms();
        HostStatus {
            name: self.config.name.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            qemu_version: self.capabilities.version.to_string(),
            problems: self.problems(&vms, &lost),
            certificate_expires: self.identity.tls.as_ref().map(|tls| tls.expires()),
            arbiter: self.arbiter_report(),
            peers: self.known_hosts().into_keys().collect(),
            awaited: self.awaited.all(),
            lost,
            vms,
        }
    }
}
