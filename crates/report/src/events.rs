//! The events of this host: a bounded log that numbers, times and types each event.
//!
//! [`Journal`] has one owner, the host; a [`VmEvents`] is its part about one VM, for whoever works for that VM. To record
//! an event is to log it, too. Numbers only grow, also over restarts of the daemon, whose first is the time of its start
//! in milliseconds: "all after N" never gives an event twice, and says whether some are gone. If the clock was set back
//! between two daemons, it says so, too, and gives all.

mod kind;

pub use kind::{EventKind, Severity};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::{HashMap, VecDeque};
use std::mem::{Discriminant, discriminant};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::SystemTime;
use tokio::sync::watch;
use tracing::{error, info, warn};
use understudy_protocol::VmName;
use understudy_threads::Common;

/// Events that are kept.
const KEPT: usize = 2048;
/// Sentences of a VM that its status shows.
const SHOWN: usize = 64;
/// The number of a VM's last events among which one that is there is not recorded again.
const REPEATED_WITHIN: usize = 16;

/// An event.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Event {
    /// Its number: larger than that of every event before.
    pub number: u64,
    /// Time of the event, in milliseconds since 1970.
    pub at_ms: u64,
    /// The VM that it is about; none if it is about the host.
    pub vm: Option<VmName>,
    /// Severity of the event.
    pub severity: Severity,
    /// Kind of the event.
    #[serde(flatten)]
    pub kind: EventKind,
    /// The same as a sentence.
    pub text: String,
    /// The keeper that recorded it; none if the daemon did. Each daemon tells it anew, with a number of its own, and this
    /// stays.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub told_by: Option<ToldBy>,
}

/// The keeper that has recorded an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ToldBy {
    /// Its process.
    pub keeper: u32,
    /// The event's number there.
    pub number: u64,
}

/// Events after a number.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct EventList {
    /// The events, oldest first.
    pub events: Vec<Event>,
    /// The number to ask for next: the last event's, also of one that was not asked for.
    pub last: u64,
    /// Whether events after the number are not kept any more.
    pub missed: bool,
}

/// The events of a host. Clones share them.
#[derive(Clone)]
pub struct Journal(Arc<Shared>);

struct Shared {
    /// Changed under the lock of what is kept, as far as that is about the last event.
    state: watch::Sender<State>,
    kept: Common<Kept>,
}

/// What those see who wait for events.
struct State {
    /// The last event's number.
    last: u64,
    /// Whether there will be no more.
    closed: bool,
}

/// Events that are kept, oldest first.
struct Kept {
    events: VecDeque<Event>,
    /// The highest number of those that are not, also of earlier daemons'.
    gone: u64,
}

impl Kept {
    fn about<'a>(&'a self, vm: &'a VmName) -> impl DoubleEndedIterator<Item = &'a Event> {
        self.events.iter().filter(move |event| event.vm.as_ref() == Some(vm))
    }

    /// Lets go of the oldest of what happened most often, in the older half: one kind of event, to one VM. So whatever comes
    /// and goes all the time drives nothing else out, and what is new stays for a while, whatever it is.
    fn make_room(&mut self) {
        let older = || self.events.iter().take(KEPT / 2);
        let mut times: HashMap<_, usize> = HashMap::new();
        older().for_each(|event| *times.entry(subject(event)).or_default() += 1);
        let most = times.values().max().copied();
        let oldest = older().position(|event| times.get(&subject(event)).copied() == most);
        let removed = oldest.and_then(|oldest| self.events.remove(oldest));
        self.gone = removed.map_or(self.gone, |event| event.number.max(self.gone));
    }
}

fn subject(event: &Event) -> (Option<&VmName>, Discriminant<EventKind>) {
    (event.vm.as_ref(), discriminant(&event.kind))
}

impl Default for Journal {
    fn default() -> Journal {
        let first = now_ms();
        Journal(Arc::new(Shared {
            state: watch::Sender::new(State { last: first, closed: false }),
            kept: Common::new(Kept { events: VecDeque::new(), gone: first }),
        }))
    }
}

