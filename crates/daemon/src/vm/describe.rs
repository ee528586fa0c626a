//! Words of `status` on a VM, by its machine and its session.

use understudy_machine::Machine;
use understudy_protocol::HostName;
use understudy_protocol::{BackupPhase, Output, PrimaryPhase};
use understudy_replication::resync::{self, Basis};
use understudy_replication::{backup, primary};
use understudy_report::{
    CardReport, CompressionReport, DiskReport, DiskSync, LockstepReport, Mode, Protection, Role,
    VmStatus,
};

pub(super) fn describe_session(status: &mut VmStatus, session: &primary::Session) {
    let (generation, epoch, in_flight) = session.position();
    let phase = session.phase();
    status.generation = generation;
    if phase.has_lost() {
        (status.role, status.live) = (Role::Fenced, false);
        status.elsewhere = session.is_elsewhere();
    }
    status.group = session.membership().name.clone();
    status.epoch = epoch;
    status.policy = session.policy;
    status.mode = session.mode();
    status.checkpoints = session.stats.checkpoints();
    status.pause_ms = session.stats.pause();
    status.output_wait_ms = session.stats.output_wait();
    status.bytes_sent = session.stats.bytes_sent();
    status.compression = Some(describe_compression(session));
    let (bytes, elapsed) = session.progress.disks();
    let full_because = match &session.basis {
        Basis::Full(why) => Some(why.clone()),
        Basis::Changes(_) => None,
    };
    status.disk_sync = Some(DiskSync {
        full_because,
        bytes,
        seconds: elapsed.as_secs_f64(),
        differing_bytes: resync::differing_bytes(&session.machine()),
    });
    if !session.is_over() {
        status.lag_epochs = in_flight;
        let console = session.console.as_ref();
        status.held_console_bytes = console.map(|console| console.held_bytes() as u64);
        status.inbound = Some(session.inbound.report());
        status.outbound = Some(session.outbound.report());
        status.throttle = Some(session.stats.throttle());
        status.lockstep = lockstep_report(session, status.held_frames);
        status.paths = session.paths.report();
        status.bandwidth_bytes_per_second = session.stats.bandwidth();
        status.dirty_pages_per_second = session.stats.dirty_rate();
        // With a log there are no checkpoints by which to tell.
        let checkpoints = status.mode == Mode::Checkpoint;
        status.uncommitted_ms = session.stats.uncommitted_ms().filter(|_| checkpoints);
    }
    let peer = session.peer.clone();
    status.protection = match phase {
        PrimaryPhase::Syncing => {
            let (done_bytes, total_bytes) = session.progress.bytes();
            let remaining_seconds = session.progress.remaining_seconds();
            Protection::Syncing { peer, done_bytes, total_bytes, remaining_seconds }
        }
        PrimaryPhase::StandingDown => Protection::Degraded {
            reason: format!("protection is being ended: host {peer} forgets the VM"),
        },
        PrimaryPhase::Protected | PrimaryPhase::HandingOver => {
            let obstacle = session.group().obstacle();
            let unfit = obstacle.map(|obstacle| {
                format!("could not take over now: {obstacle}; output still waits for it")
            });
            status.lapse = unfit.or_else(|| session.group().delay());
            match &status.lapse {
                None => followed(peer, session.output()),
                Some(lapse) => {
                    let back = "and protection is back as soon as that ends";
                    Protection::Degraded {
                        reason: format!("host {peer} follows, and {lapse}, {back}"),
                    }
                }
            }
        }
        PrimaryPhase::Contesting(reason) => Protection::Degraded {
            reason: format!("{reason}; output is held until the arbiter decides"),
        },
        PrimaryPhase::Frozen(reason) => Protection::Degraded {
            reason: format!(
                "{reason}; this copy stands still, and is kept until that host runs the VM or hands \
                 it back"
            ),
        },
        PrimaryPhase::Alone(None) => Protection::Off,
        PrimaryPhase::Alone(Some(reason)) | PrimaryPhase::Halted(reason) => {
            Protection::Degraded { reason }
        }
    };
}

