//! VMs that have a keeper: what the daemon's API is asked about one goes to the keeper's own, and
//! what the keeper tells is told on.

mod asking;
mod cut;
mod relay;
mod together;

pub use relay::follow;

use super::control::Control;
use crate::metrics::KeptPage;
use asking::{ask, start, tell};
use std::collections::{BTreeMap, BTreeSet};
use std::panic::resume_unwind;
use std::path::Path;
use std::sync::Arc;
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};
use together::{Together, together};
use understudy_client::{Client, Failure, Subject};
use understudy_daemon::Host;
use understudy_daemon::keeper::Keeper;
use understudy_protocol::{GroupName, VmName};
use understudy_qemu::{CheckedDefinition, VmDefinition};
use understudy_report::cluster::{
    DeleteReport, RestoreReport, RestoreRequest, SnapshotReport, SnapshotRequest, VerifyReport,
};
use understudy_report::events::Journal;
use understudy_report::upgrade::{KeeperReplacement, UpgradePlan};
use understudy_report::{
    AgainRequest, CheckpointTiming, ComparisonReport, GroupRequest, HostStatus, MediumRequest,
    ProtectRequest, Protection, RecoverReport, RecoverRequest, StartRequest, VmStatus,
};
use understudy_report::{ErrorKind, HostError, Meters};
use understudy_snapshot::SnapshotNumber;
use understudy_threads::inherit;

/// Keepers that are asked at the same time, at most.
const AT_ONCE: usize = 16;
/// Time for a keeper whose VM has ended to end, and between two looks at that.
const END_PATIENCE: Duration = Duration::from_secs(10);
const END_LOOK: Duration = Duration::from_millis(10);

/// A host, some of whose VMs may have keepers.
#[derive(Clone)]
pub struct Routed(pub Arc<Host>);

impl Routed {
    /// Asks the VM's keeper, if it has one, and else the daemon itself, what they know.
    fn known<T>(
        &self,
        vm: &VmName,
        keeper: impl FnOnce(&Client) -> Result<T, Failure>,
        daemon: impl FnOnce(&Arc<Host>) -> Result<T, HostError>,
    ) -> Result<T, HostError> {
        match self.0.keeper_of(vm) {
            None => daemon(&self.0),
            Some(found) => ask(vm, found.reachable()?, keeper),
        }
    }

    /// Tells the VM's keeper, if it has one, and else the daemon itself, what to do.
    fn either<T>(
        &self,
        vm: &VmName,
        keeper: impl FnOnce(&Client) -> Result<T, Failure>,
        daemon: impl FnOnce(&Arc<Host>) -> Result<T, HostError>,
    ) -> Result<T, HostError> {
        match self.0.keeper_of(vm) {
            None => daemon(&self.0),
            Some(found) => tell(vm, found.reachable()?, keeper),
        }
    }

    /// [`either`](Routed::either) of what ends the VM here: its keeper's end is waited for a moment, so that the name is
    /// free. What it has done is done, however long it takes to end.
    fn ended<T>(
        &self,
        vm: &VmName,
        keeper: impl FnOnce(&Client) -> Result<T, Failure>,
        daemon: impl FnOnce(&Arc<Host>) -> Result<T, HostError>,
    ) -> Result<T, HostError> {
        let Some(found) = self.0.keeper_of(vm) else { return daemon(&self.0) };
        let done = tell(vm, found.reachable()?, keeper)?;
        self.await_end(&found);
        Ok(done)
    }

    /// Waits a moment for a keeper of that name whose VM is over, and which has not ended yet.
    fn await_free(&self, vm: &VmName) {
        if self.0.is_between_keepers(vm) {
            return;
        }
        comes_true(|| !self.0.keeper_of(vm).is_some_and(|keeper| has_nothing(&keeper)));
    }