impl Journal {
    /// Records an event of the host itself.
    pub fn record(&self, kind: EventKind) {
        self.add(None, kind);
    }

    /// Takes over an event that a keeper of this host has recorded, and logged, about its VM.
    pub fn relay(&self, event: Event, keeper: Option<u32>) {
        let told_by = keeper.map(|keeper| ToldBy { keeper, number: event.number });
        self.keep(|number| Event { number, told_by, ..event });
    }

    /// The part about a VM.
    pub fn of(&self, vm: &VmName) -> VmEvents {
        VmEvents { journal: self.clone(), vm: vm.to_owned() }
    }

    fn add(&self, vm: Option<&VmName>, kind: EventKind) {
        let (text, severity) = (kind.to_string(), kind.severity());
        tell(vm, severity, &text);
        let vm = vm.cloned();
        self.keep(|number| Event {
            number,
            at_ms: now_ms(),
            vm,
            severity,
            kind,
            text,
            told_by: None,
        });
    }

    fn keep(&self, event: impl FnOnce(u64) -> Event) {
        let mut kept = self.0.kept.lock();
        let number = self.last() + 1;
        if kept.events.len() == KEPT {
            kept.make_room();
        }
        kept.events.push_back(event(number));
        self.0.state.send_modify(|state| state.last = number);
    }

    /// The events after this number, of all VMs or of one.
    pub fn after(&self, number: u64, vm: Option<&VmName>) -> EventList {
        let kept = self.0.kept.lock();
        let wanted = |event: &&Event| vm.is_none_or(|vm| event.vm.as_ref() == Some(vm));
        // A number that is still to come is an earlier daemon's, whose clock was ahead of this one's.
        let is_earlier = number > self.last();
        // What an earlier daemon knew is gone, which somebody who asks for all knows.
        let missed = number != 0 && number < kept.gone || is_earlier;
        let number = if is_earlier { 0 } else { number };
        let later = kept.events.iter().filter(|event| event.number > number);
        EventList { events: later.filter(wanted).cloned().collect(), last: self.last(), missed }
    }

    /// The last event's number.
    pub fn last(&self) -> u64 {
        self.0.state.borrow().last
    }

    /// Waits until the last event's number is another one, or there will be no more events.
    pub async fn await_other_than(&self, number: u64) {
        let is_over = |state: &State| state.last != number || state.closed;
        // An error would be that nobody can record any more: this journal can.
        let _ = self.0.state.subscribe().wait_for(is_over).await;
    }

    /// The last sentences about a VM, oldest first.
    pub fn sentences(&self, vm: &VmName) -> Vec<String> {
        let kept = self.0.kept.lock();
        let last = kept.about(vm).rev().take(SHOWN);
        let mut texts: Vec<String> = last.map(|event| event.text.clone()).collect();
        texts.reverse();
        texts
    }

    /// The time since which the VM has stood as it does, in milliseconds since 1970, if that is
    /// known.
    pub fn since(&self, vm: &VmName) -> Option<u64> {
        let kept = self.0.kept.lock();
        kept.about(vm).rev().find(|event| event.kind.is_a_turn()).map(|event| event.at_ms)
    }

    /// Records that somebody shows wrong tokens to the API over the network.
    pub fn wrong_tokens(&self, from: IpAddr) {
        self.record(EventKind::WrongTokens { from });
    }

    /// Ends it: nobody need wait for more.
    pub fn close(&self) {
        self.0.state.send_modify(|state| state.closed = true);
    }

    /// Whether there will be no more.
    pub fn is_closed(&self) -> bool {
        self.0.state.borrow().closed
    }
}

/// The events of one VM.
#[derive(Clone)]
pub struct VmEvents {
    journal: Journal,
    vm: VmName,
}

impl VmEvents {
    /// Records an event.
    pub fn record(&self, kind: EventKind) {
        self.journal.add(Some(&self.vm), kind);
    }

