//! The primary: checkpoints flow guest → memory, disks, network → epoch → wire.
//!
//! [`protect`] offers a VM to a backup and starts the session's threads:
//! `capture` (pause, barrier, capture, resume), `send` (encode, send), `receive`
//! (acknowledgements, which release output), `watch` (guests that hang, the arbiter), `settle`
//! (changes that the backup's disks have), `inbound` (copies of what the guest receives) and
//! `heart`. Queues between them are bounded.

mod activity;
mod awaited;
mod capture;
mod dialler;
mod due;
mod epoch_room;
mod group;
mod hang;
mod headway;
mod inbound;
mod keep;
mod link_speed;
mod medium;
mod mirror;
mod mode;
mod offer;
mod outbound;
pub(crate) mod pace;
mod present;
mod progress;
mod receive;
mod references;
mod send;
mod session;
mod stance;
mod stats;
mod tell;
mod turn;
mod watch;

pub use epoch_room::EPOCH_DISK_BYTES;
pub use group::CONDEMNED;
pub use group::Group;
pub use offer::used_bytes;
pub use session::Session;
pub use stance::Stance;
pub use turn::Next;
use understudy_protocol::{HostName, heartbeat_interval};
use understudy_threads::{Mutex, Waitable, spawn};

/// Hears which backup has not been able to take over for long, why, and for how many times as long as that takes. It is
/// called under the state machine's lock.
pub type TellSick = Box<dyn Fn(&HostName, &str, u32) + Send + Sync>;

use crate::clock;
use crate::hand_back::AskWinner;
use crate::handshake::{ClusterOffer, Identity};
use crate::heartbeat::{self, Dial, Heartbeats};
use crate::lockstep::primary::{Recording, release};
use crate::paths::PathMonitor;
use crate::records::Records;
use crate::sessions::{SessionName, Sessions};
use activity::Watch;
use anyhow::Context;
use crossbeam_channel::Receiver;
use dialler::Dialler;
use offer::{Taken, await_ready, offer};
use present::Present;
use progress::Progress;
use references::References;
use send::{Outflow, send_all};
use stats::Stats;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::thread;
use std::time::Duration;
use tracing::{error, info, warn};
use understudy_arbiter::Arbiter;
use understudy_disk::Rounds;
use understudy_encoding::{Compression, EncodingPlan};
use understudy_link::channel::Channel;
use understudy_machine::Machine;
use understudy_protocol::{Generation, Policy, PrimaryPhase};
use understudy_qemu::Release;
use understudy_report::events::VmEvents;
use understudy_report::meters::Meters;
use understudy_report::{DiskReads, Mode, ProtectRequest};
use understudy_session::primary::{Event, MACHINE};

/// Silences that are failures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Detection {
    /// The shortest silence after which a peer is suspected.
    pub peer: Duration,
    /// The longest silence of the QEMU of a protected VM before its backup takes over.
    pub qemu: Duration,
    /// The longest time for which nothing may move of an epoch that the backup has not
    /// acknowledged.
    pub epoch: Duration,
}

impl Detection {
    /// The shortest time that a heart and what it looks at count with.
    pub fn patience(&self) -> Duration {
        self.peer.min(self.epoch)
    }
}

