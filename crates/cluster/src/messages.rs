//! Messages of hosts to each other about snapshots and restores: JSON in messages of the kinds
//! `Snapshot` and `Restore`. Each order names all that it needs, since any may be the first
//! that arrives.

use anyhow::{Context, bail, ensure};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use understudy_protocol::Generation;
use understudy_protocol::{GroupName, HostName, VmName};
use understudy_qemu::Accelerator;
use understudy_qemu::command::BootFiles;
use understudy_qemu::definition::ForeignDefinition;
use understudy_snapshot::{
    About, AreaEntry, Blob, Compression, Incarnation, Member, MemberManifest, Order, Page, Report,
    SnapshotNumber, Store, StoreAddress, StoreError, TakeOrder, TakeReport, TraceTime,
};

/// Members of a group and their hosts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupPlaces {
    /// The group's name.
    pub name: GroupName,
    /// Its members' VMs, in their order.
    pub vms: Vec<VmName>,
    /// The host of each.
    pub hosts: Vec<HostName>,
}

/// A member's part in a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TakeTask {
    /// Its group.
    pub group: GroupPlaces,
    /// Member whose VM it is.
    pub member: Member,
    /// Store of the snapshot.
    pub store: StoreAddress,
    /// Compression of its chunks.
    pub compression: Compression,
    /// Time for which first accesses are traced after the pause.
    pub trace_ms: TraceTime,
    /// Whether repeated accesses are traced too, for comparison.
    pub recency: bool,
}

impl TakeTask {
    /// The member's VM.
    pub fn vm(&self) -> &VmName {
        &self.group.vms[self.member.index()]
    }
}

/// A member's part in a restore.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestoreTask {
    /// Names the restore; unique.
    pub id: String,
    /// Its group, as it will be.
    pub group: GroupPlaces,
    /// Member whose VM it is.
    pub member: Member,
    /// Store of the snapshot.
    pub store: StoreAddress,
    /// Number of the snapshot.
    pub number: SnapshotNumber,
    /// The newest generation of the VM that anybody knows.
    pub newest: Generation,
    /// The group's incarnation from now on.
    pub incarnation: Incarnation,
    /// Whether the queue is by last access, not by first.
    pub by_recency: bool,
}

impl RestoreTask {
    /// The member's VM.
    pub fn vm(&self) -> &VmName {
        &self.group.vms[self.member.index()]
    }
}

impl RestoreTask {
    /// The order in which memory is loaded.
    pub fn queue(&self, store: &Store, member: &MemberManifest) -> Result<Vec<Page>, StoreError> {
        let set = match self.by_recency {
            true => store.by_sampling(member)?,
            false => store.working_set(member)?,
        };
        Ok(set.queue)
    }
}

/// Message from a coordinator to the host of a member: it names a member that there is, and a
/// restore whose name can be part of a file's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Said")]
pub enum ToMember {
    /// Order about a snapshot.
    Take(TakeTask, About<TakeOrder>),
    /// Order about a restore.
    Restore(RestoreTask, Order),
}

/// Unchecked form of a [`ToMember`], as a peer sends it.
#[derive(Deserialize)]
enum Said {
    Take(TakeTask, About<TakeOrder>),
    Restore(RestoreTask, Order),
}

impl TryFrom<Said> for ToMember {
    type Error = &'static str;

    fn try_from(said: Said) -> Result<ToMember, &'static str> {
        let (group, member) = match &said {
            Said::Take(task, _) => (&task.group, task.member),
            Said::Restore(task, _) => (&task.group, task.member),
        };
        if group.vms.len() != group.hosts.len() || member.index() >= group.vms.len() {
            return Err("it names a member that its group does not have");
        }
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
        match said {
            Said::Restore(task, _) if task.id.len() > 64 || !task.id.bytes().all(plain) => {
                Err("its restore has a name that is none")
            }
            Said::Restore(task, order) => Ok(ToMember::Restore(task, order)),
            Said::Take(task, order) => Ok(ToMember::Take(task, order)),
        }
    }
}

impl ToMember {
    /// The store that it names.
    pub fn store(&self) -> &StoreAddress {
        match self {
            ToMember::Take(task, _) => &task.store,
            ToMember::Restore(task, _) => &task.store,
        }
    }

    /// The report that it cannot be done.
    pub fn failed(&self, why: String) -> ToCoordinator {
        match self {
            ToMember::Take(task, order) => {
                let said = TakeReport::Failed { why };
                ToCoordinator::Take(task.member, About { number: order.number, said })
            }
            ToMember::Restore(task, _) => {
                ToCoordinator::Restore(task.member, Report::Failed { why })
            }
        }
    }
}

/// Reports of a member to the coordinator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToCoordinator {
    /// Report about a snapshot.
    Take(Member, About<TakeReport>),
    /// Report about a restore.
    Restore(Member, Report),
}

impl ToCoordinator {
    /// The member that it is about, by the word of whoever sent it.
    pub fn member(&self) -> Member {
        match self {
            ToCoordinator::Take(member, _) | ToCoordinator::Restore(member, _) => *member,
        }
    }
}

/// Receiver of reports.
pub type Reply = Arc<dyn Fn(ToCoordinator) + Send + Sync>;

/// Order of a primary to its backup: what that has at the end of this epoch is a snapshot's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeepOrder {
    /// The snapshot's group.
    pub group: GroupName,
    /// Number of the snapshot.
    pub number: SnapshotNumber,
    /// Store of the snapshot.
    pub store: StoreAddress,
    /// Compression of its chunks.
    pub compression: Compression,
    /// Time for which first writes are noted.
    pub trace_ms: TraceTime,
}

