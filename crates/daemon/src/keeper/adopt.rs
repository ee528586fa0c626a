//! Adoption: a keeper goes on with the guest that the last keeper of its VM leaves, or has left to
//! a custodian.
//!
//! Whatever takes long is done while the guest runs. From the end of the last keeper on it stands still, until this one
//! has its descriptors, the VM's place and the arbiter's word that the VM is this host's.

use super::legacy::{self, Legacy, Readable};
use super::note::{self, Claim, End, Found};
use super::order::say;
use crate::admission::{open_disks, open_disks_in_use};
use crate::autostart::wish_of;
use crate::containment;
use crate::host::{Host, internal};
use crate::vm::PrimaryVm;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tracing::warn;
use understudy_machine::custody::{Custody, Unfound};
use understudy_machine::{Adoption, Machine, NotUnderstood};
use understudy_protocol::adoption::{Adoptable, by_arbiter, may_adopt};
use understudy_protocol::validity::ImageRole;
use understudy_protocol::{Generation, HostName, LeaseAnswer, VmName};
use understudy_qemu::process::{has_ended, pidfd_of, signal};
use understudy_replication::moments::pass;
use understudy_replication::records::Record;
use understudy_replication::resync;
use understudy_report::error::{ErrorKind, HostError};
use understudy_report::events::EventKind;

/// Time for the last keeper to end, if the daemon has died that told both.
const PATIENCE_ALONE: Duration = Duration::from_secs(60);
/// The daemon's word that nothing is to be adopted.
pub(super) const DISMISSED: u8 = b'd';

/// Words of the next keeper to the daemon that has started it, each in a line of JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Word {
    /// The last keeper may leave the VM to it.
    Ready(Readable),
    /// The guest goes on in it.
    Adopted(Adopted),
    /// The guest does not go on, and stands still with its custodian, if the last keeper has left
    /// it.
    Failed(String),
    /// The same, and this program never will: another release may.
    Cannot(String),
    /// The guest has ended, or is not this host's any more.
    Lost(String),
}

/// A guest that goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Adopted {
    /// The last keeper's process.
    pub former: u32,
    /// Time for which the guest stood still, in milliseconds.
    pub still_ms: u64,
}

/// Reason why a guest is not adopted.
enum NotAdopted {
    /// Adoption may succeed the next time.
    Later(String),
    /// Adoption is not possible by this program: it stays with its custodian.
    Cannot(String),
    /// Adoption is never possible.
    Lost(String),
}

fn later(error: impl Into<anyhow::Error>) -> NotAdopted {
    NotAdopted::Later(format!("{:#}", error.into()))
}

/// Reason why a machine was not taken over.
fn not_taken_over(error: anyhow::Error) -> NotAdopted {
    match error.is::<NotUnderstood>() {
        true => NotAdopted::Cannot(format!("it cannot be taken over: {error:#}")),
        false => later(error.context("it cannot be taken over")),
    }
}

/// Parts of a guest that a custodian has.
struct Left {
    legacy: Legacy,
    /// QEMU's pidfd comes first.
    descriptors: Vec<OwnedFd>,
    custody: Custody,
    /// Time since which the guest has stood still.
    since: Instant,
}

impl Left {
    fn find(directory: &Path) -> Result<Left, NotAdopted> {
        let socket = legacy::socket(directory);
        let (custody, estate, descriptors) =
            Custody::of_another(&socket).map_err(|error| not_found(error, &socket))?;
        match Legacy::read(estate.note) {
            Ok(legacy) => {
                let still = Duration::from_millis(estate.still_ms);
                let since = Instant::now().checked_sub(still).unwrap_or_else(Instant::now);
                Ok(Left { legacy, descriptors, custody, since })
            }
            Err(why) => {
                custody.leave();
                Err(NotAdopted::Cannot(format!("what was left is not understood: {why}")))
            }
        }
    }

    fn qemu(&self) -> BorrowedFd<'_> {
        self.descriptors[0].as_fd()
    }

    fn has_ended(&self) -> bool {
        has_ended(self.qemu(), PollTimeout::ZERO).unwrap_or(true)
    }
}

/// Nobody listens there: the custodian has ended, and QEMU with it.
fn not_found(error: anyhow::Error, socket: &Path) -> NotAdopted {
    match Unfound::of(&error) {
        Unfound::Never => NotAdopted::Cannot(format!("its custodian: {error:#}")),
        Unfound::Ended => {
            let _ = fs::remove_file(socket);
            NotAdopted::Lost("its guest has ended with its last keeper".to_owned())
        }
        Unfound::Later => later(error.context("its custodian")),
    }
}

