//! The primary: checkpoints flow guest → memory, disks, network → epoch → wire.
//!
//! [`protect`] offers a VM to a backup and starts the session's threads:
//! `capture` (pause, barrier, capture, resume), `send` (encode, send), `receive`
//! (acknowledgements, which release output), `control` (the arbiter), `inbound`
//! (copies of what the guest receives) and the heartbeats. Queues between them are bounded.

mod activity;
mod capture;
mod dialler;
mod group;
mod inbound;
mod link_speed;
mod mirror;
mod outbound;
mod pace;
mod progress;
mod references;
mod send;
mod session;
mod stats;

pub use group::Group;
pub use session::Session;

use crate::arbiter::Arbiter;
use crate::channel::{Channel, Dial, Renewal};
use crate::clock;
use crate::handshake::{FileOffer, FileRole, GroupOffer, Identity, Offer, Ready, Welcome};
use crate::heartbeat::{self, Heartbeats, Pulse};
use crate::link::{Link, read_json};
use crate::lockstep::be_urgent;
use crate::lockstep::primary::{MACHINE, Recording};
use crate::machine::Machine;
use crate::paths::PathMonitor;
use crate::records::Records;
use crate::report::{DiskReads, Mode, ProtectRequest};
use crate::resync::{self, Basis};
use activity::Watch;
use anyhow::{Context, bail};
use crossbeam_channel::Receiver;
use dialler::Dialler;
use pace::Pace;
use progress::Progress;
use references::References;
use send::{Outflow, send_all};
use stats::Stats;
use std::fs::File;
use std::io::Read;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;
use tracing::{error, info};
use understudy_encoding::{Compression, EncodingPlan};
use understudy_protocol::wire::{Kind, LogProgress};
use understudy_protocol::{
    DiskIndex, Epoch, Generation, PathIndex, Policy, PrimaryEvent, PrimaryPhase, Verdict,
};
use understudy_qemu::definition::DiskFormat;

/// Holds the header of any disk format.
const DISK_HEAD_BYTES: u64 = 64 << 10;

/// What `protect` needs to know.
pub struct Plan {
    /// Who this host is.
    pub identity: Identity,
    /// The backup's host name.
    pub peer: String,
    /// The backup's addresses, one for each path.
    pub addresses: Vec<SocketAddr>,
    /// The generation at which this host owns the VM.
    pub generation: Generation,
    /// How the backup is to keep up. The wish may be another one.
    pub mode: Mode,
    /// In lockstep: where the backup gets what its guest reads.
    pub disk_reads: DiskReads,
    /// When to checkpoint.
    pub policy: Policy,
    /// How pages are encoded.
    pub encoding: EncodingPlan,
    /// The shortest silence that counts as failure.
    pub timeout: Duration,
    /// Who decides about ownership.
    pub arbiter: Arbiter,
    /// This host's QEMU.
    pub qemu_version: String,
    /// Names the session; unique.
    pub session: String,
    /// Sessions since which every change of the disks is known.
    pub sessions: Vec<String>,
    /// Where this host notes what its images are.
    pub records: Records,
    /// What the operator asked for.
    pub wish: ProtectRequest,
}

/// Offers the VM to the peer, as the member of a group at this place, and starts
/// the first synchronisation. `over` is called once, when protection has ended,
/// however it did.
pub fn protect(
    machine: Arc<Machine>,
    plan: Plan,
    (group, place): (Arc<Group>, usize),
    over: impl FnOnce(PrimaryPhase) + Send + 'static,
) -> anyhow::Result<Arc<Session>> {
    let dialler = Dialler {
        identity: plan.identity.clone(),
        peer: plan.peer.clone(),
        session: plan.session.clone(),
        addresses: plan.addresses.clone(),
    };
    let (link, path, basis) = offer(&machine, &plan, (&group, place), &dialler)?;
    let vm = &machine.definition().name;
    let paths = PathMonitor::new(vm, &plan.peer, plan.addresses.clone(), path, plan.timeout);
    let paths = Arc::new(paths);
    let data = Channel::new(link, renewal(&dialler, &paths));
    await_ready(&data, &machine, &plan.peer)?;
    let heartbeat = dialler.heartbeat(path)?;
    data.set_read_timeout(None)?;
    // Before the first change goes to the backup without being forgotten later.
    plan.records.change(&machine.definition().name, |record| {
        record.peer = Some(plan.peer.clone());
        record.sessions.push(plan.session.clone());
        record.in_lockstep = plan.mode == Mode::Lockstep;
    })?;

    let (outbox, outflow) = send::queue();
    let (inbound, copies) = inbound::queue();
    let (contests, contest_queue) = crossbeam_channel::unbounded();
    let session = Arc::new(Session {
        vm: machine.definition().name.clone(),
        peer: plan.peer,
        id: plan.session,
        basis,
        records: plan.records,
        settled: AtomicU64::new(0),
        recording: (plan.mode == Mode::Lockstep).then(|| Recording::new(&machine, plan.disk_reads)),
        references: references(&plan.encoding, plan.mode),
        mode: plan.mode,
        policy: plan.policy,
        encoding: plan.encoding,
        stats: Stats::default(),
        progress: Progress::new(),
        pace: Pace::new(vm, machine.qemu_pid(), &plan.policy),
        watch: Watch::new(&machine)?,
        output_seen: Mutex::default(),
        outbox,
        inbound,
        outbound: outbound::Outbound::new(machine.ports().len()),
        disk_epoch: AtomicU64::new(0),
        data,
        heartbeats: Heartbeats::new(plan.addresses.len()),
        paths,
        place,
        stood_down: AtomicBool::new(false),
        diverged: AtomicBool::new(false),
        arbiter: plan.arbiter,
        contests,
        core: group.core.clone(),
        group,
        machine,
    });
    session.group.join(&session)?;
    if session.recording.is_some() {
        session.group.follow_log();
    }
    start_heartbeats(&session, (path, heartbeat), &dialler)?;
    start_threads(&session, outflow, contest_queue, (copies, dialler), over)?;
    Ok(session)
}

