//! The calls of the API to a host.

use crate::metrics::KeptPage;
use std::sync::Arc;
use understudy_client::Subject;
use understudy_daemon::Host;
use understudy_protocol::{GroupName, VmName};
use understudy_qemu::{CheckedDefinition, VmDefinition};
use understudy_report::cluster::{
    DeleteReport, RestoreReport, RestoreRequest, SnapshotReport, SnapshotRequest, VerifyReport,
};
use understudy_report::events::Journal;
use understudy_report::upgrade::{KeeperReplacement, UpgradePlan};
use understudy_report::{
    AgainRequest, CheckpointTiming, ComparisonReport, GroupRequest, HostStatus, MediumRequest,
    ProtectRequest, RecoverReport, RecoverRequest, StartRequest, VmStatus,
};
use understudy_report::{ErrorKind, HostError, Meters};
use understudy_snapshot::SnapshotNumber;

/// The calls of the API to a host; all calls block. [`Host`] outside of tests.
pub trait Control: Send + Sync + 'static {
    /// See [`Host::status`].
    fn status(&self) -> HostStatus;
    /// See [`Host::upgrade_plan`].
    fn upgrade_plan(&self) -> UpgradePlan;
    /// See [`Host::events`].
    fn events(&self) -> Journal;
    /// See [`Host::meters`].
    fn meters(&self) -> Meters;
    /// The counts of its VMs' keepers.
    fn kept_pages(&self) -> Vec<KeptPage> {
        Vec::new()
    }
    /// See [`Host::vm_start`] and, if that is forced, [`Host::vm_start_on_other_images`].
    fn vm_start(
        &self,
        definition: CheckedDefinition,
        request: StartRequest,
    ) -> Result<VmStatus, HostError>;
    /// See [`Host::vm_start_recorded`].
    fn vm_start_recorded(&self, name: &VmName) -> Result<VmStatus, HostError>;
    /// See [`Host::definition`].
    fn definition(&self, name: &VmName) -> Result<VmDefinition, HostError>;
    /// See [`Host::vm_stop`].
    fn vm_stop(&self, name: &VmName, force: bool) -> Result<(), HostError>;
    /// See [`Host::vm_status`].
    fn vm_status(&self, name: &VmName) -> Result<VmStatus, HostError>;
    /// See [`Host::protect`].
    fn protect(&self, name: &VmName, request: ProtectRequest) -> Result<VmStatus, HostError>;
    /// See [`Host::protect_as_wished`].
    fn protect_again(&self, name: &VmName, request: AgainRequest) -> Result<VmStatus, HostError>;
    /// See [`Host::protect_group`].
    fn protect_group(
        &self,
        name: &GroupName,
        request: GroupRequest,
    ) -> Result<Vec<VmStatus>, HostError>;
    /// See [`Host::unprotect`].
    fn unprotect(&self, name: &VmName) -> Result<VmStatus, HostError>;
    /// See [`Host::failover`].
    fn failover(&self, name: &VmName) -> Result<(), HostError>;
    /// See [`Host::replace_keeper`].
    fn replace_keeper(&self, name: &VmName) -> Result<KeeperReplacement, HostError> {
        let message = format!("{name} has no keeper here");
        Err(HostError::new(ErrorKind::Conflict, message))
    }
    /// See [`Host::change_medium`].
    fn change_medium(&self, name: &VmName, request: MediumRequest) -> Result<VmStatus, HostError>;
    /// See [`Host::recover`].
    fn recover(&self, name: &VmName, request: RecoverRequest) -> Result<RecoverReport, HostError>;
    /// See [`Host::timings`].
    fn timings(&self, name: &VmName) -> Result<Vec<CheckpointTiming>, HostError>;
    /// See [`Host::verify_lockstep`].
    fn verify_lockstep(&self, name: &VmName) -> Result<ComparisonReport, HostError>;
    /// See [`Host::may_name_store`].
    fn may_name_store(&self, store: &str) -> Result<(), HostError>;
    /// See [`Host::snapshot_vm`] and [`Host::snapshot_cluster`].
    fn snapshot(
        &self,
        what: &Subject,
        asked: &SnapshotRequest,
    ) -> Result<SnapshotReport, HostError>;
    /// See [`Host::restore_vm`] and [`Host::restore_cluster`].
    fn restore(&self, what: &Subject, asked: &RestoreRequest) -> Result<RestoreReport, HostError>;
    /// See [`Host::snapshots_of`]; without a group those of all that the host knows.
    fn snapshots(
        &self,
        group: Option<&GroupName>,
        store: Option<&str>,
    ) -> Result<Vec<SnapshotReport>, HostError>;
    /// See [`Host::delete_snapshot`].
    fn delete_snapshot(
        &self,
        group: &GroupName,
        number: SnapshotNumber,
        store: Option<&str>,
        force: bool,
    ) -> Result<DeleteReport, HostError>;
    /// See [`Host::verify_snapshot`].
    fn verify_snapshot(
        &self,
        group: &GroupName,
        number: Option<SnapshotNumber>,
        store: Option<&str>,
    ) -> Result<VerifyReport, HostError>;
}

