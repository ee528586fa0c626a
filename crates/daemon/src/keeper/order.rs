//! What a keeper does about its VM as soon as it is there, by its daemon's order: the VM starts in it,
//! and nowhere else.

use super::start::{end, reap, reap_aside};
use crate::admission::open_disks;
use crate::arrivals::Arrival;
use crate::host::{Host, internal};
use crate::vm::Vm;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::Child;
use std::str::FromStr;
use std::sync::Arc;
use tracing::warn;
use understudy_protocol::VmName;
use understudy_qemu::VmDefinition;
use understudy_report::error::{ErrorKind, HostError};
use understudy_report::{RecoverReport, RecoverRequest};

/// A keeper's option that is an [`Order`].
const OPTION: &str = "--order";

/// An order. Its answer is a line of JSON on the keeper's standard input, a socket then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Order {
    /// To bring it up with its host.
    ComeUp,
    /// To find its valid images, and start it on them.
    Recover(RecoverRequest),
    /// To restore it as the daemon, which has a coordinator's orders, says on that socket.
    Restore,
}

/// What came of an order.
type Answer = Result<RecoverReport, HostError>;

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

impl Host {
    /// Has a keeper bring its VM up, as it was protected. It ends if the VM is not wanted by then.
    pub(crate) fn bring_up_in_keeper(
        &self,
        definition: &VmDefinition,
        still_wanted: impl FnOnce() -> bool,
    ) -> Result<(), HostError> {
        let name = &definition.name;
        let (process, arrival, _) = self.order_a_keeper(definition, &Order::ComeUp)?;
        if still_wanted() {
            reap_aside(process, name, move || drop(arrival));
        } else {
            end(process, name);
            self.note_unwanted(name);
        }
        Ok(())
    }

    /// [`Host::recover`], in a keeper if the VM gets one here. Groups are the daemon's.
    pub fn recover_in_its_place(
        self: &Arc<Self>,
        name: &VmName,
        request: RecoverRequest,
    ) -> Result<RecoverReport, HostError> {
        let is_here = || matches!(self.vms.lock().get(name), Some(Vm::Primary(_) | Vm::Backup(_)));
        let is_member = self.record(name)?.is_some_and(|record| record.group.is_some());
        if request.dry_run || is_member || !self.has_keeper_of_its_own(name) || is_here() {
            return self.recover(name, request);
        }
        // What speaks against it is found before a process is started, which asks once more.
        let inquiry = self.inquire_of_images(name)?;
        let record = self.recovery(name, &request, inquiry)?.record;
        let order = Order::Recover(request);
        let (process, arrival, report) = self.order_a_keeper(&record.definition, &order)?;
        self.vms.lock().remove(name);
        reap_aside(process, name, move || drop(arrival));
        Ok(report)
    }

    /// Starts a keeper that carries out an order about its VM, and waits until it has.
    fn order_a_keeper(
        &self,
        definition: &VmDefinition,
        order: &Order,
    ) -> Result<(Child, Arrival, RecoverReport), HostError> {
        let name = &definition.name;
        let arrival = {
            let _adding = self.adding.lock();
            self.make_way(definition)?;
            // What may be missing for long is no reason to start a process again and again.
            self.check_bridges(&definition.cards)?;
            drop(open_disks(definition, self.record(name)?.as_ref())?);
            Arrival::expect(&self.arrivals, &self.config.name, definition)
        };
        let (process, said) = self.spawn_ordered_keeper(name, order)?;
        match hear(said) {
            Ok(report) => {
                arrival.goes_to_keeper();
                Ok((process, arrival, report))
            }
            Err(error) => {
                reap(process, name);
                Err(error)
            }
        }
    }

    /// Starts a keeper that has an order, and the other end of its socket.
    pub(crate) fn spawn_ordered_keeper(
        &self,
        vm: &VmName,
        order: &Order,
    ) -> Result<(Child, UnixStream), HostError> {
        let (ours, its_end) = UnixStream::pair().map_err(internal)?;
        let input = OwnedFd::from(its_end).into();
        let process = self.spawn_keeper(vm, None, input, &[OPTION, &order.to_string()])?;
        Ok((process, ours))
    }

    /// Carries out an order about the VM that this process keeps, and tells the daemon. An error if
    /// the VM is not to be waited for.
    pub fn follow_order(
        self: &Arc<Self>,
        vm: &VmName,
        order: Order,
        daemon: UnixStream,
    ) -> Result<(), HostError> {
        let answer = match order {
            Order::ComeUp => self.come_up(vm),
            Order::Recover(request) => self.recover(vm, request),
            Order::Restore => return self.follow_restore(daemon),
        };
        if let Err(error) = tell(daemon, &answer) {
            // The next daemon finds the VM without being told.
            warn!(%vm, "the daemon does not hear what came of its order: {error}");
        }
        answer.map(drop)
    }
}

fn tell(mut daemon: UnixStream, answer: &Answer) -> io::Result<()> {
    let mut line = serde_json::to_vec(answer)?;
    line.push(b'\n');
    daemon.write_all(&line)
}

/// The answer to an order; the end of whoever was to give it is one, too.
fn hear(said: UnixStream) -> Answer {
    let failed = |message: String| Err(HostError::new(ErrorKind::Internal, message));
    let mut line = String::new();
    match BufReader::new(said).read_line(&mut line) {
        Ok(1..) => serde_json::from_str(&line)
            .unwrap_or_else(|error| failed(format!("its keeper is not understood: {error}"))),
        Ok(0) | Err(_) => failed("its keeper has ended: the daemon's log has its words".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_is_understood_by_the_keeper_that_gets_it() {
        let request = RecoverRequest { force: true, ..RecoverRequest::default() };
        for order in [Order::ComeUp, Order::Recover(request), Order::Restore] {
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
        hear(daemon)
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
