//! Memory that is filled while the guest runs on it: whoever touches a page that has no content
//! yet waits until it has (HotRestore, LISA '14).

use crate::fault::{Access, Fault, FaultThread, Told};
use crate::kernel::AddressRange;
use crate::{FaultDescriptor, MemoryError, RamBlock};
use std::sync::Arc;
use understudy_protocol::{PAGE_SIZE, PageIndex};

/// The state of a page without content that the guest touches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// The page is zero.
    Zero,
    /// The page has got its content meanwhile.
    Filled,
    /// Content that will be filled in: until then the guest waits.
    Coming,
}

/// Has accesses to pages without content wait.
///
/// Dropped before [`DemandPager::finish`], it leaves them waiting for good: a guest that found
/// zeros in the place of its memory would go on with them. End QEMU then.
#[derive(Debug)]
pub struct DemandPager {
    faults: Arc<FaultDescriptor>,
    range: AddressRange,
    thread: FaultThread,
}

impl DemandPager {
    /// Creates the pager of `main`, QEMU's main memory. From here on only [`DemandPager::fill`] may
    /// fill it, and nobody may read it through another mapping, which would make zeros of what is
    /// missing. Before the device state is loaded. `demand` is asked for each page that is touched,
    /// on a thread of its own, and must not wait for what it asks for.
    pub fn attach(
        faults: &Arc<FaultDescriptor>,
        main: &RamBlock,
        mut demand: impl FnMut(PageIndex) -> Missing + Send + 'static,
    ) -> Result<DemandPager, MemoryError> {
        let range =
            AddressRange { start: main.address_in_qemu(), bytes: main.pages() * PAGE_SIZE as u64 };
        let descriptor = Arc::clone(faults);
        let answer = move |fault: Fault| {
            let page = AddressRange { start: fault.address, bytes: PAGE_SIZE as u64 };
            let index = PageIndex((fault.address - range.start) / PAGE_SIZE as u64);
            let answered = match fault.access {
                Access::Missing => match demand(index) {
                    Missing::Zero => descriptor.fill_zero(page),
                    Missing::Filled => descriptor.wake(page),
                    Missing::Coming => Ok(()),
                },
                _ => descriptor.wake(page),
            };
            if let Err(error) = answered {
                // Not woken: it would find zeros. Most likely QEMU has ended.
                tracing::warn!("the guest waits for page {index}: {error}");
            }
        };
        let thread = FaultThread::start(faults, answer)?;
        let pager = DemandPager { faults: Arc::clone(faults), range, thread };
        let registered = pager.faults.register(range, Told::Missing);
        registered.map_err(|source| match source.raw_os_error() {
            Some(libc::EBUSY) => MemoryError::FaultsTaken,
            _ => MemoryError::Faults { call: "UFFDIO_REGISTER", source },
        })?;
        // Whoever has asked a daemon that died asks again.
        let woken = pager.faults.wake(range);
        woken.map_err(|source| MemoryError::Faults { call: "UFFDIO_WAKE", source })?;
        Ok(pager)
    }

    /// Fills whole pages from `first` on and lets go on who waits for them. Pages that have
    /// content keep it.
    pub fn fill(&self, first: PageIndex, content: &[u8]) -> Result<(), MemoryError> {
        assert_eq!(content.len() % PAGE_SIZE, 0, "memory is filled in whole pages");
        let offset = first.byte_offset();
        let inside =
            offset.checked_add(content.len() as u64).is_some_and(|end| end <= self.range.bytes);
        assert!(inside, "page {first} lies outside main memory");
        let filled = self.faults.fill(self.range.start + offset, content);
        filled.map_err(|source| MemoryError::Faults { call: "UFFDIO_COPY", source })
    }

    /// All that is not zero is filled: what is missing is zero, and nobody waits any more.
    pub fn finish(self) -> Result<(), MemoryError> {
        let ended = self.faults.unregister(self.range);
        // It answers what came in meanwhile; then nobody can come any more.
        drop(self.thread);
        let woken = self.faults.wake(self.range);
        ended.and(woken).map_err(|source| MemoryError::Faults { call: "UFFDIO_UNREGISTER", source })
    }
}
