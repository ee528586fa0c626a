//! Replacement of a VM's keeper, which the daemon starts, by a process of its own program, while
//! the guest runs: the next keeper is started first, and waits until the last one has ended, which
//! leaves it the VM.
//!
//! A guest that no keeper has gone on with stands still with its custodian. It is looked for as long as there is a
//! daemon, and further keepers are started until one goes on with it, or its operator ends it.

use super::Keeper;
use super::adopt::{Adopted, DISMISSED, Word};
use super::legacy::{self, Readable};
use super::note::Program;
use super::order::{Follower, Order};
use super::start::reap_aside;
use crate::arrivals::Arrival;
use crate::host::{Host, internal};
use crate::orphans::Between;
use anyhow::anyhow;
use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Child;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use tracing::{info, warn};
use understudy_machine::custody::{Custody, Unfound};
use understudy_protocol::VmName;
use understudy_protocol::validity::ImageRole;
use understudy_qemu::process;
use understudy_report::error::{ErrorKind, HostError};
use understudy_report::events::EventKind;
use understudy_report::upgrade::KeeperReplacement;

/// Time for the next keeper to be ready, and for it to go on with the guest. The arbiter may take
/// its time.
const PATIENCE: Duration = Duration::from_secs(60);
/// Pause before another keeper is started for a guest that stands still.
const AGAIN: Duration = Duration::from_secs(1);
/// The same after one that says that no keeper of this program can go on with it.
const RARELY: Duration = Duration::from_secs(60);
/// Time in which a custodian that speaks with a keeper just then is asked again, and the pause before.
const CUSTODIAN_PATIENCE: Duration = Duration::from_secs(2);
const CUSTODIAN_PAUSE: Duration = Duration::from_millis(50);

/// Reason why no keeper goes on with a guest.
enum NotTaken {
    /// One may, the next time.
    Later(String),
    /// None of this program can, but another release's may.
    Cannot(String),
    /// None ever will.
    Lost(String),
}

impl NotTaken {
    /// Reason, and what the guest's operator can do about it.
    fn with_a_way_out(&self, vm: &VmName) -> String {
        match self {
            NotTaken::Later(why) => format!(
                "{why}; further ones are started until one does, or `understudy vm stop {vm} --force` ends it"
            ),
            NotTaken::Cannot(why) => format!(
                "{why}; no keeper of this release can: install that of its last keeper and restart the daemon, or \
                 end it by `understudy vm stop {vm} --force`"
            ),
            NotTaken::Lost(why) => why.clone(),
        }
    }
}

impl From<HostError> for NotTaken {
    fn from(error: HostError) -> NotTaken {
        NotTaken::Later(error.message)
    }
}

/// A keeper that is to go on with a guest.
struct Next {
    vm: VmName,
    process: Child,
    said: BufReader<UnixStream>,
}

impl Next {
    fn hear(&mut self) -> Result<Word, HostError> {
        let unreachable = |message: String| HostError::new(ErrorKind::Unreachable, message);
        self.said.get_ref().set_read_timeout(Some(PATIENCE)).map_err(internal)?;
        let mut line = String::new();
        match self.said.read_line(&mut line) {
            Ok(1..) => serde_json::from_str(&line).map_err(|error| {
                unreachable(format!("its next keeper is not understood: {error}"))
            }),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(unreachable(format!(
                "its next keeper has said nothing for {} s",
                PATIENCE.as_secs()
            ))),
            Ok(0) | Err(_) => Err(unreachable(
                "its next keeper has ended: the daemon's log has its words".to_owned(),
            )),
        }
    }

    /// Waits until it is ready; returns what it reads of what the last keeper leaves.
    fn await_ready(&mut self) -> Result<Readable, HostError> {
        match self.hear()? {
            Word::Ready(reads) => Ok(reads),
            Word::Failed(why) | Word::Cannot(why) | Word::Lost(why) => {
                Err(HostError::new(ErrorKind::Conflict, why))
            }
            Word::Adopted(_) => {
                let message = "its next keeper has not waited for the last one".to_owned();
                Err(HostError::new(ErrorKind::Internal, message))
            }
        }
    }

