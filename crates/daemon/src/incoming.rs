//! Connections from other hosts.

use crate::arrivals::Arrival;
use crate::containment::of_vm;
use crate::gate::authorize::{Asker, authorize};
use crate::gate::lobby::Place;
use crate::host::{Host, failed};
use crate::repair::Wish;
use crate::snapshot::frames;
use crate::survey::Needs;
use crate::vm::{FencedVm, Vm};
use anyhow::{Context, anyhow, bail};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use tracing::{info, warn};
use understudy_disk::{FreshMirror, Mirror};
use understudy_link::link::Link;
use understudy_machine::Plan;
use understudy_protocol::VmName;
use understudy_protocol::validity::ImageRole;
use understudy_protocol::wire::Kind;
use understudy_protocol::{DiskIndex, HostName, Output};
use understudy_qemu::command::Lockstep;
use understudy_qemu::lockstep::LogRole;
use understudy_qemu::{CpuNeeds, Role};
use understudy_replication::backup::{self, Beside, Former, Launch, Outcome};
use understudy_replication::handshake::{
    FileOffer, GroupOffer, Hello, MOST_PATHS, Offer, Purpose, Welcome, answer,
};
use understudy_replication::membership::{Member, Membership};
use understudy_replication::resync::{self, Groundwork};
use understudy_report::error::{ErrorKind, HostError};
use understudy_report::events::EventKind;
use understudy_report::{Mode, TakeoverReport};
use understudy_threads::within;

/// A kernel, an initial RAM disk or the beginning of a disk: far more than any has.
const MOST_FILE_BYTES: u64 = 1 << 30;

/// Answers one connection, which has `place` until it is known whose it is.
pub fn serve(host: &Arc<Host>, stream: TcpStream, place: Place) {
    let peer = stream.peer_addr();
    let served = Link::accepted(stream, host.identity.tls.as_deref()).and_then(|link| {
        let hello = answer(&link)?;
        let _request = place.authenticated(&hello.host).inspect_err(|error| {
            link.refuse(&error.to_string());
        })?;
        let asker = Asker { host: &hello.host, known: host.is_known(&hello.host) };
        authorize(asker, &hello.purpose, |session| host.primary_of(session)).inspect_err(
            |denied| link.refuse(&format!("host {} refuses: {denied}", host.config.name)),
        )?;
        match hello.purpose.clone() {
            Purpose::Protect(offer) => take_offer(host, link, &hello, &offer),
            Purpose::Survey { vm, memory, cpu, cards } => {
                let needs = Needs { memory, cpu, cards };
                link.send_json(Kind::Welcome, &host.survey_answer(&vm, &needs))
            }
            Purpose::MayFollow { build } => answer_may_follow(host, &link, build.as_deref()),
            Purpose::Images { vm } => answer_images(host, &link, &vm),
            Purpose::Kept { membership, from } => {
                host.answer_kept(&link, &hello.host, &membership, from)
            }
            Purpose::Probe => host.answer_probe(&link, &hello.host),
            Purpose::Clock => host.answer_clock(&link),
            Purpose::Group => crate::snapshot::serve(host, &link),
            Purpose::MayRestore(question) => {
                match host.may_be_told(&question.store).and_then(|()| host.may_restore(&question)) {
                    Ok(answer) => link.send_json(Kind::Welcome, &answer),
                    Err(error) => {
                        link.refuse(&error.to_string());
                        Err(error.into())
                    }
                }
            }
            Purpose::Heartbeat { session, path } => {
                let session = session_of(host, &link, &session)?;
                link.send_json(Kind::Welcome, &Welcome::of(&host.config.name))?;
                within(&of_vm(host, &session.vm), || backup::attach_heartbeat(&session, path, link))
            }
            Purpose::Inbound { session } => {
                let session = session_of(host, &link, &session)?;
                link.send_json(Kind::Welcome, &Welcome::of(&host.config.name))?;
                within(&of_vm(host, &session.vm), || backup::attach_inbound(&session, link))
            }
            Purpose::Frames { cluster } => {
                frames::serve(&host.fabric, &host.config.name, &hello.host, &cluster, &link)
            }
            Purpose::Resume { session, path, received } => {
                let session = session_of(host, &link, &session)?;
                within(&of_vm(host, &session.vm), || {
                    backup::resume(&session, path, &link, received)
                })
            }
        }
    });
    if let Err(error) = served
        && host.lobby.may_complain()
    {
        warn!("connection from {peer:?} ended: {error:#}");
    }
}

