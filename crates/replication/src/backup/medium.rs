//! A medium that the primary puts into a drive: looked at when it asks, put in when the epoch of
//! the change is applied. What it has not asked for never gets in.

use super::activation::Readiness;
use super::failure::OwnFailure;
use super::session::Session;
use crate::medium::{Medium, MediumAnswer};
use crate::messages::ToPrimary;
use crate::resync;
use anyhow::{Context, bail, ensure};
use std::collections::VecDeque;
use std::mem;
use std::sync::Arc;
use understudy_disk::mirror_path;
use understudy_protocol::Epoch;
use understudy_threads::{lock, spawn};

/// The most media on their way, of which each is open. The primary waits for each change until that
/// is committed.
const MOST_COMING: usize = 16;

/// The first epoch of a session that is applied as a whole.
pub(super) const FIRST: Epoch = Epoch(1);

/// Media on their way into a drive, open as `T`.
pub(super) struct Media<T> {
    asked: Asked<T>,
    /// Media of epochs that are not applied yet, in their order.
    coming: VecDeque<(Medium, T)>,
}

/// The medium that the primary asked for last.
pub(super) enum Asked<T> {
    Nothing,
    /// The medium is being read.
    Reading,
    /// The medium is the one that is meant.
    Found(Medium, T),
}

impl<T> Default for Media<T> {
    fn default() -> Media<T> {
        Media { asked: Asked::Nothing, coming: VecDeque::new() }
    }
}

impl<T> Media<T> {
    /// Notes that one is about to be read; returns what was asked for before. None while another
    /// one is still read: a peer could have this host read as much as it likes.
    fn begin(&mut self) -> Option<Asked<T>> {
        match self.asked {
            Asked::Reading => None,
            _ => Some(mem::replace(&mut self.asked, Asked::Reading)),
        }
    }

    /// Notes that it was read.
    fn end(&mut self, found: Asked<T>) {
        self.asked = found;
    }

    /// The primary has put it in, which this host has found.
    fn put_in(&mut self, told: &Medium) -> anyhow::Result<()> {
        ensure!(self.coming.len() < MOST_COMING, "too many media are to be put in");
        match mem::replace(&mut self.asked, Asked::Nothing) {
            Asked::Found(asked, opened) if asked == *told => {
                self.coming.push_back((asked, opened));
                Ok(())
            }
            other => {
                self.asked = other;
                bail!("the primary put in a medium that it had not asked for");
            }
        }
    }

    /// The medium that the next change to be applied puts in.
    fn next(&mut self, told: &Medium) -> anyhow::Result<T> {
        let next = self.coming.pop_front().filter(|(medium, _)| medium == told);
        next.map(|(_, opened)| opened).context("a medium is to be put in that never came")
    }
}

impl Session {
    /// The primary asks whether this host has a medium. Reading it takes time, which the
    /// receiving thread does not have.
    pub(super) fn look_for_medium(self: &Arc<Self>, medium: Medium) -> anyhow::Result<()> {
        medium.check_drive(&self.machine())?;
        let Some(former) = lock(&self.present).orders.media.begin() else {
            let why = "it still reads the medium that was asked for before: try again in a while"
                .to_owned();
            self.say(&ToPrimary::MediumAnswer(MediumAnswer::Refused(why)));
            return Ok(());
        };
        // Not under the lock: that closes a file.
        drop(former);
        let session = self.clone();
        let look = move || {
            let (answer, found) = match session.find_medium(&medium) {
                Ok(opened) => (MediumAnswer::Ready, Asked::Found(medium, opened)),
                Err(error) => (MediumAnswer::Refused(format!("{error:#}")), Asked::Nothing),
            };
            lock(&session.present).orders.media.end(found);
            session.say(&ToPrimary::MediumAnswer(answer));
        };
        let begun = spawn(format!("medium-{}", self.vm), look).context("cannot start a thread");
        Ok(begun.map(drop).map_err(OwnFailure::other)?)
    }

    fn find_medium(&self, medium: &Medium) -> anyhow::Result<understudy_machine::Medium> {
        // Open before it is read: what is read is what will be put in.
        let opened = medium
            .open_for_peer(&self.machine(), &self.directory)
            .context("the medium must be at the same place there")?;
        medium.check()?;
        Ok(opened)
    }

