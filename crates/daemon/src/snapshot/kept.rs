//! Restores of VMs that get a keeper: the daemon hands the coordinator's orders on to it, and its
//! reports back. The keeper carries them out as a daemon does; of one that has begun, its daemon may die.

use super::prepare::member_of;
use crate::arrivals::Arrival;
use crate::containment::spawn_for_request;
use crate::host::{Host, internal};
use crate::keeper::order::{self, Order as KeepersOrder};
use crate::keeper::start::reap;
use crate::vm::Vm;
use serde::Serialize;
use std::collections::BTreeMap;
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

/// Orders and reports are small: a process that does not take one for so long hangs.
const WRITE_TIMEOUT: Duration = Duration::from_secs(2);

/// A restore in a keeper, as its daemon has it.
pub(super) struct KeptRestore {
    id: String,
    way: Way,
    /// Whoever is to hear of it: the coordinator that asked last.
    reply: Reply,
}

/// Way of orders.
enum Way {
    /// The keeper is being started. They are said again.
    Beginning,
    /// Orders go there.
    Open(Arc<UnixStream>),
    /// Answer to all of them.
    Over(Report),
}

/// What an order meets.
enum Met {
    /// The restore that it is about: it goes there.
    Keeper(Arc<UnixStream>),
    /// The same, which answers itself.
    Answer(Report),
    /// Another restore of the VM.
    Other {
        id: String,
        is_over: bool,
    },
    Nothing,
}

/// The VM's restore meets an order, whose reports go to `reply`; that of before comes back.
fn meet(
    kept: &mut BTreeMap<VmName, KeptRestore>,
    vm: &VmName,
    id: &str,
    reply: &Reply,
) -> (Met, Option<Reply>) {
    let Some(known) = kept.get_mut(vm) else { return (Met::Nothing, None) };
    if known.id != id {
        let is_over = matches!(known.way, Way::Over(_));
        return (Met::Other { id: known.id.clone(), is_over }, None);
    }
    let former = std::mem::replace(&mut known.reply, reply.clone());
    let met = match &known.way {
        Way::Beginning => Met::Answer(Report::Loading { pages: 0 }),
        Way::Open(keeper) => Met::Keeper(keeper.clone()),
        Way::Over(report) => Met::Answer(report.clone()),
    };
    (met, Some(former))
}

/// Says something; what cannot be said any more is noticed by whoever listens.
fn say(to: &UnixStream, what: &impl Serialize) {
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
        let member = task.member;
        let answer = |report| reply(ToCoordinator::Restore(member, report));
        loop {
            let (met, _former) =
                self.snapshots.note(|known| meet(&mut known.kept, &vm, &task.id, reply));
            let former = match met {
                Met::Keeper(keeper) => {
                    say(&keeper, &ToMember::Restore(task, order));
                    return None;
                }
                Met::Answer(report) => {
                    answer(report);
                    return None;
                }
                _ if !may_begin => return Some((task, order)),
                // Its keeper is there, and gets its orders over this way alone.
                Met::Other { is_over: false, .. } if self.keeper_of(&vm).is_some() => {
                    let why = "a keeper of it, which restores it or has restored it, is there: stop it first";
                    answer(Report::Failed { why: why.to_owned() });
                    return None;
                }
                Met::Other { id, .. } => Some(id),
                Met::Nothing => None,
            };
            let next =
                KeptRestore { id: task.id.clone(), way: Way::Beginning, reply: reply.clone() };
            let (is_first, _former) = self.snapshots.note(|known| {
                let is_there = known.kept.get(&vm).map(|known| &known.id) == former.as_ref();
                (is_there, if is_there { known.kept.insert(vm.clone(), next) } else { Some(next) })
            });
            if is_first {
                let host = Arc::downgrade(self);
                let reply = reply.clone();
                spawn_for_request("restore-kept", move || {
                    Run::new(&host, &task, reply).run(task, order)
                });
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
        let answers = daemon.try_clone().map_err(internal)?;
        let reply: Reply = Arc::new(move |heard| {
            if let ToCoordinator::Restore(_, report) = heard {
                say(&answers, &report);
            }
        });
        let host = Arc::downgrade(self);
        spawn_for_request("restore-orders", move || obey(&host, daemon, &reply));
        Ok(())
    }
}

/// A restore in a keeper, for the thread that sees to it.
struct Run {
    host: Weak<Host>,
    vm: VmName,
    id: String,
    member: Member,
    /// Hears of it when another restore of the VM has come meanwhile.
    first: Reply,
}

impl Run {
    fn new(host: &Weak<Host>, task: &RestoreTask, first: Reply) -> Run {
        let (vm, id) = (task.vm().clone(), task.id.clone());
        Run { host: host.clone(), vm, id, member: task.member, first }
    }

    /// Runs until the keeper has ended.
    fn run(&self, task: RestoreTask, order: Order) {
        let Some(host) = self.host.upgrade() else { return };
        let begun = host.begin_kept_restore(&task);
        drop(host);
        let (process, arrival, keeper) = match begun {
            Ok((process, arrival, keeper)) => (process, arrival, Arc::new(keeper)),
            Err(error) => return self.end(Report::Failed { why: format!("{error:#}") }),
        };
        // Before any other order.
        say(&keeper, &ToMember::Restore(task, order));
        self.goes(Way::Open(keeper.clone()));
        let last = self.relay(&arrival, &keeper);
        reap(process, &self.vm);
        drop(arrival);
        self.end(match last {
            Some(end @ (Report::Failed { .. } | Report::Aborted)) => end,
            _ => Report::Failed { why: "its keeper has ended".to_owned() },
        });
    }

    /// Works with what the host knows of it, if it still does.
    fn known<T>(&self, work: impl FnOnce(&mut KeptRestore) -> T) -> Option<T> {
        let host = self.host.upgrade()?;
        host.snapshots.note(|known| {
            let known = known.kept.get_mut(&self.vm).filter(|known| known.id == self.id)?;
            Some(work(known))
        })
    }

    /// Orders go this way from now on.
    fn goes(&self, way: Way) {
        let _former = self.known(|known| std::mem::replace(&mut known.way, way));
    }

    fn report(&self, report: Report) {
        let reply = self.known(|known| known.reply.clone());
        reply.as_ref().unwrap_or(&self.first)(ToCoordinator::Restore(self.member, report));
    }

    fn end(&self, report: Report) {
        self.goes(Way::Over(report.clone()));
        self.report(report);
    }

    /// Reports what the keeper reports, until that ends; returns the last.
    fn relay(&self, arrival: &Arrival, keeper: &UnixStream) -> Option<Report> {
        let mut last = None;
        // An error is its end, too.
        for line in BufReader::new(keeper).lines().map_while(Result::ok) {
            let report: Report = match serde_json::from_str(&line) {
                Ok(report) => report,
                Err(error) => {
                    warn!(vm = %self.vm, "its keeper's reports are not understood: {error}");
                    break;
                }
            };
            arrival.goes_to_keeper();
            if let (Report::StartFin | Report::RestoreFin, Some(host)) =
                (&report, self.host.upgrade())
            {
                host.forget_fenced(&self.vm);
            }
            self.report(match &report {
                // It may be tried again as soon as that is known: its keeper is to have ended by then.
                Report::Failed { .. } | Report::Aborted => Report::Ending,
                other => other.clone(),
            });
            last = Some(report);
        }
        last
    }
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