fn answer_may_follow(host: &Host, link: &Link, build: Option<&str>) -> anyhow::Result<()> {
    let name = &host.config.name;
    match host.check_build(build) {
        Ok(()) => link.send_json(Kind::Welcome, &Welcome::of(name)),
        Err(error) => {
            link.refuse(&format!("host {name} refuses: {error}"));
            Err(error.into())
        }
    }
}

fn answer_images(host: &Host, link: &Link, vm: &VmName) -> anyhow::Result<()> {
    match host.images_answer(vm) {
        Ok(answer) => link.send_json(Kind::Welcome, &answer),
        Err(error) => {
            link.refuse(&error.to_string());
            Err(error.into())
        }
    }
}

/// The session that a further connection belongs to, which [`authorize`] has let in.
fn session_of(host: &Host, link: &Link, id: &str) -> anyhow::Result<Arc<backup::Session>> {
    host.backup_session(id).ok_or_else(|| {
        let reason = format!("session {id:?} has ended here");
        link.refuse(&reason);
        anyhow!(reason)
    })
}

impl Host {
    fn backup_session(&self, id: &str) -> Option<Arc<backup::Session>> {
        self.vms.lock().values().find_map(|vm| match vm {
            Vm::Backup(session) if session.id == id => Some(session.clone()),
            _ => None,
        })
    }

    fn primary_of(&self, session: &str) -> Option<String> {
        self.backup_session(session).map(|session| session.primary.to_string())
    }
}

fn take_offer(host: &Arc<Host>, link: Link, hello: &Hello, offer: &Offer) -> anyhow::Result<()> {
    // An arbiter that does not answer may take its time: nobody else waits for it.
    let proven = host.check_arbiter(&hello.host, offer);
    let expected = {
        let _adding = host.adding.lock();
        let expect = |()| Arrival::expect(host, &hello.host, &offer.definition);
        examine(host, offer).and(proven).map(expect)
    };
    // Its name is kept from here on: nobody waits for what the primary sends next.
    let _arrival = match expected {
        Ok(arrival) => arrival,
        Err(error) => {
            link.refuse(&format!("host {} refuses: {error}", host.config.name));
            bail!("refused {} of {}: {error}", offer.definition.name, hello.host);
        }
    };
    let directory = host.vm_directory(&offer.definition.name)?;
    let record = host.record(&offer.definition.name).map_err(|error| error.to_string());
    let groundwork = resync::examine(&host.config.name, record, offer, &directory);
    let mut welcome = Welcome { wire_version: hello.agreed(), ..Welcome::of(&host.config.name) };
    match &groundwork {
        Groundwork::Full(why) => {
            welcome.full_because = why.clone();
            match host.check_disk_room(offer, &directory) {
                Ok(note) => welcome.note = note,
                Err(error) => {
                    link.refuse(&format!("host {} refuses: {error}", host.config.name));
                    bail!("refused {} of {}: {error}", offer.definition.name, hello.host);
                }
            }
        }
        Groundwork::Resync(_, resync) => welcome.resync = Some(resync.clone()),
    }
    link.send_json(Kind::Welcome, &welcome)?;
    let scope = of_vm(host, &offer.definition.name);
    let stands_by = || stand_by(host, link.clone(), hello, offer, groundwork);
    if let Err(error) = within(&scope, stands_by) {
        link.refuse(&format!("host {} cannot stand by: {error:#}", host.config.name));
        return Err(error);
    }
    Ok(())
}