    fn status_of_kept(&self, keeper: &Keeper) -> Option<VmStatus> {
        match status_told_by(keeper) {
            Ok(status) => Some(VmStatus { keeper_pid: keeper.pid, ..status }),
            Err(_) if self.0.is_between_keepers(&keeper.vm) => self.0.status_of_untold(&keeper.vm),
            // It has just been started, or is about to end.
            Err(error) if error.kind == ErrorKind::NotFound => None,
            Err(_) if self.0.keeper_of(&keeper.vm).is_none() => None,
            Err(error) => Some(VmStatus {
                keeper_pid: keeper.pid,
                protection: Protection::Degraded {
                    reason: format!("what becomes of it is not known: {error}"),
                },
                unheard: Some(error.message),
                ..VmStatus::new(&keeper.vm, self.0.kept_role(keeper))
            }),
        }
    }
}

/// What a keeper says of its VM.
fn status_told_by(keeper: &Keeper) -> Result<VmStatus, HostError> {
    let told = ask(&keeper.vm, keeper.reachable()?, |client| client.vm_status(&keeper.vm))?;
    of_its_own(&keeper.vm, told)
}

/// A status that the keeper of a VM has told; an error if it is about another one.
fn of_its_own(vm: &VmName, told: VmStatus) -> Result<VmStatus, HostError> {
    if told.name == *vm {
        return Ok(told);
    }
    let message = format!("the keeper of {vm} tells of {}, which is none of its affair", told.name);
    Err(HostError::new(ErrorKind::Refused, message))
}

/// What keepers find wrong with their host, each once: those of a group share one.
fn problems_of<'a>(kept: impl Iterator<Item = &'a VmStatus>) -> BTreeSet<String> {
    kept.flat_map(|vm| vm.unconnected().chain(vm.qemu_obstacle.clone())).collect()
}

/// Waits as long as keepers may take to end; whether it has come true.
fn comes_true(goal: impl Fn() -> bool) -> bool {
    let deadline = Instant::now() + END_PATIENCE;
    loop {
        match goal() {
            true => return true,
            false if Instant::now() > deadline => return false,
            false => thread::sleep(END_LOOK),
        }
    }
}

/// Whether a keeper says that it has no VM, or says nothing, as one that is about to end.
fn has_nothing(keeper: &Keeper) -> bool {
    // Its last words may be half written.
    let Ok(socket) = keeper.reachable() else { return keeper.pid.is_none() };
    let status = ask(&keeper.vm, socket, |client| client.vm_status(&keeper.vm));
    status.is_err_and(|error| matches!(error.kind, ErrorKind::NotFound | ErrorKind::Unreachable))
}

/// Asks keepers at the same time: those that hang are waited for together.
fn ask_each<T: Send>(keepers: &[Keeper], question: impl Fn(&Keeper) -> Option<T> + Sync) -> Vec<T> {
    let question = &question;
    let ask_some = |some: &[Keeper]| {
        thread::scope(|scope| {
            let begin = |keeper| {
                let asked = inherit(move || question(keeper));
                // Without a thread it is asked here.
                thread::Builder::new().spawn_scoped(scope, asked).map_err(|_| question(keeper))
            };
            let begun: Vec<_> = some.iter().map(begin).collect();
            let answer = |asked: Result<ScopedJoinHandle<'_, Option<T>>, Option<T>>| match asked {
                Ok(asked) => asked.join().unwrap_or_else(|panic| resume_unwind(panic)),
                Err(answer) => answer,
            };
            begun.into_iter().filter_map(answer).collect::<Vec<T>>()
        })
    };
    keepers.chunks(AT_ONCE).flat_map(ask_some).collect()
}