    fn await_adoption(&mut self) -> Result<Adopted, NotTaken> {
        match self.hear()? {
            Word::Adopted(adopted) => Ok(adopted),
            Word::Failed(why) => Err(NotTaken::Later(why)),
            Word::Cannot(why) => Err(NotTaken::Cannot(why)),
            Word::Lost(why) => Err(NotTaken::Lost(why)),
            Word::Ready(_) => Err(NotTaken::Later("its next keeper still waits".to_owned())),
        }
    }

    /// Nothing is to be adopted.
    fn dismiss(mut self) {
        // It has ended if it cannot be told.
        let _ = self.said.get_mut().write_all(&[DISMISSED]);
        reap_aside(self.process, &self.vm);
    }

    /// Ends it at once: what it has of the guest goes back to the custodian.
    fn end(mut self) {
        // Fails if it has ended already.
        let _ = self.process.kill();
        reap_aside(self.process, &self.vm);
    }
}

impl Keeper {
    /// Refuses to have one replaced that does not know how, by one that reads this.
    fn check_replaceable(&self, reads: Readable) -> Result<(), HostError> {
        self.reachable()?;
        match &self.program {
            Some(Program { compares_agents: true, .. }) => Ok(()),
            Some(_) => reads.check_uncompared(),
            None => {
                let vm = &self.vm;
                let message = format!(
                    "the keeper of {vm} is of a release whose keepers cannot be replaced while the guest runs: hand {vm} \
                     over (`understudy failover {vm}`), or stop it and start it again"
                );
                Err(HostError::new(ErrorKind::Conflict, message))
            }
        }
    }

    /// Refuses to have one replaced that could not leave its VM now.
    fn check_leaves(&self) -> Result<(), HostError> {
        let reads = Readable::own();
        self.check_replaceable(reads)?;
        self.obey(&self.vm, &Order::MayLeave(reads)).map(drop)
    }

    /// Reason why it cannot be replaced now, if it cannot.
    pub(crate) fn replacement_obstacle(&self) -> Option<String> {
        self.check_leaves().err().map(|error| error.message)
    }
}

impl Host {
    /// Has another process, of this daemon's program, keep a VM while its guest runs. It is protected again by itself,
    /// as it was.
    pub fn replace_keeper(self: &Arc<Self>, name: &VmName) -> Result<KeeperReplacement, HostError> {
        let keeper = self.keeper_of(name).ok_or_else(|| match self.vm_status(name) {
            Err(error) => error,
            Ok(_) => HostError::new(ErrorKind::Conflict, format!("{name} has no keeper here")),
        })?;
        let arrival = self.expect_next(name)?;
        // What is refused is refused before there is another process.
        keeper.check_leaves()?;
        // Whoever gives it up meanwhile ends it then: see `end_given_up`.
        let _between = self.orphans.expect_keeper(name);
        let mut next = self.start_next(name)?;
        let left = match next.await_ready() {
            Ok(reads) => keeper.obey(name, &Order::Leave(reads)),
            Err(error) => Err(error),
        };
        if let Err(error) = left
            && self.still_keeps(&keeper, &error)
        {
            next.dismiss();
            return Err(error);
        }
        match next.await_adoption() {
            Ok(adopted) => {
                let replacement = KeeperReplacement {
                    vm: name.clone(),
                    former: adopted.former,
                    keeper: next.process.id(),
                    still_ms: adopted.still_ms,
                };
                self.keep_place(Follower::New(next.process), arrival);
                Ok(replacement)
            }
            Err(not_taken) => {
                next.end();
                // From here on it is looked for: see `take_up`.
                let message = format!(
                    "the last keeper of {name} has ended, and the next one does not go on with the guest: {} \
                     (`understudy status {name}`)",
                    not_taken.with_a_way_out(name)
                );
                Err(HostError::new(ErrorKind::Internal, message))
            }
        }
    }

    /// Whether a keeper goes on that did not leave its VM, for this reason. That it has ended may show a moment later.
    fn still_keeps(&self, keeper: &Keeper, error: &HostError) -> bool {
        let is_there = || self.keeper_of(&keeper.vm).is_some_and(|now| now.pid == keeper.pid);
        if error.kind == ErrorKind::Internal && is_there() {
            thread::sleep(AGAIN);
        }
        is_there()
    }

    /// Keeps the place of a VM that is to have another keeper.
    fn expect_next(&self, name: &VmName) -> Result<Arrival, HostError> {
        let _adding = self.adding.lock();
        if self.arrivals.is_expected(name) {
            let message = format!("the keeper of {name} is being replaced already");
            return Err(HostError::new(ErrorKind::Conflict, message));
        }
        let definition = self.recorded_definition(name)?;
        Ok(Arrival::expect(&self.arrivals, &self.config.name, &definition))
    }

