//! Restores of VMs that get a keeper: the daemon hands the coordinator's orders on to it, and its
//! reports back. The keeper carries them out as a daemon does; of one that has begun, its daemon may die.

use super::prepare::member_of;
use super::succeed;
use crate::arrivals::Arrival;
use crate::containment::spawn_for_request;
use crate::host::{Host, internal};
use crate::keeper::order::{self, Order as KeepersOrder};
use crate::keeper::start::reap;
use crate::vm::Vm;
use serde::Serialize;
use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixStream;
use std::process::Child;
use std::sync::{Arc, Weak};
use std::time::Duration;
use tracing::{debug, warn};
use understudy_cluster::messages::{Reply, RestoreTask, SavedVm, ToCoordinator, ToMember};
use understudy_protocol::VmName;
use understudy_report::error::HostError;
use understudy_snapshot::{Member, Order, Report};
use understudy_threads::{Mutex, lock};

/// Orders and reports are small: a process that does not take one for so long hangs.
const WRITE_TIMEOUT: Duration = Duration::from_secs(2);

/// A restore in a keeper, as its daemon has it.
pub struct KeptRestore {
    id: String,
    member: Member,
    state: Mutex<State>,
}

struct State {
    way: Way,
    reply: Reply,
}

/// Way of orders.
enum Way {
    /// The keeper is being started. They are said again.
    Beginning,
    /// Orders go there.
    Open(UnixStream),
    /// Answer to all of them.
    Over(Report),
}

impl KeptRestore {
    fn new(task: &RestoreTask, reply: &Reply) -> Arc<KeptRestore> {
        let state = State { way: Way::Beginning, reply: reply.clone() };
        let (id, member, state) = (task.id.clone(), task.member, Mutex::new(state));
        Arc::new(KeptRestore { id, member, state })
    }

    fn tell(&self, task: RestoreTask, order: Order, reply: &Reply) {
        let mut state = lock(&self.state);
        state.reply = reply.clone();
        match &mut state.way {
            Way::Beginning => self.report(&state, Report::Loading { pages: 0 }),
            Way::Open(keeper) => say(keeper, &ToMember::Restore(task, order)),
            Way::Over(report) => {
                let report = report.clone();
                self.report(&state, report);
            }
        }
    }

    fn is_over(&self) -> bool {
        matches!(lock(&self.state).way, Way::Over(_))
    }

    fn report(&self, state: &State, report: Report) {
        (state.reply)(ToCoordinator::Restore(self.member, report));
    }

    /// Orders go to the keeper from now on; this is the first.
    fn open(&self, keeper: &UnixStream, first: &ToMember) {
        let mut state = lock(&self.state);
        match keeper.try_clone() {
            Ok(mut keeper) => {
                say(&mut keeper, first);
                state.way = Way::Open(keeper);
            }
            // It hears nothing, and ends.
            Err(error) => warn!("the keeper that is to restore a VM is not told: {error}"),
        }
    }

    fn end(&self, report: Report) {
        let mut state = lock(&self.state);
        state.way = Way::Over(report.clone());
        self.report(&state, report);
    }
}

/// Says something; what cannot be said any more is noticed by whoever listens.
fn say(to: &mut UnixStream, what: &impl Serialize) {
    if let Err(error) = order::say(to, what) {
        debug!("the other process does not hear of a restore: {error}");
    }
}

impl Host {
    /// Hands an order on if it is about a VM that gets a keeper here, by itself; gives it back if it is for this
    /// process.
    pub(super) fn hand_on(
        self: &Arc<Self>,
        task: RestoreTask,
        order: Order,
        reply: &Reply,
    ) -> Option<(RestoreTask, Order)> {
        let vm = task.vm().clone();
        let begins = matches!(order, Order::Load { .. }) && self.orphans.why(&vm).is_none();
        let by_itself = task.group.vms.len() == 1 && self.group_of(&vm).is_none();
        let may_begin = begins && by_itself && self.starts_in_keeper(&vm);
        loop {
            let former = self.snapshots.look(|known| known.kept.get(&vm).cloned());
            match &former {
                Some(known) if known.id == task.id => {
                    known.tell(task, order, reply);
                    return None;
                }
                _ if !may_begin => return Some((task, order)),
                // Its keeper is there, and gets its orders over this way alone.
                Some(former) if !former.is_over() && self.keeper_of(&vm).is_some() => {
                    let why = "a keeper of it, which restores it or has restored it, is there: stop it first";
                    let failed = Report::Failed { why: why.to_owned() };
                    reply(ToCoordinator::Restore(task.member, failed));
                    return None;
                }
                _ => {}
            }
            let restore = KeptRestore::new(&task, reply);
            let is_first = self
                .snapshots
                .note(|known| succeed(&mut known.kept, &vm, former.as_ref(), &restore));
            if is_first {
                let host = Arc::downgrade(self);
                spawn_for_request("restore-kept", move || run(&host, &restore, task, order));
                return None;
            }
        }
    }