/// The handshake on the data connection, until the backup starts its QEMU.
fn offer(
    machine: &Machine,
    plan: &Plan,
    group: (&Group, usize),
    dialler: &Dialler,
) -> anyhow::Result<(Link, PathIndex, Basis)> {
    let definition = machine.definition();
    let files = start_files(machine)?;
    let offer = Offer {
        session: plan.session.clone(),
        definition: definition.clone(),
        machine_type: machine.machine_type().to_owned(),
        accelerator: machine.accelerator(),
        qemu_version: plan.qemu_version.clone(),
        qemu_build: machine.qemu_build(),
        mode: plan.mode,
        disk_reads: plan.disk_reads,
        clock: machine.lockstep().map(|lockstep| lockstep.clock.clone()),
        generation: plan.generation,
        group: group
            .0
            .is_shared()
            .then(|| GroupOffer { membership: group.0.membership.clone(), place: group.1 }),
        disk_bytes: machine.disks().iter().map(|disk| disk.export_bytes()).collect(),
        sessions: plan.sessions.clone(),
        files: files.iter().map(|(offer, _)| offer.clone()).collect(),
        paths: plan.addresses.clone(),
        path: PathIndex(0),
        wish: Some(plan.wish.clone()),
    };
    let (link, path) = dialler.offer(offer)?;
    let welcome: Welcome = link.expect_json(Kind::Welcome)?;
    if welcome.host != plan.peer {
        let reason = format!(
            "the host at {} is {:?}, not {:?}: correct [peers] in this host's configuration",
            plan.addresses[usize::from(path.0)],
            welcome.host,
            plan.peer
        );
        link.refuse(&reason);
        bail!(reason);
    }
    let basis = match &welcome.resync {
        None => Basis::Full(welcome.full_because),
        Some(resync) => {
            // On disk before the backup changes anything: it may ask again.
            resync::merge(machine, &plan.sessions, resync)?;
            Basis::Changes(resync.session.clone())
        }
    };
    for (offer, path) in &files {
        send_file(&link, path, offer.bytes)?;
    }
    link.send_signal(Kind::Prepare, Epoch(0))?;
    Ok((link, path, basis))
}

/// How the session's data gets from one path to the next.
fn renewal(dialler: &Dialler, paths: &Arc<PathMonitor>) -> Renewal {
    if !paths.are_several() {
        return Renewal::Never;
    }
    let (dialler, paths) = (dialler.clone(), paths.clone());
    let dial: Dial = Box::new(move |received| {
        let mut result = Ok(None);
        for path in paths.candidates() {
            match dialler.resume(path, received) {
                Ok(resumption) => {
                    paths.use_path(path);
                    return Ok(Some(resumption));
                }
                Err(error) => result = Err(error),
            }
        }
        result
    });
    Renewal::Dial(dial)
}

/// Waits until the backup's QEMU stands by with the same memory as this one.
fn await_ready(data: &Arc<Channel>, machine: &Machine, peer: &str) -> anyhow::Result<()> {
    let ready: Ready = read_json(&data.receive()?, Kind::Ready)?;
    let ours: Vec<(String, u64)> =
        machine.blocks().iter().map(|block| (block.name().to_owned(), block.bytes())).collect();
    if ready.blocks != ours {
        let reason = format!(
            "QEMU's RAM blocks differ between the hosts: {ours:?} here, {:?} on {peer}",
            ready.blocks
        );
        data.refuse(&reason);
        bail!(reason);
    }
    Ok(())
}

