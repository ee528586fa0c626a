//! The status that the daemon reports to its users: the types behind `status` and `--json`.

use crate::checkpoint::{InboundReport, OutboundReport, OutputReport, PauseReport, ThrottleReport};
use crate::cluster::FillReport;
use crate::limits::LimitsReport;
use crate::lockstep::LockstepReport;
use crate::requests::Mode;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use understudy_encoding::{Counters, EncodingPlan, Methods};
use understudy_protocol::{Epoch, Generation, Policy};
use understudy_protocol::{GroupName, HostName, VmName};

/// The role of this host for a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// Runs the VM.
    Primary,
    /// Holds the VM's last committed state and stands by.
    Backup,
    /// A host that ran the VM, or tried to, and lost its ownership: its copy is halted.
    Fenced,
}

/// The state of a VM's protection.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "state", rename_all = "kebab-case")]
pub enum Protection {
    /// No protection was asked for.
    Off,
    /// First synchronisation; the VM runs and is not protected yet.
    Syncing {
        /// The backup's host name.
        peer: HostName,
        /// Bytes copied so far, memory and disks.
        done_bytes: u64,
        /// Bytes to copy as known now; grows while the guest writes.
        total_bytes: u64,
        /// Seconds left at the present speed, when it can be told.
        remaining_seconds: Option<f64>,
    },
    /// Every output waits for the backup.
    Protected {
        /// The other host's name.
        peer: HostName,
    },
    /// A backup follows, but output does not wait for it, as the operator asked: a fail-over
    /// undoes what clients have seen. For measurements; counts as degraded.
    Unheld {
        /// The other host's name.
        peer: HostName,
    },
    /// Protection was asked for and is lost; the VM runs alone.
    Degraded {
        /// The reason, for people.
        reason: String,
    },
}

/// One network card of a VM on this host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct CardReport {
    /// The guest's MAC address.
    pub mac: String,
    /// The tap device on this host.
    pub tap: String,
    /// The bridge that the tap belongs to.
    pub bridge: String,
    /// The reason why it is on none: the guest is not connected.
    #[serde(default)]
    pub problem: Option<String>,
}

/// One disk of a VM on this host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct DiskReport {
    /// The image on this host: the user's own, or this host's mirror.
    pub path: std::path::PathBuf,
}

/// One path to a VM's other host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PathReport {
    /// The backup's address on this path.
    pub address: std::net::SocketAddr,
    /// Whether the peer is heard over it.
    pub up: bool,
    /// Whether the data goes over it.
    pub in_use: bool,
    /// Seconds for which it has been down.
    pub down_seconds: Option<f64>,
    /// The reason why it is down.
    pub reason: Option<String>,
}

/// The report of the first synchronisation of a VM's disks, over or under way.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct DiskSync {
    /// The reason why everything was copied; none if only what may have changed was.
    pub full_because: Option<String>,
    /// Bytes sent of the disks copied so far, without what the guest wrote meanwhile.
    pub bytes: u64,
    /// Time taken, in seconds.
    pub seconds: f64,
    /// Bytes of the disks in which the hosts' images may differ: what another
    /// synchronisation would copy if the backup failed now.
    pub differing_bytes: u64,
}

/// The parts of a take-over's time, in milliseconds. Detection comes before it: from
/// the failure to the suspicion.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TakeoverReport {
    /// Whether the primary handed the VM over as its operator wanted.
    #[serde(default)]
    pub planned: bool,
    /// Time from the suspicion until the arbiter gave the VM to this host.
    pub arbiter_ms: f64,
    /// Lockstep: how far this host was behind when it suspected the failure.
    #[serde(default)]
    pub lag_ms: f64,
    /// Lockstep: executing what was left of the log, once the arbiter had decided.
    #[serde(default)]
    pub log_ms: f64,
    /// Bringing to the disks all that was acknowledged, and the activation record.
    pub activation_ms: f64,
    /// Loading the device state, until the guest ran.
    pub restart_ms: f64,
    /// Time from the suspicion until the guest ran.
    pub total_ms: f64,
    /// Time from the end of the last epoch, from which the guest goes on, until it ran: nobody
    /// waited for longer. In lockstep from where this host had come in the log.
    #[serde(default)]
    pub outage_ms: f64,
    /// Frames that clients had sent to the lost primary, and that the guest was given again.
    pub injected_frames: u64,
    /// Frames of committed epochs that the lost primary may not have released, and that were
    /// sent from here.
    #[serde(default)]
    pub resent_frames: u64,
}

