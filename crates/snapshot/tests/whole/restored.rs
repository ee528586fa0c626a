//! A group restored from its store.

use crate::MEMBERS;
use crate::group::{Memory, PAGES, amount, balance};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;
use understudy_protocol::{BlockId, PageIndex, Time};
use understudy_snapshot::{
    Cohort, CohortAction, CohortEvent, Decision, Demand, InFlightFrame, Line, Load, Loader,
    Manifest, MemberManifest, Mode, Page, Plan, Report, RestoreAction, RestoreEvent, RestorePhase,
    Restorer, StartOrder, Store, UNIT_BYTES, Unfit,
};

pub struct Restored {
    pub memories: Vec<Memory>,
    /// Frames to be delivered, by receiver.
    pub frames: Vec<Vec<InFlightFrame>>,
}

impl Restored {
    /// All money, with the members and between them.
    pub fn money(&self) -> u64 {
        let held: u64 = self.memories.iter().map(balance).sum();
        held + self.frames.iter().flatten().map(|frame| amount(&frame.bytes)).sum::<u64>()
    }
}

struct Host<'a> {
    store: &'a Store,
    member: &'a MemberManifest,
    cohort: Cohort,
    loader: Option<Loader>,
    memory: Memory,
}

pub fn restore(store: &Store, manifest: &Manifest) -> Restored {
    let members: Vec<MemberManifest> =
        manifest.members.iter().map(|entry| store.member(entry).unwrap()).collect();
    let types = ["pc-i440fx-10.0".to_owned()];
    Unfit::check(&members, "10.0.2", &types, 1 << 30).unwrap();
    let order = StartOrder::new(MEMBERS, &manifest.crossings);
    let plan = plan(store, &order, &members);
    let now = Time(Duration::from_secs(1));
    let mut hosts: Vec<Host<'_>> = members
        .iter()
        .map(|member| Host {
            store,
            member,
            cohort: Cohort::new(now),
            loader: None,
            memory: vec![0; PAGES as usize * UNIT_BYTES],
        })
        .collect();
    run(&mut hosts, Line { order, patience: Duration::from_millis(500) }, plan.pages, now);
    Restored {
        memories: hosts.into_iter().map(|host| host.memory).collect(),
        frames: members.iter().map(|member| store.frames(member).unwrap()).collect(),
    }
}

fn plan(store: &Store, order: &StartOrder, members: &[MemberManifest]) -> Plan {
    let load = |member: &MemberManifest| {
        let size = store.working_set(member).unwrap().size;
        Load {
            wanted: Mode::Hot.pages_before_start(Default::default(), size, size, PAGES),
            least: 0,
            most: 2 * size,
            bytes_per_second: 50_000_000,
            beside: Duration::from_millis(20),
        }
    };
    let loads: Vec<Load> = members.iter().map(load).collect();
    Plan::moved(order, &loads, Duration::from_millis(70)).unwrap()
}

/// Messages arrive at once.
fn run(hosts: &mut [Host<'_>], line: Line, pages: Vec<u64>, now: Time) {
    let mut actions = Vec::new();
    let mut restorer = Restorer::new(line, pages, now, &mut actions);
    restorer.handle(now, RestoreEvent::Whole, &mut actions);
    let mut todo = VecDeque::from(actions);
    while let Some(action) = todo.pop_front() {
        let events = match action {
            RestoreAction::Decide => vec![RestoreEvent::Decided(Decision::Settled)],
            RestoreAction::Send(member, order) => {
                let reports = hosts[member.index()].event(now, CohortEvent::Order(order));
                let event = |report| RestoreEvent::Report(member, report);
                reports.into_iter().map(event).collect()
            }
        };
        for event in events {
            let mut actions = Vec::new();
            restorer.handle(now, event, &mut actions);
            todo.extend(actions);
        }
    }
    assert_eq!(*restorer.phase(), RestorePhase::Restored(vec![]));
}

impl Host<'_> {
    fn event(&mut self, now: Time, event: CohortEvent) -> Vec<Report> {
        let (mut actions, mut reports) = (Vec::new(), Vec::new());
        self.cohort.handle(now, event, &mut actions);
        for action in actions {
            match action {
                CohortAction::Load { pages } => {
                    let map = self.store.area(&self.member.areas[0]).unwrap();
                    let queue = self.store.working_set(self.member).unwrap().queue;
                    let maps = BTreeMap::from([(BlockId(0), map)]);
                    self.loader = Some(Loader::new(maps, &queue, pages));
                    self.load(Loader::may_start);
                    reports.extend(self.event(now, CohortEvent::Loaded));
                }
                CohortAction::Start => {
                    reports.extend(self.event(now, CohortEvent::Started));
                    // The guest reads its balance at once.
                    self.fault(0);
                    self.load(Loader::is_complete);
                    reports.extend(self.event(now, CohortEvent::Complete));
                }
                CohortAction::Settle | CohortAction::Conclude => {}
                CohortAction::Discard | CohortAction::Ask => panic!("nothing fails here"),
                CohortAction::Report(report) => reports.push(report),
            }
        }
        reports
    }

    fn fault(&mut self, unit: u64) {
        let page = Page { block: BlockId(0), index: PageIndex(unit) };
        let loader = self.loader.as_mut().unwrap();
        if loader.demand(page) == Demand::Coming {
            self.step();
            assert_eq!(self.loader.as_mut().unwrap().demand(page), Demand::Filled);
        }
    }

    fn load(&mut self, until: impl Fn(&Loader) -> bool) {
        while !until(self.loader.as_ref().unwrap()) {
            self.step();
        }
    }

    fn step(&mut self) {
        let loader = self.loader.as_mut().unwrap();
        let chunk = loader.next_chunk().unwrap();
        let content = self.store.chunk(chunk).unwrap();
        for fill in loader.read(chunk) {
            let from = usize::from(fill.slot) * UNIT_BYTES;
            let to = fill.pages.first.0 as usize * UNIT_BYTES;
            let length = fill.pages.count as usize * UNIT_BYTES;
            self.memory[to..to + length].copy_from_slice(&content[from..from + length]);
        }
    }
}