/// What the backup's QEMU reads when it starts, before the disks are copied.
fn start_files(machine: &Machine) -> anyhow::Result<Vec<(FileOffer, PathBuf)>> {
    let definition = machine.definition();
    let boot = [(FileRole::Kernel, &definition.kernel), (FileRole::Initrd, &definition.initrd)];
    let boot = boot.into_iter().filter_map(|(role, path)| Some((role, path.clone()?, u64::MAX)));
    let disks = definition.disks.iter().enumerate();
    let heads = disks.filter(|(_, disk)| disk.format == DiskFormat::Qcow2).map(|(i, disk)| {
        (FileRole::DiskHead(DiskIndex(i as u16)), disk.path.clone(), DISK_HEAD_BYTES)
    });
    let describe = |(role, path, most): (FileRole, PathBuf, u64)| {
        let metadata = std::fs::metadata(&path)
            .with_context(|| format!("cannot read {}, which the VM needs", path.display()))?;
        Ok((FileOffer { role, bytes: metadata.len().min(most) }, path))
    };
    boot.chain(heads).map(describe).collect()
}

fn send_file(link: &Link, path: &Path, bytes: u64) -> anyhow::Result<()> {
    let context = || format!("cannot send {} to the backup", path.display());
    let mut file = File::open(path).with_context(context)?.take(bytes);
    let mut piece = vec![0; 1 << 20];
    loop {
        let length = file.read(&mut piece).with_context(context)?;
        if length == 0 {
            return Ok(());
        }
        link.send_parts(Kind::File, Epoch(0), &[&piece[..length]]).with_context(context)?;
    }
}

/// `first` is the path that is connected already.
fn start_heartbeats(
    session: &Arc<Session>,
    first: (PathIndex, Link),
    dialler: &Dialler,
) -> anyhow::Result<()> {
    let (in_use, link) = first;
    heartbeat::start(&session.vm, session)?;
    for path in session.paths.indices() {
        let dialler = dialler.clone();
        let first = (path == in_use).then(|| link.clone());
        heartbeat::keep(&session.vm, session, path, first, move |path| dialler.heartbeat(path))?;
    }
    Ok(())
}

fn start_threads(
    session: &Arc<Session>,
    outflow: Outflow,
    contests: Receiver<Generation>,
    (copies, dialler): (inbound::Copies, Dialler),
    over: impl FnOnce(PrimaryPhase) + Send + 'static,
) -> anyhow::Result<()> {
    let spawn = |role: &str, body: Box<dyn FnOnce(Arc<Session>) + Send>| {
        let session = session.clone();
        thread::Builder::new()
            .name(format!("{role}-{}", session.vm))
            .spawn(move || body(session))
            .map(drop)
            .context("cannot start a thread")
    };
    spawn("send", Box::new(move |session| run_send(&session, &outflow)))?;
    spawn("receive", Box::new(|session| run_receive(&session)))?;
    spawn("settle", Box::new(|session| mirror::run_rounds(&session)))?;
    spawn("control", Box::new(move |session| run_control(&session, &contests)))?;
    if session.recording.is_none() {
        spawn("inbound", Box::new(move |session| inbound::run(&session, &copies, &dialler)))?;
    }
    spawn("capture", Box::new(move |session| run_capture(&session, over)))
}

fn run_send(session: &Session, outflow: &Outflow) {
    if let Err(error) = send_all(outflow, session) {
        session.lost_aside(format!("cannot send to the backup: {error}"));
    }
}

/// Without compression pages are sent as they are; in lockstep there are few.
fn references(plan: &EncodingPlan, mode: Mode) -> Option<Arc<References>> {
    let refers = plan.compression != Compression::None && mode == Mode::Checkpoint;
    refers.then(|| Arc::new(References::new()))
}

