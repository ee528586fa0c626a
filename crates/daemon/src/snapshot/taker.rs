//! The coordinator of a snapshot: drives `Taker`.

use super::exchange::Exchange;
use super::placement::store_error;
use super::{time_of, unix_now};
use crate::containment::spawn_for_request;
use crate::host::Host;
use crossbeam_channel::{Receiver, Sender};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};
use tracing::warn;
use understudy_cluster::messages::{GroupPlaces, Reply, TakeTask, ToCoordinator, ToMember};
use understudy_protocol::GroupName;
use understudy_replication::clock;
use understudy_replication::moments::pass;
use understudy_report::cluster::SnapshotRequest;
use understudy_report::error::{ErrorKind, HostError};
use understudy_snapshot::{
    Failure, Incarnation, Manifest, Member, MemberEntry, Part, SnapshotNumber, Store, StoreAddress,
    StoreError, Taker, TakerAction, TakerEvent, TakerPhase, Writing,
};

/// Pause before a store that did not answer is asked again whether a manifest is there.
const ASK_AGAIN: Duration = Duration::from_secs(1);

/// Time for which a manifest is written again and again: less than the coordinator waits for it.
const TRIED_FOR: Duration = Duration::from_secs(600);

/// Takes one snapshot.
pub struct Coordinator {
    host: Arc<Host>,
    store: Arc<Store>,
    task: TakeTask,
    label: Option<String>,
    incarnation: Incarnation,
    memory: Vec<u64>,
    events: Sender<TakerEvent>,
    heard: Receiver<TakerEvent>,
    exchange: Exchange,
    writing: Option<Writing>,
}

impl Coordinator {
    /// Makes the taker of this group, whose members have so much memory.
    pub fn new(
        host: &Arc<Host>,
        group: GroupPlaces,
        incarnation: Incarnation,
        memory: Vec<u64>,
        location: StoreAddress,
        request: &SnapshotRequest,
    ) -> Result<Coordinator, HostError> {
        let used = host.used_stores(&group)?;
        let store = used.open_or_make(&host.config.store_keys, &location)?;
        let (events, heard) = crossbeam_channel::unbounded();
        let sender = events.clone();
        let reply: Reply = Arc::new(move |heard| {
            if let ToCoordinator::Take(member, report) = heard {
                // Nobody listens after the end.
                let _ = sender.send(TakerEvent::Report(member, report));
            }
        });
        let exchange = Exchange::new(host, &group.hosts, reply);
        let task = TakeTask {
            group,
            member: Member(0),
            store: location,
            compression: request.compression,
            trace_ms: request.trace_ms.unwrap_or_default(),
            recency: request.recency,
        };
        let (store, label) = (Arc::new(store), request.label.clone());
        Ok(Coordinator {
            host: host.clone(),
            store,
            task,
            label,
            incarnation,
            memory,
            events,
            heard,
            exchange,
            writing: None,
        })
    }

    /// Returns when it exists, or was given up by all that answer. `after` is the last number
    /// that the group's members have heard of.
    pub fn run(mut self, after: SnapshotNumber) -> Result<Manifest, HostError> {
        let group = self.task.group.name.clone();
        let begun = self.store.begin(&group, after, time_of(&self.store));
        let writing = begun.map_err(|error| store_error("", error))?;
        let number = writing.number;
        self.writing = Some(writing);
        let mut actions = Vec::new();
        let members = self.task.group.vms.len();
        let mut taker = Taker::new(number, members, clock::now(), &mut actions);
        let mut has_begun = false;
        loop {
            for action in std::mem::take(&mut actions) {
                self.perform(number, action);
            }
            // All members have prepared. Of one that fails the others have yet to say that they gave up.
            has_begun |= matches!(taker.phase(), TakerPhase::Saving | TakerPhase::Publishing);
            let Some(deadline) = taker.deadline() else { break };
            let event = self.heard.recv_timeout(deadline - clock::now());
            taker.handle(clock::now(), event.unwrap_or(TakerEvent::Tick), &mut actions);
        }
        match taker.phase() {
            TakerPhase::Failed(failure) => Err(self.explain(number, failure, has_begun)),
            _ => self.store.snapshot(&group, Some(number)).map_err(|error| store_error("", error)),
        }
    }

    fn perform(&mut self, number: SnapshotNumber, action: TakerAction) {
        match action {
            TakerAction::Send(member, order) => {
                let task = TakeTask { member, ..self.task.clone() };
                let host = &self.task.group.hosts[member.index()];
                self.exchange.send_to(host, ToMember::Take(task, order));
            }
            TakerAction::Publish(parts) => {
                let manifest = self.manifest(number, parts);
                let Some(writing) = self.writing.take() else { return };
                let (store, events) = (self.store.clone(), self.events.clone());
                let host = Arc::downgrade(&self.host);
                spawn_for_request("publish", move || {
                    let event = publish(&host, &store, writing, &manifest);
                    // Nobody listens after the end.
                    let _ = events.send(event);
                });
            }
            TakerAction::Discard => {
                let Some(writing) = self.writing.take() else { return };
                self.host.abandon_snapshot(&self.store, writing);
            }
        }
    }

