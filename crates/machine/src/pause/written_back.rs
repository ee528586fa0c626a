//! The check that a pause through the monitor has to make itself: `stop` and
//! `xen-save-devices-state` have the disks' formats write what they keep back, and say nothing if
//! that fails. The backup's guest would not find what it wrote.

use crate::Machine;
use anyhow::ensure;
use std::sync::Arc;
use understudy_disk::Disk;

/// Disks that are to get what QEMU keeps back of them, each with how many of QEMU's requests had failed before.
pub(crate) struct WrittenBack(Vec<(Arc<Disk>, u64)>);

impl WrittenBack {
    /// Notes earlier failures, before the guest is stopped. None for a machine whose formats keep
    /// nothing back.
    pub fn expect(machine: &Machine) -> Option<WrittenBack> {
        let before = |disk: Arc<Disk>| {
            let failures = disk.failures();
            (disk, failures)
        };
        let disks = || machine.disks().into_iter().map(before).collect();
        machine.definition().keeps_writes_back().then(|| WrittenBack(disks()))
    }

    /// Checks, once the state is saved, that no more failed. A request of the guest's own may have
    /// failed as well; then, too, the guest is better off where its disk is sound.
    pub fn check(&self) -> anyhow::Result<()> {
        for (disk, before) in &self.0 {
            ensure!(
                disk.failures() == *before,
                "disk{} failed while QEMU wrote what the disks' formats keep back; see this daemon's log",
                disk.index()
            );
        }
        Ok(())
    }
}
