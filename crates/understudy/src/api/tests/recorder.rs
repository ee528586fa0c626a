//! A host that only records what it is asked.

use super::*;
use crate::table::tests::{example, host_of};
use understudy_report::cluster::{
    DeleteReport, RestoreReport, RestoreRequest, SnapshotReport, SnapshotRequest, VerifyReport,
};
use understudy_report::events::Journal;
use understudy_report::upgrade::Versions;

/// A host with one VM, `db`, that remembers what it was asked.
pub(super) struct Recorder {
    pub(super) journal: Journal,
    pub(super) protection: Mutex<Protection>,
    pub(super) calls: Mutex<Vec<String>>,
    pub(super) fails_with: Mutex<Option<HostError>>,
    /// Held by a test whose store hangs.
    pub(super) store: RwLock<()>,
}

impl Recorder {
    fn record(&self, name: &str, call: String) -> Result<VmStatus, HostError> {
        self.calls.lock().unwrap().push(call);
        if let Some(error) = self.fails_with.lock().unwrap().clone() {
            return Err(error);
        }
        if name != "db" {
            return Err(HostError::new(ErrorKind::NotFound, format!("there is no VM `{name}`")));
        }
        Ok(example(self.protection.lock().unwrap().clone()))
    }
}

impl Default for Recorder {
    fn default() -> Recorder {
        Recorder {
            journal: Journal::default(),
            protection: Mutex::new(Protection::Protected { peer: literal("b") }),
            calls: Mutex::default(),
            fails_with: Mutex::default(),
            store: RwLock::default(),
        }
    }
}

impl Control for Recorder {
    fn upgrade_plan(&self) -> UpgradePlan {
        UpgradePlan {
            host: literal("a"),
            running: Versions { qemu: Some("10.0.2".into()), ..Versions::of_this_program() },
            next_qemu: None,
            peers: Vec::new(),
            vms: Vec::new(),
        }
    }
    fn status(&self) -> HostStatus {
        host_of(vec![example(Protection::Off)])
    }
    fn events(&self) -> Journal {
        self.journal.clone()
    }
    fn meters(&self) -> Meters {
        Meters::default()
    }
    fn vm_start(
        &self,
        definition: CheckedDefinition,
        request: StartRequest,
    ) -> Result<VmStatus, HostError> {
        let StartRequest { force, other_host_is_off } = request;
        let (name, vcpus) = (&definition.name, definition.vcpus);
        self.record(name, format!("start {name} {vcpus} {force} {other_host_is_off}"))
    }
    fn vm_start_recorded(&self, name: &VmName) -> Result<VmStatus, HostError> {
        self.record(name, format!("start {name} as recorded"))
    }
    fn definition(&self, name: &VmName) -> Result<VmDefinition, HostError> {
        self.record(name, format!("definition {name}")).map(|_| definition())
    }
    fn vm_stop(&self, name: &VmName, force: bool) -> Result<(), HostError> {
        self.record(name, format!("stop {name} {force}")).map(drop)
    }
    fn vm_status(&self, name: &VmName) -> Result<VmStatus, HostError> {
        self.record(name, format!("status {name}"))
    }
    fn protect(&self, name: &VmName, request: ProtectRequest) -> Result<VmStatus, HostError> {
        self.record(name, format!("protect {name} {} {:?}", request.to, request.policy))
    }
    fn protect_again(&self, name: &VmName, request: AgainRequest) -> Result<VmStatus, HostError> {
        self.record(name, format!("protect {name} again {}", request.to))
    }
    fn protect_group(
        &self,
        name: &GroupName,
        request: GroupRequest,
    ) -> Result<Vec<VmStatus>, HostError> {
        let call = format!("group {name} {} {:?}", request.to, request.vms);
        request.vms.iter().map(|vm| self.record(vm, call.clone())).collect()
    }
    fn unprotect(&self, name: &VmName) -> Result<VmStatus, HostError> {
        self.record(name, format!("unprotect {name}"))
    }
    fn failover(&self, name: &VmName) -> Result<(), HostError> {
        self.record(name, format!("failover {name}")).map(drop)
    }
    fn change_medium(&self, name: &VmName, request: MediumRequest) -> Result<VmStatus, HostError> {
        let MediumRequest { drive, medium, force } = request;
        self.record(name, format!("medium {name} {drive} {medium:?} {force}"))
    }
    fn recover(&self, name: &VmName, request: RecoverRequest) -> Result<RecoverReport, HostError> {
        let status = self.record(name, format!("recover {name} {}", request.dry_run))?;
        let reason = "it ran here".to_owned();
        let (vm, status) = (name.to_owned(), Some(status));
        Ok(RecoverReport { vm, valid: None, reason, evidence: Vec::new(), status })
    }
    fn timings(&self, name: &VmName) -> Result<Vec<CheckpointTiming>, HostError> {
        self.record(name, format!("timings {name}"))?;
        Ok(vec![CheckpointTiming { epoch: Epoch(7), total_ms: 0.8, ..Default::default() }])
    }
    fn verify_lockstep(&self, name: &VmName) -> Result<ComparisonReport, HostError> {
        self.record(name, format!("verify {name}"))?;
        Ok(ComparisonReport { pages: 9, ..Default::default() })
    }
    fn may_name_store(&self, _: &str) -> Result<(), HostError> {
        Ok(())
    }
    fn snapshot(
        &self,
        what: &Subject,
        asked: &SnapshotRequest,
    ) -> Result<SnapshotReport, HostError> {
        self.record("db", format!("snapshot {what:?} {:?}", asked.label))?;
        Ok(self.snapshots(None, asked.store.as_deref())?.remove(0))
    }
    fn restore(&self, what: &Subject, asked: &RestoreRequest) -> Result<RestoreReport, HostError> {
        self.record("db", format!("restore {what:?} {:?} {:?}", asked.number, asked.mode))?;
        Ok(RestoreReport {
            group: literal("db"),
            number: asked.number.unwrap_or_default(),
            incarnation: understudy_snapshot::Incarnation(1),
            mode: asked.mode,
            members: Vec::new(),
            backoff_ms: Default::default(),
            warnings: Vec::new(),
        })
    }
    fn snapshots(
        &self,
        group: Option<&GroupName>,
        store: Option<&str>,
    ) -> Result<Vec<SnapshotReport>, HostError> {
        drop(self.store.read());
        self.record("db", format!("snapshots {group:?} {store:?}"))?;
        Ok(vec![SnapshotReport {
            group: literal("db"),
            number: SnapshotNumber(3),
            label: None,
            store: "/srv".into(),
            taken_at: 7,
            members: Vec::new(),
            damage: None,
        }])
    }
    fn delete_snapshot(
        &self,
        group: &GroupName,
        number: SnapshotNumber,
        store: Option<&str>,
        force: bool,
    ) -> Result<DeleteReport, HostError> {
        self.record("db", format!("delete {group} {number} {store:?} {force}"))?;
        Ok(DeleteReport { group: group.clone(), number, chunks: String::new() })
    }
    fn verify_snapshot(
        &self,
        group: &GroupName,
        number: Option<SnapshotNumber>,
        store: Option<&str>,
    ) -> Result<VerifyReport, HostError> {
        self.record("db", format!("verify {group} {number:?} {store:?}"))?;
        let (group, number) = (group.to_owned(), number.unwrap_or_default());
        Ok(VerifyReport { group, number, chunks: 1, bytes: 2, problems: Vec::new() })
    }
}
