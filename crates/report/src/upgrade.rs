//! The plan of an upgrade of a host's daemon: what it will do to the VMs.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use understudy_protocol::Spoken;
use understudy_protocol::wire::SPOKEN;
use understudy_protocol::{GroupName, HostName, VmName};

/// The versions of a daemon, and of what it runs VMs with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Versions {
    /// Version of the product.
    pub product: String,
    /// The least wire version that it speaks.
    pub wire_least: u32,
    /// The highest wire version that it speaks.
    pub wire_highest: u32,
    /// Version of the QEMU that it starts VMs with; none if it does not say.
    #[serde(default)]
    pub qemu: Option<String>,
    /// The GNU build id of that QEMU; none if it has none.
    #[serde(default)]
    pub qemu_build: Option<String>,
    /// A digest of how that QEMU's devices write their state; none if it does not say.
    #[serde(default)]
    pub qemu_layout: Option<String>,
}

impl Versions {
    /// The versions of this program itself; of a QEMU nothing.
    pub fn of_this_program() -> Versions {
        Versions {
            product: env!("CARGO_PKG_VERSION").to_owned(),
            wire_least: SPOKEN.least,
            wire_highest: SPOKEN.highest,
            qemu: None,
            qemu_build: None,
            qemu_layout: None,
        }
    }

    /// The wire versions that it speaks.
    pub fn spoken(&self) -> Spoken {
        Spoken { least: self.wire_least, highest: self.wire_highest }
    }
}

/// The QEMU that the next daemon runs VMs with: it was installed since this daemon asked what its own can do.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NextQemu {
    /// Its version; none if it cannot be asked.
    pub version: Option<String>,
    /// Its GNU build id; none if it has none.
    pub build: Option<String>,
    /// A digest of how its devices write their state; none if it does not say.
    pub layout: Option<String>,
    /// The reason why it cannot be asked: no daemon starts with it.
    pub problem: Option<String>,
}

/// Another host, as far as an upgrade is concerned.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct UpgradePeer {
    /// The host.
    pub host: HostName,
    /// The versions that it runs; none if it does not answer.
    pub versions: Option<Versions>,
    /// The wire version that is spoken with it; none if there is none in common, or it does not answer.
    pub wire: Option<u32>,
    /// Whether its QEMU takes the state of this host's devices: it is of the same version, or of
    /// the same series and writes it alike. None if it does not say.
    pub device_state_fits: Option<bool>,
    /// The same of the state of this host's devices after a restart, if that runs another QEMU.
    #[serde(default)]
    pub next_device_state_fits: Option<bool>,
    /// The problem with it, for people.
    #[serde(default)]
    pub problem: Option<String>,
}

impl UpgradePeer {
    /// Whether its QEMU takes the state of this host's devices now, and not after a restart.
    pub fn is_lost_to_qemu(&self) -> bool {
        self.device_state_fits != Some(false) && self.next_device_state_fits == Some(false)
    }
}

/// The outcome for a VM when the daemon ends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "outcome", rename_all = "kebab-case")]
pub enum UpgradeOutcome {
    /// The VM is handed to its backup first, and loses nothing.
    HandedOver {
        /// The backup.
        to: HostName,
    },
    /// The guest is asked to power off.
    ShutDown {
        /// Whether it comes up again with the next daemon, by `autostart`.
        comes_up_again: bool,
    },
    /// The VM runs in a keeper of its own: it goes on, and its protection does.
    GoesOn {
        /// The keeper; none if it does not say.
        #[serde(default)]
        keeper: Option<KeeperProgram>,
    },
    /// The VM is another host's, and is not protected until the next daemon is back, or another
    /// host takes this one's place.
    LosesBackup {
        /// The host that runs it.
        primary: HostName,
    },
    /// The VM is not this host's any more: nothing happens.
    Nothing,
    /// A person must do something first.
    NeedsPerson {
        /// The reason: what is in the way.
        reason: String,
        /// The remedy: what to do about it.
        remedy: String,
    },
}

/// The program of a VM's keeper, beside the daemon's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct KeeperProgram {
    /// Its process.
    pub pid: u32,
    /// Its version of the product; none if it does not say.
    pub version: Option<String>,
    /// Whether it is the very program that the daemon runs.
    pub is_daemons: bool,
    /// The reason why it cannot be replaced now by that; none if it can, or need not.
    pub obstacle: Option<String>,
    /// The host whose VM it backs up; none if the VM runs here. It is not replaced: the VM gets another one here when that
    /// host's keeper of it is.
    #[serde(default)]
    pub backs_up_for: Option<HostName>,
}

/// A keeper that another process has taken the place of, while its guest runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct KeeperReplacement {
    /// The VM.
    pub vm: VmName,
    /// The last keeper's process.
    pub former: u32,
    /// The process that keeps it now.
    pub keeper: u32,
    /// Time for which the guest stood still, in milliseconds.
    pub still_ms: u64,
}

/// The step for one VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct UpgradeStep {
    /// The VM.
    pub vm: VmName,
    /// The group that it is protected with; its members are handed over as one.
    #[serde(default)]
    pub group: Option<GroupName>,
    /// The outcome for it.
    #[serde(flatten)]
    pub outcome: UpgradeOutcome,
}

/// The plan of what an upgrade of a host's daemon will do to its VMs, as things are now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct UpgradePlan {
    /// The host.
    pub host: HostName,
    /// The versions that run here now.
    pub running: Versions,
    /// The QEMU that the next daemon runs VMs with; none if it is the same.
    #[serde(default)]
    pub next_qemu: Option<NextQemu>,
    /// The other hosts.
    pub peers: Vec<UpgradePeer>,
    /// Every VM that this host knows.
    pub vms: Vec<UpgradeStep>,
}

impl UpgradePlan {
    /// The VMs about which somebody must do something first.
    pub fn need_person(&self) -> impl Iterator<Item = &UpgradeStep> {
        let needs =
            |step: &&UpgradeStep| matches!(step.outcome, UpgradeOutcome::NeedsPerson { .. });
        self.vms.iter().filter(needs)
    }

    /// The VMs that are handed over.
    pub fn handed_over(&self) -> impl Iterator<Item = &UpgradeStep> {
        let is = |step: &&UpgradeStep| matches!(step.outcome, UpgradeOutcome::HandedOver { .. });
        self.vms.iter().filter(is)
    }

    /// The VMs whose keepers run another program than the daemon, with these.
    pub fn outdated(&self) -> impl Iterator<Item = (&VmName, &KeeperProgram)> {
        self.vms.iter().filter_map(|step| match &step.outcome {
            UpgradeOutcome::GoesOn { keeper: Some(keeper) } if !keeper.is_daemons => {
                Some((&step.vm, keeper))
            }
            _ => None,
        })
    }

    /// The VMs that are shut down, and stay off.
    pub fn stay_off(&self) -> impl Iterator<Item = &UpgradeStep> {
        let off = UpgradeOutcome::ShutDown { comes_up_again: false };
        self.vms.iter().filter(move |step| step.outcome == off)
    }

    /// The hosts whose QEMU takes the state of this host's devices now, and not after a restart.
    pub fn lost_to_qemu(&self) -> impl Iterator<Item = &UpgradePeer> {
        self.peers.iter().filter(|peer| peer.is_lost_to_qemu())
    }

    /// The VMs that are shut down.
    pub fn shut_down(&self) -> impl Iterator<Item = &UpgradeStep> {
        let is = |step: &&UpgradeStep| matches!(step.outcome, UpgradeOutcome::ShutDown { .. });
        self.vms.iter().filter(is)
    }
}