/// How a VM's operator wants it to be protected.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct WantedReport {
    /// The backup that was asked for, or that it had last.
    pub to: String,
    /// The group with whose VMs it is protected as one.
    pub group: Option<GroupName>,
    /// The mode in which the backup keeps up.
    pub mode: Mode,
    /// Whether what the guest says on its console waits for its commit, too.
    pub hold_console: bool,
}

/// All that `status` shows of one VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct VmStatus {
    /// The VM's name.
    pub name: VmName,
    /// Role of this host for it.
    pub role: Role,
    /// Whether the guest executes on this host now.
    pub live: bool,
    /// Whether its copy here was halted because another host has the VM, or was to have it.
    #[serde(default)]
    pub elsewhere: bool,
    /// The process that keeps it, if that is not the daemon.
    #[serde(default)]
    pub keeper_pid: Option<u32>,
    /// The generation of ownership that this host knows.
    pub generation: Generation,
    /// The last epoch known to be committed.
    pub epoch: Epoch,
    /// The group that the VM is protected with.
    #[serde(default)]
    pub group: Option<GroupName>,
    /// State of its protection.
    pub protection: Protection,
    /// The reason why the backup, which follows, could not take over at the moment, or that output
    /// waits too long for it, if that alone is wrong: the VM is protected again as soon as that
    /// ends.
    #[serde(default)]
    pub lapse: Option<String>,
    /// The reason why nothing is known of it at present: its keeper does not answer. Its protection is called degraded
    /// meanwhile, and may be whole.
    #[serde(default)]
    pub unheard: Option<String>,
    /// Whether it is copied anew after its protection was lost: until that has ended one more failure ends it.
    #[serde(default)]
    pub restoring: bool,
    /// The backup that it was to be protected to when it ran here last, if it was started since and nobody has asked
    /// for protection again.
    #[serde(default)]
    pub former_backup: Option<String>,
    /// The command that asks for that protection again.
    #[serde(default)]
    pub former_command: Option<String>,
    /// How its operator wants it to be protected, whether or not it is now; none if it is not to be.
    #[serde(default)]
    pub wanted: Option<WantedReport>,
    /// Time since which it has been so, in milliseconds since 1970, as far as this daemon knows.
    #[serde(default)]
    pub since_ms: Option<u64>,
    /// The synchronisation of the disks to the backup, if the VM is or was protected from here.
    #[serde(default)]
    pub disk_sync: Option<DiskSync>,
    /// Mode in which the backup keeps up, while there is one.
    #[serde(default)]
    pub mode: Mode,
    /// Report of how far both are apart; while the VM is protected in lockstep.
    #[serde(default)]
    pub lockstep: Option<LockstepReport>,
    /// Epochs captured and not yet acknowledged.
    pub lag_epochs: u64,
    /// Copies of what the guest receives, while it is protected.
    #[serde(default)]
    pub inbound: Option<InboundReport>,
    /// The guest's output that travels to the backup, while it is protected.
    #[serde(default)]
    pub outbound: Option<OutboundReport>,
    /// The take-over by which the VM came to this host, if this host took it over and runs it.
    #[serde(default)]
    pub takeover: Option<TakeoverReport>,
    /// Progress of loading it, while it is still being loaded from a snapshot.
    #[serde(default)]
    pub filling: Option<FillReport>,
    /// Its working set in normal running, in pages, once that was sampled.
    #[serde(default)]
    pub sampled_pages: Option<u64>,
    /// The checkpoint policy.
    pub policy: Policy,
    /// Checkpoints committed since protection began.
    pub checkpoints: u64,
    /// The pause of recent checkpoints.
    pub pause_ms: PauseReport,
    /// Time that output waits; none before any has.
    #[serde(default)]
    pub output_wait_ms: Option<OutputReport>,
    /// The reason why the guest is slower than its definition let hope: no KVM, or a poor one.
    #[serde(default)]
    pub slow: Option<String>,
    /// The reason why pauses go through QMP, and take longer; none if the agent inside QEMU does
    /// them.
    #[serde(default)]
    pub pauses_through_qmp: Option<String>,
    /// The encoding of pages; none if this host is not protecting the VM.
    pub compression: Option<CompressionReport>,
    /// Bytes sent to the backup since protection began.
    pub bytes_sent: u64,
    /// Age of the state that the backup would go on with, in milliseconds; what the guest
    /// has done since then would be undone, and nobody has seen it.
    #[serde(default)]
    pub uncommitted_ms: Option<f64>,
    /// Pages that the guest writes in a second, over the last seconds.
    #[serde(default)]
    pub dirty_pages_per_second: u64,
    /// Bandwidth to the backup over the last seconds, in bytes per second.
    pub bandwidth_bytes_per_second: u64,
    /// The throttling of a guest that writes faster than the link carries; while
    /// protection lasts.
    pub throttle: Option<ThrottleReport>,
    /// Frames held for output commit at this moment.
    pub held_frames: u64,
    /// Bytes of the guest's console held likewise, where that was asked for.
    #[serde(default)]
    pub held_console_bytes: Option<u64>,
    /// Unix socket of the guest's screen, a VNC server's.
    #[serde(default)]
    pub vnc: Option<std::path::PathBuf>,
    /// Unix socket of the guest agent's channel; what the guest says there is not held.
    #[serde(default)]
    pub guest_agent: Option<std::path::PathBuf>,
    /// The VM has a display for whoever connects to it, who sees what the guest draws at once, committed or not.
    #[serde(default)]
    pub display_not_held: bool,
    /// The error of a disk at which the guest stands still, and what becomes of it.
    #[serde(default)]
    pub disk_error: Option<String>,
    /// The reason why its keeper, which began before QEMU was upgraded, starts nothing any more, with what to do.
    #[serde(default)]
    pub qemu_obstacle: Option<String>,
    /// The reason why the guest stands still, if this host could not show the arbiter for too long
    /// that it lives.
    #[serde(default)]
    pub lease_over: Option<String>,
    /// Process id of this host's QEMU for the VM.
    pub qemu_pid: Option<u32>,
    /// The most that this QEMU may use.
    #[serde(default)]
    pub limits: Option<LimitsReport>,
    /// Unix socket of the guest's console.
    pub console: Option<std::path::PathBuf>,
    /// The VM's cards.
    pub cards: Vec<CardReport>,
    /// The VM's disks.
    pub disks: Vec<DiskReport>,
    /// The paths to the other host, in the order of the primary's configuration;
    /// none without protection.
    #[serde(default)]
    pub paths: Vec<PathReport>,
    /// Notable events, newest last; bounded.
    pub events: Vec<String>,
}