fn lockstep_report(session: &primary::Session, held_frames: u64) -> Option<LockstepReport> {
    let machine = session.machine();
    Some(session.recording()?.report(machine.log()?, held_frames))
}

/// A backup follows.
fn followed(peer: HostName, output: Output) -> Protection {
    match output {
        Output::Held => Protection::Protected { peer },
        Output::Unheld => Protection::Unheld { peer },
    }
}

fn describe_compression(session: &primary::Session) -> CompressionReport {
    let (counters, methods) = session.stats.encoding();
    let seconds_per_byte = session.stats.link(|link| link.seconds_per_byte());
    CompressionReport {
        asked: session.encoding,
        methods,
        ratio: counters.ratio(),
        hit_rate: counters.hit_rate(),
        cpu_ms_per_mb: counters.cpu_ms_per_mb(),
        link_bytes_per_second: seconds_per_byte
            .filter(|&seconds| seconds > 0.0)
            .map(|seconds| (1.0 / seconds) as u64),
        counters,
    }
}

/// Status that a machine tells, whoever runs it.
pub(super) fn machine_status(machine: &Machine, role: Role, live: bool) -> VmStatus {
    let definition = machine.definition();
    let ports = machine.ports();
    let cards = definition.cards.iter().zip(ports).map(|(card, port)| CardReport {
        mac: card.mac.to_string(),
        tap: port.tap_name().to_owned(),
        bridge: card.bridge.clone(),
        problem: None,
    });
    VmStatus {
        live,
        policy: definition.policy.unwrap_or_default(),
        slow: machine.slowness(),
        pauses_through_qmp: machine.pause_obstacle().map(str::to_owned),
        held_frames: ports.iter().map(|port| port.held_frames() as u64).sum(),
        display_not_held: definition.has_display(),
        disk_error: machine.disk_error(),
        qemu_pid: Some(machine.qemu_pid()),
        limits: Some(machine.limits()),
        console: machine.local_sockets().console.clone(),
        vnc: machine.local_sockets().vnc.clone(),
        guest_agent: machine.local_sockets().guest_agent.clone(),
        cards: cards.collect(),
        disks: machine.disks().iter().map(|disk| DiskReport { path: disk.path() }).collect(),
        ..VmStatus::new(&definition.name, role)
    }
}

pub(super) fn backup_status(session: &backup::Session) -> VmStatus {
    let mut status = machine_status(&session.machine(), Role::Backup, false);
    status.mode = session.mode();
    (status.generation, status.epoch) = session.position();
    status.paths = session.paths.report();
    status.lockstep = session.following().map(|following| following.report());
    status.inbound = Some(session.inbound());
    status.outbound = Some(session.outbound());
    status.group = session.membership().name.clone();
    let peer = session.primary.clone();
    status.protection = match session.phase() {
        BackupPhase::Syncing => Protection::Syncing {
            peer,
            done_bytes: session.bytes_received(),
            total_bytes: session.bytes_received(),
            remaining_seconds: None,
        },
        BackupPhase::Live => Protection::Degraded {
            reason: format!("won the VM from {peer}, and has not started it yet"),
        },
        BackupPhase::Discarded => Protection::Degraded {
            reason: format!("forgets {peer}'s VM, and takes it over no more"),
        },
        BackupPhase::HandingBack(reason) => Protection::Degraded {
            reason: format!(
                "won the VM and could not start it: {reason}; handed back to {peer} as soon as the \
                 arbiter answers"
            ),
        },
        BackupPhase::Contesting(reason) => {
            let why = session.obstacle().map_or_else(String::new, |why| format!(" ({why})"));
            Protection::Degraded {
                reason: format!(
                    "{reason}; waiting for the arbiter{why}; if {peer} owns the VM meanwhile, this \
                     host lets go of it as soon as {peer} can be asked"
                ),
            }
        }
        BackupPhase::Standing => match session.obstacle() {
            None => followed(peer, session.output()),
            Some(obstacle) => Protection::Degraded {
                reason: format!("this host could not take over now: {obstacle}"),
            },
        },
    };
    status
}
