//! Events of keepers, taken over into the daemon's journal.

use super::asking::ask;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};
use tracing::warn;
use understudy_client::{Client, Failure};
use understudy_daemon::Host;
use understudy_daemon::keeper::{Keeper, Word};
use understudy_protocol::VmName;
use understudy_report::events::{Event, EventList};

/// Time between two tries to hear what a keeper tells, and in which so much of it is taken over.
const LOOK: Duration = Duration::from_millis(250);
/// Events of a keeper that are taken over at a look.
const EVENTS_AT_ONCE: usize = 32;

/// The VMs whose keepers are followed.
type Followed = Arc<Mutex<BTreeSet<VmName>>>;

/// Takes over the events of all keepers, and what they have of the VMs that are to come up, for as long as the host
/// lives.
pub fn follow(host: &Arc<Host>) -> std::io::Result<()> {
    let (mut word, host) = (host.word_of_keepers(), Arc::downgrade(host));
    let followed = Followed::default();
    let look = move || {
        while let Some(host) = host.upgrade() {
            let is_more_to_come = look_for_keepers(&host, &followed);
            drop(host);
            word.wait(is_more_to_come);
        }
    };
    thread::Builder::new().name("keepers-events".to_owned()).spawn(look).map(drop)
}

/// Has those followed that are not yet; whether more is about to come.
fn look_for_keepers(host: &Arc<Host>, followed: &Followed) -> bool {
    let mut is_more_to_come = host.expects_vms();
    for keeper in host.keepers() {
        if keeper.problem.is_some() {
            is_more_to_come = true;
            continue;
        }
        if host.is_left_to_keeper(&keeper.vm) {
            match has_its_vm(&keeper) {
                true => host.await_no_more(&keeper.vm),
                false => is_more_to_come = true,
            }
        }
        begin(host, keeper, followed);
    }
    is_more_to_come
}

fn has_its_vm(keeper: &Keeper) -> bool {
    ask(&keeper.vm, &keeper.socket, |client| client.vm_status(&keeper.vm)).is_ok()
}

fn begin(host: &Arc<Host>, keeper: Keeper, followed: &Followed) {
    let set = |set: &Mutex<BTreeSet<VmName>>, change: &dyn Fn(&mut BTreeSet<VmName>) -> bool| {
        change(&mut set.lock().unwrap_or_else(PoisonError::into_inner))
    };
    if !set(followed, &|followed| followed.insert(keeper.vm.clone())) {
        return;
    }
    let word = host.word_of_keepers();
    let (host, all, vm) = (Arc::downgrade(host), followed.clone(), keeper.vm.clone());
    let relay = move || {
        relay(&host, &keeper, &word);
        set(&all, &|followed| followed.remove(&keeper.vm));
        // The next one can be followed.
        word.tell();
    };
    let thread = thread::Builder::new().name(format!("events-{vm}"));
    if let Err(error) = thread.spawn(relay) {
        warn!(%vm, "its keeper's events are not shown: no thread: {error}");
    }
}

/// Takes over a keeper's events until it has ended.
fn relay(host: &Weak<Host>, keeper: &Keeper, word: &Word) {
    // Not again at once, if there are no descriptors.
    let Ok(client) = Client::new(&keeper.socket) else { return thread::sleep(LOOK) };
    let (mut last, mut pace) = (0, Pace::new(LOOK));
    while let Some(host) = host.upgrade() {
        let is_there = host.keeper_of(&keeper.vm).is_some_and(|now| now.pid == keeper.pid);
        let events = host.events();
        drop(host);
        match events_told(&client, &keeper.vm, last) {
            Ok((told, of_vm)) => {
                last = told;
                pace.step();
                for event in of_vm {
                    pace.step();
                    events.relay(event, keeper.pid);
                }
            }
            Err(_) if is_there => {
                // It may just have ended.
                word.tell();
                thread::sleep(LOOK);
            }
            Err(_) => return,
        }
    }
}

/// Waits for the events of a VM after this number, as its keeper tells them; returns the number to go on from, too.
pub(super) fn events_told(
    client: &Client,
    vm: &VmName,
    after: u64,
) -> Result<(u64, Vec<Event>), Failure> {
    let EventList { last, mut events, .. } = client.events(after, Some(vm), true)?;
    events.retain(|event| event.vm.as_ref() == Some(vm));
    Ok((last, events))
}

/// Answers and events that are taken over in a while: whoever invents them does not drive those of others out in no time.
struct Pace {
    length: Duration,
    since: Instant,
    taken: usize,
}

impl Pace {
    fn new(length: Duration) -> Pace {
        Pace { length, since: Instant::now(), taken: 0 }
    }

    /// One more; waits for the next while if this one has had its share.
    fn step(&mut self) {
        let left = self.length.saturating_sub(self.since.elapsed());
        if self.taken == EVENTS_AT_ONCE {
            thread::sleep(left);
        }
        if left.is_zero() || self.taken == EVENTS_AT_ONCE {
            *self = Pace::new(self.length);
        }
        self.taken += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_of_events_is_taken_over_slowly() {
        let length = Duration::from_millis(50);
        let (before, mut pace) = (Instant::now(), Pace::new(length));
        (0..=2 * EVENTS_AT_ONCE).for_each(|_| pace.step());
        assert!(before.elapsed() >= 2 * length);
    }
}
