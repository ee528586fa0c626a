//! Faults that stay: calm does not end them, and the VM works beside them.

use crate::host::{HostId, Role};
use crate::schedule::FOR_GOOD;
use crate::world::World;
use understudy_protocol::{BackupPhase, Time};

/// A part that fails for good, of the host that backs the VM up then, or between it and its
/// primary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lasting {
    /// The backup's disk takes nothing any more.
    FailedDisk,
    /// The backup's disk answers nothing any more.
    HungDisk,
    /// No message gets from one of both hosts to the other (true: to the backup).
    OneWay(bool),
    /// Heartbeats get through between them, and nothing larger.
    Hole,
}

/// The parts that have failed for good.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Lost {
    failed_disk: Option<HostId>,
    hung_disk: Option<HostId>,
    /// Way that is cut, from the first to the second.
    cut: Option<(HostId, HostId)>,
    hole: Option<(HostId, HostId)>,
}

impl Lost {
    pub(crate) fn is_any(&self) -> bool {
        let pairs = self.cut.or(self.hole);
        self.failed_disk.or(self.hung_disk).is_some() || pairs.is_some()
    }

    /// Whether a disk answers nothing.
    pub(crate) fn is_hung(&self) -> bool {
        self.hung_disk.is_some()
    }

    /// The host whose disk takes nothing any more.
    pub(crate) fn failed_disk(&self) -> Option<HostId> {
        self.failed_disk
    }
}

impl World {
    /// A backup that is about to run the VM is not struck: its guest would have the disk that has failed.
    pub(crate) fn lasts(&mut self, what: Lasting) {
        let (Some(primary), Some(backup)) = (self.primary_host(), self.following_host()) else {
            return;
        };
        self.coverage.lasting_faults += 1;
        let pair = (primary, backup);
        match what {
            Lasting::FailedDisk => self.lost.failed_disk = Some(backup),
            Lasting::HungDisk => {
                self.hosts[backup.0].disk_hangs_from = self.now;
                self.lost.hung_disk = Some(backup);
            }
            Lasting::OneWay(to_backup) => {
                self.lost.cut = Some(if to_backup { pair } else { (backup, primary) });
            }
            Lasting::Hole => self.lost.hole = Some(pair),
        }
        self.persist();
    }

    /// Calm has made good what does not stay.
    pub(crate) fn persist(&mut self) {
        if let Some(host) = self.lost.failed_disk {
            self.hosts[host.0].disk_fails = u32::MAX;
        }
        if let Some(host) = self.lost.hung_disk {
            self.hosts[host.0].disk_hangs_until = Time(FOR_GOOD);
        }
        if let Some((from, to)) = self.lost.cut.filter(|(from, to)| !self.is_cut(*from, *to)) {
            self.cut(from, to);
        }
    }

    /// A host whose disk cannot take an image stands by for nobody, and starts nothing.
    pub(crate) fn has_lost_its_disk(&self, host: HostId) -> bool {
        [self.lost.failed_disk, self.lost.hung_disk].contains(&Some(host))
    }

    /// Whether nothing large gets through between both.
    pub(crate) fn is_hole(&self, one: HostId, other: HostId) -> bool {
        let hole = self.lost.hole;
        hole == Some((one, other)) || hole == Some((other, one))
    }

    /// Whether one of both never hears the other again.
    pub(crate) fn never_talk(&self, one: HostId, other: HostId) -> bool {
        let cut = self.lost.cut;
        cut == Some((one, other)) || cut == Some((other, one))
    }

    fn following_host(&self) -> Option<HostId> {
        let follows = |host: &HostId| match &self.hosts[host.0].role {
            Role::Backup(standby) => {
                matches!(standby.core.phase(), BackupPhase::Syncing | BackupPhase::Standing)
            }
            _ => false,
        };
        (0..self.hosts.len()).map(HostId).find(follows)
    }
}
