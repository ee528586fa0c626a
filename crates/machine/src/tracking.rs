//! The pages that a protected guest has written: of main memory by QEMU's dirty log on KVM, else by
//! scans of the kernel's page tables (docs/decisions/001-dirty-tracking-on-kvm.md).

use anyhow::Context;
use std::sync::Arc;
use tracing::warn;
use understudy_memory::agent::AgentLink;
use understudy_memory::{DirtySet, DirtyTracker, RamBlock, Reprotect};
use understudy_protocol::{BlockId, PageIndex, PageRun, VmName};
use understudy_qemu::Accelerator;
use understudy_qemu::dirty_log::{DirtyLogError, LoggedBlock};
use understudy_qemu::pause::AgentPauser;

/// Sees every write to a machine's RAM blocks.
#[derive(Debug)]
pub enum Tracker {
    /// userfaultfd and `PAGEMAP_SCAN`.
    Scans(DirtyTracker),
    /// The same beside KVM's dirty log, through QEMU.
    Log(LogTracker),
}

impl Tracker {
    /// Begins to see every write, which is reported by the next [`Tracker::scan`].
    pub fn arm(&mut self) -> anyhow::Result<()> {
        match self {
            Tracker::Scans(tracker) => Ok(tracker.arm()?),
            Tracker::Log(tracker) => tracker.arm(),
        }
    }

    /// Finds the pages written since the last scan; `dirty` is emptied first. A page that is
    /// written again is found again, also if it was written during the scan.
    pub fn scan(&mut self, dirty: &mut DirtySet) -> anyhow::Result<()> {
        match self {
            Tracker::Scans(tracker) => Ok(tracker.scan(dirty)?),
            Tracker::Log(tracker) => tracker.scan(dirty),
        }
    }

    /// The same of main memory alone, for a pre-copy round while the guest runs: the pause finds the rest.
    pub fn scan_before(&mut self, dirty: &mut DirtySet) -> anyhow::Result<()> {
        match self {
            Tracker::Scans(tracker) => Ok(tracker.scan_before(dirty)?),
            Tracker::Log(tracker) => tracker.scan_before(dirty),
        }
    }

    /// The approximate number of pages that the next scan will find.
    pub fn count(&mut self) -> anyhow::Result<u64> {
        match self {
            Tracker::Scans(tracker) => Ok(tracker.count()?),
            Tracker::Log(tracker) => tracker.count(),
        }
    }
}

/// QEMU's dirty log of a machine's main memory, which ends with this, and scans of its other blocks:
/// what QEMU's flash writes to its own, the variables of UEFI, is in no log.
#[derive(Debug)]
pub struct LogTracker {
    agent: Arc<AgentPauser>,
    main: BlockId,
    others: DirtyTracker,
}

impl LogTracker {
    /// Begins with a log of the main memory, the first of `blocks`, for which the agent was armed.
    /// None, with a word about it, if QEMU keeps none.
    pub fn begin(
        vm: &VmName,
        pauser: &Arc<AgentPauser>,
        link: &AgentLink,
        blocks: &[RamBlock],
    ) -> anyhow::Result<Option<LogTracker>> {
        let (main, others) = blocks.split_first().context("a machine without memory")?;
        let userfaultfd = link.userfaultfd().clone();
        let others = DirtyTracker::attach(link.pid(), userfaultfd, others, Reprotect::Runs)?;
        match pauser.begin_dirty_log() {
            Ok(()) => {}
            Err(reason @ DirtyLogError::None(_)) => {
                warn!(%vm, "written pages are found by scans, which cost a guest on KVM more: {reason}");
                return Ok(None);
            }
            Err(error) => return Err(error).context("cannot begin QEMU's dirty log"),
        }
        Ok(Some(LogTracker { agent: pauser.clone(), main: main.id(), others }))
    }

    fn arm(&mut self) -> anyhow::Result<()> {
        self.collect()?;
        self.agent.take_dirty_log(|_, _, _| ());
        Ok(self.others.arm()?)
    }

    fn scan(&mut self, dirty: &mut DirtySet) -> anyhow::Result<()> {
        self.others.scan(dirty)?;
        self.add_logged(dirty)
    }

    fn scan_before(&mut self, dirty: &mut DirtySet) -> anyhow::Result<()> {
        dirty.clear();
        self.add_logged(dirty)
    }

    fn add_logged(&mut self, dirty: &mut DirtySet) -> anyhow::Result<()> {
        self.collect()?;
        self.agent.take_dirty_log(|_, first, count| {
            dirty.push(PageRun { block: self.main, first: PageIndex(first), count });
        });
        Ok(())
    }

    fn count(&mut self) -> anyhow::Result<u64> {
        self.collect()?;
        Ok(self.agent.count_dirty_log() + self.others.count()?)
    }

    fn collect(&self) -> anyhow::Result<()> {
        self.agent.collect_dirty_log().context("QEMU's dirty log")
    }
}

impl Drop for LogTracker {
    fn drop(&mut self) {
        if let Err(error) = self.agent.end_dirty_log() {
            // Most likely QEMU has ended.
            tracing::debug!("end of the dirty log: {error}");
        }
    }
}

/// The blocks whose writes QEMU is to log: main memory, the first one, on KVM.
pub(crate) fn logged(accelerator: Accelerator, blocks: &[RamBlock]) -> Vec<LoggedBlock> {
    match accelerator {
        // QEMU's translator notes writes in ways of its own: no gain over scans.
        Accelerator::Tcg => Vec::new(),
        Accelerator::Kvm => main_memory(blocks).into_iter().collect(),
    }
}

/// The block that the agent is armed with for [`LogTracker::begin`].
pub fn main_memory(blocks: &[RamBlock]) -> Option<LoggedBlock> {
    let main = blocks.first()?;
    Some(LoggedBlock { address: main.address_in_qemu(), pages: main.pages() })
}
