//! A medium that the primary puts into a drive: looked at when it asks, put in when the epoch of
//! the change is applied.

use super::activation::Readiness;
use super::session::Session;
use crate::medium::{Medium, MediumAnswer};
use crate::messages::{Piece, ToPrimary, WholeEpoch};
use crate::resync;
use anyhow::{Context, ensure};
use std::sync::Arc;
use understudy_disk::mirror_path;
use understudy_threads::{lock, spawn};

/// The changes of media in an epoch.
pub(super) fn media_of(epoch: &WholeEpoch) -> Vec<Medium> {
    let medium = |piece: &Piece<'static>| match piece {
        Piece::Medium(medium) => Some(medium.clone()),
        _ => None,
    };
    epoch.pieces.iter().filter_map(medium).collect()
}

impl Session {
    /// The primary asks whether this host has a medium. Reading it takes time, which the
    /// receiving thread does not have.
    pub(super) fn look_for_medium(self: &Arc<Self>, medium: Medium) -> anyhow::Result<()> {
        medium.check_drive(&self.machine())?;
        let session = self.clone();
        let look = move || {
            let answer = match session.find_medium(medium) {
                Ok(()) => MediumAnswer::Ready,
                Err(error) => MediumAnswer::Refused(format!("{error:#}")),
            };
            session.say(&ToPrimary::MediumAnswer(answer));
        };
        spawn(format!("medium-{}", self.vm), look).map(drop).context("cannot start a thread")
    }

    fn find_medium(&self, medium: Medium) -> anyhow::Result<()> {
        // Open before it is read: what is read is what will be put in.
        let opened = medium
            .open(&self.machine(), &self.directory)
            .context("the medium must be at the same place there")?;
        medium.check()?;
        let former = lock(&self.present).orders.medium.replace((medium, opened.disk));
        drop(former);
        Ok(())
    }

    /// The drive has another medium from here on. One that was looked at is open already.
    /// `ready` is what a take-over needs, if there is such.
    pub(super) fn change_medium(
        &self,
        told: &Medium,
        ready: Option<&mut Readiness>,
    ) -> anyhow::Result<()> {
        let machine = self.machine();
        told.check_drive(&machine)?;
        let mut medium = told.open(&machine, &self.directory)?;
        let found = lock(&self.present).orders.medium.take();
        if let (Some(_), Some((asked, disk))) = (&told.file, found) {
            ensure!(asked == *told, "the primary put in a medium that it had not asked for");
            medium = understudy_machine::Medium { disk, ..medium };
        }
        let index = usize::from(told.drive.0);
        let former = machine.disks()[index].path();
        machine.change_medium_of_standby(&medium)?;
        let changes = resync::create(&[medium.disk], &self.directory)?;
        if let (Some(ready), Some(map)) = (ready, changes.into_iter().next()) {
            ready.changes[index] = map;
        }
        let now = medium.defined;
        self.records.change(&self.vm, |record| record.definition.disks[index] = now)?;
        if former == mirror_path(&self.directory, told.drive) {
            // Nobody needs the copy of the medium that was in the drive first.
            std::fs::remove_file(&former)
                .with_context(|| format!("cannot remove {}", former.display()))?;
        }
        Ok(())
    }
}
