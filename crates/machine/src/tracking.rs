//! Which pages a protected guest has written: by QEMU's dirty log on KVM, else by scans of the
//! kernel's page tables (docs/decisions/001-dirty-tracking-on-kvm.md).

use anyhow::Context;
use std::sync::Arc;
use tracing::warn;
use understudy_memory::{DirtySet, DirtyTracker, RamBlock};
use understudy_protocol::{BlockId, PageIndex, PageRun, VmName};
use understudy_qemu::Accelerator;
use understudy_qemu::dirty_log::{DirtyLogError, LoggedBlock};
use understudy_qemu::pause::AgentPauser;

/// Sees every write to a machine's RAM blocks.
#[derive(Debug)]
pub enum Tracker {
    /// userfaultfd and `PAGEMAP_SCAN`.
    Scans(DirtyTracker),
    /// KVM's dirty log, through QEMU.
    Log(LogTracker),
}

impl Tracker {
    /// From now on every write is seen, and reported by the next [`Tracker::scan`].
    pub fn arm(&mut self) -> anyhow::Result<()> {
        match self {
            Tracker::Scans(tracker) => Ok(tracker.arm()?),
            Tracker::Log(tracker) => tracker.collect_and(|_, _, _| ()),
        }
    }

    /// Finds the pages written since the last scan; `dirty` is emptied first. A page that is
    /// written again is found again, also if it was written during the scan.
    pub fn scan(&mut self, dirty: &mut DirtySet) -> anyhow::Result<()> {
        match self {
            Tracker::Scans(tracker) => Ok(tracker.scan(dirty)?),
            Tracker::Log(tracker) => {
                dirty.clear();
                tracker.collect_and(|block, first, count| {
                    let block = tracker.ids[block];
                    dirty.push(PageRun { block, first: PageIndex(first), count });
                })
            }
        }
    }

    /// About how many pages the next scan will find.
    pub fn count(&mut self) -> anyhow::Result<u64> {
        match self {
            Tracker::Scans(tracker) => Ok(tracker.count()?),
            Tracker::Log(tracker) => {
                tracker.collect()?;
                Ok(tracker.agent.count_dirty_log())
            }
        }
    }
}

/// QEMU's dirty log of one machine; it ends with this.
#[derive(Debug)]
pub struct LogTracker {
    agent: Arc<AgentPauser>,
    /// Of the blocks, in the log's order.
    ids: Vec<BlockId>,
}

impl LogTracker {
    /// Begins a log of all `blocks`, with which the agent was armed. None, with a word about it,
    /// if QEMU keeps none.
    pub fn begin(
        vm: &VmName,
        agent: &Arc<AgentPauser>,
        blocks: &[RamBlock],
    ) -> anyhow::Result<Option<LogTracker>> {
        match agent.begin_dirty_log() {
            Ok(()) => {
                let ids = blocks.iter().map(RamBlock::id).collect();
                Ok(Some(LogTracker { agent: agent.clone(), ids }))
            }
            Err(reason @ DirtyLogError::None(_)) => {
                warn!(%vm, "written pages are found by scans, which cost a guest on KVM more: {reason}");
                Ok(None)
            }
            Err(error) => Err(error).context("cannot begin QEMU's dirty log"),
        }
    }

    fn collect(&self) -> anyhow::Result<()> {
        self.agent.collect_dirty_log().context("QEMU's dirty log")
    }

    fn collect_and(&self, found: impl FnMut(usize, u64, u64)) -> anyhow::Result<()> {
        self.collect()?;
        self.agent.take_dirty_log(found);
        Ok(())
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

/// The blocks whose writes QEMU is to log: all of a machine on KVM.
pub(crate) fn logged(accelerator: Accelerator, blocks: &[RamBlock]) -> Vec<LoggedBlock> {
    match accelerator {
        // QEMU's translator notes writes in ways of its own, which cost more than scans.
        Accelerator::Tcg => Vec::new(),
        Accelerator::Kvm => blocks
            .iter()
            .map(|block| LoggedBlock { address: block.address_in_qemu(), pages: block.pages() })
            .collect(),
    }
}