    fn start_next(&self, name: &VmName) -> Result<Next, HostError> {
        let files = self.files_of(&self.recorded_definition(name)?);
        let (process, said) = self.spawn_ordered_keeper(name, None, &Order::Adopt, &files)?;
        Ok(Next { vm: name.clone(), process, said: BufReader::new(said) })
    }

    /// Whether a custodian may have the VM's guest, which its last keeper has left.
    pub(super) fn is_left(&self, name: &VmName) -> bool {
        legacy::socket(&name.below(&self.config.state_dir)).exists()
    }

    /// Has keepers started for a guest that its last keeper has left and that none has gone on with, if there is one,
    /// until one does; whether there is one.
    pub(super) fn take_up(self: &Arc<Self>, name: &VmName) -> bool {
        if self.arrivals.is_expected(name) || self.orphans.why(name).is_some() {
            return true;
        }
        if !self.is_left(name) || self.keeper_of(name).is_some() {
            return false;
        }
        let (host, vm) = (Arc::downgrade(self), name.clone());
        let Some(between) = self.orphans.claim_between(name, "the next one is about to have it")
        else {
            return true;
        };
        let take = move || {
            let mut due = Instant::now();
            while let Some(host) = host.upgrade() {
                let Some(next) = host.tend(&between, &vm, due) else { return };
                due = next;
                drop(host);
                thread::sleep(AGAIN);
            }
        };
        if let Err(error) = thread::Builder::new().name(format!("adopt-{name}")).spawn(take) {
            warn!(vm = %name, "its guest stands still: no thread can be started: {error}");
        }
        true
    }

    /// Has a keeper started for a guest that stands still, once that is due, unless it is to end; returns when the next
    /// one is due, if one is.
    fn tend(self: &Arc<Self>, between: &Between, name: &VmName, due: Instant) -> Option<Instant> {
        if self.is_closing() {
            return None;
        }
        if between.is_given_up() {
            return self.end_left_guest(name).err().map(|error| {
                self.orphans.note(name, error.message);
                due
            });
        }
        if Instant::now() < due {
            return Some(due);
        }
        let not_taken = match self.try_to_take_up(name) {
            Ok(adopted) => {
                info!(vm = %name, "goes on in another keeper, after {} ms", adopted.still_ms);
                return None;
            }
            Err(not_taken) => not_taken,
        };
        let reason = not_taken.with_a_way_out(name);
        let pause = match not_taken {
            // Its last words say so, to whoever looks for them.
            NotTaken::Lost(why) => {
                warn!(vm = %name, "its guest is lost: {why}");
                return None;
            }
            NotTaken::Later(_) => Duration::ZERO,
            NotTaken::Cannot(_) => RARELY,
        };
        self.events.of(name).record_new(EventKind::WithoutKeeper { reason: reason.clone() });
        self.orphans.note(name, reason);
        Some(Instant::now() + pause)
    }

    fn try_to_take_up(self: &Arc<Self>, name: &VmName) -> Result<Adopted, NotTaken> {
        let arrival = self.expect_next(name)?;
        let mut next = self.start_next(name)?;
        let adopted =
            next.await_ready().map_err(NotTaken::from).and_then(|_| next.await_adoption());
        match adopted {
            Ok(adopted) => {
                self.keep_place(Follower::New(next.process), arrival);
                Ok(adopted)
            }
            Err(error) => {
                next.end();
                Err(error)
            }
        }
    }

    /// Ends a guest that its operator has given up while it was between two keepers, and is no more: whichever of them has
    /// it, or its custodian.
    pub(crate) fn end_given_up(&self, name: &VmName) -> Result<(), HostError> {
        let stopped = self.stop_in_keeper(name);
        // No further keeper is started from here on.
        let Some(_between) = self.orphans.claim_between(name, "it is being ended") else {
            self.orphans.give_up(name);
            return self.end_given_up(name);
        };
        // One that lives has the guest, and a custodian beside it for a moment.
        if self.keeper_of(name).is_some() || !self.is_left(name) {
            return stopped;
        }
        self.end_left_guest(name)
    }

