//! The page over which pauses are arranged, as this process has it.

use super::PauseError;
use crate::dirty_log::LoggedBlock;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use nix::sys::stat::fstat;
use nix::unistd::ftruncate;
use std::io;
use std::num::NonZeroUsize;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::atomic::Ordering;
use understudy_agent_protocol::{Answer, DirtyArea, PausePage, area_bytes};

/// The mapping of a page in this process, and of the dirty log behind it.
#[derive(Debug)]
pub(super) struct Page {
    map: NonNull<PausePage>,
    bytes: NonZeroUsize,
    pub memfd: OwnedFd,
}

// SAFETY: the page has atomics only, for which any thread may hold the pointer.
unsafe impl Send for Page {}
// SAFETY: as above.
unsafe impl Sync for Page {}

impl Page {
    /// The bytes that a page takes with the log of these blocks.
    pub fn bytes(blocks: &[LoggedBlock]) -> NonZeroUsize {
        let pages: Vec<u64> = blocks.iter().map(|block| block.pages).collect();
        let page = NonZeroUsize::new(PausePage::BYTES).expect("a page has bytes");
        page.saturating_add(area_bytes(&pages))
    }

    pub fn create(blocks: &[LoggedBlock]) -> Result<Page, PauseError> {
        let bytes = Page::bytes(blocks);
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let memfd = memfd_create("understudy-pause", flags)?;
        ftruncate(&memfd, bytes.get() as i64)?;
        // QEMU must not be able to cut the page off from under this process.
        let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
        fcntl(&memfd, FcntlArg::F_ADD_SEALS(seals))?;
        let page = Page::of(memfd, bytes)?;
        page.dirty_blocks.store(blocks.len() as u32, Ordering::Relaxed);
        for (entry, block) in page.table(blocks.len()).blocks.iter().zip(blocks) {
            entry.address.store(block.address, Ordering::Relaxed);
            entry.pages.store(block.pages, Ordering::Relaxed);
        }
        Ok(page)
    }

    /// Maps one that was created, of this size.
    pub fn of(memfd: OwnedFd, bytes: NonZeroUsize) -> Result<Page, PauseError> {
        if fstat(&memfd)?.st_size != bytes.get() as i64 {
            return Err(io::Error::other("the page of pauses is that of another machine").into());
        }
        let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let map = unsafe { mmap(None, bytes, access, MapFlags::MAP_SHARED, &memfd, 0)? };
        Ok(Page { map: map.cast(), bytes, memfd })
    }

    pub fn table(&self, blocks: usize) -> DirtyArea<'_> {
        let behind = self.bytes.get() - PausePage::BYTES;
        // SAFETY: mapped as long until this is dropped, never shrunk, aligned as a page is; it is
        // accessed through atomics only.
        let area = unsafe {
            let start = self.map.cast::<u8>().add(PausePage::BYTES);
            DirtyArea::at(start.as_ptr(), behind, blocks)
        };
        area.expect("the page was made with room for the table")
    }

    /// Traces where the time of the last pause went, as QEMU's side saw it.
    pub fn trace(&self) {
        let stamp = |answer: Answer| self.stamps[answer as usize].load(Ordering::Relaxed);
        let micros = |from, to| stamp(to).saturating_sub(stamp(from)) / 1000;
        let rung = self.rung.load(Ordering::Relaxed);
        tracing::trace!(
            wake_us = stamp(Answer::None).saturating_sub(rung) / 1000,
            stop_us = micros(Answer::None, Answer::Stopped),
            save_us = micros(Answer::Stopped, Answer::Saved),
            rest_us = micros(Answer::Saved, Answer::Running),
            "a pause by the agent"
        );
    }
}

impl std::ops::Deref for Page {
    type Target = PausePage;

    fn deref(&self) -> &PausePage {
        // SAFETY: mapped until this is dropped, never shrunk, and valid whatever it contains.
        unsafe { self.map.as_ref() }
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: `of` mapped it; references to it do not outlive `self`.
        let _ = unsafe { munmap(self.map.cast(), self.bytes.get()) };
    }
}
