//! Changes of a disk, one after the other, and who hears of them.

use super::{Disk, Order, WriteSink};
use crate::fail_points::fail_in_a_test;
use crate::image::Space;
use std::io;
use std::sync::Arc;
use understudy_protocol::DiskIndex;
use understudy_threads::MutexGuard;

impl Disk {
    /// Sends every write from now on to `sink` too, or to nobody. On return no call to
    /// the former sink is under way. Waits for a write that the device does not answer.
    pub fn set_sink(&self, sink: Option<Arc<dyn WriteSink>>) {
        let former = std::mem::replace(&mut self.lock_order().sink, sink);
        // Outside the lock: dropping it may take long.
        drop(former);
    }

    /// Removes a sink that is [closed](WriteSink::is_closed), however late: another one that has come since
    /// stays.
    pub fn remove_closed_sink(&self) {
        let former = self.lock_order().sink.take_if(|sink| sink.is_closed());
        drop(former);
    }

    /// Finds out whether the disk still takes what is written, of which a guest that writes nothing
    /// tells nothing. Not one bit of it changes; what the device says of it the next sync tells.
    ///
    /// # Errors
    /// What a write of the guest would end in.
    pub fn prove_writable(&self) -> io::Result<()> {
        let _order = self.lock_order();
        fail_in_a_test("write-disk")?;
        self.image.write_again()
    }
}

/// The right to write: while it is held, nobody else changes the image or calls the sink.
pub(crate) struct Ordered<'a> {
    pub(super) disk: &'a Disk,
    pub(super) order: MutexGuard<'a, Order>,
}

impl Ordered<'_> {
    pub(crate) fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.disk.check_range(offset, data.len() as u64)?;
        self.begin(offset, data.len() as u64)?;
        let write = || {
            fail_in_a_test("write-disk")?;
            fail_one_in_a_test(self.disk.index)?;
            self.disk.image.write(offset, data)
        };
        self.change(offset, data.len() as u64, write)?;
        if let Some(sink) = &self.order.sink {
            sink.write(self.disk.index, offset, data);
        }
        Ok(())
    }

    pub(crate) fn zero(&mut self, offset: u64, len: u64, space: Space) -> io::Result<()> {
        self.disk.check_range(offset, len)?;
        if len == 0 {
            return Ok(());
        }
        self.begin(offset, len)?;
        self.change(offset, len, || self.disk.image.zero(offset, len, space))?;
        self.mirror_zero(offset, len);
        Ok(())
    }

    pub(crate) fn trim(&mut self, offset: u64, len: u64) -> io::Result<()> {
        if self.disk.reads().must_agree() {
            // Another host's guest reads the same range, and may have another file system.
            return self.zero(offset, len, Space::Release);
        }
        self.disk.check_range(offset, len)?;
        if self.is_held(offset, len) {
            return Ok(());
        }
        self.begin(offset, len)?;
        let punched = self.disk.image.punch(offset, len);
        if punched.inspect_err(|_| self.keep(offset, len))? {
            self.mirror_zero(offset, len);
        }
        Ok(())
    }

    /// Whether giving space back would mean copying it for a snapshot first, gigabytes perhaps,
    /// or a restore is under way. A guest that trims does not care.
    fn is_held(&self, offset: u64, len: u64) -> bool {
        let needed = self.order.capture.as_ref().is_some_and(|capture| capture.needs(offset, len));
        needed || self.disk.absent().is_some()
    }

    fn change(
        &self,
        offset: u64,
        len: u64,
        change: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<()> {
        let changed = match self.disk.absent() {
            Some(absent) => absent.overwrite(offset, len, change),
            None => change(),
        };
        changed.inspect_err(|_| self.keep(offset, len))
    }

    /// Keeps the marks of what failed: it may have been done in part.
    fn keep(&self, offset: u64, len: u64) {
        if let Some(changes) = self.disk.changes() {
            self.disk.counted(|| changes.keep(offset, len));
        }
    }

    fn begin(&mut self, offset: u64, len: u64) -> io::Result<()> {
        self.disk.await_edges(offset, len)?;
        if let Some(changes) = self.disk.changes() {
            self.disk.counted(|| changes.mark(offset, len))?;
        }
        if let Some((_, changed)) = &mut self.order.since_base {
            changed.insert(changed.touched(offset, len));
        }
        if let Some(capture) = &self.order.capture {
            capture.before_change(self.disk, offset, len);
        }
        if let Some(sink) = &self.order.sink {
            sink.begin(self.disk.index, offset, len);
        }
        Ok(())
    }

    fn mirror_zero(&self, offset: u64, len: u64) {
        if let Some(sink) = &self.order.sink {
            sink.zero(self.disk.index, offset, len);
        }
    }

    /// Whether writes are mirrored at present.
    pub(crate) fn has_sink(&self) -> bool {
        self.order.sink.is_some()
    }
}

/// A test makes writes of one disk fail for as long as the fail point's file has its number.
fn fail_one_in_a_test(_disk: DiskIndex) -> io::Result<()> {
    fail::fail_point!("write-one-disk", |file| {
        let wanted = std::fs::read_to_string(file.unwrap_or_default()).unwrap_or_default();
        match wanted == _disk.to_string() {
            true => Err(nix::errno::Errno::EIO.into()),
            false => Ok(()),
        }
    });
    Ok(())
}
