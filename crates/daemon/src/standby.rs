//! Backups: what this host prepares to follow a primary, and what becomes of it.

use crate::host::{Host, failed};
use crate::repair::Wish;
use crate::vm::{FencedVm, Vm};
use anyhow::{Context, bail};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tracing::{error, info, warn};
use understudy_disk::{FreshMirror, Mirror};
use understudy_link::link::Link;
use understudy_machine::Plan;
use understudy_protocol::heartbeat_interval;
use understudy_protocol::wire::LEAST_WIRE_VERSION;
use understudy_protocol::{DiskIndex, HostName, Output, VmName};
use understudy_qemu::Role;
use understudy_qemu::command::Lockstep;
use understudy_qemu::lockstep::LogRole;
use understudy_replication::backup::{self, Beside, Former, Launch, Outcome};
use understudy_replication::handshake::{ExportBytes, GroupOffer, Hello, Offer};
use understudy_replication::membership::{Member, Membership};
use understudy_replication::resync::{self, Groundwork};
use understudy_report::events::EventKind;
use understudy_report::{Mode, TakeoverReport};

/// Prepares mirrors and a warm QEMU, then follows the primary.
pub(crate) fn begin(
    host: &Arc<Host>,
    link: Link,
    hello: &Hello,
    offer: &Offer,
    groundwork: Groundwork,
) -> anyhow::Result<()> {
    let directory = host.vm_directory(&offer.definition.name)?;
    let name = offer.definition.name.clone();
    let resync = groundwork.session().map(str::to_owned);
    let mirrors = make_mirrors(host, offer, &directory, groundwork)?;
    let definition = backup::receive_files(&link, offer, &directory, &mirrors)?;
    if let Some(session) = resync {
        resync::note_merged(&host.records, &name, session)?;
    }
    let machine = host.launch(Plan {
        definition,
        machine_type: offer.machine_type.clone(),
        accelerator: offer.accelerator,
        run_dir: &directory,
        qemu: &host.capabilities.binary,
        agent: host.agent.path(),
        run_as: &host.config.run_as,
        limits: host.config.limits,
        disks: mirrors.iter().map(|mirror| mirror.disk().clone()).collect(),
        role: Role::Standby,
        lockstep: lockstep_of(offer),
        may_be_adopted: host.keeps.is_some(),
        former: None,
        ram: None,
        on_event: host.event_sink(&name),
    })?;
    let plan = backup::Plan {
        id: offer.session.clone(),
        primary: hello.host.clone(),
        version: hello.agreed().unwrap_or(LEAST_WIRE_VERSION),
        mode: offer.mode,
        disk_reads: offer.disk_reads,
        group: group_of(host, hello, offer)?,
        timeout: host.config.detection.peer,
        heartbeat_interval: heartbeat_interval(
            host.config.detection.peer,
            offer.patience_ms.map(Duration::from_millis),
        ),
        arbiter: host.arbiter.clone().expect("examined before"),
        records: host.records.clone(),
        addresses: offer.paths.clone(),
        path: offer.path,
        directory: directory.clone(),
        store_keys: host.config.store_keys.clone(),
        stores: host.config.stores.clone(),
        launch: launcher(host, directory),
        former: asking_former(host, &name, &hello.host),
        wish: offer.wish.clone(),
        events: host.events.of(&name),
    };
    let weak = Arc::downgrade(host);
    let membership = plan.group.0.membership.clone();
    let (vm, former) = (name.clone(), hello.host.clone());
    let over = move |outcome| {
        if let Some(host) = weak.upgrade() {
            end(&host, (&vm, &former), &membership, outcome);
        }
    };
    // Registered before the primary hears that it may connect its heartbeat.
    backup::accept(link, plan, machine, mirrors, over, |session| {
        host.vms.put(&name, Vm::Backup(session.clone()));
        // It may have begun to end since it was asked.
        if host.is_closing() {
            session.end_soon();
        }
    })?;
    host.meters.begin(&name);
    host.events.of(&name).record(EventKind::StandingBy { primary: hello.host.clone() });
    Ok(())
}

/// Starts a standby's QEMU for the other way of keeping up.
fn launcher(host: &Arc<Host>, directory: PathBuf) -> Launch {
    let host = Arc::downgrade(host);
    Box::new(move |former, wanted| {
        let host = host.upgrade().context("this host is shutting down")?;
        let role = match wanted.mode {
            Mode::Lockstep => {
                host.check_build(wanted.qemu_build.as_deref())?;
                host.check_mode(former, wanted.mode)?;
                LogRole::Replay
            }
            Mode::Checkpoint => LogRole::Record,
        };
        let lockstep = Lockstep { role, clock: wanted.clock.clone() };
        let (machine, adopted) = host.launch_beside(former, &directory, lockstep)?;
        let (weak, next, directory) = (Arc::downgrade(&host), machine.clone(), directory.clone());
        let adopt = move || {
            if let Some(host) = weak.upgrade() {
                adopted.set(&host, &next, &directory);
            }
        };
        Ok(Beside { machine, adopt: Box::new(adopt) })
    })
}

/// Asks the primary of a session who owns the VM, once it is silent.
fn asking_former(host: &Arc<Host>, vm: &VmName, primary: &HostName) -> Former {
    let (host, vm, primary) = (Arc::downgrade(host), vm.to_owned(), primary.to_owned());
    Box::new(move || host.upgrade()?.owner_by_its_own_word(&primary, &vm))
}