impl Control for Arc<Host> {
    fn status(&self) -> HostStatus {
        Host::status(self)
    }
    fn upgrade_plan(&self) -> UpgradePlan {
        Host::upgrade_plan(self)
    }
    fn events(&self) -> Journal {
        Host::events(self)
    }
    fn meters(&self) -> Meters {
        Host::meters(self)
    }
    fn vm_start(
        &self,
        definition: CheckedDefinition,
        request: StartRequest,
    ) -> Result<VmStatus, HostError> {
        match request.force {
            false => Host::vm_start(self, definition),
            true => self.vm_start_on_other_images(&definition, request),
        }
    }
    fn vm_start_recorded(&self, name: &VmName) -> Result<VmStatus, HostError> {
        Host::vm_start_recorded(self, name)
    }
    fn definition(&self, name: &VmName) -> Result<VmDefinition, HostError> {
        Host::definition(self, name)
    }
    fn vm_stop(&self, name: &VmName, force: bool) -> Result<(), HostError> {
        Host::vm_stop(self, name, force)
    }
    fn vm_status(&self, name: &VmName) -> Result<VmStatus, HostError> {
        Host::vm_status(self, name)
    }
    fn protect(&self, name: &VmName, request: ProtectRequest) -> Result<VmStatus, HostError> {
        Host::protect(self, name, request)
    }
    fn protect_again(&self, name: &VmName, request: AgainRequest) -> Result<VmStatus, HostError> {
        self.protect_as_wished(name, &request.to)
    }
    fn protect_group(
        &self,
        name: &GroupName,
        request: GroupRequest,
    ) -> Result<Vec<VmStatus>, HostError> {
        Host::protect_group(self, name, request)
    }
    fn unprotect(&self, name: &VmName) -> Result<VmStatus, HostError> {
        Host::unprotect(self, name)
    }
    fn failover(&self, name: &VmName) -> Result<(), HostError> {
        Host::failover(self, name)
    }
    fn replace_keeper(&self, name: &VmName) -> Result<KeeperReplacement, HostError> {
        Host::replace_keeper(self, name)
    }
    fn change_medium(&self, name: &VmName, request: MediumRequest) -> Result<VmStatus, HostError> {
        Host::change_medium(self, name, request)
    }
    fn recover(&self, name: &VmName, request: RecoverRequest) -> Result<RecoverReport, HostError> {
        Host::recover(self, name, request)
    }
    fn timings(&self, name: &VmName) -> Result<Vec<CheckpointTiming>, HostError> {
        Host::timings(self, name)
    }
    fn verify_lockstep(&self, name: &VmName) -> Result<ComparisonReport, HostError> {
        Host::verify_lockstep(self, name)
    }
    fn may_name_store(&self, store: &str) -> Result<(), HostError> {
        Host::may_name_store(self, store)
    }
    fn snapshot(
        &self,
        what: &Subject,
        asked: &SnapshotRequest,
    ) -> Result<SnapshotReport, HostError> {
        match what {
            Subject::Vm(name) => self.snapshot_vm(name, asked),
            Subject::Cluster(name) => self.snapshot_cluster(name, asked),
        }
    }
    fn restore(&self, what: &Subject, asked: &RestoreRequest) -> Result<RestoreReport, HostError> {
        match what {
            Subject::Vm(name) => self.restore_vm(name, asked),
            Subject::Cluster(name) => self.restore_cluster(name, asked),
        }
    }
    fn snapshots(
        &self,
        group: Option<&GroupName>,
        store: Option<&str>,
    ) -> Result<Vec<SnapshotReport>, HostError> {
        match group {
            Some(group) => self.snapshots_of(group, store),
            None => self.all_snapshots(store),
        }
    }
    fn delete_snapshot(
        &self,
        group: &GroupName,
        number: SnapshotNumber,
        store: Option<&str>,
        force: bool,
    ) -> Result<DeleteReport, HostError> {
        Host::delete_snapshot(self, group, number, store, force)
    }
    fn verify_snapshot(
        &self,
        group: &GroupName,
        number: Option<SnapshotNumber>,
        store: Option<&str>,
    ) -> Result<VerifyReport, HostError> {
        Host::verify_snapshot(self, group, number, store)
    }
}
