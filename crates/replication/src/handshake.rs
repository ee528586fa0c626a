//! The messages of two hosts to each other before the first byte of a VM moves.

mod dial;

pub use dial::{Identity, connect};

use crate::membership::Membership;
use crate::resync::Resync;
use crate::sessions::{SessionName, Sessions};
use anyhow::Context;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use understudy_arbiter::ArbiterName;
use understudy_link::link::{Link, read_json};
use understudy_protocol::wire::{FIRST_NEGOTIATED, Kind, LEAST_WIRE_VERSION, SPOKEN, WireVersion};
use understudy_protocol::{Count, DiskIndex, Generation, PathIndex};
use understudy_protocol::{GroupName, HostName, Spoken, VmName};
use understudy_qemu::definition::{CardDefinition, ForeignDefinition};
use understudy_qemu::tsc::TscRate;
use understudy_qemu::{Accelerator, ClockBase, CpuNeeds, Release, Vendor};
use understudy_report::{DiskReads, Mode, ProtectRequest};

/// The paths that a peer may have.
pub const MOST_PATHS: usize = 8;

/// First message of every connection.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Hello {
    /// The least wire version that the sender speaks, and that can say what the connection is for:
    /// version 17 wants its own here.
    pub wire_version: WireVersion,
    /// The highest that it speaks; none of version 17, which speaks one only.
    #[serde(default)]
    pub wire_highest: Option<WireVersion>,
    /// The sender's product version, for people.
    pub product_version: String,
    /// The sender's host name.
    pub host: HostName,
    /// Purpose of the connection.
    pub purpose: Purpose,
    /// The VM that it is about, if the sender can go on with a keeper of it ([`Kind::BeginAnew`]).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keeper_of: Option<VmName>,
}

/// The purpose of a connection.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "purpose", rename_all = "kebab-case")]
pub enum Purpose {
    /// Protect this VM; checkpoints follow.
    Protect(Box<Offer>),
    /// Tell what this host's images of a VM are. See `recover` of the daemon.
    Images {
        /// The VM's name.
        vm: VmName,
    },
    /// Tell whether this host could back a VM up. See `survey` of the daemon.
    Survey {
        /// The VM's name.
        vm: VmName,
        /// Bytes of its memory.
        memory: u64,
        /// The guest's needs of the host's processor.
        cpu: CpuNeeds,
        /// Its network cards.
        cards: Vec<CardDefinition>,
        /// What an offer says beside; none of a host that does not ask for it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        offered: Option<Box<Offered>>,
    },
    /// Tell whether this host could execute the log of a QEMU of this build. See `admission` of the
    /// daemon.
    MayFollow {
        /// The GNU build id; none if it has none.
        build: Option<String>,
    },
    /// The asker keeps its guest although this host has won the VM: what became of it? See
    /// `hand_back` of the daemon.
    Kept {
        /// The VM's group, or itself.
        membership: Membership,
        /// The generation at which the asker had it; the leader's.
        from: Generation,
    },
    /// Asks which host answers here (`probe` of the daemon).
    Probe,
    /// Asks for how long this host has been up (`lease` of the daemon).
    Clock,
    /// Orders and reports about snapshots and restores of groups follow.
    Group,
    /// Tell whether this host could take members of a snapshot. See `snapshot` of the daemon.
    MayRestore(understudy_cluster::messages::Question),
    /// The heartbeats of a session that was accepted on another connection.
    Heartbeat {
        /// The session.
        session: String,
        /// The path that they are for.
        path: PathIndex,
    },
    /// Copies of what the guest of a session receives.
    Inbound {
        /// The session.
        session: String,
    },
    /// Frames to the members of a cluster that run on the answering host.
    Frames {
        /// The cluster.
        cluster: GroupName,
    },
    /// The data of a session goes on over this connection.
    Resume {
        /// The session.
        session: String,
        /// The path that the connection takes.
        path: PathIndex,
        /// Number of the backup's messages that the primary has got.
        received: Count,
    },
}

impl Hello {
    fn spoken(&self) -> Spoken {
        let least = self.wire_version;
        Spoken { least, highest: self.wire_highest.unwrap_or(least) }
    }

    /// The version that is used with whoever said this.
    pub fn agreed(&self) -> Option<WireVersion> {
        SPOKEN.agree(self.spoken())
    }
}

