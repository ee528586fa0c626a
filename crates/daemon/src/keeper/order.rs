//! Orders of its daemon that a keeper carries out for its VM as soon as it is there: the VM starts
//! in it, and nowhere else.

use super::Keeper;
use super::legacy::Readable;
use super::start::{await_socket, reap_aside};
use super::view::Files;
use crate::admission::open_disks;
use crate::arrivals::Arrival;
use crate::config::LONGEST_LEASE;
use crate::containment::spawn_for_request;
use crate::deadline::Bounded;
use crate::host::{Host, internal};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::Child;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;
use tracing::warn;
use understudy_protocol::{GroupName, VmName};
use understudy_qemu::VmDefinition;
use understudy_report::error::{ErrorKind, HostError};
use understudy_report::{RecoverReport, RecoverRequest};

/// Time for an order to be carried out, as far as no lease of another host is waited for.
const PATIENCE: Duration = Duration::from_secs(60);
/// Time for one that takes none.
const PATIENCE_FOR_A_WORD: Duration = Duration::from_secs(5);
/// Bytes of an order, at most.
const LONGEST_ORDER: usize = 4096;
/// Bytes of its answer, at most: what was found of a VM's images on all hosts.
const LONGEST_ANSWER: u64 = 1 << 20;

/// An order. Its answer is a line of JSON on the keeper's standard input, a socket then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Order {
    /// Brings it up with its host.
    ComeUp,
    /// Finds its valid images, and starts it on them.
    Recover(RecoverRequest),
    /// Restores it as the daemon, which has a coordinator's orders, says on that socket.
    Restore,
    /// Ends it, since nobody wants it any more.
    Stop,
    /// Says whether it could be left now to a keeper that reads this.
    MayLeave(Readable),
    /// Leaves it to that keeper, and ends without ending it.
    Leave(Readable),
    /// Goes on with what the last keeper leaves, or has left. The answers are [`super::adopt`]'s.
    Adopt,
}

impl Order {
    /// Time that whoever gave it waits: a keeper that has not answered by then hangs.
    fn patience(self) -> Duration {
        fail::fail_point!("impatient", |_| PATIENCE_FOR_A_WORD);
        match self {
            Order::ComeUp | Order::Recover(_) => LONGEST_LEASE + PATIENCE,
            Order::Restore | Order::Stop | Order::Leave(_) | Order::Adopt => PATIENCE,
            Order::MayLeave(_) => PATIENCE_FOR_A_WORD,
        }
    }
}

/// Outcome of an order.
pub(super) type Answer = Result<Option<RecoverReport>, HostError>;

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&serde_json::to_string(self).map_err(|_| fmt::Error)?)
    }
}

impl FromStr for Order {
    type Err = serde_json::Error;

    fn from_str(text: &str) -> Result<Order, serde_json::Error> {
        serde_json::from_str(text)
    }
}

/// An order about one of a keeper's VMs, or another one of its group, a line of JSON on a socket on which it answers.
#[derive(Serialize, Deserialize)]
struct Further {
    vm: VmName,
    order: Order,
}

/// Follower that has an order.
pub(super) enum Follower {
    /// A keeper that was started for it.
    New(Child),
    /// The keeper of the VM's group.
    OfGroup,
}

impl Keeper {
    /// Has it carry out an order about one of its VMs, and waits until it has.
    pub(super) fn obey(&self, vm: &VmName, order: &Order) -> Answer {
        hear(self.order_about(vm, order)?, order.patience())
    }

    /// Gives it an order about one of its VMs, or another one of its group; returns the other end of its socket.
    fn order_about(&self, vm: &VmName, order: &Order) -> Result<UnixStream, HostError> {
        let (ours, its_end) = UnixStream::pair().map_err(internal)?;
        let further = Further { vm: vm.clone(), order: *order };
        say(&ours, &further).map_err(internal)?;
        self.order(&its_end).map_err(|error| {
            let message = format!("the keeper of {}: {error:#}", self.vm);
            HostError::new(ErrorKind::Unreachable, message)
        })?;
        Ok(ours)
    }
}

impl Host {
    /// Has a keeper bring its VM up, as it was protected. The VM ends if it is not wanted by then.
    pub(crate) fn bring_up_in_keeper(
        self: &Arc<Self>,
        definition: &VmDefinition,
        still_wanted: impl FnOnce() -> bool,
    ) -> Result<(), HostError> {
        let name = &definition.name;
        let (follower, arrival, _) = self.order_a_keeper(definition, &Order::ComeUp)?;
        self.keep_place(follower, arrival);
        if still_wanted() {
            return Ok(());
        }
        if let Err(error) = self.stop_in_keeper(name) {
            warn!(vm = %name, "nobody wants it any more, and it may go on: {error}");
        }
        self.note_unwanted(name);
        Ok(())
    }