impl Control for Routed {
    fn status(&self) -> HostStatus {
        let status_of = |keeper: &Keeper| Some((keeper.vm.clone(), self.status_of_kept(keeper)?));
        let mut kept: BTreeMap<VmName, VmStatus> =
            ask_each(&self.0.keepers(), status_of).into_iter().collect();
        // What becomes of a VM whose keeper ends meanwhile the daemon says: it is asked afterwards.
        kept.retain(|vm, _| self.0.keeper_of(vm).is_some());
        let mut status = self.0.status();
        status.problems.extend(problems_of(kept.values()));
        status.vms.retain(|vm| !kept.contains_key(&vm.name));
        status.vms.extend(kept.into_values());
        status.vms.sort_by(|one, other| one.name.cmp(&other.name));
        status
    }
    fn upgrade_plan(&self) -> UpgradePlan {
        self.0.upgrade_plan()
    }
    fn events(&self) -> Journal {
        self.0.events()
    }
    fn meters(&self) -> Meters {
        self.0.meters()
    }
    fn kept_pages(&self) -> Vec<KeptPage> {
        let page = |keeper: &Keeper| {
            // What does not answer is shown by its status.
            let text = ask(&keeper.vm, keeper.reachable().ok()?, Client::metrics).ok()?;
            Some(KeptPage { vm: keeper.vm.clone(), text })
        };
        ask_each(&self.0.keepers(), page)
    }
    fn vm_start(
        &self,
        definition: CheckedDefinition,
        request: StartRequest,
    ) -> Result<VmStatus, HostError> {
        let name = &definition.name;
        if request.force || !self.0.starts_in_keeper(name) {
            return Control::vm_start(&self.0, definition, request);
        }
        self.await_free(name);
        let order = |client: &Client| client.vm_start(&definition, request);
        let start = |socket: &Path| of_its_own(name, start(name, socket, order)?);
        self.0.start_in_keeper(&definition, start)
    }
    fn vm_start_recorded(&self, name: &VmName) -> Result<VmStatus, HostError> {
        if !self.0.starts_in_keeper(name) {
            return self.0.vm_start_recorded(name);
        }
        self.await_free(name);
        let definition = self.0.definition(name)?;
        let order = |client: &Client| client.vm_start_recorded(name);
        let start = |socket: &Path| of_its_own(name, start(name, socket, order)?);
        self.0.start_in_keeper(&definition, start)
    }
    fn definition(&self, name: &VmName) -> Result<VmDefinition, HostError> {
        self.known(name, |keeper| keeper.definition(name), |host| host.definition(name))
    }
    fn vm_stop(&self, name: &VmName, force: bool) -> Result<(), HostError> {
        let is_left = self.0.is_left_to_keeper(name);
        let is_between = force && self.0.is_between_keepers(name);
        if is_between || self.0.is_awaited(name) && !is_left {
            return self.0.vm_stop(name, force);
        }
        let stop = match force {
            true => self.cut(name),
            false => {
                self.ended(name, |it| it.vm_stop(name, force), |host| host.vm_stop(name, force))
            }
        };
        stop.map_err(|error| match error.kind {
            ErrorKind::NotFound if is_left => starting(name),
            _ => error,
        })
    }
    fn vm_status(&self, name: &VmName) -> Result<VmStatus, HostError> {
        match self.0.keeper_of(name).map(|keeper| self.status_of_kept(&keeper)) {
            Some(Some(status)) => Ok(status),
            Some(None) | None => self.0.vm_status(name),
        }
    }
    fn protect(&self, name: &VmName, request: ProtectRequest) -> Result<VmStatus, HostError> {
        let asked = request.clone();
        let keeper = |keeper: &Client| keeper.protect(name, &asked);
        of_its_own(name, self.either(name, keeper, |host| host.protect(name, request))?)
    }
    fn protect_again(&self, name: &VmName, request: AgainRequest) -> Result<VmStatus, HostError> {
        let keeper = |keeper: &Client| keeper.protect_again(name, &request);
        let told = self.either(name, keeper, |host| host.protect_as_wished(name, &request.to))?;
        of_its_own(name, told)
    }
    fn protect_group(
        &self,
        name: &GroupName,
        request: GroupRequest,
    ) -> Result<Vec<VmStatus>, HostError> {
        let places = request.vms.iter().map(|vm| (vm, self.place_of_member(name, vm)));
        match together(name, places) {
            Together::InDaemon => self.0.protect_group(name, request),
            Together::In(keeper) => {
                let order = |client: &Client| client.protect_group(name, &request);
                let told = tell(&keeper.vm, keeper.reachable()?, order)?;
                let own = request.vms.iter().zip(told).map(|(vm, told)| of_its_own(vm, told));
                own.collect()
            }
            Together::Not(error) => Err(error),
        }
    }
    fn unprotect(&self, name: &VmName) -> Result<VmStatus, HostError> {
        let keeper = |keeper: &Client| keeper.unprotect(name);
        of_its_own(name, self.either(name, keeper, |host| host.unprotect(name))?)
    }
    fn failover(&self, name: &VmName) -> Result<(), HostError> {
        self.ended(name, |keeper| keeper.failover(name), |host| host.failover(name))
    }
    fn replace_keeper(&self, name: &VmName) -> Result<KeeperReplacement, HostError> {
        self.0.replace_keeper(name)
    }
    fn change_medium(&self, name: &VmName, request: MediumRequest) -> Result<VmStatus, HostError> {
        if let (Some(medium), Some(keeper)) = (&request.medium, self.0.keeper_of(name)) {
            self.0.admit_medium(name, medium, &keeper)?;
        }
        let asked = request.clone();
        let keeper = |keeper: &Client| keeper.change_medium(name, &asked);
        of_its_own(name, self.either(name, keeper, |host| host.change_medium(name, request))?)
    }
    fn recover(&self, name: &VmName, request: RecoverRequest) -> Result<RecoverReport, HostError> {
        self.await_free(name);
        self.0.recover_in_its_place(name, request)
    }
    fn timings(&self, name: &VmName) -> Result<Vec<CheckpointTiming>, HostError> {
        self.known(name, |keeper| keeper.timings(name), |host| host.timings(name))
    }
    fn verify_lockstep(&self, name: &VmName) -> Result<ComparisonReport, HostError> {
        self.either(name, |keeper| keeper.verify_lockstep(name), |host| host.verify_lockstep(name))
    }
    fn may_name_store(&self, store: &str) -> Result<(), HostError> {
        self.0.may_name_store(store)
    }
    fn snapshot(
        &self,
        what: &Subject,
        asked: &SnapshotRequest,
    ) -> Result<SnapshotReport, HostError> {
        let take = |host: &Arc<Host>| Control::snapshot(host, what, asked);
        match what {
            Subject::Vm(vm) => self.either(vm, |keeper| keeper.snapshot(what, asked), take),
            Subject::Cluster(_) => take(&self.0),
        }
    }
    fn restore(&self, what: &Subject, asked: &RestoreRequest) -> Result<RestoreReport, HostError> {
        Control::restore(&self.0, what, asked)
    }
    fn snapshots(
        &self,
        group: Option<&GroupName>,
        store: Option<&str>,
    ) -> Result<Vec<SnapshotReport>, HostError> {
        Control::snapshots(&self.0, group, store)
    }
    fn delete_snapshot(
        &self,
        group: &GroupName,
        number: SnapshotNumber,
        store: Option<&str>,
        force: bool,
    ) -> Result<DeleteReport, HostError> {
        self.0.delete_snapshot(group, number, store, force)
    }
    fn verify_snapshot(
        &self,
        group: &GroupName,
        number: Option<SnapshotNumber>,
        store: Option<&str>,
    ) -> Result<VerifyReport, HostError> {
        self.0.verify_snapshot(group, number, store)
    }
}