impl Purpose {
    /// The first wire version in which it can be said.
    fn first_version(&self) -> WireVersion {
        let is_new = match self {
            Purpose::Clock => true,
            Purpose::Protect(offer) => offer.definition.autostart,
            _ => false,
        };
        if is_new { FIRST_NEGOTIATED } else { LEAST_WIRE_VERSION }
    }
}

/// What of an offer a host is asked about before it comes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Offered {
    /// The primary's QEMU.
    #[serde(flatten)]
    pub qemu: Release,
    /// The versioned machine type that it runs.
    pub machine_type: String,
    /// The processor that the definition names.
    #[serde(default)]
    pub processor: Option<String>,
    /// Mode in which the backup is to keep up.
    pub mode: Mode,
    /// The build of the QEMU that records, in lockstep.
    #[serde(default)]
    pub qemu_build: Option<String>,
    /// Bytes that the disks' images take now.
    pub disk_used: u64,
    /// The cluster of others that the VM is a member of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster: Option<ClusterOffer>,
}

/// The cluster of a VM, as its host's configuration has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterOffer {
    /// The cluster.
    pub name: GroupName,
    /// Its members, by which they are numbered.
    pub members: Vec<VmName>,
}

/// A VM that a primary wants protected.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Offer {
    /// Names the session; unique.
    pub session: SessionName,
    /// The VM, as the primary has it.
    pub definition: ForeignDefinition,
    /// The versioned machine type that the primary runs.
    pub machine_type: String,
    /// The accelerator that the primary runs.
    pub accelerator: Accelerator,
    /// The rate of the guest's time stamp counter, on KVM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tsc: Option<TscRate>,
    /// The maker of the processor that the guest sees, on KVM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vendor: Option<Vendor>,
    /// The primary's QEMU.
    #[serde(flatten)]
    pub qemu: Release,
    /// Its build, by which lockstep tells whether both are the same.
    #[serde(default)]
    pub qemu_build: Option<String>,
    /// Mode in which the backup is to keep up.
    #[serde(default)]
    pub mode: Mode,
    /// Source, in lockstep, from which the backup gets what its guest reads from its disks.
    #[serde(default)]
    pub disk_reads: DiskReads,
    /// Base of the guest's clocks, if the primary's QEMU counts instructions: the
    /// backup's must too.
    #[serde(default)]
    pub clock: Option<ClockBase>,
    /// The generation at which the primary owns the VM.
    pub generation: Generation,
    /// The arbiter that says so; the backup's must be the same.
    pub arbiter: ArbiterName,
    /// The group that the VM is protected with, if any.
    #[serde(default)]
    pub group: Option<GroupOffer>,
    /// The cluster of others that the VM is a member of: its backup's host is to have it, too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster: Option<ClusterOffer>,
    /// Bytes of each disk's export, in the definition's order.
    pub disk_bytes: Vec<ExportBytes>,
    /// Bytes that each disk's image takes now: what a whole copy needs room for.
    #[serde(default)]
    pub disk_used: Vec<u64>,
    /// Sessions since which every change of the primary's disks is known.
    #[serde(default)]
    pub sessions: Sessions,
    /// Files that follow: what QEMU reads when it starts.
    pub files: Vec<FileOffer>,
    /// The backup's addresses that the primary knows, one for each path.
    pub paths: Vec<SocketAddr>,
    /// The path of this connection.
    pub path: PathIndex,
    /// Request of the operator; the backup does the same after a take-over.
    #[serde(default)]
    pub wish: Option<ProtectRequest>,
    /// The primary's patience: of what it waits for, the shortest time, in ms. None of a host of an earlier release.
    #[serde(default)]
    pub patience_ms: Option<u64>,
}

/// Bytes of a disk's export: no more than a list of its changes can be kept of, whoever names them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "u64", into = "u64")]
pub struct ExportBytes(u64);

impl ExportBytes {
    /// 64 TiB, of which the list takes 128 MiB.
    const MOST: u64 = 64 << 40;
}

impl TryFrom<u64> for ExportBytes {
    type Error = String;

    fn try_from(bytes: u64) -> Result<ExportBytes, String> {
        match bytes <= Self::MOST {
            true => Ok(ExportBytes(bytes)),
            false => Err(format!("a disk has {bytes} bytes; {} can be protected", Self::MOST)),
        }
    }
}