    /// Ends a VM in its keeper, if it has one. Others of its group go on there.
    pub(super) fn stop_in_keeper(&self, name: &VmName) -> Result<(), HostError> {
        let Some(keeper) = self.keeper_of(name) else { return Ok(()) };
        match keeper.obey(name, &Order::Stop) {
            // It was quicker.
            Err(_) if self.keeper_of(name).is_none() => Ok(()),
            stopped => stopped.map(drop),
        }
    }

    /// [`Host::recover`], in a keeper if the VM gets one here.
    pub fn recover_in_its_place(
        self: &Arc<Self>,
        name: &VmName,
        request: RecoverRequest,
    ) -> Result<RecoverReport, HostError> {
        if request.dry_run || !self.starts_in_keeper(name) || self.has_guest(name) {
            return self.recover(name, request);
        }
        // What speaks against it is found before a process is started, which asks once more.
        let inquiry = self.inquire_of_images(name)?;
        let record = self.recovery(name, &request, inquiry)?.record;
        let order = Order::Recover(request);
        let (follower, arrival, report) = self.order_a_keeper(&record.definition, &order)?;
        self.keep_place(follower, arrival);
        report.ok_or_else(|| not_understood("it runs, and says nothing of how it was found"))
    }

    /// Has a keeper carry out an order about its VM, and waits until it has.
    fn order_a_keeper(
        &self,
        definition: &VmDefinition,
        order: &Order,
    ) -> Result<(Follower, Arrival, Option<RecoverReport>), HostError> {
        let name = &definition.name;
        let files = self.files_of(definition);
        let adding = self.adding.lock();
        self.make_way(definition)?;
        // What may be missing for long is no reason to start a process again and again.
        self.check_bridges(&definition.cards)?;
        let directory = name.below(&self.config.state_dir);
        let record = self.record(name)?;
        let open = || open_disks(definition, record.as_ref(), &directory).map(drop);
        let (arrival, ()) = self.open_aside(adding, definition, open)?;
        let (follower, said) = self.give_order(name, order, &files)?;
        match hear(said, order.patience()) {
            Ok(report) => {
                arrival.goes_to_keeper();
                Ok((follower, arrival, report))
            }
            Err(error) => {
                // Others of its group may be in it, and it goes on with them.
                if let Follower::New(process) = follower {
                    reap_aside(process, name);
                }
                // It lets go of a name for which it has no VM.
                self.await_last_keeper(name);
                Err(error)
            }
        }
    }

    /// Keeps a VM's place for as long as its keeper has it.
    pub(super) fn keep_place(self: &Arc<Self>, follower: Follower, arrival: Arrival) {
        self.vms.remove(arrival.vm());
        if let Follower::New(process) = follower {
            reap_aside(process, arrival.vm());
        }
        self.follow_to_keeper(arrival);
    }

    /// Gives an order to the keeper of the VM's group if it has one, else to a new one; returns the other end of its socket.
    fn give_order(
        &self,
        vm: &VmName,
        order: &Order,
        files: &Files,
    ) -> Result<(Follower, UnixStream), HostError> {
        // Of two members that come at once the second finds the keeper of the first.
        let _adding = self.adding.lock();
        let group = self.group_of(vm);
        let Some(shared) = group.as_ref().and_then(|group| self.keeper_of_group(group)) else {
            let name = group.as_ref().map(|group| &group.name);
            let (mut process, said) = self.spawn_ordered_keeper(vm, name, order, files)?;
            if group.is_some() {
                // If it ends, its answer says so.
                let _ = await_socket(&mut process, vm, &self.keeper_socket(vm));
            }
            return Ok((Follower::New(process), said));
        };
        self.admit(vm, files, &shared)?;
        Ok((Follower::OfGroup, shared.order_about(vm, order)?))
    }

    /// Starts a keeper that has an order; returns the other end of its socket.
    pub(crate) fn spawn_ordered_keeper(
        &self,
        vm: &VmName,
        group: Option<&GroupName>,
        order: &Order,
        files: &Files,
    ) -> Result<(Child, UnixStream), HostError> {
        let (ours, its_end) = UnixStream::pair().map_err(internal)?;
        let input = OwnedFd::from(its_end).into();
        let process = self.spawn_keeper(vm, group, input, Some(order), files)?;
        Ok((process, ours))
    }