impl VmStatus {
    /// Whether protection was asked for and is lost, or the guest stands still.
    pub fn is_degraded(&self) -> bool {
        let lost =
            matches!(self.protection, Protection::Degraded { .. } | Protection::Unheld { .. });
        lost || self.restoring || self.disk_error.is_some() || self.lease_over.is_some()
    }

    /// Problems of the host for want of this VM's bridges and taps.
    pub fn unconnected(&self) -> impl Iterator<Item = String> {
        self.cards.iter().filter_map(|card| {
            let problem = card.problem.as_ref()?;
            Some(format!("{} is not connected, card {}: {problem}", self.name, card.mac))
        })
    }

    /// A VM of which nothing is known but what this host is to it.
    pub fn new(name: &VmName, role: Role) -> VmStatus {
        VmStatus {
            name: name.to_owned(),
            role,
            live: false,
            elsewhere: false,
            keeper_pid: None,
            generation: Generation(0),
            epoch: Epoch(0),
            group: None,
            protection: Protection::Off,
            lapse: None,
            unheard: None,
            restoring: false,
            former_backup: None,
            former_command: None,
            wanted: None,
            since_ms: None,
            disk_sync: None,
            mode: Mode::Checkpoint,
            lockstep: None,
            lag_epochs: 0,
            inbound: None,
            outbound: None,
            takeover: None,
            filling: None,
            sampled_pages: None,
            policy: Policy::default(),
            checkpoints: 0,
            pause_ms: Default::default(),
            output_wait_ms: None,
            slow: None,
            pauses_through_qmp: None,
            compression: None,
            bytes_sent: 0,
            uncommitted_ms: None,
            dirty_pages_per_second: 0,
            bandwidth_bytes_per_second: 0,
            throttle: None,
            held_frames: 0,
            held_console_bytes: None,
            vnc: None,
            guest_agent: None,
            display_not_held: false,
            disk_error: None,
            qemu_obstacle: None,
            lease_over: None,
            qemu_pid: None,
            limits: None,
            console: None,
            cards: Vec::new(),
            disks: Vec::new(),
            paths: Vec::new(),
            events: Vec::new(),
        }
    }
}