/// Everything that speaks against the offer, before anything is changed.
fn examine(host: &Host, offer: &Offer) -> Result<(), HostError> {
    let refuse = |message: String| Err(HostError::new(ErrorKind::Invalid, message));
    let definition = &offer.definition;
    if host.is_closing() {
        return refuse("it is shutting down".to_owned());
    }
    if host.arbiter.is_none() {
        return refuse("its configuration has no [arbiter]".to_owned());
    }
    if let Some(problem) = &host.kernel_problem {
        return refuse(problem.clone());
    }
    let (ours, theirs) = (host.capabilities.release(), &offer.qemu);
    if let Err(unlike) = ours.compare(theirs) {
        let [ours, theirs] = [ours.version, theirs.version];
        return refuse(format!("its QEMU is {ours}, the primary's is {theirs}: {unlike}"));
    }
    if !host.capabilities.machines.iter().any(|machine| machine.name == offer.machine_type) {
        return refuse(format!("its QEMU has no machine type {}", offer.machine_type));
    }
    if let Err(error) = host.capabilities.check_cpu(definition.cpu.as_deref()) {
        return refuse(error.to_string());
    }
    if let Err(error) = host.check_cpu_needs(&CpuNeeds::of(definition, offer.accelerator)) {
        return refuse(error.to_string());
    }
    let paths = offer.paths.len();
    if !(1..=MOST_PATHS).contains(&paths) {
        return refuse(format!("{paths} paths were offered; 1 to {MOST_PATHS} are possible"));
    }
    if usize::from(offer.path.0) >= paths {
        return refuse(format!("this is path {}; {paths} were offered", offer.path.0 + 1));
    }
    if offer.disk_bytes.len() != definition.disks.len() {
        return refuse("the offer does not name every disk's size".to_owned());
    }
    if let Some(problem) = wrong_files(&offer.files, definition.disks.len()) {
        return refuse(problem);
    }
    if let Some(problem) = definition.validate().first() {
        return refuse(format!("the offered VM's definition is wrong: {problem}"));
    }
    if offer.mode == Mode::Lockstep && offer.clock.is_none() {
        return refuse("the primary's QEMU does not record".to_owned());
    }
    if offer.mode == Mode::Lockstep {
        host.check_build(offer.qemu_build.as_deref())?;
    }
    if offer.clock.is_some() {
        host.check_lockstep(definition, offer.accelerator)?;
    }
    host.check_free(definition)?;
    host.check_older(offer)?;
    host.check_bridges(&definition.cards)?;
    host.check_memory(definition.memory.bytes())
}

/// What is wrong with the files that are to follow: they are written before anything is known of
/// them, and must not fill the disk.
fn wrong_files(files: &[FileOffer], disks: usize) -> Option<String> {
    let most = disks + 3;
    if files.len() > most {
        return Some(format!("{} files were offered; {most} are possible", files.len()));
    }
    let large = files.iter().find(|file| file.bytes > MOST_FILE_BYTES)?;
    Some(format!("a file of {} bytes was offered; {MOST_FILE_BYTES} are possible", large.bytes))
}