impl From<ExportBytes> for u64 {
    fn from(bytes: ExportBytes) -> u64 {
        bytes.0
    }
}

/// A VM that is protected with others. The members are offered in order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GroupOffer {
    /// Members of the group.
    pub membership: Membership,
    /// The VM's place among them.
    pub place: usize,
}

/// A file, or the beginning of one, that the backup's QEMU needs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FileOffer {
    /// Role that it has in the definition.
    pub role: FileRole,
    /// Number of its bytes, which follow.
    pub bytes: u64,
}

/// The role of a file in the definition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FileRole {
    /// `firmware`
    Firmware,
    /// `kernel`
    Kernel,
    /// `initrd`
    Initrd,
    /// The first bytes of a disk: the header of its format, which the backup's
    /// QEMU reads when it starts.
    DiskHead(DiskIndex),
}

/// The backup accepts; nothing was changed yet.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Welcome {
    /// The backup's host name.
    pub host: HostName,
    /// The wire version that is used; none of version 17, which is.
    #[serde(default)]
    pub wire_version: Option<WireVersion>,
    /// Parts that the backup's own images lack, if they need not be copied in full.
    #[serde(default)]
    pub resync: Option<Resync>,
    /// The reason why they must.
    #[serde(default)]
    pub full_because: String,
    /// Note of what the primary's users should know about the backup, if anything.
    #[serde(default)]
    pub note: Option<String>,
    /// The backup's patience, as [`Offer::patience_ms`].
    #[serde(default)]
    pub patience_ms: Option<u64>,
}

impl Welcome {
    /// A welcome that says nothing of disks.
    pub fn of(host: &HostName) -> Welcome {
        Welcome {
            host: host.clone(),
            wire_version: None,
            resync: None,
            full_because: String::new(),
            note: None,
            patience_ms: None,
        }
    }
}

/// The backup goes on with a session over a new connection.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Resumed {
    /// Number of the primary's messages that the backup has got.
    pub received: Count,
}

/// The backup's QEMU stands by.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Ready {
    /// Name and bytes of every RAM block there, in the order of the block ids.
    pub blocks: Vec<(String, u64)>,
}

/// Reads a dialler's hello; refuses a version that is not spoken here, and a name that is not the
/// dialler's own. None of a dialler that has hung up without a word.
pub fn answer(link: &Link) -> anyhow::Result<Option<Hello>> {
    let Some(first) = link.receive_first()? else { return Ok(None) };
    // The version first: the rest may look different in another one.
    let hello: serde_json::Value = read_json(&first, Kind::Hello)?;
    if let Some(reason) = unspoken(&hello) {
        link.refuse(&reason);
        anyhow::bail!(reason);
    }
    let hello: Hello = serde_json::from_value(hello).context("malformed hello")?;
    if let Err(error) = link.check_peer(&hello.host) {
        link.refuse(&format!("{error:#}"));
        return Err(error);
    }
    Ok(Some(hello))
}

/// The refusal of a hello of a version that is not spoken here, if it is.
fn unspoken(hello: &serde_json::Value) -> Option<String> {
    let number =
        |field: &str| -> Option<WireVersion> { hello.get(field)?.as_u64()?.try_into().ok() };
    let text = |field: &str| hello.get(field).and_then(serde_json::Value::as_str).unwrap_or("?");
    let Some(least) = number("wire_version") else {
        return Some("the hello names no wire version".to_owned());
    };
    let theirs = Spoken { least, highest: number("wire_highest").unwrap_or(least) };
    match SPOKEN.agree(theirs) {
        Some(_) => None,
        None => Some(format!(
            "Understudy {} on host {} speaks wire {theirs}, Understudy {} here wire {SPOKEN}: {}",
            text("product_version"),
            text("host"),
            env!("CARGO_PKG_VERSION"),
            SPOKEN.remedy(theirs, text("host")),
        )),
    }
}

/// The version that a peer's answer says is used. An error if it is none of those that were named.
pub fn agreed(answered: Option<WireVersion>) -> anyhow::Result<WireVersion> {
    let used = answered.unwrap_or(LEAST_WIRE_VERSION);
    anyhow::ensure!(
        SPOKEN.contains(used),
        "the peer wants to speak wire version {used}; this host speaks wire {SPOKEN}"
    );
    Ok(used)
}

#[cfg(test)]
#[path = "handshake_tests.rs"]
mod tests;