    /// Starts a keeper that is to restore its VM.
    fn begin_kept_restore(
        &self,
        task: &RestoreTask,
    ) -> anyhow::Result<(Child, Arrival, UnixStream)> {
        let store = self.config.store_keys.open(&task.store)?;
        let definition = SavedVm::of(&member_of(&store, task)?)?.definition;
        let arrival = {
            let _adding = self.adding.lock();
            self.make_way(&definition)?;
            self.check_bridges(&definition.cards)?;
            Arrival::expect(&self.arrivals, &self.config.name, &definition)
        };
        let files = self.files_of(&definition);
        let (process, keeper) =
            self.spawn_ordered_keeper(task.vm(), None, &KeepersOrder::Restore, &files)?;
        keeper.set_write_timeout(Some(WRITE_TIMEOUT))?;
        Ok((process, arrival, keeper))
    }

    /// Obeys what the daemon hands on about the VM that this process keeps, for as long as it lives.
    pub(crate) fn follow_restore(self: &Arc<Self>, daemon: UnixStream) -> Result<(), HostError> {
        daemon.set_write_timeout(Some(WRITE_TIMEOUT)).map_err(internal)?;
        let answers = Mutex::new(daemon.try_clone().map_err(internal)?);
        let reply: Reply = Arc::new(move |heard| {
            if let ToCoordinator::Restore(_, report) = heard {
                say(&mut lock(&answers), &report);
            }
        });
        let host = Arc::downgrade(self);
        spawn_for_request("restore-orders", move || obey(&host, daemon, &reply));
        Ok(())
    }
}

/// Runs until the keeper has ended.
fn run(host: &Weak<Host>, restore: &KeptRestore, task: RestoreTask, order: Order) {
    let vm = task.vm().clone();
    let begun = match host.upgrade() {
        Some(host) => host.begin_kept_restore(&task),
        None => return,
    };
    let (process, arrival, keeper) = match begun {
        Ok(begun) => begun,
        Err(error) => return restore.end(Report::Failed { why: format!("{error:#}") }),
    };
    restore.open(&keeper, &ToMember::Restore(task, order));
    let last = relay(host, restore, &arrival, keeper);
    reap(process, &vm);
    drop(arrival);
    restore.end(match last {
        Some(end @ (Report::Failed { .. } | Report::Aborted)) => end,
        _ => Report::Failed { why: "its keeper has ended".to_owned() },
    });
}

/// Reports what the keeper reports, until that ends; returns the last.
fn relay(
    host: &Weak<Host>,
    restore: &KeptRestore,
    arrival: &Arrival,
    keeper: UnixStream,
) -> Option<Report> {
    let mut last = None;
    // An error is its end, too.
    for line in BufReader::new(keeper).lines().map_while(Result::ok) {
        let report: Report = match serde_json::from_str(&line) {
            Ok(report) => report,
            Err(error) => {
                warn!(vm = %arrival.vm(), "its keeper's reports are not understood: {error}");
                break;
            }
        };
        arrival.goes_to_keeper();
        if let (Report::StartFin | Report::RestoreFin, Some(host)) = (&report, host.upgrade()) {
            host.forget_fenced(arrival.vm());
        }
        let state = lock(&restore.state);
        restore.report(
            &state,
            match &report {
                // It may be tried again as soon as that is known: its keeper is to have ended by then.
                Report::Failed { .. } | Report::Aborted => Report::Ending,
                other => other.clone(),
            },
        );
        drop(state);
        last = Some(report);
    }
    last
}

impl Host {
    /// Forgets that this host has lost a VM: it runs here again.
    fn forget_fenced(&self, vm: &VmName) {
        self.vms.remove_if(vm, |there| matches!(there, Vm::Fenced(_)));
    }
}

/// Obeys, in a keeper, until its daemon has ended, or says what cannot be.
fn obey(host: &Weak<Host>, daemon: UnixStream, reply: &Reply) {
    for line in BufReader::new(daemon).lines() {
        let order = line.map_err(anyhow::Error::from);
        let order = order.and_then(|line| Ok(serde_json::from_str::<ToMember>(&line)?));
        let Some(host) = host.upgrade() else { return };
        match order {
            Ok(ToMember::Restore(task, order)) => host.restore_order(task, order, reply),
            Ok(ToMember::Take(..)) => warn!("told to take a snapshot where a restore was to be"),
            Err(error) => return warn!("an order about a restore is not understood: {error:#}"),
        }
    }
}