    /// Takes an order about a VM that this process keeps, or another one of its group.
    pub(super) fn take_further_order(
        self: &Arc<Self>,
        mut daemon: UnixStream,
    ) -> anyhow::Result<()> {
        let Further { vm, order } = serde_json::from_str(&first_line(&mut daemon)?)?;
        let host = self.clone();
        spawn_for_request("order", move || {
            host.while_placed(&vm, |placed| match has_hung_up(&daemon) {
                // What it has told its operator is not made untrue.
                true => warn!(%vm, "the daemon does not wait for its order any more"),
                false => host.answer(&vm, order, daemon, placed),
            });
        });
        Ok(())
    }

    /// Has the order carried out with which this process was started. What comes of it is no concern of the
    /// other VMs that come into the process meanwhile.
    pub fn take_first_order(self: &Arc<Self>, vm: &VmName, order: Order, daemon: UnixStream) {
        let (host, vm) = (self.clone(), vm.clone());
        let follow = move || match order {
            // It is told more, and begins later.
            Order::Restore => {
                if let Err(error) = host.follow_restore(daemon) {
                    warn!(%vm, "is not restored: {error}");
                }
            }
            _ => host.while_placed(&vm, |placed| {
                let placed = placed.and_then(|()| hold_in_a_test());
                host.answer(&vm, order, daemon, placed);
            }),
        };
        spawn_for_request("order", follow);
    }

    /// Carries out an order, if the VM has a place here, and tells the daemon.
    fn answer(
        self: &Arc<Self>,
        vm: &VmName,
        order: Order,
        mut daemon: UnixStream,
        placed: Result<(), HostError>,
    ) {
        let answer = placed.and_then(|()| match order {
            Order::ComeUp => self.come_up(vm).map(Some),
            Order::Recover(request) => self.recover(vm, request).map(Some),
            Order::Restore => {
                let message = "what is restored of a group is not its keeper's affair".to_owned();
                Err(HostError::new(ErrorKind::Conflict, message))
            }
            Order::Stop => self.vm_stop(vm, true).map(|()| None),
            Order::MayLeave(reads) => self.check_leavable(vm, reads).map(|_| None),
            // It answers itself, if it can be left: this process ends then.
            Order::Leave(reads) => Err(self.leave_to_next(vm, reads, &mut daemon)),
            Order::Adopt => {
                let message =
                    "this keeper has a VM: it cannot go on with that of another".to_owned();
                Err(HostError::new(ErrorKind::Conflict, message))
            }
        });
        if let Err(error) = &answer {
            warn!(%vm, "its order is not carried out: {error}");
        }
        if let Err(error) = say(&daemon, &answer) {
            // The next daemon finds the VM without being told.
            warn!(%vm, "the daemon does not hear what came of its order: {error}");
        }
    }
}

/// A test has a first order wait for as long as there is an empty file that the fail point names, and fail
/// if there is something in it then.
fn hold_in_a_test() -> Result<(), HostError> {
    fail::fail_point!("first-order", |file| {
        let file = file.unwrap_or_default();
        loop {
            match std::fs::read_to_string(&file) {
                Ok(words) if words.is_empty() => {
                    std::thread::sleep(std::time::Duration::from_millis(20));
                }
                Ok(words) => return Err(HostError::new(ErrorKind::Internal, words)),
                Err(_) => return Ok(()),
            }
        }
    });
    Ok(())
}

/// Whether nobody is there any more who waits for an answer.
pub(super) fn has_hung_up(daemon: &UnixStream) -> bool {
    let mut ends = [PollFd::new(daemon.as_fd(), PollFlags::empty())];
    let seen = poll(&mut ends, PollTimeout::ZERO).is_ok_and(|ready| ready > 0);
    seen && ends[0].revents().is_some_and(|events| events.contains(PollFlags::POLLHUP))
}

/// Says something in a line of JSON: in one call, and short enough for the socket's buffer, so that lines of several threads
/// do not mix.
pub(crate) fn say(mut to: &UnixStream, what: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(what)?;
    line.push(b'\n');
    to.write_all(&line)
}

/// A line, and no byte of what follows it: that is for whoever follows the order.
fn first_line(from: &mut UnixStream) -> io::Result<String> {
    let (mut line, mut byte) = (Vec::new(), [0]);
    while line.len() < LONGEST_ORDER {
        from.read_exact(&mut byte)?;
        if byte == *b"\n" {
            break;
        }
        line.extend(byte);
    }
    String::from_utf8(line).map_err(io::Error::other)
}

