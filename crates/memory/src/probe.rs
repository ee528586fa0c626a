//! The features of this host's kernel, found by using them.

use crate::mapping::SharedMapping;
use crate::{DirtySet, DirtyTracker, GuestRam, MemoryError, RamBlock, Reprotect, Userfaultfd};
use std::num::NonZeroUsize;
use std::process;
use std::sync::Arc;
use understudy_protocol::{PAGE_SIZE, PageIndex};

const PAGES: usize = 16;
const WRITTEN_PAGE: PageIndex = PageIndex(5);

/// The features of the kernel that tracking needs; each part is there, or an explanation why not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelSupport {
    /// userfaultfd can be created, with asynchronous write-protection of shared memory.
    pub wp_async_shmem: Result<(), String>,
    /// `PAGEMAP_SCAN` finds exactly a written page and protects it again.
    pub pagemap_scan: Result<(), String>,
}

impl KernelSupport {
    /// An error that names what is missing, if anything is.
    pub fn require(&self) -> Result<(), MemoryError> {
        let missing = [&self.wp_async_shmem, &self.pagemap_scan];
        match missing.into_iter().find_map(|part| part.as_ref().err()) {
            None => Ok(()),
            Some(reason) => Err(MemoryError::Kernel(reason.clone())),
        }
    }
}

/// Tries on a small piece of this process's memory what tracking a guest needs.
pub fn probe() -> KernelSupport {
    match Userfaultfd::of_this_process() {
        Ok(userfaultfd) => KernelSupport {
            wp_async_shmem: Ok(()),
            pagemap_scan: try_tracking(Arc::new(userfaultfd)),
        },
        Err(e) => KernelSupport {
            wp_async_shmem: Err(reason(e)),
            pagemap_scan: Err("not tried, as there is no userfaultfd for it".into()),
        },
    }
}

/// Tracks a mapping through two epochs with one write.
fn try_tracking(userfaultfd: Arc<Userfaultfd>) -> Result<(), String> {
    let first = track_one_write(userfaultfd).map_err(reason)?;
    match first {
        [1, 0] => Ok(()),
        [one, none] => Err(format!(
            "one page was written, but the scan after it found {one} and the next one {none}"
        )),
    }
}

/// Writes one page; gives how many pages two scans after that found.
fn track_one_write(userfaultfd: Arc<Userfaultfd>) -> Result<[u64; 2], MemoryError> {
    let bytes = NonZeroUsize::new(PAGES * PAGE_SIZE).ok_or(MemoryError::RamSize(0))?;
    let ram = Arc::new(GuestRam::create(bytes.get() as u64)?);
    let guest = SharedMapping::new(ram.fd(), bytes).map_err(|source| MemoryError::Ram {
        action: "cannot map",
        bytes: bytes.get() as u64,
        source,
    })?;
    let block = RamBlock::main("probe", guest.address(), ram);
    let pid = process::id() as i32;
    let mut tracker = DirtyTracker::attach(pid, userfaultfd, &[block], Reprotect::AtOnce)?;
    tracker.arm()?;
    guest.copy_in(WRITTEN_PAGE.byte_offset() as usize, &[1]);
    let mut dirty = DirtySet::new();
    tracker.scan(&mut dirty)?;
    let after_write = dirty.pages();
    tracker.scan(&mut dirty)?;
    let after_nothing = dirty.pages();
    tracker.detach()?;
    Ok([after_write, after_nothing])
}

/// The kernel's shortcoming alone, without the sentence that goes around it.
fn reason(error: MemoryError) -> String {
    match error {
        MemoryError::Kernel(reason) => reason,
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_kernel_tracks() {
        let support = probe();
        assert_eq!(support.wp_async_shmem, Ok(()));
        assert_eq!(support.pagemap_scan, Ok(()));
        assert!(support.require().is_ok());
    }

    #[test]
    fn a_kernel_without_the_features_is_refused_with_the_version_needed() {
        let support =
            KernelSupport { wp_async_shmem: Ok(()), pagemap_scan: Err("no PAGEMAP_SCAN".into()) };
        let message = support.require().unwrap_err().to_string();
        assert!(message.contains("6.7") && message.contains("no PAGEMAP_SCAN"), "{message}");
    }
}