    /// Records an event unless one that says the same was recorded a short while ago.
    pub fn record_new(&self, kind: EventKind) {
        let known = {
            let kept = self.journal.0.kept.lock();
            kept.about(&self.vm)
                .rev()
                .take(REPEATED_WITHIN)
                .any(|event| event.kind.says_the_same(&kind))
        };
        if !known {
            self.record(kind);
        }
    }

    /// Records something that has no kind of its own.
    pub fn note(&self, text: impl Into<String>) {
        self.record(EventKind::Note { text: text.into() });
    }

    /// The VM.
    pub fn vm(&self) -> &VmName {
        &self.vm
    }

    /// The last sentences, oldest first.
    pub fn sentences(&self) -> Vec<String> {
        self.journal.sentences(&self.vm)
    }
}

fn tell(vm: Option<&VmName>, severity: Severity, text: &str) {
    match (severity, vm) {
        (Severity::Info, Some(vm)) => info!(%vm, "{text}"),
        (Severity::Info, None) => info!("{text}"),
        (Severity::Warning, Some(vm)) => warn!(%vm, "{text}"),
        (Severity::Warning, None) => warn!("{text}"),
        (Severity::Error, Some(vm)) => error!(%vm, "{text}"),
        (Severity::Error, None) => error!("{text}"),
    }
}