/// The answer to an order; the end of whoever was to give it is one, too, and its silence.
fn hear(said: UnixStream, patience: Duration) -> Answer {
    let said = Bounded::new(said, patience).take(LONGEST_ANSWER);
    let mut line = String::new();
    match BufReader::new(said).read_line(&mut line) {
        Err(error)
            if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) =>
        {
            let message = format!("its keeper has not answered for {} s", patience.as_secs());
            Err(HostError::new(ErrorKind::Unreachable, message))
        }
        Ok(read) if read as u64 >= LONGEST_ANSWER => Err(not_understood("it goes on and on")),
        Ok(1..) => serde_json::from_str(&line)
            .unwrap_or_else(|error| Err(not_understood(&error.to_string()))),
        Ok(0) | Err(_) => {
            let message = "its keeper has ended: the daemon's log has its words".to_owned();
            Err(HostError::new(ErrorKind::Internal, message))
        }
    }
}

fn not_understood(why: &str) -> HostError {
    HostError::new(ErrorKind::Internal, format!("its keeper is not understood: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_is_understood_by_the_keeper_that_gets_it() {
        let request = RecoverRequest { force: true, ..RecoverRequest::default() };
        let simple = [Order::ComeUp, Order::Restore, Order::Stop, Order::Adopt];
        let reading = [Order::MayLeave(Readable::own()), Order::Leave(Readable::own())];
        for order in simple.into_iter().chain(reading).chain([Order::Recover(request)]) {
            assert_eq!(order.to_string().parse::<Order>().unwrap(), order);
        }
        for wrong in ["", "come-up", "{}", r#"{"recover":{"force":1}}"#, r#""restart""#] {
            assert!(wrong.parse::<Order>().is_err(), "{wrong}");
        }
    }

    fn heard(said: &[u8]) -> Answer {
        let (daemon, mut keeper) = UnixStream::pair().unwrap();
        keeper.write_all(said).unwrap();
        drop(keeper);
        hear(daemon, PATIENCE)
    }

    #[test]
    fn a_keeper_that_says_nothing_is_not_waited_for_without_a_bound() {
        let (daemon, _keeper) = UnixStream::pair().unwrap();
        let error = hear(daemon, Duration::from_millis(1)).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Unreachable);
        assert!(error.message.contains("has not answered"), "{error}");
    }

    /// The daemon took all that it said into its memory, and for as long as it spoke.
    #[test]
    fn a_keeper_that_goes_on_and_on_is_heard_with_a_bound() {
        let (daemon, mut keeper) = UnixStream::pair().unwrap();
        let speaker = std::thread::spawn(move || while keeper.write_all(&[b'1'; 4096]).is_ok() {});
        let error = hear(daemon, PATIENCE).unwrap_err();
        assert!(error.message.contains("goes on and on"), "{error}");
        speaker.join().unwrap();
        let (daemon, mut keeper) = UnixStream::pair().unwrap();
        let slow = std::thread::spawn(move || {
            while keeper.write_all(b"1").is_ok() {
                std::thread::sleep(Duration::from_millis(10));
            }
        });
        let error = hear(daemon, Duration::from_millis(200)).unwrap_err();
        assert!(error.message.contains("has not answered"), "{error}");
        slow.join().unwrap();
    }

    #[test]
    fn an_order_is_dropped_if_nobody_waits_for_its_answer() {
        let (daemon, keeper) = UnixStream::pair().unwrap();
        assert!(!has_hung_up(&keeper));
        (&daemon).write_all(b"1\n").unwrap();
        assert!(!has_hung_up(&keeper), "what is still to be read is no end");
        drop(daemon);
        assert!(has_hung_up(&keeper));
    }

    #[test]
    fn the_end_of_a_keeper_and_what_is_no_answer_are_errors() {
        let refusal: Answer = Err(HostError::new(ErrorKind::Conflict, "it runs".to_owned()));
        let error = heard(&serde_json::to_vec(&refusal).unwrap()).unwrap_err();
        assert_eq!((error.kind, &*error.message), (ErrorKind::Conflict, "it runs"));
        for (said, words) in
            [(&b""[..], "has ended"), (b"\xff\n", "has ended"), (b"1\n", "not understood")]
        {
            let error = heard(said).unwrap_err();
            assert!(error.message.contains(words), "{error}");
        }
    }
}