    /// The primary's drive, which was checked, has another medium from an epoch on that is not whole yet.
    pub(super) fn take_medium(&self, epoch: Epoch, told: &Medium) -> anyhow::Result<()> {
        // Until that is applied, this host has its former images, and their record. A primary changes none while
        // it synchronises.
        ensure!(epoch > FIRST, "a medium is put in with the first epoch");
        match told.file {
            Some(_) => lock(&self.present).orders.media.put_in(told),
            None => Ok(()),
        }
    }

    /// The drive has another medium from here on. `ready` is what a take-over needs, if there is
    /// such.
    pub(super) fn change_medium(
        &self,
        told: &Medium,
        ready: Option<&mut Readiness>,
    ) -> anyhow::Result<()> {
        let machine = self.machine();
        let medium = match told.file {
            Some(_) => lock(&self.present).orders.media.next(told)?,
            None => told.open(&machine, &self.directory)?,
        };
        let index = usize::from(told.drive.0);
        let former = machine.disks()[index].path();
        machine.change_medium_of_standby(&medium)?;
        let changes = resync::create(&[medium.disk], &self.directory)?;
        if let (Some(ready), Some(map)) = (ready, changes.into_iter().next()) {
            ready.changes[index] = map;
        }
        let now = medium.defined;
        self.records.note_medium(&self.vm, told.drive, now)?;
        if former == mirror_path(&self.directory, told.drive) {
            // Nobody needs the copy of the medium that was in the drive first.
            std::fs::remove_file(&former)
                .with_context(|| format!("cannot remove {}", former.display()))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::medium::MediumFile;
    use understudy_protocol::DiskIndex;

    fn medium(name: &str) -> Medium {
        let file = MediumFile { path: name.into(), hash: "00".to_owned() };
        Medium { drive: DiskIndex(1), file: Some(file) }
    }

    fn found(media: &mut Media<u8>, name: &str, opened: u8) {
        assert!(media.begin().is_some());
        media.end(Asked::Found(medium(name), opened));
    }

    /// The file was once opened, as root, and never looked at.
    #[test]
    fn what_the_primary_has_not_asked_for_is_not_put_in() {
        let mut media = Media::default();
        assert!(media.put_in(&medium("/etc/shadow")).is_err());
        found(&mut media, "/srv/a.iso", 1);
        assert!(media.put_in(&medium("/etc/shadow")).is_err());
        media.put_in(&medium("/srv/a.iso")).unwrap();
        assert!(media.put_in(&medium("/srv/a.iso")).is_err(), "once");
        assert_eq!(media.next(&medium("/srv/a.iso")).unwrap(), 1);
        assert!(media.next(&medium("/srv/a.iso")).is_err(), "once");
    }

    /// The primary may ask for the next one while the epoch with the last is not applied.
    #[test]
    fn each_epoch_puts_in_what_was_found_for_it() {
        let mut media = Media::default();
        found(&mut media, "/srv/a.iso", 1);
        media.put_in(&medium("/srv/a.iso")).unwrap();
        found(&mut media, "/srv/b.iso", 2);
        assert_eq!(media.next(&medium("/srv/a.iso")).unwrap(), 1);
        media.put_in(&medium("/srv/b.iso")).unwrap();
        assert_eq!(media.next(&medium("/srv/b.iso")).unwrap(), 2);
        for _ in 0..MOST_COMING {
            found(&mut media, "/srv/c.iso", 3);
            media.put_in(&medium("/srv/c.iso")).unwrap();
        }
        found(&mut media, "/srv/c.iso", 3);
        assert!(media.put_in(&medium("/srv/c.iso")).is_err(), "all of them are open");
    }

    #[test]
    fn one_medium_is_read_at_a_time() {
        let mut media = Media::<u8>::default();
        assert!(media.begin().is_some() && media.begin().is_none());
        assert!(media.put_in(&medium("/srv/a.iso")).is_err());
        assert!(media.begin().is_none(), "it is still being read");
        media.end(Asked::Nothing);
        assert!(media.begin().is_some());
    }
}