/// The standby of a QEMU that counts instructions must do so too, else it could not load its
/// state.
fn lockstep_of(offer: &Offer) -> Option<Lockstep> {
    let role = match offer.mode {
        Mode::Lockstep => LogRole::Replay,
        Mode::Checkpoint => LogRole::Record,
    };
    offer.clock.clone().map(|clock| Lockstep { role, clock })
}

/// The group that the VM is offered for, and its place there. The first member's
/// offer makes it.
fn group_of(
    host: &Host,
    hello: &Hello,
    offer: &Offer,
) -> anyhow::Result<(Arc<backup::Group>, usize)> {
    let timeout = host.config.detection.peer;
    let Some(GroupOffer { membership, place }) = offer.group.clone() else {
        let membership = Membership::of_one(&offer.definition.name, offer.generation);
        let output = offer.wish.as_ref().map_or(Output::Held, |wish| wish.output);
        return Ok((backup::Group::new(membership, &hello.host, timeout, output), 0));
    };
    let own = Member { vm: offer.definition.name.clone(), generation: offer.generation };
    if membership.members.get(place) != Some(&own) {
        bail!("the offer's group does not have {} in its place", own.vm);
    }
    if place == 0 {
        let group = backup::Group::new(membership, &hello.host, timeout, Output::Held);
        host.vms.backed_groups(Some(&group));
        return Ok((group, 0));
    }
    let mut alive = host.vms.backed_groups(None).into_iter();
    let found = alive.find(|group| group.awaits(&membership, &hello.host, place));
    found.map(|group| (group, place)).context("the group's protection has ended meanwhile")
}

/// Makes new mirrors, or takes this host's images as they are, which from now on are not what they
/// were.
fn make_mirrors(
    host: &Host,
    offer: &Offer,
    directory: &Path,
    groundwork: Groundwork,
) -> anyhow::Result<Vec<Mirror>> {
    let name = &offer.definition.name;
    match groundwork {
        Groundwork::Full(why) => {
            info!(vm = %name, "all of the disks will be copied: {why}");
            let fresh = |(i, &bytes): (usize, &ExportBytes)| {
                let mirror = FreshMirror::create(directory, DiskIndex(i as u16), bytes.into());
                mirror.map(Mirror::Fresh)
            };
            Ok(offer.disk_bytes.iter().enumerate().map(fresh).collect::<Result<_, _>>()?)
        }
        Groundwork::Resync(disks, _) => {
            info!(vm = %name, "only what changed of the disks will be copied");
            host.records.note_syncing(name, offer.generation)?;
            Ok(disks)
        }
    }
}

/// The session ended: the VM lives here, or this host has nothing to do with it.
fn end(
    host: &Arc<Host>,
    (name, former): (&VmName, &HostName),
    membership: &Membership,
    outcome: Outcome,
) {
    match outcome {
        Outcome::Live { machine, wish, generation, reason, takeover } => {
            let wish = wish.map(|request| Wish { request, group: membership.group() });
            let vm = host.new_primary(machine.clone(), generation, wish);
            fail::fail_point!("note-take-over");
            vm.took_over(takeover);
            let (event, meters) = (came_how(former, &reason, takeover), host.meters.of(name));
            vm.events.record(event);
            let meter = if takeover.planned { &meters.moves } else { &meters.outages };
            meter.observe(takeover.outage_ms / 1e3);
            let reason = match takeover.planned {
                true => format!("came over from {former} as planned"),
                false => format!("took over: {reason}"),
            };
            host.begin_degraded(&vm, reason, &membership.remedy());
            // Not before it is known: for a moment its protection would seem not to be wanted.
            host.show_primary(&vm);
            host.join_cluster(&machine, generation);
            // The activation says so already; the record is where it belongs.
            host.note_wish(&vm);
            if let Err(error) = machine.settle_tpm() {
                error!(vm = %name, "its next start may go back to its TPM's former state: {error:#}");
            }
            if let Some(Vm::Fenced(_)) = host.vms.get(&membership.leader().vm) {
                go_on_without_leader(host, membership);
            }
        }
        Outcome::Discarded => {
            host.vms.remove(name);
            host.events.of(name).record(EventKind::StoodDown);
        }
        Outcome::Returned { reason } => {
            if let Err(error) = host.records.note_returned(name) {
                warn!(vm = %name, "{error}");
            }
            host.vms.remove(name);
            host.events.of(name).record(EventKind::TakeOverFailed { reason });
        }
        Outcome::Failed { generation, reason } => {
            host.events.of(name).record(EventKind::TakeOverFailed { reason: reason.clone() });
            let reason = failed("won the VM and could not start it", &anyhow::anyhow!(reason));
            let (name_here, reason) = (name.to_owned(), reason.to_string());
            let fenced = FencedVm { name: name_here, generation, reason, elsewhere: false };
            host.vms.put(name, Vm::Fenced(Arc::new(fenced)));
            if *name == membership.leader().vm {
                go_on_without_leader(host, membership);
            }
        }
    }
}

/// The leader could not be started. Its fellows that run here, or will in a moment, would wait for good for it to protect
/// their group.
fn go_on_without_leader(host: &Host, membership: &Membership) {
    if let Some(group) = membership.group() {
        host.dissolve(&group, &membership.leader().vm, "could not be started");
    }
}

/// Event that tells how a VM came to this host, and where from.
fn came_how(former: &HostName, reason: &str, phases: TakeoverReport) -> EventKind {
    match phases.planned {
        true => EventKind::CameOver { from: former.clone(), phases },
        false => EventKind::TookOver { reason: reason.to_owned(), phases },
    }
}