/// The plan of a session, as `protect` needs it.
pub struct Plan {
    /// Identity of this host.
    pub identity: Identity,
    /// The backup's host name.
    pub peer: HostName,
    /// The backup's addresses, one for each path.
    pub addresses: Vec<SocketAddr>,
    /// The cluster of others that the VM is a member of.
    pub cluster: Option<ClusterOffer>,
    /// The generation at which this host owns the VM.
    pub generation: Generation,
    /// Mode in which the backup is to keep up. The wish may be another one.
    pub mode: Mode,
    /// Source, in lockstep, from which the backup gets what its guest reads.
    pub disk_reads: DiskReads,
    /// Whether what the guest says on its console waits for its commit, too.
    pub hold_console: bool,
    /// Policy of when to checkpoint.
    pub policy: Policy,
    /// Encoding of pages.
    pub encoding: EncodingPlan,
    /// Silences that are failures.
    pub detection: Detection,
    /// Arbiter of ownership.
    pub arbiter: Arbiter,
    /// This host's QEMU.
    pub qemu: Release,
    /// Names the session; unique.
    pub session: SessionName,
    /// Sessions since which every change of the disks is known.
    pub sessions: Sessions,
    /// Asks whoever has won the VM, while its guest is kept here.
    pub ask_winner: AskWinner,
    /// Hears that the backup has not been able to take over for long.
    pub tell_sick: TellSick,
    /// Where this host notes what its images are.
    pub records: Records,
    /// Request of the operator.
    pub wish: ProtectRequest,
    /// Meters to which the session's measurements are added.
    pub meters: Meters,
    /// Events, to which what happens to the VM is told.
    pub events: VmEvents,
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
        vm: machine.definition().name.clone(),
        peer: plan.peer.clone(),
        session: plan.session.to_string(),
        addresses: plan.addresses.clone(),
    };
    let Taken { link, path, basis, version, patience } =
        offer(&machine, &plan, (&group, place), &dialler)?;
    let vm = &machine.definition().name;
    let paths = PathMonitor::new(
        &plan.events,
        &plan.peer,
        plan.addresses.clone(),
        path,
        plan.detection.peer,
    );
    let paths = Arc::new(paths);
    let data = Channel::new(link, dialler.renewal(&paths));
    await_ready(&data, &machine, &plan.peer)?;
    let heartbeat = dialler.heartbeat(path)?;
    data.set_read_timeout(None)?;

    let (outbox, outflow) = send::queue();
    let (inbound, copies) = inbound::queue();
    let (contests, contest_queue) = crossbeam_channel::unbounded();
    let recording = recording(&machine, &plan);
    let console = machine.console_output().filter(|_| plan.hold_console).cloned();
    let session = Arc::new(Session {
        vm: machine.definition().name.clone(),
        peer: plan.peer,
        id: plan.session,
        basis,
        version,
        records: plan.records,
        settled: AtomicU64::new(0),
        console,
        rounds: Mutex::new(Rounds::of_new_session()),
        references: references(&plan.encoding, plan.mode),
        policy: plan.policy,
        encoding: plan.encoding,
        stats: Stats::new(plan.meters.of(vm), &plan.policy),
        progress: Progress::new(),
        events: plan.events,
        outbox,
        inbound,
        outbound: outbound::Outbound::default(),
        disk_epoch: AtomicU64::new(0),
        data,
        heartbeats: Heartbeats::new()?,
        work: headway::Work::default(),
        paths,
        place,
        diverged: AtomicBool::new(false),
        distrusts_mirrors: AtomicBool::new(false),
        arbiter: plan.arbiter,
        ask_winner: plan.ask_winner,
        tell_sick: plan.tell_sick,
        contests,
        group,
        present: Waitable::new(Present::new(Watch::new(&machine)?, machine, recording)),
    });
    session.group.join(&session)?;
    if session.recording().is_some() {
        session.group.follow_log();
    }
    session.event(Event::Ready);
    let dial = dialler.clone();
    let interval = heartbeat_interval(plan.detection.patience(), patience);
    let dial: Dial = Arc::new(move |path| dial.heartbeat(path));
    heartbeat::start(&session.vm, &session, interval, vec![(path, heartbeat)], Some(dial))?;
    // Its heart beats, and the backup stands by.
    let give_up = |error: &anyhow::Error| session.event(Event::PeerGone(format!("{error:#}")));
    note(&session, plan.mode).inspect_err(give_up)?;
    let asked = (contest_queue, plan.detection.qemu);
    start_threads(&session, outflow, asked, (copies, dialler), over).inspect_err(give_up)?;
    Ok(session)
}

/// Notes the session, before the first change goes to the backup without being forgotten later.
/// The backup hears heartbeats meanwhile: on a busy disk this takes seconds.
fn note(session: &Session, mode: Mode) -> anyhow::Result<()> {
    fail::fail_point!("note-session");
    session.records.change(&session.vm, |record| {
        record.peer = Some(session.peer.clone());
        record.sessions.note(session.id.to_string());
        record.in_lockstep = mode == Mode::Lockstep;
    })?;
    Ok(())
}

fn start_threads(
    session: &Arc<Session>,
    mut outflow: Outflow,
    (contests, bound): (Receiver<Generation>, Duration),
    (copies, dialler): (inbound::Copies, Dialler),
    over: impl FnOnce(PrimaryPhase) + Send + 'static,
) -> anyhow::Result<()> {
    let start = |role: &str, body: Box<dyn FnOnce(Arc<Session>) + Send>| {
        let session = session.clone();
        spawn(format!("{role}-{}", session.vm), move || body(session))
            .map(drop)
            .context("cannot start a thread")
    };
    start("send", Box::new(move |session| run_send(&session, &mut outflow)))?;
    start("receive", Box::new(|session| receive::run(&session)))?;
    start("settle", Box::new(|session| mirror::run_rounds(&session)))?;
    start("watch", Box::new(move |session| watch::run(&session, &contests, bound)))?;
    start("inbound", Box::new(move |session| inbound::run(&session, &copies, &dialler)))?;
    start("capture", Box::new(move |session| run_capture(&session, over)))
}