    fn manifest(&self, number: SnapshotNumber, parts: Vec<Part>) -> Manifest {
        let group = &self.task.group;
        let crossings = parts.iter().flat_map(|part| &part.crossings).copied().collect();
        let members = parts.into_iter().enumerate().map(|(at, part)| MemberEntry {
            name: group.vms[at].clone(),
            host: group.hosts[at].clone(),
            memory: self.memory[at],
            part: part.manifest,
        });
        Manifest {
            group: group.name.clone(),
            number,
            label: self.label.clone(),
            taken_at: unix_now(),
            incarnation: self.incarnation,
            compression: self.task.compression,
            members: members.collect(),
            crossings,
        }
    }

    fn explain(&self, number: SnapshotNumber, failure: &Failure, has_begun: bool) -> HostError {
        let group = &self.task.group;
        let who = match failure.member {
            Some(member) => {
                let (vm, host) = (&group.vms[member.index()], &group.hosts[member.index()]);
                format!("{vm} on host {host}: ")
            }
            None => String::new(),
        };
        // Of what failed at the very end the store may have kept something.
        let left = failure.member.map_or("", |_| ", and nothing of it is left");
        let message = format!(
            "snapshot {number} of {} was given up{left}; {} on: {who}{failure}",
            group.name,
            if group.vms.len() == 1 { "the VM runs" } else { "the VMs run" },
        );
        // What kept it from beginning may pass, as another snapshot does.
        let kind = if has_begun { ErrorKind::Internal } else { ErrorKind::Conflict };
        HostError::new(kind, message)
    }
}

/// Whether it is there is asked until the store says so: an error may come after the deed. What may pass is tried again.
fn publish(host: &Weak<Host>, store: &Store, writing: Writing, manifest: &Manifest) -> TakerEvent {
    pass("snapshot-publishing");
    let (group, number) = (writing.group.clone(), writing.number);
    let until = Instant::now() + TRIED_FOR;
    loop {
        let Err(error) = store.publish(writing.clone(), manifest) else {
            return TakerEvent::Published;
        };
        if await_answer(store, &group, manifest) {
            if let Err(error) = store.end_writing(&writing) {
                warn!("snapshot {number} of {group} still counts as being written: {error}");
                if let Some(host) = host.upgrade() {
                    host.note_unfinished(store, writing, &error);
                }
            }
            return TakerEvent::Published;
        }
        if !error.is_passing() || Instant::now() > until {
            if let Some(host) = host.upgrade() {
                host.abandon_snapshot(store, writing);
            }
            return TakerEvent::NotPublished(error.to_string());
        }
        warn!("snapshot {number} of {group} waits for its store: {error}");
        thread::sleep(ASK_AGAIN);
    }
}

/// Whether that snapshot is there, once the store says so.
fn await_answer(store: &Store, group: &GroupName, manifest: &Manifest) -> bool {
    loop {
        match store.snapshot(group, Some(manifest.number)) {
            Ok(found) => return found == *manifest,
            // None, or another's of its number.
            Err(StoreError::NoSnapshot { .. } | StoreError::NoSnapshots(_)) => return false,
            Err(unanswered) => {
                warn!("is snapshot {} of {group} there? {unanswered}", manifest.number);
                thread::sleep(ASK_AGAIN);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use understudy_protocol::literal;

    /// Regression: a second without the store, just then, and all that was stored was removed.
    #[test]
    fn a_store_that_is_away_for_a_moment_gets_its_manifest() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::create(directory.path().to_str().unwrap()).unwrap();
        let shop: GroupName = literal("shop");
        let writing = store.begin(&shop, SnapshotNumber(0), unix_now()).unwrap();
        let manifest = Manifest {
            group: shop,
            number: writing.number,
            label: None,
            taken_at: 0,
            incarnation: Incarnation(0),
            compression: Default::default(),
            members: vec![],
            crossings: vec![],
        };
        let in_the_way = directory.path().join("snapshots");
        fs::write(&in_the_way, "").unwrap();
        let file = in_the_way.clone();
        let back = thread::spawn(move || {
            thread::sleep(Duration::from_millis(1500));
            fs::remove_file(file).unwrap();
        });
        let published = publish(&Weak::new(), &store, writing, &manifest);
        back.join().unwrap();
        assert_eq!(published, TakerEvent::Published);
        assert!(in_the_way.join("shop/1.json").exists());
    }
}