    /// Ends a guest that stands still with its custodian, by its operator's wish; the caller has its place. What is not
    /// known to have ended stays as it is on record.
    fn end_left_guest(&self, name: &VmName) -> Result<(), HostError> {
        let socket = legacy::socket(&name.below(&self.config.state_dir));
        let until = Instant::now() + CUSTODIAN_PATIENCE;
        let mut ended = end_with_custodian(&socket);
        // As long as its socket is there a keeper is started for the guest, which would say that it is lost.
        while (ended.is_err() || self.is_left(name)) && Instant::now() < until {
            thread::sleep(CUSTODIAN_PAUSE);
            ended = end_with_custodian(&socket);
        }
        if ended.is_ok() && self.is_left(name) {
            ended = Err(anyhow!("it does not end with its QEMU"));
        }
        ended.map_err(|error| {
            let message =
                format!("{name}: its guest's custodian cannot be asked, or has not ended: {error:#}; try again");
            HostError::new(ErrorKind::Conflict, message)
        })?;
        let noted = self.records.change(name, |record| {
            record.image.role = ImageRole::Cut;
            record.wanted = false;
        });
        if let Err(error) = noted {
            warn!(vm = %name, "{error}");
        }
        if let Some(record) = self.record(name).ok().flatten() {
            self.release(name, record.image.generation);
        }
        self.events.of(name).record(EventKind::Stopped { cut: true });
        Ok(())
    }
}

fn end_with_custodian(socket: &Path) -> anyhow::Result<()> {
    match Custody::of_another(socket) {
        Ok((_custody, _, descriptors)) => {
            process::kill(descriptors[0].as_fd());
            Ok(())
        }
        Err(error) => match Unfound::of(&error) {
            Unfound::Ended => match fs::remove_file(socket) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error.into()),
                _ => Ok(()),
            },
            Unfound::Never => Custody::end(socket),
            Unfound::Later => Err(error),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::super::order::say;
    use super::*;
    use std::process::Command;
    use std::slice;
    use understudy_protocol::literal;

    /// Outcome that the daemon makes of what a next keeper says, by this.
    fn heard<T>(words: &[Word], hear: impl FnOnce(&mut Next) -> T) -> T {
        let (ours, theirs) = UnixStream::pair().unwrap();
        words.iter().for_each(|word| say(&theirs, word).unwrap());
        drop(theirs);
        let process = Command::new("true").spawn().unwrap();
        let mut next = Next { vm: literal("db"), process, said: BufReader::new(ours) };
        let made = hear(&mut next);
        next.process.wait().unwrap();
        made
    }

    #[test]
    fn what_a_next_keeper_says_out_of_order_is_not_taken_for_its_word() {
        let adopted = Word::Adopted(Adopted { former: 7, still_ms: 38 });
        let error = heard(slice::from_ref(&adopted), |next| next.await_ready()).unwrap_err();
        assert!(error.message.contains("has not waited for the last one"), "{error}");
        let ready = Word::Ready(Readable::own());
        let taken = heard(&[ready.clone(), ready.clone()], |next| {
            next.await_ready().unwrap();
            next.await_adoption()
        });
        assert!(matches!(taken, Err(NotTaken::Later(why)) if why.contains("still waits")));
        for words in [&[][..], slice::from_ref(&ready)] {
            let taken = heard(words, |next| {
                for _ in words {
                    next.await_ready().unwrap();
                }
                next.await_adoption()
            });
            assert!(matches!(taken, Err(NotTaken::Later(why)) if why.contains("has ended")));
        }
        let taken = heard(&[ready, adopted], |next| {
            next.await_ready().unwrap();
            next.await_adoption()
        });
        assert_eq!(taken.ok().unwrap().former, 7);
    }

    #[test]
    fn whoever_hears_why_a_guest_stands_still_hears_what_can_be_done() {
        let cannot = heard(&[Word::Cannot("version 9".to_owned())], |next| next.await_adoption());
        let later = heard(&[Word::Failed("no arbiter".to_owned())], |next| next.await_adoption());
        for (not_taken, words) in
            [(cannot, "install that of its last keeper"), (later, "further ones are started")]
        {
            let said = not_taken.err().unwrap().with_a_way_out(&literal("db"));
            assert!(said.contains(words), "{said}");
            assert!(said.contains("`understudy vm stop db --force`"), "{said}");
        }
    }
}
