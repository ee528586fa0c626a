//! The backup: wire → staging → acknowledgement → apply.
//!
//! [`accept`] takes a primary's offer, prepares mirrors and a warm QEMU, and
//! starts the session's threads: `receive` (stage whole, acknowledge), `apply`
//! (memory, disks, device state; then go live or forget), `control` (the
//! arbiter), `inbound` (copies of what the guest receives) and the heartbeats.

mod activation;
mod apply;
mod boot_file;
mod control;
mod errands;
mod failure;
mod frames;
mod group;
mod medium;
mod proof;
mod receive;
mod session;
mod takeover;
mod turn;
mod vitals;

pub use group::Group;
pub use proof::Former;
pub use session::Session;
pub use takeover::Outcome;
pub use turn::{Beside, Launch};

use crate::handshake::{FileOffer, FileRole, Offer, Ready, Resumed};
use crate::heartbeat::{self, Heartbeats};
use crate::lockstep::backup::{self as lockstep, Following};
use crate::lockstep::writes::Writes;
use crate::messages::ToPrimary;
use crate::paths::PathMonitor;
use crate::records::Records;
use crate::sessions::SessionName;
use crate::sync::ByteBudget;
use anyhow::{Context, bail};
use boot_file::BootFile;
use session::Present;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::thread;
use std::time::Duration;
use turn::Orders;
use understudy_arbiter::Arbiter;
use understudy_cluster::kept::Keeper;
use understudy_cluster::store_keys::{StoreKeys, Stores};
use understudy_disk::{Mirror, Rounds};
use understudy_link::channel::{Channel, Renewal};
use understudy_link::link::Link;
use understudy_machine::Machine;
use understudy_protocol::HostName;
use understudy_protocol::wire::{Kind, WireVersion};
use understudy_protocol::{Count, DiskIndex, Epoch, PathIndex};
use understudy_qemu::VmDefinition;
use understudy_qemu::command::BootFiles;
use understudy_report::events::VmEvents;
use understudy_report::{DiskReads, Mode, ProtectRequest};
use understudy_session::primary::MACHINE;
use understudy_threads::Mutex;

/// Time after which the mirrors are brought to stable storage again.
const SETTLE_INTERVAL: Duration = Duration::from_millis(500);

/// Receives the offer's files: boot files into `directory`, heads into the
/// mirrors. Returns the definition as it is on this host: boot files and disks
/// are this host's own.
pub fn receive_files(
    link: &Link,
    offer: &Offer,
    directory: &Path,
    mirrors: &[Mirror],
) -> anyhow::Result<VmDefinition> {
    let mut boot = BootFiles::default();
    let mut received = Vec::new();
    for file in &offer.files {
        let (place, name) = match file.role {
            FileRole::Firmware => (&mut boot.firmware, "firmware"),
            FileRole::Kernel => (&mut boot.kernel, "kernel"),
            FileRole::Initrd => (&mut boot.initrd, "initrd"),
            FileRole::DiskHead(index) => {
                receive_disk_head(link, file, index, mirrors)?;
                continue;
            }
        };
        let file = BootFile::receive(link, file, directory, name)?;
        *place = Some(file.path().to_owned());
        received.push(file);
    }
    let message = link.receive()?;
    if message.header.kind != Kind::Prepare {
        bail!("the primary sent {:?} where Prepare was due", message.header.kind);
    }
    // Those of this host's images stay until all have come.
    for file in received {
        file.take_name().context("cannot replace the VM's boot files")?;
    }
    Ok(offer.definition.here(boot, mirrors.iter().map(Mirror::target).collect())?)
}

fn receive_disk_head(
    link: &Link,
    file: &FileOffer,
    index: DiskIndex,
    mirrors: &[Mirror],
) -> anyhow::Result<()> {
    let mirror = mirrors.get(usize::from(index.0));
    let disk = mirror.with_context(|| format!("the offer has no disk {index}"))?.disk();
    let mut offset = 0;
    receive_file(link, file.bytes, |piece| {
        disk.write(offset, piece)?;
        offset += piece.len() as u64;
        Ok(())
    })
    .with_context(|| format!("cannot receive the beginning of disk {index}"))
}