impl Host {
    /// Goes on with the guest of the VM's last keeper as soon as that has ended, and tells the daemon. After an error
    /// this process is to end.
    pub fn adopt_as_ordered(
        self: &Arc<Self>,
        vm: &VmName,
        daemon: UnixStream,
    ) -> Result<(), HostError> {
        let prepared = self.prepare_to_adopt(vm).and_then(|former| {
            say(&daemon, &Word::Ready(Readable::own())).map_err(internal)?;
            former.map_or(Ok(()), |former| await_end(&former, &daemon))
        });
        let adopted = match prepared {
            Ok(()) => self.adopt(vm),
            Err(error) => Err(NotAdopted::Later(error.message)),
        };
        let (word, done) = match adopted {
            Ok(adopted) => (Word::Adopted(adopted), Ok(())),
            Err(NotAdopted::Later(why)) => (Word::Failed(why.clone()), Err(why)),
            Err(NotAdopted::Cannot(why)) => (Word::Cannot(why.clone()), Err(why)),
            Err(NotAdopted::Lost(why)) => (Word::Lost(why.clone()), Err(why)),
        };
        if let Err(error) = say(&daemon, &word) {
            // The next daemon sees what there is.
            warn!(%vm, "the daemon does not hear what became of it: {error}");
        }
        done.map_err(|why| {
            HostError::new(ErrorKind::Internal, format!("{vm} is not adopted: {why}"))
        })
    }

    /// Finds out what may take long, or speaks against it; returns the process of the VM's last keeper, if that lives.
    fn prepare_to_adopt(&self, vm: &VmName) -> Result<Option<OwnedFd>, HostError> {
        die_in_a_test("prepare-to-adopt");
        let generation = self.record(vm)?.map(|record| record.image.generation).unwrap_or_default();
        let answer = self.ask_for_owner(vm, generation);
        let conflict = |why: String| Err(HostError::new(ErrorKind::Conflict, why));
        let found = note::look(&self.vm_directory(vm)?);
        if let Some(why) = obstacle(answer, matches!(found, Found::Lives(_))) {
            let why = format!("its next keeper could not go on with {vm}: the arbiter: {why}");
            return Err(HostError::new(ErrorKind::Unreachable, why));
        }
        match found {
            Found::Nobody(_) => Ok(None),
            Found::Lives(note) => Ok(Some(pidfd_of(note.pid).map_err(internal)?)),
            Found::Starting => conflict(format!("the keeper of {vm} is just starting")),
            Found::Unknown(problem) => conflict(problem),
        }
    }

    fn adopt(self: &Arc<Self>, vm: &VmName) -> Result<Adopted, NotAdopted> {
        let directory = self.vm_directory(vm).map_err(later)?;
        // First of all: there may be another one.
        let mut claim = Claim::of(&self.config, vm, None).map_err(later)?;
        let found =
            Left::find(&directory).and_then(|left| match self.build(vm, &left, &directory) {
                Ok(primary) => Ok((left, primary)),
                Err(NotAdopted::Lost(why)) => {
                    self.end_left(vm, left);
                    Err(NotAdopted::Lost(why))
                }
                Err(stays) => {
                    left.custody.leave();
                    Err(stays)
                }
            });
        let (left, primary) = found.inspect_err(|why| {
            let end = match why {
                NotAdopted::Later(_) | NotAdopted::Cannot(_) => End::Left,
                NotAdopted::Lost(reason) => self.fenced(vm, reason),
            };
            if let Err(error) = claim.end(end) {
                warn!(%vm, "that it was not adopted cannot be noted: {error}");
            }
        })?;
        if let Err(error) = self.wake(&primary, claim) {
            // It would end QEMU.
            std::mem::forget(primary.machine());
            left.custody.leave();
            return Err(later(error));
        }
        left.custody.goes_on();
        let Legacy { keeper: former, protected_to, .. } = left.legacy;
        let still_ms = left.since.elapsed().as_millis() as u64;
        // The guest ends with its keeper again, as any does.
        drop(left.custody);
        let keeper = process::id();
        primary.events.record(EventKind::KeeperReplaced { former, keeper, still_ms });
        self.protect_as_before(&primary, protected_to);
        Ok(Adopted { former, still_ms })
    }