fn run_receive(session: &Session) {
    let reason = loop {
        let message = match session.data.receive() {
            Ok(message) => message,
            Err(error) => break format!("{error:#}"),
        };
        match message.header.kind {
            Kind::Acknowledge => {
                let epoch = message.header.epoch;
                if let Some(recording) = &session.recording {
                    recording.acknowledged(epoch);
                    // Output waits for this thread from here on, and for nothing else.
                    if epoch == MACHINE {
                        be_urgent();
                    }
                }
                session.event(PrimaryEvent::Acknowledged(epoch));
            }
            Kind::Progress => match (LogProgress::decode(&message), &session.recording) {
                (Ok(progress), Some(recording)) => {
                    if let Some(share) = recording.progressed(progress) {
                        session.pace.limit(share);
                    }
                    if recording.is_blocked() {
                        session.group.ring();
                    }
                }
                (Err(error), _) => break error.to_string(),
                (Ok(_), None) => break "the backup sent Progress, but follows no log".to_owned(),
            },
            Kind::Settled => {
                session.settled.fetch_max(message.header.epoch.0, Ordering::AcqRel);
                if let Some(references) = &session.references {
                    references.settle(message.header.epoch);
                }
            }
            Kind::Written => {
                let disks = session.machine.disks().len();
                let told = match &session.recording {
                    Some(recording) => recording.writes.told(&message, disks),
                    None => Err(anyhow::anyhow!("the backup sent Written, but follows no log")),
                };
                if let Err(error) = told {
                    break format!("{error:#}");
                }
            }
            Kind::StoodDown => return session.group.stood_down(session),
            Kind::Live => {
                let generation = Generation(message.header.epoch.0);
                session.event(PrimaryEvent::LiveElsewhere(generation));
            }
            Kind::Diverged => {
                session.diverged.store(true, Ordering::Release);
                break String::from_utf8_lossy(&message.payload).into_owned();
            }
            Kind::Refuse => break String::from_utf8_lossy(&message.payload).into_owned(),
            other => break format!("unexpected {other:?} message from the backup"),
        }
    };
    session.event(PrimaryEvent::PeerGone(reason));
}

/// Asks the arbiter, which may take its time, and samples the bandwidth.
fn run_control(session: &Session, contests: &Receiver<Generation>) {
    while !session.is_over() {
        session.stats.sample();
        if let Ok(from) = contests.recv_timeout(Duration::from_millis(250)) {
            let verdict = session.membership().acquire(&session.arbiter, from);
            info!(vm = session.vm, "the arbiter's verdict: {verdict:?}");
            if let Verdict::Unreachable(reason) = &verdict {
                error!(vm = session.vm, "output stays held: {reason}");
            }
            session.event(PrimaryEvent::Verdict(verdict));
        }
    }
}

fn run_capture(session: &Arc<Session>, over: impl FnOnce(PrimaryPhase)) {
    let captured = capture::run(session);
    session.pace.end();
    if let Err(error) = captured {
        let reason = format!("cannot take a checkpoint: {error:#}");
        let first = session.group.break_up();
        if !first {
            info!(vm = session.vm, "waiting for the end of the group's protection: {reason}");
        } else if session.is_over() {
            info!(vm = session.vm, "protection ended during a checkpoint: {reason}");
        } else if powered_off(&session.machine) {
            // Not a failure: the host ends protection, then the VM.
            info!(vm = session.vm, "the guest powered off: {reason}");
        } else if session.machine.is_alive() {
            error!(vm = session.vm, "{reason}");
            session.event(PrimaryEvent::PeerGone(reason));
        } else {
            session.event(PrimaryEvent::GuestDied(session.machine.last_words()));
        }
    }
    let phase = loop {
        let ended = session.wait_for_phase(Duration::from_secs(3600), |phase| {
            matches!(phase, PrimaryPhase::Alone(_) | PrimaryPhase::Halted(_))
        });
        if let Ok(phase) = ended {
            break phase;
        }
    };
    if matches!(phase, PrimaryPhase::Alone(_)) && !session.machine.is_powered_off() {
        // A checkpoint that failed may have left the guest paused.
        if let Err(error) = session.machine.ensure_running() {
            error!(vm = session.vm, "cannot resume the guest: {error:#}");
        }
    }
    over(phase);
}

/// QEMU's refusal to resume can be seen before its event that says why.
fn powered_off(machine: &Machine) -> bool {
    let deadline = clock::now() + Duration::from_millis(300);
    while machine.is_alive() && !machine.is_powered_off() && clock::now() < deadline {
        thread::sleep(Duration::from_millis(5));
    }
    machine.is_powered_off()
}

impl Pulse for Session {
    fn paths(&self) -> &PathMonitor {
        &self.paths
    }
    fn heartbeats(&self) -> &Heartbeats {
        &self.heartbeats
    }
    fn leave_path(&self) {
        self.data.abandon();
    }
    fn heard(&self) {
        self.event(PrimaryEvent::Heard);
    }
    fn lost(&self, reason: String) {
        self.lost_aside(reason);
    }
    fn tick(&self) {
        self.event(PrimaryEvent::Tick);
    }
    fn is_over(&self) -> bool {
        Session::is_over(self)
    }
}