fn starting(vm: &VmName) -> HostError {
    let message = format!("{vm} is about to come up in its keeper: try again");
    HostError::new(ErrorKind::Conflict, message)
}

#[cfg(test)]
mod tests {
    use super::relay::events_told;
    use super::*;
    use crate::socket::ApiSocket;
    use crate::table::tests::example;
    use axum::routing::get;
    use axum::{Json, Router};
    use std::future::ready;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use understudy_protocol::literal;
    use understudy_report::events::EventKind;
    use understudy_report::{CardReport, Role};

    /// Keepers were once asked one after the other: fifteen that hang made a status that nobody
    /// waited for.
    #[test]
    fn keepers_are_asked_at_the_same_time() {
        let keeper = |number: usize| Keeper {
            vm: format!("vm{number}").parse().unwrap(),
            pid: None,
            socket: "/none".into(),
            group: None,
            problem: None,
            program: None,
        };
        let keepers: Vec<Keeper> = (0..AT_ONCE + 3).map(keeper).collect();
        let asked = AtomicUsize::new(0);
        let deadline = Instant::now() + Duration::from_secs(60);
        let answers = ask_each(&keepers, |keeper| {
            asked.fetch_add(1, Ordering::AcqRel);
            // None answers before all have been asked that are asked together.
            while asked.load(Ordering::Acquire) < AT_ONCE && Instant::now() < deadline {
                thread::sleep(Duration::from_millis(1));
            }
            (keeper.vm.as_str() != "vm1").then(|| keeper.vm.clone())
        });
        assert!(Instant::now() < deadline, "one waits for the other");
        let expected = keepers.iter().map(|keeper| keeper.vm.clone());
        let expected: Vec<VmName> = expected.filter(|vm| vm.as_str() != "vm1").collect();
        assert_eq!(answers, expected);
    }