    /// All around the guest, which stands still, if it is this host's.
    fn build(
        self: &Arc<Self>,
        vm: &VmName,
        left: &Left,
        directory: &Path,
    ) -> Result<Arc<PrimaryVm>, NotAdopted> {
        if left.has_ended() {
            return Err(NotAdopted::Lost("its QEMU has ended".to_owned()));
        }
        let Legacy { generation, machine: note, .. } = &left.legacy;
        // Before anything that it has sent may leave.
        let record = self.adoptable(vm, *generation)?;
        let disks = match note.disk_bytes() {
            Some(bytes) => open_disks_in_use(&note.definition, bytes),
            None => open_disks(&note.definition, Some(&record), directory),
        }
        .map_err(later)?;
        resync::go_on(&self.records, &record, &disks, directory).map_err(later)?;
        let descriptors = left.descriptors.iter().map(OwnedFd::try_clone);
        let adoption = Adoption {
            note,
            descriptors: descriptors.collect::<Result<_, _>>().map_err(later)?,
            run_dir: directory,
            limits: self.config.limits,
            disks,
            on_event: self.event_sink(vm),
        };
        let machine = Arc::new(Machine::adopt(adoption).map_err(not_taken_over)?);
        self.presences_of(vm, &machine);
        let primary = self.new_primary(machine.clone(), *generation, wish_of(record));
        die_in_a_test("adopt");
        pass("adopting");
        match granted(by_arbiter(self.resume_lease(&primary))) {
            Ok(_) => Ok(primary),
            Err(NotAdopted::Lost(why)) => Err(NotAdopted::Lost(why)),
            Err(stays) => {
                // Dropped, it would end QEMU, which its custodian has.
                std::mem::forget(machine);
                Err(stays)
            }
        }
    }

    /// The record of a guest that was left at this generation, if that may go on.
    fn adoptable(&self, vm: &VmName, left: Generation) -> Result<Record, NotAdopted> {
        let record = self.record(vm).map_err(later)?;
        let image = record.as_ref().map(|record| &record.image);
        let record = match granted(may_adopt(image, left, self.ask_for_owner(vm, left)))? {
            Noted::Yes => record,
            Noted::NotYet => {
                self.records.change(vm, |record| record.image.generation = left).map_err(later)?;
                self.record(vm).map_err(later)?
            }
        };
        record.ok_or_else(|| NotAdopted::Later("its record has just vanished".to_owned()))
    }

    /// Lets the guest go on, which is this host's.
    fn wake(self: &Arc<Self>, primary: &Arc<PrimaryVm>, claim: Claim) -> anyhow::Result<()> {
        let machine = primary.machine();
        self.open_first_place(claim, primary.name())?;
        self.show_primary(primary);
        machine.open_network(&[], &[]);
        let events = primary.events.clone();
        machine.wake(move |error| events.note(format!("its QEMU does not answer: {error:#}")))
    }

    /// Ends a guest that is not this host's any more.
    fn end_left(&self, vm: &VmName, left: Left) {
        // Fails if it has ended already.
        let _ = signal(left.qemu(), Signal::SIGKILL);
        let generation = left.legacy.generation;
        let noted = self.records.change(vm, |record| {
            // What its operator has made of it stays.
            if record.image.role == ImageRole::Active && record.image.generation <= generation {
                record.image.role = ImageRole::Stale;
            }
        });
        if let Err(error) = noted {
            warn!(%vm, "{error}");
        }
    }

    fn fenced(&self, vm: &VmName, reason: &str) -> End {
        let record = self.record(vm).ok().flatten();
        let generation = record.map(|record| record.image.generation).unwrap_or_default();
        End::Fenced { generation, reason: reason.to_owned(), elsewhere: false }
    }

    /// Protects a VM to the host that backed it up until its keeper was replaced, or looks for another one.
    fn protect_as_before(self: &Arc<Self>, vm: &Arc<PrimaryVm>, backup: Option<HostName>) {
        let Some(wish) = vm.repairer().wish() else { return };
        let remedy = wish.command(vm.name());
        let Some(peer) = backup else {
            return self.degraded(vm, "its keeper was replaced".to_owned(), &remedy);
        };
        vm.degrade("its keeper was replaced, and it is about to be protected again".to_owned());
        let (host, again, way) = (self.clone(), vm.clone(), remedy.clone());
        let protect = move || {
            if let Err(error) = host.protect_again(&again, &peer) {
                host.degraded(&again, error.message, &way);
            }
        };
        if let Err(error) = containment::spawn_for(self, vm.name(), "protect", protect) {
            self.degraded(vm, format!("there is no thread to protect it again: {error}"), &remedy);
        }
    }
}

/// Reason why a guest could not go on, before its last keeper leaves it. One that is left, and is another host's by now,
/// has to be ended.
fn obstacle(answer: LeaseAnswer, has_keeper: bool) -> Option<String> {
    match answer {
        LeaseAnswer::Own => None,
        LeaseAnswer::Moved { why, .. } => has_keeper.then_some(why),
        LeaseAnswer::Unreachable(why) => Some(why),
    }
}