fn receive_file(
    link: &Link,
    bytes: u64,
    mut take: impl FnMut(&[u8]) -> io::Result<()>,
) -> anyhow::Result<()> {
    let mut left = bytes;
    while left > 0 {
        let message = link.receive()?;
        let length = message.payload.len() as u64;
        if message.header.kind != Kind::File || length == 0 || length > left {
            bail!("the primary did not send the file that it announced");
        }
        take(&message.payload)?;
        left -= length;
    }
    Ok(())
}

/// The plan that [`accept`] needs beside the standby.
pub struct Plan {
    /// Names the session.
    pub id: SessionName,
    /// The primary's host name.
    pub primary: HostName,
    /// The wire version that is spoken with it.
    pub version: WireVersion,
    /// Mode in which this host is to keep up with it.
    pub mode: Mode,
    /// Source, in lockstep, of its guest's reads.
    pub disk_reads: DiskReads,
    /// The VM's group, and its place there; the members join in order.
    pub group: (Arc<Group>, usize),
    /// The shortest silence that counts as failure.
    pub timeout: Duration,
    /// Time between two heartbeats.
    pub heartbeat_interval: Duration,
    /// Arbiter of ownership.
    pub arbiter: Arbiter,
    /// Records in which this host notes what its images are.
    pub records: Records,
    /// This host's addresses, as the primary knows them: one for each path.
    pub addresses: Vec<SocketAddr>,
    /// The path of the data connection.
    pub path: PathIndex,
    /// The VM's directory on this host.
    pub directory: PathBuf,
    /// The keys of the stores that snapshots of the VM go to.
    pub store_keys: StoreKeys,
    /// Stores that the primary may name.
    pub stores: Stores,
    /// Starts a QEMU for the other way of keeping up.
    pub launch: Launch,
    /// Asks the primary who owns the VM, once it is silent.
    pub former: Former,
    /// Request of the operator.
    pub wish: Option<ProtectRequest>,
    /// Events, to which what happens to the VM is told.
    pub events: VmEvents,
}

/// Starts following the primary with a standby that is ready. `over` is called
/// once, when the VM is live here or forgotten; `register` before the primary
/// hears that the backup is ready.
pub fn accept(
    link: Link,
    plan: Plan,
    machine: Arc<Machine>,
    mirrors: Vec<Mirror>,
    over: impl FnOnce(Outcome) + Send + 'static,
    register: impl FnOnce(&Arc<Session>),
) -> anyhow::Result<Arc<Session>> {
    let blocks =
        machine.blocks().iter().map(|block| (block.name().to_owned(), block.bytes())).collect();
    let (errands, errand_queue) = crossbeam_channel::unbounded();
    let (commits, commit_queue) = crossbeam_channel::unbounded();
    let (contests, contest_queue) = crossbeam_channel::unbounded();
    link.set_read_timeout(None)?;
    let vm = machine.definition().name.clone();
    let (addresses, path) = (plan.addresses, plan.path);
    let heartbeats = Heartbeats::new().context("cannot make an eventfd")?;
    let paths = PathMonitor::new(&plan.events, &plan.primary, addresses, path, plan.timeout);
    let renewal = if paths.are_several() { Renewal::Await } else { Renewal::Never };
    let following = (plan.mode == Mode::Lockstep)
        .then(|| Arc::new(Following::new(plan.disk_reads, machine.disks().len(), MACHINE)));
    let session = Arc::new(Session {
        vm,
        id: plan.id,
        primary: plan.primary,
        version: plan.version,
        launch: plan.launch,
        former: plan.former.into(),
        data: Channel::new(link, renewal),
        heartbeats,
        paths,
        arbiter: plan.arbiter,
        records: plan.records,
        group: plan.group.0,
        place: plan.group.1,
        directory: plan.directory,
        staged: crossbeam_channel::unbounded(),
        commits,
        errands,
        contests,
        waiting: ByteBudget::new(session::WAITING_BYTES),
        keeper: Keeper::new(plan.stores, plan.store_keys),
        rounds: Rounds::of_new_session(),
        received: AtomicU64::new(0),
        worked: AtomicU64::new(0),
        mirrors_failed: AtomicBool::new(false),
        vitals: vitals::Vitals::default(),
        clock: takeover::Clock::default(),
        present: Mutex::new(Present {
            frames: frames::Frames::new(machine.ports()),
            machine,
            following,
            wish: plan.wish,
            orders: Orders::default(),
            kept: None,
        }),
    });
    session.group.join(&session)?;
    spawn("apply", &session, move |session| {
        over(session.run_errands(&errand_queue, &commit_queue, mirrors));
    })?;
    spawn("settle", &session, |session| run_settle(session))?;
    spawn("control", &session, move |session| control::run(session, &contest_queue))?;
    register(&session);
    fail::fail_point!("before-ready");
    session.data.send_json(Kind::Ready, &Ready { blocks })?;
    if session.place == 0 {
        // For the whole group, which is taken over as one. Not before the primary knows that this
        // host is ready: it expects nothing else first.
        understudy_threads::spawn(format!("prove-{}", session.vm), proof::body(&session))
            .context("cannot start a thread")?;
    }
    heartbeat::start(&session.vm, &session, plan.heartbeat_interval, Vec::new(), None)?;
    spawn("receive", &session, |session| session.receive())?;
    Ok(session)
}