/// Milliseconds since 1970, as events have them.
pub fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use understudy_protocol::literal;
    use understudy_snapshot::SnapshotNumber;

    #[test]
    fn events_are_numbered_and_asked_for_by_number_and_vm() {
        let journal = Journal::default();
        let start = journal.last();
        let (db, web) = (literal("db"), literal("web"));
        journal.of(&db).record(EventKind::Started);
        journal.of(&web).record(EventKind::Rebooted);
        journal.record(EventKind::ArbiterFound { arbiter: "x".into() });
        let all = journal.after(0, None);
        let numbers: Vec<u64> = all.events.iter().map(|event| event.number).collect();
        assert_eq!(numbers, [start + 1, start + 2, start + 3]);
        assert_eq!((all.last, all.missed), (start + 3, false));
        assert_eq!(journal.after(start + 2, None).events.len(), 1);
        let of_web = journal.after(start, Some(&web));
        assert_eq!((of_web.events.len(), of_web.last), (1, start + 3));
        assert_eq!(journal.sentences(&db), ["started"]);
        assert_eq!(journal.since(&db), Some(all.events[0].at_ms));
        assert_eq!(journal.since(&web), None, "a reboot changes nothing about its protection");
    }

    #[test]
    fn the_oldest_make_room_and_whoever_missed_them_is_told() {
        let journal = Journal::default();
        let start = journal.last();
        let db = journal.of(&literal("db"));
        (0..KEPT + 10).for_each(|number| db.note(number.to_string()));
        let list = journal.after(start + 5, None);
        assert_eq!(list.events.len(), KEPT);
        assert!(list.missed);
        assert!(!journal.after(start + 10, None).missed);
        assert!(!journal.after(0, None).missed);
        assert!(journal.after(start - 1, None).missed, "it knew an earlier daemon's");
        assert_eq!(db.sentences().len(), SHOWN);
    }

    /// Regression: whoever followed was told nothing until the clock was where it had been.
    #[test]
    fn whoever_knows_a_number_that_is_still_to_come_is_told_all() {
        let journal = Journal::default();
        journal.of(&literal("db")).record(EventKind::Started);
        let list = journal.after(journal.last() + 5, None);
        assert_eq!((list.events.len(), list.last, list.missed), (1, journal.last(), true));
        assert!(!journal.after(list.last, None).missed);
    }

    #[test]
    fn what_goes_on_is_recorded_once() {
        let journal = Journal::default();
        let db = journal.of(&literal("db"));
        let full = || EventKind::DiskError { error: "full".into(), outcome: "it waits".into() };
        db.record_new(full());
        db.record(EventKind::Rebooted);
        db.record_new(full());
        assert_eq!(db.sentences(), ["full; it waits", "the guest rebooted"]);
    }

    /// Regression: each survey was an event, since the memory that a host had left was another each time.
    #[test]
    fn a_refusal_with_other_figures_is_the_same_one() {
        let journal = Journal::default();
        let db = journal.of(&literal("db"));
        db.record(EventKind::ProtectionLost { reason: "b is silent".into() });
        let since = journal.since(&literal("db")).unwrap();
        for left in 100..200 {
            let reason =
                format!("host b: it has {left} MiB available, of which 0.{left} are promised");
            db.record_new(EventKind::NoBackup { reason });
        }
        assert_eq!(db.sentences().len(), 2, "{:?}", db.sentences());
        assert_eq!(journal.since(&literal("db")), Some(since));
        db.record_new(EventKind::NoBackup { reason: "host b-2: it is silent".into() });
        db.record_new(EventKind::NoBackup { reason: "host b-3: it is silent".into() });
        assert_eq!(db.sentences().len(), 4, "{:?}", db.sentences());
    }

    /// Regression: a path that came and went had all other events forgotten within hours.
    #[test]
    fn what_happens_all_the_time_drives_nothing_else_out() {
        let journal = Journal::default();
        let (db, web) = (journal.of(&literal("db")), journal.of(&literal("web")));
        let start = journal.last();
        web.record(EventKind::Started);
        db.record(EventKind::Protected { peer: literal("b") });
        let since = journal.since(&literal("db")).unwrap();
        for _ in 0..KEPT / 2 + 50 {
            db.record(EventKind::PathUp { path: "2".into(), up: 2, all: 2 });
            let (path, reason) = ("2".into(), "silent".into());
            db.record(EventKind::PathDown { path, reason, left: 1, all: 2 });
        }
        assert_eq!(journal.since(&literal("db")), Some(since));
        let list = journal.after(start + 1, None);
        assert_eq!((list.events.len(), list.missed), (KEPT - 1, true));
        assert_eq!(web.sentences(), ["started"]);
        let numbers: Vec<u64> = list.events.iter().map(|event| event.number).collect();
        assert!(numbers.is_sorted() && numbers.last() == Some(&journal.last()));
    }

    #[test]
    fn an_event_of_another_process_gets_a_number_of_this_one() {
        let (keepers, daemons) = (Journal::default(), Journal::default());
        keepers.of(&literal("db")).record(EventKind::Started);
        daemons.record(EventKind::LeaseRenewed);
        let event = keepers.after(0, None).events.remove(0);
        daemons.relay(event.clone(), Some(7));
        let relayed = daemons.after(0, None).events.remove(1);
        assert_eq!(relayed.number, daemons.last());
        assert_eq!(relayed.told_by, Some(ToldBy { keeper: 7, number: event.number }));
        assert_eq!(Event { number: event.number, told_by: None, ..relayed }, event);
    }

    #[test]
    fn an_event_is_flat_json_and_comes_back() {
        let journal = Journal::default();
        journal.of(&literal("db")).record(EventKind::Protected { peer: literal("b") });
        let event = journal.after(0, None).events.remove(0);
        let json = serde_json::to_value(&event).unwrap();
        assert_eq!(json["kind"], "protected");
        assert_eq!(json["peer"], "b");
        assert_eq!(json["severity"], "info");
        assert_eq!(json["text"], "protected: b stands by");
        assert_eq!(serde_json::from_value::<Event>(json).unwrap(), event);
    }

    /// Events of some kinds once had a field twice, and nobody could read them.
    #[test]
    fn no_event_has_a_field_that_all_have() {
        let (journal, group) = (Journal::default(), literal("shop"));
        let db = journal.of(&literal("db"));
        db.note("goes on in another QEMU");
        db.record(EventKind::Snapshot {
            group,
            number: SnapshotNumber(7),
            store: "/srv".to_owned(),
        });
        db.record(EventKind::Restored { group: literal("shop"), number: SnapshotNumber(7) });
        for event in journal.after(0, None).events {
            let text = serde_json::to_string(&event).unwrap();
            assert_eq!(serde_json::from_str::<Event>(&text).expect(&text), event);
        }
    }
}