/// Prepares mirrors and a warm QEMU, then follows the primary.
fn stand_by(
    host: &Arc<Host>,
    link: Link,
    hello: &Hello,
    offer: &Offer,
    groundwork: Groundwork,
) -> anyhow::Result<()> {
    let directory = host.vm_directory(&offer.definition.name)?;
    let name = offer.definition.name.clone();
    let former = host.record(&name)?.map_or_else(Vec::new, |record| record.sessions);
    let resyncs = matches!(groundwork, Groundwork::Resync(..));
    let mirrors = make_mirrors(host, offer, &directory, groundwork)?;
    let definition = backup::receive_files(&link, offer, &directory, &mirrors)?;
    if resyncs {
        // The primary has noted what changed here: the copy can be taken up again.
        host.records.change(&name, |record| record.sessions = former)?;
    }
    let machine = host.launch(Plan {
        definition,
        machine_type: offer.machine_type.clone(),
        accelerator: offer.accelerator,
        run_dir: &directory,
        qemu: &host.capabilities.binary,
        agent: &host.agent,
        run_as: &host.config.run_as,
        limits: host.config.limits,
        disks: mirrors.iter().map(|mirror| mirror.disk().clone()).collect(),
        role: Role::Standby,
        lockstep: lockstep_of(offer),
        may_be_adopted: false,
        former: None,
        ram: None,
        on_event: host.event_sink(&name),
    })?;
    let plan = backup::Plan {
        id: offer.session.clone(),
        primary: hello.host.clone(),
        mode: offer.mode,
        disk_reads: offer.disk_reads,
        group: group_of(host, hello, offer)?,
        timeout: host.config.detection.peer,
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
        host.vms.lock().insert(name.clone(), Vm::Backup(session.clone()));
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
    let mut groups = host.backed_groups.lock();
    groups.retain(|group| group.strong_count() > 0);
    if place == 0 {
        let group = backup::Group::new(membership, &hello.host, timeout, Output::Held);
        groups.push(Arc::downgrade(&group));
        return Ok((group, 0));
    }
    let mut alive = groups.iter().filter_map(Weak::upgrade);
    let found = alive.find(|group| group.awaits(&membership, &hello.host, place));
    found.map(|group| (group, place)).context("the group's protection has ended meanwhile")
}

/// New mirrors, or this host's images as they are, which from now on are not what they were.
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
            let fresh = |(i, bytes): (usize, &u64)| {
                FreshMirror::create(directory, DiskIndex(i as u16), *bytes).map(Mirror::Fresh)
            };
            Ok(offer.disk_bytes.iter().enumerate().map(fresh).collect::<Result<_, _>>()?)
        }
        Groundwork::Resync(disks, _) => {
            info!(vm = %name, "only what changed of the disks will be copied");
            host.records.change(name, |record| {
                record.image.role = ImageRole::Syncing;
                record.image.generation = offer.generation;
                record.sessions.clear();
            })?;
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
            let vm = host.new_primary(machine.clone(), generation, wish.clone());
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
            host.degraded(&vm, reason, &membership.remedy());
            // Not before it is known: for a moment its protection would seem not to be wanted.
            host.show_primary(&vm);
            host.join_cluster(&machine, generation);
            // The activation says so already; the record is where it belongs.
            host.note_wish(name, wish.as_ref());
        }
        Outcome::Discarded => {
            host.vms.lock().remove(name);
            host.events.of(name).record(EventKind::StoodDown);
        }
        Outcome::Returned { reason } => {
            if let Err(error) =
                host.records.change(name, |record| record.image.role = ImageRole::Stale)
            {
                warn!(vm = %name, "{error}");
            }
            host.vms.lock().remove(name);
            host.events.of(name).record(EventKind::TakeOverFailed { reason });
        }
        Outcome::Failed { generation, reason } => {
            host.events.of(name).record(EventKind::TakeOverFailed { reason: reason.clone() });
            let reason = failed("won the VM and could not start it", &anyhow::anyhow!(reason));
            let fenced = FencedVm { name: name.to_owned(), generation, reason: reason.to_string() };
            host.vms.lock().insert(name.to_owned(), Vm::Fenced(Arc::new(fenced)));
        }
    }
}

/// How a VM came to this host, and where from.
fn came_how(former: &HostName, reason: &str, phases: TakeoverReport) -> EventKind {
    match phases.planned {
        true => EventKind::CameOver { from: former.clone(), phases },
        false => EventKind::TookOver { reason: reason.to_owned(), phases },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use understudy_replication::handshake::FileRole;

    /// A primary could announce a kernel that fills the backup's disk.
    #[test]
    fn files_that_would_fill_the_disk_are_refused() {
        let file = |bytes| FileOffer { role: FileRole::Kernel, bytes };
        assert_eq!(wrong_files(&[file(8 << 20), file(64 << 20)], 1), None);
        assert!(wrong_files(&[file(1 << 40)], 1).unwrap().contains("1099511627776 bytes"));
        let many: Vec<FileOffer> = (0..5).map(|_| file(1)).collect();
        assert!(wrong_files(&many, 1).unwrap().contains("5 files"));
    }
}