/// Adds the heartbeat connection of a path to a session.
pub fn attach_heartbeat(session: &Session, path: PathIndex, link: Link) {
    session.heartbeats.attach(path, link);
}

/// Adds the connection over which copies of the guest's inbound frames come.
pub fn attach_inbound(session: &Arc<Session>, link: Link) -> anyhow::Result<()> {
    spawn("inbound", session, move |session| session.receive_inbound(&link))
}

/// The session's data goes on over this connection; the primary has got
/// `received` messages. Returns when everything that it lacks was sent.
pub fn resume(
    session: &Session,
    path: PathIndex,
    link: &Link,
    received: Count,
) -> anyhow::Result<()> {
    link.set_read_timeout(None)?;
    session.data.resume(link, received, |received| {
        session.paths.use_path(path);
        link.send_json(Kind::Welcome, &Resumed { received })
    })
}

fn spawn(
    role: &str,
    session: &Arc<Session>,
    body: impl FnOnce(&Arc<Session>) + Send + 'static,
) -> anyhow::Result<()> {
    let session = session.clone();
    understudy_threads::spawn(format!("{role}-{}", session.vm), move || body(&session))
        .map(drop)
        .context("cannot start a thread")
}

/// Starts the threads of a log that is about to be executed.
fn follow(session: &Arc<Session>, following: &Arc<Following>) -> anyhow::Result<()> {
    let (machine, log) = (session.machine(), following.clone());
    spawn("feed", session, move |session| lockstep::feed(session, &machine, &log))?;
    let log = following.clone();
    spawn("reads", session, move |_| log.answer_reads())?;
    let (machine, log) = (session.machine(), following.clone());
    spawn("follow", session, move |session| lockstep::watch(session, &machine, &log))
}

/// Brings the mirrors to stable storage now and then, and tells the primary: it need not
/// remember these changes, and a take-over finds little left to sync. So does the first epoch, behind
/// whose acknowledgement the whole mirror is to be there.
fn run_settle(session: &Session) {
    let mut settled = Epoch(0);
    while !heartbeat::Pulse::is_over(session) {
        thread::sleep(SETTLE_INTERVAL);
        let applied = session.applied();
        let (machine, following) = (session.machine(), session.following());
        // Before they are brought to stable storage.
        let written =
            following.as_ref().and_then(|following| following.writes_now(&machine.disks()));
        // In lockstep QEMU writes them itself.
        let fills = applied == Epoch(0);
        let due = fills || applied > settled || following.is_some();
        if due && !heartbeat::Pulse::is_over(session) {
            match session.settle() {
                Ok(()) if fills => {}
                Ok(()) if applied > settled => session.say(&ToPrimary::Settled(applied)),
                Ok(()) => {
                    let still = session.following().zip(following);
                    if let (Some((now, following)), Some(written)) = (still, written)
                        && Arc::ptr_eq(&now, &following)
                    {
                        session.say(&ToPrimary::Written(written));
                        if let Err(error) = following.strike_off(&machine.disks(), session.rounds) {
                            session.give_up(&format!("{error:#}"));
                        }
                    }
                }
                Err(error) => session.give_up(&format!("{error:#}")),
            }
            settled = applied;
        }
    }
}