/// Whether the record shows the generation at which a guest was left.
enum Noted {
    Yes,
    NotYet,
}

fn granted(found: Adoptable) -> Result<Noted, NotAdopted> {
    match found {
        Adoptable::Yes => Ok(Noted::Yes),
        Adoptable::OnceNoted => Ok(Noted::NotYet),
        Adoptable::Later(why) => Err(NotAdopted::Later(why)),
        Adoptable::Lost(why) => Err(NotAdopted::Lost(why)),
    }
}

/// Waits until the last keeper has ended. A daemon that dies has told it to; one that was refused says so.
fn await_end(former: &OwnedFd, daemon: &UnixStream) -> Result<(), HostError> {
    let mut alone_until: Option<Instant> = None;
    loop {
        let left = alone_until.map(|until| until.saturating_duration_since(Instant::now()));
        if left.is_some_and(|left| left.is_zero()) {
            let message = "the daemon has died, and the last keeper goes on";
            return Err(HostError::new(ErrorKind::Conflict, message.to_owned()));
        }
        let timeout = left.map_or(PollTimeout::NONE, |left| {
            PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)
        });
        let mut waited =
            [former.as_fd(), daemon.as_fd()].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
        let waited = match alone_until {
            None => &mut waited[..],
            Some(_) => &mut waited[..1],
        };
        match poll(waited, timeout) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(error) => return Err(internal(error.into())),
        }
        if waited[0].any().unwrap_or(false) {
            return Ok(());
        }
        if waited.get(1).is_some_and(|daemon| daemon.any().unwrap_or(false)) {
            match (&*daemon).read(&mut [0]) {
                Ok(1) => {
                    let message = "the last keeper goes on".to_owned();
                    return Err(HostError::new(ErrorKind::Conflict, message));
                }
                _ => alone_until = Some(Instant::now() + PATIENCE_ALONE),
            }
        }
    }
}

/// A test has the next keeper die here for as long as there is the file that the fail point names.
fn die_in_a_test(_place: &str) {
    fail::fail_point!(_place, |file| {
        if file.is_some_and(|file| Path::new(&file).exists()) {
            process::abort();
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::process::Command;

    #[test]
    fn the_last_keepers_end_is_waited_for_until_the_daemon_says_otherwise() {
        let mut keeper = Command::new("sleep").arg("1000").spawn().unwrap();
        let former = pidfd_of(keeper.id()).unwrap();
        let (daemon, ours) = UnixStream::pair().unwrap();
        (&daemon).write_all(&[DISMISSED]).unwrap();
        let error = await_end(&former, &ours).unwrap_err();
        assert!(error.message.contains("goes on"), "{error}");
        // Its death is no such word.
        drop(daemon);
        let waiting = std::thread::spawn(move || await_end(&former, &ours));
        keeper.kill().unwrap();
        waiting.join().unwrap().unwrap();
        keeper.wait().unwrap();
    }

    // Before, any answer of the arbiter was one: that it had no record of the VM was found out when the last keeper had left.
    #[test]
    fn a_guest_that_could_not_go_on_is_left_where_it_runs() {
        let silent = || LeaseAnswer::Unreachable("it has no record".to_owned());
        let moved = || LeaseAnswer::Moved { to: None, why: "nobody has it".to_owned() };
        assert_eq!(obstacle(LeaseAnswer::Own, true), None);
        for (answer, why) in [(silent(), "it has no record"), (moved(), "nobody has it")] {
            assert_eq!(obstacle(answer, true).as_deref(), Some(why));
        }
        assert!(obstacle(silent(), false).is_some());
        assert_eq!(obstacle(moved(), false), None, "it is ended");
    }

    #[test]
    fn what_a_keeper_says_is_a_line_of_json() {
        let adopted = Adopted { former: 7, still_ms: 38 };
        for (word, text) in [
            (
                Word::Ready(Readable::own()),
                r#"{"ready":{"least":1,"highest":2,"agents":{"least":8,"highest":9}}}"#,
            ),
            (Word::Adopted(adopted), r#"{"adopted":{"former":7,"still_ms":38}}"#),
            (Word::Lost("it ended".to_owned()), r#"{"lost":"it ended"}"#),
        ] {
            assert_eq!(serde_json::to_string(&word).unwrap(), text);
            assert_eq!(serde_json::from_str::<Word>(text).unwrap(), word);
        }
    }
}
