//! The host: every VM that this daemon runs or backs up.

use crate::config::HostConfig;
use crate::error::HostError;
use crate::report::{HostStatus, ProtectRequest, VmStatus};
use std::sync::Arc;
use understudy_qemu::VmDefinition;

/// One running daemon. All calls block; call them off the async threads.
pub struct Host {}

impl Host {
    /// Checks the machine, claims the state directory, listens for peers.
    pub fn start(_config: HostConfig) -> Result<Arc<Host>, HostError> {
        todo!()
    }
    /// Starts a VM on this host, unprotected.
    pub fn vm_start(&self, _definition: VmDefinition) -> Result<VmStatus, HostError> {
        todo!()
    }
    /// Stops a VM: ACPI power-off and a deadline, or at once with `force`.
    pub fn vm_stop(&self, _name: &str, _force: bool) -> Result<(), HostError> {
        todo!()
    }
    /// Starts protecting a VM; returns when the peer has accepted and the first
    /// synchronisation runs. `status` shows its progress.
    pub fn protect(&self, _name: &str, _request: ProtectRequest) -> Result<VmStatus, HostError> {
        todo!()
    }
    /// Ends protection on both hosts; the VM runs on here.
    pub fn unprotect(&self, _name: &str) -> Result<VmStatus, HostError> {
        todo!()
    }
    /// Planned fail-over: hands the VM to its backup without losing anything.
    /// Returns when the backup runs it.
    pub fn failover(&self, _name: &str) -> Result<(), HostError> {
        todo!()
    }
    /// One VM's status.
    pub fn vm_status(&self, _name: &str) -> Result<VmStatus, HostError> {
        todo!()
    }
    /// The last checkpoints' timings, oldest first (at most 4 096 are kept).
    pub fn timings(&self, _name: &str) -> Result<Vec<crate::report::CheckpointTiming>, HostError> {
        todo!()
    }
    /// Everything on this host.
    pub fn status(&self) -> HostStatus {
        todo!()
    }
    /// Ends every VM and backup of this daemon; nothing is left behind.
    pub fn shutdown(&self) {
        todo!()
    }
}