    #[test]
    fn what_a_group_shares_is_told_once() {
        let vm = |name: &'static str| VmStatus {
            qemu_obstacle: Some("QEMU was upgraded".to_owned()),
            ..VmStatus::new(&literal(name), Role::Primary)
        };
        let card = CardReport {
            mac: "52:54:00:12:34:50".to_owned(),
            tap: "us-db".to_owned(),
            bridge: "br0".to_owned(),
            problem: Some("bridge br0 does not exist".to_owned()),
        };
        let db = VmStatus { cards: vec![card], ..vm("db") };
        let told: Vec<String> = problems_of([&db, &vm("web")].into_iter()).into_iter().collect();
        let card = "db is not connected, card 52:54:00:12:34:50: bridge br0 does not exist";
        assert_eq!(told, ["QEMU was upgraded", card]);
    }

    /// Serves as the keeper of `web` that speaks of `db` alone; what is returned ends it.
    fn false_keeper() -> (Keeper, tokio::runtime::Runtime, tempfile::TempDir) {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("keeper.sock");
        let bound = ApiSocket::bind(&socket).unwrap();
        let journal = Journal::default();
        journal.of(&literal("db")).record(EventKind::Rebooted);
        journal.of(&literal("web")).record(EventKind::Started);
        let told = || async { Json(example(Protection::Off)) };
        let events = move || ready(Json(journal.after(0, None)));
        let router = Router::new().route("/v1/vms/web", get(told)).route("/v1/events", get(events));
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.spawn(async move {
            let listener = tokio::net::UnixListener::from_std(bound.listener().unwrap()).unwrap();
            axum::serve(listener, router).await
        });
        let keeper = Keeper {
            vm: literal("web"),
            pid: Some(1),
            socket,
            group: None,
            problem: None,
            program: None,
        };
        (keeper, runtime, directory)
    }

    /// It could show another VM as protected that was not, and tell of its deaths.
    #[test]
    fn what_a_keeper_says_of_other_vms_counts_for_nothing() {
        let (keeper, _runtime, _directory) = false_keeper();
        let error = status_told_by(&keeper).unwrap_err();
        assert_eq!(error.message, "the keeper of web tells of db, which is none of its affair");
        let client = Client::new(&keeper.socket).unwrap();
        let (_, told) = events_told(&client, &keeper.vm, 0).unwrap();
        let kinds: Vec<EventKind> = told.into_iter().map(|event| event.kind).collect();
        assert_eq!(kinds, [EventKind::Started]);
    }
}