/// Ends protection from this end after a panic in a thread of one of its VMs, whose machine is
/// halted: the backup takes over, or in the first copy the others go on.
pub fn end_after_panic(session: &Arc<Session>, reason: &str) {
    session.event(Event::QemuDied(reason.to_owned()));
    session.group.break_up();
    // Who should send the backup its last word may be the thread that is no more.
    session.group.each(Session::hang_up);
    session.group.ring();
}

fn run_send(session: &Session, outflow: &mut Outflow) {
    if let Err(error) = send_all(outflow, session) {
        session.event(Event::LostAside(format!("cannot send to the backup: {error}")));
    }
}

/// The references, if they are used: without compression pages are sent as they are; in lockstep
/// there are few.
fn references(plan: &EncodingPlan, mode: Mode) -> Option<Arc<References>> {
    let refers = plan.compression != Compression::None && mode == Mode::Checkpoint;
    refers.then(|| Arc::new(References::new()))
}

/// The log of a session that begins in lockstep.
fn recording(machine: &Arc<Machine>, plan: &Plan) -> Option<Arc<Recording>> {
    let follows = plan.mode == Mode::Lockstep;
    follows.then(|| Arc::new(Recording::new(machine, plan.disk_reads, MACHINE)))
}

fn run_capture(session: &Arc<Session>, over: impl FnOnce(PrimaryPhase)) {
    let captured = capture::run(session);
    if let Err(error) = captured {
        forget_log(session);
        let reason = format!("cannot take a checkpoint: {error:#}");
        let first = session.group.break_up();
        if !first {
            info!(vm = %session.vm, "waiting for the end of the group's protection: {reason}");
        } else if session.is_over() {
            info!(vm = %session.vm, "protection ended during a checkpoint: {reason}");
        } else if powered_off(&session.machine()) {
            // Not a failure: the host ends protection, then the VM, unless it did not know yet of the session that begins.
            info!(vm = %session.vm, "the guest powered off: {reason}");
            session.event(Event::Unprotect);
        } else if session.machine().is_alive() {
            error!(vm = %session.vm, "{reason}");
            session.event(Event::CannotCapture(reason));
        } else {
            session.event(Event::QemuDied(session.machine().last_words()));
        }
    }
    let phase = await_end(session);
    let machine = session.machine();
    if matches!(phase, PrimaryPhase::Alone(_)) && machine.is_alive() && !machine.is_powered_off() {
        // A checkpoint that failed may have left the guest paused, a hand-over that did has.
        if let Err(error) = machine.take_back() {
            error!(vm = %session.vm, "cannot resume the guest: {error:#}");
            machine.let_run();
        }
    }
    over(phase);
}

/// Forgets a log whose begin or end has failed, which nobody reads: QEMU would wait for room in it
/// for ever.
fn forget_log(session: &Session) {
    let machine = session.machine();
    if session.recording().is_some()
        && machine.is_alive()
        && let Err(error) = release(&machine)
    {
        warn!(vm = %session.vm, "its log goes on, and nobody reads it: {error:#}");
    }
}

/// Waits until it is decided who has the VM. A guest that is kept meanwhile stands still.
fn await_end(session: &Session) -> PrimaryPhase {
    let is_end = PrimaryPhase::is_over;
    let mut stands_still = false;
    loop {
        let seen = session.wait_for_phase(Duration::from_secs(3600), |phase| {
            is_end(phase) || (matches!(phase, PrimaryPhase::Frozen(_)) && !stands_still)
        });
        match seen {
            Ok(phase) if is_end(&phase) => return phase,
            Ok(_) => {
                stands_still = true;
                session.freeze();
            }
            Err(_) => {}
        }
    }
}

/// QEMU's refusal to resume can be seen before its event that says why.
fn powered_off(machine: &Machine) -> bool {
    let deadline = clock::now() + Duration::from_millis(300);
    while machine.is_alive() && !machine.is_powered_off() && clock::now() < deadline {
        thread::sleep(Duration::from_millis(5));
    }
    machine.is_powered_off()
}