/// All that `status` shows of one host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct HostStatus {
    /// The host's name.
    pub name: HostName,
    /// The daemon's version.
    pub version: String,
    /// The installed QEMU's version.
    pub qemu_version: String,
    /// Problems of the host itself, for people.
    #[serde(default)]
    pub problems: Vec<String>,
    /// Time at which this host's certificate expires, in seconds since 1970; none without TLS.
    #[serde(default)]
    pub certificate_expires: Option<i64>,
    /// The arbiter, which decides about ownership, if there is one.
    #[serde(default)]
    pub arbiter: Option<ArbiterReport>,
    /// The hosts that it knows: its peers, and with etcd the members.
    #[serde(default)]
    pub peers: Vec<HostName>,
    /// The VMs that are to come up with this host and have not yet.
    #[serde(default)]
    pub awaited: Vec<AwaitedStart>,
    /// The VMs that this host ran when its daemon ended, and that nothing brings up again.
    #[serde(default)]
    pub lost: Vec<VmName>,
    /// Every VM that this host runs or backs up.
    pub vms: Vec<VmStatus>,
}

/// A VM that is to come up with its host, and has not yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AwaitedStart {
    /// The VM's name.
    pub name: VmName,
    /// The reason why it waits.
    pub reason: String,
    /// Time since which it waits, in milliseconds since 1970.
    pub since_ms: u64,
}

/// The arbiter, as this host sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ArbiterReport {
    /// Kind of the arbiter: `file` or `etcd`.
    pub kind: String,
    /// The reason why it cannot be used now; none if it can.
    pub problem: Option<String>,
}

/// The encoding of pages on their way to the backup, since the first synchronisation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct CompressionReport {
    /// The encoding that was asked for.
    pub asked: EncodingPlan,
    /// The methods in use now; `auto` changes them.
    pub methods: Methods,
    /// Bytes of pages for each byte sent.
    pub ratio: Option<f64>,
    /// Share of pages found in the cache, 0 to 1.
    pub hit_rate: Option<f64>,
    /// Milliseconds of CPU time for each MB of pages.
    pub cpu_ms_per_mb: Option<f64>,
    /// Throughput that the link was found to have, in bytes per second.
    pub link_bytes_per_second: Option<u64>,
    /// The counts behind these figures.
    pub counters: Counters,
}