/// The reply to a [`KeepOrder`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kept {
    /// The snapshot's group.
    pub group: GroupName,
    /// Number of the snapshot.
    pub number: SnapshotNumber,
    /// Place of the image in the store, or why it is not there.
    pub image: Result<KeptImage, String>,
}

/// All of a protected VM that its backup has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptImage {
    /// RAM blocks and disks.
    pub areas: Vec<AreaEntry>,
    /// QEMU's device state.
    pub device_state: Blob,
    /// The queue of first writes.
    pub working_set: Blob,
}

/// A VM as it is saved with its part of a snapshot.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SavedVm {
    /// Its definition, as its host had it.
    pub definition: ForeignDefinition,
    /// Accelerator that executed its instructions.
    pub accelerator: Accelerator,
}

impl SavedVm {
    /// The VM of a member's part.
    pub fn of(member: &MemberManifest) -> anyhow::Result<SavedVm> {
        let name = &member.name;
        let saved: SavedVm =
            serde_json::from_value(member.definition.clone()).with_context(|| {
                format!(
                    "the definition of {name} in the snapshot is not one that this version of \
                 understudy knows; use the version that took it"
                )
            })?;
        if let Some(problem) = saved.definition.validate().first() {
            bail!("the definition of {name} in the snapshot is wrong: {problem}");
        }
        ensure!(
            saved.definition.name == *name,
            "the definition of {name} in the snapshot is that of {}",
            saved.definition.name
        );
        ensure!(
            saved.definition.memory.bytes() == member.machine.memory,
            "the snapshot of {name} is damaged: its definition has a memory of {} bytes, and its machine \
             one of {}",
            saved.definition.memory.bytes(),
            member.machine.memory
        );
        let boot = BootFiles {
            firmware: member.firmware.as_ref(),
            kernel: member.kernel.as_ref(),
            initrd: member.initrd.as_ref(),
        };
        let fits = saved.definition.check_boot(&boot);
        fits.with_context(|| format!("the part of {name} in the snapshot is wrong"))?;
        Ok(saved)
    }
}

/// Question to a host: could these members of a snapshot be restored on it?
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Question {
    /// Store of the snapshot.
    pub store: StoreAddress,
    /// Its group.
    pub group: GroupName,
    /// Number of the snapshot.
    pub number: SnapshotNumber,
    /// The members' VMs.
    pub vms: Vec<VmName>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(change: impl FnOnce(&mut serde_json::Value)) -> anyhow::Result<ToMember> {
        let task = RestoreTask {
            id: "1-1700000000".to_owned(),
            group: GroupPlaces {
                name: understudy_protocol::literal("shop"),
                vms: vec![understudy_protocol::literal("db")],
                hosts: vec![understudy_protocol::literal("b")],
            },
            member: Member(0),
            store: "/srv".parse()?,
            number: SnapshotNumber(1),
            newest: Generation(1),
            incarnation: Incarnation(1),
            by_recency: false,
        };
        let mut json = serde_json::to_value(ToMember::Restore(task, Order::Load { pages: 0 }))?;
        change(&mut json["Restore"][0]);
        Ok(serde_json::from_value(json)?)
    }

    fn part(initrd: Option<Blob>) -> MemberManifest {
        let definition = serde_json::json!({
            "name": "db", "memory": "64M", "vcpus": 1,
            "kernel": "/boot/vmlinuz", "initrd": "/etc/shadow",
        });
        let blob = Blob::default;
        MemberManifest {
            name: understudy_protocol::literal("db"),
            machine: understudy_snapshot::Machine {
                qemu: "10.0.2".to_owned(),
                machine_type: "pc-i440fx-10.0".to_owned(),
                vcpus: 1,
                memory: 64 << 20,
            },
            definition: serde_json::json!({ "definition": definition, "accelerator": "tcg" }),
            firmware: None,
            kernel: Some(blob()),
            initrd,
            areas: vec![],
            device_state: blob(),
            in_flight: blob(),
            working_set: blob(),
            recent: None,
            clock: None,
            sampled: None,
            pause_us: 0,
            base: None,
        }
    }

    /// The host's own file of that name was read, as root.
    #[test]
    fn a_part_of_a_snapshot_names_no_file_that_it_does_not_have() {
        let saved = SavedVm::of(&part(Some(Blob::default()))).unwrap();
        assert!(!saved.definition.initrd.as_ref().unwrap().exists(), "it is not this host's");
        let error = format!("{:#}", SavedVm::of(&part(None)).unwrap_err());
        assert!(error.contains("\"initrd\", and no file comes"), "{error}");
    }

    #[test]
    fn a_part_has_the_memory_of_its_definition() {
        let mut part = part(Some(Blob::default()));
        part.machine.memory = 1 << 40;
        let error = SavedVm::of(&part).unwrap_err().to_string();
        assert!(error.contains("is damaged: its definition has a memory of 67108864"), "{error}");
    }

    /// Regression: such an order was believed: the first three became paths, the last one ended the
    /// daemon.
    #[test]
    fn an_order_of_a_peer_names_nothing_outside() {
        assert!(order(|_| ()).is_ok());
        assert!(order(|json| json["group"]["vms"][0] = "../../../etc/cron.d".into()).is_err());
        assert!(order(|json| json["group"]["name"] = "..".into()).is_err());
        assert!(order(|json| json["id"] = "x/../../y".into()).is_err());
        assert!(order(|json| json["group"]["vms"] = serde_json::json!([])).is_err());
        assert!(order(|json| json["member"] = 7.into()).is_err());
        assert!(order(|json| json["store"] = "/srv/../etc".into()).is_err());
    }
}
